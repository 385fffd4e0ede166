//! Where the daemon is, and a look at its state folder.
//!
//! Where KVM cannot run Linux, that is a machine of this benchmark's own, so that nobody else's snapshots are in its store.

use crate::inside;
use anyhow::{Context, Result, bail, ensure};
use dayfly_api::client::Client;
use dayfly_cli::connect;
use dayfly_cli::progress::Steps;
use dayfly_machine::{InitError, Machine, Stopped};
use dayfly_units::{Bytes, Name};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::Command;

/// How long the machine may take to stop by itself.
const STOP: Duration = Duration::from_secs(30);

/// How long a daemon may take to follow another.
const RESTART: Duration = Duration::from_secs(90);

/// A daemon, and where it keeps things.
#[derive(Debug, Clone)]
pub struct Place {
    /// The daemon.
    pub client: Client,
    /// The folder of the machine it runs in.
    pub home: Option<PathBuf>,
    state: String,
}

impl Place {
    /// This host's daemon; where KVM cannot run Linux, that of the machine in `home`, which is made and started.
    ///
    /// # Errors
    /// When there is none and none can be started.
    pub async fn open(home: &Path, memory: Bytes) -> Result<Self> {
        let native = !matches!(connect::place()?, connect::Place::Machine(_));
        let (client, home) = if native {
            (connect::client().await?, None)
        } else {
            let home = std::path::absolute(home).context("the machine's folder")?;
            let folder = home.clone();
            let machine = tokio::task::spawn_blocking(move || start(&folder, memory)).await??;
            (Client::new(machine.api_socket()), Some(home))
        };
        let state = client.info().await?.state_dir;
        Ok(Self { client, home, state })
    }

    /// Stops the machine, if it is one.
    ///
    /// # Errors
    /// When it cannot be stopped.
    pub async fn close(self) -> Result<()> {
        let Some(home) = self.home else { return Ok(()) };
        tokio::task::spawn_blocking(move || stop(&home)).await?
    }

    /// What `text` for /bin/sh writes, run beside the daemon with the state folder as `$1` and `words` after it.
    ///
    /// # Errors
    /// When it fails.
    pub async fn shell(&self, text: &str, words: &[&str]) -> Result<Vec<u8>> {
        let output = self.command(text, words)?.output().await.context("a look at the state folder")?;
        ensure!(output.status.success(), "{text}: {}", output.status);
        Ok(output.stdout)
    }

    fn command(&self, text: &str, words: &[&str]) -> Result<Command> {
        let all = ["sh", "-c", text, "sh", &self.state].into_iter().chain(words.iter().copied());
        if let Some(home) = &self.home {
            return inside::command(home, all);
        }
        let mut command = Command::new("sh");
        command.args(all.skip(1)).stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
        Ok(command)
    }

    /// Ends the machine's daemon and waits for the next one, which has no snapshot's RAM in memory: the next clone's comes out of the store.
    /// False where the daemon is this host's, which is left alone.
    ///
    /// # Errors
    /// When no other daemon answers in time.
    pub async fn forget(&self) -> Result<bool> {
        if self.home.is_none() {
            return Ok(false);
        }
        let before = self.client.info().await?.pid;
        self.shell("pkill -TERM -x dayflyd || killall -TERM dayflyd", &[]).await?;
        let began = Instant::now();
        loop {
            match self.client.info().await {
                Ok(info) if info.pid != before => return Ok(true),
                other if began.elapsed() > RESTART => {
                    bail!(
                        "another daemon than process {before}: expected one within {RESTART:?}, got {other:?}"
                    )
                }
                _ => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    /// Copies what the RAM of `name` needs, and the tables of all others, into `to`: a store of its own.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub async fn export(&self, name: &Name, to: &Path) -> Result<()> {
        let snapshot = self.client.snapshot(name).await?;
        // Holes are copied as zeroes, so no layers but its own.
        let text = r#"cd "$1" && shift && tar -cf - pages/default snapshots "$@""#;
        let image = format!("images/{}", snapshot.image);
        let mut files = vec![image];
        files.extend(snapshot.layers.iter().map(|layer| format!("layers/{layer}")));
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let mut from = self.command(text, &files)?;
        let mut from = from.stdout(Stdio::piped()).spawn().context("tar")?;
        let pipe: Stdio = from.stdout.take().context("tar's output")?.try_into()?;
        let mut into = Command::new("tar");
        let into = into.arg("-C").arg(to).args(["-xf", "-"]).stdin(pipe).kill_on_drop(true).status();
        let (from, into) = tokio::try_join!(from.wait(), into).context("tar")?;
        ensure!(from.success() && into.success(), "copying the store: {from}, {into}");
        Ok(())
    }
}

fn start(home: &Path, memory: Bytes) -> Result<Machine> {
    let steps = Steps::new();
    if let Err(InitError::None(_)) = Machine::open(home) {
        let mut options = connect::machine_options(&steps)?;
        options.memory_mib = memory.0 >> 20;
        Machine::init(home, &options, &mut |text| steps.begin(text)).context("making the machine")?;
    }
    connect::start_machine(home, &steps)
}

fn stop(home: &Path) -> Result<()> {
    let machine = Machine::open(home).context("the machine")?;
    if machine.stop(STOP, &mut |_| {}).context("stopping the machine")? == Stopped::Killed {
        eprintln!("the machine did not stop by itself and was killed");
    }
    Ok(())
}

/// Stops the machine in `home`, if there is one, after an interruption: what was being done with it is not waited for.
pub fn stop_left(home: &Path) {
    if Machine::open(home).is_ok()
        && let Err(e) = stop(home)
    {
        eprintln!("{}: {e:#}", home.display());
    }
}
