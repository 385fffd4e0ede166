//! Limits the number of connections that are served at a time.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// A counter of free slots. A caller that finds none free waits.
#[derive(Debug)]
pub struct Slots {
    free: Mutex<usize>,
    returned: Condvar,
}

/// One taken slot of [`Slots`]; dropping it frees the slot.
#[derive(Debug)]
pub struct Slot(Arc<Slots>);

impl Slots {
    /// A counter with `count` free slots.
    #[must_use]
    pub fn new(count: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::new(count), returned: Condvar::new() })
    }

    /// Takes a slot. Waits until one is free.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> Slot {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.returned.wait_while(free, |free| *free == 0);
        *free.unwrap_or_else(PoisonError::into_inner) -= 1;
        Slot(Arc::clone(self))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.returned.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn never_more_are_taken_than_there_are_and_all_come_back() {
        let (slots, now, most) = (Slots::new(3), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let _slot = slots.take();
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::yield_now();
                        now.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.load(Ordering::SeqCst) <= 3, "{most:?}");
        let all = [slots.take(), slots.take(), slots.take()];
        assert_eq!(*slots.free.lock().unwrap(), 0);
        drop(all);
        assert_eq!(*slots.free.lock().unwrap(), 3);
    }
}
