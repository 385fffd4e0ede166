//! Saving a VM that goes on running: RAM is copied beneath it, and it stands still only for the rest.

use super::error::SaveError;
use super::saving::{Late, Record, Saving};
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
    /// The target's large holes, without what it has of its own, as far as nothing was written to them since.
    holes: Vec<(u64, u64)>,
    /// What was told of, and is not copied yet.
    left: Pages,
    /// The pages that the target has, where it does not have all.
    own: Option<Pages>,
}

/// What the last pages of a fork came to.
struct Last {
    /// What the target has, where it does not have all.
    own: Option<Pages>,
    holes: Vec<(u64, u64)>,
    /// How many were copied.
    pages: u64,
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

    /// Copies RAM to the one descriptor that comes along, while the VM does what it does; with `own` only what is not as in its template. Until
    /// [`Self::freeze`], [`Self::fork`], [`Self::save`], [`Self::resume`], or this without a descriptor, it is noted what is written.
    ///
    /// # Errors
    /// [`SaveError`]; nothing is noted then.
    pub fn precopy(&mut self, own: bool, fds: Vec<OwnedFd>) -> Result<Precopied, SaveError> {
        let got = fds.len();
        if got == 0 {
            self.end_precopy();
            return Ok(Precopied::default());
        }
        let Ok([target]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(SaveError::Fds { expected: 1, writable: 0, got });
        };
        if !own && !self.is_whole() {
            return Err(SaveError::NotWhole);
        }
        self.end_precopy();
        let (began, target) = (Instant::now(), File::from(target));
        let copied = self
            .note_writes(true)
            .and_then(|()| if own { self.copy_own_rounds(target) } else { self.copy_rounds(target) });
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
        Ok((Copying { target, holes, left, own: None }, rounds))
    }

    fn copy_own_rounds(&self, target: File) -> Result<(Copying, live::Rounds), SaveError> {
        let (memory, bytes) = (&self.shell.memory, self.shell.shape.memory_bytes);
        let (Some(_), Some(pagemap)) = (&self.parent, &self.shell.pagemap) else {
            return Err(SaveError::NoTemplate);
        };
        let got = target.metadata().map_err(SaveError::Pagemap)?.len();
        if got != bytes {
            return Err(SaveError::MemoryLength { expected: bytes, got });
        }
        let mut own =
            memory::own(memory, bytes, pagemap).map_err(SaveError::Pagemap)?.joined(live::FORK_ROWS);
        live::copy(memory, bytes, &own, &target)?;
        let told = || {
            let written = self.written()?;
            own.insert_all(&written);
            Ok::<_, SaveError>(written)
        };
        let (left, rounds) = live::rounds(memory, bytes, &target, told)?;
        let joined = own.joined(live::FORK_ROWS);
        let mut between = joined.clone();
        between.remove_all(&own);
        live::copy(memory, bytes, &between, &target)?;
        let holes = live::without(&self.holes, &joined, MIN_HOLE_BYTES);
        Ok((Copying { target, holes, left, own: Some(joined) }, rounds))
    }

    /// Copies what is left, of a VM that stands; gives the large holes, and how many pages were left. `target` is what was copied to.
    pub(super) fn finish_precopy(
        &self,
        copying: &Copying,
        target: &File,
    ) -> Result<(Vec<(u64, u64)>, u64), SaveError> {
        if copying.own.is_some() {
            return Err(SaveError::NotWhole);
        }
        let left = self.last_pages(copying, target)?;
        live::copy_last(&self.shell.memory, self.shell.shape.memory_bytes, &left, target)?;
        Ok((live::without(&copying.holes, &left, MIN_HOLE_BYTES), left.count()))
    }

    /// The same for a fork; gives what the target has, too, which had `own`.
    fn finish_fork(&self, copying: &Copying, own: Option<Pages>, target: &File) -> Result<Last, SaveError> {
        let Some(mut own) = own else {
            let (holes, pages) = self.finish_precopy(copying, target)?;
            return Ok(Last { own: None, holes, pages });
        };
        let mut left = self.last_pages(copying, target)?;
        // Each page makes one row more at most; only where these may be too many is it looked how many there are.
        if left.count() <= (live::MOST_FORK_ROWS - live::FORK_ROWS) as u64 {
            own.insert_all(&left);
        } else {
            let mut all = own.clone();
            all.insert_all(&left);
            let mut between = all.joined(live::MOST_FORK_ROWS);
            between.remove_all(&own);
            own.insert_all(&between);
            left.insert_all(&between);
        }
        live::copy_last(&self.shell.memory, self.shell.shape.memory_bytes, &left, target)?;
        let holes = live::without(&copying.holes, &left, MIN_HOLE_BYTES);
        Ok(Last { own: Some(own), holes, pages: left.count() })
    }

    /// What was written since it was copied last, of a VM that stands.
    fn last_pages(&self, copying: &Copying, target: &File) -> Result<Pages, SaveError> {
        let file = |file: &File| rustix::fs::fstat(file.as_fd()).map(|stat| (stat.st_dev, stat.st_ino));
        if file(&copying.target).ok() != file(target).ok() {
            return Err(SaveError::OtherMemory);
        }
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
        Ok(left)
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
        self.standing(|vm| vm.save_stopped(fds))
    }

    /// The same in the order of [`Command::Fork`](crate::control::Command::Fork), after [`Self::precopy`]: clones can run beside it at once.
    ///
    /// # Errors
    /// As [`Self::freeze`].
    pub fn fork(&mut self, fds: Vec<OwnedFd>) -> Result<Frozen, SaveError> {
        self.standing(|vm| vm.fork_stopped(fds))
    }

    fn fork_stopped(&mut self, fds: Vec<OwnedFd>) -> Result<(Late, u64), SaveError> {
        let Saving { state, memory, late, layers } = self.saving(fds)?;
        self.set_clocks().map_err(SaveError::Clocks)?;
        // Taken, not copied: it is large. Whatever comes of this, nobody else uses what is left (`standing`).
        let own = self.copying.as_mut().and_then(|copying| copying.own.take());
        let Some(copying) = &self.copying else { return Err(SaveError::NotCopied) };
        let Last { own, holes, pages } = self.finish_fork(copying, own, &memory)?;
        self.write_state(state, holes)?;
        self.shell.devices.freeze_layers(layers).map_err(SaveError::Disks)?;
        Ok((Late { file: late, record: Record::Own(own) }, pages))
    }

    /// Stops, does `save`, goes on.
    fn standing(
        &mut self,
        save: impl FnOnce(&mut Self) -> Result<(Late, u64), SaveError>,
    ) -> Result<Frozen, SaveError> {
        let began = Instant::now();
        let ran = !self.paused;
        self.pause().map_err(SaveError::Freeze)?;
        let saved = save(self);
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
