//! Who is charged for what: an independent tracer against the control groups, and what the daemon
//! itself takes (Closer, section V; Table II and Fig. 12, right).
//!
//! Three VMs write to memory and disk as fast as they can. Meanwhile the kernel reports each switch
//! between tasks on each CPU ([`super::perf`]). The time of each task is added up by the control
//! group of its process, and compared with the counters of the groups. *Unattributed* is the time
//! of the host's CPUs that is in no group: neither idle, nor of programs outside of the daemon's
//! tree. Of kernel threads, which work for other programs too, only what is above the time without
//! VMs counts.
//!
//! Before that, the CPU time and the memory of the daemon are measured without VMs and beside many
//! idle ones: what the provider pays (Table II, the main container).

use super::groups::{Counters, Part, Tree};
use super::options::{Options, SETTLE};
use super::promises::Promises;
use super::trace::{Times, Tracer};
use crate::prelude::*;
use crate::proc;
use crate::testbed::host::MIB;
use crate::testbed::{Guest, Testbed};
use dayfly_host::cpu_time;
use dayfly_vmm::arch::layout;

/// VMs that write.
const WRITERS: usize = 3;
/// The most that the daemon may take beside idle VMs, in CPUs and in bytes.
const MOST_CPUS: f64 = 0.05;
const MOST_RESIDENT: u64 = 64 * MIB;
/// The most that group `main` may take more beside VMs at work, in CPUs.
pub const MOST_MORE_CPUS: f64 = 0.01;

/// Measures it; returns the figures, and how many processes were left.
pub async fn measure(
    options: &Options,
    places: &Places,
    promises: &mut Promises,
) -> Result<(Value, usize)> {
    let (idle, writes) = (Guest::idle("idle")?, writing()?);
    let mut testbed = Testbed::baked(places, &[idle.clone(), writes.clone()]).await?;
    // The idle VMs write nothing, and are many.
    testbed.start(&["--pool", "0", "--disk-share", "1M"]).await?;
    // So that zygotes and pagers run, and snapshots are open.
    for guest in [&idle, &writes] {
        let vm = testbed.create(&guest.name).await?.0;
        testbed.remove(vm.id).await?;
    }
    let time = options.time();
    let (quiet, without) = main_with(&testbed, time, 0).await?;
    let ids = match options.idle {
        0 => Vec::new(),
        many => testbed.at_once(&idle.name, many).await?.ids,
    };
    let (_, beside) = main_with(&testbed, time, ids.len()).await?;
    testbed.remove_all(&ids).await?;
    let cpus = beside["daemon_cpus"].as_f64().unwrap_or(f64::NAN);
    promises.at_most("dayflyd beside idle VMs, CPUs", MOST_CPUS, cpus);
    let resident = beside["daemon_resident_bytes"].as_u64().unwrap_or(u64::MAX);
    let mib = |bytes| float(bytes) / float(MIB);
    promises.at_most("dayflyd beside idle VMs, MiB", mib(MOST_RESIDENT), mib(resident));
    let traced = traced(&testbed, &writes, time, &quiet, promises).await?;
    Ok((json!({ "main": [without, beside], "traced": traced }), testbed.end()?))
}

/// A guest that writes to memory and disk as fast as it can, for ever.
fn writing() -> Result<Guest> {
    let words = format!("grow={:x}:40:1:1:c", layout::GENERATION.0);
    Ok(Guest { disk_bytes: 32 * MIB, ..Guest::new("writes", 72 * MIB, words)? })
}

/// What the daemon takes beside `vms` idle VMs, and what the tracer sees meanwhile.
async fn main_with(testbed: &Testbed, time: Duration, vms: usize) -> Result<(Times, Value)> {
    tokio::time::sleep(SETTLE).await;
    let pid = testbed.daemon()?;
    let cpu = || cpu_time::of_process(pid).context("the daemon's CPU time");
    let (mut tracer, before) = (Tracer::new(Tree::of(pid)?)?, cpu()?);
    let times = tracer.run(time).await?;
    let cpus = (cpu()? - before).as_secs_f64() / times.seconds();
    let resident = proc::field(&format!("/proc/{pid}/status"), "VmRSS")?;
    let resident: u64 = resident.trim_end_matches(" kB").parse().context("VmRSS")?;
    println!(
        "  daemon beside {vms} VMs: {cpus:.4} CPUs, {} resident; group main {:.4} CPUs",
        Bytes(resident << 10),
        times.cpus_of(Part::Main),
    );
    let figures = json!({
        "vms": vms, "daemon_cpus": cpus, "daemon_resident_bytes": resident << 10,
        "main_cpus": times.cpus_of(Part::Main),
    });
    Ok((times, figures))
}

/// Traces VMs that write, and compares the tracer with the groups and with the bills.
async fn traced(
    testbed: &Testbed,
    writes: &Guest,
    time: Duration,
    quiet: &Times,
    promises: &mut Promises,
) -> Result<Value> {
    let mut ids = Vec::new();
    for _ in 0..WRITERS {
        ids.push(testbed.create(&writes.name).await?.0.id);
    }
    tokio::time::sleep(SETTLE).await;
    let tree = Tree::of(testbed.daemon()?)?;
    let mut tracer = Tracer::new(tree.clone())?;
    let bills = bills(testbed, &ids).await?;
    let before = Counters::read(&tree)?;
    let times = tracer.run(time).await?;
    let counted = Counters::read(&tree)?.since(&before);
    let bills: Vec<Value> = bills_since(&bills, &self::bills(testbed, &ids).await?);
    testbed.remove_all(&ids).await?;
    let threads =
        times.of(Part::Kernel) - quiet.of(Part::Kernel) * times.seconds() / quiet.seconds();
    let groups = [Part::Main, Part::Vms, Part::Templates];
    let seen: f64 = groups.iter().map(|part| times.of(*part)).sum();
    let counters: f64 = groups.iter().map(|part| counted.of(*part)).sum();
    let busy = seen + threads.max(0.0);
    let unattributed = busy - counters;
    let share = 100.0 * unattributed / busy;
    for part in groups {
        println!(
            "  {part:?}: traced {:.3} s, its groups count {:.3} s",
            times.of(part),
            counted.of(part)
        );
    }
    println!(
        "  kernel threads above idle: {threads:.3} s; unattributed {unattributed:.3} s of \
         {busy:.3} s, {share:.2} % (goal: at most 2); {} samples lost",
        times.lost
    );
    promises.at_most("samples lost beside VMs that write", 0.0, float(times.lost));
    promises.about("time in no group beside VMs that write, %", 0.0, 2.0, share);
    let more = times.cpus_of(Part::Main) - quiet.cpus_of(Part::Main);
    promises.at_most("main beside VMs that write, CPUs more", MOST_MORE_CPUS, more);
    Ok(json!({
        "seconds": rounded(times.seconds()), "traced_s": times.figures(),
        "counted_s": counted.figures(), "kernel_threads_above_idle_s": rounded(threads),
        "busy_s": rounded(busy), "unattributed_s": rounded(unattributed),
        "unattributed_percent": rounded(share), "samples_lost": times.lost,
        "softirq_s": times.softirqs(), "bills": bills,
    }))
}

/// The bill of each VM.
async fn bills(testbed: &Testbed, ids: &[VmId]) -> Result<Vec<Value>> {
    let mut bills = Vec::new();
    for id in ids {
        let details = testbed.client.vm(&id.to_string()).await?;
        bills.push(json!({ "usage": details.usage, "disks": details.disk_traffic }));
    }
    Ok(bills)
}

/// What each figure of these bills has grown by.
fn bills_since(before: &[Value], after: &[Value]) -> Vec<Value> {
    before.iter().zip(after).map(|(before, after)| grown(before, after)).collect()
}

fn grown(before: &Value, after: &Value) -> Value {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            let of = |key: &String| grown(before.get(key).unwrap_or(&Value::Null), &after[key]);
            after.keys().map(|key| (key.clone(), of(key))).collect()
        }
        (Value::Array(before), Value::Array(after)) => {
            before.iter().zip(after).map(|(before, after)| grown(before, after)).collect()
        }
        _ => match (before.as_u64(), after.as_u64()) {
            (Some(before), Some(after)) => json!(after.saturating_sub(before)),
            _ => after.clone(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bills_are_subtracted_figure_by_figure() {
        let before = json!({ "usage": { "cpu_us": 5 }, "disks": [{ "reads": 1 }] });
        let after = json!({ "usage": { "cpu_us": 7, "new": "x" }, "disks": [{ "reads": 4 }] });
        let expected = json!({ "usage": { "cpu_us": 2, "new": "x" }, "disks": [{ "reads": 3 }] });
        assert_eq!(bills_since(&[before], &[after]), [expected]);
    }
}
