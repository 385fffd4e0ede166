//! Finds a daemon and starts it if it does not run: `DAYFLY_HOST`, this host's own daemon, or the
//! machine's.
//!
//! ```text
//! DAYFLY_HOST set? ──yes──▶ that socket, as it is
//!      │ no
//! KVM runs Linux here, and   ──yes──▶ this host's dayflyd ──not answering──▶ start it
//! root or a usable socket?
//!      │ no
//!      └──────────────────────▶ the machine's dayflyd ──not answering──▶ make and start it
//! ```
//!
//! A machine of an older version serves as long as VMs live in it, because its end would end them.
//! Only `dayfly machine restart` ends such a machine ([`crate::machine_start`]).

use crate::home::{home, program};
use crate::machine_start::{self, ANSWER, use_machine};
use crate::progress::Steps;
use anyhow::{Context, Result, bail};
use dayfly_api::client::Client;
use dayfly_api::types::Info;
use dayfly_machine::{Machine, Probe, probe};
use rustix::fs::Access;
use std::fs::{DirBuilder, File, Permissions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a daemon may take to start: it adopts the VMs of an earlier daemon.
const START: Duration = Duration::from_secs(60);
/// Interval of the checks for a starting daemon, which usually takes a few milliseconds.
const LOOK_AGAIN: Duration = Duration::from_millis(3);

/// The place of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// The socket in `DAYFLY_HOST`.
    Given(PathBuf),
    /// A daemon on this host, with its socket.
    Native(PathBuf),
    /// A daemon in the machine, with what this host's KVM can do.
    Machine(dayfly_machine::Probe),
}

/// Decides where the daemon is. Opens and starts nothing.
///
/// # Errors
/// If `DAYFLY_HOST` is invalid.
pub fn place() -> Result<Place> {
    if let Some(host) = std::env::var("DAYFLY_HOST").ok().filter(|h| !h.is_empty()) {
        return socket_of(&host).map(Place::Given);
    }
    let socket = run_folder().join("dayflyd.sock");
    let root = rustix::process::geteuid().is_root();
    Ok(choose(probe(), root, &|| rustix::fs::access(&socket, Access::WRITE_OK).is_ok(), &socket))
}

/// This host's daemon if KVM runs stock kernels here, and this user is root and can start the
/// daemon, or may use the socket of one; otherwise the machine.
fn choose(probe: Probe, root: bool, may_use: &dyn Fn() -> bool, socket: &Path) -> Place {
    if probe.is_native() && (root || may_use()) {
        Place::Native(socket.to_owned())
    } else {
        Place::Machine(probe)
    }
}

/// Why the machine is used.
pub fn why_the_machine(probe: &Probe) -> String {
    if probe.is_native() {
        return "this host's own daemon runs as root, and this user is not root and may not use \
                its socket"
            .to_owned();
    }
    probe.to_string()
}

/// The folder of this host's daemon's socket, by the daemon's own rule.
fn run_folder() -> PathBuf {
    std::env::var_os("DAYFLY_RUN")
        .filter(|r| !r.is_empty())
        .map_or("/run/dayfly".into(), PathBuf::from)
}

/// Parses the socket of a `DAYFLY_HOST`.
fn socket_of(host: &str) -> Result<PathBuf> {
    match host.strip_prefix("unix://") {
        Some(path) if path.starts_with('/') => Ok(path.into()),
        _ => bail!("DAYFLY_HOST={host}: expected unix:///path/of/a/socket"),
    }
}

/// Returns a client of a daemon that answers. Starts the daemon if necessary.
///
/// # Errors
/// If no daemon runs and none can be started, with what is missing.
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
            {
                if info.version == env!("CARGO_PKG_VERSION") {
                    return Ok(client);
                }
                if let Some(vms @ 1..) = machine_start::live_vms(&client).await {
                    machine_start::notice_older(&machine, Some(&info.version), vms);
                    return Ok(client);
                }
            }
            let why = why_the_machine(&probe);
            eprintln!("dayfly: {why}; working through the machine (dayfly machine)");
            let steps = Steps::new();
            let machine =
                tokio::task::spawn_blocking(move || use_machine(&home()?, &steps)).await??;
            Ok(Client::new(machine.api_socket()))
        }
    }
}

/// Returns a daemon that answers now. Starts nothing.
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

/// Starts this host's daemon, detached, and waits for its first answer. Two concurrent starts do no
/// harm, because the daemon's lock lets only one run.
async fn start_native(socket: &Path) -> Result<Client> {
    let daemon = program("dayflyd")?;
    let run = run_folder();
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(&run)
        .with_context(|| format!("{}: the daemon needs this folder; run as root", run.display()))?;
    let path = run.join("dayflyd.log");
    // The log names VMs and their owners' requests, so only its owner may read it, even if an older
    // file had another mode.
    let log = File::options().create(true).append(true).mode(0o600).open(&path);
    let log = log.with_context(|| format!("{}: run as root", path.display()))?;
    log.set_permissions(Permissions::from_mode(0o600))
        .with_context(|| format!("mode of {}", path.display()))?;
    let mut child = Command::new(&daemon)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("the daemon's log")?)
        .stderr(log)
        // Ctrl-C at this terminal must not reach the daemon.
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
            // The daemon of another command may have started first.
            if let Some((client, _)) = answers(socket).await {
                return Ok(client);
            }
            bail!(
                "dayflyd ended with {status}; its log: {}\n{}",
                path.display(),
                last_lines(&path)
            );
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_not_root_uses_the_hosts_daemon_only_if_its_socket_lets_them() {
        let socket = Path::new("/run/x.sock");
        let native = || Probe::Native { extension: "VMX".to_owned() };
        let (here, machine) = (Place::Native(socket.to_owned()), Place::Machine(native()));
        assert_eq!(choose(native(), true, &|| false, socket), here);
        assert_eq!(choose(native(), false, &|| true, socket), here);
        assert_eq!(choose(native(), false, &|| false, socket), machine);
        let none = || Probe::NoDevice { cpu_could: false };
        assert_eq!(choose(none(), true, &|| true, socket), Place::Machine(none()));
        assert!(why_the_machine(&native()).contains("root"));
    }

    #[test]
    fn a_host_is_a_unix_socket() {
        assert_eq!(socket_of("unix:///run/x.sock").expect("a socket"), Path::new("/run/x.sock"));
        for bad in ["tcp://1.2.3.4", "unix://relative", "/run/x.sock"] {
            assert!(socket_of(bad).is_err(), "{bad}");
        }
    }
}
