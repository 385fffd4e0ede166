//! One VM: made for a boot or from a saved state ([`Built`]), then run ([`Vm`]).
//!
//! ```text
//! Built::boot ────┐
//!                 ├──▶ Built ──start──▶ Vm: Paused ⇄ Running        Save: only while Paused, stays Paused
//! Built::restore ─┘
//! ```
//!
//! A restored VM's clocks are set when it first goes on, not when it is built: a clone that waits in a pool loses no time
//! and wakes to no backlog of timers.

use crate::arch::{acpi, boot, cpuid, layout, regs};
use crate::config::{BootConfig, GUEST_CID, MAX_VCPUS, RestoreConfig};
use crate::control::Status;
use crate::disk::DiskSpec;
use crate::memory::{self, working_set};
use crate::platform::{Console, Platform, PlatformError};
use crate::seccomp::Filters;
use crate::state::{self, VmState};
use crate::timeline::Timeline;
use crate::vcpu::clocks;
use crate::vcpu::state::{self as vcpu_state, HostLimits, VcpuState};
use crate::vcpu::{ParkError, Vcpu};
use crate::virtio::{DeviceError, DeviceSet, DeviceSpecs, VsockSpec};
use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_PIT_SPEAKER_DUMMY, kvm_clock_data,
    kvm_irqchip, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Why a VM could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A configuration that no VM may have.
    #[error("configuration: {what}: expected {expected}, got {got}")]
    Config {
        /// The field.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        got: u64,
    },
    /// A KVM ioctl failed.
    #[error("{0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// Guest RAM.
    #[error(transparent)]
    Memory(#[from] memory::MemoryError),
    /// Kernel, initramfs, command line.
    #[error(transparent)]
    Load(#[from] boot::LoadError),
    /// ACPI tables.
    #[error(transparent)]
    Acpi(#[from] acpi::AcpiError),
    /// First registers.
    #[error(transparent)]
    Regs(#[from] regs::RegsError),
    /// Too many CPUID entries.
    #[error("CPUID: more entries than KVM takes")]
    Cpuid,
    /// The generation id.
    #[error("VM generation id")]
    Generation(#[source] vm_memory::GuestMemoryError),
    /// Randomness for it.
    #[error("VM generation id: getrandom")]
    Random(#[source] io::Error),
    /// Serial port, interrupts.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// Virtio devices.
    #[error("devices")]
    Devices(#[from] DeviceError),
    /// The record of pages to lay ready.
    #[error(transparent)]
    WorkingSet(#[from] memory::working_set::WorkingSetError),
    /// The state file could not be read.
    #[error("state file")]
    StateRead(#[source] io::Error),
    /// The state file is too long.
    #[error("state file: {got} bytes, at most {max}")]
    StateLength {
        /// Its length.
        got: u64,
        /// The most.
        max: u64,
    },
    /// The state file is not a state.
    #[error(transparent)]
    Decode(#[from] state::DecodeError),
    /// A vCPU's state does not go into this host's KVM.
    #[error("vCPU {id}")]
    Vcpu {
        /// Which.
        id: usize,
        /// Why.
        #[source]
        source: vcpu_state::StateError,
    },
    /// A thread could not be made.
    #[error("starting a thread")]
    Thread(#[source] io::Error),
}

/// Why a running VM could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A vCPU did not stop.
    #[error(transparent)]
    Park(#[from] ParkError),
    /// Clocks could not be set.
    #[error("setting the clocks of a restored VM")]
    Clocks(#[source] vcpu_state::StateError),
    /// The guest could not be told its new generation.
    #[error("raising the VM generation id's interrupt")]
    Generation(#[source] io::Error),
}

/// Why a VM could not be saved. It is as it was: paused, on its old writable layers.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// It runs.
    #[error("save: the VM runs; pause it first")]
    Running,
    /// Not the descriptors that Save takes.
    #[error(
        "save: expected {expected} descriptors (state, memory, two for each of {writable} writable disks), got {got}"
    )]
    Fds {
        /// How many there have to be.
        expected: usize,
        /// Writable disks.
        writable: usize,
        /// How many came.
        got: usize,
    },
    /// A KVM ioctl failed.
    #[error("save: {0}")]
    Kvm(&'static str, #[source] kvm_ioctls::Error),
    /// A vCPU's state could not be read.
    #[error("save: vCPU {id}")]
    Vcpu {
        /// Which.
        id: u8,
        /// Why.
        #[source]
        source: vcpu_state::StateError,
    },
    /// Clocks of a VM that has not run yet.
    #[error("save")]
    Clocks(#[source] VmError),
    /// The state could not be encoded.
    #[error("save: encoding the state")]
    Encode(#[source] postcard::Error),
    /// The state file could not be written.
    #[error("save: state file")]
    StateWrite(#[source] io::Error),
    /// The state file holds something already.
    #[error("save: state file: expected an empty file, got {0} bytes")]
    StateNotEmpty(u64),
    /// Memory could not be written.
    #[error("save")]
    Memory(#[from] memory::DumpError),
    /// The record of touched pages could not be written.
    #[error("working set file")]
    WorkingSet(#[source] io::Error),
    /// The disks could not be frozen.
    #[error("save: disks")]
    Disks(#[source] DeviceError),
}

/// What both ways to a VM share.
pub struct Host {
    /// `/dev/kvm`.
    pub kvm: Kvm,
    /// The console.
    pub console: Console,
    /// The disks, in order.
    pub disks: Vec<DiskSpec>,
    /// The vsock device's outer end.
    pub vsock_listener: OwnedFd,
    /// Where guest-initiated connections go.
    pub vsock_path: std::path::PathBuf,
    /// `/proc/self/pagemap`, if it could be opened.
    pub pagemap: Option<File>,
    /// When what was done.
    pub timeline: Timeline,
}

/// A VM whose vCPUs have no threads yet.
pub struct Built {
    vm: VmFd,
    memory: GuestMemoryMmap,
    watch: Option<OwnedFd>,
    memory_bytes: u64,
    vcpus: Vec<VcpuFd>,
    platform: Arc<Platform>,
    devices: Arc<DeviceSet>,
    limits: HostLimits,
    pagemap: Option<File>,
    writable_disks: usize,
    not_yet_run: Option<Restored>,
    paused: bool,
    timeline: Timeline,
}

/// What a restored VM still has to be given when it first goes on.
struct Restored {
    vcpus: Vec<VcpuState>,
    clock: kvm_clock_data,
}

fn on(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> BuildError {
    move |error| BuildError::Kvm(what, error)
}

/// A KVM VM with interrupt controllers, timer and RAM.
fn create_vm(kvm: &Kvm, memory: &GuestMemoryMmap) -> Result<VmFd, BuildError> {
    let vm = kvm.create_vm().map_err(on("KVM_CREATE_VM"))?;
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP).map_err(on("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.set_tss_address(layout::KVM_TSS).map_err(on("KVM_SET_TSS_ADDR"))?;
    vm.create_irq_chip().map_err(on("KVM_CREATE_IRQCHIP"))?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(pit).map_err(on("KVM_CREATE_PIT2"))?;
    for (slot, region) in (0..).zip(memory.iter()) {
        let Ok(host) = region.get_host_address(vm_memory::MemoryRegionAddress(0)) else { continue };
        let area = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: host.addr() as u64,
        };
        // SAFETY: the region is mapped for as long as `Built` and `Vm` hold the memory, which is until the process
        // ends; slots do not overlap because the regions of a GuestMemoryMmap do not.
        unsafe { vm.set_user_memory_region(area) }.map_err(on("KVM_SET_USER_MEMORY_REGION"))?;
    }
    Ok(vm)
}

/// Copies the pages that the guest will write, beside the making of its VM; gives the record back.
fn populate(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    pages: Vec<working_set::Run>,
) -> Result<std::thread::JoinHandle<Vec<working_set::Run>>, BuildError> {
    let memory = memory.clone();
    let work = move || {
        working_set::populate(&memory, memory_bytes, &pages);
        pages
    };
    std::thread::Builder::new().name("populate".to_owned()).spawn(work).map_err(BuildError::Thread)
}

fn writable(disks: &[DiskSpec]) -> usize {
    disks.iter().filter(|disk| disk.writable.is_some()).count()
}

fn irqchip(id: u32) -> kvm_irqchip {
    kvm_irqchip { chip_id: id, ..Default::default() }
}

const IRQCHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

impl Built {
    /// A VM that starts a kernel.
    ///
    /// # Errors
    /// When the configuration is impossible or the host refuses.
    pub fn boot(
        mut host: Host,
        config: BootConfig,
        kernel: File,
        initrd: Option<File>,
    ) -> Result<Self, BuildError> {
        if !(1..=MAX_VCPUS).contains(&config.vcpus) {
            let expected = format!("1 to {MAX_VCPUS}");
            return Err(BuildError::Config { what: "vcpus", expected, got: u64::from(config.vcpus) });
        }
        let writable_disks = writable(&host.disks);
        let memory = memory::anonymous(config.memory_bytes)?;
        let vm = create_vm(&host.kvm, &memory)?;
        host.timeline.done("kvm");

        let entry = boot::load(&memory, config.memory_bytes, kernel, initrd, &config.cmdline)?;
        host.timeline.done("kernel");

        let vsock = VsockSpec { listener: host.vsock_listener, path: host.vsock_path, guest_cid: GUEST_CID };
        let devices = DeviceSet::new(memory.clone(), DeviceSpecs { disks: host.disks, vsock }, &vm)?;
        let windows: Vec<_> = devices.slots().iter().map(|s| (s.base, s.size, s.gsi)).collect();
        acpi::write(&memory, config.vcpus, &windows)?;
        let mut generation = [0; 16];
        rustix::rand::getrandom(&mut generation, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| BuildError::Random(error.into()))?;
        memory.write_slice(&generation, layout::GENERATION).map_err(BuildError::Generation)?;
        let platform = Arc::new(Platform::new(&vm, host.console, None, Arc::clone(&devices))?);
        host.timeline.done("devices");

        let template =
            cpuid::Template::new(&host.kvm, config.vcpus).map_err(on("KVM_GET_SUPPORTED_CPUID"))?;
        regs::write_tables(&memory)?;
        let mut vcpus = Vec::new();
        for id in 0..config.vcpus {
            let vcpu = vm.create_vcpu(u64::from(id)).map_err(on("KVM_CREATE_VCPU"))?;
            let entries = cpuid::for_kvm(&template.of(id)).ok_or(BuildError::Cpuid)?;
            vcpu.set_cpuid2(&entries).map_err(on("KVM_SET_CPUID2"))?;
            regs::prepare_any(&vcpu, template.xcr0())?;
            if id == 0 {
                regs::prepare_first(&vcpu, entry)?;
            }
            vcpus.push(vcpu);
        }
        let limits = HostLimits::new(&host.kvm, &vm).map_err(|source| BuildError::Vcpu { id: 0, source })?;
        host.timeline.done("vcpus");
        Ok(Self {
            vm,
            memory,
            watch: None,
            memory_bytes: config.memory_bytes,
            vcpus,
            platform,
            devices,
            limits,
            pagemap: host.pagemap,
            writable_disks,
            not_yet_run: None,
            paused: false,
            timeline: host.timeline,
        })
    }

    /// A VM from a saved state.
    ///
    /// # Errors
    /// When the state is damaged, does not fit the files, or the host refuses it.
    pub fn restore(
        mut host: Host,
        config: RestoreConfig,
        state: File,
        memory_file: File,
        working_set: Option<&File>,
    ) -> Result<Self, BuildError> {
        let writable_disks = writable(&host.disks);
        let state = read_state(state)?;
        host.timeline.done("state");
        let memory = memory::from_file(Arc::new(memory_file), state.memory_bytes, &state.holes)?;
        // Where the kernel cannot watch, the record is coarser.
        let watch = if config.watch { working_set::watch(&memory).ok() } else { None };
        let pages = working_set.map(|file| working_set::read(file, state.memory_bytes)).transpose()?;
        let populating = pages.map(|pages| populate(&memory, state.memory_bytes, pages)).transpose()?;
        let vm = create_vm(&host.kvm, &memory)?;
        host.timeline.done("kvm");

        let vsock = VsockSpec { listener: host.vsock_listener, path: host.vsock_path, guest_cid: GUEST_CID };
        let devices = DeviceSet::new(memory.clone(), DeviceSpecs { disks: host.disks, vsock }, &vm)?;
        devices.load(&state.devices)?;
        let platform = Arc::new(Platform::new(&vm, host.console, Some(&state.serial), Arc::clone(&devices))?);
        host.timeline.done("devices");

        let xsave_words = vcpu_state::host_xsave_words(&vm);
        let mut vcpus = Vec::new();
        for (id, saved) in state.vcpus.iter().enumerate() {
            let vcpu = vm.create_vcpu(id as u64).map_err(on("KVM_CREATE_VCPU"))?;
            vcpu_state::load(&vcpu, saved, xsave_words).map_err(|source| BuildError::Vcpu { id, source })?;
            vcpus.push(vcpu);
        }
        // After the local APICs: loading the I/O APIC delivers what it has pending to them.
        for chip in &state.irqchips {
            vm.set_irqchip(chip).map_err(on("KVM_SET_IRQCHIP"))?;
        }
        vm.set_pit2(&state.pit).map_err(on("KVM_SET_PIT2"))?;
        memory.write_slice(&config.generation, layout::GENERATION).map_err(BuildError::Generation)?;
        let limits = HostLimits::new(&host.kvm, &vm).map_err(|source| BuildError::Vcpu { id: 0, source })?;
        host.timeline.done("vcpus");
        if let (Some(populating), Some(vcpu)) = (populating, vcpus.first()) {
            // A thread that panicked ended the process.
            let pages = populating.join().unwrap_or_default();
            working_set::map(state.memory_bytes, &pages, vcpu);
            host.timeline.done("working set");
        }
        Ok(Self {
            vm,
            memory,
            watch,
            memory_bytes: state.memory_bytes,
            vcpus,
            platform,
            devices,
            limits,
            pagemap: host.pagemap,
            writable_disks,
            not_yet_run: Some(Restored { vcpus: state.vcpus, clock: state.clock }),
            paused: config.paused,
            timeline: host.timeline,
        })
    }

    /// Starts device and vCPU threads; the guest runs, unless it was to stay paused.
    ///
    /// # Errors
    /// When a thread cannot be made or a restored VM's clocks cannot be set.
    pub fn start(self, filters: &Filters) -> Result<Vm, StartError> {
        let mut vcpus = Vec::new();
        crate::vcpu::install_kick_handler();
        for (id, fd) in (0..).zip(self.vcpus) {
            let platform = Arc::clone(&self.platform);
            vcpus.push(Vcpu::start(id, fd, platform, filters.vcpu.clone()).map_err(StartError::Thread)?);
        }
        // Until the VM goes on: a device must not raise an interrupt before the clocks are set.
        self.devices.pause();
        let (devices, filter) = (Arc::clone(&self.devices), filters.devices.clone());
        std::thread::Builder::new()
            .name("devices".to_owned())
            .spawn(move || {
                crate::seccomp::apply(filter.as_deref());
                match devices.run_loop() {
                    Ok(()) => {}
                    Err(error) => crate::exit::fail(&error),
                }
            })
            .map_err(StartError::Thread)?;
        let mut vm = Vm {
            vm: self.vm,
            memory: self.memory,
            watch: self.watch,
            memory_bytes: self.memory_bytes,
            vcpus,
            platform: self.platform,
            devices: self.devices,
            limits: self.limits,
            pagemap: self.pagemap,
            writable_disks: self.writable_disks,
            not_yet_run: self.not_yet_run,
            paused: true,
            timeline: self.timeline,
        };
        if !self.paused {
            vm.resume()?;
        }
        vm.timeline.done("running");
        Ok(vm)
    }
}

/// Why a built VM could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A thread could not be made.
    #[error("starting a thread")]
    Thread(#[source] io::Error),
    /// It could not go on from where it was saved.
    #[error(transparent)]
    Run(#[from] VmError),
}

fn read_state(mut file: File) -> Result<VmState, BuildError> {
    let got = file.metadata().map_err(BuildError::StateRead)?.len();
    let max = state::MAX_BYTES + dayfly_units::sealed::HEADER_BYTES as u64;
    if got > max {
        return Err(BuildError::StateLength { got, max });
    }
    let mut bytes = Vec::with_capacity(usize::try_from(got).unwrap_or(0));
    io::Seek::rewind(&mut file).map_err(BuildError::StateRead)?;
    file.take(max + 1).read_to_end(&mut bytes).map_err(BuildError::StateRead)?;
    Ok(state::decode(&bytes)?)
}

/// A VM with its threads.
pub struct Vm {
    vm: VmFd,
    memory: GuestMemoryMmap,
    /// Held open while touched pages are watched.
    watch: Option<OwnedFd>,
    memory_bytes: u64,
    vcpus: Vec<Vcpu>,
    platform: Arc<Platform>,
    devices: Arc<DeviceSet>,
    limits: HostLimits,
    pagemap: Option<File>,
    writable_disks: usize,
    not_yet_run: Option<Restored>,
    paused: bool,
    timeline: Timeline,
}

impl Vm {
    /// What it does now.
    #[must_use]
    pub fn status(&self) -> Status {
        Status {
            paused: self.paused,
            vcpus: u8::try_from(self.vcpus.len()).unwrap_or(u8::MAX),
            memory_bytes: self.memory_bytes,
            phases: self.timeline.phases(),
        }
    }

    /// Note that a phase of the start is done.
    pub fn phase_done(&mut self, phase: &str) {
        self.timeline.done(phase);
    }

    /// Stops every vCPU between two instructions, then every device between two requests.
    ///
    /// # Errors
    /// When a vCPU does not stop; all then run on.
    pub fn pause(&mut self) -> Result<(), VmError> {
        if self.paused {
            return Ok(());
        }
        for vcpu in &self.vcpus {
            vcpu.ask_to_park();
        }
        if let Some(error) = self.vcpus.iter().find_map(|vcpu| vcpu.wait_parked().err()) {
            for vcpu in &self.vcpus {
                vcpu.resume();
            }
            return Err(error.into());
        }
        self.devices.pause();
        self.paused = true;
        Ok(())
    }

    /// Goes on.
    ///
    /// # Errors
    /// When a restored VM's clocks cannot be set; it then stays paused.
    pub fn resume(&mut self) -> Result<(), VmError> {
        if !self.paused {
            return Ok(());
        }
        self.set_clocks()?;
        self.devices.resume();
        for vcpu in &self.vcpus {
            // Tells the guest's watchdogs that it was stopped; fails where the guest has no kvmclock, which is fine.
            let _ = vcpu.fd().kvmclock_ctrl();
        }
        self.paused = false;
        for vcpu in &self.vcpus {
            vcpu.resume();
        }
        Ok(())
    }

    /// Gives a restored VM that has not run yet its time and tells it its new generation.
    fn set_clocks(&mut self) -> Result<(), VmError> {
        let Some(restored) = self.not_yet_run.take() else { return Ok(()) };
        let fds: Vec<_> = self.vcpus.iter().map(Vcpu::fd).collect();
        let fds: Vec<&VcpuFd> = fds.iter().map(|fd| &**fd).collect();
        let result = clocks::start(&self.vm, &restored.clock, &fds, &restored.vcpus)
            .map_err(VmError::Clocks)
            .and_then(|()| self.platform.announce_generation().map_err(VmError::Generation));
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
        let (expected, got) = (2 + 2 * self.writable_disks, fds.len());
        if got != expected {
            return Err(SaveError::Fds { expected, writable: self.writable_disks, got });
        }
        let mut fds = fds.into_iter();
        let (Some(state_file), Some(memory_file)) = (fds.next(), fds.next()) else {
            return Err(SaveError::Fds { expected, writable: self.writable_disks, got });
        };
        self.set_clocks().map_err(SaveError::Clocks)?;
        let memory_file = File::from(memory_file);
        memory::dump(&self.memory, self.memory_bytes, self.pagemap.as_ref(), &memory_file)?;
        let holes = memory::large_holes(&memory_file, self.memory_bytes)?;
        write_state(File::from(state_file), &self.read_state(holes)?)?;

        // Last, because it cannot be undone.
        let mut layers = Vec::new();
        while let (Some(map), Some(writable)) = (fds.next(), fds.next()) {
            layers.push((map, writable));
        }
        self.devices.freeze_layers(layers).map_err(SaveError::Disks)
    }

    /// Writes which pages were touched since the restore.
    ///
    /// # Errors
    /// When there is not one descriptor, an empty file, or it cannot be written.
    pub fn write_working_set(&self, fds: Vec<OwnedFd>) -> Result<(), SaveError> {
        let got = fds.len();
        let Ok([file]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(SaveError::Fds { expected: 1, writable: 0, got });
        };
        let mut runs = working_set::record(&self.memory, self.memory_bytes, self.pagemap.as_ref());
        if self.watch.is_none() {
            // Pages that were only read are then known with neighbours that nobody touched.
            runs.retain(|run| run.written);
        }
        File::from(file).write_all(&working_set::encode(&runs)).map_err(SaveError::WorkingSet)
    }

    fn read_state(&self, holes: Vec<(u64, u64)>) -> Result<VmState, SaveError> {
        let on = |what: &'static str| move |error| SaveError::Kvm(what, error);
        let mut vcpus = Vec::new();
        for vcpu in &self.vcpus {
            let saved = vcpu_state::save(&vcpu.fd(), &self.limits)
                .map_err(|source| SaveError::Vcpu { id: vcpu.id(), source })?;
            vcpus.push(saved);
        }
        let mut irqchips = IRQCHIPS.map(irqchip);
        for chip in &mut irqchips {
            self.vm.get_irqchip(chip).map_err(on("KVM_GET_IRQCHIP"))?;
        }
        Ok(VmState {
            memory_bytes: self.memory_bytes,
            holes,
            vcpus,
            irqchips,
            pit: self.vm.get_pit2().map_err(on("KVM_GET_PIT2"))?,
            clock: self.vm.get_clock().map_err(on("KVM_GET_CLOCK"))?,
            serial: self.platform.save(),
            devices: self.devices.save(),
        })
    }
}

fn write_state(mut file: File, state: &VmState) -> Result<(), SaveError> {
    let bytes = state::encode(state).map_err(SaveError::Encode)?;
    let got = file.metadata().map_err(SaveError::StateWrite)?.len();
    if got != 0 {
        return Err(SaveError::StateNotEmpty(got));
    }
    file.write_all(&bytes).map_err(SaveError::StateWrite)
}
