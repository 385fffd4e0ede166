//! The end of a VM that its guest brings about: asked for, and waited for.

use crate::base::error::{ApiError, Outcome};
use crate::daemon::Daemon;
use crate::model::exit::exit_now;
use crate::model::state::Phase;
use crate::ops::{power, remove};
use crate::vm::Vm;
use crate::vmm::agent_link::AgentLink;
use dayfly_api::agent::Request;
use dayfly_api::types::{ErrorCode, ExitKind, VmExit};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Asks the guest to power off, and kills the VM if it has not within `grace`. A paused VM goes on
/// first. Returns when the VM has ended.
///
/// # Errors
/// The VM has ended already, or its process survives SIGKILL.
pub async fn stop(daemon: &Arc<Daemon>, vm: &Arc<Vm>, grace: Duration) -> Outcome<()> {
    if !vm.phase().alive() {
        return Err(ApiError::new(
            ErrorCode::State,
            format_args!("VM {}: has exited already", vm.name),
        ));
    }
    let asked = async {
        if vm.phase() == Phase::Paused {
            power::unpause(daemon, vm).await?;
        }
        let within = daemon.config.deadlines.agent;
        let mut link = AgentLink::connect(&vm.dir.vsock(), within).await?;
        link.send(&Request::Shutdown { reboot: false }, "powering the guest off").await?;
        // The connection stays open until the end, because the agent reads the request in between.
        vm.wait_gone().await;
        Outcome::Ok(())
    };
    match timeout(grace, asked).await {
        Ok(Ok(())) => return Ok(()),
        // A guest that does not listen is killed at once: nothing else can end it.
        Ok(Err(error)) => tracing::info!(vm = %vm.id, "stop: {}; killing it", error.0.message),
        Err(_) => tracing::info!(vm = %vm.id, "stop: no end within {grace:?}; killing it"),
    }
    // It may have ended meanwhile.
    if vm.phase().alive() { remove::kill(daemon, vm).await } else { Ok(()) }
}

/// Waits for the end of a VM, and returns how it ended. A VM that was removed counts as killed.
pub async fn wait(vm: &Vm) -> VmExit {
    vm.wait_gone().await;
    vm.live().exit.unwrap_or_else(|| exit_now(ExitKind::Killed, "removed"))
}
