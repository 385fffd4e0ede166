//! A VM of KVM's, as far as it can be made before anybody knows what it is for.
//!
//! What it will be for is guessed: VMs come in series, and the next is most often of the shape of the last. One that was made for
//! another shape is thrown away and costs what it would have cost anyway.
//!
//! Memory slots come before the interrupt controllers: each waits for the grace periods that are under way, and the chips' places on the
//! I/O bus begin some (9 ms against 1, measured on Linux 6.18).
//!
//! KVM_SET_CPUID2 executes CPUID, and each of these exits to the hypervisor where the host is a guest itself: 67 us of a
//! birth, so vCPUs are told on a guess, too.

use super::error::BuildError;
use super::shell::on;
use crate::arch::{cpuid, layout};
use crate::config::{MAX_VCPUS, Shape};
use crate::memory::{self, pre_fault};
use crate::vcpu::{self, state::MAX_CPUID};
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_cpuid_entry2, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// The largest RAM that is given to a VM on a guess: KVM may keep eight bytes for each page of it.
const MOST_GUESSED_BYTES: u64 = 4 << 30;

/// A VM without devices.
pub struct Bare {
    vm: VmFd,
    filled: Option<Filled>,
}

/// What a VM of one shape has.
struct Filled {
    memory_bytes: u64,
    memory: GuestMemoryMmap,
    vcpus: Vec<VcpuFd>,
    /// What KVM_GET_CPUID2 gave of each, where they were told their CPUID; else nothing.
    cpuid: Vec<Vec<kvm_cpuid_entry2>>,
}

/// The parts of a VM, for who puts devices into it.
pub(super) struct Parts {
    pub(super) vm: VmFd,
    pub(super) memory: GuestMemoryMmap,
    pub(super) vcpus: Vec<VcpuFd>,
    /// What KVM_GET_CPUID2 gave of each vCPU, where they were told their CPUID; else nothing.
    pub(super) cpuid: Vec<Vec<kvm_cpuid_entry2>>,
}

impl Bare {
    /// A new one, with nothing in it.
    ///
    /// # Errors
    /// What KVM says.
    pub fn new(kvm: &Kvm) -> Result<Self, BuildError> {
        let vm = kvm.create_vm().map_err(on("KVM_CREATE_VM"))?;
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP).map_err(on("KVM_SET_IDENTITY_MAP_ADDR"))?;
        vm.set_tss_address(layout::KVM_TSS).map_err(on("KVM_SET_TSS_ADDR"))?;
        Ok(Self { vm, filled: None })
    }

    /// A new one that will probably have this shape, and vCPUs of all that KVM has `supported`, as a guest that was booted on this host has them.
    ///
    /// # Errors
    /// What KVM says.
    pub fn likely(kvm: &Kvm, shape: Shape, supported: &cpuid::Supported) -> Result<Self, BuildError> {
        let mut bare = Self::new(kvm)?;
        if shape.memory_bytes <= MOST_GUESSED_BYTES && (1..=MAX_VCPUS).contains(&shape.vcpus) {
            let mut filled = bare.fill(shape)?;
            let cpuid = cpuid::Template::new(supported, shape.vcpus);
            for (id, vcpu) in (0..).zip(&mut filled.vcpus) {
                let entries = cpuid::for_kvm(&cpuid.of(id)).ok_or(BuildError::Cpuid)?;
                vcpu.set_cpuid2(&entries).map_err(on("KVM_SET_CPUID2"))?;
                // It may be more than what was told.
                let has = vcpu.get_cpuid2(MAX_CPUID).map_err(on("KVM_GET_CPUID2"))?;
                filled.cpuid.push(has.as_slice().to_vec());
                vcpu::first_run(vcpu);
                pre_fault::roots(vcpu);
            }
            bare.filled = Some(filled);
        }
        Ok(bare)
    }

    /// The parts of a VM of this shape.
    ///
    /// # Errors
    /// When no VM may have as much memory, or what KVM says.
    pub(super) fn parts(self, kvm: &Kvm, shape: Shape) -> Result<Parts, BuildError> {
        let fits =
            |f: &Filled| f.memory_bytes == shape.memory_bytes && f.vcpus.len() == usize::from(shape.vcpus);
        let bare = match &self.filled {
            Some(filled) if !fits(filled) => Self::new(kvm)?,
            _ => self,
        };
        let filled = match bare.filled {
            Some(filled) => filled,
            None => bare.fill(shape)?,
        };
        let Filled { memory, vcpus, cpuid, .. } = filled;
        Ok(Parts { vm: bare.vm, memory, vcpus, cpuid })
    }

    /// Gives it its memory, then interrupt controllers and timer, then vCPUs.
    fn fill(&self, shape: Shape) -> Result<Filled, BuildError> {
        let memory = memory::anonymous(shape.memory_bytes)?;
        for (slot, region) in (0..).zip(memory.iter()) {
            let Ok(host) = region.get_host_address(vm_memory::MemoryRegionAddress(0)) else { continue };
            let area = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().raw_value(),
                memory_size: region.len(),
                userspace_addr: host.addr() as u64,
            };
            // SAFETY: `Filled`, then the `Shell`, hold the memory and with it the mapping of the region, the last until the process
            // ends; a VM whose memory is dropped is dropped with it, before it has run. Whatever is mapped over the region is again
            // guest RAM; slots do not overlap because the regions of a GuestMemoryMmap do not.
            unsafe { self.vm.set_user_memory_region(area) }.map_err(on("KVM_SET_USER_MEMORY_REGION"))?;
        }
        self.vm.create_irq_chip().map_err(on("KVM_CREATE_IRQCHIP"))?;
        let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        self.vm.create_pit2(pit).map_err(on("KVM_CREATE_PIT2"))?;
        let vcpu = |id| self.vm.create_vcpu(u64::from(id)).map_err(on("KVM_CREATE_VCPU"));
        let vcpus = (0..shape.vcpus).map(vcpu).collect::<Result<_, _>>()?;
        Ok(Filled { memory_bytes: shape.memory_bytes, memory, vcpus, cpuid: Vec::new() })
    }
}
