//! One VM and the first answer of a program in it, and what is done about guests that the emulation loses.

use anyhow::{Context, Result, ensure};
use dayfly_api::agent::ExecSpec;
use dayfly_api::client::{Client, ExecEvent};
use dayfly_api::types::{CreateRequest, ErrorCode, NetworkRequest, RunRequest, Source};
use dayfly_cli::progress::Steps;
use dayfly_units::{Name, VmId};
use futures::future::try_join_all;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// The label of all VMs of ours.
const LABEL: &str = "dayfly.bench";
/// The snapshot of ours.
pub const SNAPSHOT: &str = "bench-birth-linux";
/// What the program says.
const SAID: &str = "here";
/// So many guests may be lost to the emulation (about one clone in a hundred where the machine has two CPUs); natively, none.
const MAX_LOST: usize = 6;
/// A guest that has not answered by then is lost.
const PATIENCE: Duration = Duration::from_secs(60);

/// The program that is to answer: a file of Debian's, linked dynamically as most are.
pub fn program() -> ExecSpec {
    ExecSpec { argv: vec!["/bin/echo".into(), SAID.into()], ..ExecSpec::default() }
}

/// The name of our snapshot.
pub fn snapshot() -> Result<Name> {
    Ok(SNAPSHOT.parse()?)
}

/// A VM whose program has answered.
#[derive(Debug)]
pub struct Answer {
    /// It lives on.
    pub vm: VmId,
    /// From the request until the client knew that the program runs.
    pub started: Duration,
    /// … until it had what the program said.
    pub said: Duration,
    /// … until it had the program's exit.
    pub took: Duration,
}

/// The daemon, and what became of its guests.
#[derive(Debug)]
pub struct Guests {
    /// The daemon.
    pub client: Client,
    /// What is being done.
    pub steps: Arc<Steps>,
    /// Guests that the emulation crashed, and that were made again.
    pub lost: usize,
    emulated: bool,
}

impl Guests {
    /// None yet. `emulated`: KVM is not the host's own, so guests may be lost.
    pub fn new(client: Client, steps: Arc<Steps>, emulated: bool) -> Self {
        Self { client, steps, lost: 0, emulated }
    }

    /// Whether what failed with `why` was lost to the emulation (ARCHITECTURE.md), and may be made again. Each is told and counted.
    ///
    /// # Errors
    /// `why`, where guests run on the host's own KVM, or too many were lost.
    pub fn lost(&mut self, what: &str, why: anyhow::Error) -> Result<()> {
        if !self.emulated || self.lost == MAX_LOST {
            return Err(why.context(what.to_owned()));
        }
        self.lost += 1;
        self.steps.say(&format!("{what}: the guest was lost to the emulation, making it again: {why:#}"));
        Ok(())
    }

    /// The first answer of a VM from `source`; one that is lost is made again.
    pub async fn answer(&mut self, what: &str, source: &Source) -> Result<Answer> {
        loop {
            match first_answer(&self.client, source.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(why) => self.lost(what, why)?,
            }
        }
    }

    /// The phases of a VM's start, in microseconds since its daemon had the request.
    pub async fn timeline(&self, vm: VmId) -> Result<Vec<(String, u64)>> {
        Ok(self.client.vm(&vm.to_string()).await?.timeline)
    }

    /// VMMs that the daemon has made ahead of demand.
    pub async fn waiting(&self) -> Result<usize> {
        let text = metrics(self.client.socket()).await.context("the daemon's metrics")?;
        let value = text.lines().find_map(|line| line.strip_prefix("dayfly_waiting "));
        value.and_then(|value| value.trim().parse().ok()).context("dayfly_waiting in the daemon's metrics")
    }
}

/// The measured part. The VM is kept: its timeline is asked for when nothing is measured any more.
pub async fn first_answer(client: &Client, source: Source) -> Result<Answer> {
    let labels = [(LABEL.to_owned(), SNAPSHOT.to_owned())].into();
    let create = CreateRequest { source, name: None, labels, forks: 0, network: NetworkRequest::default() };
    let request = RunRequest { create, exec: program(), keep: true };
    let begun = Instant::now();
    let measured = async {
        let mut exec = client.run(&request).await?;
        let started = begun.elapsed();
        let (mut stdout, mut said) = (Vec::new(), None);
        loop {
            match exec.output.next().await? {
                ExecEvent::Stdout(bytes) => {
                    said.get_or_insert_with(|| begun.elapsed());
                    stdout.extend_from_slice(&bytes);
                }
                ExecEvent::Stderr(_) => {}
                ExecEvent::Exit(exit) => {
                    let took = begun.elapsed();
                    let right = exit.code == Some(0) && stdout.strip_suffix(b"\n") == Some(SAID.as_bytes());
                    ensure!(right, "the program said {:?}: {exit:?}", String::from_utf8_lossy(&stdout));
                    return Ok(Answer { vm: exec.vm.id, started, said: said.unwrap_or(took), took });
                }
            }
        }
    };
    tokio::time::timeout(PATIENCE, measured).await.context("waiting for the first answer")?
}

/// Removes every VM and the snapshot of this benchmark, this run's or an interrupted one's.
pub async fn remove_all(client: &Client) -> Result<()> {
    remove_vms(client).await?;
    match client.remove_snapshot(&snapshot()?).await {
        Err(e) if e.code() == Some(ErrorCode::NotFound) => Ok(()),
        other => other.context("removing the snapshot"),
    }
}

/// Removes every VM of this benchmark, all at once.
pub async fn remove_vms(client: &Client) -> Result<()> {
    let ours = client.vms(true).await?.into_iter().filter(|vm| vm.labels.contains_key(LABEL));
    let removals = ours.map(|vm| async move {
        match client.remove_vm(&vm.id.to_string(), true).await {
            Err(e) if e.code() == Some(ErrorCode::NotFound) => Ok(()),
            other => other.with_context(|| format!("removing VM {}", vm.id)),
        }
    });
    try_join_all(removals).await.map(drop)
}

/// `GET /metrics`, which is text and so no call of the typed client.
async fn metrics(socket: &Path) -> Result<String> {
    let mut stream = UnixStream::connect(socket).await?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: dayfly\r\nconnection: close\r\n\r\n").await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}
