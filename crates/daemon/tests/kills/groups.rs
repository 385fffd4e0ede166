//! Control groups of VMs: limits, bills, adoption, and what is left of them.

use crate::guest::{self, MEMORY_BYTES, create, create_paused, has_right_content, start_again};
use crate::living::Living;
use crate::testbed::{Testbed, until};
use anyhow::{Context, Result, ensure};
use dayfly_api::client::{ClientError, EventQuery};
use dayfly_api::types::{
    CpuParts, DiskTraffic, ErrorCode, EventKind, ExitKind, ForkRequest, VmLimits, VmUsage,
};
use dayfly_host::groups::{Controllers, GroupName, Groups, Root};
use dayfly_units::needs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Whether daemons have control groups with all limits.
fn has_groups() -> bool {
    let can = Groups::check(&Root::Own);
    needs::met(needs::Need::Groups, can.is_ok_and(Controllers::are_all))
}

/// The folder of the group with this path: in the hierarchy of v1 with this controller, or in that
/// of v2.
fn folder(controller: Option<&str>, path: &str) -> Result<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let found = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1)?);
        let is = match controller {
            Some(name) => kind == "cgroup" && options.split(',').any(|other| other == name),
            None => kind == "cgroup2",
        };
        let below = Path::new(path).strip_prefix(root).ok().filter(|_| is)?;
        Some(Path::new(point).join(below))
    });
    found.with_context(|| format!("{controller:?}: no mounted hierarchy with the group {path}"))
}

/// The file of a control group of this process in version 1 or 2, by the controller.
fn file(pid: u32, controller: &str, [v1, v2]: [&str; 2]) -> Result<PathBuf> {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let of = |name: &str| {
        let mut lines = groups.lines().map(|line| line.splitn(3, ':').skip(1));
        lines.find_map(|mut line| {
            let has = line.next()?.split(',').any(|other| other == name);
            has.then(|| line.next().map(str::to_owned))?
        })
    };
    Ok(match of(controller) {
        Some(path) => folder(Some(controller), &path)?.join(v1),
        None => folder(None, &of("").context("no group")?)?.join(v2),
    })
}

/// The VM's VMM.
fn pid(bed: &Testbed, vm: &Living) -> Result<u32> {
    Ok(bed.processes().get(&vm.id).context("a VM without a VMM")?.pid)
}

fn text(path: PathBuf) -> Result<String> {
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(text.trim().to_owned())
}

/// The bill of a VM that lives or has ended.
async fn usage(bed: &Testbed, vm: &Living) -> Result<VmUsage> {
    bed.client.vm(&vm.word()).await?.usage.context("a VM without a bill")
}

/// What a VM has moved to and from its disk; of one that has ended as its exit says it.
async fn moved(bed: &Testbed, vm: &Living) -> Result<DiskTraffic> {
    let details = bed.client.vm(&vm.word()).await?;
    ensure!(details.net_traffic.is_none(), "it has no network device");
    let [disk] = details.disk_traffic[..] else { anyhow::bail!("{:?}", details.disk_traffic) };
    if let Some(exit) = details.vm.exit {
        ensure!(exit.disk_traffic == [disk], "{exit:?}");
    }
    Ok(disk)
}

/// Which of two figures of a disk is the later one.
fn moves(before: &DiskTraffic, after: &DiskTraffic) -> Result<()> {
    let up = before.reads <= after.reads
        && before.read_bytes <= after.read_bytes
        && before.writes <= after.writes
        && before.written_bytes <= after.written_bytes;
    ensure!(up, "expected no figure below {before:?}, got {after:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_vm_moves_is_known_over_daemons_and_after_its_end() -> Result<()> {
    let mut bed = guest::testbed().await?;
    let vm = Living::new(create(&bed, "moves").await?, &bed)?;
    // Its guest writes block after block.
    let more = async |bed: &Testbed, before: DiskTraffic| {
        let mut now = before;
        until("it has written 64 blocks more", async || {
            now = moved(bed, &vm).await?;
            Ok(now.written_bytes >= before.written_bytes + 64 * 4096)
        })
        .await?;
        moves(&before, &now)?;
        Ok::<_, anyhow::Error>(now)
    };
    let before = more(&bed, DiskTraffic::default()).await?;
    bed.kill()?;
    bed.start().await?;
    vm.runs_on(&bed).await?;
    let before = more(&bed, before).await?;
    // Nothing asks the VMM before it is killed.
    bed.client.kill(&vm.word()).await?;
    let last = moved(&bed, &vm).await?;
    moves(&before, &last)?;
    bed.kill()?;
    bed.start().await?;
    ensure!(moved(&bed, &vm).await? == last);
    // A daemon that finds a VMM ended has its figures too, although it never saw it.
    start_again(&bed, vm.id).await?;
    let again = Living::new(vm.listed(&bed).await?, &bed)?;
    let mut first = DiskTraffic::default();
    until("it has moved something", async || {
        first = moved(&bed, &again).await?;
        Ok(first.writes > 0)
    })
    .await?;
    ensure!(first.writes < last.writes, "a start begins a new bill: {first:?} after {last:?}");
    let vmm = *bed.processes().get(&vm.id).context("a VM without a VMM")?;
    bed.kill()?;
    if let Some(vmm) = dayfly_host::process::Process::open(vmm)? {
        vmm.kill()?;
    }
    until("the VMM has ended", async || Ok(!bed.processes().contains_key(&vm.id))).await?;
    bed.start().await?;
    let exit = again.listed(&bed).await?.exit.context("it has ended")?;
    ensure!(exit.reason == ExitKind::Lost, "{exit:?}");
    moves(&first, &moved(&bed, &again).await?)?;
    bed.client.remove_vm(&vm.word(), true).await?;
    bed.stop()
}

/// Which of two bills is the later one, in all figures that only go up.
fn grows(before: &VmUsage, after: &VmUsage) -> Result<()> {
    let (one, other) = (before.parts.context("no parts")?, after.parts.context("no parts")?);
    let up = before.cpu_us <= after.cpu_us
        && before.cpu_user_us <= after.cpu_user_us
        && before.cpu_system_us <= after.cpu_system_us
        && before.memory_peak_bytes <= after.memory_peak_bytes
        && one.vcpus_us <= other.vcpus_us
        && one.io_us <= other.io_us
        && one.work_us <= other.work_us
        && one.creation_us <= other.creation_us
        && one.destruction_us <= other.destruction_us;
    ensure!(up, "expected no figure below {before:?}, got {after:?}");
    Ok(())
}

/// What the group's CPU time was for, without what was done outside of it.
const fn inside_us(parts: CpuParts) -> u64 {
    parts.vcpus_us + parts.io_us + parts.work_us
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_removed_while_it_lives_is_billed_after_its_end() -> Result<()> {
    if !has_groups() {
        return Ok(());
    }
    let mut bed = guest::testbed().await?;
    let vm = Living::new(create(&bed, "removed").await?, &bed)?;
    let mut before = VmUsage::default();
    until("it has written blocks", async || {
        before = usage(&bed, &vm).await?;
        Ok(moved(&bed, &vm).await?.writes > 64)
    })
    .await?;
    let disk = moved(&bed, &vm).await?;
    let mut events = bed.client.events(&EventQuery::default()).await?;
    bed.client.remove_vm(&vm.word(), true).await?;
    let last = loop {
        let event = events.next().await?.context("the stream of events ended")?;
        if event.kind == EventKind::Billed && event.vm == Some(vm.id) {
            break event.exit.context("a bill without an exit")?;
        }
    };
    let usage = last.usage.context("an exit without a bill")?;
    grows(&before, &usage)?;
    ensure!(usage.parts.is_some_and(|parts| parts.destruction_us > 0), "{usage:?}");
    // It was never looked at, and counts with the most that it had.
    ensure!(usage.memory_byte_seconds > 0, "{usage:?}");
    ensure!(last.disk_traffic.len() == 1, "{last:?}");
    moves(&disk, &last.disk_traffic[0])?;
    bed.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bill_says_what_cpu_time_was_for_until_the_vm_was_destroyed() -> Result<()> {
    if !has_groups() {
        return Ok(());
    }
    let mut bed = guest::testbed().await?;
    let vm = Living::new(create(&bed, "works").await?, &bed)?;
    let parts = async |bed: &Testbed| {
        let usage = usage(bed, &vm).await?;
        Ok::<_, anyhow::Error>((usage, usage.parts.context("no parts")?))
    };
    let mut before = parts(&bed).await?;
    ensure!(before.1.creation_us > 0 && before.1.destruction_us == 0, "{before:?}");
    // Its guest writes to memory and disk: vCPUs, and the thread of the disks.
    for round in 0..3 {
        let begun = before;
        until("vCPUs and devices have worked", async || {
            let now = parts(&bed).await?;
            grows(&before.0, &now.0)?;
            before = now;
            Ok(now.1.vcpus_us > begun.1.vcpus_us + 50_000 && now.1.io_us > begun.1.io_us + 1000)
        })
        .await?;
        // Work of the main thread, and of nothing else.
        if round == 0 {
            let work_us = before.1.work_us;
            vm.can_be_forked(&bed).await?;
            until("the fork was work", async || Ok(parts(&bed).await?.1.work_us > work_us)).await?;
            bed.kill()?;
            bed.start().await?;
            vm.runs_on(&bed).await?;
        }
    }
    ensure!(before.1.creation_us > 0, "known to the next daemon: {before:?}");
    // Parts are of the whole. Threads are counted before the group, and one after the other.
    ensure!(inside_us(before.1) <= before.0.cpu_us, "{before:?}");
    bed.client.kill(&vm.word()).await?;
    let (usage, last) = parts(&bed).await?;
    grows(&before.0, &usage)?;
    ensure!(last.destruction_us > 0, "{last:?}");
    // At the end, nothing of the group's time is without a part; the rest is the VMM's set-up.
    let set_up_us = usage.cpu_us - inside_us(last);
    ensure!(set_up_us > 0 && set_up_us <= last.creation_us, "{usage:?}");
    bed.client.remove_vm(&vm.word(), true).await?;
    bed.stop()
}

const CPU: u32 = 250;

fn limits() -> VmLimits {
    VmLimits {
        cpu_max_millicpus: Some(CPU),
        cpu_weight: Some(50),
        memory_max_bytes: Some(256 << 20),
        pids_max: Some(40),
        ..VmLimits::default()
    }
}

/// Checks the limits that the kernel has of this VM.
async fn is_limited(bed: &Testbed, vm: &Living) -> Result<()> {
    ensure!(bed.client.vm(&vm.word()).await?.limits == limits());
    let pid = pid(bed, vm)?;
    let quota = text(file(pid, "cpu", ["cpu.cfs_quota_us", "cpu.max"])?)?;
    ensure!(quota.starts_with("25000"), "{quota}");
    let weight = text(file(pid, "cpu", ["cpu.shares", "cpu.weight"])?)?;
    ensure!(weight == "512" || weight == "50", "{weight}");
    let memory = text(file(pid, "memory", ["memory.limit_in_bytes", "memory.max"])?)?;
    let expected = MEMORY_BYTES + MEMORY_BYTES / 128 + (256 << 20);
    ensure!(memory.parse() == Ok(expected / 4096 * 4096), "{memory}");
    let pids = text(file(pid, "pids", ["pids.max", "pids.max"])?)?;
    ensure!(pids == "40", "{pids}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_keeps_its_limits_and_its_bill_and_gets_no_more_cpu_time() -> Result<()> {
    if !has_groups() {
        return Ok(());
    }
    let mut bed = guest::testbed().await?;
    let vm = Living::new(guest::create_limited(&bed, "limited", limits()).await?, &bed)?;
    is_limited(&bed, &vm).await?;
    // Its guest spins. With a limit the time passes at least as fast as its bill allows.
    let (begun, before) = (Instant::now(), usage(&bed, &vm).await?);
    let mut after = before;
    until("it has used 200 ms of CPU time", async || {
        after = usage(&bed, &vm).await?;
        Ok(after.cpu_us >= before.cpu_us + 200_000)
    })
    .await?;
    // A period's worth may be used at once at either end.
    let least_us = (after.cpu_us - before.cpu_us - 50_000) * 1000 / u64::from(CPU);
    ensure!(begun.elapsed().as_micros() >= u128::from(least_us), "{before:?}, {after:?}");
    grows(&before, &after)?;
    // The kernel does not report the most before Linux 5.19.
    let peak = after.memory_peak_bytes;
    ensure!(peak.is_none_or(|peak| Some(peak) >= after.memory_bytes), "{after:?}");
    // A fork's clone has the same limits, except those that are given.
    let forked = bed.client.fork(&vm.word(), &serde_json::from_str("{}")?).await?;
    let clone = Living::new(forked.items.into_iter().next().context("a clone")?, &bed)?;
    is_limited(&bed, &clone).await?;
    bed.client.remove_vm(&clone.word(), true).await?;
    let other = VmLimits { cpu_weight: Some(7), ..VmLimits::default() };
    let asked = ForkRequest { limits: Some(other), ..serde_json::from_str("{}")? };
    let forked = bed.client.fork(&vm.word(), &asked).await?;
    let clone = forked.items.first().context("a clone")?.id.to_string();
    ensure!(bed.client.vm(&clone).await?.limits == VmLimits { cpu_weight: Some(7), ..limits() });
    bed.client.remove_vm(&clone, true).await?;
    // The bill goes on over daemons that are killed, and over the VM's end.
    let before = usage(&bed, &vm).await?;
    bed.kill()?;
    bed.start().await?;
    vm.runs_on(&bed).await?;
    is_limited(&bed, &vm).await?;
    let after = usage(&bed, &vm).await?;
    grows(&before, &after)?;
    bed.client.kill(&vm.word()).await?;
    let exit = vm.listed(&bed).await?.exit.context("it has ended")?;
    let last = exit.usage.context("an exit without a bill")?;
    grows(&after, &last)?;
    bed.kill()?;
    bed.start().await?;
    // If the daemon was killed before it had recorded the end, the next one reads the counters
    // again. The kernel counts the last microseconds of a process after it has reported its end.
    grows(&last, &usage(&bed, &vm).await?)?;
    start_again(&bed, vm.id).await?;
    let vm = Living::new(vm.listed(&bed).await?, &bed)?;
    is_limited(&bed, &vm).await?;
    bed.client.remove_vm(&vm.word(), true).await?;
    bed.stop()
}

/// Gives the VM's group little more memory than it has.
fn squeeze(bed: &Testbed, vm: &Living) -> Result<()> {
    let pid = pid(bed, vm)?;
    let now = text(file(pid, "memory", ["memory.usage_in_bytes", "memory.current"])?)?;
    let most = now.parse::<u64>()? + (1 << 20);
    let limit = file(pid, "memory", ["memory.limit_in_bytes", "memory.max"])?;
    // Never a group that other processes are in.
    let inside = text(limit.with_file_name("cgroup.procs"))?;
    ensure!(inside == pid.to_string(), "{}: has processes {inside}", limit.display());
    Ok(std::fs::write(limit, most.to_string())?)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_needs_more_memory_than_its_group_has_ends_for_that_alone() -> Result<()> {
    if !has_groups() {
        return Ok(());
    }
    let mut bed = guest::testbed().await?;
    let other = Living::new(create(&bed, "other").await?, &bed)?;
    let greedy = Living::new(create_paused(&bed, "greedy").await?, &bed)?;
    squeeze(&bed, &greedy)?;
    let _ended_before_its_answer = bed.client.unpause(&greedy.word()).await;
    let ended = async |bed: &Testbed, vm: &Living| {
        let mut exit = None;
        until("the VM has ended", async || {
            exit = vm.listed(bed).await?.exit;
            Ok(exit.is_some())
        })
        .await?;
        let exit = exit.context("it has ended")?;
        ensure!(exit.reason == ExitKind::Memory, "{exit:?}");
        // It was given no limit that could be larger.
        let message = &exit.message;
        ensure!(message.contains("control group") && !message.contains("--memory-max"), "{exit:?}");
        ensure!(exit.usage.is_some_and(|usage| usage.cpu_us > 0), "{exit:?}");
        Ok(())
    };
    ended(&bed, &greedy).await?;
    // The next daemon says the same of a VM that ended while there was none.
    let unseen = Living::new(create_paused(&bed, "unseen").await?, &bed)?;
    squeeze(&bed, &unseen)?;
    bed.kill()?;
    let control = bed.of_vm(unseen.id, "control.sock");
    let mut vmm = dayfly_vmm::control::Client::connect(&control, Some(crate::testbed::WITHIN))?;
    let _ended_before_its_answer = vmm.resume();
    until("the VMM has ended", async || Ok(!bed.processes().contains_key(&unseen.id))).await?;
    bed.start().await?;
    ended(&bed, &unseen).await?;
    other.runs_on(&bed).await?;
    bed.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_are_swept_and_never_end_a_vm() -> Result<()> {
    if !has_groups() {
        return Ok(());
    }
    let mut bed = guest::testbed().await?;
    let vm = Living::new(create(&bed, "lives").await?, &bed)?;
    ensure!(bed.client.leaks().await?.is_empty());
    bed.kill()?;
    // Groups of a daemon that was killed: an empty one, and that of a VM without a record.
    let groups = Groups::open(&Root::Own, &bed.run(), false)?;
    groups.make(GroupName::Vm(1_000_000))?;
    groups.make(GroupName::Template(1_000_000))?;
    let (all, folders) = (groups.list()?, groups.folders().to_vec());
    drop(groups);
    bed.start().await?;
    vm.runs_on(&bed).await?;
    ensure!(bed.client.leaks().await?.is_empty(), "of {all:?}");
    // That of a VM is used again in v1.
    until("the empty group of a pager is removed", async || {
        Ok(folders.iter().all(|folder| !folder.join("templates/1000000").exists()))
    })
    .await?;
    bed.kill()?;
    // A record that no daemon reads does not cost the VM its life.
    let record = bed.of_vm(vm.id, "vm.json");
    let kept = std::fs::read(&record)?;
    std::fs::write(&record, "{")?;
    bed.start().await?;
    bed.kill()?;
    std::fs::write(&record, kept)?;
    bed.start().await?;
    vm.runs_on(&bed).await?;
    let used = usage(&bed, &vm).await?;
    ensure!(used.cpu_us > 0, "{used:?}");
    bed.client.remove_vm(&vm.word(), true).await?;
    until("its process is gone", async || Ok(!bed.processes().contains_key(&vm.id))).await?;
    bed.stop()?;
    // The daemon may have ended before it learned of the end of the process.
    bed.start().await?;
    bed.stop()?;
    for folder in folders {
        ensure!(!folder.exists(), "{}: left by a daemon that stopped", folder.display());
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_without_groups_runs_vms_and_refuses_limits_by_name() -> Result<()> {
    let mut bed = Testbed::new()?;
    bed.options = vec!["--group-root", "none"];
    guest::store(&bed, guest::GUEST, 'c')?;
    bed.start().await?;
    guest::base(&bed, guest::GUEST, guest::BASE).await?;
    let vm = create(&bed, "free").await?;
    has_right_content(&bed, vm.id).await?;
    ensure!(bed.client.vm(&vm.id.to_string()).await?.usage.is_none());
    let refused =
        guest::create_limited(&bed, "limited", limits()).await.err().context("created")?;
    let refused = refused.downcast_ref::<ClientError>().context("another error")?;
    ensure!(refused.code() == Some(ErrorCode::Invalid), "{refused:?}");
    let message = refused.to_string();
    ensure!(message.contains("limits") && message.contains("--group-root none"), "{message}");
    ensure!(bed.client.vms(true).await?.len() == 1);
    bed.client.remove_vm(&vm.id.to_string(), true).await?;
    bed.stop()
}
