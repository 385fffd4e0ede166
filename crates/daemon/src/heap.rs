//! The daemon's own memory: what bursts of births leave of it in the allocator goes back to the host.
//!
//! Half a MiB is in use between two bursts, however many have been; without this the allocator held ten times as much after ten thousand
//! births (heaptrack, `make bench BENCH=soak`), and a little more after each.

use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How often it is looked at.
const TICK: Duration = Duration::from_secs(1);
/// How much more than after the last time is free before it is worth the work.
const WORTH_BYTES: usize = 256 << 10;
/// The most heaps that threads share: each has free memory of its own.
const ARENAS: libc::c_int = 2;

/// Few heaps for all threads. Before there is a second one.
pub fn share() {
    // SAFETY: mallopt(3) only sets a parameter of the allocator.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, ARENAS) };
}

/// Bytes that the allocator holds and nobody uses.
fn free_bytes() -> usize {
    // SAFETY: mallinfo2(3) takes nothing and gives a struct of integers.
    let info = unsafe { libc::mallinfo2() };
    info.fordblks
}

/// Gives back what is free, until `stop`.
pub async fn give_back(stop: CancellationToken) {
    let mut left = 0;
    loop {
        tokio::select! {
            () = tokio::time::sleep(TICK) => {}
            () = stop.cancelled() => return,
        }
        if free_bytes() > left + WORTH_BYTES {
            // SAFETY: malloc_trim(3) gives free pages back; it takes the heaps' locks, one after the other.
            let trimmed = tokio::task::spawn_blocking(|| unsafe { libc::malloc_trim(0) });
            // A daemon that ends has no use for it.
            let _ = trimmed.await;
            left = free_bytes();
        }
    }
}
