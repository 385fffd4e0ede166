//! Why a VM ended: the kernel took it for its memory, or a program killed it.

use crate::guest::{self, create, create_paused};
use crate::living::Living;
use crate::testbed::{Testbed, WITHIN, until};
use anyhow::{Context, Result, ensure};
use dayfly_api::types::{ExitKind, VmExit};
use dayfly_host::process::Process;
use dayfly_vmm::control;
use std::path::{Path, PathBuf};

/// A cgroup whose processes may take little memory; removed when dropped.
struct Group(PathBuf);

impl Group {
    fn new(bytes: u64) -> Result<Self> {
        let name = format!("dayfly-test-{}", std::process::id());
        let first = Path::new("/sys/fs/cgroup/memory");
        let (parent, limit) = if first.is_dir() {
            (first, "memory.limit_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup"), "memory.max")
        };
        let group = Self(parent.join(name));
        // A killed run of this pid may have left it.
        let _not_there = std::fs::remove_dir(&group.0);
        std::fs::create_dir(&group.0).with_context(|| group.0.display().to_string())?;
        std::fs::write(group.0.join(limit), bytes.to_string()).context(limit)?;
        Ok(group)
    }

    fn add(&self, pid: u32) -> Result<()> {
        Ok(std::fs::write(self.0.join("cgroup.procs"), pid.to_string())?)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Waits for the end of a VM.
async fn end(bed: &Testbed, vm: &Living) -> Result<VmExit> {
    let mut exit = None;
    until("the VM has ended", async || {
        exit = vm.listed(bed).await?.exit;
        Ok(exit.is_some())
    })
    .await?;
    exit.context("it has ended")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_the_kernel_took_for_its_memory_differs_from_one_that_was_killed() -> Result<()> {
    let mut bed = guest::testbed().await?;
    let process = |bed: &Testbed, vm: &Living| {
        let found = bed.processes().get(&vm.id).copied();
        found.context("a VM without a VMM")
    };
    let killed = Living::new(create(&bed, "killed").await?, &bed)?;
    let id = process(&bed, &killed)?;
    Process::open(id)?.context("it lives")?.kill()?;
    let exit = end(&bed, &killed).await?;
    ensure!(exit.reason == ExitKind::Lost, "{exit:?}");

    // Its guest writes to ever more pages, which are charged to its group from now on.
    let group = Group::new(1 << 20)?;
    let taken = Living::new(create_paused(&bed, "taken").await?, &bed)?;
    let id = process(&bed, &taken)?;
    group.add(id.pid)?;
    let _ended_before_its_answer = bed.client.unpause(&taken.word()).await;
    let exit = end(&bed, &taken).await?;
    ensure!(exit.reason == ExitKind::Memory, "{exit:?}");
    let named = format!("Killed process {} ", id.pid);
    ensure!(exit.message.contains(&named) && exit.message.contains("--overcommit"), "{exit:?}");
    // The next daemon says the same of a VM that ended while there was none.
    let unseen = Living::new(create_paused(&bed, "unseen").await?, &bed)?;
    let id = process(&bed, &unseen)?;
    bed.kill()?;
    group.add(id.pid)?;
    let mut vmm = control::Client::connect(&bed.of_vm(unseen.id, "control.sock"), Some(WITHIN))?;
    let _ended_before_its_answer = vmm.resume();
    until("the VMM has ended", async || Ok(!bed.processes().contains_key(&unseen.id))).await?;
    bed.start().await?;
    let exit = end(&bed, &unseen).await?;
    ensure!(exit.reason == ExitKind::Memory, "{exit:?}");
    drop(group);
    bed.stop()
}
