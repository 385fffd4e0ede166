//! A VM's control group.

use crate::base::error::{ApiError, Outcome};
use crate::base::groups::GroupLease;
use crate::model::facts::Facts;
use crate::vm::Vm;
use dayfly_host::groups::Usage;
use dayfly_units::sync::lock;
use std::sync::Arc;

impl Vm {
    /// Gives it the control group of its VMM until it ends, and sets its limits. `None`: its VMM is
    /// in the daemon's group. Makes no system call if it has no limits.
    ///
    /// # Errors
    /// A limit cannot be set.
    pub fn keep_group(&self, group: Option<GroupLease>) -> Outcome<()> {
        let Facts { limits, memory_bytes, .. } = &self.facts;
        let limited = match &group {
            Some(group) => group.limit(limits, *memory_bytes),
            None if limits.is_none() => Ok(()),
            None => Err(ApiError::internal(
                "limits: its VMM has no control group; the daemon's log says why",
            )),
        };
        lock(&self.live).group = group.as_ref().map(GroupLease::number);
        *lock(&self.group) = group.map(Arc::new);
        limited
    }

    /// Gives it the control group that it has had from an earlier daemon on, with its limits.
    pub fn adopt_group(&self, group: Option<GroupLease>) {
        *lock(&self.group) = group.map(Arc::new);
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
