//! What must hold after the daemon was killed and started again.

use crate::guest::{BASE, has_right_content, is_whole, name, snapshot, start_again};
use crate::living::Living;
use crate::operation::Operation;
use crate::testbed::{Testbed, until};
use anyhow::{Context, Result, bail, ensure};
use dayfly_api::types::{ExitKind, Vm, VmState};
use dayfly_store::VmLayer;
use dayfly_vmm::control;
use std::collections::BTreeSet;
use std::path::Path;

/// Checks everything after a kill in `operation`; returns what became of the operation.
pub async fn after(
    bed: &Testbed,
    a: &Living,
    b: Living,
    operation: Operation,
) -> Result<&'static str> {
    a.runs_on(bed).await.context("VM a")?;
    let done = outcome(bed, &b, operation).await.context("the operation")?;
    let b_is_gone = matches!(operation, Operation::Remove | Operation::Expire) && done;
    // The guest that boots again does not write, in another process.
    let b_runs_on = !b_is_gone && operation != Operation::Start;
    if b_runs_on {
        b.runs_on(bed).await.context("VM b")?;
    }
    let saved = async {
        if b_runs_on {
            b.can_be_saved(bed, "of-b").await.context("VM b, saved")?;
            b.can_be_forked(bed).await.context("VM b, forked")?;
            b.runs_on(bed).await.context("VM b, afterwards")?;
        }
        Ok(())
    };
    let saved_a = async { a.can_be_saved(bed, "of-a").await.context("VM a, saved") };
    tokio::try_join!(saved, saved_a)?;
    a.runs_on(bed).await.context("VM a, afterwards")?;
    if !b_is_gone {
        bed.client.remove_vm(&b.word(), true).await?;
    }
    let mut found = Vec::new();
    let nothing = until("nothing is left", async || {
        found = left(bed, a).await?;
        Ok(found.is_empty())
    });
    nothing.await.with_context(|| format!("left: {found:?}"))?;
    Ok(if done { "done" } else { "undone" })
}

/// Whether the operation was done. Removes what it made.
async fn outcome(bed: &Testbed, b: &Living, operation: Operation) -> Result<bool> {
    let vms = bed.client.vms(true).await?;
    let clones: Vec<&Vm> = vms.iter().filter(|vm| vm.forked_from == Some(b.id)).collect();
    let made = bed.client.snapshots().await?.iter().any(|found| found.name.as_str() == "made");
    if made {
        is_whole(bed, "made").await?;
        bed.client.remove_snapshot(&name("made")?).await?;
    }
    for clone in clones.iter().copied().chain(vms.iter().filter(|vm| vm.name.as_str() == "new")) {
        ensure!(clone.state == VmState::Running, "VM {}: is {:?}", clone.name, clone.state);
        has_right_content(bed, clone.id).await?;
        bed.client.remove_vm(&clone.id.to_string(), true).await?;
    }
    let all = |expected: usize| match clones.len() {
        0 => Ok(false),
        got if got == expected => Ok(true),
        got => bail!("clones: expected 0 or {expected}, got {got}"),
    };
    match operation {
        Operation::Create => Ok(vms.iter().any(|vm| vm.name.as_str() == "new")),
        Operation::Fork => all(2),
        // The clones run before the snapshot is stored, as documented.
        Operation::Merge | Operation::ForkAs => all(1),
        Operation::Snapshot | Operation::Bake => Ok(made),
        Operation::RemoveSnapshot => Ok(!made),
        Operation::Pause | Operation::Unpause => {
            let paused = paused(bed, b).await?;
            if paused {
                bed.client.unpause(&b.word()).await?;
            }
            Ok(paused == (operation == Operation::Pause))
        }
        Operation::Remove => {
            let there = vms.iter().find(|vm| vm.id == b.id);
            ensure!(
                there.is_none_or(|vm| vm.state == VmState::Running),
                "VM b, which was being removed: {there:?}"
            );
            Ok(there.is_none())
        }
        Operation::Start => started(bed, b).await,
        Operation::Expire => {
            let ended = async || {
                let exit = bed.client.vm(&b.word()).await?.vm.exit;
                ensure!(exit.as_ref().is_none_or(|exit| exit.reason == ExitKind::Ttl), "{exit:?}");
                Ok(exit.is_some())
            };
            until("VM b has ended", ended).await?;
            bed.client.remove_vm(&b.word(), false).await?;
            Ok(true)
        }
        Operation::Gc => Ok(true),
    }
}

/// Whether VM `b`, which was killed, was started again. If not, it can be; and if so, it can end
/// and start once more.
async fn started(bed: &Testbed, b: &Living) -> Result<bool> {
    let state = b.listed(bed).await?.state;
    let done = match state {
        VmState::Exited => false,
        VmState::Running => {
            bed.client.kill(&b.word()).await?;
            true
        }
        other => bail!("VM b: expected exited or running, got {other:?}"),
    };
    start_again(bed, b.id).await.context("VM b, started after the kill")?;
    snapshot(bed, b.id, "of-b").await.context("VM b, saved")?;
    is_whole(bed, "of-b").await.context("VM b, saved")?;
    bed.client.remove_snapshot(&name("of-b")?).await?;
    Ok(done)
}

/// Whether the VM is paused: its VMM and the daemon have to agree.
async fn paused(bed: &Testbed, b: &Living) -> Result<bool> {
    let mut vmm = control::Client::connect(&bed.of_vm(b.id, "control.sock"), None)?;
    let paused = vmm.status()?.paused;
    let expected = if paused { VmState::Paused } else { VmState::Running };
    until("VM b is listed as it is", async || Ok(b.listed(bed).await?.state == expected)).await?;
    Ok(paused)
}

/// What should not be there when only VM `a` and the snapshot of all VMs are left.
async fn left(bed: &Testbed, a: &Living) -> Result<Vec<String>> {
    let mut left = Vec::new();
    for vm in bed.client.vms(true).await?.into_iter().filter(|vm| vm.id != a.id) {
        left.push(format!("VM {}", vm.name));
    }
    for snapshot in bed.client.snapshots().await?.into_iter().filter(|s| s.name.as_str() != BASE) {
        left.push(format!("snapshot {}", snapshot.name));
    }
    for leak in bed.client.leaks().await? {
        left.push(format!("{}: {}", leak.kind, leak.what));
    }
    for id in bed.processes().into_keys().filter(|id| *id != a.id) {
        left.push(format!("process of VM {id}"));
    }
    let mut look = |folder: &Path, belongs: &dyn Fn(&str) -> bool| -> Result<()> {
        for name in names(folder)?.into_iter().filter(|name| !belongs(name)) {
            left.push(folder.join(name).display().to_string());
        }
        Ok(())
    };
    let (state, run, own) = (bed.state(), bed.run(), a.word());
    look(&state.join("vms"), &|name| name == own)?;
    look(&run.join("vms"), &|name| name == own)?;
    let stage = format!("{}-", bed.pid()?);
    look(&state.join("staging"), &|name| name.starts_with(&stage))?;
    let files = recorded_files(bed, a)?;
    look(&state.join("vms").join(&own), &|name| files.contains(name))?;
    Ok(left)
}

/// The names of the layers' files that the record of a VM names.
fn recorded_files(bed: &Testbed, vm: &Living) -> Result<BTreeSet<String>> {
    let record = std::fs::read(bed.of_vm(vm.id, "vm.json"))?;
    let record: serde_json::Value = serde_json::from_slice(&record)?;
    let mut files = BTreeSet::new();
    for disk in record["live"]["disks"].as_array().context("disks of a record")? {
        let writable: VmLayer = serde_json::from_value(disk["writable"].clone())?;
        files.insert(format!("disk{}.{}.data", writable.disk, writable.number));
        for layer in disk["layers"].as_array().context("layers of a record")? {
            if let Ok(layer) = serde_json::from_value::<VmLayer>(layer["frozen"].clone()) {
                let stem = format!("disk{}.{}", layer.disk, layer.number);
                files.extend([format!("{stem}.data"), format!("{stem}.map")]);
            }
        }
    }
    Ok(files)
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}
