//! The ends of programs without a client.
//!
//! The kernel gives the children of a thread that ends to the first thread of its process. That is
//! the agent's main thread, which reaps orphans (`init/reaper.rs`). The thread that started a
//! program without a client ends soon, so either thread may reap it: the main thread then passes
//! the status on to the one that minds the program.

use dayfly_api::agent::Exit;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long the main thread may take between reaping a program and passing its status on.
const PASSED_ON: Duration = Duration::from_secs(10);

/// The programs that are minded, by process id, until they are reaped.
static MINDED: Mutex<BTreeMap<u32, Arc<Slot>>> = Mutex::new(BTreeMap::new());

#[derive(Debug, Default)]
struct Slot {
    exit: Mutex<Option<Exit>>,
    passed_on: Condvar,
}

/// A program that is minded.
#[derive(Debug)]
pub(super) struct Minded {
    pid: u32,
    slot: Arc<Slot>,
}

fn minded() -> MutexGuard<'static, BTreeMap<u32, Arc<Slot>>> {
    MINDED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Minded {
    /// Expects the end of a program. Called on the thread that started it, because no other thread
    /// reaps it as long as that one lives.
    pub(super) fn new(pid: u32) -> Self {
        let slot = Arc::<Slot>::default();
        minded().insert(pid, Arc::clone(&slot));
        Self { pid, slot }
    }

    /// How the program ended, if the main thread has reaped it.
    pub(super) fn exit(&self) -> Option<Exit> {
        let exit = self.slot.exit.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.slot.passed_on.wait_timeout_while(exit, PASSED_ON, |exit| exit.is_none());
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Drop for Minded {
    fn drop(&mut self) {
        let mut minded = minded();
        // Another program may have the number already.
        if minded.get(&self.pid).is_some_and(|slot| Arc::ptr_eq(slot, &self.slot)) {
            minded.remove(&self.pid);
        }
    }
}

/// Passes on the status (waitpid(2)) of a child that the main thread has reaped.
pub(crate) fn reaped(pid: i32, status: i32) {
    let Some(slot) = u32::try_from(pid).ok().and_then(|pid| minded().remove(&pid)) else { return };
    let code = libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status));
    let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
    let exit = Exit { code, signal, timed_out: false };
    *slot.exit.lock().unwrap_or_else(PoisonError::into_inner) = Some(exit);
    slot.passed_on.notify_all();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_reaches_who_minds_the_program_and_no_other() {
        // Above the largest process id.
        let (one, other) = (Minded::new(u32::MAX / 4), Minded::new(u32::MAX / 4 + 1));
        let waits = std::thread::spawn(move || one.exit());
        reaped(i32::MAX / 2, 7 << 8);
        reaped(i32::MAX / 2, 9 << 8);
        let exit = waits.join().unwrap().unwrap();
        assert_eq!((exit.code, exit.signal), (Some(7), None));
        reaped(i32::MAX / 2 + 1, libc::SIGKILL);
        assert_eq!(other.exit().unwrap().signal, Some(libc::SIGKILL));
        let again = Minded::new(5_000_000);
        drop(Minded::new(5_000_000));
        drop(again);
        assert!(!minded().contains_key(&5_000_000));
    }
}
