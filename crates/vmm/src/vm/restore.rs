//! Restoring a guest from a snapshot.

use super::error::{BuildError, on};
use super::machine::{Restored, Vm};
use super::ram::Ram;
use super::warm::WarmVmm;
use crate::arch::{cpuid, layout};
use crate::config::RestoreConfig;
use crate::disk::DiskSpec;
use crate::jail;
use crate::memory::backing::Backing;
use crate::memory::{self, lazy, pre_fault, working_set};
use crate::state::{self, VmState};
use crate::vcpu::clocks::VcpuTime;
use crate::vcpu::{Vcpu, state as vcpu_state};
use dayfly_units::CpuModel;
use kvm_bindings::kvm_cpuid_entry2;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use vm_memory::Bytes;

/// The open files of a snapshot.
pub struct Files {
    /// The sealed state.
    pub state: File,
    /// Guest RAM.
    pub memory: Backing,
    /// The record of pages to populate before the guest runs.
    pub working_set: Option<File>,
    /// The disks, in order.
    pub disks: Vec<DiskSpec>,
    /// A socket to the pager, if `memory` is not whole yet.
    pub pager: Option<OwnedFd>,
}

/// Reads at explicit offsets, because clones share the open file and with it the file offset.
fn read_state(file: &File) -> Result<VmState, BuildError> {
    let got = memory::file_bytes(file).map_err(BuildError::StateRead)?;
    let max = state::MAX_BYTES + dayfly_units::sealed::HEADER_BYTES as u64;
    if got > max {
        return Err(BuildError::StateLength { got, max });
    }
    let mut bytes = vec![0; usize::try_from(got).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0).map_err(BuildError::StateRead)?;
    Ok(state::decode(&bytes)?)
}

impl WarmVmm {
    fn fits(&self, state: &VmState) -> Result<(), BuildError> {
        let differs = |what, expected, got| Err(BuildError::Shape { what, expected, got });
        let (memory, vcpus, saved) = (self.shape.memory_bytes, self.vcpus.len(), state.vcpus.len());
        if state.memory_bytes != memory {
            return differs("bytes of memory", memory, state.memory_bytes);
        }
        if saved > vcpus {
            return differs("vCPUs", vcpus as u64, saved as u64);
        }
        // A guest cannot start a vCPU that its firmware did not announce.
        let known = state.vcpus.first().map_or(1, |vcpu| cpuid::known_vcpus(&vcpu.cpuid));
        if saved < vcpus && usize::from(known) < vcpus {
            return Err(BuildError::UnknownVcpus { saved, known, wanted: vcpus });
        }
        Ok(())
    }

    /// Maps the snapshot's memory, or has the recorder serve it page by page.
    fn map_memory(&self, files: &Files, state: &VmState) -> Result<(), BuildError> {
        match &self.recorder {
            None => {
                let bytes = state.memory_bytes;
                let whole = files.pager.is_none();
                let parts =
                    memory::lay_over(&self.memory, &files.memory, bytes, &state.holes, whole)?;
                if let Some(pager) = &files.pager {
                    let uffd = self.uffd.as_ref().ok_or(BuildError::NoUserfaultfd)?;
                    lazy::serve(&self.memory, bytes, &parts, uffd, pager)
                        .map_err(BuildError::Pager)?;
                }
            }
            Some(recorder) => {
                memory::check_file(files.memory.file(), state.memory_bytes)?;
                let backing = files.memory.try_clone().map_err(BuildError::Recorder)?;
                recorder
                    .serve(&self.memory, state.memory_bytes, backing)
                    .map_err(BuildError::Recorder)?;
            }
        }
        Ok(())
    }

    /// Checks that this host's CPU has all features of a saved vCPU.
    fn check_features(&self, vcpu: &Vcpu, saved: &[kvm_cpuid_entry2]) -> Result<(), BuildError> {
        if self.supported.check_saved(saved).is_ok() {
            return Ok(());
        }
        // A KVM that cannot hide the CPU's own features from a guest, such as PVM, gives a vCPU
        // more than it says it supports.
        let known = self.shape.known_vcpus();
        let all = cpuid::Template::new(&self.supported, known, CpuModel::Host);
        let entries = cpuid::for_kvm(&all.of(vcpu.id())).ok_or(BuildError::Cpuid)?;
        let fd = vcpu.fd();
        fd.set_cpuid2(&entries).map_err(on("KVM_SET_CPUID2"))?;
        let has = fd.get_cpuid2(vcpu_state::MAX_CPUID).map_err(on("KVM_GET_CPUID2"))?;
        Ok(self.supported.with_entries(has).check_saved(saved)?)
    }

    /// Loads the saved vCPUs, prepares those that the guest may start besides, and loads the
    /// interrupt controllers and the timer.
    fn load_vcpus(&self, state: &VmState) -> Result<(), BuildError> {
        let xsave_words = self.limits.xsave_words();
        for (id, (vcpu, saved)) in self.vcpus.iter().zip(&state.vcpus).enumerate() {
            let has = self.cpuid.get(id).map(Vec::as_slice);
            // What was set ahead is what KVM supports here.
            if !has.is_some_and(|has| cpuid::alike(has, &saved.cpuid)) {
                self.check_features(vcpu, &saved.cpuid)?;
            }
            vcpu_state::load(&vcpu.fd(), saved, has, xsave_words)
                .map_err(|source| BuildError::Vcpu { id, source })?;
        }
        if let Some(first) = state.vcpus.first() {
            for (id, vcpu) in self.vcpus.iter().enumerate().skip(state.vcpus.len()) {
                let has = self.cpuid.get(id).map(Vec::as_slice);
                vcpu_state::load_new(&vcpu.fd(), vcpu.id(), first, has)
                    .map_err(|source| BuildError::Vcpu { id, source })?;
            }
        }
        // After the local APICs: loading the I/O APIC delivers its pending interrupts to them.
        for chip in &state.irqchips {
            self.vm.set_irqchip(chip).map_err(on("KVM_SET_IRQCHIP"))?;
        }
        self.vm.set_pit2(&state.pit).map_err(on("KVM_SET_PIT2"))?;
        Ok(())
    }

    /// The time of each vCPU: of a saved one as it was saved, of the others as the first one's.
    fn times(&self, state: &VmState) -> Vec<VcpuTime> {
        let saved = state.vcpus.iter().map(VcpuTime::from);
        let new = state.vcpus.first().map(|first| VcpuTime::from(first).of_new());
        saved.chain(new.into_iter().cycle()).take(self.vcpus.len()).collect()
    }

    /// Restores a saved machine. The guest runs afterwards, unless `config` keeps it paused.
    ///
    /// # Errors
    /// When the state is damaged, does not fit this warm VMM or the files, or the host refuses it.
    /// The warm VMM is then unusable.
    pub fn restore(mut self, config: &RestoreConfig, files: Files) -> Result<Vm, BuildError> {
        self.timeline.done("asked");
        if !config.paused {
            // The guest starts now, so its VMM must not wait behind other running guests.
            jail::normal_priority();
        }
        let state = read_state(&files.state)?;
        self.fits(&state)?;
        self.timeline.done("state");
        self.map_memory(&files, &state)?;
        let record = files
            .working_set
            .map(|file| working_set::read(&file, state.memory_bytes))
            .transpose()?;
        let pages = record.map(|record| record.runs);
        self.timeline.done("memory");
        let disks_bytes: Vec<u64> = files.disks.iter().map(|disk| disk.size_bytes).collect();
        let writable_disks = self.devices.insert_disks(files.disks)?;
        self.devices.load(&state.devices)?;
        self.platform.load(&state.serial)?;
        self.timeline.done("devices loaded");

        self.load_vcpus(&state)?;
        self.memory
            .write_slice(&config.generation, layout::GENERATION)
            .map_err(BuildError::Generation)?;
        self.timeline.done("vcpus loaded");
        if let Some(pages) = &pages {
            working_set::populate(&self.memory, state.memory_bytes, pages);
        }
        for vcpu in &self.vcpus {
            pre_fault::roots(&vcpu.fd());
        }
        if let (Some(pages), Some(vcpu)) = (pages, self.vcpus.first()) {
            working_set::map(state.memory_bytes, &pages, &vcpu.fd());
        }
        self.timeline.done("working set");
        let not_yet_run = Some(Restored { times: self.times(&state), clock: state.clock });
        let ram = if self.recorder.is_none() {
            let (own, rows) = files.memory.into_own();
            let filling = files.pager.is_some().then_some(own);
            Ram::Mapped { holes: state.holes, rows, filling }
        } else {
            Ram::Recorded(files.memory)
        };
        drop((files.state, files.pager));
        self.end_set_up(&disks_bytes);
        let mut vm = Vm {
            warm: self,
            ram,
            writable_disks,
            not_yet_run,
            paused: true,
            stalled: false,
            copying: None,
        };
        if !config.paused {
            vm.resume()?;
        }
        Ok(vm)
    }
}
