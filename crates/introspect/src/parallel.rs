//! Distributes work over the CPUs, in chunks of frames.

use dayfly_units::sync::lock;
use std::ops::Range;
use std::sync::Mutex;
use std::thread;

/// Upper limit for threads. The work waits for memory, so more threads do not make it faster.
const MAX_THREADS: usize = 8;

fn threads(jobs: usize) -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS).min(jobs)
}

/// Calls `work` for each job, several at a time, in the order of the jobs. The results have the
/// order of the jobs.
pub(crate) fn each<J: Send, T: Send>(jobs: Vec<J>, work: impl Fn(J) -> T + Sync) -> Vec<T> {
    let count = threads(jobs.len());
    let queue = Mutex::new(jobs.into_iter().enumerate());
    let run = || {
        let mut done = Vec::new();
        loop {
            let next = lock(&queue).next();
            let Some((at, job)) = next else { break done };
            done.push((at, work(job)));
        }
    };
    let mut done = thread::scope(|scope| {
        let others: Vec<_> = (1..count).map(|_| scope.spawn(run)).collect();
        let mut done = run();
        for other in others {
            match other.join() {
                Ok(results) => done.extend(results),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Calls `work` for each chunk of the numbers below `end`, several at a time. The results have the
/// order of the chunks.
pub(crate) fn chunks<T: Send>(
    end: usize,
    chunk: usize,
    work: impl Fn(Range<usize>) -> T + Sync,
) -> Vec<T> {
    each((0..end).step_by(chunk).map(|at| at..end.min(at + chunk)).collect(), work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_comes_once_and_in_order() {
        for end in [0, 1, 9, 10, 11, 1000] {
            let seen: Vec<usize> = chunks(end, 10, Iterator::collect::<Vec<_>>).concat();
            assert_eq!(seen, (0..end).collect::<Vec<_>>());
        }
    }
}
