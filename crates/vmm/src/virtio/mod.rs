//! Virtio devices over MMIO: disks, vsock, entropy, network.
//!
//! The room for what the guest sees of its devices and for the one thread that serves them. What may not enter: KVM
//! beyond two registrations, ACPI, the order in which a VM is paused and saved (the core has that), disk formats
//! ([`crate::disk`]).
//!
//! Who touches what:
//!
//! - **A vCPU** reads and writes registers ([`DeviceSet::mmio_read`], [`DeviceSet::mmio_write`]). InterruptStatus and
//!   InterruptACK are free of locks; all else takes its device's lock, which the device thread holds while it serves
//!   that device, so a reset returns when nothing is in flight. Kicks do not come here: KVM writes an eventfd.
//! - **The device thread** ([`DeviceSet::run_loop`]) sleeps in epoll, and passes the [`gate`] before it touches
//!   anything.
//! - **The control thread** pauses, saves, loads, freezes. Its calls take the device's locks too, so a vCPU that still
//!   runs cannot tear what is saved, but what is saved is one instant of the whole only if the vCPUs stand.
//!
//! Order of locks: gate's state, then one device, then the page map; never two devices.

mod block;
#[cfg(test)]
mod block_tests;
mod bucket;
mod event_loop;
mod gate;
mod interrupt;
mod net;
#[cfg(test)]
mod page_map_tests;
mod ring;
mod rng;
mod slot;
mod state;
mod syscalls;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod transport;
#[cfg(test)]
mod transport_tests;
mod vsock;

pub use crate::disk::{DiskSpec, LayerSpec};
pub use block::DiskCounters;
pub use net::NetCounters;
pub use ring::Broken;
pub use state::{DeviceState, DeviceStates, KindState, LoadError};
pub use syscalls::{CONTROL_SYSCALLS, DEVICE_LOOP_SYSCALLS, VCPU_SYSCALLS};
pub use transport::{QueueRegisters, TransportState, TransportStateError};
pub use vsock::socket_path;

use crate::config::LinkConfig;
use crate::disk::page_map::{self, PageMap};
use crate::disk::{Disk, FreezeError, OpenDiskError};
use crate::memory::writes::Writes;
use block::Block;
use gate::{Gate, lock};
use kvm_ioctls::{IoEventAddress, VmFd};
use net::Net;
use slot::{Kind, Slot};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vsock::Vsock;

/// Guest physical address of the first device.
pub const MMIO_BASE: u64 = 0xd000_0000;
/// Bytes of address space of each device.
pub const MMIO_SIZE: u64 = 0x1000;
/// The first device's interrupt; one each, edge-triggered.
pub const FIRST_GSI: u32 = 10;
/// The longest path of a unix socket, the port's suffix included (`sun_path` less its final zero).
const MAX_SOCKET_PATH: usize = 107;

/// The vsock device.
#[derive(Debug)]
pub struct VsockSpec {
    /// A listening unix stream socket.
    pub listener: OwnedFd,
    /// The guest's connections to port P of CID 2 go to `<path>_<P>`.
    pub path: PathBuf,
    /// The guest's context id.
    pub guest_cid: u32,
}

/// Where a device is, for ACPI: device `LNRO0005`, edge-triggered, active high, not shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmioSlot {
    /// Guest physical address.
    pub base: u64,
    /// Bytes.
    pub size: u64,
    /// Interrupt.
    pub gsi: u32,
}

/// Why devices could not be made or served.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Another number of disks than the VM was made for.
    #[error("disks: expected {expected}, got {got}")]
    Disks {
        /// Disks of this VM.
        expected: usize,
        /// Media.
        got: usize,
    },
    /// No such disk.
    #[error("disk {number}: expected one below {expected}")]
    NoDisk {
        /// Which was asked for, from 0.
        number: usize,
        /// Disks of this VM.
        expected: usize,
    },
    /// There is no network device.
    #[error("connect: expected a network device, this VM has none")]
    NoNet,
    /// A disk was refused.
    #[error("disk {number}: {source}")]
    Disk {
        /// Which, from 0.
        number: usize,
        /// Why.
        source: OpenDiskError,
    },
    /// The vsock path leaves no room for a port.
    #[error("vsock path {path:?}: expected at most {max} bytes")]
    VsockPath {
        /// The path.
        path: PathBuf,
        /// The limit in bytes.
        max: usize,
    },
    /// The host refused.
    #[error("{what}")]
    Host {
        /// What was done.
        what: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Saved state was refused.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A layer was not frozen; no layer of any disk was.
    #[error("disk {number}: {source}")]
    Freeze {
        /// Which, from 0.
        number: usize,
        /// Why.
        source: FreezeError,
    },
    /// Another number of files than of writable disks.
    #[error("freeze: expected files for {expected} writable disks, got {got}")]
    FreezeCount {
        /// Writable disks.
        expected: usize,
        /// Pairs of files.
        got: usize,
    },
    /// Devices must stand for this.
    #[error("{0}: the devices are not paused")]
    NotPaused(&'static str),
}

fn host(what: impl Into<String>) -> impl FnOnce(io::Error) -> DeviceError {
    let what = what.into();
    move |source| DeviceError::Host { what, source }
}

/// How a device fares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    /// The virtio device id: 1 network, 2 block, 4 entropy, 19 vsock.
    pub device_id: u32,
    /// Why it needs a reset, if the driver broke a rule since the last one.
    pub broken: Option<Broken>,
    /// For a disk: requests that failed.
    pub disk: Option<DiskCounters>,
    /// For a network device: what went through.
    pub net: Option<NetCounters>,
}

/// All virtio devices of a VM.
///
/// It is born running: requests are served as soon as [`Self::run_loop`] runs.
#[derive(Debug)]
pub struct DeviceSet {
    mem: GuestMemoryMmap,
    pages: Mutex<PageMap>,
    writes: Writes,
    slots: Vec<Slot>,
    epoll: Arc<Epoll>,
    wake: EventFd,
    gate: Gate,
    /// State was loaded: interrupts may have been lost since it was saved.
    loaded: AtomicBool,
}

impl DeviceSet {
    /// Makes the devices, in this order: disks without media, vsock, rng, network without links; and registers their kicks and interrupts with a VM
    /// whose interrupt controller exists.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn new(
        mem: GuestMemoryMmap,
        disks: u8,
        nets: u8,
        vsock: VsockSpec,
        vm: &VmFd,
    ) -> Result<Arc<Self>, DeviceError> {
        let set = Self::without_vm(mem, disks, nets, vsock)?;
        for (slot, place) in set.slots.iter().zip(set.slots()) {
            let notify = IoEventAddress::Mmio(place.base + transport::register::QUEUE_NOTIFY);
            for (queue, kick) in slot.fast_kicks() {
                let what = || format!("KVM_IOEVENTFD at {:#x}, queue {queue}", place.base);
                vm.register_ioevent(kick, &notify, queue).map_err(|e| host(what())(e.into()))?;
            }
            let what = || format!("KVM_IRQFD for interrupt {}", place.gsi);
            vm.register_irqfd(slot.interrupt().line(), place.gsi).map_err(|e| host(what())(e.into()))?;
        }
        Ok(Arc::new(set))
    }

    /// The devices alone, for tests: without a VM kicks come as register writes.
    fn without_vm(mem: GuestMemoryMmap, disks: u8, nets: u8, vsock: VsockSpec) -> Result<Self, DeviceError> {
        let VsockSpec { listener, path, guest_cid } = vsock;
        let longest = vsock::socket_path(&path, u32::MAX).as_os_str().len();
        if longest > MAX_SOCKET_PATH {
            let max = MAX_SOCKET_PATH - (longest - path.as_os_str().len());
            return Err(DeviceError::VsockPath { path, max });
        }
        rustix::io::ioctl_fionbio(&listener, true).map_err(|e| host("vsock listener: FIONBIO")(e.into()))?;
        let epoll = Arc::new(Epoll::new().map_err(host("epoll_create1"))?);
        let watch = |fd: i32, events: EventSet, token: u64| {
            let event = EpollEvent::new(events, token);
            epoll.ctl(ControlOperation::Add, fd, event).map_err(host("epoll_ctl of a device's descriptor"))
        };
        watch(listener.as_raw_fd(), EventSet::IN | EventSet::EDGE_TRIGGERED, event_loop::LISTENER)?;

        let mut slots = Vec::with_capacity(usize::from(disks) + 2 + usize::from(nets));
        for number in 0..usize::from(disks) {
            slots.push(Slot::new(Kind::Block(Block::new(Disk::none(), number)))?);
        }
        let vsock = Vsock::new(guest_cid, listener, path, Arc::clone(&epoll), event_loop::FIRST_SOCKET);
        slots.push(Slot::new(Kind::Vsock(vsock))?);
        slots.push(Slot::new(Kind::Rng)?);
        for _ in 0..nets {
            slots.push(Slot::new(Kind::Net(Net::new(Arc::clone(&epoll))))?);
        }

        for (number, slot) in slots.iter().enumerate() {
            for (queue, kick) in slot.kicks().iter().enumerate() {
                watch(kick.as_raw_fd(), EventSet::IN, event_loop::kick_token(number, queue))?;
            }
        }
        let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(host("eventfd2"))?;
        watch(wake.as_raw_fd(), EventSet::IN, event_loop::WAKE)?;
        let (pages, gate, loaded) = (Mutex::new(PageMap::new(&mem)), Gate::default(), AtomicBool::new(false));
        let writes = Writes::default();
        Ok(Self { mem, pages, writes, slots, epoll, wake, gate, loaded })
    }

    /// Puts the media into the disks, vda, vdb, …; returns how many are writable. Before the guest runs.
    ///
    /// # Errors
    /// [`DeviceError`]; the devices are then of no use.
    pub fn insert_disks(&self, specs: Vec<DiskSpec>) -> Result<usize, DeviceError> {
        let (expected, got) = (self.slots.iter().filter(|slot| slot.is_disk()).count(), specs.len());
        if expected != got {
            return Err(DeviceError::Disks { expected, got });
        }
        let mut writable = 0;
        for (number, (slot, spec)) in self.slots.iter().zip(specs).enumerate() {
            let disk = Disk::open(spec).map_err(|source| DeviceError::Disk { number, source })?;
            writable += usize::from(!disk.read_only());
            slot.insert(Block::new(disk, number));
        }
        Ok(writable)
    }

    /// Joins the network device to a tap, whose header has [`net::HEADER_BYTES`] and which does not block; without one, and before, whatever the guest sends is
    /// lost.
    ///
    /// # Errors
    /// [`DeviceError::NoNet`].
    pub fn connect(&self, config: &LinkConfig, tap: Option<OwnedFd>) -> Result<(), DeviceError> {
        let mut nets = self.slots.iter().filter(|slot| slot.is_net());
        let connected = nets.next().is_some_and(|slot| slot.connect(config, tap));
        if connected { Ok(()) } else { Err(DeviceError::NoNet) }
    }

    /// Where the devices are, in their order.
    #[must_use]
    pub fn slots(&self) -> Vec<MmioSlot> {
        let place = |(n, _)| MmioSlot {
            base: MMIO_BASE + u64::from(n) * MMIO_SIZE,
            size: MMIO_SIZE,
            gsi: FIRST_GSI + n,
        };
        (0_u32..).zip(&self.slots).map(place).collect()
    }

    /// The device at `addr`, and the offset in it.
    fn find(&self, addr: u64) -> Option<(&Slot, u64)> {
        let offset = addr.checked_sub(MMIO_BASE)?;
        let slot = self.slots.get(usize::try_from(offset / MMIO_SIZE).ok()?)?;
        Some((slot, offset % MMIO_SIZE))
    }

    /// A vCPU's read; `false`: no device is there, and `data` is as it was.
    pub fn mmio_read(&self, addr: u64, data: &mut [u8]) -> bool {
        let Some((slot, offset)) = self.find(addr) else {
            return false;
        };
        slot.read(offset, data);
        true
    }

    /// A vCPU's write; `false`: no device is there. What the driver may not write is ignored.
    pub fn mmio_write(&self, addr: u64, data: &[u8]) -> bool {
        let Some((slot, offset)) = self.find(addr) else {
            return false;
        };
        slot.write(&self.mem, offset, data);
        true
    }

    fn wake(&self) {
        // Fails only where the counter is at its end, and then the thread is awake already.
        let _ = self.wake.write(1);
    }

    /// Returns when no request is in flight; none is begun until [`Self::resume`]. Idempotent.
    pub fn pause(&self) {
        self.gate.pause();
    }

    /// Goes on, with what arrived in the meantime. Idempotent.
    pub fn resume(&self) {
        self.gate.resume();
    }

    /// Ends [`Self::run_loop`].
    pub fn stop(&self) {
        self.gate.stop();
        self.wake();
    }

    /// What has to be saved of every device but the layers of its disk.
    ///
    /// The vCPUs and the devices are paused.
    #[must_use]
    pub fn save(&self) -> DeviceStates {
        DeviceStates { devices: self.slots.iter().map(Slot::save).collect() }
    }

    /// Takes saved state over: checks all of it, then changes all devices.
    ///
    /// Guest memory has its content already. The devices are paused, or [`Self::run_loop`] was not called yet; resume
    /// or call it when the interrupt controller has its state too. Then every queue is looked at, whether or not it
    /// was kicked, interrupts that the driver has not acknowledged are raised again, and the guest is told that its
    /// vsock connections are gone.
    ///
    /// # Errors
    /// [`LoadError`]; the devices are as they were.
    pub fn load(&self, states: &DeviceStates) -> Result<(), DeviceError> {
        let (expected, got) = (self.slots.len(), states.devices.len());
        if expected != got {
            return Err(LoadError::Count { expected, got }.into());
        }
        let checked: Result<Vec<_>, LoadError> = (0..)
            .zip(&self.slots)
            .zip(&states.devices)
            .map(|((number, slot), state)| slot.check(&self.mem, number, state))
            .collect();
        for (slot, (transport, state)) in self.slots.iter().zip(checked?.into_iter().zip(&states.devices)) {
            slot.load(transport, state);
        }
        self.loaded.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Freezes the writable layer of every disk that has one, in order: writes its map to the first file, makes the
    /// second, empty and open read-write, the new writable layer. All disks or none. The devices are paused.
    ///
    /// # Errors
    /// [`DeviceError`]; no layer was frozen, the files may have been written to.
    pub fn freeze_layers(&self, files: Vec<(OwnedFd, OwnedFd)>) -> Result<(), DeviceError> {
        if !self.gate.paused() {
            return Err(DeviceError::NotPaused("freeze"));
        }
        let writable: Vec<_> =
            self.slots.iter().enumerate().filter(|(_, slot)| slot.writable_disk()).collect();
        if writable.len() != files.len() {
            return Err(DeviceError::FreezeCount { expected: writable.len(), got: files.len() });
        }
        for ((number, slot), (map, next)) in writable.iter().zip(&files) {
            let prepared = slot.with_disk(|disk| disk.prepare_freeze(map.as_fd(), next.as_fd()));
            if let Some(Err(source)) = prepared {
                return Err(DeviceError::Freeze { number: *number, source });
            }
        }
        for ((_, slot), (_, next)) in writable.iter().zip(files) {
            slot.with_disk(|disk| disk.freeze(next));
        }
        Ok(())
    }

    /// Puts other frozen layers in the place of those of disk `number` up to `top`; requests wait meanwhile.
    ///
    /// # Errors
    /// There is no such disk, or [`Disk::rebase`] refuses them.
    pub fn rebase(&self, number: u8, top: &OwnedFd, layers: Vec<LayerSpec>) -> Result<(), DeviceError> {
        let number = usize::from(number);
        let rebase = |slot: &Slot| slot.with_disk(|disk| disk.rebase(top.as_fd(), layers));
        let rebased = self.slots.get(number).and_then(rebase);
        let expected = self.slots.iter().filter(|slot| slot.is_disk()).count();
        rebased
            .ok_or(DeviceError::NoDisk { number, expected })?
            .map_err(|source| DeviceError::Disk { number, source })
    }

    /// Which frames hold which blocks, as far as disks moved them since this VM was made. Layers are numbered as after a freeze
    /// ([`Disk::held`]), whether or not it is done yet. The devices are paused.
    ///
    /// # Errors
    /// [`DeviceError::NotPaused`].
    pub fn page_map(&self) -> Result<Vec<page_map::Run>, DeviceError> {
        if !self.gate.paused() {
            return Err(DeviceError::NotPaused("page map"));
        }
        let mut stretches = lock(&self.pages).stretches();
        stretches.sort_unstable_by_key(|stretch| (stretch.disk, stretch.block));
        let mut runs = Vec::with_capacity(stretches.len());
        for of_one in stretches.chunk_by(|one, next| one.disk == next.disk) {
            let slot = of_one.first().and_then(|stretch| self.slots.get(usize::from(stretch.disk)));
            slot.and_then(|slot| slot.with_disk(|disk| disk.held(of_one, &mut runs)));
        }
        runs.sort_unstable_by_key(|run| run.first);
        Ok(runs)
    }

    /// What the devices write to guest memory, but for [`Self::used_rings`].
    #[must_use]
    pub const fn writes(&self) -> &Writes {
        &self.writes
    }

    /// The used rings of all queues that are set up, as guest addresses and lengths.
    #[must_use]
    pub fn used_rings(&self) -> Vec<(u64, u64)> {
        self.slots.iter().flat_map(Slot::used_rings).collect()
    }

    /// How the devices fare, in the order of [`Self::slots`].
    #[must_use]
    pub fn health(&self) -> Vec<DeviceHealth> {
        self.slots.iter().map(Slot::health).collect()
    }
}

/// Copies a configuration space from `offset` on; past its end are zeroes.
fn copy_config(config: &[u8], offset: usize, data: &mut [u8]) {
    let there = config.get(offset..).unwrap_or_default();
    let length = there.len().min(data.len());
    data[..length].copy_from_slice(&there[..length]);
    data[length..].fill(0);
}
