//! Locks that do not fail.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks. A thread that panicked with the lock ends the process, so what it left is not used long.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
