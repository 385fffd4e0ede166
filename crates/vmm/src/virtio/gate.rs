//! Stopping the device thread between two requests.
//!
//! ```text
//! running ──pause──▶ pausing: the thread finishes its request ──▶ paused ──resume──▶ running
//! any ──stop──▶ stopping: the thread leaves its loop
//! ```
//! The device thread calls [`Gate::enter`] before it touches a device and [`Gate::leave`] after.
//! `pause` returns once the thread has left. The thread cannot enter again before `resume`, and
//! then serves the events of the meantime.

use dayfly_units::sync::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
struct State {
    paused_since: Option<Instant>,
    paused_before: Duration,
    serving: bool,
    stopping: bool,
    /// Threads that wait for a change.
    waiting: usize,
}

/// The gate between the device thread and the threads that pause it.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the device thread should leave soon. Only a hint, read without the lock.
    wanted: AtomicBool,
}

impl Gate {
    /// Waits until devices may be touched. Returns the device clock, which stands still while
    /// paused, or `None` if the thread must end.
    pub fn enter(&self) -> Option<Instant> {
        let mut state = lock(&self.state);
        while state.paused_since.is_some() && !state.stopping {
            state = self.wait(state);
        }
        if state.stopping {
            return None;
        }
        state.serving = true;
        let now = Instant::now();
        Some(now.checked_sub(state.paused_before).unwrap_or(now))
    }

    /// Reports that the device thread touches no device any more.
    pub fn leave(&self) {
        lock(&self.state).serving = false;
        self.changed.notify_all();
    }

    /// Whether another thread wants the device thread to leave.
    pub fn wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Waits until no request is in flight. Idempotent.
    pub fn pause(&self) {
        let mut state = lock(&self.state);
        state.paused_since.get_or_insert_with(Instant::now);
        self.wanted.store(true, Ordering::Relaxed);
        while state.serving {
            state = self.wait(state);
        }
    }

    /// Lets the device thread enter again. Idempotent.
    pub fn resume(&self) {
        let mut state = lock(&self.state);
        if let Some(since) = state.paused_since.take() {
            state.paused_before += since.elapsed();
        }
        self.wanted.store(state.stopping, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Ends the device thread, paused or not.
    pub fn stop(&self) {
        lock(&self.state).stopping = true;
        self.wanted.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Whether the gate is paused.
    pub fn paused(&self) -> bool {
        lock(&self.state).paused_since.is_some()
    }

    /// Waits for a change of the state.
    fn wait<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.waiting += 1;
        let mut state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    /// The number of threads that wait: the device thread to enter, others until it has left.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        lock(&self.state).waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::virtio::testing::until;
    use std::sync::mpsc::{TryRecvError, channel};

    const LONG: Duration = Duration::from_secs(300);

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
            until("`pause` waits", || gate.waiting() == 1);
            assert_eq!(is_paused.try_recv(), Err(TryRecvError::Empty), "still inside");
            assert!(gate.wanted(), "the thread is asked to come out");
            gate.leave();
            is_paused.recv_timeout(LONG).unwrap();

            let (entered, has_entered) = channel();
            scope.spawn(move || {
                let now = gate.enter();
                entered.send(now.is_some()).unwrap();
                gate.leave();
            });
            until("`enter` waits", || gate.waiting() == 1);
            assert_eq!(has_entered.try_recv(), Err(TryRecvError::Empty), "paused");
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
        let (gate, begun) = (Gate::default(), Instant::now());
        let before = gate.enter().unwrap();
        gate.leave();
        gate.pause();
        let paused = Instant::now();
        until("the host's clock goes on", || paused.elapsed() > Duration::from_millis(20));
        let stood = paused.elapsed();
        gate.resume();
        let after = gate.enter().unwrap();
        // Holds however slow this thread is: the pause is longer than what was measured in it.
        let (passed, most) = (after - before, begun.elapsed() - stood);
        assert!(passed <= most, "{passed:?} passed, at most {most:?} of them not paused");
    }
}
