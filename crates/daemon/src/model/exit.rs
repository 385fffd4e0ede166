//! Exit records made by the daemon.

use crate::base::time::unix_ms;
use dayfly_api::types::{self, VmExit};

/// An exit for this reason at the current time.
#[must_use]
pub fn exit_now(reason: types::ExitKind, message: impl Into<String>) -> VmExit {
    let (usage, disk_traffic, net_traffic) = (None, Vec::new(), None);
    let (message, at_unix_ms) = (message.into(), unix_ms());
    VmExit { reason, message, at_unix_ms, usage, disk_traffic, net_traffic }
}
