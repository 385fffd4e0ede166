//! The writes to RAM since they are noted: by vCPUs in KVM, by devices in
//! [`crate::memory::writes`].

use super::error::SaveError;
use super::warm::WarmVmm;
use crate::memory::pages::Pages;
use dayfly_units::PAGE_SIZE;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

/// A part of RAM: its KVM slot, its address for the guest, its address in this process, its offset
/// in a memory file, and its length.
pub(super) struct Part {
    pub(super) slot: u32,
    pub(super) guest: u64,
    pub(super) host: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl WarmVmm {
    pub(super) fn parts(&self) -> Vec<Part> {
        let mut offset = 0;
        let part = |(slot, region): (u32, &vm_memory::GuestRegionMmap)| {
            let (len, at) = (region.len(), offset);
            offset += len;
            let host = region.get_host_address(MemoryRegionAddress(0)).ok()?.addr() as u64;
            Some(Part { slot, guest: region.start_addr().raw_value(), host, offset: at, len })
        };
        (0..).zip(self.memory.iter()).filter_map(part).collect()
    }

    /// Starts or stops noting writes to RAM: by vCPUs in KVM (KVM_MEM_LOG_DIRTY_PAGES), by devices
    /// in [`crate::memory::writes`].
    pub(super) fn note_writes(&self, noted: bool) -> Result<(), SaveError> {
        self.devices.writes().watch(noted);
        for part in self.parts() {
            let region = kvm_userspace_memory_region {
                slot: part.slot,
                flags: if noted { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
                guest_phys_addr: part.guest,
                memory_size: part.len,
                userspace_addr: part.host,
            };
            // SAFETY: the slot keeps its place and its memory (`vm::bare`), which lives as long as
            // the VM; only the flag differs.
            unsafe { self.vm.set_user_memory_region(region) }
                .map_err(|e| SaveError::Kvm("KVM_SET_USER_MEMORY_REGION", e))?;
        }
        Ok(())
    }

    /// The pages written since the last call.
    pub(super) fn written(&self) -> Result<Pages, SaveError> {
        let mut pages = Pages::none(self.shape.memory_bytes);
        let devices = self.devices.writes().take();
        for part in self.parts() {
            let len = usize::try_from(part.len).unwrap_or(usize::MAX);
            let log = self.vm.get_dirty_log(part.slot, len);
            pages.insert_bitmap(
                part.offset / PAGE_SIZE,
                &log.map_err(|e| SaveError::Kvm("KVM_GET_DIRTY_LOG", e))?,
            );
            let (first, end) = (part.host / PAGE_SIZE, (part.host + part.len) / PAGE_SIZE);
            let here =
                devices.iter().map(|page| *page as u64).filter(|page| (first..end).contains(page));
            here.for_each(|page| pages.insert(part.offset / PAGE_SIZE + page - first));
        }
        Ok(pages)
    }
}
