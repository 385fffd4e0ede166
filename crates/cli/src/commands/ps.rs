//! `dayfly ps`: lists the VMs.

use super::network;
use super::ps_filter::Filter;
use crate::output::{self, ListArgs, ago};
use anyhow::Result;
use dayfly_api::types::{ExitKind, PauseReason, Vm, VmState};
use dayfly_units::Bytes;
use dayfly_units::text::{LONG, escaped};

/// Arguments of `dayfly ps`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// List VMs that have ended too
    #[arg(short, long)]
    all: bool,
    /// List only VMs with this: id=START, name=PART, status=STATE, label=KEY[=VALUE], or
    /// ancestor=SNAPSHOT or image; all labels must match, and one filter of each other kind
    #[arg(short, long = "filter", value_name = "KEY=VALUE")]
    filters: Vec<Filter>,
    #[command(flatten)]
    list: ListArgs,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let all = self.all || Filter::wants_ended(&self.filters);
        let known = crate::connect::client().await?.vms(all).await?;
        let vms: Vec<Vm> =
            known.iter().filter(|vm| Filter::lists(&self.filters, vm)).cloned().collect();
        for (vm, problem) in vms.iter().filter_map(|vm| Some((vm, vm.problem.as_ref()?))) {
            // On standard error, because the reason does not fit into the table.
            eprintln!("VM {}: {}", vm.name, escaped(problem, LONG));
        }
        let header = [
            "VM ID", "NAME", "STATE", "FROM", "KERNEL", "CPUS", "MEMORY", "ADDRESS", "PORTS",
            "CREATED",
        ];
        output::list(
            self.list,
            &vms,
            header,
            |vm| vm.id.to_string(),
            |vm| {
                let from = from(vm, &known);
                [
                    vm.id.to_string(),
                    vm.name.to_string(),
                    state(vm),
                    from,
                    vm.kernel.to_string(),
                    vm.vcpus.to_string(),
                    Bytes(vm.memory_bytes).to_string(),
                    vm.network
                        .as_ref()
                        .map_or_else(String::new, |network| network.address.to_string()),
                    ports(vm),
                    ago(vm.created_unix_ms),
                ]
            },
        )
    }
}

/// The origin of a VM: the VM that it was forked from (by name if that VM is listed), a snapshot,
/// or an image.
fn from(vm: &Vm, vms: &[Vm]) -> String {
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
fn ports(vm: &Vm) -> String {
    let ports = vm.network.iter().flat_map(|network| &network.published);
    ports.map(network::shown).collect::<Vec<_>>().join(", ")
}

/// The state of a VM, with the cause if it has ended or waits for space.
fn state(vm: &Vm) -> String {
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
