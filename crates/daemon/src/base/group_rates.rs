//! Limits of rates, which the kernel enforces over time: of CPU time and of disks. They hold from
//! the guest's identity on, and are taken away before a VM is killed.

use crate::base::error::{ApiError, Outcome};
use crate::base::group_limits::{check_range, host_io, host_limits, refused};
use crate::base::groups::{GroupLease, GroupStock, Stock};
use dayfly_api::types::VmLimits;
use dayfly_host::disks::{Disk, disk_of};
use dayfly_host::groups::Limits;
use std::collections::BTreeSet;
use std::path::PathBuf;

impl GroupLease {
    /// Sets the limits of CPU time and of disks, if there are some: when the guest is ready,
    /// because they would delay its start.
    ///
    /// # Errors
    /// As [`Self::limit`].
    pub fn cap(&self, limits: &VmLimits) -> Result<(), ApiError> {
        if let Some(io_max) = limits.io_max {
            let disks = self.stock.disks()?;
            let limited = self.stock.groups.limit_io(self.name, &host_io(&io_max), &disks);
            limited.map_err(refused)?;
        }
        let Some(most) = limits.cpu_max_millicpus else { return Ok(()) };
        let limits = Limits { cpu_max_millicpus: Some(most), ..Limits::default() };
        self.stock.groups.set(self.name, &limits).map_err(refused)
    }

    /// Takes the limits of rates away, before the VMM is killed: a process that may not run, or
    /// that waits for its disk, cannot end.
    pub fn lift_cap(&self) {
        if let Err(e) = self.stock.groups.lift_rates(self.name) {
            tracing::debug!("the limits of rates of control group {}: {e}", self.name);
        }
    }
}

impl GroupStock {
    /// Checks the limits of a VM with this number of vCPUs, before anything of it exists.
    ///
    /// # Errors
    /// A value is out of its range, or this daemon cannot limit that.
    pub fn check(&self, limits: &VmLimits, vcpus: u8) -> Result<(), ApiError> {
        if limits.is_none() {
            return Ok(());
        }
        check_range(limits, vcpus)?;
        let stock = self.stock()?;
        if limits.io_max.is_some() {
            stock.groups.check_io().map_err(refused)?;
            stock.disks()?;
        }
        stock.groups.controllers().check(&host_limits(limits, 0)).map_err(refused)
    }

    /// Stores the folders on whose disks rates are limited.
    pub fn limit_disks_of(&self, folders: Vec<PathBuf>) {
        if let Ok(stock) = &self.0 {
            let _ = stock.folders.set(folders);
        }
    }

    /// Takes the limits of rates of this process's group away, if it is in one of these, before
    /// the process is killed.
    pub fn lift_cap_of(&self, pid: u32) {
        if let Some(Err(e)) = self.groups().map(|groups| groups.lift_rates_of(pid)) {
            tracing::debug!("the limits of rates of process {pid}: {e}");
        }
    }
}

impl Stock {
    /// The disks whose rates are limited.
    fn disks(&self) -> Outcome<Vec<Disk>> {
        let folders = self.folders.get().into_iter().flatten().filter(|folder| folder.exists());
        let disks: Result<BTreeSet<Disk>, _> = folders.map(|folder| disk_of(folder)).collect();
        let disks = disks.map_err(|e| ApiError::invalid(format_args!("io_max: {e}")))?;
        Ok(disks.into_iter().collect())
    }
}
