//! Copying RAM while the guest runs, and the pages left once the guest is stopped.

use super::error::SaveError;
use super::machine::{Copying, Vm};
use crate::control::{Busy, Precopied, Status};
use crate::memory::pages::Pages;
use crate::memory::{self, MIN_HOLE_BYTES, YieldPoints, live};
use dayfly_units::PAGE_SIZE;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

/// The result of the last pages of a fork.
pub(super) struct Last {
    /// The pages that the target has; `None` if it has all.
    pub(super) own: Option<Pages>,
    pub(super) holes: Vec<(u64, u64)>,
    /// The number of pages copied in the pause.
    pub(super) pages: u64,
}

impl Vm {
    /// Copies RAM to the first descriptor in `fds` while the VM runs; with `own`, only pages that
    /// differ from its template. A second one is the snapshot's own memory file. Writes are noted
    /// until [`Self::freeze`], [`Self::fork`], [`Self::save`], [`Self::resume`], or a call without
    /// a descriptor. `serve` gets the VM's status now and then while RAM is copied.
    ///
    /// # Errors
    /// [`SaveError`]; writes are then not noted.
    pub fn precopy(
        &mut self,
        own: bool,
        fds: Vec<OwnedFd>,
        serve: &mut dyn FnMut(&Status),
    ) -> Result<Precopied, SaveError> {
        let got = fds.len();
        let mut fds = fds.into_iter().map(File::from);
        let Some(target) = fds.next() else {
            self.end_precopy();
            return Ok(Precopied::default());
        };
        let template = fds.next();
        if fds.next().is_some() {
            return Err(SaveError::Fds { expected: 2, writable: 0, got });
        }
        if let Some(template) = &template {
            let expected = self.warm.shape.memory_bytes;
            let got = memory::file_bytes(template).map_err(SaveError::Pagemap)?;
            if got != expected {
                return Err(SaveError::MemoryLength { expected, got });
            }
        }
        if !own && !self.ram.is_whole() {
            return Err(SaveError::NotWhole);
        }
        self.end_precopy();
        let began = Instant::now();
        let status = Status { busy: Some(Busy::Precopy), ..self.status() };
        let mut serve = || serve(&status);
        let mut yields = YieldPoints::new(&mut serve);
        let copied = self.warm.note_writes(true).and_then(|()| match (own, template) {
            (true, _) => self.copy_own_rounds(target, &mut yields),
            (false, template) => self.copy_rounds(target, template.as_ref(), &mut yields),
        });
        match copied {
            Ok((copying, rounds)) => {
                self.copying = Some(copying);
                let live::Rounds { rounds, pages } = rounds;
                Ok(Precopied { rounds, pages, took_us: micros(began) })
            }
            Err(error) => {
                let _ = self.warm.note_writes(false);
                Err(error)
            }
        }
    }

    fn copy_rounds(
        &self,
        target: File,
        template: Option<&File>,
        yields: &mut YieldPoints<'_>,
    ) -> Result<(Copying, live::Rounds), SaveError> {
        let (memory, bytes) = (&self.warm.memory, self.warm.shape.memory_bytes);
        let unwritten = self.ram.unwritten(template);
        memory::dump(memory, bytes, self.warm.pagemap.as_ref(), unwritten, &target, yields)?;
        let mut noted = Pages::none(bytes);
        let written = || {
            let pages = self.warm.written()?;
            noted.insert_all(&pages);
            Ok::<_, SaveError>(pages)
        };
        let (left, rounds) = live::rounds(memory, bytes, &target, yields, written)?;
        let holes = live::without(&memory::large_holes(&target, bytes)?, &noted, MIN_HOLE_BYTES);
        Ok((Copying { target, holes, left, own: None }, rounds))
    }

    fn copy_own_rounds(
        &self,
        target: File,
        yields: &mut YieldPoints<'_>,
    ) -> Result<(Copying, live::Rounds), SaveError> {
        let (memory, bytes) = (&self.warm.memory, self.warm.shape.memory_bytes);
        let (Some(anonymous), Some(pagemap)) = (self.ram.anonymous(), &self.warm.pagemap) else {
            return Err(SaveError::NoTemplate);
        };
        let got = memory::file_bytes(&target).map_err(SaveError::Pagemap)?;
        if got != bytes {
            return Err(SaveError::MemoryLength { expected: bytes, got });
        }
        let mut own = memory::own(memory, bytes, pagemap, yields)
            .map_err(SaveError::Pagemap)?
            .joined(live::FORK_ROWS);
        live::copy(memory, bytes, &own, &target, yields)?;
        let written = || {
            let pages = self.warm.written()?;
            own.insert_all(&pages);
            Ok::<_, SaveError>(pages)
        };
        let (left, rounds) = live::rounds(memory, bytes, &target, yields, written)?;
        let joined = own.joined(live::FORK_ROWS);
        let mut between = joined.clone();
        between.remove_all(&own);
        live::copy(memory, bytes, &between, &target, yields)?;
        let holes = live::without(anonymous, &joined, MIN_HOLE_BYTES);
        Ok((Copying { target, holes, left, own: Some(joined) }, rounds))
    }

    /// Copies the pages left to `target`, the file of the precopy, while the VM is stopped. Returns
    /// the large holes, and the number of pages copied.
    pub(super) fn finish_precopy(
        &self,
        copying: &Copying,
        target: &File,
    ) -> Result<(Vec<(u64, u64)>, u64), SaveError> {
        if copying.own.is_some() {
            return Err(SaveError::CopiedForFork);
        }
        let left = self.last_pages(copying, target)?;
        live::copy_last(&self.warm.memory, self.warm.shape.memory_bytes, &left, target)?;
        Ok((live::without(&copying.holes, &left, MIN_HOLE_BYTES), left.count()))
    }

    /// As [`Self::finish_precopy`], for a fork. `own` are the pages that the target has already;
    /// the result includes the new ones.
    pub(super) fn finish_fork(
        &self,
        copying: &Copying,
        own: Option<Pages>,
        target: &File,
    ) -> Result<Last, SaveError> {
        let Some(mut own) = own else {
            let (holes, pages) = self.finish_precopy(copying, target)?;
            return Ok(Last { own: None, holes, pages });
        };
        let mut left = self.last_pages(copying, target)?;
        // Each page adds at most one row, so the rows are counted only if the pages left could
        // exceed the limit.
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
        live::copy_last(&self.warm.memory, self.warm.shape.memory_bytes, &left, target)?;
        let holes = live::without(&copying.holes, &left, MIN_HOLE_BYTES);
        Ok(Last { own: Some(own), holes, pages: left.count() })
    }

    /// The pages that the target lacks or has in an old version, of a stopped VM.
    fn last_pages(&self, copying: &Copying, target: &File) -> Result<Pages, SaveError> {
        let file =
            |file: &File| rustix::fs::fstat(file.as_fd()).map(|stat| (stat.st_dev, stat.st_ino));
        if file(&copying.target).ok() != file(target).ok() {
            return Err(SaveError::OtherMemory);
        }
        let mut left = self.warm.written()?;
        left.insert_all(&copying.left);
        // Devices write to the used rings without noting it; the rings have few pages.
        for (at, len) in self.warm.devices.used_rings() {
            let part = self
                .warm
                .parts()
                .into_iter()
                .find(|part| (part.guest..part.guest + part.len).contains(&at));
            let Some(part) = part else { continue };
            let from = part.offset + at - part.guest;
            (from / PAGE_SIZE..=(from + len - 1) / PAGE_SIZE).for_each(|page| left.insert(page));
        }
        Ok(left)
    }
}

/// The microseconds since `since`.
pub(super) fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
