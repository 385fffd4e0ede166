//! A VM that wants more of the host's memory than its limit permits, beside one that answers
//! requests. It alone must end, for that cause.
//!
//! The guest's RAM is within the limit. What a guest can make grow beyond it is its disk, if the
//! state folder is on a tmpfs, as here: its pages cannot be reclaimed.
//!
//! What else a guest may want too much of is bounded, and ends no VM: console, connections, threads
//! (docs/limits.md).

use super::network::published;
use super::options::SETTLE;
use super::peers;
use super::promises::Promises;
use crate::prelude::*;
use crate::testbed::host::MIB;
use crate::testbed::{Guest, Testbed};
use dayfly_api::types::{VmExit, VmLimits};
use dayfly_vmm::arch::layout;

/// Memory beyond RAM.
const LIMIT: u64 = 16 * MIB;
/// What the guest writes to its disk.
const WRITTEN: u64 = 128 * MIB;
const RAM: u64 = 64 * MIB;
/// How long the VM may take to end.
const WITHIN: Duration = Duration::from_secs(120);
/// Requests a second to the other VM.
const PER_SECOND: usize = 50;

/// A guest that fills its disk.
pub fn writing() -> Result<Guest> {
    let words = format!("until={:x} write={:x}", layout::GENERATION.0, WRITTEN / PAGE_SIZE);
    Ok(Guest { disk_bytes: 2 * WRITTEN, ..Guest::new("greedy", RAM, words)? })
}

/// Waits for the end of a VM.
async fn end(testbed: &Testbed, id: VmId) -> Result<VmExit> {
    let begun = Instant::now();
    while begun.elapsed() < WITHIN {
        if let Some(exit) = testbed.client.vm(&id.to_string()).await?.vm.exit {
            return Ok(exit);
        }
        let console = testbed.console(id);
        ensure!(!console.contains("written"), "VM {id}: it wrote {} and lives", Bytes(WRITTEN));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    bail!("VM {id}: it still runs; its console: {:?}", testbed.console(id));
}

/// Measures it.
pub async fn measure(
    testbed: &Testbed,
    serving: &Name,
    greedy: &Name,
    time: Duration,
    promises: &mut Promises,
) -> Result<Value> {
    let other = published(testbed, serving, VmLimits::default()).await?;
    peers::until_it_answers(other.udp, &[0; 8])?;
    tokio::time::sleep(SETTLE).await;
    let asking = peers::ask(other.udp, PER_SECOND, time);
    let limits = VmLimits { memory_max_bytes: Some(LIMIT), ..VmLimits::default() };
    let id = published(testbed, greedy, limits).await?.id;
    let exit = end(testbed, id).await?;
    let asked = asking.join().map_err(|_| anyhow!("the thread that asks panicked"))??;
    let lives = testbed.client.vm(&other.id.to_string()).await?.vm.exit.is_none();
    testbed.remove_all(&[id, other.id]).await?;
    println!("  greedy VM: {}", exit.message);
    let reason = json!(exit.reason);
    promises.is("end of a VM that wants memory", "memory", reason.as_str().unwrap_or_default());
    promises.is("the VM beside it lives", "yes", if lives { "yes" } else { "no" });
    promises.at_least("answers of the VM beside it, %", 99.0, asked.answered());
    Ok(json!({
        "limit_bytes": LIMIT, "exit": exit, "answered_percent": asked.answered(),
        "answers": Spread::of(&asked.us),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_wants_more_than_the_limit_and_has_room_on_its_disk() {
        let guest = writing().unwrap();
        let limit = RAM + RAM / 128 + LIMIT;
        assert!(WRITTEN > limit && WRITTEN <= guest.disk_bytes, "{guest:?}");
    }
}
