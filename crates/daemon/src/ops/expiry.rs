//! The time to live of VMs: a task for each VM that has one ends the VM at its deadline.
//!
//! ```text
//!  create, fork, PUT ttl ─▶ Live::deadline, recorded ─▶ the task of the VM sleeps until then
//!                                                            └─▶ `expired` recorded ─▶ killed
//! ```
//!
//! The record has the deadline, so the next daemon goes on with it. It has `expired` before the
//! VM is killed, so that the next daemon knows why the VM ended if this one ends in between.

use crate::base::error::{ApiError, Outcome};
use crate::base::time::{boottime_us, unix_ms};
use crate::daemon::Daemon;
use crate::model::deadline::Deadline;
use crate::ops::remove;
use crate::vm::{Vm, record};
use dayfly_api::types::{ErrorCode, EventKind, Lifetime};
use dayfly_units::failpoint;
use std::sync::Arc;
use std::time::Duration;

/// The longest time to live: 365 days.
pub const MAX_TTL_MS: u64 = 365 * 24 * 3600 * 1000;
/// The longest sleep. Timers stand still while the host is suspended, and deadlines do not.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// Checks what a client asks for.
///
/// # Errors
/// The time to live is 0 or too long.
pub fn check(lifetime: Lifetime) -> Outcome<()> {
    match lifetime.ttl_ms {
        Some(got) if !(1..=MAX_TTL_MS).contains(&got) => Err(ApiError::invalid(format_args!(
            "ttl_ms: expected 1 to {MAX_TTL_MS} (365 days), got {got}"
        ))),
        _ => Ok(()),
    }
}

fn deadline(ttl_ms: u64) -> Deadline {
    Deadline::after(ttl_ms, boottime_us(), unix_ms())
}

/// Begins the lifetime of a VM that is ready: it ends at `until`, or else after its time to live.
/// The caller writes the record.
pub fn begin(daemon: &Arc<Daemon>, vm: &Arc<Vm>, lifetime: Lifetime, until: Option<Deadline>) {
    if let Some(deadline) = until.or_else(|| lifetime.ttl_ms.map(deadline)) {
        vm.update(|live| live.deadline = Some(deadline));
        watch(daemon, vm);
    }
}

/// Changes the time to live of a VM: from now on, or no limit.
///
/// # Errors
/// The time is too long, the VM has ended or is being ended, or its record cannot be written: the
/// deadline before stays.
pub async fn change(daemon: &Arc<Daemon>, vm: &Arc<Vm>, ttl_ms: Option<u64>) -> Outcome<()> {
    check(Lifetime { ttl_ms, auto_remove: false })?;
    let new = ttl_ms.map(deadline);
    let before = vm.update(|live| {
        let ends = live.expired || !live.phase.alive();
        (!ends).then(|| std::mem::replace(&mut live.deadline, new))
    });
    let Some(before) = before else {
        let name = &vm.name;
        let why = format!("VM {name}: has ended, or is being ended; its time to live is over");
        return Err(ApiError::new(ErrorCode::State, why));
    };
    let written =
        if vm.facts.ephemeral { Ok(()) } else { record::write(&daemon.registry, vm).await };
    match &written {
        Ok(()) => daemon.happened(vm, EventKind::Updated),
        Err(_) => vm.update(|live| live.deadline = before),
    }
    vm.deadline_changed.notify_one();
    watch(daemon, vm);
    written
}

/// Starts the task that ends the VM at its deadline, unless it runs already or there is no
/// deadline.
pub fn watch(daemon: &Arc<Daemon>, vm: &Arc<Vm>) {
    if vm.live().deadline.is_some() && vm.claim_deadline() {
        tokio::spawn(wait(daemon.clone(), vm.clone()));
    }
}

async fn wait(daemon: Arc<Daemon>, vm: Arc<Vm>) {
    loop {
        let left = vm.live().deadline.map(|deadline| deadline.left_us(boottime_us()));
        let sleep = async {
            match left {
                Some(us) => tokio::time::sleep(Duration::from_micros(us).min(LONGEST_SLEEP)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = vm.wait_gone() => return,
            () = daemon.stop.cancelled() => return,
            () = vm.deadline_changed.notified() => {}
            () = sleep => if let Err(e) = expire(&daemon, &vm).await {
                tracing::error!(vm = %vm.id, "ending it at its deadline, tried again: {e}");
                tokio::time::sleep(LONGEST_SLEEP).await;
            },
        }
    }
}

/// Kills the VM if its deadline has passed.
///
/// # Errors
/// Its process survives SIGKILL.
async fn expire(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    let now = boottime_us();
    let due = vm.update(|live| {
        let passed = live.deadline.is_some_and(|deadline| deadline.left_us(now) == 0);
        let due = passed && live.phase.alive();
        live.expired |= due;
        due
    });
    if !due {
        return Ok(());
    }
    failpoint::reached("daemon.expire.due");
    if !vm.facts.ephemeral {
        record::note(&daemon.registry, vm).await;
    }
    failpoint::reached("daemon.expire.recorded");
    remove::kill(daemon, vm).await
}
