//! One VM and the first answer of a program in it.

use crate::prelude::*;
use crate::requests::{create, gone, metric};
use crate::stock::{LABEL, Losses, remove_vms};
use dayfly_api::agent::ExecSpec;
use dayfly_api::client::{Client, ExecEvent};
use dayfly_api::types::{RunRequest, Source};

/// The snapshot of this scenario.
const SNAPSHOT: &str = "bench-birth-linux";
/// What the program prints.
const SAID: &str = "here";
/// A guest that has not answered by then is lost.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The program that answers: a file of Debian's, linked dynamically as most are.
pub fn program() -> ExecSpec {
    ExecSpec { argv: vec!["/bin/echo".into(), SAID.into()], ..ExecSpec::default() }
}

/// The name of the snapshot.
pub fn snapshot() -> Result<Name> {
    Ok(SNAPSHOT.parse()?)
}

/// A VM whose program has answered, and which lives on.
#[derive(Debug)]
pub struct Answer {
    /// The VM.
    pub vm: VmId,
    /// From the request until the client knew that the program runs.
    pub started: Duration,
    /// From the request until the client had the program's output.
    pub said: Duration,
    /// From the request until the client had the program's exit.
    pub took: Duration,
}

/// The daemon, and what became of its guests.
#[derive(Debug)]
pub struct Guests {
    /// The daemon.
    pub client: Client,
    /// Guests that the emulation crashed.
    pub losses: Losses,
}

impl Guests {
    /// The first answer of a VM from `source`; a lost VM is made again.
    pub async fn answer(&mut self, what: &str, source: &Source) -> Result<Answer> {
        let client = &self.client;
        self.losses.kept(what, async || first_answer(client, source.clone()).await).await
    }

    /// VMMs that the daemon has made ahead of demand.
    pub async fn waiting(&self) -> Result<usize> {
        metric(&self.client.metrics().await?, "dayfly_waiting")
    }
}

/// The measured part. The VM stays: its timeline is asked for when nothing is measured any more.
pub async fn first_answer(client: &Client, source: Source) -> Result<Answer> {
    let create = create(source, &[LABEL]);
    let request = RunRequest { create, exec: program(), entrypoint: None, keep: true };
    let begun = Instant::now();
    let measured = async {
        let mut exec = client.run(&request).await?;
        let (vm, started) = (exec.vm.id, begun.elapsed());
        let (mut stdout, mut said) = (Vec::new(), None);
        let exit = loop {
            match exec.output.next().await? {
                ExecEvent::Stdout(bytes) => {
                    said.get_or_insert_with(|| begun.elapsed());
                    stdout.extend_from_slice(&bytes);
                }
                ExecEvent::Stderr(_) => {}
                ExecEvent::Exit(exit) => break exit,
            }
        };
        let took = begun.elapsed();
        let text = String::from_utf8_lossy(&stdout);
        let right = exit.code == Some(0) && text.strip_suffix('\n') == Some(SAID);
        ensure!(right, "the program said {text:?}: {exit:?}");
        Ok(Answer { vm, started, said: said.unwrap_or(took), took })
    };
    tokio::time::timeout(TIMEOUT, measured).await.context("waiting for the first answer")?
}

/// Removes every VM and the snapshot of this scenario, this run's or an interrupted one's.
pub async fn remove_all(client: &Client) -> Result<()> {
    remove_vms(client).await?;
    gone(client.remove_snapshot(&snapshot()?).await).context("removing the snapshot")
}
