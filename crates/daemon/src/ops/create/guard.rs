//! Ownership of a VM while it is created.

use crate::base::error::{ApiError, Outcome};
use crate::daemon::Daemon;
use crate::ops::remove;
use crate::vm::Vm;
use crate::vm::batch::Batch;
use crate::vmm::agent_link::AgentLink;
use crate::vmm::pool::Lasting;
use std::sync::Arc;

/// A new VM that has no owner yet; dropping the guard removes the VM.
#[derive(Debug)]
pub struct VmGuard {
    daemon: Arc<Daemon>,
    vm: Option<Arc<Vm>>,
    pub(super) next: Option<Next>,
    /// Dropped after the VM was removed, so that a daemon that ends before has it removed.
    batch: Option<Arc<Batch>>,
}

/// The pending reply to [`Order::next`](super::Order::next).
#[derive(Debug)]
pub struct Next {
    /// The link from which the reply is read.
    pub link: AgentLink,
    /// Pauses the pool; to be dropped with the first bytes of the reply.
    pub lasting: Lasting,
}

impl VmGuard {
    /// A guard that removes `vm` when it is dropped.
    pub(super) const fn new(daemon: Arc<Daemon>, vm: Arc<Vm>, batch: Option<Arc<Batch>>) -> Self {
        Self { daemon, vm: Some(vm), next: None, batch }
    }

    /// The pending reply to [`Order::next`](super::Order::next), once.
    pub fn take_next(&mut self) -> Option<Next> {
        self.next.take()
    }

    /// The new VM.
    ///
    /// # Panics
    /// Never: only [`Self::keep`] and [`Self::end`], which consume the guard, take the VM out.
    #[must_use]
    #[expect(
        clippy::expect_used,
        reason = "locally proven: `vm` is taken by `keep` and `drop` alone"
    )]
    pub fn vm(&self) -> Arc<Vm> {
        self.vm.clone().expect("a guard has its VM until it is consumed")
    }

    /// Ends the batch of the VM, if it has one: the VM stays, also if the daemon ends now.
    ///
    /// # Errors
    /// The batch cannot be ended; the VM is removed with the guard, or by the next daemon.
    pub fn commit(&self) -> Outcome<()> {
        let committed = self.batch.as_ref().map_or(Ok(()), |batch| batch.commit());
        committed.map_err(ApiError::internal)
    }

    /// Releases the VM from the guard: it lives on.
    #[must_use]
    pub fn keep(mut self) -> Arc<Vm> {
        let vm = self.vm();
        self.vm = None;
        vm
    }

    /// Removes the VM, and waits until nothing of it is left.
    ///
    /// # Errors
    /// Its process survives SIGKILL, or a file cannot be removed.
    pub async fn end(mut self) -> Outcome<()> {
        let vm = self.vm();
        remove::remove(&self.daemon, &vm).await?;
        self.vm = None;
        Ok(())
    }
}

impl Drop for VmGuard {
    fn drop(&mut self) {
        if let Some(vm) = self.vm.take() {
            let (daemon, batch) = (self.daemon.clone(), self.batch.take());
            let task = self.daemon.undo.clone();
            task.spawn(async move {
                if let Err(e) = remove::remove(&daemon, &vm).await {
                    tracing::error!("removing VM {}: {e}", vm.id);
                }
                drop(batch);
            });
        }
    }
}
