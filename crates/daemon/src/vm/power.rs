//! Stopping a VM's vCPUs and letting them go on.

use super::state::Event;
use super::{Vm, control_link, death};
use crate::daemon::Daemon;
use crate::error::Outcome;
use dayfly_vmm::control::Command;
use std::sync::Arc;

/// Stops a VM's vCPUs.
///
/// # Errors
/// It neither runs nor is paused, or its VMM does not do it; it is then as it was.
pub async fn pause(daemon: &Daemon, vm: &Arc<Vm>) -> Outcome<()> {
    switch(daemon, vm, Event::Pause, Command::Pause).await
}

/// Lets a VM's vCPUs go on.
///
/// # Errors
/// As [`pause`].
pub async fn unpause(daemon: &Daemon, vm: &Arc<Vm>) -> Outcome<()> {
    switch(daemon, vm, Event::Unpause, Command::Resume).await
}

async fn switch(daemon: &Daemon, vm: &Arc<Vm>, event: Event, command: Command) -> Outcome<()> {
    let _turn = vm.turn.lock().await;
    let before = vm.step(event)?;
    if let Err(e) = control_link::done(&vm.dir.control(), command, daemon.config.deadlines.control).await {
        // Unless it has ended meanwhile.
        vm.update(|live| {
            if live.phase.alive() {
                live.phase = before;
            }
        });
        return Err(e.into());
    }
    death::note(daemon, vm).await;
    Ok(())
}
