//! Guests: programs in them, bakes, snapshots and clones.

use super::place::Stock;
use crate::prelude::*;
use crate::requests::{MAX_OUTPUT, create, gone, made};
use dayfly_api::agent::ExecSpec;
use dayfly_api::client::Client;
use dayfly_api::types::{BakeRequest, BootSource, Snapshot, SnapshotRequest, Source};
use dayfly_e2e::guest::script;
use dayfly_units::CpuModel;
use futures::future::try_join_all;
use serde::de::DeserializeOwned;

/// The label of all VMs of these benchmarks.
pub const LABEL: &str = "dayfly.bench";
/// No request takes longer.
const TIMEOUT: Duration = Duration::from_secs(1800);

impl Stock {
    /// A VM that boots `image`.
    pub async fn boot(&self, image: &Name, memory_bytes: u64) -> Result<VmId> {
        let (image, kernel) = (image.clone(), Some(self.kernel.clone()));
        let boot = BootSource {
            image,
            kernel,
            memory_bytes,
            vcpus: 1,
            init: None,
            cpu_model: CpuModel::Host,
        };
        self.create(Source::Boot(boot)).await
    }

    /// A clone.
    pub async fn clone_of(&self, snapshot: &Name) -> Result<VmId> {
        self.create(Source::Snapshot(snapshot.clone())).await
    }

    async fn create(&self, source: Source) -> Result<VmId> {
        let request = create(source, &[LABEL]);
        timed(async { Ok(self.client.create(&request).await?.id) }).await
    }

    /// What a text for /bin/sh writes in `vm`.
    ///
    /// # Errors
    /// When it fails.
    pub async fn sh(&self, vm: VmId, text: &str, words: &[&str]) -> Result<String> {
        timed(async {
            let exec = self.client.exec(&vm.to_string(), &script(text, words)).await?;
            let done = exec.finish(MAX_OUTPUT).await?;
            let [out, err] = [&done.stdout, &done.stderr].map(|text| String::from_utf8_lossy(text));
            ensure!(done.exit.code == Some(0), "in the guest: {:?}: {out}{err}", done.exit);
            Ok(out.into_owned())
        })
        .await
    }

    /// What `dayfly-witness` with `words` reports in `vm`.
    pub async fn witness<T: DeserializeOwned>(&self, vm: VmId, words: &str) -> Result<T> {
        reported(&self.sh(vm, &format!("dayfly-witness {words}"), &[]).await?)
            .context(words.to_owned())
    }

    /// A snapshot of `vm`, which goes on.
    pub async fn snapshot(&self, vm: VmId, name: &Name) -> Result<Snapshot> {
        let request = SnapshotRequest { name: name.clone() };
        let stream = async {
            Ok(made(self.client.snapshot_vm(&vm.to_string(), &request).await?).await?.snapshot)
        };
        timed(stream).await
    }

    /// A snapshot of a new VM in which `warmup` has run, and what that wrote; clones play
    /// `recording` before it is stored.
    pub async fn bake(
        &self,
        image: &Name,
        name: &Name,
        memory_bytes: u64,
        warmup: ExecSpec,
        recording: Option<ExecSpec>,
    ) -> Result<(Snapshot, String)> {
        let request = BakeRequest {
            image: image.clone(),
            name: name.clone(),
            kernel: Some(self.kernel.clone()),
            memory_bytes,
            vcpus: 1,
            cpu_model: CpuModel::Host,
            warmup: Some(warmup),
            recording,
            init: None,
            egress: None,
        };
        let made = timed(async { made(self.client.bake(&request).await?).await }).await?;
        Ok((made.snapshot, made.output))
    }

    /// Removes every VM of these benchmarks.
    pub async fn remove_vms(&self) -> Result<()> {
        remove_vms(&self.client).await
    }

    /// Removes a snapshot, if it is there, and with it the pages that only it needs.
    pub async fn remove_snapshot(&self, name: &Name) -> Result<()> {
        gone(self.client.remove_snapshot(name).await)
    }
}

/// The last line of JSON that is a `T`.
pub fn reported<T: DeserializeOwned>(said: &str) -> Result<T> {
    let found = said.lines().rev().find_map(|line| serde_json::from_str(line.trim()).ok());
    found.with_context(|| format!("expected a line of dayfly-witness, got {said:?}"))
}

/// Removes every VM of these benchmarks, all at once.
pub async fn remove_vms(client: &Client) -> Result<()> {
    let ours = client.vms(true).await?.into_iter().filter(|vm| vm.labels.contains_key(LABEL));
    let removals = ours.map(|vm| async move {
        let removed = gone(client.remove_vm(&vm.id.to_string(), true).await);
        removed.with_context(|| format!("removing VM {}", vm.id))
    });
    try_join_all(removals).await.map(drop)
}

async fn timed<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(TIMEOUT, work).await.context("waiting for a guest")?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_witness_is_found_among_other_lines() {
        let said = "starting\n{\"programs\":3}\n[8192]\nmore\n";
        assert_eq!(reported::<Vec<u64>>(said).expect("a line"), [8192]);
        assert!(reported::<Vec<u64>>("nothing").is_err());
    }
}
