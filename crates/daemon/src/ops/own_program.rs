//! VMs that end with their program: `run -d --rm`.

use crate::daemon::Daemon;
use crate::ops::{programs, remove};
use crate::vm::Vm;
use dayfly_api::types::ErrorCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Interval of the attempts to reach an agent that does not serve, as while the VM is paused.
const AGAIN: Duration = Duration::from_secs(1);

/// The longest time for which a removal waits for clients that follow the program.
const REST: Duration = Duration::from_secs(10);

/// Starts the task that removes the VM when its program has ended, if it is such a VM.
pub fn watch(daemon: &Arc<Daemon>, vm: &Arc<Vm>) {
    if let Some(program) = vm.live().program.filter(|_| vm.facts.auto_remove) {
        let (daemon, vm) = (daemon.clone(), vm.clone());
        tokio::spawn(async move {
            tokio::select! {
                ended = outlast(&daemon, &vm, &program) => if !ended { return },
                () = vm.wait_gone() => return,
                () = daemon.stop.cancelled() => return,
            }
            remove_when_read(&daemon, &vm).await;
        });
    }
}

/// Removes a VM whose program has ended. Clients that follow the program get the rest of its output
/// and its exit code before, if they read it in time.
pub(super) async fn remove_when_read(daemon: &Arc<Daemon>, vm: &Arc<Vm>) {
    let _ = timeout(REST, vm.followers.write()).await;
    if let Err(e) = remove::remove(daemon, vm).await {
        tracing::error!(vm = %vm.id, "removing it after its program: {e}");
    }
}

/// Waits for the end of the program; `false` if that cannot be known.
async fn outlast(daemon: &Daemon, vm: &Vm, program: &str) -> bool {
    loop {
        match programs::wait(daemon, vm, program).await {
            Ok(_) => return true,
            Err(e) if e.0.code == ErrorCode::NotFound => {
                tracing::warn!(vm = %vm.id, "it is not removed with its program: {e}");
                return false;
            }
            Err(e) => tracing::debug!(vm = %vm.id, "waiting for its program: {e}"),
        }
        tokio::time::sleep(AGAIN).await;
    }
}
