//! The parts of a VM that do not depend on its guest.

use super::bare::{Bare, Parts};
use super::error::BuildError;
use crate::arch::cpuid::Supported;
use crate::config::{GUEST_CID, MAX_DISKS, MAX_NETS, MAX_VCPUS, Shape};
use crate::control::Status;
use crate::limits;
use crate::memory::{self, recorder::Recorder};
use crate::meter::Meter;
use crate::platform::{Console, Platform};
use crate::seccomp::{Filters, Stage, ThreadFilter};
use crate::timeline::Timeline;
use crate::vcpu::state::HostLimits;
use crate::vcpu::{self, Vcpu};
use crate::virtio::{DeviceError, DeviceSet, VsockSpec};
use crate::workers::{Narrowed, Worker, Workers};
use dayfly_sys::uffd::Uffd;
use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::{Kvm, VmFd};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vm_memory::GuestMemoryMmap;

/// The resources of the process for its VM.
pub struct Host {
    /// The MSRs that KVM saves ([`vcpu::state::msrs`]).
    pub msrs: Vec<u32>,
    /// The size of the process's address space before it had a VM, in bytes.
    pub base_bytes: u64,
    /// What KVM supports of this host's CPU.
    pub supported: Supported,
    /// A KVM VM without devices.
    pub bare: Bare,
    /// The files of the guest's serial console.
    pub console: Console,
    /// The listening socket of the vsock device.
    pub vsock_listener: OwnedFd,
    /// The path prefix for connections that the guest starts.
    pub vsock_path: std::path::PathBuf,
    /// The limits on the growth of disks; `None`: there are none.
    pub limits: Option<File>,
    /// `/proc/self/pagemap`, if it could be opened.
    pub pagemap: Option<File>,
    /// A userfaultfd, for a guest whose memory arrives page by page.
    pub uffd: Option<Uffd>,
    /// Whether to record the pages that the guest touches; this process then serves its memory.
    pub record: bool,
    /// The worker threads.
    pub workers: Workers,
    /// When each phase of the start ended.
    pub timeline: Timeline,
    /// What is counted for the bill.
    pub meter: Meter,
}

/// A VM without a guest: interrupt controllers, empty RAM, devices without disks, vCPUs without
/// registers, and parked threads.
pub struct WarmVmm {
    pub(super) vm: VmFd,
    /// What KVM supports of this host's CPU.
    pub(super) supported: Supported,
    pub(super) limits: HostLimits,
    pub(super) base_bytes: u64,
    /// The filter of the main thread, which is in its set-up stage.
    pub(super) filter: ThreadFilter,
    pub(super) narrowed: Narrowed,
    pub(super) shape: Shape,
    pub(super) memory: GuestMemoryMmap,
    pub(super) vcpus: Vec<Vcpu>,
    /// The CPUID of each vCPU (KVM_GET_CPUID2), if it was set ahead; else empty.
    pub(super) cpuid: Vec<Vec<kvm_cpuid_entry2>>,
    pub(super) platform: Arc<Platform>,
    pub(super) devices: Arc<DeviceSet>,
    pub(super) pagemap: Option<File>,
    pub(super) recorder: Option<Recorder>,
    /// Stays open as long as the process lives ([`memory::lazy`]).
    pub(super) uffd: Option<Uffd>,
    pub(super) timeline: Timeline,
    /// The KVM VM of a wrong guess ([`super::bare`]).
    pub(super) _unused: Option<VmFd>,
}

fn check(shape: Shape) -> Result<(), BuildError> {
    if !(1..=MAX_VCPUS).contains(&shape.vcpus) {
        let expected = format!("1 to {MAX_VCPUS}");
        return Err(BuildError::Config { what: "vcpus", expected, got: u64::from(shape.vcpus) });
    }
    if shape.max_vcpus > MAX_VCPUS {
        let expected = format!("at most {MAX_VCPUS}");
        let got = u64::from(shape.max_vcpus);
        return Err(BuildError::Config { what: "max_vcpus", expected, got });
    }
    if usize::from(shape.disks) > MAX_DISKS {
        let expected = format!("at most {MAX_DISKS}");
        return Err(BuildError::Config { what: "disks", expected, got: u64::from(shape.disks) });
    }
    if shape.nets > MAX_NETS {
        let expected = format!("at most {MAX_NETS}");
        return Err(BuildError::Config {
            what: "network devices",
            expected,
            got: u64::from(shape.nets),
        });
    }
    Ok(memory::check_size(shape.memory_bytes)?)
}

/// Has `worker` run a loop of the devices until it ends.
fn serve<T: 'static>(
    worker: Worker<T>,
    devices: &Arc<DeviceSet>,
    run: fn(&DeviceSet, T) -> Result<(), DeviceError>,
) {
    let devices = Arc::clone(devices);
    worker.set_to(move |made| match run(&devices, made) {
        Ok(()) => {}
        Err(error) => crate::exit::fail(&error),
    });
}

impl WarmVmm {
    /// Makes a warm VMM, with all its threads. It needs `kvm`, which is `/dev/kvm`, no more
    /// afterwards.
    ///
    /// # Errors
    /// When the shape is not allowed, or the host refuses a step.
    pub fn new(host: Host, kvm: &Kvm, shape: Shape, filters: &Filters) -> Result<Self, BuildError> {
        check(shape)?;
        let Host {
            msrs,
            base_bytes,
            supported,
            bare,
            console,
            vsock_listener,
            vsock_path,
            limits: growth,
            pagemap,
            uffd,
            record,
            workers,
            mut timeline,
            meter,
        } = host;
        let Parts { vm, memory, vcpus: fds, cpuid, unused } = bare.parts(kvm, shape)?;
        let limits = HostLimits::new(msrs, &vm);
        timeline.done("kvm");

        let vsock = VsockSpec { listener: vsock_listener, path: vsock_path, guest_cid: GUEST_CID };
        let devices = DeviceSet::new(memory.clone(), shape.disks, shape.nets, vsock, meter, &vm)?;
        if let Some(growth) = growth {
            devices.limit_growth(growth);
        }
        let platform = Arc::new(Platform::new(&vm, console, Arc::clone(&devices))?);
        timeline.done("devices");

        // Devices stay paused until the VM resumes: no device may raise an interrupt before the
        // clocks are set.
        devices.pause();
        let Workers { devices: worker, disks, vcpus: vcpu_workers, narrowed } = workers;
        assert_eq!(disks.is_some(), shape.disks > 0, "`Workers::prepare` makes the threads");
        serve(worker, &devices, |devices, ()| devices.run_loop());
        if let Some(worker) = disks {
            serve(worker, &devices, DeviceSet::run_disks);
        }
        let (noted, uffd) = if record { (uffd, None) } else { (None, uffd) };
        let recorder =
            noted.map(|uffd| Recorder::start(uffd, Some(filters.recorder.clone()))).transpose();
        let recorder = recorder.map_err(BuildError::Thread)?;
        vcpu::install_kick_handler();
        let started = (0..).zip(fds.into_iter().zip(vcpu_workers));
        let start = |(id, (fd, worker))| Vcpu::start(id, fd, Arc::clone(&platform), worker);
        let vcpus = started.map(start).collect();
        timeline.done("vcpus");
        Ok(Self {
            vm,
            supported,
            limits,
            base_bytes,
            filter: filters.main.clone(),
            narrowed,
            shape,
            memory,
            vcpus,
            cpuid,
            platform,
            devices,
            pagemap,
            recorder,
            uffd,
            timeline,
            _unused: unused,
        })
    }

    /// Ends the set-up, before the guest runs: waits until the other threads have ended theirs,
    /// takes away what only set-up needs, and limits the sizes of files and of the address space to
    /// those of a VM with these disks.
    pub(super) fn end_set_up(&self, disks_bytes: &[u64]) {
        self.narrowed.wait();
        limits::of_vm(self.base_bytes, self.shape.memory_bytes, disks_bytes);
        self.filter.enter(Stage::Guest);
    }

    /// The state of a warm VMM: paused, with all of its memory.
    #[must_use]
    pub fn status(&self) -> Status {
        Status { paused: true, phases: self.timeline.phases(), ..Status::of(self.shape) }
    }
}
