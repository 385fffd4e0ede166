//! One VM: a [`Shell`], made of all that does not depend on what will run in it, to which a boot or a restore gives life.
//!
//! ```text
//!                 ┌──boot────┐
//! Shell::new ──▶ Shell       ├──▶ Vm: Paused ⇄ Running        Save: only while Paused, stays Paused
//!                 └──restore─┘
//! ```
//!
//! A shell may be made long before it is needed: a clone then costs only the mapping of its memory, the loading of its state
//! and its first instruction (Swift Birth and Quick Death, section 4.1.2: everything that does not depend on the request is
//! done before it comes). Its threads are there and parked, its filters apply.
//!
//! A restored VM's clocks are set when it first goes on, not when it is loaded: a clone that waits loses no time and wakes
//! to no backlog of timers.

mod bare;
mod boot;
mod error;
mod live;
mod restore;
mod saving;
mod shell;

pub use bare::Bare;
pub use error::{BuildError, ConnectError, SaveError, VmError};
pub use restore::Files;
pub use shell::{Host, Shell};

use crate::config::LinkConfig;
use crate::control::Status;
use crate::disk::LayerSpec;
use crate::jail;
use crate::memory;
use crate::memory::backing::Backing;
use crate::memory::working_set::{self, Record};
use crate::vcpu::Vcpu;
use crate::vcpu::clocks;
use crate::vcpu::state::VcpuState;
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
};
use kvm_ioctls::VcpuFd;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;

/// What a restored VM still has to be given when it first goes on.
struct Restored {
    vcpus: Vec<VcpuState>,
    clock: kvm_clock_data,
}

fn irqchip(id: u32) -> kvm_irqchip {
    kvm_irqchip { chip_id: id, ..Default::default() }
}

const IRQCHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// A VM with a guest in it.
pub struct Vm {
    shell: Shell,
    /// What its memory was restored from.
    parent: Option<Backing>,
    /// Whether that was being filled then.
    lazy: bool,
    /// Its large holes, which were left anonymous.
    holes: Vec<(u64, u64)>,
    writable_disks: usize,
    not_yet_run: Option<Restored>,
    paused: bool,
    /// RAM that is being copied.
    copying: Option<live::Copying>,
}

impl Vm {
    /// What it does now.
    #[must_use]
    pub fn status(&self) -> Status {
        let mut phases = self.shell.timeline.phases();
        // It is the guest's doing, so it may lie anywhere after `running`.
        let first = self.shell.platform.first_port_write_us();
        phases.extend(first.map(|us| ("first port write".to_owned(), us)));
        Status { paused: self.paused, whole: self.is_whole(), shape: self.shell.shape, phases }
    }

    fn is_whole(&self) -> bool {
        !self.lazy || self.parent.as_ref().is_some_and(|parent| memory::lazy::is_whole(parent.file()))
    }

    /// Stops every vCPU between two instructions, then every device between two requests.
    ///
    /// # Errors
    /// When a vCPU does not stop; all then run on.
    pub fn pause(&mut self) -> Result<(), VmError> {
        if self.paused {
            return Ok(());
        }
        for vcpu in &self.shell.vcpus {
            vcpu.ask_to_park();
        }
        if let Some(error) = self.shell.vcpus.iter().find_map(|vcpu| vcpu.wait_parked().err()) {
            for vcpu in &self.shell.vcpus {
                vcpu.resume();
            }
            return Err(error.into());
        }
        self.shell.devices.pause();
        self.paused = true;
        Ok(())
    }

    /// Goes on.
    ///
    /// # Errors
    /// When a restored VM's clocks cannot be set; it then stays paused.
    pub fn resume(&mut self) -> Result<(), VmError> {
        if !self.paused {
            self.end_precopy();
            return Ok(());
        }
        let first = self.not_yet_run.is_some();
        self.set_clocks()?;
        for vcpu in &self.shell.vcpus {
            // Tells the guest's watchdogs that it was stopped; fails where the guest has no kvmclock, which is fine.
            let _ = vcpu.fd().kvmclock_ctrl();
        }
        self.paused = false;
        for vcpu in &self.shell.vcpus {
            vcpu.resume();
        }
        // After the vCPUs, which would wait for a CPU behind it; what they ask of devices meanwhile waits in eventfds.
        self.shell.devices.resume();
        if first {
            self.shell.timeline.done("running");
        }
        self.end_precopy();
        Ok(())
    }

    /// Gives a restored VM that has not run yet its time and tells it its new generation.
    fn set_clocks(&mut self) -> Result<(), VmError> {
        let Some(restored) = self.not_yet_run.take() else { return Ok(()) };
        jail::normal_priority();
        let fds: Vec<_> = self.shell.vcpus.iter().map(Vcpu::fd).collect();
        let fds: Vec<&VcpuFd> = fds.iter().map(|fd| &**fd).collect();
        let result = clocks::start(&self.shell.vm, &restored.clock, &fds, &restored.vcpus)
            .map_err(VmError::Clocks)
            .and_then(|()| self.shell.platform.announce_generation().map_err(VmError::Generation));
        if result.is_err() {
            self.not_yet_run = Some(restored);
        }
        result
    }

    /// Writes the whole machine to `fds`, in the order of [`Command::Save`](crate::control::Command::Save).
    ///
    /// # Errors
    /// When it runs, descriptors are missing, or something cannot be read or written. The VM is then as it was.
    pub fn save(&mut self, fds: Vec<OwnedFd>) -> Result<(), SaveError> {
        if !self.paused {
            return Err(SaveError::Running);
        }
        let saved = self.save_stopped(fds);
        self.end_precopy();
        let (late, _) = saved?;
        late.write();
        Ok(())
    }

    /// Puts other frozen layers in the place of a disk's lower ones, with `fds` as
    /// [`Command::Rebase`](crate::control::Command::Rebase) says.
    ///
    /// # Errors
    /// They are not such layers; the disk is as it was.
    pub fn rebase(&self, disk: u8, fds: Vec<OwnedFd>) -> Result<(), SaveError> {
        let got = fds.len();
        let mut fds = fds.into_iter();
        let top = fds.next().ok_or(SaveError::Pairs(got))?;
        let mut layers = Vec::new();
        while let Some(data) = fds.next() {
            let map = fds.next().ok_or(SaveError::Pairs(got))?;
            layers.push(LayerSpec { data, map });
        }
        self.shell.devices.rebase(disk, &top, layers).map_err(SaveError::Rebase)
    }

    /// Joins its network device to the tap that comes along, or to nothing ([`Command::Connect`](crate::control::Command::Connect)).
    ///
    /// # Errors
    /// It has none, or more than one descriptor came.
    pub fn connect(&self, link: &LinkConfig, fds: Vec<OwnedFd>) -> Result<(), ConnectError> {
        let got = fds.len();
        let mut fds = fds.into_iter();
        match (fds.next(), got) {
            (tap, 0 | 1) => Ok(self.shell.devices.connect(link, tap)?),
            _ => Err(ConnectError::Fds(got)),
        }
    }

    /// Writes which pages were touched since the restore; of a VM that was not started to be recorded, which were written.
    ///
    /// # Errors
    /// When there is not one descriptor, an empty file, or it cannot be written.
    pub fn write_working_set(&self, fds: Vec<OwnedFd>) -> Result<(), SaveError> {
        let got = fds.len();
        let Ok([file]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(SaveError::Fds { expected: 1, writable: 0, got });
        };
        let Shell { memory, shape, recorder, pagemap, .. } = &self.shell;
        let bytes = shape.memory_bytes;
        let record = match (recorder, &self.parent, pagemap) {
            (Some(recorder), Some(parent), _) => recorder.record(memory, bytes, parent),
            (None, Some(_), Some(pagemap)) => {
                Ok(Record { runs: memory::written(memory, bytes, pagemap), order: Vec::new() })
            }
            _ => return Err(SaveError::NotRecorded),
        };
        let record = record.map_err(SaveError::WorkingSet)?;
        File::from(file).write_all(&working_set::encode(&record)).map_err(SaveError::WorkingSet)
    }
}
