//! Counts for tests what a thread asks of the disk while it holds the publish lock. Outside tests
//! nothing is counted.

#[cfg(not(test))]
mod uncounted {
    #[inline]
    pub(crate) const fn begin() {}
    #[inline]
    pub(crate) const fn end() {}
    #[inline]
    pub(crate) const fn operation() {}
}
#[cfg(not(test))]
pub(crate) use uncounted::{begin, end, operation};

#[cfg(test)]
pub(crate) use counted::{begin, counted, end, operation};

#[cfg(test)]
mod counted {
    use std::cell::Cell;

    thread_local! {
        static IS_LOCKED: Cell<bool> = const { Cell::new(false) };
        static COUNT: Cell<usize> = const { Cell::new(0) };
    }

    /// The lock was taken.
    pub(crate) fn begin() {
        IS_LOCKED.set(true);
    }

    /// The lock is released.
    pub(crate) fn end() {
        IS_LOCKED.set(false);
    }

    /// The disk is asked for something.
    pub(crate) fn operation() {
        if IS_LOCKED.get() {
            COUNT.set(COUNT.get() + 1);
        }
    }

    /// Runs `run` and returns the number of operations under the lock.
    pub(crate) fn counted<T>(run: impl FnOnce() -> T) -> (T, usize) {
        COUNT.set(0);
        let result = run();
        (result, COUNT.get())
    }
}
