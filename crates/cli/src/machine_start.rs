//! Makes, starts and restarts the machine, and says what the user must know about it.

use crate::artefacts;
use crate::home::program;
use crate::progress::Steps;
use anyhow::{Context, Result, bail};
use dayfly_api::client::{Client, ClientError};
use dayfly_machine::{
    Accelerator, Consent, InitError, InitOptions, Machine, Note, Purpose, Reexec, StartOrder,
    Started, accelerator,
};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a daemon may take to answer the request for its description, or for its VMs.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// The default options of a machine.
///
/// # Errors
/// If a program is missing, or the machine's kernel cannot be fetched.
pub fn machine_options(steps: &Steps) -> Result<InitOptions> {
    let init = program("dayfly-machine-init")?;
    let (daemon, vmm, pager) =
        (program("dayflyd")?, program("dayfly-vmm")?, program("dayfly-pager")?);
    let mut options = InitOptions::new(artefacts::machine_kernel(steps)?, init);
    options.cpus = default_cpus(accelerator());
    options.daemon = Some(daemon);
    options.vmm = Some(vmm);
    options.pager = Some(pager);
    options.volume = Some(program("dayfly-volume")?);
    options.relay = Some(program("dayfly-relay")?);
    Ok(options)
}

/// The number of CPUs of a machine without `--cpus`. Emulated, a machine with several CPUs panics
/// under load (docs/lab-notes/2026-11-21-emulated-host.md).
fn default_cpus(accelerator: Accelerator) -> u32 {
    let host = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
    match accelerator {
        Accelerator::Kvm => u32::try_from(host).unwrap_or(1),
        Accelerator::Emulation => 1,
    }
}

/// What to say of a machine with this number of CPUs; `None` if nothing.
pub fn cpus_warning(cpus: u32, accelerator: Accelerator) -> Option<String> {
    (cpus > 1 && accelerator == Accelerator::Emulation).then(|| {
        format!(
            "{cpus} CPUs under emulation: the machine's kernel may panic under load, which ends \
             its VMs; `dayfly machine init --cpus 1`, then `dayfly machine restart`"
        )
    })
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
        (renewed.volume.as_mut(), "dayfly-volume"),
        (renewed.relay.as_mut(), "dayfly-relay"),
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

/// Opens the machine, and makes it if there is none.
fn open_or_make(home: &Path, steps: &Steps) -> Result<Machine> {
    match Machine::open(home) {
        Ok(machine) => match with_present_programs(machine.options(), program)? {
            None => Ok(machine),
            Some(options) => {
                steps.say(
                    "dayfly: the programs that the machine was made with are gone; it gets those \
                     of this installation",
                );
                Machine::init(home, &options, &mut |text| steps.begin(text))
                    .context("renewing the machine's programs")
            }
        },
        Err(InitError::None(_)) => {
            let options = machine_options(steps)?;
            Machine::init(home, &options, &mut |text| steps.begin(text))
                .context("making the machine")
        }
        Err(e) => Err(e).context("the machine"),
    }
}

/// Makes the machine if there is none, and starts it if it does not run. A running machine with
/// other programs is restarted only if no VM lives in it. This function blocks.
///
/// # Errors
/// If something that the machine needs is missing, if it does not start, or if it does not answer
/// and may hold VMs.
pub fn use_machine(home: &Path, steps: &Steps) -> Result<Machine> {
    let (machine, started) = start(home, steps, Purpose::Use, Consent::None)?;
    if let Started::WasRunning { differs: Some(_), vms } = started {
        notice_older(&machine, None, vms.unwrap_or_default());
    }
    Ok(machine)
}

/// As [`use_machine`], for callers to which the programs in the machine matter, such as benchmarks.
///
/// # Errors
/// As [`use_machine`]; or the machine runs older programs, and VMs live in it.
pub fn current_machine(home: &Path, steps: &Steps) -> Result<Machine> {
    match start(home, steps, Purpose::Use, Consent::None)? {
        (_, Started::WasRunning { differs: Some(_), vms }) => {
            bail!("{}", older(None, vms.unwrap_or_default()))
        }
        (machine, _) => Ok(machine),
    }
}

/// Restarts the machine with the programs of this installation, or starts it if it does not run.
/// Asks on a terminal if VMs live in it, unless `force`. This function blocks.
///
/// # Errors
/// As [`use_machine`]; or VMs live in it and the user has not agreed.
pub fn restart_machine(home: &Path, steps: &Steps, force: bool) -> Result<Machine> {
    let terminal = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    let consent = match (force, terminal) {
        (true, _) => Consent::Given,
        (false, true) => Consent::Ask,
        (false, false) => Consent::None,
    };
    Ok(start(home, steps, Purpose::Restart, consent)?.0)
}

fn start(
    home: &Path,
    steps: &Steps,
    purpose: Purpose,
    consent: Consent,
) -> Result<(Machine, Started)> {
    let machine = open_or_make(home, steps)?;
    let reexec = Reexec { program: program("dayfly")?, words: vec!["machine-supervise".into()] };
    if let Some(notice) = machine.notice() {
        steps.say(&format!("dayfly: {notice}"));
    }
    steps.begin("starting the machine");
    let socket = machine.api_socket();
    let order = StartOrder {
        reexec: &reexec,
        purpose,
        consent,
        count_vms: &|| count_vms(&socket),
        confirm: &|question| {
            steps.end();
            confirmed(question)
        },
    };
    let started = machine.start(&order, &mut |note| match note {
        Note::Step(text) => steps.begin(text),
        Note::Line(text) => steps.say(&format!("dayfly: {text}")),
    })?;
    steps.end();
    if let Started::Fresh { replaced: Some(reason), .. } = &started {
        steps.say(&format!("dayfly: the machine was restarted: {reason}"));
    }
    Ok((machine, started))
}

/// Says once for each run of the machine that it runs older programs.
pub(crate) fn notice_older(machine: &Machine, version: Option<&str>, vms: u64) {
    let own = env!("CARGO_PKG_VERSION");
    if machine.first_notice(own) {
        eprintln!("dayfly: {}", older(version, vms));
    }
}

fn older(version: Option<&str>, vms: u64) -> String {
    let build = version.map_or_else(|| "an older build".to_owned(), |v| format!("version {v}"));
    let vms = if vms == 1 { "a VM".to_owned() } else { format!("{vms} VMs") };
    format!(
        "the machine runs {build} with {vms}; `dayfly machine restart` updates it, and ends its VMs"
    )
}

/// The number of VMs that live in the machine, asked by a thread without a runtime.
fn count_vms(socket: &Path) -> Option<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    runtime.block_on(live_vms(&Client::new(socket.to_owned())))
}

/// The number of VMs that live; `None` if the daemon does not say.
pub(crate) async fn live_vms(client: &Client) -> Option<u64> {
    let ask = async {
        let live = match client.vms(false).await {
            Ok(live) => live.len(),
            // The list of another version may have other fields. This number includes VMs that
            // exited and were not removed.
            Err(_) => client.info().await?.vms,
        };
        Ok::<_, ClientError>(live)
    };
    u64::try_from(tokio::time::timeout(ANSWER, ask).await.ok()?.ok()?).ok()
}

/// Asks on the terminal; only `y` and `yes` agree.
fn confirmed(question: &str) -> bool {
    eprint!("dayfly: {question} [y/N] ");
    let mut answer = String::new();
    let asked = std::io::stderr().flush().and_then(|()| std::io::stdin().read_line(&mut answer));
    asked.is_ok() && is_yes(&answer)
}

fn is_yes(answer: &str) -> bool {
    matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes")
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
    fn only_a_yes_is_a_yes() {
        assert!(["y\n", "Y\n", " yes \n"].iter().all(|answer| is_yes(answer)));
        assert!(["\n", "", "n\n", "yellow\n", "no\n", "ja\n"].iter().all(|a| !is_yes(a)));
    }

    #[test]
    fn the_notice_names_the_build_the_vms_and_the_next_step() {
        assert_eq!(
            older(Some("0.4.1"), 12),
            "the machine runs version 0.4.1 with 12 VMs; `dayfly machine restart` updates it, and \
             ends its VMs"
        );
        assert!(older(None, 1).starts_with("the machine runs an older build with a VM; "));
    }
}
