//! The end of a VM that its guest brings about: asked for, and waited for.

use crate::base::error::{ApiError, Outcome};
use crate::daemon::Daemon;
use crate::model::exit::exit_now;
use crate::model::state::Phase;
use crate::ops::{power, remove};
use crate::vm::Vm;
use crate::vmm::agent_link::{AgentLink, LinkError};
use dayfly_api::agent::{Reply, Request};
use dayfly_api::types::{ErrorCode, ExitKind, VmExit};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Interval of the attempts to reach an agent that refuses, as during a snapshot.
const AGAIN: Duration = Duration::from_millis(200);

/// Asks the guest to power off, and kills the VM if it has not within `grace`, or at once if it has
/// no agent. A paused VM goes on first. Returns when the VM has ended.
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
    if vm.has_agent() {
        let asked = async {
            while let Err(error) = ask(daemon, vm).await {
                tracing::debug!(vm = %vm.id, "stop: {}; asking again", error.0.message);
                tokio::time::sleep(AGAIN).await;
            }
            vm.wait_gone().await;
        };
        tokio::select! {
            _ = timeout(grace, asked) => {}
            () = vm.wait_gone() => {}
        }
    }
    // It has ended, or will not.
    if vm.phase().alive() {
        return remove::kill(daemon, vm).await;
    }
    // So that no later request finds it.
    if vm.facts.auto_remove { remove::remove(daemon, vm).await } else { Ok(()) }
}

/// Asks the guest to power off.
///
/// # Errors
/// The VM cannot go on, or its agent does not answer or refuses.
async fn ask(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    let doing = "powering the guest off";
    if vm.phase() == Phase::Paused {
        power::unpause(daemon, vm).await?;
    }
    let link = AgentLink::connect(&vm.dir.vsock(), daemon.config.deadlines.agent).await?;
    match link.ask(&Request::Shutdown { reboot: false }, doing).await? {
        Reply::Ok => Ok(()),
        reply => {
            let (expected, got) = ("Ok", format!("{reply:?}"));
            Err(LinkError::Unexpected { doing, expected, got }.into())
        }
    }
}

/// Waits for the end of a VM, and returns how it ended. A VM that was removed counts as killed.
pub async fn wait(vm: &Vm) -> VmExit {
    vm.wait_gone().await;
    vm.live().exit.unwrap_or_else(|| exit_now(ExitKind::Killed, "removed"))
}
