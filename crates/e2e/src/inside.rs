//! A program of ours in the machine, beside what it is to look at.

use anyhow::{Context, Result};
use dayfly_cli::home;
use dayfly_machine::{Machine, copy_in};
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::process::Command;

/// Copies `program` to `place` in the machine, in its memory.
///
/// # Errors
/// The program cannot be read, or the machine does not take it.
pub async fn copy(machine: Machine, program: PathBuf, place: &'static str) -> Result<()> {
    tokio::task::spawn_blocking(move || {
        let mut file = File::open(&program).with_context(|| program.display().to_string())?;
        copy_in(&machine, &mut file, place, 0o755)
            .with_context(|| format!("copying {place} into the machine"))
    })
    .await?
}

/// The command that runs `words` in the machine of `home`, without standard input. A program there ends with the channel that
/// `dayfly machine exec` holds, so it ends when the command is dropped.
///
/// # Errors
/// There is no program `dayfly`.
pub fn command(home: &Path, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<Command> {
    let mut command = Command::new(home::program("dayfly")?);
    command.env("DAYFLY_HOME", home).args(["machine", "exec", "--"]).args(words);
    command.stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
    Ok(command)
}
