//! virtio-balloon (virtio 1.2 section 5.5): the guest gives memory back to the host.
//!
//! - **Free-page reporting** (VIRTIO_BALLOON_F_REPORTING): the guest's driver names free blocks.
//!   The guest uses them again only when the device has used the chain.
//! - **Balloon**: the driver takes pages away from its guest until it has as many as the host wants
//!   ([`Balloon::set_target`]), and names them. It takes them back without asking if the guest runs
//!   out of memory (VIRTIO_BALLOON_F_DEFLATE_ON_OOM).
//! - **Statistics** (VIRTIO_BALLOON_F_STATS_VQ): what the guest says of its memory.
//!
//! The device does not offer VIRTIO_BALLOON_F_PAGE_POISON, so no driver expects any content of
//! pages that it gave back (5.5.6.7). A driver whose kernel relies on it does not accept reporting.
//!
//! While RAM is copied under the running guest ([`crate::memory::live`]), nothing is discarded: the
//! chains are used at once. Otherwise each discarded page would count as written, and a guest could
//! lengthen its pause by a whole RAM's pages. The pages stay the VM's own until they are used and
//! freed again.
//!
//! All addresses and numbers come from the guest. A turn is bounded ([`TURN_BYTES`]), whatever a
//! chain names; a chain that takes longer goes on in the next turn, from its start after a restore.
//! To discard a page twice is harmless, because its chain is not used yet.
//!
//! A clone looks at all queues when it starts. If none has a chain, the device only reads, so the
//! pages of its rings stay those of the template.

mod control;
mod status;

pub use status::{BalloonState, BalloonStatus, GuestMemory};

use super::interrupt::Interrupt;
use super::ring::{Broken, Chain, Ring};
use crate::disk::IoList;
use crate::disk::page_map::PageMap;
use crate::memory::discard;
use crate::memory::writes::Writes;
use dayfly_units::PAGE_SIZE;
use std::sync::Mutex;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use virtio_queue::Queue;
use vm_memory::{GuestAddress, GuestMemory as _, GuestMemoryMmap, Permissions};

/// VIRTIO_ID_BALLOON.
pub const DEVICE_ID: u32 = VIRTIO_ID_BALLOON;
/// VIRTIO_BALLOON_F_STATS_VQ.
const STATISTICS: u64 = 1 << 1;
/// VIRTIO_BALLOON_F_DEFLATE_ON_OOM.
const DEFLATE_ON_OOM: u64 = 1 << 2;
/// VIRTIO_BALLOON_F_REPORTING.
const REPORTING: u64 = 1 << 5;
/// Features besides the common ones.
pub const FEATURES: u64 = STATISTICS | DEFLATE_ON_OOM | REPORTING;
/// Inflate, deflate, then statistics and reporting, each if its feature is agreed: a driver of a
/// virtio-mmio device numbers only the queues that it uses (`vm_find_vqs` of Linux). Linux needs 32
/// descriptors for reports.
pub const QUEUES: &[u16] = &[32, 32, 32, 64];

/// Most bytes of RAM that a turn discards; other devices of the VM wait that long.
const TURN_BYTES: usize = 64 << 20;
/// What a chain, or a call for a shorter range, counts.
const STEP_BYTES: usize = 128 << 10;
/// Most page numbers taken at once: as many as a turn has steps.
const MOST_PAGES: usize = TURN_BYTES / STEP_BYTES;
const PAGE: usize = 4096;
/// A page number in a chain of the balloon: 32 bits.
const NUMBER_BYTES: usize = 4;

/// What a turn of the device works with.
pub struct Turn<'t> {
    /// Guest memory.
    pub mem: &'t GuestMemoryMmap,
    /// The log of writes to it.
    pub writes: &'t Writes,
    /// Which frames hold disk blocks.
    pub pages: &'t Mutex<PageMap>,
    /// The device's queues.
    pub queues: &'t mut [Queue],
    /// The agreed features.
    pub features: u64,
    /// The device's interrupt.
    pub interrupt: &'t Interrupt,
    /// Whether to end the turn.
    pub stop: &'t dyn Fn() -> bool,
}

/// The device.
#[derive(Debug)]
pub struct Balloon {
    ram_bytes: u64,
    target_pages: u32,
    actual_pages: u32,
    /// Bytes of the chain at the head of the inflate queue that earlier turns have handled.
    inflated: usize,
    /// Likewise for the reporting queue.
    reported: usize,
    /// Whether the driver shall get its statistics buffer back, to fill it again.
    asked: bool,
    /// Whether statistics were asked for since this process has the VM.
    ever_asked: bool,
    guest: GuestMemory,
    discarded_bytes: u64,
    refused: u64,
}

/// Guest memory as the balloon changes it, for one turn.
struct Ram<'t> {
    mem: &'t GuestMemoryMmap,
    writes: &'t Writes,
    pages: &'t Mutex<PageMap>,
    /// Bytes that may still be discarded.
    left: usize,
}

impl Balloon {
    /// The device of a VM with this RAM, after reset.
    pub fn new(ram_bytes: u64) -> Self {
        Self {
            ram_bytes,
            target_pages: 0,
            actual_pages: 0,
            inflated: 0,
            reported: 0,
            asked: false,
            ever_asked: false,
            guest: GuestMemory::default(),
            discarded_bytes: 0,
            refused: 0,
        }
    }

    /// Forgets the driver; what the host wants stays.
    pub fn reset(&mut self) {
        (self.actual_pages, self.inflated, self.reported) = (0, 0, 0);
        (self.asked, self.guest) = (false, GuestMemory::default());
    }

    /// Reads the configuration (5.5.4): `num_pages`, `actual`.
    pub fn read_config(&self, offset: usize, data: &mut [u8]) {
        let config = [self.target_pages.to_le_bytes(), self.actual_pages.to_le_bytes()];
        super::transport::copy_config(config.as_flattened(), offset, data);
    }

    /// Writes the configuration: the driver says in `actual` how many pages it has given.
    pub fn write_config(&mut self, offset: u64, value: u32) {
        if offset == 4 {
            self.actual_pages = value;
        }
    }

    /// RAM in bytes.
    pub const fn ram_bytes(&self) -> u64 {
        self.ram_bytes
    }

    /// Sets how much memory the host wants in the balloon, in whole pages. Returns whether that is
    /// a change; `None` if it is more than RAM.
    pub fn set_target(&mut self, bytes: u64) -> Option<bool> {
        let pages = u32::try_from(bytes / PAGE_SIZE).ok().filter(|_| bytes <= self.ram_bytes)?;
        Some(std::mem::replace(&mut self.target_pages, pages) != pages)
    }

    /// Has the driver give new statistics in the next turn, if it gives any.
    pub const fn ask(&mut self) {
        (self.asked, self.ever_asked) = (true, true);
    }

    /// What the device did, and what the guest says. `live`: whether a driver uses the device.
    pub fn status(&self, live: bool, features: u64, broken: Option<&Broken>) -> BalloonStatus {
        let actual_bytes = u64::from(self.actual_pages) * PAGE_SIZE;
        BalloonStatus {
            driver: live,
            reports: live && features & REPORTING != 0,
            broken: broken.map(ToString::to_string),
            target_bytes: u64::from(self.target_pages) * PAGE_SIZE,
            actual_bytes: actual_bytes.min(self.ram_bytes),
            discarded_bytes: self.discarded_bytes,
            refused: self.refused,
            guest: self.guest,
        }
    }

    /// The state to be saved.
    pub const fn save(&self) -> BalloonState {
        BalloonState { target_pages: self.target_pages, actual_pages: self.actual_pages }
    }

    /// Whether a VM with this RAM can have had the state.
    pub fn fits(&self, state: &BalloonState) -> bool {
        u64::from(state.target_pages) * PAGE_SIZE <= self.ram_bytes
    }

    /// Loads a state that fits.
    pub const fn load(&mut self, state: &BalloonState) {
        (self.target_pages, self.actual_pages) = (state.target_pages, state.actual_pages);
    }

    /// Serves all queues for one turn. Returns whether work may be left.
    ///
    /// # Errors
    /// [`Broken`], also for a chain whose buffers have the wrong direction.
    pub fn serve(&mut self, turn: &mut Turn<'_>) -> Result<bool, Broken> {
        let Turn { mem, writes, pages, queues, features, interrupt, stop } = turn;
        let [inflate, deflate, others @ ..] = &mut **queues else { return Ok(false) };
        let mut others = others.iter_mut();
        let mut queue_of = |feature: u64| {
            if *features & feature == 0 { None } else { others.next() }
        };
        let (statistics, reporting) = (queue_of(STATISTICS), queue_of(REPORTING));
        let ram = &mut Ram { mem, writes, pages, left: TURN_BYTES };

        let mut more = false;
        if let Some(queue) = statistics {
            more |= self.take_statistics(&mut Ring::new(queue, mem, writes), interrupt)?;
        }
        let ring = &mut Ring::new(deflate, mem, writes);
        // The guest may use these pages already, and touching them is all that they need.
        more |= use_chains(ring, interrupt, stop, ram, |_, chain| {
            readable(chain)?;
            Ok(true)
        })?;
        let ring = &mut Ring::new(inflate, mem, writes);
        more |= use_chains(ring, interrupt, stop, ram, |ram, chain| self.inflate(ram, chain))?;
        if let Some(queue) = reporting {
            let ring = &mut Ring::new(queue, mem, writes);
            more |= use_chains(ring, interrupt, stop, ram, |ram, chain| self.report(ram, chain))?;
        }
        Ok(more)
    }

    /// Discards pages that the driver took from its guest: the chain holds their numbers. Returns
    /// whether the chain is done.
    fn inflate(&mut self, ram: &mut Ram<'_>, chain: &Chain<'_>) -> Result<bool, Broken> {
        let numbers = readable(chain)?;
        if ram.writes.watched() {
            self.inflated = 0;
            return Ok(true);
        }
        let mut bytes = [0; NUMBER_BYTES * MOST_PAGES];
        // A single page may cost a call.
        let most = (ram.left / STEP_BYTES).min(MOST_PAGES) * NUMBER_BYTES;
        let got = numbers.window(self.inflated, most).copy_to(&mut bytes);
        let (pages, _) = bytes[..got].as_chunks::<NUMBER_BYTES>();
        let mut pages: Vec<u32> = pages.iter().map(|page| u32::from_le_bytes(*page)).collect();
        pages.sort_unstable();
        pages.dedup();
        let mut list = IoList::noted(ram.writes);
        for run in pages.chunk_by(|page, next| page.checked_add(1) == Some(*next)) {
            let (Some(first), len) = (run.first(), run.len() * PAGE) else {
                continue;
            };
            let at = GuestAddress(u64::from(*first) * PAGE_SIZE);
            let Ok(slices) = ram.mem.get_slices(at, len, Permissions::Write) else {
                self.refused += 1;
                continue;
            };
            for slice in slices {
                match slice {
                    Ok(slice) => list.push(slice),
                    Err(_) => self.refused += 1,
                }
            }
        }
        self.discard(ram, &list);
        self.inflated += got;
        Ok(done(&mut self.inflated, numbers.len()))
    }

    /// Discards the free blocks that the driver reports: they are the chain's buffers. Returns
    /// whether the chain is done.
    fn report(&mut self, ram: &mut Ram<'_>, chain: &Chain<'_>) -> Result<bool, Broken> {
        let Chain { head, readable, writable, .. } = chain;
        if writable.is_empty() || !readable.is_empty() {
            let what = "expected writable buffers only";
            return Err(Broken::Chain { head: *head, what });
        }
        if ram.writes.watched() {
            self.reported = 0;
            return Ok(true);
        }
        let part = writable.window(self.reported, ram.left);
        self.discard(ram, &part);
        self.reported += part.len();
        Ok(done(&mut self.reported, writable.len()))
    }

    fn discard(&mut self, ram: &mut Ram<'_>, list: &IoList<'_>) {
        for piece in list.pieces() {
            match discard(piece) {
                Ok(bytes) => self.discarded_bytes += bytes as u64,
                Err(_) => self.refused += 1,
            }
            let cost = piece.len().max(STEP_BYTES).next_multiple_of(PAGE);
            ram.left = ram.left.saturating_sub(cost);
        }
        // A copy of RAM may have begun meanwhile.
        list.written(list.len());
        // The thread of the disks holds the map for as long as the host's disk takes. The map is a
        // hint, so it is not waited for.
        if let Ok(mut pages) = ram.pages.try_lock() {
            pages.lost(list);
        }
    }

    /// Reads the statistics in the buffer that the driver made available last. The buffer stays
    /// available until new statistics are asked for, so the device has nothing to save.
    fn take_statistics(
        &mut self,
        ring: &mut Ring<'_, '_>,
        interrupt: &Interrupt,
    ) -> Result<bool, Broken> {
        if !ring.ready() || !self.ever_asked {
            return Ok(false);
        }
        if self.asked
            && let Some(chain) = ring.pop()?
        {
            readable(&chain)?;
            self.asked = false;
            ring.push(chain.head, 0)?;
            ring.signal(interrupt)?;
        }
        let seen = ring.available()?;
        if let Some(chain) = ring.pop()? {
            self.guest = GuestMemory::read(readable(&chain)?);
            ring.unpop(1);
        }
        ring.listen_beyond(seen)
    }
}

/// Serves the chains of a queue with `act`, until there are none, the turn ends, or `act` returns
/// that a chain is not done. Returns whether work may be left.
fn use_chains<'m>(
    ring: &mut Ring<'_, 'm>,
    interrupt: &Interrupt,
    stop: &dyn Fn() -> bool,
    ram: &mut Ram<'_>,
    mut act: impl FnMut(&mut Ram<'_>, &Chain<'m>) -> Result<bool, Broken>,
) -> Result<bool, Broken> {
    // The driver kicks for the next chain, because the queue was empty when it was served last.
    if !ring.ready() || ring.waiting()? == 0 {
        return Ok(false);
    }
    loop {
        ring.hush()?;
        while let Some(chain) = ring.pop()? {
            if ram.left == 0 || stop() || !act(ram, &chain)? {
                ring.unpop(1);
                return Ok(true);
            }
            ram.left = ram.left.saturating_sub(STEP_BYTES);
            ring.push(chain.head, 0)?;
            ring.signal(interrupt)?;
        }
        if !ring.listen()? {
            return Ok(false);
        }
    }
}

/// The buffers of a chain that the device only reads.
const fn readable<'c, 'm>(chain: &'c Chain<'m>) -> Result<&'c IoList<'m>, Broken> {
    if chain.readable.is_empty() || !chain.writable.is_empty() {
        return Err(Broken::Chain { head: chain.head, what: "expected readable buffers only" });
    }
    Ok(&chain.readable)
}

/// Whether `handled` bytes are all of a chain; if so, the next chain begins at 0.
const fn done(handled: &mut usize, len: usize) -> bool {
    let done = *handled >= len;
    if done {
        *handled = 0;
    }
    done
}
