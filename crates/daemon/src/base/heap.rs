//! Keeps the daemon's heap small: free memory that bursts of requests leave in the allocator goes
//! back to the host.
//!
//! With glibc's defaults the heap grows with each burst, because every thread caches freed pieces
//! of every size. Without these caches the daemon grows by 2 % in `make bench BENCH=soak` instead
//! of 9 %, and creating a VM takes as long.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Options that glibc reads before `main` (`GLIBC_TUNABLES`): no caches per thread, and two arenas,
/// because each arena keeps its own free memory.
const TUNABLES: [(&str, &str); 2] =
    [("glibc.malloc.tcache_count", "0"), ("glibc.malloc.arena_max", "2")];
const VARIABLE: &str = "GLIBC_TUNABLES";
/// Period at which [`give_back`] looks at the free bytes.
const TICK: Duration = Duration::from_secs(1);
/// Growth of the free bytes since the last trim that makes another trim worth its work.
const WORTH_BYTES: usize = 256 << 10;
/// Executes this program again in the same process, with the allocator tuned. Does nothing if the
/// environment tunes the same options already, or if the program cannot be executed.
pub fn keep_less() {
    let set = std::env::var(VARIABLE).unwrap_or_default();
    if TUNABLES.iter().any(|(name, _)| set.contains(name)) {
        return;
    }
    let ours = TUNABLES.map(|(name, value)| format!("{name}={value}")).join(":");
    let all = if set.is_empty() { ours } else { format!("{set}:{ours}") };
    let mut arguments = std::env::args_os();
    let (Some(name), Ok(program)) = (arguments.next(), std::env::current_exe()) else { return };
    // exec(3) returns only on failure, which costs memory and nothing else.
    let _ = Command::new(program).arg0(name).args(arguments).env(VARIABLE, all).exec();
}

/// Free bytes that the allocator keeps.
fn free_bytes() -> usize {
    // SAFETY: mallinfo2(3) takes no argument and returns a struct of integers.
    let info = unsafe { libc::mallinfo2() };
    info.fordblks
}

/// Returns free memory to the host when enough of it has accumulated, until `stop`.
pub async fn give_back(stop: CancellationToken) {
    let mut left = 0;
    loop {
        tokio::select! {
            () = tokio::time::sleep(TICK) => {}
            () = stop.cancelled() => return,
        }
        if free_bytes() > left + WORTH_BYTES {
            // SAFETY: malloc_trim(3) returns free pages; it takes the arenas' locks, one after the
            // other.
            let trimmed = tokio::task::spawn_blocking(|| unsafe { libc::malloc_trim(0) });
            // An error means that the runtime is ending.
            let _ = trimmed.await;
            left = free_bytes();
        }
    }
}
