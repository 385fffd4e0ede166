//! A paused VM runs while it is snapshotted or forked, because its agent takes part in both.

use crate::base::error::Outcome;
use crate::daemon::Daemon;
use crate::model::state::Phase;
use crate::ops::power;
use crate::vm::Vm;
use dayfly_api::types::ErrorCode;
use std::sync::Arc;

/// A VM that was paused, and runs until this is dropped. Then it is paused again.
#[derive(Debug)]
pub(crate) struct Awake {
    daemon: Arc<Daemon>,
    vm: Arc<Vm>,
}

/// Has a paused VM run; `None` if it is not paused. The caller holds the VM's lock `snapshots`.
///
/// # Errors
/// Its VMM refused, or did not answer.
pub(crate) async fn awake(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<Option<Awake>> {
    if vm.phase() != Phase::Paused {
        return Ok(None);
    }
    power::unpause(daemon, vm).await?;
    Ok(Some(Awake { daemon: daemon.clone(), vm: vm.clone() }))
}

impl Drop for Awake {
    fn drop(&mut self) {
        let (daemon, vm) = (self.daemon.clone(), self.vm.clone());
        // A task, because a client that goes away must not leave the VM running.
        self.daemon.undo.spawn(async move {
            loop {
                match power::pause(&daemon, &vm).await {
                    // The snapshot or the fork still has its turn, or the VMM is late.
                    Err(e) if e.0.code == ErrorCode::Timeout && vm.phase().alive() => {}
                    Err(e) if vm.phase().alive() => {
                        tracing::error!(vm = %vm.id, "pausing it again: {e}");
                        return;
                    }
                    _ => return,
                }
            }
        });
    }
}
