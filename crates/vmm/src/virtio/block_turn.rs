//! A turn of a disk: requests are taken from the queue, performed, and answered.
//!
//! ```text
//! queue ─pop─▶ check ─▶ write, zeroes, flush: performed ─▶ status ─▶ used ring, interrupt
//!                  └──▶ read ─▶ in flight (`disk::flight`) ──▲
//! ```
//! Reads may be answered in another order than they were asked for, as virtio 1.2 allows for
//! requests that are available at the same time. Whatever ends a turn, its reads in flight are
//! answered before: between two turns a queue has only requests that the device has not begun.
//! So reads of one disk overlap, and those of two disks do not.

use super::block::{Block, Notes, Refusal, Status, Todo};
use super::interrupt::Interrupt;
use super::ring::{Broken, Chain, Ring};
use crate::disk::{Flight, IoList, Reads, Started};
use std::io;

/// Most requests that are served before other disks get their turn. A turn ends only when its reads
/// have ended, so a disk that has no other beside it has longer turns while it reads.
const MAX_TURN_REQUESTS: usize = 64;

/// A read, which may be in flight.
#[derive(Debug)]
struct InFlight<'m> {
    chain: Chain<'m>,
    data: IoList<'m>,
    offset: u64,
}

/// What became of a request.
enum Answer {
    /// It is answered, with this many bytes written to the chain `head`.
    Used { head: u16, len: u32 },
    /// Its read is in flight.
    InFlight,
    /// It waits for space.
    NoSpace,
}

/// The parts of a turn that all its steps need.
struct Turn<'t, 'n> {
    features: u64,
    interrupt: &'t Interrupt,
    notes: &'t mut Notes<'n>,
    stop: &'t dyn Fn() -> bool,
}

impl Block {
    /// Serves requests until there are none, `stop` returns true, or other disks have a turn. Notes
    /// in `pages` which frames met which blocks. Returns whether requests may be left.
    ///
    /// A request for which the host has no space goes back to the queue, as if it had never been
    /// taken. It and the requests after it wait until [`Self::retry`]. Until then the driver has no
    /// answer, so a saved VM has the request in its queue, and each clone performs it.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn serve<'m>(
        &mut self,
        ring: &mut Ring<'_, 'm>,
        features: u64,
        interrupt: &Interrupt,
        notes: &mut Notes<'_>,
        reads: &mut Reads,
        stop: &dyn Fn() -> bool,
    ) -> Result<bool, Broken> {
        if self.waits.is_some() {
            return Ok(false);
        }
        let mut turn = Turn { features, interrupt, notes, stop };
        // SAFETY: it is dropped at the end of this function, which holds `self`. All its calls get
        // `self.disk`. A request writes, zeroes or discards, which closes no layer and replaces
        // none.
        let mut flight: Flight<'m, '_, InFlight<'m>> = unsafe { Flight::new(reads) };
        let served = self.turn(ring, &mut turn, &mut flight);
        let mut ended = Ok(());
        while flight.busy() {
            turn.notes.clock.look();
            flight.wait(&self.disk, false);
            ended = ended.and(self.answer_ended(ring, &mut turn, &mut flight));
        }
        ended.and(served)
    }

    /// Takes requests and performs them, until the turn is over. Reads may be in flight then.
    fn turn<'m>(
        &mut self,
        ring: &mut Ring<'_, 'm>,
        turn: &mut Turn<'_, '_>,
        flight: &mut Flight<'m, '_, InFlight<'m>>,
    ) -> Result<bool, Broken> {
        let mut taken = 0;
        loop {
            ring.hush()?;
            // Whether the host's cache had no data, just now, for the only read in flight. It need
            // not be submitted before the wait for it.
            let mut lone = false;
            while flight.has_room()
                && let Some(chain) = ring.pop()?
            {
                let alone = !flight.busy() && ring.waiting()? == 0;
                let begun = self.begin(chain, alone, turn, flight)?;
                match begun {
                    Answer::Used { head, len } => {
                        ring.push(head, len)?;
                        ring.signal(turn.interrupt)?;
                    }
                    Answer::InFlight => {}
                    Answer::NoSpace => {
                        ring.unpop(1);
                        return Ok(false);
                    }
                }
                taken += 1;
                if taken >= flight.turn(MAX_TURN_REQUESTS) || (turn.stop)() {
                    return Ok(true);
                }
                lone = alone && matches!(begun, Answer::InFlight);
                if matches!(begun, Answer::Used { .. }) && flight.busy() {
                    // The reads before it are submitted before the next write is performed, or a
                    // guest that writes without end would hold them up.
                    break;
                }
            }
            if flight.busy() && !lone {
                flight.submit_all(&self.disk);
                self.answer_ended(ring, turn, flight)?;
            }
            if !flight.busy() {
                if !ring.listen()? {
                    return Ok(false);
                }
            } else if (turn.stop)() {
                return Ok(true);
            } else if !flight.has_room() || !ring.listen()? {
                turn.notes.clock.look();
                flight.wait(&self.disk, flight.has_room());
                self.answer_ended(ring, turn, flight)?;
                if (turn.stop)() || flight.others_wait() && ring.waiting()? == 0 {
                    return Ok(true);
                }
            }
        }
    }

    /// Performs a request and writes its status, or puts its read in flight.
    fn begin<'m>(
        &mut self,
        chain: Chain<'m>,
        alone: bool,
        turn: &mut Turn<'_, '_>,
        flight: &mut Flight<'m, '_, InFlight<'m>>,
    ) -> Result<Answer, Broken> {
        let Some(data_in) = chain.writable.len().checked_sub(1) else {
            return Err(Broken::Chain { head: chain.head, what: "no place for the status" });
        };
        let (status, written) = match self.request(&chain, data_in, turn.features, turn.notes) {
            Ok(Todo::Nothing(written)) => (Status::Ok, written),
            Ok(Todo::Read { offset, data }) => {
                let read = InFlight { chain, data: data.clone(), offset };
                return Ok(match flight.read(&mut self.disk, offset, &data, alone, read) {
                    Started::Done(read, result) => self.answer_read(&read, result, turn.notes),
                    Started::InFlight => Answer::InFlight,
                });
            }
            Err(Refusal::NoSpace(why)) => {
                self.counters.no_space = self.counters.no_space.saturating_add(1);
                self.waits = Some(why);
                return Ok(Answer::NoSpace);
            }
            Err(Refusal::Host(error)) => {
                self.count(&error);
                (Status::IoError, 0)
            }
            Err(Refusal::Request(status)) => {
                self.counters.refused = self.counters.refused.saturating_add(1);
                (status, 0)
            }
        };
        Ok(used(&chain, status, written))
    }

    /// Answers a request whose read has ended.
    fn answer_read(
        &mut self,
        read: &InFlight<'_>,
        result: io::Result<()>,
        notes: &mut Notes<'_>,
    ) -> Answer {
        let InFlight { chain, data, offset } = read;
        match result {
            Ok(()) => {
                notes.pages.filled(self.number, *offset, data);
                notes.meter.read(self.number, data.len());
                used(chain, Status::Ok, data.len())
            }
            Err(error) => {
                notes.pages.lost(data);
                self.count(&error);
                used(chain, Status::IoError, 0)
            }
        }
    }

    /// Answers the requests whose reads have ended, with one interrupt.
    fn answer_ended<'m>(
        &mut self,
        ring: &mut Ring<'_, 'm>,
        turn: &mut Turn<'_, '_>,
        flight: &mut Flight<'m, '_, InFlight<'m>>,
    ) -> Result<(), Broken> {
        let (mut pushed, mut answered) = (Ok(()), false);
        while let Some((read, result)) = flight.finished(&self.disk) {
            if let Answer::Used { head, len } = self.answer_read(&read, result, turn.notes) {
                pushed = pushed.and_then(|()| ring.push(head, len));
                answered = true;
            }
        }
        pushed?;
        if answered { ring.signal(turn.interrupt) } else { Ok(()) }
    }
}

/// Writes the status of a request that wrote `written` bytes.
fn used(chain: &Chain<'_>, status: Status, written: usize) -> Answer {
    let status_at = chain.writable.len().saturating_sub(1);
    chain.writable.window(status_at, 1).copy_from(&[status as u8]);
    // The used length counts from the first writable byte. After a failure no data is known to be
    // good, so only the status counts.
    let len = u32::try_from(written.saturating_add(1)).unwrap_or(u32::MAX);
    Answer::Used { head: chain.head, len }
}
