//! `dayfly doctor`: checks what this host can do, what is missing, and what crashes left behind.

use crate::connect::{self, Place};
use crate::home::{home, on_path, program};
use crate::machine_start::cpus_warning;
use crate::output::{self, Format};
use anyhow::{Context, Result};
use dayfly_api::types::Info;
use dayfly_machine::{Machine, State, Uplink, accelerator, probe};
use dayfly_units::Bytes;
use serde::Serialize;
use std::path::Path;

/// Free disk space in bytes that an image and a machine need.
const ROOM_BYTES: u64 = 4 << 30;

/// Arguments of `dayfly doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// List what crashes left behind; exit code 1 if there is anything
    #[arg(long)]
    leaks: bool,
    /// Remove what crashes left behind, and list it; processes and mounts of a machine stay
    #[arg(long, conflicts_with = "leaks")]
    sweep: bool,
    /// Format of the output
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// One check and its result.
#[derive(Debug, Serialize)]
struct Check {
    what: String,
    ok: bool,
    /// Whether dayfly cannot work without it.
    needed: bool,
    found: String,
}

/// A leftover of a crash, with the place where it was found.
#[derive(Debug, Serialize)]
struct Leftover {
    place: &'static str,
    kind: String,
    what: String,
}

impl Args {
    pub async fn run(self) -> Result<u8> {
        if self.leaks || self.sweep {
            return leftovers(self.sweep, self.format).await;
        }
        let place = connect::place()?;
        let machine = matches!(place, Place::Machine(_));
        let probe = probe();
        let mut checks = vec![Check {
            what: "KVM".into(),
            ok: probe.is_native(),
            needed: false,
            found: if machine {
                format!("{}; the machine is used", connect::why_the_machine(&probe))
            } else {
                probe.to_string()
            },
        }];
        checks.extend(tools(machine));
        checks.extend(rights(machine));
        checks.push(daemon().await);
        checks.push(machine_status());
        checks.push(room()?);
        if self.format == Format::Json {
            output::json(&checks)?;
        } else {
            let rows = checks.iter().map(|check| {
                let verdict = match (check.ok, check.needed) {
                    (true, _) => "ok",
                    (false, true) => "MISSING",
                    (false, false) => "-",
                };
                [check.what.clone(), verdict.into(), check.found.clone()]
            });
            output::emit(&output::table(["WHAT", "", "FOUND"], rows))?;
        }
        Ok(u8::from(checks.iter().any(|check| check.needed && !check.ok)))
    }
}

/// Checks the programs that dayfly uses, with the Debian packages that contain them.
fn tools(machine: bool) -> Vec<Check> {
    let ours = [
        "dayflyd",
        "dayfly-vmm",
        "dayfly-pager",
        "dayfly-packer",
        "dayfly-volume",
        "dayfly-relay",
        "dayfly-agent",
    ]
    .into_iter()
    .chain(machine.then_some("dayfly-machine-init"));
    let mut checks: Vec<Check> = ours
        .map(|name| {
            let found = program(name);
            let text =
                found.as_ref().map_or_else(|e| e.to_string(), |path| path.display().to_string());
            Check { what: name.into(), ok: found.is_ok(), needed: true, found: text }
        })
        .collect();
    let debian = [
        ("mke2fs", "e2fsprogs", true, "image build, machine init"),
        ("debugfs", "e2fsprogs", true, "image build"),
        ("e2fsck", "e2fsprogs", true, "image build"),
        ("mmdebstrap", "mmdebstrap", false, "image build --debian"),
        ("apt-get", "apt", false, "kernel fetch"),
        ("depmod", "kmod", false, "kernel fetch, kernel add"),
        ("dpkg-deb", "dpkg", false, "kernel fetch"),
        ("qemu-system-x86_64", "qemu-system-x86", machine, "the machine"),
        ("busybox", "busybox-static", machine, "the machine"),
        ("passt", "passt", false, "networks of the machine's VMs (else QEMU's user network)"),
        ("virtiofsd", "qemu-system-common", false, "machine init --share"),
    ];
    checks.extend(debian.into_iter().map(|(name, package, needed, purpose)| match on_path(name) {
        Some(path) => {
            Check { what: name.into(), ok: true, needed, found: path.display().to_string() }
        }
        None => {
            let found = format!("not found, for {purpose}: apt-get install {package}");
            Check { what: name.into(), ok: false, needed, found }
        }
    }));
    checks
}

/// Checks what an ordinary user needs, with the commands that give it. Root has all of it.
fn rights(machine: bool) -> Vec<Check> {
    if rustix::process::geteuid().is_root() {
        return Vec::new();
    }
    let check = |what: &str, needed, lack: Option<String>| Check {
        what: what.into(),
        ok: lack.is_none(),
        needed,
        found: lack.unwrap_or_else(|| "usable by this user".into()),
    };
    let mut checks = Vec::new();
    if machine {
        let tun = dayfly_machine::tun().err();
        let tun = tun.map(|(e, command)| format!("{e}: as root, run: {command}"));
        checks.push(check("/dev/net/tun", true, tun));
    }
    let newuidmap = on_path("newuidmap").is_none();
    let newuidmap = newuidmap.then(|| {
        "not found, for image build --debian: as root, run: apt-get install uidmap".to_owned()
    });
    checks.push(check("newuidmap", false, newuidmap));
    let user = std::env::var("USER").unwrap_or_else(|_| "USER".to_owned());
    let ids = dayfly_machine::subordinate_ids(&user, rustix::process::getuid().as_raw());
    let ids = ids.map(|command| format!("none, for image build --debian: as root, run: {command}"));
    checks.push(check("subordinate ids", false, ids));
    checks
}

async fn daemon() -> Check {
    let found = connect::running().await.map(|(client, info)| {
        let Info { version, vms, host_kernel, kvm, .. } = info;
        let socket = client.socket().display();
        format!("version {version} on {socket}: Linux {host_kernel}, KVM {kvm}, {vms} VMs")
    });
    Check {
        what: "daemon".into(),
        ok: found.is_some(),
        needed: false,
        found: found.unwrap_or("not running; the next command starts it".into()),
    }
}

fn machine_status() -> Check {
    let check = |ok, found: String| Check { what: "machine".into(), ok, needed: false, found };
    let status =
        home().and_then(|home| Ok(Machine::open(&home)?)).and_then(|machine| Ok(machine.status()?));
    match status {
        Ok(status) => {
            let mut found = match status.state {
                State::Starting => "starting".to_owned(),
                State::Running => "running".to_owned(),
                State::Crashed => {
                    "ended without being asked to; the next command starts it again".to_owned()
                }
                State::Stopped => "stopped".to_owned(),
            };
            found += &format!(
                ", {} CPUs, {}",
                status.options.cpus,
                Bytes(status.options.memory_mib << 20)
            );
            if let Some(held) = status.host_memory_bytes {
                found += &format!(" (holds {})", Bytes(held));
            }
            found += &format!(", disk takes {}", Bytes(status.disk_bytes));
            if let Some(Uplink::Down { why }) = &status.uplink {
                found += &format!("; its VMs reach nothing outside: {why}");
            }
            if let Some(warning) = cpus_warning(status.options.cpus, accelerator()) {
                found += &format!("; {warning}");
            }
            check(status.state == State::Running, found)
        }
        Err(_) => check(false, "none made yet; made when it is first needed".into()),
    }
}

fn room() -> Result<Check> {
    let home = home()?;
    // The folder itself may not exist yet.
    let there = home.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let stat = rustix::fs::statvfs(there).with_context(|| there.display().to_string())?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let found = format!("{} free at {}", Bytes(free), home.display());
    Ok(Check { what: "disk room".into(), ok: free >= ROOM_BYTES, needed: true, found })
}

async fn leftovers(sweep: bool, format: Format) -> Result<u8> {
    let mut found = Vec::new();
    let home = home()?;
    let daemon = match connect::place()? {
        // Only a daemon can see the leftovers of a daemon on this host, so one is started if
        // necessary.
        Place::Given(_) | Place::Native(_) => Some(connect::client().await?),
        // The machine's leftovers end with the machine, so none is started for this check.
        Place::Machine(_) => connect::running().await.map(|(client, _)| client),
    };
    if let Some(client) = daemon {
        let leaks = if sweep { client.sweep().await? } else { client.leaks().await? };
        found.extend(leaks.into_iter().map(|l| Leftover {
            place: "daemon",
            kind: l.kind,
            what: l.what,
        }));
    }
    found.extend(dayfly_machine::leaks(&home).into_iter().map(|leak| {
        let text = leak.to_string();
        let (kind, what) = text.split_once(' ').unwrap_or(("file", &text));
        Leftover { place: "machine", kind: kind.into(), what: what.into() }
    }));
    if format == Format::Json {
        for leftover in &found {
            output::emit(&output::json_line(leftover)?)?;
        }
    } else {
        let lines = found.iter().map(|l| format!("{}: {} {}\n", l.place, l.kind, l.what));
        output::emit(&lines.collect::<String>())?;
    }
    Ok(u8::from(!sweep && !found.is_empty()))
}
