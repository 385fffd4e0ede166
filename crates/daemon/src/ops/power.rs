//! Stopping and starting a VM's vCPUs on request.
//!
//! A VMM that has not answered may still carry out the command, so only its answer sets the phase
//! ([`crate::ops::section`]).

use crate::base::error::Outcome;
use crate::daemon::Daemon;
use crate::model::state::{Event, Phase};
use crate::ops::section::section;
use crate::vm::{Vm, record};
use crate::vmm::control_link::{self, ControlError};
use dayfly_api::types::EventKind;
use dayfly_units::failpoint;
use dayfly_vmm::control::{Answer, Command};
use std::sync::Arc;

/// Stops a VM's vCPUs.
///
/// # Errors
/// The VM neither runs nor is paused, or its VMM refused: its phase is then unchanged. Or its VMM
/// did not answer in time: its phase follows from the answer.
pub async fn pause(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    switch(daemon, vm, Event::Pause, Command::Pause).await
}

/// Starts a VM's vCPUs again.
///
/// # Errors
/// As [`pause`].
pub async fn unpause(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    switch(daemon, vm, Event::Unpause, Command::Resume).await
}

async fn switch(daemon: &Arc<Daemon>, vm: &Arc<Vm>, event: Event, command: Command) -> Outcome<()> {
    let within = daemon.config.deadlines.control;
    vm.answers()?;
    let turn = vm.take_turn(within).await?;
    let (work, same) = (daemon.clone(), vm.clone());
    let what = if command == Command::Pause { "a pause" } else { "an unpause" };
    section(daemon, vm, what, within, async move {
        let _turn = turn;
        settled(&work, &same, event, command).await
    })
    .await
}

/// Adds the event of a change; a repeated request changes nothing.
fn happened(daemon: &Daemon, vm: &Vm, before: Phase, event: Event) {
    match (before, event) {
        (Phase::Running, Event::Pause) => daemon.happened(vm, EventKind::Paused),
        (Phase::Paused, Event::Unpause) => daemon.happened(vm, EventKind::Unpaused),
        _ => {}
    }
}

/// Sends the command, and sets the phase by the VMM's answer.
async fn settled(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    event: Event,
    command: Command,
) -> Outcome<()> {
    let before = vm.step(event)?;
    let within = daemon.config.deadlines.control;
    let control = vm.dir.control();
    let error = match control_link::decided(&control, command.clone(), Vec::new(), within).await {
        Ok(Answer::Ok) => {
            failpoint::reached("daemon.power.switched");
            record::note(&daemon.registry, vm).await;
            happened(daemon, vm, before, event);
            failpoint::reached("daemon.power.recorded");
            return Ok(());
        }
        Ok(got) => ControlError::Unexpected { command, got: Box::new(got) },
        Err(error) => error,
    };
    // A VMM that refused did nothing. One that answered anything else cannot be believed, or has
    // ended.
    vm.update(|live| {
        if live.phase.alive() {
            live.phase = before;
        }
    });
    Err(error.into())
}
