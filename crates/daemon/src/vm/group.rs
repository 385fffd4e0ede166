//! A VM's control group, from the start of its VMM until its end: its limits, its bill, and what
//! other modules ask of it. The groups themselves are made in [`crate::base::groups`].

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::group_limits;
use crate::base::groups::{GroupLease, GroupStock};
use crate::model::facts::Facts;
use crate::model::live::VmGroup;
use crate::vm::Vm;
use crate::vm::record::Record;
use dayfly_host::groups::Usage;
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

    /// Limits its CPU time, if that was asked for, now that its guest is ready.
    ///
    /// # Errors
    /// The limit cannot be set.
    pub async fn cap_cpu(&self) -> Outcome<()> {
        let limits = self.facts.limits;
        if limits.cpu_max_millicpus.is_none() {
            return Ok(());
        }
        let Some(group) = lock(&self.group).clone() else { return Ok(()) };
        // The kernel waits for other changes of such limits, and for all CPUs at the first one.
        blocking(move || group.cap(&limits)).await
    }

    /// Takes the limit of its CPU time away, so that it ends quickly.
    pub(crate) fn lift_cap(&self) {
        if self.facts.limits.cpu_max_millicpus.is_some()
            && let Some(group) = lock(&self.group).clone()
        {
            group.lift_cap();
        }
    }

    /// Gives it the control group that it has had from an earlier daemon on, with its limits.
    pub fn adopt_group(&self, group: Option<GroupLease>) {
        *lock(&self.group) = group.map(Arc::new);
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
