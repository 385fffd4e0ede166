//! Finds a daemon and starts it if it does not run: `DAYFLY_HOST`, this host's own daemon, or the
//! machine's.
//!
//! ```text
//! DAYFLY_HOST set? ──yes──▶ that socket, as it is
//!      │ no
//! KVM runs Linux here? ──yes──▶ this host's dayflyd ──not answering──▶ start it
//!      │ no
//!      └──────────────────────▶ the machine's dayflyd ──not answering──▶ make and start it
//! ```

use crate::artefacts;
use crate::home::{home, program};
use crate::progress::Steps;
use anyhow::{Context, Result, bail};
use dayfly_api::client::Client;
use dayfly_api::types::Info;
use dayfly_machine::{InitError, InitOptions, Machine, Reexec, Started, probe};
use std::fs::{DirBuilder, File, Permissions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a daemon may take to answer the request for its description.
const ANSWER: Duration = Duration::from_secs(10);
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
    /// A daemon in the machine. The probe says why KVM of this host is not used.
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
    let probe = probe();
    Ok(if probe.is_native() {
        Place::Native(run_folder().join("dayflyd.sock"))
    } else {
        Place::Machine(probe)
    })
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
                && info.version == env!("CARGO_PKG_VERSION")
            {
                return Ok(client);
            }
            eprintln!("dayfly: {probe}; working through the machine (dayfly machine)");
            let steps = Steps::new();
            let machine =
                tokio::task::spawn_blocking(move || start_machine(&home()?, &steps)).await??;
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

/// The default options of a machine.
///
/// # Errors
/// If a program is missing, or the machine's kernel cannot be fetched.
pub fn machine_options(steps: &Steps) -> Result<InitOptions> {
    let init = program("dayfly-machine-init")?;
    let (daemon, vmm, pager) =
        (program("dayflyd")?, program("dayfly-vmm")?, program("dayfly-pager")?);
    let cpus = std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
    let mut options = InitOptions::new(artefacts::machine_kernel(steps)?, init);
    options.cpus = u32::try_from(cpus).unwrap_or(2);
    options.daemon = Some(daemon);
    options.vmm = Some(vmm);
    options.pager = Some(pager);
    Ok(options)
}

/// The options of a machine in which programs that do not exist any more are replaced by what
/// `find` gives for their names; `None` if all exist. A machine's programs vanish with the checkout
/// or the package that made it. Its initramfs still has them, but they are older than this client.
fn with_present_programs(
    options: &InitOptions,
    find: impl Fn(&str) -> Result<PathBuf>,
) -> Result<Option<InitOptions>> {
    let mut renewed = options.clone();
    let programs = [
        (Some(&mut renewed.init_program), "dayfly-machine-init"),
        (renewed.daemon.as_mut(), "dayflyd"),
        (renewed.vmm.as_mut(), "dayfly-vmm"),
        (renewed.pager.as_mut(), "dayfly-pager"),
    ];
    for (path, name) in programs {
        if let Some(path) = path
            && !path.exists()
        {
            *path = find(name)?;
        }
    }
    Ok((renewed != *options).then_some(renewed))
}

/// Makes the machine if there is none. Starts it if it does not run, and restarts it if its
/// programs differ from this installation's. This function blocks.
///
/// # Errors
/// If something that the machine needs is missing, or if it does not start.
pub fn start_machine(home: &Path, steps: &Steps) -> Result<Machine> {
    let machine = match Machine::open(home) {
        Ok(machine) => match with_present_programs(machine.options(), program)? {
            None => machine,
            Some(options) => {
                steps.say(
                    "dayfly: the programs that the machine was made with are gone; it gets those \
                     of this installation",
                );
                Machine::init(home, &options, &mut |text| steps.begin(text))
                    .context("renewing the machine's programs")?
            }
        },
        Err(InitError::None(_)) => {
            let options = machine_options(steps)?;
            Machine::init(home, &options, &mut |text| steps.begin(text))
                .context("making the machine")?
        }
        Err(e) => return Err(e).context("the machine"),
    };
    let reexec = Reexec { program: program("dayfly")?, words: vec!["machine-supervise".into()] };
    if let Some(notice) = machine.notice() {
        steps.say(&format!("dayfly: {notice}"));
    }
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
    fn programs_that_are_gone_are_replaced_and_others_stay() {
        let here = tempfile::tempdir().expect("a folder");
        let [kept, daemon] = ["init", "dayflyd"].map(|name| here.path().join(name));
        std::fs::write(&kept, "").expect("a file");
        let find = |name: &str| Ok(Path::new("/installed").join(name));
        let mut options = InitOptions::new(PathBuf::new(), kept.clone());
        assert_eq!(with_present_programs(&options, find).expect("options"), None);
        options.daemon = Some(daemon.clone());
        let renewed = with_present_programs(&options, find).expect("options").expect("new ones");
        assert_eq!(renewed.daemon.as_deref(), Some(Path::new("/installed/dayflyd")));
        assert_eq!((renewed.init_program, renewed.vmm), (kept, None));
        std::fs::write(daemon, "").expect("a file");
        assert_eq!(with_present_programs(&options, find).expect("options"), None);
    }

    #[test]
    fn a_host_is_a_unix_socket() {
        assert_eq!(socket_of("unix:///run/x.sock").expect("a socket"), Path::new("/run/x.sock"));
        for bad in ["tcp://1.2.3.4", "unix://relative", "/run/x.sock"] {
            assert!(socket_of(bad).is_err(), "{bad}");
        }
    }
}
