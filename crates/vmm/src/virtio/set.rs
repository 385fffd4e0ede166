//! All devices of a VM, and the operations of the vCPU threads and the main thread on them.

use super::balloon::Balloon;
use super::block::Block;
use super::device::{DeviceError, DeviceHealth, MAX_SOCKET_PATH, MmioSlot, VsockSpec, host};
use super::gate::Gate;
use super::net::Net;
use super::slot::{Kind, Slot};
use super::stall::Stall;
use super::state::{DeviceStates, LoadError};
use super::turns::Turns;
use super::vsock::Vsock;
use crate::config::LinkConfig;
use crate::disk::Disk;
use crate::disk::page_map::{self, PageMap};
use crate::disk::{
    DiskReads, DiskSpec, DiskTraffic, FileId, FreezeError, FreezeFiles, LayerSpec, OpenDiskError,
    Room,
};
use crate::memory::YieldPoints;
use crate::memory::writes::Writes;
use crate::meter::Meter;
use dayfly_units::sync::lock;
use kvm_ioctls::{IoEventAddress, VmFd};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use vm_memory::{GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Guest physical address of the first device.
pub const MMIO_BASE: u64 = 0xd000_0000;

/// Length of each device's window, in bytes.
pub const MMIO_SIZE: u64 = 0x1000;

/// The first device's interrupt (GSI). Each device has its own interrupt, edge-triggered.
pub const FIRST_GSI: u32 = 10;

/// Stretches of the page map that are looked up while the disk waits.
const STRETCHES: usize = 512;

/// All virtio devices of a VM.
///
/// The devices start unpaused: requests are served as soon as [`Self::run_loop`] and
/// [`Self::run_disks`] run.
#[derive(Debug)]
pub struct DeviceSet {
    pub(super) mem: GuestMemoryMmap,
    pub(super) pages: Mutex<PageMap>,
    pub(super) writes: Writes,
    /// The devices; the last one is the balloon.
    pub(super) slots: Vec<Slot>,
    /// Whether the guest was saved without a balloon, and so does not know of one.
    no_balloon: AtomicBool,
    /// The events of all devices but the disks.
    pub(super) epoll: Arc<Epoll>,
    /// Wakes the thread of all devices but the disks.
    pub(super) wake: EventFd,
    /// Wakes the thread of the disks, for a kick of any of them; `None`: there are no disks.
    pub(super) disk_kick: Option<Arc<EventFd>>,
    pub(super) gate: Gate,
    /// Turns at the disks, for all other threads than that of the disks.
    pub(super) turns: Turns,
    /// Set when state was loaded, because interrupts may have been lost since the save.
    pub(super) loaded: AtomicBool,
    /// The files of each disk's layers. Kept beside the disks, because the thread of the disks
    /// holds a disk for as long as a request takes.
    pub(super) layers: Mutex<Vec<Vec<FileId>>>,
    /// The host's room for the disks.
    pub(super) room: Mutex<Room>,
    /// How much the devices have moved.
    pub(super) meter: Meter,
    /// How the thread of the disks reads; `None` before it runs.
    pub(super) disk_reads: Mutex<Option<DiskReads>>,
    pub(super) stall: Stall,
}

impl DeviceSet {
    /// Makes the devices in this order: disks without media, vsock, rng, network devices without
    /// links, balloon. Registers their kicks and interrupts with `vm`, whose interrupt controller
    /// must exist.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn new(
        mem: GuestMemoryMmap,
        disks: u8,
        nets: u8,
        vsock: VsockSpec,
        meter: Meter,
        vm: &VmFd,
    ) -> Result<Arc<Self>, DeviceError> {
        let set = Self::with_meter(mem, disks, nets, vsock, meter)?;
        for (slot, place) in set.present().iter().zip(set.slots()) {
            let notify =
                IoEventAddress::Mmio(place.base + super::registers::register::QUEUE_NOTIFY);
            for (queue, kick) in slot.fast_kicks() {
                let what = || format!("KVM_IOEVENTFD at {:#x}, queue {queue}", place.base);
                vm.register_ioevent(kick, &notify, queue).map_err(|e| host(what())(e.into()))?;
            }
            let what = || format!("KVM_IRQFD for interrupt {}", place.gsi);
            vm.register_irqfd(slot.interrupt().line(), place.gsi)
                .map_err(|e| host(what())(e.into()))?;
        }
        Ok(Arc::new(set))
    }

    /// Makes the devices alone, for tests. Without a VM, kicks arrive as register writes.
    pub(super) fn without_vm(
        mem: GuestMemoryMmap,
        disks: u8,
        nets: u8,
        vsock: VsockSpec,
    ) -> Result<Self, DeviceError> {
        Self::with_meter(mem, disks, nets, vsock, Meter::default())
    }

    fn with_meter(
        mem: GuestMemoryMmap,
        disks: u8,
        nets: u8,
        vsock: VsockSpec,
        meter: Meter,
    ) -> Result<Self, DeviceError> {
        let VsockSpec { listener, path, guest_cid } = vsock;
        let longest = super::vsock::socket_path(&path, u32::MAX).as_os_str().len();
        if longest > MAX_SOCKET_PATH {
            let max = MAX_SOCKET_PATH - (longest - path.as_os_str().len());
            return Err(DeviceError::VsockPath { path, max });
        }
        rustix::io::ioctl_fionbio(&listener, true)
            .map_err(|e| host("vsock listener: FIONBIO")(e.into()))?;
        let epoll = Arc::new(Epoll::new().map_err(host("epoll_create1"))?);
        let watch = |fd: i32, events: EventSet, token: u64| {
            let event = EpollEvent::new(events, token);
            epoll
                .ctl(ControlOperation::Add, fd, event)
                .map_err(host("epoll_ctl of a device's descriptor"))
        };
        watch(
            listener.as_raw_fd(),
            EventSet::IN | EventSet::EDGE_TRIGGERED,
            super::tokens::LISTENER,
        )?;

        let mut slots = Vec::with_capacity(usize::from(disks) + 3 + usize::from(nets));
        // Blocking: to read it is all that the thread of the disks waits for. A write of it cannot
        // block, because no counter of 64 bits is ever full of kicks.
        let kick = || EventFd::new(EFD_CLOEXEC).map(Arc::new).map_err(host("eventfd2"));
        let disk_kick = (disks > 0).then(kick).transpose()?;
        for (number, kick) in disk_kick.iter().cycle().take(disks.into()).enumerate() {
            slots.push(Slot::disk(Block::new(Disk::none(), number), kick)?);
        }
        let vsock =
            Vsock::new(guest_cid, listener, path, Arc::clone(&epoll), super::tokens::FIRST_SOCKET);
        slots.push(Slot::new(Kind::Vsock(vsock))?);
        slots.push(Slot::new(Kind::Rng)?);
        for _ in 0..nets {
            slots.push(Slot::new(Kind::Net(Net::new(Arc::clone(&epoll), meter.clone())))?);
        }
        let ram_bytes = mem.iter().map(|region| region.len()).sum();
        slots.push(Slot::new(Kind::Balloon(Balloon::new(ram_bytes)))?);

        for (number, slot) in slots.iter().enumerate().filter(|(_, slot)| !slot.is_disk()) {
            for (queue, kick) in slot.distinct_kicks().iter().enumerate() {
                watch(kick.as_raw_fd(), EventSet::IN, super::tokens::kick_token(number, queue))?;
            }
        }
        let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(host("eventfd2"))?;
        watch(wake.as_raw_fd(), EventSet::IN, super::tokens::WAKE)?;
        let (pages, gate, loaded) =
            (Mutex::new(PageMap::new(&mem)), Gate::default(), AtomicBool::new(false));
        let (writes, layers) = (Writes::default(), Mutex::new(vec![Vec::new(); disks.into()]));
        let (room, stall) = (Mutex::default(), Stall::new()?);
        Ok(Self {
            mem,
            pages,
            writes,
            slots,
            no_balloon: AtomicBool::new(false),
            epoll,
            wake,
            disk_kick,
            gate,
            turns: Turns::default(),
            loaded,
            layers,
            room,
            meter,
            disk_reads: Mutex::default(),
            stall,
        })
    }

    /// Puts media into the disks vda, vdb, … in this order; returns how many are writable. Call it
    /// before the guest runs.
    ///
    /// # Errors
    /// [`DeviceError`]; the devices cannot be used after it.
    pub fn insert_disks(&self, specs: Vec<DiskSpec>) -> Result<usize, DeviceError> {
        self.insert(specs, Disk::open)
    }

    /// As [`Self::insert_disks`], for a guest that boots: writable layers may have been used by a
    /// VM that has ended. A guest with saved memory must not get one, because the memory would not
    /// agree with the disk.
    ///
    /// # Errors
    /// As [`Self::insert_disks`].
    pub fn insert_used_disks(&self, specs: Vec<DiskSpec>) -> Result<usize, DeviceError> {
        self.insert(specs, Disk::open_again)
    }

    fn insert(
        &self,
        specs: Vec<DiskSpec>,
        open: fn(DiskSpec) -> Result<Disk, OpenDiskError>,
    ) -> Result<usize, DeviceError> {
        let (expected, got) =
            (self.slots.iter().filter(|slot| slot.is_disk()).count(), specs.len());
        if expected != got {
            return Err(DeviceError::Disks { expected, got });
        }
        let mut writable = 0;
        for (number, (slot, spec)) in self.slots.iter().zip(specs).enumerate() {
            let disk = open(spec).map_err(|source| DeviceError::Disk { number, source })?;
            writable += usize::from(!disk.read_only());
            self.note_layers(number, &disk);
            slot.insert(Block::new(disk, number));
        }
        Ok(writable)
    }

    /// The files of each disk's layers, as [`Disk::layer_files`] returns them. Never waits for a
    /// device.
    #[must_use]
    pub fn layers(&self) -> Vec<Vec<FileId>> {
        lock(&self.layers).clone()
    }

    /// How much each disk has moved. Never waits for a device.
    #[must_use]
    pub fn traffic(&self) -> Vec<DiskTraffic> {
        self.meter.disks(self.slots.iter().filter(|slot| slot.is_disk()).count())
    }

    /// How the disks are read; `None`: there is no disk, or its thread does not run yet.
    #[must_use]
    pub fn disk_reads(&self) -> Option<DiskReads> {
        *lock(&self.disk_reads)
    }

    fn note_layers(&self, number: usize, disk: &Disk) {
        if let Some(layers) = lock(&self.layers).get_mut(number) {
            *layers = disk.layer_files();
        }
    }

    /// Connects the network device to `tap`, whose header has
    /// [`HEADER_BYTES`](super::net::HEADER_BYTES) and which is non-blocking.
    /// Without a tap, and before this call, every packet that the guest sends is lost.
    ///
    /// # Errors
    /// [`DeviceError::NoNet`].
    pub fn connect(&self, config: &LinkConfig, tap: Option<OwnedFd>) -> Result<(), DeviceError> {
        let mut nets = self.slots.iter().filter(|slot| slot.is_net());
        let connected = nets.next().is_some_and(|slot| slot.connect(config, tap));
        if connected { Ok(()) } else { Err(DeviceError::NoNet) }
    }

    /// The devices that the guest has.
    pub(super) fn present(&self) -> &[Slot] {
        let absent = usize::from(self.no_balloon.load(Ordering::Relaxed));
        &self.slots[..self.slots.len() - absent]
    }

    /// Windows and interrupts of the devices, in their order.
    #[must_use]
    pub fn slots(&self) -> Vec<MmioSlot> {
        let place = |(n, _)| MmioSlot {
            base: MMIO_BASE + u64::from(n) * MMIO_SIZE,
            size: MMIO_SIZE,
            gsi: FIRST_GSI + n,
        };
        (0_u32..).zip(self.present()).map(place).collect()
    }

    /// The device whose window contains `addr`, and the offset in the window.
    fn find(&self, addr: u64) -> Option<(&Slot, u64)> {
        let offset = addr.checked_sub(MMIO_BASE)?;
        let slot = self.present().get(usize::try_from(offset / MMIO_SIZE).ok()?)?;
        Some((slot, offset % MMIO_SIZE))
    }

    /// Serves a vCPU's read. Returns `false` and leaves `data` alone if no device is at `addr`.
    pub fn mmio_read(&self, addr: u64, data: &mut [u8]) -> bool {
        let Some((slot, offset)) = self.find(addr) else {
            return false;
        };
        let _turn = slot.locks_disk(offset).then(|| self.turns.take());
        slot.read(offset, data);
        true
    }

    /// Serves a vCPU's write. Returns `false` if no device is at `addr`. A write that the rules of
    /// virtio forbid is ignored.
    pub fn mmio_write(&self, addr: u64, data: &[u8]) -> bool {
        let Some((slot, offset)) = self.find(addr) else {
            return false;
        };
        let _turn = slot.locks_disk(offset).then(|| self.turns.take());
        slot.write(&self.mem, offset, data);
        true
    }

    /// Waits until no request is in flight: of each disk at most 32 parts of reads and about 1 MiB,
    /// or one larger request. No request starts until [`Self::resume`]. Idempotent.
    pub fn pause(&self) {
        self.gate.pause();
    }

    /// Lets the device threads go on, with all that arrived during the pause. Idempotent.
    pub fn resume(&self) {
        self.gate.resume();
    }

    /// Ends [`Self::run_loop`] and [`Self::run_disks`], also while paused.
    pub fn stop(&self) {
        self.gate.stop();
        for wake in std::iter::once(&self.wake).chain(self.disk_kick.as_deref()) {
            // The write fails only if the counter is at its maximum, and then the thread is awake
            // already.
            let _ = wake.write(1);
        }
    }

    /// The state of every device, without the layers of its disk.
    ///
    /// The caller has paused the vCPUs and the devices.
    #[must_use]
    pub fn save(&self) -> DeviceStates {
        DeviceStates { devices: self.present().iter().map(Slot::save).collect() }
    }

    /// Loads saved state: checks all of it, then changes all devices.
    ///
    /// Guest memory has its content already. The devices are paused, or their threads do not run
    /// yet. Resume or run them only after the interrupt controller has its state. They then look at
    /// every queue, kicked or not, and raise every interrupt again that the driver has not
    /// acknowledged. They also report to the guest that its vsock connections, if any, are gone.
    ///
    /// A guest that was saved without a balloon gets none: no device answers in its window.
    ///
    /// # Errors
    /// [`LoadError`]; the devices are unchanged.
    pub fn load(&self, states: &DeviceStates) -> Result<(), DeviceError> {
        let no_balloon = !states.devices.iter().any(|state| state.has_balloon());
        let (expected, got) = (self.slots.len() - usize::from(no_balloon), states.devices.len());
        if expected != got {
            return Err(LoadError::Count { expected, got }.into());
        }
        let checked: Result<Vec<_>, LoadError> = (0..)
            .zip(&self.slots)
            .zip(&states.devices)
            .map(|((number, slot), state)| slot.check(&self.mem, number, state))
            .collect();
        for (slot, (transport, state)) in
            self.slots.iter().zip(checked?.into_iter().zip(&states.devices))
        {
            slot.load(transport, state);
        }
        self.no_balloon.store(no_balloon, Ordering::Relaxed);
        self.loaded.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Freezes the writable layer of every disk that has one, in order, for all disks or for none.
    ///
    /// Each item of `files` belongs to one such disk. The devices are paused. Returns the writable
    /// descriptors that nothing uses any more, so that the caller closes them after the pause.
    ///
    /// # Errors
    /// [`DeviceError`]; no layer was frozen. The files may have been written to, unless the frozen
    /// file of a disk is not that of its writable layer.
    pub fn freeze_layers(&self, files: Vec<FreezeFiles>) -> Result<Vec<OwnedFd>, DeviceError> {
        if !self.gate.paused() {
            return Err(DeviceError::NotPaused("freeze"));
        }
        let writable: Vec<_> =
            self.slots.iter().enumerate().filter(|(_, slot)| slot.writable_disk()).collect();
        if writable.len() != files.len() {
            return Err(DeviceError::FreezeCount { expected: writable.len(), got: files.len() });
        }
        let each = |act: &dyn Fn(&Disk, &FreezeFiles) -> Result<(), FreezeError>| {
            for ((number, slot), files) in writable.iter().zip(&files) {
                if let Some(Err(source)) = slot.with_disk(|disk| act(disk, files)) {
                    return Err(DeviceError::Freeze { number: *number, source });
                }
            }
            Ok(())
        };
        // All checks come first: a freeze that was meant for other layers changes no file.
        each(&|disk, FreezeFiles { frozen, .. }| {
            frozen.as_ref().map_or(Ok(()), |file| disk.check_read_only(file.as_fd()))
        })?;
        each(&|disk, FreezeFiles { map, next, .. }| {
            disk.prepare_freeze(map.as_fd(), next.as_fd())
        })?;
        let mut unused = Vec::with_capacity(files.len());
        for ((number, slot), FreezeFiles { next, frozen, .. }) in writable.iter().zip(files) {
            unused.extend(slot.with_disk(|disk| {
                disk.freeze(next);
                let unused = frozen.and_then(|file| disk.keep_read_only(file));
                self.note_layers(*number, disk);
                unused
            }));
        }
        Ok(unused.into_iter().flatten().collect())
    }

    /// Replaces the frozen layers of disk `number` up to `top` by `layers`. Requests wait
    /// meanwhile.
    ///
    /// # Errors
    /// The VM has no such disk, or [`Disk::rebase`] refuses the layers.
    pub fn rebase(
        &self,
        number: u8,
        top: &OwnedFd,
        layers: Vec<LayerSpec>,
    ) -> Result<(), DeviceError> {
        let _turn = self.turns.take();
        let number = usize::from(number);
        let rebase = |slot: &Slot| {
            slot.with_disk(|disk| {
                let rebased = disk.rebase(top.as_fd(), layers);
                self.note_layers(number, disk);
                rebased
            })
        };
        let rebased = self.slots.get(number).and_then(rebase);
        let expected = self.slots.iter().filter(|slot| slot.is_disk()).count();
        rebased
            .ok_or(DeviceError::NoDisk { number, expected })?
            .map_err(|source| DeviceError::Disk { number, source })
    }

    /// Which frames hold which blocks, as far as disks moved them since this VM was made. Blocks of
    /// writable layers are left out.
    ///
    /// The VM may run meanwhile. The map is made after a freeze and not in its pause, because the
    /// work depends on the guest's page cache. So an entry may be of a later time than the freeze;
    /// but the map is a hint anyway ([`page_map`]). The work is divided into parts, and no device
    /// waits for longer than a part takes. `yields` is called between parts.
    pub fn page_map(&self, yields: &mut YieldPoints<'_>) -> Vec<page_map::Run> {
        let mut stretches = Vec::new();
        for first in (0..).step_by(page_map::PART) {
            let turn = self.turns.take();
            if !lock(&self.pages).add_stretches(first, &mut stretches) {
                break;
            }
            drop(turn);
            yields.now();
        }
        stretches.sort_unstable_by_key(|stretch| (stretch.disk, stretch.block));
        let mut runs = Vec::with_capacity(stretches.len());
        for of_one in stretches.chunk_by(|one, next| one.disk == next.disk) {
            let slot = of_one.first().and_then(|stretch| self.slots.get(usize::from(stretch.disk)));
            for part in of_one.chunks(STRETCHES) {
                let turn = self.turns.take();
                slot.and_then(|slot| slot.with_disk(|disk| disk.held(part, &mut runs)));
                drop(turn);
                yields.now();
            }
        }
        runs.sort_unstable_by_key(|run| run.first);
        runs
    }

    /// The log of the devices' writes to guest memory, without [`Self::used_rings`].
    #[must_use]
    pub const fn writes(&self) -> &Writes {
        &self.writes
    }

    /// The used rings of all configured queues, as guest addresses and lengths in bytes.
    #[must_use]
    pub fn used_rings(&self) -> Vec<(u64, u64)> {
        self.slots.iter().flat_map(Slot::used_rings).collect()
    }

    /// The health of all devices, in the order of [`Self::slots`].
    #[must_use]
    pub fn health(&self) -> Vec<DeviceHealth> {
        self.present().iter().map(Slot::health).collect()
    }
}
