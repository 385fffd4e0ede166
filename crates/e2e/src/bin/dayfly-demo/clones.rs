//! Making clones, asking them, and removing all that was made.

use anyhow::{Context, Result};
use dayfly_api::client::{Client, Connection};
use dayfly_api::types::{
    ConnectRequest, CreateRequest, ErrorCode, NetworkRequest, Snapshot, Source, VmDetails,
};
use dayfly_cli::progress::Steps;
use dayfly_e2e::guest::{self, Sum};
use dayfly_e2e::setup::{self, Host};
use dayfly_units::Name;
use futures::future::join_all;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Barrier;

/// So many guests may be lost to the emulation in one run, and made again; where KVM is the host's own, none.
const MAX_LOST: usize = 3;
/// A demo takes less than this: an older snapshot of one is a leftover.
const STALE_MS: u64 = 60 * 60 * 1000;

/// A clone that has answered.
#[derive(Debug)]
pub struct Clone {
    /// What it was asked.
    pub index: usize,
    /// From the request to the answer.
    pub took: Duration,
    /// The answer.
    pub sum: Sum,
    /// What it weighs after it.
    pub details: VmDetails,
    /// Its VM ends with this connection, however the demo ends.
    pub running: Option<Connection>,
}

/// The daemon, and everything that the demo made in it.
#[derive(Debug)]
pub struct Demo {
    /// The daemon.
    pub host: Host,
    /// What is being done.
    pub steps: Arc<Steps>,
    /// VMs that there may be.
    pub vms: Vec<String>,
    /// Snapshots that there may be, parents first.
    pub snapshots: Vec<Name>,
    /// Guests that the emulation crashed, and that were made again.
    pub lost: usize,
    /// Tells this run's names from another's.
    run: String,
}

impl Demo {
    /// Nothing is made yet.
    pub fn new(host: Host, steps: Arc<Steps>) -> Result<Self> {
        let now = std::time::UNIX_EPOCH.elapsed().context("the clock")?.as_millis();
        let run = format!("{:x}", now & 0xff_ffff_ffff);
        Ok(Self { host, steps, vms: Vec::new(), snapshots: Vec::new(), lost: 0, run })
    }

    /// A name that is this run's own.
    pub fn name(&self, what: &str) -> Result<Name> {
        Ok(format!("demo-{}-{what}", self.run).parse()?)
    }

    /// Whether what failed with `why` was lost to the emulation, and may be made again. QEMU 7.2 crashes guests now and then,
    /// and its own host kernel, when several of its CPUs run them (ARCHITECTURE.md). Each is told and counted.
    ///
    /// # Errors
    /// `why`, where guests run on the host's own KVM, or too many were lost.
    pub fn lost(&mut self, what: &str, why: anyhow::Error) -> Result<()> {
        if self.host.machine.is_none() || self.lost == MAX_LOST {
            return Err(why.context(what.to_owned()));
        }
        self.lost += 1;
        self.steps.say(&format!("{what}: the guest was lost to the emulation, making it again: {why:#}"));
        Ok(())
    }

    /// One clone: asked for, its answer taken, its weight looked at. It stays until [`Demo::remove_vms`].
    pub async fn clone_and_ask(&mut self, snapshot: &Name, index: usize) -> Result<Clone> {
        loop {
            let name = self.name(&format!("one-{index}-{}", self.lost))?;
            self.vms.push(name.to_string());
            let client = &self.host.client;
            let clone = async {
                let (took, sum, running) = ask_a_clone(client, snapshot, name, index).await?;
                let details = client.vm(&running.vm.id.to_string()).await?;
                anyhow::Ok(Clone { index, took, sum, details, running: Some(running) })
            };
            match clone.await {
                Ok(clone) => return Ok(clone),
                Err(why) => self.lost(&format!("clone {index}"), why)?,
            }
        }
    }

    /// Clones asked for at the same moment; also gives the time until the last has answered.
    pub async fn burst(&mut self, snapshot: &Name, count: usize) -> Result<(Vec<Clone>, Duration)> {
        let start = Arc::new(Barrier::new(count + 1));
        let mut tasks = Vec::new();
        for index in 1..=count {
            let name = self.name(&format!("burst-{index}"))?;
            self.vms.push(name.to_string());
            let (client, snapshot, start) = (self.host.client.clone(), snapshot.clone(), Arc::clone(&start));
            tasks.push(tokio::spawn(async move {
                start.wait().await;
                ask_a_clone(&client, &snapshot, name, index).await
            }));
        }
        start.wait().await;
        let begun = Instant::now();
        let answers = join_all(tasks).await;
        let mut took = begun.elapsed();
        let mut answered = Vec::new();
        for (index, answer) in (1..).zip(answers) {
            match answer.context("a task")? {
                Ok(answer) => answered.push((index, answer)),
                Err(why) => {
                    self.lost(&format!("clone {index} of the burst"), why)?;
                    let clone = self.clone_and_ask(snapshot, index).await?;
                    took += clone.took;
                    answered.extend(clone.running.map(|running| (index, (clone.took, clone.sum, running))));
                }
            }
        }
        let mut clones = Vec::new();
        for (index, (took, sum, running)) in answered {
            // All of them are alive: what they share is counted as shared.
            match self.host.client.vm(&running.vm.id.to_string()).await {
                Ok(details) => clones.push(Clone { index, took, sum, details, running: Some(running) }),
                Err(why) => {
                    self.lost(&format!("clone {index} of the burst, after its answer"), why.into())?;
                    clones.push(self.clone_and_ask(snapshot, index).await?);
                }
            }
        }
        Ok((clones, took))
    }

    /// Removes every VM that was made, all at once; one that cannot be removed stays in the list.
    pub async fn remove_vms(&mut self) -> Result<()> {
        let client = &self.host.client;
        let there = client.vms(true).await?;
        self.vms.retain(|vm| there.iter().any(|t| t.name.as_str() == *vm));
        let removals = self.vms.iter().map(|vm| async move {
            match client.remove_vm(vm, true).await {
                // It went by itself, with its connection.
                Err(e) if e.code() == Some(ErrorCode::NotFound) => Ok(()),
                other => other.with_context(|| format!("VM {vm}")),
            }
        });
        let results = join_all(removals).await;
        let mut failed = results.iter().map(Result::is_err);
        self.vms.retain(|_| failed.next().unwrap_or(true));
        results.into_iter().collect()
    }

    /// Removes every VM and snapshot that was made; images and kernels stay for the next time.
    pub async fn remove_everything(&mut self) -> Result<()> {
        self.steps.begin("removing what was made");
        self.remove_vms().await?;
        let mut there: Vec<Snapshot> = self.host.client.snapshots().await?;
        let now = u64::try_from(std::time::UNIX_EPOCH.elapsed().context("the clock")?.as_millis())?;
        // Children first. Those of a demo that was killed go too.
        there.sort_by_key(|s| std::cmp::Reverse(s.created_unix_ms));
        for snapshot in there {
            let stale = snapshot.name.as_str().starts_with("demo-")
                && now.saturating_sub(snapshot.created_unix_ms) > STALE_MS;
            if stale || self.snapshots.contains(&snapshot.name) {
                let removed = self.host.client.remove_snapshot(&snapshot.name).await;
                removed.with_context(|| format!("removing snapshot {}", snapshot.name))?;
            }
        }
        self.snapshots.clear();
        self.steps.end();
        Ok(())
    }
}

/// The measured part: one connection, from the request to the first answer. The one who answers is the Python process that was running
/// when the snapshot was taken, asked over vsock; no process is started for it.
async fn ask_a_clone(
    client: &Client,
    snapshot: &Name,
    name: Name,
    index: usize,
) -> Result<(Duration, Sum, Connection)> {
    let source = Source::Snapshot(snapshot.clone());
    let request = ConnectRequest {
        create: CreateRequest {
            source,
            name: Some(name),
            labels: BTreeMap::new(),
            forks: 0,
            network: NetworkRequest::default(),
        },
        port: guest::PORT,
        keep: false,
    };
    let begun = Instant::now();
    let mut connection = client.run_connected(&request).await?;
    let line = setup::ask(&mut connection, &["sum", &index.to_string()]).await?;
    let took = begun.elapsed();
    let sum = serde_json::from_str(&line).with_context(|| format!("the answer {line:?}"))?;
    Ok((took, sum, connection))
}
