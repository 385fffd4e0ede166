//! Runs numbered pieces of work on all cores.

use crate::blob::fault;
use dayfly_units::sync::lock;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

/// The most threads of this process.
static MOST: AtomicUsize = AtomicUsize::new(usize::MAX);

/// From now on this process works with at most `most` threads, but at least one.
pub fn limit_threads(most: usize) {
    MOST.store(most.max(1), Ordering::Relaxed);
}

/// Number of threads: one for each core that this process may use, or 1 while faults are injected.
pub(crate) fn threads() -> usize {
    if fault::planned() {
        return 1;
    }
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    cores.min(MOST.load(Ordering::Relaxed))
}

/// Calls `work` once for every number below `pieces`. [`threads`] threads take the numbers in
/// ascending order, each thread with its own `state()`. After an error no further piece begins; the
/// error of the lowest failed piece is returned.
pub(crate) fn each<S, E: Send>(
    pieces: usize,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let failed: Mutex<Option<(usize, E)>> = Mutex::new(None);
    let run = || {
        let mut state = state();
        while !stop.load(Ordering::Relaxed) {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces {
                return;
            }
            if let Err(error) = work(&mut state, piece) {
                stop.store(true, Ordering::Relaxed);
                let mut failed = lock(&failed);
                if failed.as_ref().is_none_or(|(first, _)| piece < *first) {
                    *failed = Some((piece, error));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads().min(pieces) {
            // The control group may allow no more threads: those that there are do all.
            if Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    failed
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
        .map_or(Ok(()), |(_, error)| Err(error))
}

/// As [`each`], and returns the results in the order of the pieces.
pub(crate) fn map<S, T: Send, E: Send>(
    pieces: usize,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let done = Mutex::new(Vec::new());
    each(pieces, state, |state, piece| {
        let result = work(state, piece)?;
        lock(&done).push((piece, result));
        Ok(())
    })?;
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(piece, _)| *piece);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}
