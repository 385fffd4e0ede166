//! Exit records made by the daemon.

use crate::base::time::unix_ms;
use dayfly_api::types::{self, VmExit};

/// An exit for this reason at the current time.
#[must_use]
pub fn exit_now(reason: types::ExitKind, message: impl Into<String>) -> VmExit {
    VmExit { reason, message: message.into(), at_unix_ms: unix_ms(), usage: None }
}
