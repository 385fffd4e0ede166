//! A VM of KVM's, as far as it can be made before anybody knows what it is for.
//!
//! Memory slots come before the interrupt controllers: each waits for the grace periods that are under way, and the chips' places on the
//! I/O bus begin some (9 ms against 1, measured on Linux 6.18).

use super::error::BuildError;
use super::shell::on;
use crate::arch::layout;
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VmFd};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// A VM without memory.
pub struct Bare {
    vm: VmFd,
}

impl Bare {
    /// A new one.
    ///
    /// # Errors
    /// What KVM says.
    pub fn new(kvm: &Kvm) -> Result<Self, BuildError> {
        let vm = kvm.create_vm().map_err(on("KVM_CREATE_VM"))?;
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP).map_err(on("KVM_SET_IDENTITY_MAP_ADDR"))?;
        vm.set_tss_address(layout::KVM_TSS).map_err(on("KVM_SET_TSS_ADDR"))?;
        Ok(Self { vm })
    }

    /// Gives it its memory, then interrupt controllers and timer.
    ///
    /// # Errors
    /// What KVM says.
    pub(super) fn finish(self, memory: &GuestMemoryMmap) -> Result<VmFd, BuildError> {
        for (slot, region) in (0..).zip(memory.iter()) {
            let Ok(host) = region.get_host_address(vm_memory::MemoryRegionAddress(0)) else { continue };
            let area = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().raw_value(),
                memory_size: region.len(),
                userspace_addr: host.addr() as u64,
            };
            // SAFETY: the region is mapped for as long as the `Shell` holds the memory, which is until the process ends, and
            // whatever is mapped over it is again guest RAM; slots do not overlap because the regions of a GuestMemoryMmap
            // do not.
            unsafe { self.vm.set_user_memory_region(area) }.map_err(on("KVM_SET_USER_MEMORY_REGION"))?;
        }
        self.vm.create_irq_chip().map_err(on("KVM_CREATE_IRQCHIP"))?;
        let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        self.vm.create_pit2(pit).map_err(on("KVM_CREATE_PIT2"))?;
        Ok(self.vm)
    }
}
