//! Starts the VMM of a new VM: from a warm clone, a warm VMM or a new process.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::groups::GroupLease;
use crate::daemon::Daemon;
use crate::model::step::{self, Step};
use crate::ops::remove;
use crate::vm::Vm;
use crate::vmm::launch::Fds;
use crate::vmm::link::Link;
use crate::vmm::pool::{Guest, WarmVmm};
use crate::vmm::sizes::Template;
use crate::vmm::source::{self, CloneOf, Frozen, Opened, Purpose};
use dayfly_api::types::ErrorCode;
use dayfly_host::cpu_time;
use dayfly_host::process::Process;
use dayfly_vmm::config::{Shape, Start};
use dayfly_vmm::control::Command;
use std::os::unix::net::UnixListener as StdListener;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;

/// Starts the VMM. The caller may be cancelled meanwhile; the VM gets its process before a removal
/// can end it.
pub(super) async fn start(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    opened: Opened,
    warm: Option<WarmVmm>,
    purpose: Purpose,
) -> Outcome<(Link, Option<UnixListener>)> {
    let within = daemon.config.deadlines.control;
    // A warm clone is resumed on this thread, without any file access.
    if let Some(WarmVmm { process, mut link, group, guest: Some(guest), .. }) = warm {
        vm.hold(process.clone());
        let limited = vm.keep_and_limit(group);
        let Guest { disks, backing, pin, agent_version, .. } = guest;
        vm.keep_pinned(pin);
        vm.set_backing(backing);
        vm.update(|live| {
            live.disks = disks;
            live.agent_version = agent_version;
        });
        let asked = limited.and_then(|()| Ok(link.ask(&Command::Resume, &[])?));
        // After the command, so that the guest does not wait; and also if the command failed.
        remove::watch(daemon, vm.clone(), process);
        asked?;
        link.done(within).await?;
        return Ok((link, None));
    }
    // Before the first wait, because a cancelled caller would lose the process.
    let link = warm.map(|WarmVmm { process, link, group, .. }| {
        held(daemon, vm, process, group)?;
        Ok::<_, ApiError>(link)
    });
    let link = link.transpose()?;
    let launching = vm.launching.clone().lock_owned().await;
    let (shared, started) = (daemon.clone(), vm.clone());
    // Making a VMM needs a CPU, so more than the limit at once would only delay all of them.
    let turn = daemon.makers.clone().acquire_owned().await.map_err(ApiError::internal)?;
    let (mut link, ready) = blocking(move || {
        let (_launching, _turn) = (launching, turn);
        let (daemon, vm) = (shared, started);
        let (made, took) = cpu_time::of(|| make(&daemon, &vm, opened, purpose, link));
        vm.costs(took);
        made
    })
    .await?;
    if ready.is_none() {
        link.done(within).await?;
    }
    Ok((link, listener(ready)?))
}

/// Starts the VMM of a VM, or asks the warm one of `link`. Blocks.
fn make(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    opened: Opened,
    purpose: Purpose,
    link: Option<Link>,
) -> Outcome<(Link, Option<StdListener>)> {
    let sized = |shape| Shape { vcpus: vm.facts.vcpus, ..shape };
    match opened {
        Opened::Snapshot(open) => {
            let shape = sized(Template::of(&open)?.shape);
            let version = &open.manifest.agent_version;
            clone(daemon, vm, (&open).into(), shape, version, purpose, link)
        }
        Opened::Fork(fork_point, _) => {
            let (shape, version) = (sized(fork_point.shape()), &fork_point.agent_version);
            clone(daemon, vm, (&*fork_point).into(), shape, version, purpose, link)
        }
        Opened::Boot { boot, image, kernel } => {
            let mut fds = Fds::default();
            let (start, pin) =
                source::boot(&daemon.templates, vm, boot, *image, *kernel, &mut fds)?;
            vm.keep_pinned(pin);
            let launched =
                daemon.launcher.launch(vm.placement(), start, fds, false, daemon.pool.busy())?;
            vm.costs(Duration::from_micros(launched.zygote_us));
            held(daemon, vm, launched.process, launched.group)?;
            Ok((launched.link, launched.ready))
        }
    }
}

/// The socket on which the agent of a guest that boots reports, for asynchronous use.
pub(super) fn listener(ready: Option<StdListener>) -> Outcome<Option<UnixListener>> {
    let listener = ready.map(|ready| {
        ready.set_nonblocking(true)?;
        UnixListener::from_std(ready)
    });
    listener.transpose().map_err(|e| ApiError::internal(format_args!("listening for a guest: {e}")))
}

/// Asks a warm VMM, that of `link` or a new one, to become a clone. Blocks.
fn clone(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    frozen: Frozen<'_>,
    shape: Shape,
    agent_version: &str,
    purpose: Purpose,
    link: Option<Link>,
) -> Outcome<(Link, Option<StdListener>)> {
    vm.update(|live| agent_version.clone_into(&mut live.agent_version));
    // The process first: it initialises while the clone's disks are made.
    let link = match link {
        Some(link) => link,
        None => {
            let start = Start::WarmVmm { shape, record: purpose == Purpose::Touched };
            let launched = daemon.launcher.launch(
                vm.placement(),
                start,
                Fds::default(),
                false,
                daemon.pool.busy(),
            )?;
            vm.costs(Duration::from_micros(launched.zygote_us));
            held(daemon, vm, launched.process, launched.group)?;
            launched.link
        }
    };
    step::done(Step::Vmm, Some(&vm.name))?;
    let vmm = vm.process().ok_or_else(|| ApiError::new(ErrorCode::Guest, "its VMM ended"))?;
    let clone = CloneOf::new(&daemon.templates, &vm.dir.exit(), vm.id, &vmm, frozen, purpose)?;
    vm.keep_pinned(clone.pin);
    vm.set_backing(clone.backing);
    vm.update(|live| live.disks = clone.disks);
    link.ask(&Command::Restore(clone.config), &clone.fds)?;
    Ok((link, None))
}

/// Stores the VM's process and its control group, and watches for its end.
///
/// # Errors
/// A limit of the VM cannot be set.
pub(super) fn held(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    process: Arc<Process>,
    group: Option<GroupLease>,
) -> Outcome<()> {
    vm.hold(process.clone());
    let limited = vm.keep_and_limit(group);
    remove::watch(daemon, vm.clone(), process);
    limited
}
