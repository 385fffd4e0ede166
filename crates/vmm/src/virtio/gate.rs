//! Stopping the device threads while no request is in flight.
//!
//! ```text
//! running ──pause──▶ pausing: each thread ends its requests ──▶ paused ──resume──▶ running
//! any ──stop──▶ stopping: each thread leaves its loop
//! ```
//! A device thread calls [`Gate::enter`] before it touches a device and [`Gate::leave`] after.
//! `pause` asks all threads at once, and returns once the last one has left. No thread can enter
//! again before `resume`, and then each serves the events of the meantime. A thread inside waits
//! for no other device thread, so the order in which they leave does not matter.

use dayfly_units::sync::lock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
struct State {
    paused_since: Option<Instant>,
    paused_before: Duration,
    /// Device threads inside.
    serving: usize,
    stopping: bool,
    /// Threads that wait for a change.
    waiting: usize,
    /// How often a thread began to wait.
    #[cfg(test)]
    waits: usize,
}

/// The gate between the device threads and the threads that pause them.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the device threads should leave soon. Only a hint, read without the lock.
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
        state.serving += 1;
        let now = Instant::now();
        Some(now.checked_sub(state.paused_before).unwrap_or(now))
    }

    /// Reports that the calling device thread touches no device any more.
    pub fn leave(&self) {
        let mut state = lock(&self.state);
        state.serving -= 1;
        self.notify(state);
    }

    /// Whether another thread wants the device threads to leave.
    pub fn wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Waits until no request is in flight. Idempotent.
    pub fn pause(&self) {
        let mut state = lock(&self.state);
        state.paused_since.get_or_insert_with(Instant::now);
        self.wanted.store(true, Ordering::Relaxed);
        while state.serving > 0 {
            state = self.wait(state);
        }
    }

    /// Lets the device threads enter again. Idempotent.
    pub fn resume(&self) {
        let mut state = lock(&self.state);
        if let Some(since) = state.paused_since.take() {
            state.paused_before += since.elapsed();
        }
        self.wanted.store(state.stopping, Ordering::Relaxed);
        self.notify(state);
    }

    /// Ends the device threads, paused or not.
    pub fn stop(&self) {
        let mut state = lock(&self.state);
        state.stopping = true;
        self.wanted.store(true, Ordering::Relaxed);
        self.notify(state);
    }

    /// Whether the gate is paused.
    pub fn paused(&self) -> bool {
        lock(&self.state).paused_since.is_some()
    }

    /// Waits for a change of the state.
    fn wait<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        #[cfg(test)]
        {
            state.waits += 1;
        }
        state.waiting += 1;
        let mut state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    /// Wakes the threads that wait, if there are any: the standard library makes a system call even
    /// if there are none.
    fn notify(&self, state: MutexGuard<'_, State>) {
        let waiting = state.waiting;
        drop(state);
        if waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// The number of threads that wait: device threads to enter, others until all have left.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        lock(&self.state).waiting
    }

    /// How often a thread began to wait.
    #[cfg(test)]
    pub fn waits(&self) -> usize {
        lock(&self.state).waits
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
    fn pause_returns_when_the_last_of_two_threads_has_left() {
        let gate = Gate::default();
        gate.enter().unwrap();
        gate.enter().unwrap();
        std::thread::scope(|scope| {
            let (paused, is_paused) = channel();
            let gate = &gate;
            scope.spawn(move || {
                gate.pause();
                paused.send(()).unwrap();
            });
            until("`pause` waits", || gate.waiting() == 1);
            gate.leave();
            // The thread wakes, sees the other one, and waits again; or it has returned.
            let mut returned = false;
            until("`pause` waits again", || {
                returned = is_paused.try_recv().is_ok();
                returned || gate.waits() == 2
            });
            assert!(!returned, "one thread is inside");
            gate.leave();
            is_paused.recv_timeout(LONG).unwrap();
        });
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
