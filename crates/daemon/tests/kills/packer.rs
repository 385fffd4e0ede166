//! Snapshots are stored by a process in the VM's control group, at the VM's expense.

use crate::guest::{self, GUEST};
use crate::testbed::{Testbed, own_programs, until};
use anyhow::{Context, Result, bail, ensure};
use dayfly_api::types::Vm;
use dayfly_host::groups::{Controllers, Groups, Root};
use dayfly_host::process::{Process, ProcessId, scan_below};
use dayfly_units::needs;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

/// Bytes at the start of RAM that stay as they are.
const GUEST_BYTES: u64 = 32 << 20;

fn has_groups() -> bool {
    let can = Groups::check(&Root::Own);
    needs::met(needs::Need::Groups, can.is_ok_and(Controllers::are_all))
}

/// A daemon with one VM, whose guest has halted.
async fn halted(bed: &mut Testbed, memory_bytes: u64) -> Result<Vm> {
    guest::store_words(bed, GUEST, "say=ready")?;
    bed.start().await?;
    guest::boot(bed, GUEST, memory_bytes, "done\n").await
}

/// Writes random bytes to the RAM of a VM, from [`GUEST_BYTES`] on, as a guest would.
fn fill(bed: &Testbed, vm: &Vm, memory_bytes: u64, seed: u64) -> Result<()> {
    let pid = bed.processes().get(&vm.id).context("a VM without a VMM")?.pid;
    let maps = BufReader::new(File::open(format!("/proc/{pid}/maps"))?);
    let mut start = None;
    for line in maps.lines() {
        let line = line?;
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let (from, to) = range.context("a mapping")?;
        let (from, to) = (u64::from_str_radix(from, 16)?, u64::from_str_radix(to, 16)?);
        if to - from == memory_bytes && line.contains(" rw") {
            start = Some(from);
        }
    }
    let (start, memory) = (start.context("RAM")?, File::options());
    let memory = { memory }.write(true).open(format!("/proc/{pid}/mem"))?;
    let (mut at, mut word, mut piece) = (GUEST_BYTES, seed, vec![0; 1 << 20]);
    while at < memory_bytes {
        for bytes in piece.as_chunks_mut::<8>().0 {
            // xorshift64
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            *bytes = word.to_le_bytes();
        }
        memory.write_all_at(&piece, start + at)?;
        at += piece.len() as u64;
    }
    Ok(())
}

/// CPU time of the daemon, in microseconds: all of its threads, those that have ended included.
fn daemon_us(bed: &Testbed) -> Result<u64> {
    let pid = bed.pid()?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(") ").context("stat")?.1.split(' ');
    let ticks: Vec<u64> = fields.skip(11).take(2).map(str::parse).collect::<Result<_, _>>()?;
    // Linux on x86-64 has 100 ticks in a second.
    Ok(ticks.iter().sum::<u64>() * 10_000)
}

/// CPU time of a VM and of the daemon for a snapshot, in microseconds.
async fn cost(bed: &Testbed, vm: &Vm, called: &str) -> Result<(u64, u64)> {
    let of_vm = async || -> Result<u64> {
        let vm = bed.client.vm(&vm.id.to_string()).await?;
        Ok(vm.usage.context("a VM without a bill")?.cpu_us)
    };
    let (vm_before, daemon_before) = (of_vm().await?, daemon_us(bed)?);
    let begun = Instant::now();
    guest::snapshot(bed, vm.id, called).await?;
    let ms = begun.elapsed().as_millis();
    let (of_vm, of_daemon) = (of_vm().await? - vm_before, daemon_us(bed)? - daemon_before);
    let percent = of_daemon as f64 * 100.0 / of_vm as f64;
    println!("{called}: VM {of_vm} us, daemon {of_daemon} us = {percent:.2} %, {ms} ms");
    Ok((of_vm, of_daemon))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_pays_for_its_snapshot() -> Result<()> {
    if !has_groups() {
        return Ok(());
    }
    let mut bed = Testbed::new()?;
    let memory_bytes = 256 << 20;
    let vm = halted(&mut bed, memory_bytes).await?;
    fill(&bed, &vm, memory_bytes, 1)?;
    let (of_vm, of_daemon) = cost(&bed, &vm, "made").await?;
    ensure!(of_daemon < of_vm / 2, "the daemon took {of_daemon} us, the VM {of_vm} us");
    guest::clone(&bed, "made", "clone").await?;
    bed.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packer_that_is_killed_fails_its_snapshot_and_nothing_else() -> Result<()> {
    let (mut bed, vm, vmm) = filled().await?;
    let killed = async {
        until("a packer runs", async || {
            let found = scan_below(&bed.run().join("vms"), "dayfly-packer")?;
            let Some(packer) = found.first() else { return Ok(false) };
            ensure!(packer.vm == vm.id, "the packer of another VM");
            let Some(process) = Process::open(packer.process)? else { return Ok(false) };
            process.kill()?;
            Ok(true)
        })
        .await
    };
    let (failed, killed) = tokio::join!(guest::snapshot(&bed, vm.id, "made"), killed);
    killed?;
    let error = failed.err().context("a snapshot without its packer was made")?;
    let text = format!("{error:#}");
    ensure!(text.contains("stores the VM's memory") && text.contains("killed"), "{text}");
    ensure!(bed.client.snapshots().await?.is_empty(), "a snapshot is there");
    ensure!(staged(&bed)?.is_empty(), "left in staging: {:?}", staged(&bed)?);
    ensure!(scan_below(&bed.run().join("vms"), "dayfly-packer")?.is_empty(), "a packer is left");
    guest::snapshot(&bed, vm.id, "again").await?;
    ensure!(bed.processes().get(&vm.id).copied() == vmm, "the VM did not go on");
    guest::clone(&bed, "again", "clone").await?;
    bed.stop()
}

/// A VM of 256 MiB that were written, and its VMM: its snapshot takes a while.
async fn filled() -> Result<(Testbed, Vm, Option<ProcessId>)> {
    let mut bed = Testbed::new()?;
    let memory_bytes = 256 << 20;
    let vm = halted(&mut bed, memory_bytes).await?;
    fill(&bed, &vm, memory_bytes, 1)?;
    let vmm = bed.processes().get(&vm.id).copied();
    Ok((bed, vm, vmm))
}

/// What snapshots have in staging. Folders that are prepared for VMs are there as long as a daemon
/// runs.
fn staged(bed: &Testbed) -> Result<Vec<PathBuf>> {
    let mut staged = Vec::new();
    for stage in std::fs::read_dir(bed.state().join("staging"))? {
        // It may be removed meanwhile.
        let Ok(entries) = std::fs::read_dir(stage?.path()) else { continue };
        for entry in entries {
            let path = entry?.path();
            let is_of_vm = path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"vm"));
            staged.extend((!is_of_vm).then_some(path));
        }
    }
    Ok(staged)
}

/// Waits for the packer of a VM, and stops it: from then on it does not end by itself.
async fn stopped(bed: &Testbed, vm: &Vm) -> Result<Process> {
    let mut stopped = None;
    until("a packer runs", async || {
        let found = scan_below(&bed.run().join("vms"), "dayfly-packer")?;
        let Some(packer) = found.first() else { return Ok(false) };
        ensure!(packer.vm == vm.id, "the packer of another VM");
        let Some(process) = Process::open(packer.process)? else { return Ok(false) };
        process.signal(Signal::STOP)?;
        stopped = Some(process);
        Ok(true)
    })
    .await?;
    stopped.context("it was found")
}

/// As [`stopped`], of a snapshot whose client then goes away.
async fn stopped_and_left(bed: &Testbed, vm: &Vm) -> Result<Process> {
    tokio::select! {
        ended = guest::snapshot(bed, vm.id, "made") => bail!("it ended before: {ended:?}"),
        packer = stopped(bed, vm) => packer,
    }
}

/// The VM goes on in the same process, nothing is left, and a snapshot can be taken.
async fn goes_on(bed: &Testbed, vm: &Vm, vmm: Option<ProcessId>) -> Result<()> {
    ensure!(bed.client.snapshots().await?.is_empty(), "a snapshot is there");
    ensure!(scan_below(&bed.run().join("vms"), "dayfly-packer")?.is_empty(), "a packer is left");
    // What began a snapshot may still remove its files.
    until("staging has no snapshot", async || Ok(staged(bed)?.is_empty())).await?;
    guest::snapshot(bed, vm.id, "again").await?;
    ensure!(bed.processes().get(&vm.id).copied() == vmm, "the VM did not go on");
    guest::clone(bed, "again", "clone").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packer_that_does_not_end_by_itself_ends_with_its_daemon() -> Result<()> {
    let (mut bed, vm, vmm) = filled().await?;
    let packer = stopped_and_left(&bed, &vm).await?;
    bed.kill()?;
    bed.start().await?;
    until("the packer has ended", async || Ok(!packer.is_alive()?)).await?;
    goes_on(&bed, &vm, vmm).await?;
    bed.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packer_that_does_not_answer_is_killed_when_its_client_goes_away() -> Result<()> {
    let (mut bed, vm, vmm) = filled().await?;
    let packer = stopped_and_left(&bed, &vm).await?;
    until("the packer has ended", async || Ok(!packer.is_alive()?)).await?;
    goes_on(&bed, &vm, vmm).await?;
    bed.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packer_that_does_not_answer_does_not_keep_a_daemon_that_is_to_stop() -> Result<()> {
    let (mut bed, vm, vmm) = filled().await?;
    let pid = i32::try_from(bed.pid()?)?;
    let stop = async {
        let packer = stopped(&bed, &vm).await?;
        kill_process(Pid::from_raw(pid).context("a pid")?, Signal::TERM)?;
        anyhow::Ok(packer)
    };
    let (failed, packer) = tokio::join!(guest::snapshot(&bed, vm.id, "made"), stop);
    let packer = packer?;
    ensure!(failed.is_err(), "a snapshot was made without its packer");
    bed.stop()?;
    ensure!(!packer.is_alive()?, "the packer outlives its daemon");
    bed.start().await?;
    goes_on(&bed, &vm, vmm).await?;
    bed.stop()
}

/// For the lab note: `DAYFLY_PROGRAMS=FOLDER` has other programs, without `dayfly-packer` too.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn what_a_snapshot_of_a_gibibyte_costs() -> Result<()> {
    let mut bed = match std::env::var_os("DAYFLY_MEASURE_STATE") {
        Some(folder) => Testbed::with_state(folder.into())?,
        None => Testbed::new()?,
    };
    bed.programs = std::env::var_os("DAYFLY_PROGRAMS").map_or_else(own_programs, Into::into);
    let memory_bytes = (1 << 30) + GUEST_BYTES;
    let vm = halted(&mut bed, memory_bytes).await?;
    for round in 1..=3 {
        fill(&bed, &vm, memory_bytes, round)?;
        cost(&bed, &vm, &format!("made{round}")).await?;
    }
    cost(&bed, &vm, "same").await?;
    bed.stop()
}
