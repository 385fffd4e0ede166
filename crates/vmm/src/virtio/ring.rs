//! A virtqueue as devices use it: whole, checked chains come in, used buffers go out.

use super::interrupt::{Interrupt, USED_BUFFER};
use crate::disk::IoList;
use crate::memory::writes::Writes;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::{GuestMemory as _, GuestMemoryMmap, Permissions};

/// The driver broke a rule in a way that no request's answer can report. The device stops and asks
/// for a reset (virtio 1.2 section 2.1.1, DEVICE_NEEDS_RESET).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The rings' indices or addresses are invalid.
    #[error("queue: {0}")]
    Queue(String),
    /// A chain loops, points outside the table or outside memory, or is longer than the queue.
    #[error("descriptor chain {head}: {what}")]
    Chain {
        /// Index of the chain's first descriptor.
        head: u16,
        /// The rule that the chain breaks.
        what: &'static str,
    },
}

impl From<virtio_queue::Error> for Broken {
    fn from(error: virtio_queue::Error) -> Self {
        Self::Queue(error.to_string())
    }
}

/// A whole, checked chain. The driver may still change the buffers' content, so read each field
/// once.
#[derive(Debug)]
pub struct Chain<'m> {
    /// Index of the first descriptor, for [`Ring::push`].
    pub head: u16,
    /// Buffers that the device may read.
    pub readable: IoList<'m>,
    /// Buffers that the device may write.
    pub writable: IoList<'m>,
    /// Whether no readable buffer follows a writable one (2.7.4.2).
    pub in_order: bool,
}

/// A queue and the guest memory in which it lies.
#[derive(Debug)]
pub struct Ring<'q, 'm> {
    queue: &'q mut Queue,
    mem: &'m GuestMemoryMmap,
    writes: &'m Writes,
}

impl<'q, 'm> Ring<'q, 'm> {
    /// A ring over `queue`; a queue that is not ready gives no chains. Writes to the chains'
    /// buffers are logged in `writes`.
    pub const fn new(queue: &'q mut Queue, mem: &'m GuestMemoryMmap, writes: &'m Writes) -> Self {
        Self { queue, mem, writes }
    }

    /// Whether the driver has configured the queue.
    #[must_use]
    pub fn ready(&self) -> bool {
        self.queue.ready()
    }

    /// Takes the next chain that the driver made available.
    ///
    /// # Errors
    /// [`Broken`] if a chain cannot be walked to its end.
    pub fn pop(&mut self) -> Result<Option<Chain<'m>>, Broken> {
        if !self.queue.ready() {
            return Ok(None);
        }
        let longest = self.queue.size();
        let next = self.queue.iter(self.mem)?.next();
        next.map(|chain| walk(self.mem, self.writes, chain, longest)).transpose()
    }

    /// Undoes the last `count` calls of [`Self::pop`].
    pub fn unpop(&mut self, count: u16) {
        let next = self.queue.next_avail().wrapping_sub(count);
        self.queue.set_next_avail(next);
    }

    /// Returns a chain to the driver as used, with `len` bytes written.
    ///
    /// # Errors
    /// [`Broken`] if `head` lies outside the table.
    pub fn push(&mut self, head: u16, len: u32) -> Result<(), Broken> {
        Ok(self.queue.add_used(self.mem, head, len)?)
    }

    /// Raises the interrupt if the driver wants one for the chains pushed since the last call.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn signal(&mut self, interrupt: &Interrupt) -> Result<(), Broken> {
        if self.queue.needs_notification(self.mem)? {
            interrupt.raise(USED_BUFFER);
        }
        Ok(())
    }

    /// Asks the driver not to kick, because the device polls the queue anyway.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn hush(&mut self) -> Result<(), Broken> {
        if self.queue.ready() {
            self.queue.disable_notification(self.mem)?;
        }
        Ok(())
    }

    /// Asks the driver to kick when it makes another chain available. Returns `true` if there is
    /// one already: look again.
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

    /// The number of chains that the driver made available and the device has not taken.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn waiting(&self) -> Result<u16, Broken> {
        Ok(self.available()?.wrapping_sub(self.queue.next_avail()))
    }

    /// As [`Self::listen`], but asks for a kick beyond index `seen`, before the device has taken
    /// the chains up to there. Returns `true` if there is such a chain already.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn listen_beyond(&mut self, seen: u16) -> Result<bool, Broken> {
        // The crate sets the event index to the device's position, so move the position there and
        // back.
        let at = self.queue.next_avail();
        self.queue.set_next_avail(seen);
        let more = self.queue.enable_notification(self.mem);
        self.queue.set_next_avail(at);
        Ok(more?)
    }
}

/// Walks a chain to its end.
///
/// The crate's iterator stops silently at an invalid descriptor. Here a chain is an error unless
/// its last descriptor has no NEXT flag.
fn walk<'m>(
    mem: &'m GuestMemoryMmap,
    writes: &'m Writes,
    chain: DescriptorChain<&'m GuestMemoryMmap>,
    longest: u16,
) -> Result<Chain<'m>, Broken> {
    let head = chain.head_index();
    let broken = |what| Broken::Chain { head, what };
    let mut out =
        Chain { head, readable: IoList::new(), writable: IoList::noted(writes), in_order: true };
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
        let len =
            usize::try_from(descriptor.len()).map_err(|_| broken("a buffer longer than memory"))?;
        let outside = |_| broken("a buffer outside of memory");
        for piece in mem.get_slices(descriptor.addr(), len, access).map_err(outside)? {
            list.push(piece.map_err(outside)?);
        }
    }
    if ended { Ok(out) } else { Err(broken("loops, or points outside of its table or of memory")) }
}
