//! Changes the egress policy of a VM that runs.
//!
//! ```text
//! PUT egress ─▶ packet filter, open connections ─▶ name service ─▶ record ─▶ answer
//! ```
//!
//! The record comes last: a daemon that ends before has answered no client, and the next daemon
//! applies what the record has. If the record cannot be written, the policy before is restored.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::daemon::Daemon;
use crate::vm::{Vm, record};
use dayfly_api::types::{ErrorCode, EventKind};
use dayfly_units::Egress;
use std::sync::Arc;

/// Changes the egress policy of a VM, and cuts the connections that it forbids. Snapshots and forks
/// that are made from now on have the new policy.
///
/// # Errors
/// The policy permits what no VM reaches, the VM has no network or has ended, the host refuses, or
/// the record cannot be written: the policy before stays. If the record cannot be written and the
/// host also refuses the policy before, the VM has the new policy until the daemon ends; the log
/// says so.
pub async fn change(daemon: &Arc<Daemon>, vm: &Arc<Vm>, egress: Egress) -> Outcome<()> {
    daemon.networks.check_egress(&egress)?;
    let state = |why: &str| ApiError::new(ErrorCode::State, format_args!("VM {}: {why}", vm.name));
    // One change after the other.
    let _one = vm.egress.lock().await;
    if !vm.phase().alive() {
        return Err(state("has ended; it has no network any more"));
    }
    let control = vm.attachment(|attachment| attachment.egress());
    let control = control.ok_or_else(|| state("has no network, so it has no egress policy"))?;
    let set = |egress: Egress| {
        let (control, vm) = (control.clone(), vm.clone());
        blocking(move || {
            control.set(&egress)?;
            Ok(vm.update(|live| {
                let network = live.network.as_mut()?;
                let before = network.policy();
                network.set_policy(egress);
                Some(before)
            }))
        })
    };
    let before = set(egress).await?;
    let written =
        if vm.facts.ephemeral { Ok(()) } else { record::write(&daemon.registry, vm).await };
    match (&written, before) {
        (Ok(()), _) => daemon.happened(vm, EventKind::Updated),
        (Err(_), Some(before)) => {
            if let Err(e) = set(before).await {
                tracing::error!(vm = %vm.id, "the egress policy before: {}", e.0.message);
            }
        }
        (Err(_), None) => {}
    }
    written
}
