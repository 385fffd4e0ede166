//! Writing a stopped VM to files: the state, the pages of RAM that are not copied yet, the layers
//! of its disks.

use super::error::SaveError;
use super::machine::Vm;
use super::warm::WarmVmm;
use crate::disk::{FreezeFiles, page_map};
use crate::memory::backing::{self, Row};
use crate::memory::pages::Pages;
use crate::memory::{self, YieldPoints};
use crate::state::{self, VmState};
use crate::vcpu::state as vcpu_state;
use crate::virtio::DeviceSet;
use dayfly_units::PAGE_SIZE;
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip,
};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

/// The descriptors of a save or a fork.
pub(super) struct Saving {
    /// An empty file for the state.
    pub(super) state: File,
    pub(super) memory: File,
    /// An empty file for the record that is written after the VM has resumed.
    pub(super) late: File,
    /// The files of each writable disk.
    pub(super) layers: Vec<FreezeFiles>,
}

/// What is done after the VM has resumed, to shorten the pause: a record is made and written, and
/// writable descriptors of frozen layers are closed.
pub(super) struct Late {
    pub(super) file: File,
    pub(super) record: Record,
    pub(super) unused: Vec<OwnedFd>,
}

/// The content of [`Late`].
pub(super) enum Record {
    /// The page map. It is made when it is written.
    PageMap,
    /// The pages in a fork's memory file; `None` if it has all.
    Own(Option<Pages>),
}

impl Late {
    /// Closes the descriptors and writes the record. Ignores write errors: the reader verifies the
    /// seal and rejects a short record.
    pub(super) fn finish(mut self, devices: &DeviceSet, yields: &mut YieldPoints<'_>) {
        drop(self.unused);
        let _ = self.file.write_all(&match self.record {
            Record::PageMap => page_map::record::encode(&devices.page_map(yields)),
            Record::Own(own) => backing::encode(&own.iter().flat_map(rows).collect::<Vec<_>>()),
        });
    }
}

/// Rows that map each run of pages from the same place of the one file.
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
    match memory::file_bytes(&file).map_err(failed)? {
        0 => Ok(file),
        got => Err(not_empty(got)),
    }
}

fn irqchip(id: u32) -> kvm_irqchip {
    kvm_irqchip { chip_id: id, ..Default::default() }
}

const IRQCHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

impl Vm {
    /// Writes the whole machine to `fds`, in the order of
    /// [`Command::Save`](crate::control::Command::Save).
    ///
    /// # Errors
    /// When the VM runs, descriptors are missing, or a file cannot be read or written. The VM is
    /// then unchanged.
    pub fn save(&mut self, fds: Vec<OwnedFd>) -> Result<(), SaveError> {
        if !self.paused {
            return Err(SaveError::Running);
        }
        let saved = self.saving(fds).and_then(|saving| self.save_stopped(saving));
        self.end_precopy();
        let (late, _) = saved?;
        late.finish(&self.warm.devices, &mut YieldPoints::none());
        Ok(())
    }

    /// Checks and sorts the descriptors of a save or a fork.
    pub(super) fn saving(&self, fds: Vec<OwnedFd>) -> Result<Saving, SaveError> {
        let (writable, got) = (self.writable_disks, fds.len());
        let wrong = SaveError::Fds { expected: 3 + 3 * writable, writable, got };
        // A daemon of an earlier version sends no read-only descriptors.
        let read_only = got == 3 + 3 * writable;
        if !read_only && got != 3 + 2 * writable {
            return Err(wrong);
        }
        let mut fds = fds.into_iter();
        let (Some(state), Some(memory), Some(late)) = (fds.next(), fds.next(), fds.next()) else {
            return Err(wrong);
        };
        let state = empty(state, SaveError::StateNotEmpty, SaveError::StateWrite)?;
        let late = empty(late, SaveError::PageMapNotEmpty, SaveError::PageMapWrite)?;
        let mut layers = Vec::new();
        while let (Some(map), Some(next)) = (fds.next(), fds.next()) {
            let frozen = if read_only { fds.next() } else { None };
            layers.push(FreezeFiles { map, next, frozen });
        }
        Ok(Saving { state, memory: memory.into(), late, layers })
    }

    /// Writes a stopped VM, except for the record that is written after it has resumed. Returns the
    /// pages copied in this pause, which are few after a precopy.
    pub(super) fn save_stopped(&mut self, saving: Saving) -> Result<(Late, u64), SaveError> {
        let Saving { state, memory: target, late, layers } = saving;
        if !self.ram.is_whole() {
            return Err(SaveError::NotWhole);
        }
        self.set_clocks().map_err(SaveError::Clocks)?;
        let (holes, pages) = match &self.copying {
            Some(copying) => self.finish_precopy(copying, &target)?,
            None => {
                let WarmVmm { memory, shape, pagemap, .. } = &self.warm;
                let (bytes, unwritten) = (shape.memory_bytes, self.ram.unwritten(None));
                let mut yields = YieldPoints::none();
                let pagemap = pagemap.as_ref();
                let dump = memory::dump(memory, bytes, pagemap, unwritten, &target, &mut yields)?;
                let holes = memory::large_holes(&target, bytes)?;
                (holes, (dump.own_bytes + dump.parent_bytes) / PAGE_SIZE)
            }
        };
        self.write_state(state, holes)?;
        // The last step, because it cannot be undone.
        let unused = self.warm.devices.freeze_layers(layers).map_err(SaveError::Disks)?;
        Ok((Late { file: late, record: Record::PageMap, unused }, pages))
    }

    /// Writes the state to an empty file.
    pub(super) fn write_state(
        &self,
        mut file: File,
        holes: Vec<(u64, u64)>,
    ) -> Result<(), SaveError> {
        let state = state::encode(&self.read_state(holes)?).map_err(SaveError::Encode)?;
        file.write_all(&state).map_err(SaveError::StateWrite)
    }

    fn read_state(&self, holes: Vec<(u64, u64)>) -> Result<VmState, SaveError> {
        let on = |what: &'static str| move |error| SaveError::Kvm(what, error);
        let limits = &self.warm.limits;
        let mut vcpus = Vec::new();
        for vcpu in &self.warm.vcpus {
            let saved = vcpu_state::save(&vcpu.fd(), limits)
                .map_err(|source| SaveError::Vcpu { id: vcpu.id(), source })?;
            vcpus.push(saved);
        }
        let mut irqchips = IRQCHIPS.map(irqchip);
        for chip in &mut irqchips {
            self.warm.vm.get_irqchip(chip).map_err(on("KVM_GET_IRQCHIP"))?;
        }
        Ok(VmState {
            memory_bytes: self.warm.shape.memory_bytes,
            holes,
            vcpus,
            irqchips,
            pit: self.warm.vm.get_pit2().map_err(on("KVM_GET_PIT2"))?,
            clock: self.warm.vm.get_clock().map_err(on("KVM_GET_CLOCK"))?,
            serial: self.warm.platform.save(),
            devices: self.warm.devices.save(),
        })
    }
}
