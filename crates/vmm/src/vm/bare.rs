//! A KVM VM without devices, made ahead for the shape that the next VM will probably have.
//!
//! The guess is the last VM's shape, because VMs come in series. If the guess is wrong, another KVM
//! VM is made at request time. The kernel keeps the guessed one until the process ends, because its
//! removal would wait for grace periods (17 ms, Linux 6.18). It has no guest RAM, and no descriptor
//! is left by which a vCPU of it could run.
//!
//! Memory slots are set before the interrupt controllers. KVM_SET_USER_MEMORY_REGION waits for the
//! grace periods in progress, and the controllers' places on the I/O bus begin some (1 ms against
//! 9, Linux 6.18).
//!
//! CPUID is set on a guess, too. KVM_SET_CPUID2 executes CPUID, which exits to the hypervisor if
//! the host is a guest itself: 67 us of a VM's creation.

use super::error::{BuildError, on};
use crate::arch::{cpuid, layout};
use crate::config::{MAX_VCPUS, Shape};
use crate::memory::{self, pre_fault};
use crate::vcpu::{self, state::MAX_CPUID};
use kvm_bindings::{
    KVM_PIT_SPEAKER_DUMMY, kvm_cpuid_entry2, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// The largest RAM of a guessed VM: KVM may keep eight bytes for each page of it.
const MOST_GUESSED_BYTES: u64 = 4 << 30;

/// A KVM VM without devices.
pub struct Bare {
    vm: VmFd,
    filled: Option<Filled>,
}

/// The parts of a KVM VM of one shape.
struct Filled {
    memory_bytes: u64,
    memory: GuestMemoryMmap,
    vcpus: Vec<VcpuFd>,
    /// The CPUID of each vCPU (KVM_GET_CPUID2), if it was set ahead; else empty.
    cpuid: Vec<Vec<kvm_cpuid_entry2>>,
}

/// The parts of a VM, for [`WarmVmm`](super::WarmVmm), which adds devices.
pub(super) struct Parts {
    pub(super) vm: VmFd,
    pub(super) memory: GuestMemoryMmap,
    pub(super) vcpus: Vec<VcpuFd>,
    /// The CPUID of each vCPU (KVM_GET_CPUID2), if it was set ahead; else empty.
    pub(super) cpuid: Vec<Vec<kvm_cpuid_entry2>>,
    /// The KVM VM of a wrong guess, to be kept until the process ends.
    pub(super) unused: Option<VmFd>,
}

impl Bare {
    /// Makes an empty KVM VM.
    ///
    /// # Errors
    /// The failed KVM ioctl.
    pub fn new(kvm: &Kvm) -> Result<Self, BuildError> {
        let vm = kvm.create_vm().map_err(on("KVM_CREATE_VM"))?;
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(on("KVM_SET_IDENTITY_MAP_ADDR"))?;
        vm.set_tss_address(layout::KVM_TSS).map_err(on("KVM_SET_TSS_ADDR"))?;
        Ok(Self { vm, filled: None })
    }

    /// Makes a KVM VM of the expected `shape`. Its vCPUs have the CPUID `supported`, as those of a
    /// guest that was booted on this host.
    ///
    /// # Errors
    /// The failed KVM ioctl.
    pub fn likely(
        kvm: &Kvm,
        shape: Shape,
        supported: &cpuid::Supported,
    ) -> Result<Self, BuildError> {
        let mut bare = Self::new(kvm)?;
        if shape.memory_bytes <= MOST_GUESSED_BYTES && (1..=MAX_VCPUS).contains(&shape.vcpus) {
            let mut filled = bare.fill(shape)?;
            let cpuid = cpuid::Template::new(supported, shape.known_vcpus(), shape.cpu_model);
            for (id, vcpu) in (0..).zip(&mut filled.vcpus) {
                let entries = cpuid::for_kvm(&cpuid.of(id)).ok_or(BuildError::Cpuid)?;
                vcpu.set_cpuid2(&entries).map_err(on("KVM_SET_CPUID2"))?;
                // KVM may have changed the entries.
                let has = vcpu.get_cpuid2(MAX_CPUID).map_err(on("KVM_GET_CPUID2"))?;
                filled.cpuid.push(has.as_slice().to_vec());
                vcpu::first_run(vcpu);
                pre_fault::roots(vcpu);
            }
            bare.filled = Some(filled);
        }
        Ok(bare)
    }

    /// The parts of a VM of this shape; a VM of another shape is made anew.
    ///
    /// # Errors
    /// When the amount of memory is not allowed, or a KVM ioctl fails.
    pub(super) fn parts(self, kvm: &Kvm, shape: Shape) -> Result<Parts, BuildError> {
        let fits = |f: &Filled| {
            f.memory_bytes == shape.memory_bytes && f.vcpus.len() == usize::from(shape.vcpus)
        };
        let (bare, unused) = match &self.filled {
            Some(filled) if !fits(filled) => (Self::new(kvm)?, Some(self.vm)),
            _ => (self, None),
        };
        let filled = match bare.filled {
            Some(filled) => filled,
            None => bare.fill(shape)?,
        };
        let Filled { memory, vcpus, cpuid, .. } = filled;
        Ok(Parts { vm: bare.vm, memory, vcpus, cpuid, unused })
    }

    /// Makes the memory slots, then the interrupt controllers and the timer, then the vCPUs.
    fn fill(&self, shape: Shape) -> Result<Filled, BuildError> {
        let memory = memory::anonymous(shape.memory_bytes)?;
        for (slot, region) in (0..).zip(memory.iter()) {
            let Ok(host) = region.get_host_address(vm_memory::MemoryRegionAddress(0)) else {
                continue;
            };
            let area = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().raw_value(),
                memory_size: region.len(),
                userspace_addr: host.addr() as u64,
            };
            // SAFETY: `Filled`, then the `WarmVmm`, hold the memory and with it the mapping of the
            // region. A `WarmVmm` holds it until the process ends; a wrong guess gives its memory
            // and the descriptors of its vCPUs away, so it never runs. Later mappings over the
            // region are again guest RAM. Slots do not overlap, because the regions of a
            // GuestMemoryMmap do not.
            unsafe { self.vm.set_user_memory_region(area) }
                .map_err(on("KVM_SET_USER_MEMORY_REGION"))?;
        }
        self.vm.create_irq_chip().map_err(on("KVM_CREATE_IRQCHIP"))?;
        let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        self.vm.create_pit2(pit).map_err(on("KVM_CREATE_PIT2"))?;
        let vcpu = |id| self.vm.create_vcpu(u64::from(id)).map_err(on("KVM_CREATE_VCPU"));
        let vcpus = (0..shape.vcpus).map(vcpu).collect::<Result<_, _>>()?;
        Ok(Filled { memory_bytes: shape.memory_bytes, memory, vcpus, cpuid: Vec::new() })
    }
}
