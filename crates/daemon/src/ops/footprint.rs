//! The RAM that a VM holds, by colour: its fractional footprint (Kaleidoscope, section 5.1).
//!
//! A clone's RAM is a private mapping of its snapshot's, and anonymous memory in large holes of the
//! snapshot's RAM. Written pages belong to the VM, pages that were only read are shared, and
//! untouched pages take no memory. The colours are those of the snapshot.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::daemon::Daemon;
use crate::vm::Vm;
use crate::vm::bill::Bill;
use dayfly_api::types::{ColourHeld, ErrorCode, Footprint};
use dayfly_host::memory;
use dayfly_host::pagemap::{self, Held};
use dayfly_introspect::Colour;
use dayfly_store::{OpenError, Run};
use dayfly_units::{PAGE_SIZE, error::chain};
use dayfly_vmm::arch::layout;
use std::sync::Arc;

/// Name of a snapshot's RAM in `/proc/PID/maps` of a VMM: `dayfly_store`'s memfd.
const RAM: &str = "/memfd:ram (deleted)";

/// Measures the footprint of a VM.
///
/// # Errors
/// The VM does not run.
pub async fn footprint(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<Footprint> {
    let (daemon, vm) = (daemon.clone(), vm.clone());
    blocking(move || {
        let phase = vm.phase();
        let ended = || ApiError::new(ErrorCode::State, format_args!("VM {}: is {phase}", vm.name));
        let pid = vm.process().filter(|_| phase.alive()).ok_or_else(ended)?.id().pid;
        let mut colours: Vec<ColourHeld> = Colour::ALL.iter().map(|colour| none(*colour)).collect();
        let looked = if vm.facts.snapshot.is_some() {
            let table = saved(&daemon, &vm);
            let parts = layout::ram(vm.facts.memory_bytes).into_iter();
            let parts = parts.map(|(_, start, len)| start / PAGE_SIZE..(start + len) / PAGE_SIZE);
            let parts: Vec<_> = parts.collect();
            pagemap::held(pid, RAM, &parts, |frame, held| count(&mut colours, &table, frame, held))
        } else {
            memory::of(pid).map(|memory| {
                let unknown = &mut colours[usize::from(Colour::Unknown.number())];
                unknown.own_bytes = memory.anonymous_kib << 10;
            })
        };
        looked.map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => ended(),
            _ => ApiError::internal(format_args!("the memory of VM {}: {e}", vm.name)),
        })?;
        let Bill { usage, disks: disk_traffic, net: net_traffic } = vm.bill();
        Ok(Footprint {
            id: vm.id,
            name: vm.name.clone(),
            memory_bytes: vm.facts.memory_bytes,
            colours,
            usage,
            disk_traffic,
            net_traffic,
            cpus: vm.live().cpus.iter().collect(),
        })
    })
    .await
}

/// The runs of the VM's snapshot, with their colours; empty if the snapshot is gone or has no
/// table.
fn saved(daemon: &Daemon, vm: &Vm) -> Vec<Run> {
    let Some(name) = &vm.facts.snapshot else { return Vec::new() };
    match daemon.templates.store().snapshot_table(&daemon.templates.tenant(), name) {
        // A younger snapshot of this name is another one.
        Ok((manifest, table)) if manifest.created_unix_ms <= vm.facts.created_unix_ms => {
            table.runs().to_vec()
        }
        Ok(_) | Err(OpenError::NotFound { .. }) => Vec::new(),
        Err(e) => {
            let why = chain(&e);
            tracing::warn!(vm = %vm.name, snapshot = %name, "colours of what it holds: {why}");
            Vec::new()
        }
    }
}

fn none(colour: Colour) -> ColourHeld {
    ColourHeld { colour: colour.name().to_owned(), own_bytes: 0, shared_bytes: 0, zero_bytes: 0 }
}

fn count(colours: &mut [ColourHeld], table: &[Run], frame: u64, held: Held) {
    let at = table.partition_point(|run| u64::from(run.first) + u64::from(run.frames) <= frame);
    let colour =
        table.get(at).and_then(|run| Colour::from_number(run.colour)).unwrap_or(Colour::Unknown);
    let Some(of) = colours.get_mut(usize::from(colour.number())) else { return };
    let bytes = match held {
        Held::Own => &mut of.own_bytes,
        Held::Shared => &mut of.shared_bytes,
        Held::Zero => &mut of.zero_bytes,
    };
    *bytes = bytes.saturating_add(PAGE_SIZE);
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_store::Kind;

    #[test]
    fn pages_count_for_the_colour_of_their_frame() {
        let run = |first, frames, colour: Colour| Run {
            first,
            frames,
            colour: colour.number(),
            kind: Kind::Zero,
        };
        let table = [
            run(0, 10, Colour::KernelData),
            run(10, 5, Colour::PageCache),
            run(15, 1, Colour::Free),
        ];
        let mut colours: Vec<ColourHeld> = Colour::ALL.iter().map(|colour| none(*colour)).collect();
        let touched = [
            (0, Held::Own),
            (9, Held::Own),
            (10, Held::Shared),
            (14, Held::Own),
            (15, Held::Zero),
            (16, Held::Shared),
            (1 << 50, Held::Own),
        ];
        touched.iter().for_each(|(frame, held)| count(&mut colours, &table, *frame, *held));
        let of = |colour: Colour| {
            let of = &colours[usize::from(colour.number())];
            assert_eq!(of.colour, colour.name());
            [of.own_bytes, of.shared_bytes, of.zero_bytes].map(|bytes| bytes / PAGE_SIZE)
        };
        assert_eq!(of(Colour::KernelData), [2, 0, 0]);
        assert_eq!(of(Colour::PageCache), [1, 1, 0]);
        assert_eq!(of(Colour::Free), [0, 0, 1]);
        assert_eq!(of(Colour::Unknown), [1, 1, 0]);
    }
}
