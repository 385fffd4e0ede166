//! A daemon of this build, with a kernel and an image.

use anyhow::{Context, Result};
use dayfly_api::client::{Client, Connection, Exec, ExecEvent};
use dayfly_api::types::{ErrorCode, Kernel};
use dayfly_cli::connect::{self, Place};
use dayfly_cli::progress::Steps;
use dayfly_cli::{artefacts, home, machine_start};
use dayfly_units::Name;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The image that demo and tests share: Debian bookworm and python3.
pub const IMAGE: &str = "dayfly-demo-bookworm";
/// Its packages beyond Debian's minimum.
pub const INCLUDE: [&str; 1] = ["python3"];

/// A daemon, and where it runs.
#[derive(Debug)]
pub struct Host {
    /// The daemon.
    pub client: Client,
    /// The user's folder, if the daemon runs in the machine.
    pub machine: Option<PathBuf>,
}

impl Host {
    /// `native` or `machine`.
    #[must_use]
    pub fn kvm(&self) -> &'static str {
        if self.machine.is_some() { "machine" } else { "native" }
    }

    /// Leftovers of the daemon and of the machine.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub async fn leaks(&self) -> Result<Vec<String>> {
        let ours = self
            .client
            .leaks()
            .await?
            .into_iter()
            .map(|leak| format!("{} {}", leak.kind, leak.what));
        let machine = self.machine.iter().flat_map(|home| dayfly_machine::leaks(home));
        Ok(ours.chain(machine.map(|leak| leak.to_string())).collect())
    }
}

/// Connects to the daemon as `dayfly` does. A machine that runs older programs is restarted.
///
/// # Errors
/// No daemon can be started, or VMs live in a machine that runs older programs.
pub async fn host() -> Result<Host> {
    let mut machine = None;
    if matches!(connect::place()?, Place::Machine(_)) {
        let home = home::home()?;
        machine = Some(home.clone());
        let start = move || machine_start::current_machine(&home, &Steps::new());
        tokio::task::spawn_blocking(start).await??;
    }
    Ok(Host { client: connect::client().await?, machine })
}

/// Debian's kernel of `version` with the agent of this build.
///
/// # Errors
/// The kernel cannot be fetched or stored.
pub async fn kernel(client: &Client, version: &str, steps: &Steps) -> Result<Kernel> {
    artefacts::refresh_kernel(client, version, &version.parse()?, steps).await
}

/// The image that demo and tests share, which is built if the daemon does not have it.
///
/// # Errors
/// The image cannot be built.
pub async fn image(client: &Client, steps: &Arc<Steps>) -> Result<Name> {
    let name: Name = IMAGE.parse()?;
    match client.image(&name).await {
        Ok(_) => Ok(name),
        Err(e) if e.code() == Some(ErrorCode::NotFound) => {
            let include = INCLUDE.map(str::to_owned);
            artefacts::build_debian(client, "bookworm", &include, &name, steps).await?;
            Ok(name)
        }
        Err(e) => Err(e.into()),
    }
}

/// The first line that a program writes; the program goes on.
///
/// # Errors
/// The program ends before it has written a line, or the connection breaks.
pub async fn first_line(exec: &mut Exec) -> Result<String> {
    let (mut line, mut errors) = (Vec::new(), Vec::new());
    loop {
        match exec.output.next().await? {
            ExecEvent::Stdout(bytes) => {
                line.extend_from_slice(&bytes);
                if let Some(end) = line.iter().position(|b| *b == b'\n') {
                    line.truncate(end);
                    return String::from_utf8(line).context("the program's first line");
                }
            }
            ExecEvent::Stderr(bytes) => errors.extend_from_slice(&bytes),
            ExecEvent::Exit(exit) => {
                let errors = String::from_utf8_lossy(&errors);
                anyhow::bail!("expected a line, got the end ({exit:?}) and {errors:?}");
            }
        }
    }
}

/// The server's answer to `words`, over a connection to its port ([`crate::guest::PORT`]).
///
/// # Errors
/// The connection ends before the answer, or the answer is no line of at most 64 KiB.
pub async fn ask(connection: &mut Connection, words: &[&str]) -> Result<String> {
    const ANSWER_BYTES: usize = 64 << 10;
    let question = words.join(" ") + "\n";
    connection.write_all(question.as_bytes()).await.context("asking")?;
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let got = connection.read_buf(&mut line).await.context("the answer")?;
        anyhow::ensure!(
            got > 0 && line.len() <= ANSWER_BYTES,
            "{words:?}: expected a line, got {:?}{}",
            String::from_utf8_lossy(&line),
            if got == 0 { " and the end" } else { " and no end" }
        );
    }
    line.pop();
    String::from_utf8(line).context("the answer")
}
