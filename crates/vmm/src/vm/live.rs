//! Saving a running VM: RAM is copied while the guest runs, and the guest is paused only for the
//! pages that are left.

use super::error::{SaveError, VmError};
use super::machine::Vm;
use super::precopy::{Last, micros};
use super::saving::{Late, Record, Saving};
use crate::control::{Busy, Frozen, Status};
use crate::memory::YieldPoints;
use std::os::fd::OwnedFd;
use std::time::Instant;

impl Vm {
    /// Pauses the VM, writes the whole machine to `fds` in the order of
    /// [`Command::Save`](crate::control::Command::Save), and resumes it. `serve` gets the VM's
    /// status now and then after that, while the page map is made.
    ///
    /// # Errors
    /// [`SaveError`]; the VM then runs on unchanged. If it cannot resume, the process ends.
    pub fn freeze(
        &mut self,
        fds: Vec<OwnedFd>,
        serve: &mut dyn FnMut(&Status),
    ) -> Result<Frozen, SaveError> {
        let (frozen, late) = self.standing(fds, Self::save_stopped)?;
        let status = Status { busy: Some(Busy::Freeze), ..self.status() };
        let mut serve = || serve(&status);
        late.finish(&self.warm.devices, &mut YieldPoints::new(&mut serve));
        Ok(frozen)
    }

    /// As [`Self::freeze`], after [`Self::precopy`], in the order of
    /// [`Command::Fork`](crate::control::Command::Fork). Clones can start beside the running VM at
    /// once.
    ///
    /// # Errors
    /// As [`Self::freeze`].
    pub fn fork(&mut self, fds: Vec<OwnedFd>) -> Result<Frozen, SaveError> {
        let (frozen, late) = self.standing(fds, Self::fork_stopped)?;
        late.finish(&self.warm.devices, &mut YieldPoints::none());
        Ok(frozen)
    }

    fn fork_stopped(&mut self, saving: Saving) -> Result<(Late, u64), SaveError> {
        let Saving { state, memory, late, layers } = saving;
        self.set_clocks().map_err(SaveError::Clocks)?;
        // Taken, not copied, because it is large. `standing` drops `copying` afterwards, so no code
        // uses the rest.
        let own = self.copying.as_mut().and_then(|copying| copying.own.take());
        let Some(copying) = &self.copying else { return Err(SaveError::NotCopied) };
        let Last { own, holes, pages } = self.finish_fork(copying, own, &memory)?;
        self.write_state(state, holes)?;
        let unused = self.warm.devices.freeze_layers(layers).map_err(SaveError::Disks)?;
        Ok((Late { file: late, record: Record::Own(own), unused }, pages))
    }

    /// Pauses the VM, runs `save`, and resumes the VM if it ran before.
    fn standing(
        &mut self,
        fds: Vec<OwnedFd>,
        save: impl FnOnce(&mut Self, Saving) -> Result<(Late, u64), SaveError>,
    ) -> Result<(Frozen, Late), SaveError> {
        // Before the pause, because it needs no paused VM.
        let saving = match self.saving(fds) {
            Ok(saving) => saving,
            Err(error) => {
                self.end_precopy();
                return Err(error);
            }
        };
        let began = Instant::now();
        let (ran, stalled) = (!self.paused && !self.stalled, !self.paused && self.stalled);
        self.pause().map_err(SaveError::Freeze)?;
        let saved = save(self, saving);
        let resumed = if ran { self.resume_noting() } else { Ok(()) };
        if stalled {
            // It goes on when there is space, and not because it was saved.
            self.paused = false;
        }
        let paused_us = micros(began);
        self.end_precopy();
        if let Err(error) = resumed {
            // The VM can neither go on nor return to its state before.
            crate::exit::fail(&error);
        }
        let (late, pages) = saved?;
        Ok((Frozen { paused_us, pages }, late))
    }

    /// Resumes, but goes on noting writes: [`Self::resume`] alone would stop it and lengthen the
    /// pause.
    fn resume_noting(&mut self) -> Result<(), VmError> {
        let copying = self.copying.take();
        let resumed = self.resume();
        self.copying = copying;
        resumed
    }
}
