//! Reads of a disk that are in flight together.
//!
//! A read of cached data takes as long as it takes to copy it; a read of the host's disk takes a
//! hundred times as long, and several at once hardly longer than one. So reads that would wait are
//! given to a ring ([`super::uring`]), and their requests are answered in the order in which they
//! end. Writes are not: the host's page cache takes them, and ext4 has no way to write without
//! waiting, so a ring gives each write to a kernel thread, which takes 1.3 to 2 times as long
//! (`docs/lab-notes/2026-11-29-io-uring.md`). A write that has no space goes back to the queue, and
//! that works only for the request taken last.
//!
//! ```text
//!                  nothing else to do          other reads wait or are in flight
//! part of a read ─▶ preadv2, RWF_NOWAIT        │
//!                    │ cached     │ not cached ▼
//!                    ▼            └─────────▶ ring ─▶ completion ─▶ last part of its request?
//!                   done                       │ error, short read       │ yes
//!                                              └▶ read again, preadv     ▼ answer
//! ```
//!
//! - What the first read of a file learns decides for that file: on a file system that cannot say
//!   whether it would wait (`EOPNOTSUPP`: tmpfs, most network file systems), all reads are
//!   synchronous, because a ring would use kernel threads for each.
//! - The content of a leaf of a hash tree that was not checked yet arrives in a buffer of this
//!   process. Requests for a leaf that is in flight wait for it instead of reading it again, and it
//!   is hashed once for all of them.
//! - What is in flight is bounded, because a pause waits for it: [`MAX_IN_FLIGHT`] parts, and no
//!   request begins beyond [`MAX_BYTES`]. Beyond the parts, a request is read synchronously.
//! - The memory that the kernel writes belongs to the guest, or to a [`Flight`], which waits for
//!   the kernel before it ends. A flight begins and ends while its caller has the disk's lock, so
//!   a freeze, a save, a reset and a rebase never meet a read in flight.
//! - The kernel may have no memory for a request of the ring where preadv(2) needs none. Then the
//!   thread waits for what is in flight, and submits again. If nothing is in flight and it still
//!   has none, the ring is closed, and all reads are synchronous from then on.
//! - The kernel copies cached data while it submits, on the thread that submits. If the *guest's*
//!   page is missing then, because a clone's RAM arrives page by page (userfaultfd(2)), the thread
//!   waits for that page, as it does in preadv(2). Such reads come one after the other.

use super::checked::copy_leaf;
use super::cow::{Disk, Part, damaged};
use super::iolist::IoList;
use super::reads::{Nowait, Reads, learnt};
use super::uring::{Completion, MAX_IN_FLIGHT, Uring};
use dayfly_units::tree::Leaf;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

/// Bytes in flight from which on no request begins: 16 leaves of a hash tree. A disk under the
/// least limit that the daemon accepts, 64 KiB a second, makes a pause wait 16 s for them.
const MAX_BYTES: usize = 1 << 20;
/// How often the thread asks the kernel for a first request of a ring before it closes the ring.
const TRIES: u32 = 1000;

/// A part in flight.
#[derive(Debug)]
struct Op<'m> {
    what: What<'m>,
    /// The memory that the kernel writes; kept until the completion.
    iovecs: Vec<libc::iovec>,
}

#[derive(Debug)]
enum What<'m> {
    /// Bytes of a file, and the request that they are for.
    Bytes(Part<'m>, usize),
    /// A leaf of a layer's hash tree, and the parts of requests that are waiting for it.
    Leaf { layer: u8, leaf: Leaf, bytes: Vec<u8>, takers: Vec<(Part<'m>, usize)> },
}

/// A request with parts in flight.
#[derive(Debug)]
struct Request<T> {
    caller: T,
    parts: usize,
    failed: Option<io::Error>,
}

/// The reads of one disk that are in flight. `T` is what its caller keeps of a request.
#[derive(Debug)]
pub struct Flight<'m, 'r, T> {
    reads: &'r mut Reads,
    ops: Vec<Option<Op<'m>>>,
    requests: Vec<Option<Request<T>>>,
    /// Requests without parts in flight that were not returned yet.
    ended: Vec<usize>,
    in_flight: usize,
    /// The bytes that the parts in flight ask for.
    bytes: usize,
}

/// The result of [`Flight::read`].
#[derive(Debug)]
pub enum Started<T> {
    /// The read has ended.
    Done(T, io::Result<()>),
    /// It is in flight; [`Flight::finished`] returns it.
    InFlight,
}

impl Op<'_> {
    /// The bytes that it asks for.
    const fn len(&self) -> usize {
        match &self.what {
            What::Bytes(part, _) => part.list.len(),
            What::Leaf { bytes, .. } => bytes.len(),
        }
    }
}

impl<'m, 'r, T> Flight<'m, 'r, T> {
    /// Nothing in flight.
    ///
    /// # Safety
    /// The flight is dropped, not forgotten. Until then all of its calls are for one disk, and no
    /// layer of that disk is closed or replaced.
    pub unsafe fn new(reads: &'r mut Reads) -> Self {
        let (ops, requests, ended) = (Vec::new(), Vec::new(), Vec::new());
        Self { reads, ops, requests, ended, in_flight: 0, bytes: 0 }
    }

    /// Whether reads are in flight.
    #[must_use]
    pub const fn busy(&self) -> bool {
        self.in_flight > 0
    }

    /// Whether another request may begin.
    #[must_use]
    pub const fn has_room(&self) -> bool {
        self.in_flight < MAX_IN_FLIGHT && self.bytes < MAX_BYTES
    }

    /// How many requests a turn takes, as [`Reads::turn`], if nothing is in flight `least`.
    #[must_use]
    pub const fn turn(&self, least: usize) -> usize {
        if self.busy() { self.reads.turn(least) } else { least }
    }

    /// Whether another disk may have requests that wait for the end of this turn.
    #[must_use]
    pub const fn others_wait(&self) -> bool {
        self.reads.kicked && self.reads.disks > 1
    }

    /// Begins to fill `data` from byte `offset` of `disk` on. `alone`: nothing else can be done
    /// meanwhile, so that a read of cached data need not be batched. Nothing completes in here,
    /// because the request is noted only at the end.
    pub fn read(
        &mut self,
        disk: &mut Disk,
        offset: u64,
        data: &IoList<'m>,
        alone: bool,
        caller: T,
    ) -> Started<T> {
        if self.reads.ring.is_none() {
            return Started::Done(caller, disk.read(offset, data));
        }
        let free = self.requests.iter().position(Option::is_none);
        let number = free.unwrap_or(self.requests.len());
        if free.is_none() {
            self.requests.push(None);
        }
        let (mut nowait, mut parts) = (std::mem::take(&mut disk.nowait), 0);
        let begun = disk.each_part(offset, data, |part| {
            let layer = usize::from(part.layer);
            if nowait.len() <= layer {
                nowait.resize(layer + 1, Nowait::Unknown);
            }
            self.part(disk, &mut nowait[layer], part, alone, (number, &mut parts))
        });
        disk.nowait = nowait;
        if parts == 0 {
            return Started::Done(caller, begun);
        }
        self.requests[number] = Some(Request { caller, parts, failed: begun.err() });
        Started::InFlight
    }

    /// Reads a part, or puts it in flight. The last argument is the request's number, and how many
    /// of its parts are in flight.
    fn part(
        &mut self,
        disk: &Disk,
        nowait: &mut Nowait,
        part: Part<'m>,
        alone: bool,
        (request, parts): (usize, &mut usize),
    ) -> io::Result<()> {
        let Some(check) = disk.check(part.layer) else {
            *parts += usize::from(self.bytes(disk, nowait, part, alone, request)?);
            return Ok(());
        };
        let (layer, mut at, end) = (part.layer, part.at, part.at + part.list.len() as u64);
        while at < end {
            let (good, stop) = check.run(at, end);
            let skip = usize::try_from(at - part.at).unwrap_or(usize::MAX);
            let list = part.list.window(skip, usize::try_from(stop - at).unwrap_or(usize::MAX));
            let piece = Part { layer, at, list };
            *parts += usize::from(if good {
                self.bytes(disk, nowait, piece, alone, request)?
            } else {
                self.leaf(disk, nowait, piece, request)?
            });
            at = stop;
        }
        Ok(())
    }

    /// Reads bytes that need no check. Returns whether they are in flight.
    fn bytes(
        &mut self,
        disk: &Disk,
        nowait: &mut Nowait,
        part: Part<'m>,
        alone: bool,
        request: usize,
    ) -> io::Result<bool> {
        let ask = *nowait == Nowait::Unknown || alone && *nowait == Nowait::Supported;
        if ask && !self.reads.always {
            let file = disk.file(part.layer)?.0.as_fd();
            match part.list.read_cached(file, part.at) {
                Ok(read) if read == part.list.len() => {
                    *nowait = Nowait::Supported;
                    return Ok(false);
                }
                read => match learnt(&read) {
                    Some(known) => *nowait = known,
                    // The synchronous path repeats the read, or returns the error.
                    None => return disk.read_part(&part).map(|()| false),
                },
            }
        }
        if self.in_flight == MAX_IN_FLIGHT || *nowait == Nowait::Unsupported {
            return disk.read_part(&part).map(|()| false);
        }
        let iovecs = part.list.iovecs();
        if iovecs.iter().map(|iovec| iovec.iov_len).sum::<usize>() < part.list.len() {
            return disk.read_part(&part).map(|()| false);
        }
        let (file, at) = (disk.file(part.layer)?.0.as_fd(), part.at);
        self.submit(file, at, Op { what: What::Bytes(part, request), iovecs });
        Ok(true)
    }

    /// Reads a part of a leaf that was not checked yet. Returns whether it is in flight.
    fn leaf(
        &mut self,
        disk: &Disk,
        nowait: &mut Nowait,
        part: Part<'m>,
        request: usize,
    ) -> io::Result<bool> {
        let (Some(check), layer) = (disk.check(part.layer), part.layer) else { return Ok(false) };
        let file = disk.file(layer)?.0.as_fd();
        let wanted = check.expect(part.at).map_err(|e| damaged(e, layer, file))?;
        for op in self.ops.iter_mut().flatten() {
            if let What::Leaf { layer: of, leaf, takers, .. } = &mut op.what
                && (*of, *leaf) == (layer, wanted)
            {
                takers.push((part, request));
                return Ok(true);
            }
        }
        if self.in_flight == MAX_IN_FLIGHT || *nowait == Nowait::Unsupported {
            return disk.read_part(&part).map(|()| false);
        }
        let mut bytes = vec![0; wanted.length()];
        if !self.reads.always {
            let read = IoList::of(&mut bytes).read_cached(file, wanted.at());
            if matches!(read, Ok(read) if read == wanted.length()) {
                *nowait = Nowait::Supported;
                let checked = check.accept(&wanted, &bytes);
                let copied = checked.and_then(|()| copy_leaf(&bytes, part.at, &part.list));
                return copied.map(|()| false).map_err(|e| damaged(e, layer, file));
            }
            match learnt(&read) {
                Some(Nowait::Supported) => *nowait = Nowait::Supported,
                known => {
                    *nowait = known.unwrap_or(*nowait);
                    return disk.read_part(&part).map(|()| false);
                }
            }
        }
        // The bytes stay where they are when the vector moves.
        let iovecs = IoList::of(&mut bytes).iovecs();
        let takers = vec![(part, request)];
        let what = What::Leaf { layer, leaf: wanted, bytes, takers };
        self.submit(file, wanted.at(), Op { what, iovecs });
        Ok(true)
    }

    /// Makes a read ready. [`Self::read`] has seen that there is a ring.
    fn submit(&mut self, file: BorrowedFd<'_>, at: u64, op: Op<'m>) {
        let free = self.ops.iter().position(Option::is_none);
        let place = free.unwrap_or(self.ops.len());
        if free.is_none() {
            self.ops.push(None);
        }
        let token = u32::try_from(place).unwrap_or(u32::MAX);
        (self.in_flight, self.bytes) = (self.in_flight + 1, self.bytes + op.len());
        let op = self.ops[place].insert(op);
        let Some(ring) = &mut self.reads.ring else { return };
        // SAFETY: the iovecs point to guest memory, which is mapped as long as the process lives
        // (`IoList<'m>` borrows it), or to the buffer in `op`. Both, and the vector of iovecs, stay
        // in `op` until the completion, because `drop` waits for all, and `new` demands that it is
        // called. No Rust reference to the memory is used meanwhile. The file stays open, which
        // `new` demands too.
        unsafe { ring.read(file, at, &op.iovecs, token) };
    }

    /// Submits the reads that were begun. Those of cached data end at once.
    ///
    /// If the ring fails while the kernel has reads in flight, the VM ends, because the kernel may
    /// write to the guest's memory at any later time.
    pub fn submit_all(&mut self, disk: &Disk) {
        self.enter(Some(disk), 0);
    }

    /// Submits the reads that were begun and waits until a read ends, or with `or_kick` until the
    /// eventfd is readable. May return before, so the caller takes what has ended and looks again.
    pub fn wait(&mut self, disk: &Disk, or_kick: bool) {
        if let (true, Some(kick), Some(ring)) = (or_kick, &self.reads.kick, &mut self.reads.ring) {
            // SAFETY: the eventfd lives in `self.reads`, longer than the borrow.
            ring.watch(unsafe { BorrowedFd::borrow_raw(kick.as_raw_fd()) });
        }
        self.enter(Some(disk), 1);
    }

    /// Enters the ring. Without `disk`, the reads that the kernel does not take are given up.
    fn enter(&mut self, disk: Option<&Disk>, least: u32) {
        let mut tries = 0;
        loop {
            let Some(ring) = &mut self.reads.ring else { return };
            let entered = ring.enter(least);
            let ready = ring.ready_reads();
            let ended = match entered {
                Ok(true) => return,
                // The reads that the kernel has give their memory back when they end.
                Ok(false) if ready < self.in_flight && least == 0 => return,
                Ok(false) if ready < self.in_flight => ring.wait_only(),
                Ok(false) if tries < TRIES => {
                    tries += 1;
                    std::thread::yield_now();
                    continue;
                }
                Ok(false) => return self.close_ring(disk),
                Err(source) => Err(source),
            };
            let Err(source) = ended else { return };
            crate::exit::fail(&RingError { in_flight: self.in_flight, ready, source });
        }
    }

    /// Closes the ring, of whose reads the kernel has taken none, and performs them synchronously.
    fn close_ring(&mut self, disk: Option<&Disk>) {
        (self.reads.ring, self.reads.refused) = (None, Some(libc::EAGAIN));
        crate::report::line(&format!(
            "io_uring: the kernel has no memory for {} reads of a disk; reads of disks come one \
             after the other from now on",
            self.in_flight
        ));
        for token in 0..u32::try_from(self.ops.len()).unwrap_or(u32::MAX) {
            if let Some(disk) = disk {
                self.complete(disk, token, None);
            }
        }
        (self.in_flight, self.bytes) = (0, 0);
    }

    /// Takes completions until a request has ended, and returns it; `None`: there is none.
    pub fn finished(&mut self, disk: &Disk) -> Option<(T, io::Result<()>)> {
        loop {
            if let Some(ended) = self.ended() {
                return Some(ended);
            }
            match self.reads.ring.as_mut()?.next()? {
                Completion::Wake => self.reads.empty_kick(),
                Completion::Read { token, bytes } => self.complete(disk, token, bytes),
            }
        }
    }

    fn ended(&mut self) -> Option<(T, io::Result<()>)> {
        let request = self.ended.pop().and_then(|number| self.requests.get_mut(number))?.take()?;
        Some((request.caller, request.failed.map_or(Ok(()), Err)))
    }

    fn complete(&mut self, disk: &Disk, token: u32, bytes: Option<usize>) {
        let Some(op) = self.ops.get_mut(token as usize).and_then(Option::take) else { return };
        (self.in_flight, self.bytes) = (self.in_flight - 1, self.bytes - op.len());
        match op.what {
            What::Bytes(part, request) => {
                part.list.written(part.list.len());
                let whole = bytes == Some(part.list.len());
                // The synchronous path knows what a short read or an error means.
                let read = if whole { Ok(()) } else { disk.read_part(&part) };
                self.end_part(request, read);
            }
            What::Leaf { layer, leaf, bytes: buffer, takers } => {
                let whole = bytes == Some(leaf.length());
                let check = disk.check(layer).filter(|_| whole);
                let good = check.is_some_and(|check| check.accept(&leaf, &buffer).is_ok());
                for (part, request) in takers {
                    let read = if good {
                        copy_leaf(&buffer, part.at, &part.list)
                    } else {
                        // The synchronous path knows what a short read, an error and a damaged leaf
                        // mean.
                        disk.read_part(&part)
                    };
                    self.end_part(request, read);
                }
            }
        }
    }

    fn end_part(&mut self, number: usize, read: io::Result<()>) {
        let Some(Some(request)) = self.requests.get_mut(number) else { return };
        if let Err(error) = read {
            request.failed.get_or_insert(error);
        }
        request.parts -= 1;
        if request.parts == 0 {
            self.ended.push(number);
        }
    }
}

impl<T> Drop for Flight<'_, '_, T> {
    /// Waits for the kernel, which writes into memory of `self`. Reads are in flight here only if
    /// the caller has panicked; their requests are not answered.
    fn drop(&mut self) {
        while self.in_flight > 0 {
            self.enter(None, 1);
            while let Some(completion) = self.reads.ring.as_mut().and_then(Uring::next) {
                match completion {
                    Completion::Wake => self.reads.empty_kick(),
                    Completion::Read { .. } => self.in_flight = self.in_flight.saturating_sub(1),
                }
            }
        }
        for op in self.ops.iter().flatten() {
            if let What::Bytes(part, _) = &op.what {
                part.list.written(part.list.len());
            }
        }
    }
}

/// The ring cannot be used any more, and the kernel may have reads in flight.
#[derive(Debug, thiserror::Error)]
#[error(
    "io_uring_enter for a disk: expected the kernel to go on with {in_flight} reads, of which it \
     has not taken {ready}; next: start the VM again, and report this as a bug of dayfly or of the \
     host's kernel"
)]
struct RingError {
    in_flight: usize,
    ready: usize,
    source: io::Error,
}
