//! Writing a VM that stands to files: the state, what of RAM is not copied yet, the layers of its disks.

use super::error::SaveError;
use super::{IRQCHIPS, Shell, Vm, irqchip};
use crate::disk::page_map;
use crate::memory;
use crate::memory::backing::{self, Row};
use crate::memory::pages::Pages;
use crate::state::{self, VmState};
use crate::vcpu::state::{self as vcpu_state, HostLimits};
use dayfly_units::PAGE_SIZE;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

/// The descriptors of a save or a fork, in their order.
pub(super) struct Saving {
    /// Empty.
    pub(super) state: File,
    pub(super) memory: File,
    /// Empty; for what can be written later.
    pub(super) late: File,
    /// For each writable disk a file for the map of its layer, and its next layer.
    pub(super) layers: Vec<(OwnedFd, OwnedFd)>,
}

/// What can be written when the VM has gone on.
pub(super) struct Late {
    pub(super) file: File,
    pub(super) record: Record,
}

/// See [`Late`].
pub(super) enum Record {
    PageMap(Vec<page_map::Run>),
    /// The pages that a fork's memory file has, where it does not have all.
    Own(Option<Pages>),
}

impl Late {
    /// One that cannot be written is refused where it is read.
    pub(super) fn write(mut self) {
        let _ = self.file.write_all(&match self.record {
            Record::PageMap(runs) => page_map::record::encode(&runs),
            Record::Own(own) => backing::encode(&own.iter().flat_map(rows).collect::<Vec<_>>()),
        });
    }
}

/// Each page from the same place of the one file.
fn rows(own: &Pages) -> impl Iterator<Item = Row> {
    own.runs().filter_map(|run| {
        let first = u32::try_from(run.start).ok()?;
        Some(Row { first, pages: u32::try_from(run.end - run.start).ok()?, file: 0, from: first })
    })
}

fn empty(
    file: OwnedFd,
    not_empty: fn(u64) -> SaveError,
    failed: fn(io::Error) -> SaveError,
) -> Result<File, SaveError> {
    let file = File::from(file);
    match file.metadata().map_err(failed)?.len() {
        0 => Ok(file),
        got => Err(not_empty(got)),
    }
}

impl Vm {
    /// The descriptors of a save.
    pub(super) fn saving(&self, fds: Vec<OwnedFd>) -> Result<Saving, SaveError> {
        let (writable, got) = (self.writable_disks, fds.len());
        let wrong = SaveError::Fds { expected: 3 + 2 * writable, writable, got };
        if got != 3 + 2 * writable {
            return Err(wrong);
        }
        let mut fds = fds.into_iter();
        let (Some(state), Some(memory), Some(late)) = (fds.next(), fds.next(), fds.next()) else {
            return Err(wrong);
        };
        let state = empty(state, SaveError::StateNotEmpty, SaveError::StateWrite)?;
        let late = empty(late, SaveError::PageMapNotEmpty, SaveError::PageMapWrite)?;
        let mut layers = Vec::new();
        while let (Some(map), Some(writable)) = (fds.next(), fds.next()) {
            layers.push((map, writable));
        }
        Ok(Saving { state, memory: memory.into(), late, layers })
    }

    /// Writes a VM that stands, but for what can be written when it goes on again; with it comes how many pages were copied, where most had been before.
    pub(super) fn save_stopped(&mut self, fds: Vec<OwnedFd>) -> Result<(Late, u64), SaveError> {
        let Saving { state, memory: target, late, layers } = self.saving(fds)?;
        if !self.is_whole() {
            return Err(SaveError::NotWhole);
        }
        self.set_clocks().map_err(SaveError::Clocks)?;
        let (holes, pages) = match &self.copying {
            Some(copying) => self.finish_precopy(copying, &target)?,
            None => {
                let Shell { memory, shape, pagemap, .. } = &self.shell;
                let (bytes, pagemap, parent) = (shape.memory_bytes, pagemap.as_ref(), self.parent.as_ref());
                let dump = memory::dump(memory, bytes, pagemap, parent, &target)?;
                let holes = memory::large_holes(&target, bytes)?;
                (holes, (dump.own_bytes + dump.parent_bytes) / PAGE_SIZE)
            }
        };
        self.write_state(state, holes)?;
        let runs = self.shell.devices.page_map().map_err(SaveError::Disks)?;
        // Last, because it cannot be undone.
        self.shell.devices.freeze_layers(layers).map_err(SaveError::Disks)?;
        Ok((Late { file: late, record: Record::PageMap(runs) }, pages))
    }

    /// Writes the state, to an empty file.
    pub(super) fn write_state(&self, mut file: File, holes: Vec<(u64, u64)>) -> Result<(), SaveError> {
        let state = state::encode(&self.read_state(holes)?).map_err(SaveError::Encode)?;
        file.write_all(&state).map_err(SaveError::StateWrite)
    }

    fn read_state(&self, holes: Vec<(u64, u64)>) -> Result<VmState, SaveError> {
        let on = |what: &'static str| move |error| SaveError::Kvm(what, error);
        let limits = HostLimits::new(&self.shell.kvm, &self.shell.vm)
            .map_err(|source| SaveError::Vcpu { id: 0, source })?;
        let mut vcpus = Vec::new();
        for vcpu in &self.shell.vcpus {
            let saved = vcpu_state::save(&vcpu.fd(), &limits)
                .map_err(|source| SaveError::Vcpu { id: vcpu.id(), source })?;
            vcpus.push(saved);
        }
        let mut irqchips = IRQCHIPS.map(irqchip);
        for chip in &mut irqchips {
            self.shell.vm.get_irqchip(chip).map_err(on("KVM_GET_IRQCHIP"))?;
        }
        Ok(VmState {
            memory_bytes: self.shell.shape.memory_bytes,
            holes,
            vcpus,
            irqchips,
            pit: self.shell.vm.get_pit2().map_err(on("KVM_GET_PIT2"))?,
            clock: self.shell.vm.get_clock().map_err(on("KVM_GET_CLOCK"))?,
            serial: self.shell.platform.save(),
            devices: self.shell.devices.save(),
        })
    }
}
