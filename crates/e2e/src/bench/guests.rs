//! Guests: programs in them, bakes, snapshots and clones; and what is done about those that the emulation loses.

use crate::guest::shell;
use anyhow::{Context, Result, bail, ensure};
use dayfly_api::agent::ExecSpec;
use dayfly_api::client::{Client, ProgressStream};
use dayfly_api::types::{
    BakeRequest, BootSource, CreateRequest, ErrorCode, NetworkRequest, Progress, Snapshot, SnapshotRequest,
    Source,
};
use dayfly_units::{Name, VmId};
use std::time::Duration;

/// The label of all VMs of ours.
const LABEL: &str = "dayfly.bench";
/// So much output of a program is kept.
const CAP: usize = 1 << 20;
/// Nothing of ours takes longer.
const PATIENCE: Duration = Duration::from_secs(1800);

/// How guests are made.
#[derive(Debug, Clone)]
pub struct Guests {
    /// The daemon.
    pub client: Client,
    /// The guests' kernel.
    pub kernel: Name,
    /// Whether KVM is emulated, so that guests may be lost (ARCHITECTURE.md).
    pub emulated: bool,
}

impl Guests {
    /// A VM that boots `image`.
    pub async fn boot(&self, image: &Name, memory_bytes: u64) -> Result<VmId> {
        let kernel = Some(self.kernel.clone());
        self.create(Source::Boot(BootSource {
            image: image.clone(),
            kernel,
            memory_bytes,
            vcpus: 1,
            init: None,
        }))
        .await
    }

    /// A clone.
    pub async fn clone_of(&self, snapshot: &Name) -> Result<VmId> {
        self.create(Source::Snapshot(snapshot.clone())).await
    }

    async fn create(&self, source: Source) -> Result<VmId> {
        let labels = [(LABEL.to_owned(), String::new())].into();
        let request =
            CreateRequest { source, name: None, labels, forks: 0, network: NetworkRequest::default() };
        Ok(timed(async { Ok(self.client.create(&request).await?) }).await?.id)
    }

    /// What a text for /bin/sh writes in `vm`.
    ///
    /// # Errors
    /// When it fails.
    pub async fn sh(&self, vm: VmId, text: &str, words: &[&str]) -> Result<String> {
        timed(async {
            let exec = self.client.exec(&vm.to_string(), &shell(text, words)).await?;
            let done = exec.finish(CAP).await?;
            let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
            ensure!(done.exit.code == Some(0), "in the guest: {:?}: {out}{err}", done.exit);
            Ok(out.into_owned())
        })
        .await
    }

    /// A snapshot of `vm`, which goes on.
    pub async fn snapshot(&self, vm: VmId, name: &Name) -> Result<Snapshot> {
        let request = SnapshotRequest { name: name.clone() };
        timed(async { Ok(follow(self.client.snapshot_vm(&vm.to_string(), &request).await?).await?.0) }).await
    }

    /// A snapshot of a new VM in which `warmup` has run, and what that wrote; clones play `rehearsal` before it is stored.
    pub async fn bake(
        &self,
        image: &Name,
        name: &Name,
        memory_bytes: u64,
        warmup: ExecSpec,
        rehearsal: Option<ExecSpec>,
    ) -> Result<(Snapshot, String)> {
        let request = BakeRequest {
            image: image.clone(),
            name: name.clone(),
            kernel: Some(self.kernel.clone()),
            memory_bytes,
            vcpus: 1,
            warmup: Some(warmup),
            rehearsal,
            init: None,
        };
        timed(async { follow(self.client.bake(&request).await?).await }).await
    }

    /// Removes every VM of this benchmark.
    pub async fn remove_vms(&self) -> Result<()> {
        for vm in self.client.vms(true).await?.iter().filter(|vm| vm.labels.contains_key(LABEL)) {
            gone(self.client.remove_vm(&vm.id.to_string(), true).await)?;
        }
        Ok(())
    }

    /// Removes a snapshot, if it is there, and with it the pages that only it needs.
    pub async fn remove_snapshot(&self, name: &Name) -> Result<()> {
        gone(self.client.remove_snapshot(name).await)
    }
}

fn gone(result: std::result::Result<(), dayfly_api::client::ClientError>) -> Result<()> {
    match result {
        Err(e) if e.code() == Some(ErrorCode::NotFound) => Ok(()),
        other => Ok(other?),
    }
}

async fn timed<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(PATIENCE, work).await.context("waiting for a guest")?
}

async fn follow(mut stream: ProgressStream) -> Result<(Snapshot, String)> {
    let mut said = String::new();
    while let Some(progress) = stream.next().await? {
        match progress {
            Progress::Output { text } if said.len() < CAP => said.push_str(&text),
            Progress::Snapshot(snapshot) => return Ok((*snapshot, said)),
            Progress::Failed(error) => bail!("{}: {said}", error.message),
            _ => {}
        }
    }
    bail!("the daemon ended before it was done")
}
