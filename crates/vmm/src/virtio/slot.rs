//! One device in its MMIO window: registers, kicks of its queues, interrupt, and the device's kind.

use super::balloon::{self, Balloon, BalloonStatus};
use super::block::{self, Block, Notes};
use super::device::{DeviceError, DeviceHealth, host};
use super::interrupt::{CONFIG_CHANGE, Interrupt};
use super::net::{self, Net, Turn};
use super::registers::register;
use super::ring::{Broken, Ring};
use super::rng;
use super::state::{DeviceState, KindState, LoadError};
use super::transport::{Effect, Transport};
use super::vsock::{self, Service, Vsock};
use crate::config::LinkConfig;
use crate::disk::page_map::PageMap;
use crate::disk::{Disk, NoSpace, Reads, Room};
use crate::memory::writes::Writes;
use crate::meter::{Meter, ThreadClock};
use dayfly_units::sync::lock;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use virtio_queue::QueueT as _;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The kind of a device, with its state.
#[derive(Debug)]
pub enum Kind {
    /// virtio-blk.
    Block(Block),
    /// virtio-vsock.
    Vsock(Vsock),
    /// virtio-rng.
    Rng,
    /// virtio-net.
    Net(Net),
    /// virtio-balloon.
    Balloon(Balloon),
}

/// The state that the device's lock guards.
#[derive(Debug)]
struct Inner {
    transport: Transport,
    kind: Kind,
    broken: Option<Broken>,
}

/// A device, with the parts of it that need no lock.
#[derive(Debug)]
pub struct Slot {
    /// The virtio device id, which never changes. A device thread chooses its devices by it,
    /// because the lock of a disk is held as long as a turn takes.
    device_id: u32,
    interrupt: Interrupt,
    /// The eventfd of each queue. Disks share one, and so do the queues of the balloon.
    kicks: Vec<Arc<EventFd>>,
    inner: Mutex<Inner>,
}

impl Slot {
    /// A disk after reset, whose queue is kicked by `kick`.
    ///
    /// # Errors
    /// `eventfd2(2)` fails.
    pub fn disk(block: Block, kick: &Arc<EventFd>) -> Result<Self, DeviceError> {
        Self::with_kicks(Kind::Block(block), || Ok(Arc::clone(kick)))
    }

    /// A device after reset that is not a disk. Each queue has its own eventfd; the queues of the
    /// balloon, which are kicked rarely, share one.
    ///
    /// # Errors
    /// `eventfd2(2)` fails.
    pub fn new(kind: Kind) -> Result<Self, DeviceError> {
        let kick = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new);
        if matches!(kind, Kind::Balloon(_)) {
            let shared = kick().map_err(host("eventfd2"))?;
            return Self::with_kicks(kind, || Ok(Arc::clone(&shared)));
        }
        Self::with_kicks(kind, kick)
    }

    fn with_kicks(
        kind: Kind,
        kick: impl Fn() -> io::Result<Arc<EventFd>>,
    ) -> Result<Self, DeviceError> {
        let (id, features, queues) = match &kind {
            Kind::Block(block) => (block::DEVICE_ID, block.features(), block::QUEUES),
            Kind::Vsock(_) => (vsock::DEVICE_ID, 0, vsock::QUEUES),
            Kind::Rng => (rng::DEVICE_ID, 0, rng::QUEUES),
            Kind::Net(_) => (net::DEVICE_ID, net::FEATURES, net::QUEUES),
            Kind::Balloon(_) => (balloon::DEVICE_ID, balloon::FEATURES, balloon::QUEUES),
        };
        let kicks: io::Result<_> = queues.iter().map(|_| kick()).collect();
        let inner = Inner { transport: Transport::new(id, features, queues), kind, broken: None };
        Ok(Self {
            device_id: id,
            interrupt: Interrupt::new().map_err(host("eventfd2"))?,
            kicks: kicks.map_err(host("eventfd2"))?,
            inner: Mutex::new(inner),
        })
    }

    /// The eventfd of each queue.
    pub fn kicks(&self) -> &[Arc<EventFd>] {
        &self.kicks
    }

    /// The eventfds of [`Self::kicks`], each once.
    pub fn distinct_kicks(&self) -> &[Arc<EventFd>] {
        if self.is_balloon() { &self.kicks[..1] } else { &self.kicks }
    }

    /// Index and eventfd of each queue that is kicked often; KVM writes these eventfds.
    ///
    /// A kick of another queue arrives as a register write with the same effect. So a VM's creation
    /// does without KVM_IOEVENTFD for that queue, which waits for a grace period (1 to 3 ms in a
    /// machine).
    pub fn fast_kicks(&self) -> impl Iterator<Item = (u32, &EventFd)> {
        let fast = match &lock(&self.inner).kind {
            Kind::Block(_) => 0..1,
            Kind::Vsock(_) => 0..vsock::FAST_QUEUES,
            Kind::Rng | Kind::Balloon(_) => 0..0,
            Kind::Net(_) => net::TRANSMIT..net::TRANSMIT + 1,
        };
        (0..).zip(self.kicks.iter().map(|kick| &**kick)).skip(fast.start).take(fast.len())
    }

    /// The device's interrupt.
    pub const fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Whether an access to register `offset` may wait for the lock of a disk, which the thread of
    /// the disks holds for a whole turn. The caller asks for a turn, because that thread could take
    /// the lock again before the caller wakes. The two registers of each interrupt need no lock.
    pub const fn locks_disk(&self, offset: u64) -> bool {
        self.is_disk() && !matches!(offset, register::INTERRUPT_STATUS | register::INTERRUPT_ACK)
    }

    /// Reads a register. Below the configuration, only aligned reads of 32 bits give a value;
    /// within it, reads may have any size (4.2.2.2).
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(at) = offset.checked_sub(register::CONFIG) {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            match &lock(&self.inner).kind {
                Kind::Block(block) => block.read_config(at, data),
                Kind::Vsock(vsock) => vsock.read_config(at, data),
                Kind::Net(net) => net.read_config(at, data),
                Kind::Balloon(balloon) => balloon.read_config(at, data),
                Kind::Rng => {}
            }
        } else if let Ok(word) = <&mut [u8; 4]>::try_from(data) {
            let value = match offset {
                register::INTERRUPT_STATUS => self.interrupt.status(),
                _ => lock(&self.inner).transport.read(offset),
            };
            *word = value.to_le_bytes();
        }
    }

    /// Writes a register, and wakes the device's thread if the device has work then. Only the
    /// balloon has a writable configuration.
    pub fn write(&self, mem: &GuestMemoryMmap, offset: u64, data: &[u8]) {
        let Ok(word) = <[u8; 4]>::try_from(data) else {
            return;
        };
        let value = u32::from_le_bytes(word);
        if let Some(at) = offset.checked_sub(register::CONFIG) {
            if self.is_balloon()
                && let Kind::Balloon(balloon) = &mut lock(&self.inner).kind
            {
                balloon.write_config(at, value);
            }
            return;
        }
        if offset == register::INTERRUPT_ACK {
            return self.interrupt.acknowledge(value);
        }
        let mut inner = lock(&self.inner);
        match inner.transport.write(mem, offset, value) {
            Effect::None => {}
            Effect::Notify(queue) => self.kick(queue),
            Effect::Activated => self.kick_all(),
            Effect::Reset => {
                inner.broken = None;
                self.interrupt.set_status(0);
                match &mut inner.kind {
                    Kind::Vsock(vsock) => vsock.reset(),
                    Kind::Net(net) => net.reset(),
                    Kind::Balloon(balloon) => balloon.reset(),
                    Kind::Block(block) => {
                        let _ = block.retry();
                    }
                    Kind::Rng => {}
                }
                self.kick_all();
            }
        }
    }

    fn kick(&self, queue: usize) {
        if let Some(kick) = self.kicks.get(queue) {
            // The write fails only if the counter is at its maximum, and then the queue is kicked
            // already.
            let _ = kick.write(1);
        }
    }

    fn kick_all(&self) {
        (0..self.kicks.len()).for_each(|queue| self.kick(queue));
    }

    /// Serves a disk; returns whether work may be left. Only the thread of the disks calls it.
    pub fn serve_disk(
        &self,
        mem: &GuestMemoryMmap,
        writes: &Writes,
        (pages, room, meter): (&Mutex<PageMap>, &Mutex<Room>, &Meter),
        (reads, clock): (&mut Reads, &mut ThreadClock),
        stop: &dyn Fn() -> bool,
    ) -> bool {
        let mut inner = lock(&self.inner);
        let Inner { transport, kind, broken } = &mut *inner;
        let features = transport.features();
        let (true, Kind::Block(block), [queue]) = (transport.live(), kind, transport.queues())
        else {
            return false;
        };
        let (pages, room) = (&mut lock(pages), &mut lock(room));
        let notes = &mut Notes { pages, room, meter, clock };
        let ring = &mut Ring::new(queue, mem, writes);
        let served = block.serve(ring, features, &self.interrupt, notes, reads, stop);
        served.unwrap_or_else(|cause| {
            *broken = Some(cause);
            if transport.need_reset() {
                self.interrupt.raise(CONFIG_CHANGE);
            }
            false
        })
    }

    /// Serves a device that is not a disk; returns whether work may be left. Only the device thread
    /// calls it.
    pub fn serve(
        &self,
        mem: &GuestMemoryMmap,
        writes: &Writes,
        pages: &Mutex<PageMap>,
        now: Instant,
        stop: &dyn Fn() -> bool,
    ) -> bool {
        let mut inner = lock(&self.inner);
        let Inner { transport, kind, broken } = &mut *inner;
        if !transport.live() {
            if let Kind::Vsock(vsock) = kind {
                vsock.tidy(now);
            }
            return false;
        }
        let (features, interrupt) = (transport.features(), &self.interrupt);
        let queues = transport.queues();
        let served = match (&mut *kind, queues) {
            (Kind::Rng, [queue]) => rng::serve(&mut Ring::new(queue, mem, writes), interrupt, stop),
            (Kind::Vsock(vsock), queues) => {
                vsock.serve(&mut Service { mem, writes, queues, interrupt, now, stop })
            }
            (Kind::Net(net), queues) => {
                net.serve(&mut Turn { mem, writes, queues, features, interrupt, now, stop })
            }
            (Kind::Balloon(balloon), queues) => {
                let turn = balloon::Turn { mem, writes, pages, queues, features, interrupt, stop };
                balloon.serve(&mut { turn })
            }
            _ => Ok(false),
        };
        served.unwrap_or_else(|cause| {
            *broken = Some(cause);
            if let Kind::Vsock(vsock) = kind {
                // Nothing moves until the driver resets the device, so connections end now: their
                // host sockets would wait in vain.
                vsock.reset();
                vsock.tidy(now);
            }
            if transport.need_reset() {
                interrupt.raise(CONFIG_CHANGE);
            }
            false
        })
    }

    /// Runs `act` on the vsock device; `None` if this is another device.
    pub fn with_vsock<R>(&self, act: impl FnOnce(&mut Vsock) -> R) -> Option<R> {
        if self.device_id != vsock::DEVICE_ID {
            return None;
        }
        match &mut lock(&self.inner).kind {
            Kind::Vsock(vsock) => Some(act(vsock)),
            _ => None,
        }
    }

    /// When the device must be served even without an event; `None` for a disk.
    pub fn deadline(&self) -> Option<Instant> {
        if self.is_disk() {
            return None;
        }
        match &lock(&self.inner).kind {
            Kind::Vsock(vsock) => vsock.deadline(),
            Kind::Net(net) => net.deadline(),
            Kind::Block(_) | Kind::Rng | Kind::Balloon(_) => None,
        }
    }

    /// Whether this is the balloon.
    pub const fn is_balloon(&self) -> bool {
        self.device_id == balloon::DEVICE_ID
    }

    /// Sets the target of the balloon, if there is one, asks the driver for new statistics, and
    /// returns the status; `None` if this is another device.
    ///
    /// # Errors
    /// The target is above RAM, which is the error; nothing has changed.
    pub fn balloon(&self, target_bytes: Option<u64>) -> Option<Result<BalloonStatus, u64>> {
        let mut inner = lock(&self.inner);
        let Inner { transport, kind, broken } = &mut *inner;
        let Kind::Balloon(balloon) = kind else { return None };
        if let Some(bytes) = target_bytes {
            match balloon.set_target(bytes) {
                None => return Some(Err(balloon.ram_bytes())),
                // A driver reads the target when it starts.
                Some(true) if transport.live() => self.interrupt.raise(CONFIG_CHANGE),
                Some(_) => {}
            }
        }
        balloon.ask();
        self.kick(0);
        Some(Ok(balloon.status(transport.live(), transport.features(), broken.as_ref())))
    }

    /// Whether this is a network device.
    pub const fn is_net(&self) -> bool {
        self.device_id == net::DEVICE_ID
    }

    /// Connects this network device to `tap`; `false` if this is another device.
    pub fn connect(&self, config: &LinkConfig, tap: Option<OwnedFd>) -> bool {
        let Kind::Net(net) = &mut lock(&self.inner).kind else { return false };
        net.connect(config, tap);
        self.kick_all();
        true
    }

    /// Runs `act` on the disk; `None` if this is another device.
    pub fn with_disk<R>(&self, act: impl FnOnce(&mut Disk) -> R) -> Option<R> {
        match &mut lock(&self.inner).kind {
            Kind::Block(block) => Some(act(block.disk())),
            _ => None,
        }
    }

    /// Whether this is a disk.
    pub const fn is_disk(&self) -> bool {
        self.device_id == block::DEVICE_ID
    }

    /// Replaces this disk by `block`, and resets the device.
    pub fn insert(&self, block: Block) {
        let mut inner = lock(&self.inner);
        inner.transport = Transport::new(block::DEVICE_ID, block.features(), block::QUEUES);
        inner.kind = Kind::Block(block);
    }

    /// Why this disk waits for space; `None`: it does not, or this is another device.
    pub fn waits(&self) -> Option<NoSpace> {
        match &lock(&self.inner).kind {
            Kind::Block(block) => block.waits(),
            _ => None,
        }
    }

    /// Makes a disk try again the request that had no space.
    pub fn retry(&self) {
        if let Kind::Block(block) = &mut lock(&self.inner).kind
            && block.retry()
        {
            self.kick_all();
        }
    }

    /// Whether this is a disk with a writable layer.
    pub fn writable_disk(&self) -> bool {
        self.with_disk(|disk| !disk.read_only()) == Some(true)
    }

    /// The used rings of the device's ready queues (2.7.8), as guest addresses and lengths in
    /// bytes. Besides buffers, the device writes only there.
    pub fn used_rings(&self) -> Vec<(u64, u64)> {
        let mut inner = lock(&self.inner);
        let ready = inner.transport.queues().iter().filter(|queue| queue.ready());
        // 2 bytes each for flags, index and event index, and 8 bytes for each element.
        ready.map(|queue| (queue.used_ring(), 6 + 8 * u64::from(queue.size()))).collect()
    }

    /// The device's health.
    pub fn health(&self) -> DeviceHealth {
        let inner = lock(&self.inner);
        let disk = match &inner.kind {
            Kind::Block(block) => Some(block.counters()),
            _ => None,
        };
        let net = match &inner.kind {
            Kind::Net(net) => Some(net.traffic()),
            _ => None,
        };
        DeviceHealth {
            device_id: inner.transport.device_id(),
            broken: inner.broken.clone(),
            disk,
            net,
        }
    }

    /// The device's state, to be saved.
    pub fn save(&self) -> DeviceState {
        let inner = lock(&self.inner);
        DeviceState {
            device_id: inner.transport.device_id(),
            transport: inner.transport.save(self.interrupt.status()),
            kind: match &inner.kind {
                Kind::Block(block) => KindState::Block(block.save()),
                Kind::Vsock(vsock) => KindState::Vsock(vsock.save()),
                Kind::Rng => KindState::Rng,
                Kind::Net(_) => KindState::Net,
                Kind::Balloon(balloon) => KindState::Balloon(balloon.save()),
            },
        }
    }

    /// Checks saved state against this device and changes nothing. Returns the transport for
    /// [`Self::load`].
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn check(
        &self,
        mem: &GuestMemoryMmap,
        number: usize,
        state: &DeviceState,
    ) -> Result<Transport, LoadError> {
        let inner = lock(&self.inner);
        let (expected, got) = (inner.transport.device_id(), state.device_id);
        if expected != got {
            return Err(LoadError::Device { number, expected, got });
        }
        let differs = |expected: String, got: &KindState| LoadError::Kind {
            number,
            expected,
            got: format!("{got:?}"),
        };
        match (&inner.kind, &state.kind) {
            (Kind::Block(block), KindState::Block(saved)) if block.save() == *saved => {}
            (Kind::Vsock(vsock), KindState::Vsock(saved)) if vsock.fits(saved) => {}
            (Kind::Rng, KindState::Rng) | (Kind::Net(_), KindState::Net) => {}
            (Kind::Balloon(balloon), KindState::Balloon(saved)) if balloon.fits(saved) => {}
            (Kind::Block(block), got) => return Err(differs(format!("{:?}", block.save()), got)),
            (Kind::Vsock(vsock), got) => return Err(differs(format!("{:?}", vsock.save()), got)),
            (Kind::Rng, got) => return Err(differs("Rng".into(), got)),
            (Kind::Net(_), got) => return Err(differs("Net".into(), got)),
            (Kind::Balloon(_), got) => {
                return Err(differs("Balloon with a target of at most RAM".into(), got));
            }
        }
        inner
            .transport
            .loaded(mem, &state.transport)
            .map_err(|source| LoadError::Transport { number, source })
    }

    /// Loads `state`, from which [`Self::check`] made `transport`.
    pub fn load(&self, transport: Transport, state: &DeviceState) {
        let mut inner = lock(&self.inner);
        let live = transport.live();
        (inner.transport, inner.broken) = (transport, None);
        if let (Kind::Vsock(vsock), KindState::Vsock(saved)) = (&mut inner.kind, &state.kind) {
            vsock.loaded(live && saved.connected);
        }
        if let (Kind::Balloon(balloon), KindState::Balloon(saved)) = (&mut inner.kind, &state.kind)
        {
            balloon.load(saved);
        }
        self.interrupt.set_status(state.transport.interrupt_status);
        self.kick_all();
    }
}
