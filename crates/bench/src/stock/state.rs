//! The daemon's state folder.

use super::machine;
use super::place::Stock;
use crate::prelude::*;
use std::process::Stdio;
use tokio::process::Command;

/// How long a daemon may take to follow another.
const RESTART: Duration = Duration::from_secs(90);

impl Stock {
    /// The command that runs `text` for /bin/sh beside the daemon, with the state folder as `$1`
    /// and `words` after it.
    fn command(&self, text: &str, words: &[&str]) -> Result<Command> {
        let all = ["sh", "-c", text, "sh", &self.state].into_iter().chain(words.iter().copied());
        if let Some(home) = &self.home {
            return machine::command(home, all);
        }
        let mut command = Command::new("sh");
        command.args(all.skip(1)).stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
        Ok(command)
    }

    /// Ends the machine's daemon and waits for the next one, which has no snapshot's RAM in memory:
    /// the next clone's comes out of the store. False where the daemon is this host's, which is
    /// left alone.
    ///
    /// # Errors
    /// When no other daemon answers in time.
    pub async fn forget(&self) -> Result<bool> {
        if self.home.is_none() {
            return Ok(false);
        }
        let before = self.client.info().await?.pid;
        let mut kill = self.command("pkill -TERM -x dayflyd || killall -TERM dayflyd", &[])?;
        let status = kill.status().await.context("ending the daemon")?;
        ensure!(status.success(), "ending the daemon: {status}");
        let began = Instant::now();
        loop {
            match self.client.info().await {
                Ok(info) if info.pid != before => return Ok(true),
                other if began.elapsed() > RESTART => {
                    bail!("expected a process other than {before}, got {other:?} for {RESTART:?}")
                }
                _ => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    /// Copies what the RAM of `name` needs, and the tables of all others, into `to`, which
    /// becomes a store.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub async fn export(&self, name: &Name, to: &Path) -> Result<()> {
        let snapshot = self.client.snapshot(name).await?;
        std::fs::create_dir_all(to).with_context(|| to.display().to_string())?;
        // Holes are copied as zeroes, so no layers but its own.
        let text = r#"cd "$1" && shift && tar -cf - pages/default snapshots "$@""#;
        let mut files = vec![format!("images/{}", snapshot.image)];
        files.extend(snapshot.layers.iter().map(|layer| format!("layers/{layer}")));
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        let mut from = self.command(text, &files)?.stdout(Stdio::piped()).spawn().context("tar")?;
        let pipe: Stdio = from.stdout.take().context("tar's output")?.try_into()?;
        let mut into = Command::new("tar");
        into.arg("-C").arg(to).args(["-xf", "-"]).stdin(pipe).kill_on_drop(true);
        let (from, into) = tokio::try_join!(from.wait(), into.status()).context("tar")?;
        ensure!(from.success() && into.success(), "copying the store: {from}, {into}");
        Ok(())
    }
}
