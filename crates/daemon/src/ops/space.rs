//! The task that keeps the guaranteed shares of disks exact, notices VMs that wait for space, and
//! has them go on when there is space.
//!
//! A VMM stops its VM by itself ([`dayfly_vmm::disk::room`]). While the file system has ample space
//! this task only reads how much is free, once in [`TICK`]. Otherwise it looks at the layers of all
//! VMs, and asks those VMMs that may have stopped.

use crate::base::error::blocking;
use crate::daemon::Daemon;
use crate::model::state::Phase;
use crate::ops::section::section;
use crate::vm::Vm;
use crate::vm::space::FileSystem;
use crate::vmm::control_link;
use dayfly_units::VmId;
use dayfly_vmm::control::{Answer, Command, NoSpace};
use dayfly_vmm::disk::room;
use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// Period of the looks.
const TICK: Duration = Duration::from_secs(1);
/// The largest write of a guest, and the free space that it needs, in bytes.
const MOST_BYTES: u64 = 288 << 20;
/// VMs that are asked at every tick though they seem to have space: a quota of the host's users
/// (EDQUOT) does not show in the free space.
const ALWAYS: usize = 4;
/// The most ticks before a VM that had to wait again tries once more.
const MOST_TICKS: u32 = 64;

/// A VM with what its writable layers have.
struct Seen {
    vm: Arc<Vm>,
    used: u64,
}

/// What is known of a VM that had to wait.
#[derive(Debug, Default, Clone, Copy)]
struct Tries {
    /// Retries after which it had to wait again.
    failed: u32,
    /// Ticks until the next one.
    pause: u32,
}

/// The result of asking one VMM.
struct Visited {
    vm: VmId,
    stalled: bool,
    retried: bool,
}

/// Looks after the space of VMs until the daemon stops.
pub async fn keep(daemon: Arc<Daemon>) {
    let mut asking: JoinSet<Visited> = JoinSet::new();
    let mut busy: HashSet<VmId> = HashSet::new();
    let mut tries: HashMap<VmId, Tries> = HashMap::new();
    let mut turn = 0_usize;
    loop {
        tokio::select! {
            () = tokio::time::sleep(TICK) => {}
            () = daemon.stop.cancelled() => return,
        }
        while let Some(visited) = asking.try_join_next() {
            // After a panic it is not known whose visit it was.
            let Ok(visited) = visited else {
                busy.clear();
                continue;
            };
            busy.remove(&visited.vm);
            note(&mut tries, &visited);
        }
        let Some((all, of)) = look(&daemon).await else { continue };
        tries.retain(|id, _| daemon.registry.has(*id));
        turn = turn.wrapping_add(ALWAYS);
        let mut suspects = suspects(&daemon, all, of, turn);
        // The one least over its share goes on first.
        suspects.sort_by_key(|seen| seen.used);
        for Seen { vm, used } in suspects {
            if !busy.insert(vm.id) {
                continue;
            }
            let pause = &mut tries.entry(vm.id).or_default().pause;
            let may_try = *pause == 0;
            *pause = pause.saturating_sub(1);
            asking.spawn(visit(daemon.clone(), vm, used, of, may_try));
        }
    }
}

/// Notes how a visit ended.
fn note(tries: &mut HashMap<VmId, Tries>, visited: &Visited) {
    let Visited { vm, stalled, retried } = *visited;
    if !stalled {
        tries.remove(&vm);
    } else if retried {
        let tries = tries.entry(vm).or_default();
        tries.failed = tries.failed.saturating_add(1);
        tries.pause = 1_u32.checked_shl(tries.failed).unwrap_or(MOST_TICKS).min(MOST_TICKS);
    }
}

/// Brings the limits up to date. Returns the VMs with their use, and the file system.
async fn look(daemon: &Arc<Daemon>) -> Option<(Vec<Seen>, FileSystem)> {
    let daemon = daemon.clone();
    let looked = blocking(move || {
        let space = &daemon.space;
        let Ok(of) = space.state() else { return Ok(None) };
        let vms: Vec<_> = daemon.registry.all().into_iter().filter(|vm| vm.has_share()).collect();
        let waits = vms.iter().any(|vm| vm.no_space().is_some());
        space.begin_survey();
        let ample = space.is_ample(of, MOST_BYTES.min(of.size_bytes / 4)) && !waits;
        let seen: Vec<_> = vms
            .into_iter()
            .map(|vm| Seen { used: if ample { 0 } else { used(&daemon, &vm) }, vm })
            .collect();
        space.end_survey(&seen.iter().map(|seen| seen.used).collect::<Vec<_>>());
        Ok(Some((seen, of)))
    });
    looked.await.ok().flatten()
}

/// Makes what is kept for the shares of VMs exact, before a request is refused because of it.
pub async fn survey(daemon: &Arc<Daemon>) {
    let daemon = daemon.clone();
    let surveyed = blocking(move || {
        let vms: Vec<_> = daemon.registry.all().into_iter().filter(|vm| vm.has_share()).collect();
        daemon.space.begin_survey();
        let used: Vec<_> = vms.iter().map(|vm| used(&daemon, vm)).collect();
        daemon.space.end_survey(&used);
        Ok(())
    });
    // The limits stay as they were, which is safe.
    drop(surveyed.await);
}

/// Bytes that the writable layers of a VM have. A layer that cannot be opened counts as empty.
fn used(daemon: &Daemon, vm: &Vm) -> u64 {
    let layers = vm.live().disks.into_iter().filter_map(|disk| disk.writable);
    let bytes = layers.map(|layer| {
        let file = daemon.templates.store().open_vm_layer(&layer, false);
        file.map_or(0, |file| room::allocated(file.as_fd()).unwrap_or(0))
    });
    bytes.fold(0, u64::saturating_add)
}

/// The VMs whose VMM may have stopped them.
fn suspects(daemon: &Daemon, all: Vec<Seen>, of: FileSystem, turn: usize) -> Vec<Seen> {
    let (limits, count) = (daemon.space.limits(), all.len().max(1));
    let most = MOST_BYTES.min(of.size_bytes / 4);
    let near = |seen: &Seen| {
        seen.vm.no_space().is_some()
            || of.free_bytes < limits.needs_free(seen.used).saturating_add(most)
            || limits.quota_bytes < seen.used.saturating_add(most)
    };
    let runs =
        |vm: &Vm| matches!(vm.phase(), Phase::Running | Phase::Paused) && vm.answers().is_ok();
    let chosen = |(place, seen): (usize, Seen)| {
        let asked = (place + count - turn % count) % count < ALWAYS || near(&seen);
        (asked && runs(&seen.vm)).then_some(seen)
    };
    all.into_iter().enumerate().filter_map(chosen).collect()
}

/// Asks a VMM whether it has stopped its VM, and has the VM go on if there is space.
async fn visit(
    daemon: Arc<Daemon>,
    vm: Arc<Vm>,
    used: u64,
    of: FileSystem,
    may_try: bool,
) -> Visited {
    let before = vm.no_space();
    let within = daemon.config.deadlines.control;
    let status = control_link::command(&vm.dir.control(), Command::Status, within).await;
    let Ok(Answer::Status(status)) = status else {
        return Visited { vm: vm.id, stalled: before.is_some(), retried: false };
    };
    noticed(&vm, before, status.no_space);
    let retry = status.no_space.is_some_and(|why| {
        may_try && vm.phase() == Phase::Running && daemon.space.may_retry(why, used, of)
    });
    let retried = retry && resume(&daemon, &vm).await;
    Visited { vm: vm.id, stalled: status.no_space.is_some(), retried }
}

/// Notes what a VMM reports, and logs changes.
pub fn noticed(vm: &Vm, before: Option<NoSpace>, now: Option<NoSpace>) {
    vm.note_no_space(now);
    match (before, vm.stalled()) {
        (None, Some(why)) => tracing::warn!(vm = %vm.id, name = %vm.name, "paused: {why}"),
        (Some(_), None) => tracing::info!(vm = %vm.id, name = %vm.name, "goes on: it has space"),
        _ => {}
    }
}

/// Has a VM whose turn the caller has try again if it waits for space.
pub async fn retry(daemon: &Daemon, vm: &Vm) {
    let (control, within) = (vm.dir.control(), daemon.config.deadlines.control);
    let status = control_link::command(&control, Command::Status, within).await;
    let Ok(Answer::Status(status)) = status else { return };
    noticed(vm, vm.no_space(), status.no_space);
    if status.no_space.is_some() {
        let resumed = control_link::decided(&control, Command::Resume, Vec::new(), within).await;
        if let Err(error) = resumed {
            tracing::warn!(vm = %vm.id, "going on with space: {error}");
        }
    }
}

/// Has a VM that waits for space try again. Returns whether its VMM got the command.
async fn resume(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> bool {
    let within = daemon.config.deadlines.control;
    let Ok(turn) = vm.take_turn(Duration::ZERO).await else { return false };
    let same = vm.clone();
    let resumed = section(daemon, vm, "going on with space", within, async move {
        let _turn = turn;
        // Another request may have stopped it.
        if same.phase() != Phase::Running {
            return Ok(false);
        }
        let control = same.dir.control();
        control_link::decided(&control, Command::Resume, Vec::new(), within).await?;
        Ok(true)
    });
    resumed.await.unwrap_or_else(|error| {
        tracing::warn!(vm = %vm.id, "going on with space: {error}");
        false
    })
}
