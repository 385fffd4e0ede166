//! Stopping and starting a VM's vCPUs on request.

use crate::base::error::Outcome;
use crate::daemon::Daemon;
use crate::model::state::Event;
use crate::vm::{Vm, record};
use crate::vmm::control_link;
use dayfly_vmm::control::Command;
use std::sync::Arc;

/// Stops a VM's vCPUs.
///
/// # Errors
/// The VM neither runs nor is paused, or its VMM failed; its phase is then unchanged.
pub async fn pause(daemon: &Daemon, vm: &Arc<Vm>) -> Outcome<()> {
    switch(daemon, vm, Event::Pause, Command::Pause).await
}

/// Starts a VM's vCPUs again.
///
/// # Errors
/// As [`pause`].
pub async fn unpause(daemon: &Daemon, vm: &Arc<Vm>) -> Outcome<()> {
    switch(daemon, vm, Event::Unpause, Command::Resume).await
}

async fn switch(daemon: &Daemon, vm: &Arc<Vm>, event: Event, command: Command) -> Outcome<()> {
    let _turn = vm.turn.lock().await;
    vm.answers()?;
    let before = vm.step(event)?;
    if let Err(e) =
        control_link::done(&vm.dir.control(), command, daemon.config.deadlines.control).await
    {
        // The phase stays if the VM has exited meanwhile.
        vm.update(|live| {
            if live.phase.alive() {
                live.phase = before;
            }
        });
        return Err(e.into());
    }
    record::note(&daemon.registry, vm).await;
    Ok(())
}
