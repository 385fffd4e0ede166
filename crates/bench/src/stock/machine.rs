//! Machines for guests, where KVM cannot run Linux, and this host's programs in them.

use crate::prelude::*;
use dayfly_cli::progress::Steps;
use dayfly_cli::{home, machine_start};
use dayfly_machine::{InitError, InitOptions, Machine, Stopped, copy_in};
use dayfly_units::text::{LONG, escaped};
use std::ffi::OsStr;
use std::process::Stdio;
use tokio::process::Command;
use tokio::task::spawn_blocking;

/// Number of lines of the console that are shown if something fails in the machine.
const CONSOLE_LINES: usize = 20;
/// How long the machine may take to stop by itself.
const STOP: Duration = Duration::from_secs(30);

/// Starts the machine in `home`. If there is none, or if it has to be `fresh`, it is made, with
/// options that `choose` has changed.
pub async fn start(
    home: &Path,
    fresh: bool,
    choose: impl FnOnce(&mut InitOptions) + Send + 'static,
) -> Result<Machine> {
    let home = home.to_owned();
    spawn_blocking(move || {
        let steps = Steps::new();
        if fresh || matches!(Machine::open(&home), Err(InitError::None(_))) {
            stop(&home)?;
            let mut options = machine_start::machine_options(&steps)?;
            choose(&mut options);
            Machine::init(&home, &options, &mut |text| steps.begin(text))
                .context("making the machine")?;
        }
        machine_start::current_machine(&home, &steps)
    })
    .await?
}

/// Stops the machine in `home`, if there is one.
pub fn stop(home: &Path) -> Result<()> {
    let Ok(machine) = Machine::open(home) else { return Ok(()) };
    if machine.stop(STOP, &mut |_| {}).context("stopping the machine")? == Stopped::Killed {
        eprintln!("the machine did not stop by itself and was killed");
    }
    Ok(())
}

/// Copies this program to `place` in the machine, in its memory.
pub async fn copy_self(machine: Machine, place: &'static str) -> Result<()> {
    spawn_blocking(move || {
        let mut program = std::fs::File::open(crate::places::own_program()?)?;
        copy_in(&machine, &mut program, place, 0o755)
            .with_context(|| format!("copying {place} into the machine"))
    })
    .await?
}

/// The command that runs `words` in the machine of `home`, without standard input. A program there
/// ends with the channel that `dayfly machine exec` has, so it ends when the command is dropped.
///
/// # Errors
/// There is no program `dayfly`.
pub fn command(home: &Path, words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<Command> {
    let mut command = Command::new(home::program("dayfly")?);
    command.env("DAYFLY_HOME", home).args(["machine", "exec", "--"]).args(words);
    command.stdin(Stdio::null()).stderr(Stdio::inherit()).kill_on_drop(true);
    Ok(command)
}

/// What a command of [`command`] in the machine of `home` writes. Its errors are on the terminal.
///
/// # Errors
/// It fails: `what` it does, as a reader would call it, and the console's last lines, because the
/// machine's kernel may have crashed.
pub async fn output(home: &Path, mut command: Command, what: &str) -> Result<Vec<u8>> {
    // `Command::output` would take standard error too.
    let child = command.stdout(Stdio::piped()).spawn().context("dayfly machine exec")?;
    let output = child.wait_with_output().await.context("dayfly machine exec")?;
    if !output.status.success() {
        bail!("{what} failed ({}); see above\n{}", output.status, last_lines(home));
    }
    Ok(output.stdout)
}

/// The last lines of the console of the machine in `home`.
pub fn last_lines(home: &Path) -> String {
    let Ok(machine) = Machine::open(home) else { return "there is no machine".to_owned() };
    let console = std::fs::read(machine.folder().join("console.log")).unwrap_or_default();
    let console = String::from_utf8_lossy(&console);
    let lines: Vec<&str> = console.lines().collect();
    let last = lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n");
    format!("the last lines of the machine's console:\n{}", escaped(&last, LONG).keep_lines())
}
