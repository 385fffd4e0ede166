//! A VM with a guest: pausing and resuming it, and what can be done at any time.

use super::error::{ConnectError, SaveError, VmError};
use super::ram::Ram;
use super::warm::WarmVmm;
use crate::config::LinkConfig;
use crate::control::Status;
use crate::disk::LayerSpec;
use crate::jail;
use crate::memory;
use crate::memory::pages::Pages;
use crate::memory::working_set::{self, Record};
use crate::vcpu::Vcpu;
use crate::vcpu::clocks::{self, VcpuTime};
use crate::virtio::{BalloonStatus, DeviceError};
use kvm_bindings::kvm_clock_data;
use kvm_ioctls::VcpuFd;
use std::fs::File;
use std::io::Write;
use std::os::fd::{BorrowedFd, OwnedFd};

/// RAM that has been copied, except for pages written since.
#[derive(Debug)]
pub(super) struct Copying {
    pub(super) target: File,
    /// The target's large holes, without the pages of `own` and the pages written since.
    pub(super) holes: Vec<(u64, u64)>,
    /// Pages that were reported as written and are not copied yet.
    pub(super) left: Pages,
    /// The pages that the target has; `None` if it has all.
    pub(super) own: Option<Pages>,
}

/// The state that a restored VM gets when it first runs.
pub(super) struct Restored {
    /// The time of each vCPU, in the order of their APIC ids.
    pub(super) times: Vec<VcpuTime>,
    pub(super) clock: kvm_clock_data,
}

/// A VM with a guest.
pub struct Vm {
    pub(super) warm: WarmVmm,
    pub(super) ram: Ram,
    pub(super) writable_disks: usize,
    pub(super) not_yet_run: Option<Restored>,
    /// Whether the daemon has stopped the VM.
    pub(super) paused: bool,
    /// Whether the VM has stopped itself because a disk has no space on the host ([`Self::stall`]).
    pub(super) stalled: bool,
    /// A copy of RAM in progress ([`Self::precopy`]).
    pub(super) copying: Option<Copying>,
}

impl Vm {
    /// The state of the VM.
    #[must_use]
    pub fn status(&mut self) -> Status {
        let mut phases = self.warm.timeline.phases();
        // The guest causes this phase, so it may lie at any time after `running`.
        let first = self.warm.platform.first_port_write_us();
        phases.extend(first.map(|us| ("first port write".to_owned(), us)));
        Status {
            paused: self.paused,
            no_space: self.warm.devices.no_space(),
            whole: self.ram.is_whole(),
            phases,
            layers: self.warm.devices.layers(),
            traffic: self.warm.devices.traffic(),
            disk_reads: self.warm.devices.disk_reads(),
            ..Status::of(self.warm.shape)
        }
    }

    /// Whether its guest has run since this VMM was started.
    #[must_use]
    pub const fn has_run(&self) -> bool {
        self.not_yet_run.is_none()
    }

    /// A descriptor that is readable when a disk has no space on the host, until [`Self::stall`].
    #[must_use]
    pub fn stall_event(&self) -> BorrowedFd<'_> {
        self.warm.devices.stall_event()
    }

    /// Stops every vCPU between two instructions, then every device between two requests.
    ///
    /// # Errors
    /// When a vCPU does not stop; all vCPUs then run on.
    pub fn pause(&mut self) -> Result<(), VmError> {
        if !self.paused {
            self.stop()?;
            self.paused = true;
        }
        Ok(())
    }

    /// Stops a VM of which a disk waits for space on the host. [`Self::resume`] has the disk try
    /// again. The guest does not notice the wait, and no request of it fails.
    ///
    /// # Errors
    /// When a vCPU does not stop; all vCPUs then run on, and the disk waits nevertheless.
    pub fn stall(&mut self) -> Result<(), VmError> {
        // The event is taken from a paused VM too. Its next `resume` tries again.
        if self.warm.devices.take_stall() && !self.paused {
            self.stop()?;
            self.stalled = true;
        }
        Ok(())
    }

    /// Stops the vCPUs and the devices, unless they are stopped.
    fn stop(&self) -> Result<(), VmError> {
        if self.paused || self.stalled {
            return Ok(());
        }
        for vcpu in &self.warm.vcpus {
            vcpu.ask_to_park();
        }
        if let Some(error) = self.warm.vcpus.iter().find_map(|vcpu| vcpu.wait_parked().err()) {
            for vcpu in &self.warm.vcpus {
                vcpu.resume();
            }
            return Err(error.into());
        }
        self.warm.devices.pause();
        Ok(())
    }

    /// Starts the vCPUs, then the devices. A disk that had no space tries again.
    ///
    /// # Errors
    /// When a restored VM's clocks cannot be set; it then stays paused.
    pub fn resume(&mut self) -> Result<(), VmError> {
        self.warm.devices.retry();
        if !self.paused && !self.stalled {
            self.end_precopy();
            return Ok(());
        }
        let first = self.not_yet_run.is_some();
        self.set_clocks()?;
        for vcpu in &self.warm.vcpus {
            // Announces the pause to the guest's watchdogs. It fails for a guest without kvmclock,
            // which has none to inform.
            let _ = vcpu.fd().kvmclock_ctrl();
        }
        (self.paused, self.stalled) = (false, false);
        for vcpu in &self.warm.vcpus {
            vcpu.resume();
        }
        // Devices resume last, because the vCPUs would wait for a CPU behind the device threads.
        // Requests of the guest wait in eventfds meanwhile.
        self.warm.devices.resume();
        if first {
            self.warm.timeline.done("running");
        }
        self.end_precopy();
        Ok(())
    }

    /// Sets the clocks of a restored VM that has not run yet, and announces its new generation id.
    pub(super) fn set_clocks(&mut self) -> Result<(), VmError> {
        let Some(restored) = self.not_yet_run.take() else { return Ok(()) };
        jail::normal_priority();
        let fds: Vec<_> = self.warm.vcpus.iter().map(Vcpu::fd).collect();
        let fds: Vec<&VcpuFd> = fds.iter().map(|fd| &**fd).collect();
        let result = clocks::start(&self.warm.vm, &restored.clock, &fds, &restored.times)
            .map_err(VmError::Clocks)
            .and_then(|()| self.warm.platform.announce_generation().map_err(VmError::Generation));
        if result.is_err() {
            self.not_yet_run = Some(restored);
        }
        result
    }

    /// Replaces the lower frozen layers of a disk, with `fds` in the order of
    /// [`Command::Rebase`](crate::control::Command::Rebase).
    ///
    /// # Errors
    /// When `fds` are not such layers; the disk is then unchanged.
    pub fn rebase(&self, disk: u8, fds: Vec<OwnedFd>) -> Result<(), SaveError> {
        let got = fds.len();
        let mut fds = fds.into_iter();
        let top = fds.next().ok_or(SaveError::Pairs(got))?;
        let mut layers = Vec::new();
        while let Some(data) = fds.next() {
            let map = fds.next().ok_or(SaveError::Pairs(got))?;
            layers.push(LayerSpec { data, map });
        }
        self.warm.devices.rebase(disk, &top, layers).map_err(SaveError::Rebase)
    }

    /// Connects the VM's network device to the tap in `fds`, or disconnects it if there is none
    /// ([`Command::Connect`](crate::control::Command::Connect)).
    ///
    /// # Errors
    /// When the VM has no network device, or more than one descriptor came.
    pub fn connect(&self, link: &LinkConfig, fds: Vec<OwnedFd>) -> Result<(), ConnectError> {
        let got = fds.len();
        let mut fds = fds.into_iter();
        match (fds.next(), got) {
            (tap, 0 | 1) => Ok(self.warm.devices.connect(link, tap)?),
            _ => Err(ConnectError::Fds(got)),
        }
    }

    /// Sets the target of the balloon and returns its status
    /// ([`Command::Balloon`](crate::control::Command::Balloon)).
    ///
    /// # Errors
    /// When the VM has no balloon, or less RAM.
    pub fn balloon(&self, target_bytes: Option<u64>) -> Result<BalloonStatus, DeviceError> {
        self.warm.devices.balloon(target_bytes)
    }

    /// Writes which pages were touched since the restore. If the VMM was not started to record,
    /// writes which pages were written.
    ///
    /// # Errors
    /// When `fds` is not one descriptor, or the file cannot be written.
    pub fn write_working_set(&self, fds: Vec<OwnedFd>) -> Result<(), SaveError> {
        let got = fds.len();
        let Ok([file]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(SaveError::Fds { expected: 1, writable: 0, got });
        };
        let WarmVmm { memory, shape, recorder, pagemap, .. } = &self.warm;
        let bytes = shape.memory_bytes;
        let record = match (recorder, &self.ram, pagemap) {
            (Some(recorder), Ram::Recorded(parent), _) => recorder.record(memory, bytes, parent),
            (None, Ram::Mapped { .. }, Some(pagemap)) => {
                Ok(Record { runs: memory::written(memory, bytes, pagemap), order: Vec::new() })
            }
            _ => return Err(SaveError::NotRecorded),
        };
        let record = record.map_err(SaveError::WorkingSet)?;
        File::from(file).write_all(&working_set::encode(&record)).map_err(SaveError::WorkingSet)
    }

    /// Stops noting writes.
    pub(super) fn end_precopy(&mut self) {
        if self.copying.take().is_some() {
            // A failure costs only time: KVM goes on noting writes.
            let _ = self.warm.note_writes(false);
        }
    }
}
