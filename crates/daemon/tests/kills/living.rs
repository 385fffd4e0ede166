//! A VM that has to live on, and what it must still be able to do.

use crate::guest::{has_right_content, is_whole, name, snapshot};
use crate::testbed::{Testbed, until};
use anyhow::{Context, Result, ensure};
use dayfly_api::types::{Vm, VmState};
use dayfly_host::process::ProcessId;
use dayfly_units::VmId;
use std::time::SystemTime;

/// A VM that has to live on.
#[derive(Debug)]
pub struct Living {
    pub id: VmId,
    process: ProcessId,
}

impl Living {
    pub fn new(vm: Vm, bed: &Testbed) -> Result<Self> {
        let process = bed.processes().get(&vm.id).copied().context("a VM without a VMM")?;
        Ok(Self { id: vm.id, process })
    }

    /// The VM in requests.
    pub fn word(&self) -> String {
        self.id.to_string()
    }

    /// Checks that the VM runs on in its process, and that its guest writes.
    pub async fn runs_on(&self, bed: &Testbed) -> Result<()> {
        self.lives(bed)?;
        // A new daemon asks the VMM first.
        until("it is listed as running", async || {
            let vm = self.listed(bed).await?;
            ensure!(vm.state != VmState::Exited, "it has ended: {:?}", vm.exit);
            Ok(vm.state == VmState::Running)
        })
        .await?;
        let before = self.last_write(bed)?;
        until("its guest writes", async || Ok(self.last_write(bed)? > before)).await?;
        self.lives(bed)
    }

    /// The VM as it is listed.
    pub async fn listed(&self, bed: &Testbed) -> Result<Vm> {
        let vms = bed.client.vms(true).await?;
        vms.into_iter().find(|vm| vm.id == self.id).context("it is not listed")
    }

    fn lives(&self, bed: &Testbed) -> Result<()> {
        let found = bed.processes().get(&self.id).copied();
        ensure!(found == Some(self.process), "its VMM: expected {:?}, got {found:?}", self.process);
        Ok(())
    }

    /// When its guest last wrote to its disk.
    fn last_write(&self, bed: &Testbed) -> Result<SystemTime> {
        let folder = bed.state().join(format!("vms/{}", self.id));
        let mut last = SystemTime::UNIX_EPOCH;
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            // A layer may be removed meanwhile.
            if path.extension().is_some_and(|ending| ending == "data")
                && let Ok(found) = std::fs::metadata(&path)
            {
                last = last.max(found.modified()?);
            }
        }
        Ok(last)
    }

    /// Checks that the VM can be saved, and that a clone of the snapshot has the right content.
    pub async fn can_be_saved(&self, bed: &Testbed, called: &str) -> Result<()> {
        snapshot(bed, self.id, called).await?;
        is_whole(bed, called).await?;
        bed.client.remove_snapshot(&name(called)?).await?;
        Ok(())
    }

    /// Checks that the VM can be forked, and that its clone has the right content.
    pub async fn can_be_forked(&self, bed: &Testbed) -> Result<()> {
        let request = serde_json::from_str("{}")?;
        let forked = bed.client.fork(&self.word(), &request).await.context("a fork")?;
        for clone in forked.items {
            has_right_content(bed, clone.id).await?;
            bed.client.remove_vm(&clone.id.to_string(), true).await?;
        }
        Ok(())
    }
}
