//! Finding a daemon: `DAYFLY_HOST`, this host's own, or the machine's; started where it does not run.
//!
//! ```text
//! DAYFLY_HOST set? ──yes──▶ that socket, as it is
//!      │ no
//! KVM runs Linux here? ──yes──▶ this host's dayflyd ──not answering──▶ start it
//!      │ no
//!      └──────────────────────▶ the machine's dayflyd ──not answering──▶ make and start the machine
//! ```

use crate::artefacts;
use crate::home::{home, program};
use crate::progress::Steps;
use anyhow::{Context, Result, bail};
use dayfly_api::client::Client;
use dayfly_api::types::Info;
use dayfly_machine::{InitError, InitOptions, Machine, Reexec, Started, probe};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a daemon may take to say what it is.
const ANSWER: Duration = Duration::from_secs(10);
/// How long a daemon may take to start: it looks for the VMs of the one before it.
const START: Duration = Duration::from_secs(60);
/// Between two looks at a daemon that starts; it usually takes a few milliseconds.
const LOOK_AGAIN: Duration = Duration::from_millis(3);

/// Where the daemon is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Where `DAYFLY_HOST` says.
    Given(PathBuf),
    /// On this host.
    Native(PathBuf),
    /// In the machine, because of what KVM is here.
    Machine(dayfly_machine::Probe),
}

/// Decides where the daemon is. Opens and starts nothing.
///
/// # Errors
/// When `DAYFLY_HOST` makes no sense.
pub fn place() -> Result<Place> {
    if let Some(host) = std::env::var("DAYFLY_HOST").ok().filter(|h| !h.is_empty()) {
        return socket_of(&host).map(Place::Given);
    }
    let probe = probe();
    Ok(if probe.is_native() {
        Place::Native(run_folder().join("dayflyd.sock"))
    } else {
        Place::Machine(probe)
    })
}

/// Folder of this host's daemon's socket, as the daemon itself decides it.
fn run_folder() -> PathBuf {
    std::env::var_os("DAYFLY_RUN").filter(|r| !r.is_empty()).map_or("/run/dayfly".into(), PathBuf::from)
}

/// The socket in a `DAYFLY_HOST`.
fn socket_of(host: &str) -> Result<PathBuf> {
    match host.strip_prefix("unix://") {
        Some(path) if path.starts_with('/') => Ok(path.into()),
        _ => bail!("DAYFLY_HOST={host}: expected unix:///path/of/a/socket"),
    }
}

/// A daemon that answers, started if need be.
///
/// # Errors
/// When there is none and none can be started: says what is missing.
pub async fn client() -> Result<Client> {
    match place()? {
        Place::Given(socket) => Ok(Client::new(socket)),
        Place::Native(socket) => match answers(&socket).await {
            Some((client, _)) => Ok(client),
            None => start_native(&socket).await,
        },
        Place::Machine(probe) => {
            if let Ok(machine) = Machine::open(&home()?)
                && let Some((client, info)) = answers(&machine.api_socket()).await
                && info.version == env!("CARGO_PKG_VERSION")
            {
                return Ok(client);
            }
            eprintln!("dayfly: {probe}; working through the machine (dayfly machine)");
            let steps = Steps::new();
            let machine = tokio::task::spawn_blocking(move || start_machine(&home()?, &steps)).await??;
            Ok(Client::new(machine.api_socket()))
        }
    }
}

/// The daemon that answers now. Starts nothing.
pub async fn running() -> Option<(Client, Info)> {
    let socket = match place().ok()? {
        Place::Given(socket) | Place::Native(socket) => socket,
        Place::Machine(_) => Machine::open(&home().ok()?).ok()?.api_socket(),
    };
    answers(&socket).await
}

async fn answers(socket: &Path) -> Option<(Client, Info)> {
    let client = Client::new(socket);
    let info = tokio::time::timeout(ANSWER, client.info()).await.ok()?.ok()?;
    Some((client, info))
}

/// Starts this host's daemon, detached, and waits for its first answer. Two at once do no harm: the daemon's lock lets one live.
async fn start_native(socket: &Path) -> Result<Client> {
    let daemon = program("dayflyd")?;
    let run = run_folder();
    std::fs::create_dir_all(&run)
        .with_context(|| format!("{}: the daemon needs this folder; run as root", run.display()))?;
    let path = run.join("dayflyd.log");
    let log = File::options().create(true).append(true).open(&path);
    let log = log.with_context(|| format!("{}: run as root", path.display()))?;
    let mut child = Command::new(&daemon)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("the daemon's log")?)
        .stderr(log)
        // Ctrl-C at this terminal is not meant for it.
        .process_group(0)
        .spawn()
        .with_context(|| daemon.display().to_string())?;
    let steps = Steps::new();
    steps.begin("starting dayflyd");
    let begun = Instant::now();
    loop {
        if let Some((client, _)) = answers(socket).await {
            return Ok(client);
        }
        if let Some(status) = child.try_wait().context("dayflyd")? {
            // Another command's daemon may have been first.
            if let Some((client, _)) = answers(socket).await {
                return Ok(client);
            }
            bail!("dayflyd ended with {status}; its log: {}\n{}", path.display(), last_lines(&path));
        }
        if begun.elapsed() > START {
            bail!(
                "dayflyd does not answer on {} after {START:?}; its log: {}",
                socket.display(),
                path.display()
            );
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

fn last_lines(path: &Path) -> String {
    const LINES: usize = 5;
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// What a machine is made with unless the user says otherwise.
///
/// # Errors
/// When a program is missing, or the machine's kernel cannot be fetched.
pub fn machine_options(steps: &Steps) -> Result<InitOptions> {
    let init = program("dayfly-machine-init")?;
    let (daemon, vmm, pager) = (program("dayflyd")?, program("dayfly-vmm")?, program("dayfly-pager")?);
    let cpus = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
    let mut options = InitOptions::new(artefacts::machine_kernel(steps)?, init);
    options.cpus = u32::try_from(cpus).unwrap_or(2);
    options.daemon = Some(daemon);
    options.vmm = Some(vmm);
    options.pager = Some(pager);
    Ok(options)
}

/// Makes the machine if there is none, and starts it if it does not run, or runs other programs than ours. Blocks.
///
/// # Errors
/// When something it needs is missing, or it does not come up.
pub fn start_machine(home: &Path, steps: &Steps) -> Result<Machine> {
    let machine = match Machine::open(home) {
        Ok(machine) => machine,
        Err(InitError::None(_)) => {
            let options = machine_options(steps)?;
            Machine::init(home, &options, &mut |text| steps.begin(text)).context("making the machine")?
        }
        Err(e) => return Err(e).context("the machine"),
    };
    let reexec = Reexec { program: program("dayfly")?, words: vec!["machine-supervise".into()] };
    steps.begin("starting the machine");
    if let Started::Fresh { replaced: Some(reason), .. } =
        machine.start(&reexec, &mut |text| steps.begin(text))?
    {
        steps.say(&format!("dayfly: the machine was restarted: {reason}"));
    }
    steps.end();
    Ok(machine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_unix_socket() {
        assert_eq!(socket_of("unix:///run/x.sock").expect("a socket"), Path::new("/run/x.sock"));
        for bad in ["tcp://1.2.3.4", "unix://relative", "/run/x.sock"] {
            assert!(socket_of(bad).is_err(), "{bad}");
        }
    }
}
