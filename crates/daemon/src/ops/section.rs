//! Sections: parts of an operation that run to their end even if the client goes away.
//!
//! A VM's lock is owned by the section that sends commands to the VMM, so a client that goes away
//! does not release it. A VMM that does not answer may still carry out its command, so the section
//! waits for it without limit. The client waits for a limited time.

use crate::base::error::{ApiError, Outcome};
use crate::daemon::Daemon;
use crate::vm::Vm;
use dayfly_api::types::ErrorCode;
use std::time::Duration;
use tokio::time::timeout;

/// Runs `work`, called `what` in errors, as a task. Waits at most `within` for its result.
///
/// # Errors
/// The error of `work`. Or it has not ended in time: it goes on, and its result is dropped.
pub(crate) async fn section<T: Send + 'static>(
    daemon: &Daemon,
    vm: &Vm,
    what: &str,
    within: Duration,
    work: impl Future<Output = Outcome<T>> + Send + 'static,
) -> Outcome<T> {
    match timeout(within, daemon.undo.spawn(work)).await {
        Ok(ended) => ended.unwrap_or_else(|e| {
            Err(ApiError::internal(format_args!("{what} of VM {}: {e}", vm.name)))
        }),
        Err(_) => Err(ApiError::new(
            ErrorCode::Timeout,
            format_args!(
                "VM {}: {what}: expected an answer of its VMM within {} s, got none; this is \
                 settled when the VMM answers, and `dayfly rm --force {}` ends the VM",
                vm.name,
                within.as_secs(),
                vm.name
            ),
        )),
    }
}
