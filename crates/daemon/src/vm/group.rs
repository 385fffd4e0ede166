//! A VM's control group, from the start of its VMM until its end: its limits, its bill, and what
//! other modules ask of it. The groups themselves are made in [`crate::base::groups`].

use crate::base::config::Config;
use crate::base::cpus::Booking;
use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::group_limits;
use crate::base::groups::{GroupLease, GroupStock};
use crate::model::facts::Facts;
use crate::model::live::VmGroup;
use crate::model::vm_slot::Placement;
use crate::net::relay::Place;
use crate::vm::Vm;
use crate::vm::record::Record;
use dayfly_host::cpus::CpuList;
use dayfly_host::groups::Usage;
use dayfly_host::reaper::Booked;
use dayfly_units::sync::lock;
use std::sync::Arc;

impl Record {
    /// The VM's control group among `groups`. `pid` is its VMM; `None` if that has ended.
    #[must_use]
    pub fn group_in(&self, groups: &GroupStock, pid: Option<u32>) -> Option<GroupLease> {
        let group = self.live.group.as_ref().filter(|_| self.is_of_this_boot());
        let found = group.and_then(|group| groups.adopt(&group.tree, group.number, pid));
        if found.is_none() && pid.is_some() && !self.facts.limits.is_none() {
            let (vm, name) = (self.id, &self.name);
            tracing::warn!(
                %vm, %name, ?group,
                "its control group was not found: whether its limits hold is not known, and it has \
                 no bill"
            );
        }
        found
    }
}

impl Vm {
    /// Gives it the control group of its VMM until it ends, and sets its limits. `None`: its VMM is
    /// in the daemon's group. Makes no system call if it has no limits.
    ///
    /// # Errors
    /// A limit cannot be set.
    pub fn keep_and_limit(&self, group: Option<GroupLease>) -> Outcome<()> {
        let Facts { limits, memory_bytes, .. } = &self.facts;
        let limited = match &group {
            Some(group) => group.limit(limits, *memory_bytes),
            None if limits.is_none() => Ok(()),
            None => Err(ApiError::internal(
                "limits: its VMM has no control group; the daemon's log says why",
            )),
        };
        let named = |of: &GroupLease| VmGroup { tree: of.tree(), number: of.number() };
        lock(&self.live).group = group.as_ref().map(named);
        *lock(&self.group) = group.map(Arc::new);
        limited
    }

    /// Gives it its booked CPUs, until it ends.
    pub fn keep_booking(&self, booking: Option<Booking>) {
        if let Some(booking) = booking {
            lock(&self.live).cpus = booking.cpus().clone();
            lock(&self.booking).keep(booking);
        }
    }

    /// Its booked CPUs are free soon, because it is being killed.
    pub(crate) fn leaves_cpus(&self) {
        if let Some(booking) = lock(&self.booking).get() {
            booking.leaves();
        }
    }

    /// The CPUs that it has booked; empty if it has none, and after its end.
    #[must_use]
    pub fn cpus(&self) -> CpuList {
        lock(&self.live).cpus.clone()
    }

    /// The booking itself, which a caller keeps as long as it works on its CPUs.
    #[must_use]
    pub fn booked(&self) -> Option<Arc<dyn Booked>> {
        if let Some(booking) = lock(&self.booking).get() {
            return Some(booking.clone());
        }
        let cpus = self.cpus();
        (!cpus.is_empty()).then(|| Arc::new(cpus) as _)
    }

    /// Where its VMM is started.
    #[must_use]
    pub fn placement(&self) -> Placement {
        let cpus = Some(self.cpus()).filter(|cpus| !cpus.is_empty());
        Placement { vm_slot: self.vm_slot(), cpus }
    }

    /// Whether its CPU time or its disks are limited.
    const fn is_capped(&self) -> bool {
        let limits = &self.facts.limits;
        limits.cpu_max_millicpus.is_some() || limits.io_max.is_some()
    }

    /// Limits its CPU time and its disks, if that was asked for, now that its guest is ready.
    ///
    /// # Errors
    /// A limit cannot be set.
    pub async fn cap(&self) -> Outcome<()> {
        let limits = self.facts.limits;
        if !self.is_capped() {
            return Ok(());
        }
        let Some(group) = lock(&self.group).clone() else { return Ok(()) };
        // The kernel waits for other changes of such limits, and for all CPUs at the first one.
        blocking(move || group.cap(&limits)).await
    }

    /// Takes the limits of its CPU time and of its disks away, so that it ends quickly.
    pub(crate) fn lift_cap(&self) {
        if self.is_capped()
            && let Some(group) = lock(&self.group).clone()
        {
            group.lift_cap();
        }
    }

    /// Where its relays run; `None` before its VMM was started and after it ended.
    #[must_use]
    pub fn relay_place(&self, config: &Config) -> Option<Place> {
        Some(Place {
            program: config.relay(),
            dir: self.dir.clone(),
            uid: self.uid,
            group: lock(&self.group).clone(),
            vmm: self.process()?,
            memory_max_bytes: self.facts.limits.memory_max_bytes,
            spent: self.ledger.relays.clone(),
        })
    }

    /// Where a process of its streams is started; `None` if its VMM has not been started, or has
    /// ended.
    #[must_use]
    pub fn streams_place(&self, config: &Config) -> Option<Place> {
        let place = self.relay_place(config)?;
        // The group is taken from it before the rest ([`crate::ops::remove`]).
        let has_lost_group = place.group.is_none() && lock(&self.live).group.is_some();
        (!has_lost_group && place.vmm.is_alive().unwrap_or(false)).then_some(place)
    }

    /// Gives it the control group that it has had from an earlier daemon on, with its limits.
    pub fn adopt_group(&self, group: Option<GroupLease>) {
        *lock(&self.group) = group.map(Arc::new);
    }

    /// Gives it the CPUs that it has booked with an earlier daemon, if its VMM lives: `living` then
    /// has the groups.
    pub fn adopt_cpus(&self, living: Option<&GroupStock>) {
        let recorded = std::mem::take(&mut lock(&self.live).cpus);
        let group = lock(&self.group).clone().filter(|group| group.has_cpus());
        if let Some(groups) = living
            && (group.is_some() || !recorded.is_empty())
        {
            self.keep_booking(groups.adopt_cpus(group.map(|group| group.number()), &recorded));
        }
    }

    /// The limit of the memory of its control group, RAM included.
    #[must_use]
    pub fn memory_limit_bytes(&self) -> Option<u64> {
        group_limits::memory_limit_bytes(&self.facts.limits, self.facts.memory_bytes)
    }

    /// Bytes of its memory that the kernel cannot reclaim; `None` if it has no control group, or if
    /// the host does not say. Blocks for some microseconds.
    #[must_use]
    pub fn unreclaimable_bytes(&self) -> Option<u64> {
        let group = lock(&self.group).clone()?;
        group.unreclaimable_bytes()
    }

    /// Its control group, for a process that works for it; `None` if it has none, or has ended.
    #[must_use]
    pub fn group(&self) -> Option<Arc<GroupLease>> {
        lock(&self.group).clone()
    }

    /// What its processes have used; `None` if it has no control group. Blocks for some
    /// microseconds.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        // Not under the lock, because it reads files.
        let group = lock(&self.group).clone()?;
        group.usage()
    }

    /// Takes its control group, when its process is gone. The next VM may get it when
    /// it is dropped.
    pub(crate) fn take_group(&self) -> Option<Arc<GroupLease>> {
        lock(&self.group).take()
    }
}
