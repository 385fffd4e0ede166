//! Creates clones, sends them requests, and removes everything that the demo created.

use anyhow::{Context, Result};
use dayfly_api::client::{Client, Connection};
use dayfly_api::types::{
    ConnectRequest, CreateRequest, ErrorCode, Lifetime, NetworkRequest, Snapshot, Source, VmDetails,
};
use dayfly_cli::progress::Steps;
use dayfly_e2e::guest::{self, Sum};
use dayfly_e2e::setup::{self, Host};
use dayfly_units::{Name, VmName};
use futures::future::join_all;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Barrier;

/// Guests that the emulation may crash in one run; each is created again. Natively none may crash.
const MAX_LOST: usize = 3;
/// A demo takes less time than this, so an older snapshot of a demo is a leftover.
const STALE_MS: u64 = 60 * 60 * 1000;

/// A clone that has answered.
#[derive(Debug)]
pub struct Clone {
    /// The number in its request.
    pub index: usize,
    /// From the request to the answer.
    pub took: Duration,
    /// The answer.
    pub sum: Sum,
    /// The VM's description after the answer, with its memory and disk.
    pub details: VmDetails,
    /// The VM ends with this connection, also if the demo crashes.
    pub running: Option<Connection>,
}

/// The daemon, and everything that the demo made in it.
#[derive(Debug)]
pub struct Demo {
    /// The daemon.
    pub host: Host,
    /// Shows the current step.
    pub steps: Arc<Steps>,
    /// VMs that may exist.
    pub vms: Vec<String>,
    /// Snapshots that may exist, parents first.
    pub snapshots: Vec<Name>,
    /// Guests that the emulation crashed and that were created again.
    pub lost: usize,
    /// In all names of this run, so that they differ from another run's.
    run: String,
}

impl Demo {
    /// A demo that has created nothing yet.
    pub fn new(host: Host, steps: Arc<Steps>) -> Result<Self> {
        let now = std::time::UNIX_EPOCH.elapsed().context("the clock")?.as_millis();
        let run = format!("{:x}", now & 0xff_ffff_ffff);
        Ok(Self { host, steps, vms: Vec::new(), snapshots: Vec::new(), lost: 0, run })
    }

    /// A name that no other run uses.
    pub fn name(&self, what: &str) -> Result<VmName> {
        Ok(format!("demo-{}-{what}", self.run).parse()?)
    }

    /// Counts and reports a guest that failed with `why` and that the caller may create again.
    /// QEMU 7.2 now and then crashes guests and its own guest kernel if several of its CPUs run
    /// them.
    ///
    /// # Errors
    /// `why`, if guests run on the host's KVM, or too many were lost.
    pub fn lost(&mut self, what: &str, why: anyhow::Error) -> Result<()> {
        if self.host.machine.is_none() || self.lost == MAX_LOST {
            return Err(why.context(what.to_owned()));
        }
        self.lost += 1;
        self.steps
            .say(&format!("{what}: the guest was lost to the emulation, making it again: {why:#}"));
        Ok(())
    }

    /// Creates one clone, takes its answer, and reads its memory and disk use. The clone stays
    /// until [`Demo::remove_vms`].
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

    /// Creates clones at the same moment; also returns the time until the last has answered.
    pub async fn burst(&mut self, snapshot: &Name, count: usize) -> Result<(Vec<Clone>, Duration)> {
        let start = Arc::new(Barrier::new(count + 1));
        let mut tasks = Vec::new();
        for index in 1..=count {
            let name = self.name(&format!("burst-{index}"))?;
            self.vms.push(name.to_string());
            let (client, snapshot, start) =
                (self.host.client.clone(), snapshot.clone(), Arc::clone(&start));
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
                    answered.extend(
                        clone.running.map(|running| (index, (clone.took, clone.sum, running))),
                    );
                }
            }
        }
        let mut clones = Vec::new();
        for (index, (took, sum, running)) in answered {
            // Asked only now that all clones run, so that shared memory counts as shared.
            match self.host.client.vm(&running.vm.id.to_string()).await {
                Ok(details) => {
                    clones.push(Clone { index, took, sum, details, running: Some(running) })
                }
                Err(why) => {
                    self.lost(
                        &format!("clone {index} of the burst, after its answer"),
                        why.into(),
                    )?;
                    clones.push(self.clone_and_ask(snapshot, index).await?);
                }
            }
        }
        Ok((clones, took))
    }

    /// Removes every VM of this demo, all at once. A VM that cannot be removed stays in the list.
    pub async fn remove_vms(&mut self) -> Result<()> {
        let client = &self.host.client;
        let there = client.vms(true).await?;
        self.vms.retain(|vm| there.iter().any(|t| t.name.as_str() == *vm));
        let removals = self.vms.iter().map(|vm| async move {
            match client.remove_vm(vm, true).await {
                // The VM has ended with its connection.
                Err(e) if e.code() == Some(ErrorCode::NotFound) => Ok(()),
                other => other.with_context(|| format!("VM {vm}")),
            }
        });
        let results = join_all(removals).await;
        let mut failed = results.iter().map(Result::is_err);
        self.vms.retain(|_| failed.next().unwrap_or(true));
        results.into_iter().collect()
    }

    /// Removes every VM and snapshot of this demo. Images and kernels stay for the next run.
    pub async fn remove_everything(&mut self) -> Result<()> {
        self.steps.begin("removing what was made");
        self.remove_vms().await?;
        let mut there: Vec<Snapshot> = self.host.client.snapshots().await?;
        let now = u64::try_from(std::time::UNIX_EPOCH.elapsed().context("the clock")?.as_millis())?;
        // Children first. Snapshots of a demo that was killed are removed too.
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

/// The measured part: one connection, from the request to the first answer. The Python process that
/// was running when the snapshot was taken answers over vsock; no process is started.
async fn ask_a_clone(
    client: &Client,
    snapshot: &Name,
    name: VmName,
    index: usize,
) -> Result<(Duration, Sum, Connection)> {
    let source = Source::Snapshot(snapshot.clone());
    let request = ConnectRequest {
        create: CreateRequest {
            source,
            name: Some(name),
            labels: BTreeMap::new(),
            forks: 0,
            lifetime: Lifetime::UNLIMITED,
            volumes: Vec::new(),
            limits: Default::default(),
            vcpus: None,
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
