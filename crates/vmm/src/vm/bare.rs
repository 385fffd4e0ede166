//! A VM of KVM's, as far as it can be made before anybody knows what it is for.
//!
//! Memory slots come before the interrupt controllers: each waits for the grace periods that are under way, and the chips' places on the
//! I/O bus begin some (9 ms against 1, measured on Linux 6.18). A process that has time does it the other way round,
//! [`Bare::ahead`], and waits out what that begins; a birth then pays for its slots only.

use super::error::BuildError;
use super::shell::on;
use crate::arch::layout;
use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// A slot and a guest address that no VM uses, for [`Bare::ahead`].
const SPARE_SLOT: u32 = 500;
const SPARE_ADDRESS: u64 = 1 << 40;

/// A VM without memory.
pub struct Bare {
    vm: VmFd,
    has_chips: bool,
    first_vcpu: Option<VcpuFd>,
}

fn area(slot: u32, address: u64, size: u64, host: *const u8) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: address,
        memory_size: size,
        userspace_addr: host.addr() as u64,
    }
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
        Ok(Self { vm, has_chips: false, first_vcpu: None })
    }

    fn chips(&mut self) -> Result<(), BuildError> {
        if !std::mem::replace(&mut self.has_chips, true) {
            self.vm.create_irq_chip().map_err(on("KVM_CREATE_IRQCHIP"))?;
            let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
            self.vm.create_pit2(pit).map_err(on("KVM_CREATE_PIT2"))?;
        }
        Ok(())
    }

    /// Interrupt controllers, timer and the first vCPU, for whoever has the time: some 10 ms.
    ///
    /// # Errors
    /// What KVM says.
    pub fn ahead(&mut self) -> Result<(), BuildError> {
        self.chips()?;
        let mut vcpu = self.vm.create_vcpu(0).map_err(on("KVM_CREATE_VCPU"))?;
        crate::vcpu::first_run(&mut vcpu);
        self.first_vcpu = Some(vcpu);
        // Waits until a slot can be had at once.
        let page = MmapRegionBuilder::<()>::new(4096)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
            .build();
        let Ok(page) = page else { return Ok(()) };
        for size in [4096, 0] {
            let area = area(SPARE_SLOT, SPARE_ADDRESS, size, page.as_ptr());
            // SAFETY: the page is mapped until after the second round, which removes the slot; no vCPU runs.
            unsafe { self.vm.set_user_memory_region(area) }.map_err(on("KVM_SET_USER_MEMORY_REGION"))?;
        }
        Ok(())
    }

    /// Gives it its memory, and what it does not have yet.
    ///
    /// # Errors
    /// What KVM says.
    pub(super) fn finish(mut self, memory: &GuestMemoryMmap) -> Result<(VmFd, Option<VcpuFd>), BuildError> {
        for (slot, region) in (0..).zip(memory.iter()) {
            let Ok(host) = region.get_host_address(vm_memory::MemoryRegionAddress(0)) else { continue };
            let area = area(slot, region.start_addr().raw_value(), region.len(), host);
            // SAFETY: the region is mapped for as long as the `Shell` holds the memory, which is until the process ends, and
            // whatever is mapped over it is again guest RAM; slots do not overlap because the regions of a GuestMemoryMmap
            // do not.
            unsafe { self.vm.set_user_memory_region(area) }.map_err(on("KVM_SET_USER_MEMORY_REGION"))?;
        }
        self.chips()?;
        Ok((self.vm, self.first_vcpu))
    }
}
