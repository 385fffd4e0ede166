//! # volume
//!
//! DOCS

pub mod arguments;
pub mod attr;
pub mod filter;
#[doc(hidden)]
pub mod fuzzing;
pub mod handles;
pub mod jail;
pub mod message;
pub mod nodes;
pub mod ops;
pub mod options;
pub mod own;
pub mod owner;
pub mod serve;
pub mod start;
pub mod wire;

pub use options::{Options, StartError};
pub use serve::{ServeError, serve};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks. A thread that panicked with the lock ends the process, so what it left is not used long.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
