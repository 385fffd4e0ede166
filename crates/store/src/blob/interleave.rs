//! Lets a test run one operation at each step of another. Outside tests it only locks.

use std::sync::{Mutex, MutexGuard};

/// Locks a mutex that an operation holds over changes of the disk.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(test)]
    tested::before_locking(mutex);
    dayfly_units::sync::lock(mutex)
}

#[cfg(test)]
pub(crate) use tested::{beside, step};

#[cfg(test)]
mod tested {
    use std::cell::{Cell, RefCell};
    use std::sync::mpsc::channel;
    use std::sync::{Mutex, TryLockError};

    type Action = Box<dyn FnOnce()>;

    thread_local! {
        /// Steps until this thread waits.
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
        static PAUSE: RefCell<Option<Action>> = const { RefCell::new(None) };
        /// What this thread does before it waits for a lock.
        static BLOCKED: RefCell<Option<Action>> = const { RefCell::new(None) };
    }

    /// A step of the operation on this thread.
    pub(crate) fn step() {
        match LEFT.get() {
            Some(0) => {
                LEFT.set(None);
                if let Some(pause) = PAUSE.take() {
                    pause();
                }
            }
            left => LEFT.set(left.map(|left| left - 1)),
        }
    }

    pub(super) fn before_locking<T>(mutex: &Mutex<T>) {
        if matches!(mutex.try_lock(), Err(TryLockError::WouldBlock))
            && let Some(blocked) = BLOCKED.take()
        {
            blocked();
        }
    }

    /// Runs `first` up to its step number `n`, then `second`, and then the rest of `first`. If
    /// `second` needs a lock that `first` holds, `first` ends before `second` goes on. `second` is
    /// not run if `first` has fewer steps; returns whether it was.
    pub(crate) fn beside(
        n: u32,
        first: impl FnOnce() + Send,
        second: impl FnOnce() + Send,
    ) -> bool {
        let (reached, is_reached) = channel::<()>();
        let (resume, is_resumed) = channel::<()>();
        let (ended, has_ended) = channel::<()>();
        std::thread::scope(|scope| {
            let first = scope.spawn(move || {
                let _ended = ended;
                LEFT.set(Some(n));
                PAUSE.set(Some(Box::new(move || {
                    reached.send(()).unwrap();
                    // An error: the second operation has ended.
                    let _ = is_resumed.recv();
                })));
                first();
                PAUSE.set(None);
            });
            let run = is_reached.recv().is_ok();
            if run {
                let second = scope.spawn(move || {
                    let resume_at_end = resume.clone();
                    BLOCKED.set(Some(Box::new(move || {
                        resume.send(()).unwrap();
                        // An error: the first operation has ended.
                        let _ = has_ended.recv();
                    })));
                    second();
                    BLOCKED.set(None);
                    drop(resume_at_end);
                });
                second.join().unwrap();
            }
            first.join().unwrap();
            run
        })
    }
}
