//! Saving a VM that goes on running: RAM is copied beneath it, and it stands still only for the rest.

use super::error::SaveError;
use super::{Vm, VmError};
use crate::control::{Frozen, Precopied};
use crate::memory::pages::Pages;
use crate::memory::{self, MIN_HOLE_BYTES, live};
use dayfly_units::PAGE_SIZE;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

/// RAM that has been copied, but for what was written since.
#[derive(Debug)]
pub(super) struct Copying {
    target: File,
    /// The target's large holes, as far as nothing was written to them since.
    holes: Vec<(u64, u64)>,
    /// What was told of, and is not copied yet.
    left: Pages,
}

/// A part of RAM: its slot of KVM's, where it lies for the guest, here, and in a memory file, and its length.
struct Part {
    slot: u32,
    guest: u64,
    host: u64,
    offset: u64,
    len: u64,
}

impl Vm {
    fn parts(&self) -> Vec<Part> {
        let mut offset = 0;
        let part = |(slot, region): (u32, &vm_memory::GuestRegionMmap)| {
            let (len, at) = (region.len(), offset);
            offset += len;
            let host = region.get_host_address(MemoryRegionAddress(0)).ok()?.addr() as u64;
            Some(Part { slot, guest: region.start_addr().raw_value(), host, offset: at, len })
        };
        (0..).zip(self.shell.memory.iter()).filter_map(part).collect()
    }

    /// Whether writes to RAM are noted from now on, those of vCPUs by KVM (KVM_MEM_LOG_DIRTY_PAGES).
    fn note_writes(&self, noted: bool) -> Result<(), SaveError> {
        self.shell.devices.writes().watch(noted);
        for part in self.parts() {
            let region = kvm_userspace_memory_region {
                slot: part.slot,
                flags: if noted { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
                guest_phys_addr: part.guest,
                memory_size: part.len,
                userspace_addr: part.host,
            };
            // SAFETY: the slot as it is (`vm::bare`), over the same memory, which lives as long as the VM; only the flag differs.
            unsafe { self.shell.vm.set_user_memory_region(region) }
                .map_err(|e| SaveError::Kvm("KVM_SET_USER_MEMORY_REGION", e))?;
        }
        Ok(())
    }

    /// What was written since the last call.
    fn written(&self) -> Result<Pages, SaveError> {
        let mut pages = Pages::none(self.shell.shape.memory_bytes);
        let devices = self.shell.devices.writes().take();
        for part in self.parts() {
            let len = usize::try_from(part.len).unwrap_or(usize::MAX);
            let log = self.shell.vm.get_dirty_log(part.slot, len);
            pages.insert_bitmap(
                part.offset / PAGE_SIZE,
                &log.map_err(|e| SaveError::Kvm("KVM_GET_DIRTY_LOG", e))?,
            );
            let (first, end) = (part.host / PAGE_SIZE, (part.host + part.len) / PAGE_SIZE);
            let here = devices.iter().map(|page| *page as u64).filter(|page| (first..end).contains(page));
            here.for_each(|page| pages.insert(part.offset / PAGE_SIZE + page - first));
        }
        Ok(pages)
    }

    /// Copies RAM to the one descriptor that comes along, while the VM does what it does. Until [`Self::freeze`], [`Self::save`],
    /// [`Self::resume`], or this without a descriptor, it is noted what is written.
    ///
    /// # Errors
    /// [`SaveError`]; nothing is noted then.
    pub fn precopy(&mut self, fds: Vec<OwnedFd>) -> Result<Precopied, SaveError> {
        let got = fds.len();
        if got == 0 {
            self.end_precopy();
            return Ok(Precopied::default());
        }
        let Ok([target]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(SaveError::Fds { expected: 1, writable: 0, got });
        };
        if !self.is_whole() {
            return Err(SaveError::NotWhole);
        }
        self.end_precopy();
        let began = Instant::now();
        let copied = self.note_writes(true).and_then(|()| self.copy_rounds(File::from(target)));
        match copied {
            Ok((copying, rounds)) => {
                self.copying = Some(copying);
                let live::Rounds { rounds, pages } = rounds;
                Ok(Precopied { rounds, pages, took_us: micros(began) })
            }
            Err(error) => {
                let _ = self.note_writes(false);
                Err(error)
            }
        }
    }

    fn copy_rounds(&self, target: File) -> Result<(Copying, live::Rounds), SaveError> {
        let (memory, bytes) = (&self.shell.memory, self.shell.shape.memory_bytes);
        memory::dump(memory, bytes, self.shell.pagemap.as_ref(), self.parent.as_ref(), &target)?;
        let mut noted = Pages::none(bytes);
        let told = || {
            let written = self.written()?;
            noted.insert_all(&written);
            Ok::<_, SaveError>(written)
        };
        let (left, rounds) = live::rounds(memory, bytes, &target, told)?;
        let holes = live::without(&memory::large_holes(&target, bytes)?, &noted, MIN_HOLE_BYTES);
        Ok((Copying { target, holes, left }, rounds))
    }

    /// Copies what is left, of a VM that stands; gives the large holes. `target` is what was copied to.
    pub(super) fn finish_precopy(
        &self,
        copying: &Copying,
        target: &File,
    ) -> Result<(Vec<(u64, u64)>, u64), SaveError> {
        let file = |file: &File| rustix::fs::fstat(file.as_fd()).map(|stat| (stat.st_dev, stat.st_ino));
        if file(&copying.target).ok() != file(target).ok() {
            return Err(SaveError::OtherMemory);
        }
        let (memory, bytes) = (&self.shell.memory, self.shell.shape.memory_bytes);
        let mut left = self.written()?;
        left.insert_all(&copying.left);
        // Devices write to these without any note; they are few.
        for (at, len) in self.shell.devices.used_rings() {
            let part =
                self.parts().into_iter().find(|part| (part.guest..part.guest + part.len).contains(&at));
            let Some(part) = part else { continue };
            let from = part.offset + at - part.guest;
            (from / PAGE_SIZE..=(from + len - 1) / PAGE_SIZE).for_each(|page| left.insert(page));
        }
        live::copy(memory, bytes, &left, target)?;
        Ok((live::without(&copying.holes, &left, MIN_HOLE_BYTES), left.count()))
    }

    /// Nothing is noted any more.
    pub(super) fn end_precopy(&mut self) {
        if self.copying.take().is_some() {
            // What is noted for nobody costs time, and nothing else.
            let _ = self.note_writes(false);
        }
    }

    /// Stops, writes the whole machine to `fds`, in the order of [`Command::Save`](crate::control::Command::Save), and goes on at once.
    ///
    /// # Errors
    /// [`SaveError`]; the VM goes on as if nothing had been. One that cannot go on ends.
    pub fn freeze(&mut self, fds: Vec<OwnedFd>) -> Result<Frozen, SaveError> {
        let began = Instant::now();
        let ran = !self.paused;
        self.pause().map_err(SaveError::Freeze)?;
        let saved = self.save_stopped(fds);
        let resumed = if ran { self.let_go_on() } else { Ok(()) };
        let paused_us = micros(began);
        self.end_precopy();
        if let Err(error) = resumed {
            // Neither as it was nor as it should be.
            crate::exit::fail(&error);
        }
        let (late, pages) = saved?;
        late.write();
        Ok(Frozen { paused_us, pages })
    }

    /// Goes on; what is noted is not ended yet.
    fn let_go_on(&mut self) -> Result<(), VmError> {
        let copying = self.copying.take();
        let resumed = self.resume();
        self.copying = copying;
        resumed
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
