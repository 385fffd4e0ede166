//! All of a VM that does not depend on what will run in it.

use super::bare::{Bare, Parts};
use super::error::BuildError;
use crate::config::{GUEST_CID, MAX_DISKS, MAX_NETS, MAX_VCPUS, Shape};
use crate::control::Status;
use crate::crew::Crew;
use crate::memory::{self, recorder::Recorder};
use crate::platform::{Console, Platform};
use crate::seccomp::Filters;
use crate::timeline::Timeline;
use crate::vcpu::{self, Vcpu};
use crate::virtio::{DeviceSet, VsockSpec};
use kvm_bindings::kvm_cpuid_entry2;
use kvm_ioctls::{Kvm, VmFd};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vm_memory::GuestMemoryMmap;

/// What the process has for its VM from the beginning.
pub struct Host {
    /// `/dev/kvm`.
    pub kvm: Kvm,
    /// Its VM, without devices.
    pub bare: Bare,
    /// The console.
    pub console: Console,
    /// The vsock device's outer end.
    pub vsock_listener: OwnedFd,
    /// Where guest-initiated connections go.
    pub vsock_path: std::path::PathBuf,
    /// `/proc/self/pagemap`, if it could be opened.
    pub pagemap: Option<File>,
    /// A userfaultfd, for a guest whose memory is given page by page.
    pub uffd: Option<OwnedFd>,
    /// Whether what the guest touches is to be noted; it then is given its memory here.
    pub record: bool,
    /// Its threads.
    pub crew: Crew,
    /// When what was done.
    pub timeline: Timeline,
}

/// A VM without a guest: interrupt controllers, empty RAM, devices without disks, vCPUs without registers, and their threads,
/// which stand.
pub struct Shell {
    pub(super) kvm: Kvm,
    pub(super) vm: VmFd,
    pub(super) shape: Shape,
    pub(super) memory: GuestMemoryMmap,
    pub(super) vcpus: Vec<Vcpu>,
    /// What KVM_GET_CPUID2 gave of each, where they were told their CPUID; else nothing.
    pub(super) cpuid: Vec<Vec<kvm_cpuid_entry2>>,
    pub(super) platform: Arc<Platform>,
    pub(super) devices: Arc<DeviceSet>,
    pub(super) pagemap: Option<File>,
    pub(super) recorder: Option<Recorder>,
    /// Stays open as long as the process lives ([`memory::lazy`]).
    pub(super) uffd: Option<OwnedFd>,
    pub(super) timeline: Timeline,
}

pub(super) fn on(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> BuildError {
    move |error| BuildError::Kvm(what, error)
}

fn check(shape: Shape) -> Result<(), BuildError> {
    if !(1..=MAX_VCPUS).contains(&shape.vcpus) {
        let expected = format!("1 to {MAX_VCPUS}");
        return Err(BuildError::Config { what: "vcpus", expected, got: u64::from(shape.vcpus) });
    }
    if usize::from(shape.disks) > MAX_DISKS {
        let expected = format!("at most {MAX_DISKS}");
        return Err(BuildError::Config { what: "disks", expected, got: u64::from(shape.disks) });
    }
    if shape.nets > MAX_NETS {
        let expected = format!("at most {MAX_NETS}");
        return Err(BuildError::Config { what: "network devices", expected, got: u64::from(shape.nets) });
    }
    Ok(memory::check_size(shape.memory_bytes)?)
}

impl Shell {
    /// Makes one, with all its threads.
    ///
    /// # Errors
    /// When no VM may have this shape, or the host refuses.
    pub fn new(host: Host, shape: Shape, filters: &Filters) -> Result<Self, BuildError> {
        check(shape)?;
        let Host {
            kvm,
            bare,
            console,
            vsock_listener,
            vsock_path,
            pagemap,
            uffd,
            record,
            crew,
            mut timeline,
        } = host;
        let Parts { vm, memory, vcpus: fds, cpuid } = bare.parts(&kvm, shape)?;
        timeline.done("kvm");

        let vsock = VsockSpec { listener: vsock_listener, path: vsock_path, guest_cid: GUEST_CID };
        let devices = DeviceSet::new(memory.clone(), shape.disks, shape.nets, vsock, &vm)?;
        let platform = Arc::new(Platform::new(&vm, console, Arc::clone(&devices))?);
        timeline.done("devices");

        // A device must not raise an interrupt before the clocks are set: until the VM goes on.
        devices.pause();
        let Crew { devices: hand, vcpus: hands } = crew;
        let served = Arc::clone(&devices);
        hand.set_to(move || match served.run_loop() {
            Ok(()) => {}
            Err(error) => crate::exit::fail(&error),
        });
        let (noted, uffd) = if record { (uffd, None) } else { (None, uffd) };
        let recorder = noted.map(|uffd| Recorder::start(uffd, filters.recorder.clone())).transpose();
        let recorder = recorder.map_err(BuildError::Thread)?;
        vcpu::install_kick_handler();
        let started = (0..).zip(fds.into_iter().zip(hands));
        let start = |(id, (fd, hand))| Vcpu::start(id, fd, Arc::clone(&platform), hand);
        let vcpus = started.map(start).collect();
        timeline.done("vcpus");
        Ok(Self {
            kvm,
            vm,
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
        })
    }

    /// What it does now: it waits.
    #[must_use]
    pub fn status(&self) -> Status {
        Status { paused: true, whole: true, shape: self.shape, phases: self.timeline.phases() }
    }
}
