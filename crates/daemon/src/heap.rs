//! The daemon's own memory: what bursts of births leave of it in the allocator goes back to the host.
//!
//! Half a MiB is in use between two bursts, however many have been. What glibc held besides grew with each of them, to ten times as much
//! after ten thousand births, because every thread keeps freed pieces of every size for itself (heaptrack, `make bench BENCH=soak`; without
//! those caches the daemon grows by 2 % in that time instead of 9, and births take as long).

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// What glibc reads before main (`GLIBC_TUNABLES`): no caches of threads; few heaps, each of which has free memory of its own.
const TUNABLES: [(&str, &str); 2] = [("glibc.malloc.tcache_count", "0"), ("glibc.malloc.arena_max", "2")];
const VARIABLE: &str = "GLIBC_TUNABLES";
/// How often it is looked at.
const TICK: Duration = Duration::from_secs(1);
/// How much more than after the last time is free before it is worth the work.
const WORTH_BYTES: usize = 256 << 10;
/// Starts this program again, as the same process, with an allocator that keeps less; nothing where somebody has tuned it already, or
/// where the program cannot be started.
pub fn keep_less() {
    let set = std::env::var(VARIABLE).unwrap_or_default();
    if TUNABLES.iter().any(|(name, _)| set.contains(name)) {
        return;
    }
    let ours = TUNABLES.map(|(name, value)| format!("{name}={value}")).join(":");
    let all = if set.is_empty() { ours } else { format!("{set}:{ours}") };
    let mut arguments = std::env::args_os();
    let (Some(name), Ok(program)) = (arguments.next(), std::env::current_exe()) else { return };
    // Returns only where it fails, which costs memory and nothing else.
    let _ = Command::new(program).arg0(name).args(arguments).env(VARIABLE, all).exec();
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
