//! Cells of `dayfly ps`.

use super::network;
use dayfly_api::types::{ExitKind, PauseReason, Vm, VmState};

/// The origin of a VM: the VM that it was forked from (by name if that VM is listed), a snapshot,
/// or an image.
pub(super) fn from(vm: &Vm, vms: &[Vm]) -> String {
    let Some(id) = vm.forked_from else {
        return vm.snapshot.as_ref().unwrap_or(&vm.image).to_string();
    };
    let parent = vms
        .iter()
        .find(|other| other.id == id)
        .map_or_else(|| id.to_string(), |vm| vm.name.to_string());
    format!("{parent} (fork)")
}

/// The published ports of a VM.
pub(super) fn ports(vm: &Vm) -> String {
    vm.network.as_ref().map(|network| network::shown(&network.published)).unwrap_or_default()
}

/// The state of a VM, with the cause if it has ended or waits for space.
pub(super) fn state(vm: &Vm) -> String {
    let ended = vm.exit.as_ref().map(|exit| match exit.reason {
        ExitKind::PowerOff => "powered off",
        ExitKind::Reboot => "rebooted",
        ExitKind::Panic => "panicked",
        ExitKind::Killed => "killed",
        ExitKind::Ttl => "ttl",
        ExitKind::Failed => "failed",
        ExitKind::Memory => "out of memory",
        ExitKind::Lost => "lost",
    });
    match (vm.state, ended) {
        (VmState::Starting, _) => "starting".into(),
        (VmState::Running, _) => "running".into(),
        (VmState::Paused, _) if vm.paused_for == Some(PauseReason::NoSpace) => {
            "paused (no space)".into()
        }
        (VmState::Paused, _) => "paused".into(),
        (VmState::Exited, Some(why)) => format!("exited ({why})"),
        (VmState::Exited, None) => "exited".into(),
        (VmState::Unknown, _) => "unknown".into(),
    }
}
