//! Stopping the device thread between two requests.
//!
//! ```text
//! running ──pause──▶ pausing: the thread finishes the request it is at ──▶ paused ──resume──▶ running
//! any ──stop──▶ stopping: the thread leaves its loop
//! ```
//! The thread asks [`Gate::enter`] before it touches a device and says [`Gate::leave`] after. `pause` returns once it
//! has left, and it cannot enter again before `resume`: what it has learned of in the meantime it serves then.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
struct State {
    paused_since: Option<Instant>,
    paused_before: Duration,
    serving: bool,
    stopping: bool,
}

/// The gate.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the thread should come out soon; only a hint.
    wanted: AtomicBool,
}

/// Takes a lock; a thread that panicked holding it left data that is still of the right types.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gate {
    /// Waits until devices may be touched; returns the device clock, which stands still while paused, or `None` when
    /// the thread is to end.
    pub fn enter(&self) -> Option<Instant> {
        let mut state = lock(&self.state);
        while state.paused_since.is_some() && !state.stopping {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.stopping {
            return None;
        }
        state.serving = true;
        let now = Instant::now();
        Some(now.checked_sub(state.paused_before).unwrap_or(now))
    }

    /// No device is being touched any more.
    pub fn leave(&self) {
        lock(&self.state).serving = false;
        self.changed.notify_all();
    }

    /// Whether someone wants the thread to leave.
    pub fn wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Returns when nothing is in flight. Idempotent.
    pub fn pause(&self) {
        let mut state = lock(&self.state);
        state.paused_since.get_or_insert_with(Instant::now);
        self.wanted.store(true, Ordering::Relaxed);
        while state.serving {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Lets the thread go on. Idempotent.
    pub fn resume(&self) {
        let mut state = lock(&self.state);
        if let Some(since) = state.paused_since.take() {
            state.paused_before += since.elapsed();
        }
        self.wanted.store(state.stopping, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Ends the thread, paused or not.
    pub fn stop(&self) {
        lock(&self.state).stopping = true;
        self.wanted.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Whether it is paused.
    pub fn paused(&self) -> bool {
        lock(&self.state).paused_since.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{RecvTimeoutError, channel};

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn pause_returns_when_the_thread_has_left_and_it_does_not_come_back_before_resume() {
        let gate = Gate::default();
        gate.enter().unwrap();
        std::thread::scope(|scope| {
            let (paused, is_paused) = channel();
            let gate = &gate;
            scope.spawn(move || {
                gate.pause();
                paused.send(()).unwrap();
            });
            assert_eq!(is_paused.recv_timeout(SHORT), Err(RecvTimeoutError::Timeout), "still inside");
            assert!(gate.wanted(), "the thread is asked to come out");
            gate.leave();
            is_paused.recv_timeout(LONG).unwrap();

            let (entered, has_entered) = channel();
            scope.spawn(move || {
                let now = gate.enter();
                entered.send(now.is_some()).unwrap();
                gate.leave();
            });
            assert_eq!(has_entered.recv_timeout(SHORT), Err(RecvTimeoutError::Timeout), "paused");
            gate.resume();
            assert_eq!(has_entered.recv_timeout(LONG), Ok(true));
            assert!(!gate.wanted());
        });
    }

    #[test]
    fn stop_ends_a_paused_thread_too() {
        let gate = Gate::default();
        gate.pause();
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| gate.enter());
            gate.stop();
            assert_eq!(inside.join().unwrap(), None);
        });
        gate.resume();
        assert!(gate.wanted() && gate.enter().is_none());
    }

    #[test]
    fn the_device_clock_stands_still_while_paused() {
        let gate = Gate::default();
        let before = gate.enter().unwrap();
        gate.leave();
        gate.pause();
        std::thread::sleep(SHORT * 4);
        gate.resume();
        let after = gate.enter().unwrap();
        assert!(after - before < SHORT * 4, "{:?} passed", after - before);
    }
}
