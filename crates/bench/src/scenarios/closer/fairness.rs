//! Three VMs with the same share of CPU time, or a booked CPU each if the host has enough, are
//! asked at 1:3:6 (Closer, Fig. 13). Each must carry its part of the I/O: what its devices and its
//! relay took, by its bill.
//!
//! The paper asks 1,000, 3,000 and 6,000 times a second on ten CPUs. Here the guests are emulated
//! and share two CPUs with all that serves them. Requests that are served together share wake-ups,
//! so each is cheaper, and those of the VM that is asked most would be served together most often.
//! So one client asks all three in a random order, and waits after each answer until all threads
//! that served it sleep ([`peers::ask_in_turns`]).

use super::groups::{Part, Tree};
use super::network::{Published, published};
use super::options::{Options, SETTLE};
use super::peers;
use super::promises::Promises;
use super::trace::Tracer;
use super::traced::MOST_MORE_CPUS;
use crate::prelude::*;
use crate::testbed::host::MIB;
use crate::testbed::{Guest, Testbed};
use dayfly_api::types::{CpuParts, VmLimits};
use dayfly_host::cpus;
use dayfly_vmm::arch::layout;

/// How often the VMs are asked.
const TIMES: [usize; 3] = [1, 3, 6];
/// The most by which a VM's part may differ from its part of the requests, in points of percent.
const POINTS: f64 = 1.0;
/// The least part of the requests that is answered, in percent.
const ANSWERED: f64 = 99.0;

const COLUMNS: [Column; 8] = [
    ("asked", "/sent", Plain),
    ("answered", "/answered", Plain),
    ("devices", "/io_us", Us),
    ("work", "/work_us", Us),
    ("idle", "/idle_us", Us),
    ("each", "/each_us", Us),
    ("expected", "/expected_percent", Digits(2)),
    ("got %", "/percent", Digits(2)),
];

/// A guest that answers each datagram.
pub fn serving() -> Result<Guest> {
    Guest::new("serves", 72 * MIB, format!("until={:x} serve", layout::GENERATION.0))
}

/// Each part of the sum, in percent.
fn shares(parts: [u64; 3]) -> [f64; 3] {
    let sum = parts.iter().sum();
    parts.map(|part| percent(part, sum))
}

/// What each VM's bill has for devices and for work.
async fn billed(testbed: &Testbed, vms: &[Published; 3]) -> Result<[CpuParts; 3]> {
    let mut all = Vec::new();
    for vm in vms {
        let usage = testbed.client.vm(&vm.id.to_string()).await?.usage;
        all.push(usage.and_then(|usage| usage.parts).context("a bill without parts")?);
    }
    all.try_into().map_err(|_| anyhow!("three VMs"))
}

/// What bills have more for devices and for work.
fn grown(before: &[CpuParts; 3], after: &[CpuParts; 3]) -> [(u64, u64); 3] {
    [0, 1, 2].map(|n| {
        let (before, after) = (&before[n], &after[n]);
        (after.io_us - before.io_us, after.work_us - before.work_us)
    })
}

/// Creates the VMs, and waits until they answer.
async fn answering(testbed: &Testbed, serving: &Name) -> Result<[Published; 3]> {
    let book = (cpus::online()?.len() > TIMES.len()).then_some(1);
    let limits = VmLimits { cpus_booked: book, ..VmLimits::default() };
    let mut vms = Vec::new();
    for _ in TIMES {
        vms.push(published(testbed, serving, limits).await?);
    }
    vms.iter().try_for_each(|vm| peers::until_it_answers(vm.udp, &[0; 8]))?;
    tokio::time::sleep(SETTLE).await;
    vms.try_into().map_err(|_| anyhow!("three VMs"))
}

/// Measures it.
pub async fn measure(
    options: &Options,
    testbed: &Testbed,
    serving: &Name,
    promises: &mut Promises,
) -> Result<Value> {
    let vms = answering(testbed, serving).await?;
    let tree = Tree::of(testbed.daemon()?)?;
    let mut tracer = Tracer::new(tree)?;
    let time = options.time();
    let at_first = billed(testbed, &vms).await?;
    let quiet = tracer.run(time).await?;
    let before = billed(testbed, &vms).await?;
    let asking = peers::ask_in_turns(vms.each_ref().map(|vm| vm.udp), TIMES, options.pause(), time);
    let busy = tracer.run(time).await?;
    let asked = asking.join().map_err(|_| anyhow!("the thread that asks panicked"))??;
    let after = billed(testbed, &vms).await?;
    testbed.remove_all(&vms.each_ref().map(|vm| vm.id)).await?;

    let idle = grown(&at_first, &before).map(|(io, work)| io + work);
    let grown = grown(&before, &after);
    let (expected, got) =
        (shares(TIMES.map(|times| times as u64)), shares(grown.map(|(io, work)| io + work)));
    let table = Table::new(4, "VM", &COLUMNS);
    let mut rows = Vec::new();
    for (n, asked) in asked.iter().enumerate() {
        let (io_us, work_us) = grown[n];
        let (count, answers) = (asked.us.len(), Spread::of(&asked.us));
        let row = json!({
            "sent": asked.sent, "answered": count, "io_us": io_us, "work_us": work_us,
            "idle_us": idle[n], "each_us": (io_us + work_us) / (count as u64).max(1),
            "expected_percent": expected[n], "percent": got[n], "answers": answers,
        });
        table.row(&(n + 1).to_string(), &row);
        rows.push(row);
        let what = format!("I/O on the bill of VM {}, %", n + 1);
        promises.about(what, expected[n], POINTS, got[n]);
        promises.at_least(format!("answers of VM {}, %", n + 1), ANSWERED, asked.answered());
    }
    let [idle, main] = [&quiet, &busy].map(|times| times.cpus_of(Part::Main));
    println!("  group main: {main:.4} CPUs; {idle:.4} without requests, ratio {:.2}", main / idle);
    promises.at_most("main beside requests, CPUs more", MOST_MORE_CPUS, main - idle);
    Ok(json!({
        "vms": rows, "traced_s": busy.figures(), "main_cpus": rounded(main),
        "main_idle_cpus": rounded(idle), "main_ratio": rounded(main / idle),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_sum() {
        assert_eq!(shares([1, 3, 6]), [10.0, 30.0, 60.0]);
        assert_eq!(shares([0, 0, 7]), [0.0, 0.0, 100.0]);
        assert_eq!(shares([0; 3]), [0.0; 3]);
    }
}
