//! A virtqueue as devices use it: whole chains in, used buffers out, every shape checked.

use super::interrupt::{Interrupt, USED_BUFFER};
use crate::disk::IoList;
use crate::memory::writes::Writes;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::{GuestMemory as _, GuestMemoryMmap, Permissions};

/// The driver broke the rules in a way that no answer to a request can tell it: the device stops and asks for a
/// reset (virtio 1.2 section 2.1.1, DEVICE_NEEDS_RESET).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The rings' indices or addresses make no sense.
    #[error("queue: {0}")]
    Queue(String),
    /// A chain loops, points outside the table or outside memory, or is longer than the queue.
    #[error("descriptor chain {head}: {what}")]
    Chain {
        /// Its first descriptor.
        head: u16,
        /// What is wrong with it.
        what: &'static str,
    },
}

impl From<virtio_queue::Error> for Broken {
    fn from(error: virtio_queue::Error) -> Self {
        Self::Queue(error.to_string())
    }
}

/// A whole, checked chain. The driver may still change what the buffers contain: read a field once.
#[derive(Debug)]
pub struct Chain<'m> {
    /// Its first descriptor, to be handed back.
    pub head: u16,
    /// What the driver wrote.
    pub readable: IoList<'m>,
    /// What the device may write.
    pub writable: IoList<'m>,
    /// Whether no readable buffer follows a writable one (2.7.4.2).
    pub in_order: bool,
}

/// A queue and the memory it lies in.
#[derive(Debug)]
pub struct Ring<'q, 'm> {
    queue: &'q mut Queue,
    mem: &'m GuestMemoryMmap,
    writes: &'m Writes,
}

impl<'q, 'm> Ring<'q, 'm> {
    /// A queue to serve; one that is not ready gives no chains. What is written to their buffers is noted in `writes`.
    pub const fn new(queue: &'q mut Queue, mem: &'m GuestMemoryMmap, writes: &'m Writes) -> Self {
        Self { queue, mem, writes }
    }

    /// Whether the driver set the queue up.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.queue.ready()
    }

    /// The next chain that the driver made available.
    ///
    /// # Errors
    /// [`Broken`] for a chain that cannot be walked to its end.
    pub fn pop(&mut self) -> Result<Option<Chain<'m>>, Broken> {
        if !self.queue.ready() {
            return Ok(None);
        }
        let longest = self.queue.size();
        let next = self.queue.iter(self.mem)?.next();
        next.map(|chain| walk(self.mem, self.writes, chain, longest)).transpose()
    }

    /// Gives the last `count` popped chains back, to be popped again.
    pub fn unpop(&mut self, count: u16) {
        let next = self.queue.next_avail().wrapping_sub(count);
        self.queue.set_next_avail(next);
    }

    /// Hands a chain back with `len` bytes written.
    ///
    /// # Errors
    /// [`Broken`] where the head is outside the table.
    pub fn push(&mut self, head: u16, len: u32) -> Result<(), Broken> {
        Ok(self.queue.add_used(self.mem, head, len)?)
    }

    /// Raises the interrupt if the driver wants to hear of what was pushed since the last call.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn signal(&mut self, interrupt: &Interrupt) -> Result<(), Broken> {
        if self.queue.needs_notification(self.mem)? {
            interrupt.raise(USED_BUFFER);
        }
        Ok(())
    }

    /// Asks the driver not to kick: the device is looking anyway.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn hush(&mut self) -> Result<(), Broken> {
        if self.queue.ready() {
            self.queue.disable_notification(self.mem)?;
        }
        Ok(())
    }

    /// Asks the driver to kick when it makes more available than it has; `true`: it has by now, look again.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn listen(&mut self) -> Result<bool, Broken> {
        Ok(self.queue.ready() && self.queue.enable_notification(self.mem)?)
    }

    /// The driver's index of available chains.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn available(&self) -> Result<u16, Broken> {
        Ok(self.queue.avail_idx(self.mem, std::sync::atomic::Ordering::Acquire)?.0)
    }

    /// As [`Self::listen`], but for the next chain after the first `seen`, though the device has not taken those yet;
    /// `true`: there is one.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn listen_beyond(&mut self, seen: u16) -> Result<bool, Broken> {
        // The crate arms the event index where the device stands; move there and back.
        let at = self.queue.next_avail();
        self.queue.set_next_avail(seen);
        let more = self.queue.enable_notification(self.mem);
        self.queue.set_next_avail(at);
        Ok(more?)
    }
}

/// Walks a chain to its end. The crate's iterator stops silently at whatever it does not like; here a chain that does
/// not end with a descriptor that says so is an error.
fn walk<'m>(
    mem: &'m GuestMemoryMmap,
    writes: &'m Writes,
    chain: DescriptorChain<&'m GuestMemoryMmap>,
    longest: u16,
) -> Result<Chain<'m>, Broken> {
    let head = chain.head_index();
    let broken = |what| Broken::Chain { head, what };
    let mut out = Chain { head, readable: IoList::new(), writable: IoList::noted(writes), in_order: true };
    let (mut count, mut ended) = (0_u16, false);
    for descriptor in chain {
        if count == longest {
            return Err(broken("longer than the queue"));
        }
        count += 1;
        ended = !descriptor.has_next();
        let (list, access) = if descriptor.is_write_only() {
            (&mut out.writable, Permissions::Write)
        } else {
            out.in_order &= out.writable.is_empty();
            (&mut out.readable, Permissions::Read)
        };
        let len = usize::try_from(descriptor.len()).map_err(|_| broken("a buffer longer than memory"))?;
        let outside = |_| broken("a buffer outside of memory");
        for piece in mem.get_slices(descriptor.addr(), len, access).map_err(outside)? {
            list.push(piece.map_err(outside)?);
        }
    }
    if ended { Ok(out) } else { Err(broken("loops, or points outside of its table or of memory")) }
}
