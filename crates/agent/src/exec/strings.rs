//! The arguments and the environment of a program, if they come in frames of their own.
//!
//! They are in memory as frames, as strings and as execve(2) takes them: about 10 MiB. So only some
//! connections have a [`Place`] for them, from the request to the start of the program. All others
//! wait, and their frames wait in the sockets.

use crate::wire::{Conn, Filled, TIMEOUT, WireError, wait};
use dayfly_api::agent::{Collector, ExecSpec, FrameKind};
use dayfly_units::sync::lock;
use rustix::event::PollFlags;
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// The most programs whose long arguments are in memory.
pub const AT_ONCE: usize = 4;
/// Time to wait for a place: as long as all connections that are ahead may take. A connection
/// occupies a thread meanwhile, and there are [`crate::server::MAX_WORKERS`].
const PATIENCE: Duration = Duration::from_secs(32 * TIMEOUT.as_secs());

/// Places for long arguments.
#[derive(Debug, Default)]
pub struct Places {
    taken: Mutex<usize>,
    freed: Condvar,
}

/// A place for the arguments of one program.
#[derive(Debug)]
pub struct Place<'a>(&'a Places);

impl Places {
    fn take(&self) -> Result<Place<'_>, WireError> {
        let taken = lock(&self.taken);
        let waited = self.freed.wait_timeout_while(taken, PATIENCE, |taken| *taken >= AT_ONCE);
        let (mut taken, waited) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        if waited.timed_out() {
            return Err(WireError::Crowded);
        }
        *taken += 1;
        Ok(Place(self))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *lock(&self.0.taken) -= 1;
        self.0.freed.notify_one();
    }
}

/// Reads the `Strings` frames that a program's request announces.
///
/// # Errors
/// Any [`WireError`]; `Late` if not all came within [`TIMEOUT`].
pub fn receive<'a>(
    places: &'a Places,
    conn: &mut Conn,
    spec: &mut ExecSpec,
) -> Result<Option<Place<'a>>, WireError> {
    let Some(mut collector) = Collector::of(spec)? else { return Ok(None) };
    let place = places.take()?;
    let until = Instant::now() + TIMEOUT;
    while !collector.is_complete() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(WireError::Late(TIMEOUT));
        }
        match conn.frame()? {
            Some((FrameKind::Strings, body)) => {
                collector.add(body)?;
                conn.consume();
            }
            Some((got, _)) => return Err(WireError::Unexpected { expected: "Strings", got }),
            None => match conn.fill()? {
                Filled::Some => {}
                Filled::Nothing => match wait(conn.as_fd(), PollFlags::IN, left) {
                    Err(WireError::Slow(_)) => return Err(WireError::Late(TIMEOUT)),
                    waited => waited?,
                },
                Filled::End => return Err(WireError::Closed),
            },
        }
    }
    collector.finish(spec)?;
    Ok(Some(place))
}
