//! A daemon with its own state and run folders, killed and started again.

use anyhow::{Context, Result, bail, ensure};
use dayfly_api::client::Client;
use dayfly_host::groups::{Groups, Root};
use dayfly_host::process::{Process, ProcessId};
use dayfly_units::{VmId, failpoint};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Generous, because guests may be emulated on a busy host; only a hang takes this long.
pub const WITHIN: Duration = Duration::from_secs(120);

/// Fails unless `holds` within the limit; looks again and again.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !holds().await? {
        ensure!(begun.elapsed() < WITHIN, "{what}: not within {:?}", WITHIN);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// The folders, and the daemon if it runs. A drop ends all processes and removes the folders.
pub struct Testbed {
    folder: tempfile::TempDir,
    /// The state folder.
    state: PathBuf,
    /// The most warm VMMs and warm clones of the next daemon.
    pub pool: &'static str,
    /// Options of the next daemon, after the usual ones.
    pub options: Vec<&'static str>,
    /// Sockets that the next daemon gets as systemd would pass them.
    pub activation: Option<Activation>,
    /// The addresses of VMs, or "none".
    pub network: &'static str,
    daemon: Option<Child>,
    /// The folder with the programs that the next daemon is started from.
    pub programs: PathBuf,
    /// A client of the daemon that runs.
    pub client: Client,
}

/// What systemd gives to a service of `Type=notify` with a socket.
pub struct Activation {
    /// Listens on the API's path.
    pub socket: UnixListener,
    /// Where a datagram socket takes the service's messages.
    pub notify: PathBuf,
}

impl Activation {
    /// Has `command` get the socket as descriptor 3. A program between is needed, because
    /// LISTEN_PID is the pid of the process that gets the socket.
    fn activate(&self, command: Command) -> Result<Command> {
        let mut through = Command::new("sh");
        through
            .args(["-c", r#"export LISTEN_PID=$$; exec 3<&0 0</dev/null; exec "$0" "$@""#])
            .arg(command.get_program())
            .args(command.get_args())
            .env("LISTEN_FDS", "1")
            .env("NOTIFY_SOCKET", &self.notify)
            .stdin(OwnedFd::from(self.socket.try_clone()?));
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => through.env(name, value),
                None => through.env_remove(name),
            };
        }
        Ok(through)
    }
}

/// The folder with the programs of this build.
pub fn own_programs() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_dayflyd")).with_file_name("")
}

impl Testbed {
    /// With an empty state folder; no daemon runs.
    pub fn new() -> Result<Self> {
        ensure!(Path::new("/dev/kvm").exists(), "/dev/kvm: not found; this test needs KVM");
        let folder = tempfile::Builder::new().prefix("kills").tempdir_in("/dev/shm")?;
        let state = folder.path().join("s");
        let client = Client::new(folder.path().join("r/dayflyd.sock"));
        Ok(Self {
            folder,
            state,
            pool: "0",
            options: Vec::new(),
            activation: None,
            network: "none",
            daemon: None,
            programs: own_programs(),
            client,
        })
    }

    /// With an empty state folder at `state`.
    pub fn with_state(state: PathBuf) -> Result<Self> {
        let mut bed = Self::new()?;
        bed.state = state;
        Ok(bed)
    }

    pub fn state(&self) -> PathBuf {
        self.state.clone()
    }

    pub fn run(&self) -> PathBuf {
        self.folder.path().join("r")
    }

    /// A file in the run folder of a VM.
    pub fn of_vm(&self, vm: VmId, file: &str) -> PathBuf {
        self.run().join(format!("vms/{vm}/{file}"))
    }

    /// The file that arms a failpoint.
    fn arming_file(&self) -> PathBuf {
        self.folder.path().join("failpoint")
    }

    /// Arms a failpoint of the daemon that runs. Renamed, so that the daemon reads a whole text.
    pub fn arm(&self, text: &str) -> Result<()> {
        let beside = self.folder.path().join("failpoint.new");
        std::fs::write(&beside, text)?;
        Ok(std::fs::rename(beside, self.arming_file())?)
    }

    /// Starts a daemon. No failpoint is armed yet.
    pub async fn start(&mut self) -> Result<()> {
        let _not_there = std::fs::remove_file(self.arming_file());
        let (program, vmm) = (self.programs.join("dayflyd"), self.programs.join("dayfly-vmm"));
        ensure!(vmm.is_file(), "{}: build it first: cargo build --release", vmm.display());
        let log = std::fs::File::options().append(true).create(true).open(self.log_file())?;
        let mut command = Command::new(program);
        command
            .env("DAYFLY_STATE", self.state())
            .env("DAYFLY_RUN", self.run())
            .env("DAYFLY_VMM", vmm)
            .env(failpoint::VARIABLE, format!("@{}", self.arming_file().display()))
            .env_remove("RUST_LOG")
            // What else runs on the host changes nothing here.
            .env("DAYFLY_TIMEOUT_FACTOR", "6")
            .env("DAYFLY_MEMORY_RESERVE", "none")
            .args(["--overcommit", "1000", "--network", self.network, "--pool", self.pool])
            .args(&self.options)
            .stdin(Stdio::null());
        if let Some(activation) = &self.activation {
            command = activation.activate(command)?;
        }
        let daemon =
            command.stdout(Stdio::null()).stderr(log).spawn().context("starting dayflyd")?;
        let daemon = self.daemon.insert(daemon);
        // The client of the daemon before has a connection to that one.
        self.client = Client::new(self.folder.path().join("r/dayflyd.sock"));
        let begun = Instant::now();
        let answered = async {
            while self.client.info().await.is_err() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let mut answered = std::pin::pin!(answered);
        loop {
            // A client of systemd's socket is answered only once a daemon takes it, if ever.
            tokio::select! {
                () = &mut answered => return Ok(()),
                () = tokio::time::sleep(Duration::from_millis(50)) => {}
            }
            if let Some(status) = daemon.try_wait()? {
                bail!("a daemon did not start: {status}");
            }
            ensure!(begun.elapsed() < WITHIN, "a daemon does not answer after {WITHIN:?}");
        }
    }

    /// Waits until the daemon has ended.
    fn ended(&mut self) -> Result<ExitStatus> {
        let mut daemon = self.daemon.take().context("no daemon runs")?;
        let begun = Instant::now();
        loop {
            if let Some(status) = daemon.try_wait()? {
                return Ok(status);
            }
            if begun.elapsed() > WITHIN {
                self.daemon = Some(daemon);
                bail!("the daemon lives on after {WITHIN:?}: it did not pass the failpoint");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the daemon has killed itself.
    pub fn died(&mut self) -> Result<()> {
        let status = self.ended()?;
        ensure!(status.signal() == Some(9), "the daemon ended otherwise than by SIGKILL: {status}");
        Ok(())
    }

    /// Kills the daemon.
    pub fn kill(&mut self) -> Result<()> {
        kill_process(
            Pid::from_child(self.daemon.as_ref().context("no daemon runs")?),
            Signal::KILL,
        )?;
        self.died()
    }

    /// Stops the daemon as an administrator would.
    pub fn stop(&mut self) -> Result<()> {
        if let Some(daemon) = &self.daemon {
            kill_process(Pid::from_child(daemon), Signal::TERM)?;
            let status = self.ended()?;
            ensure!(status.success(), "a daemon that was asked to stop: {status}");
        }
        Ok(())
    }

    /// The daemon's pid.
    pub fn pid(&self) -> Result<u32> {
        Ok(self.daemon.as_ref().context("no daemon runs")?.id())
    }

    /// What the daemons have logged.
    pub fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// The end of what the daemons have logged.
    pub fn log(&self) -> String {
        let log = std::fs::read_to_string(self.log_file()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }

    /// The VMM processes of this testbed, by VM. Zygotes have no VM.
    pub fn processes(&self) -> BTreeMap<VmId, ProcessId> {
        let all = self.vmms().into_iter();
        all.filter_map(|(vm, process)| Some((vm?, process))).collect()
    }

    fn vmms(&self) -> Vec<(Option<VmId>, ProcessId)> {
        let name = self.run().join("dayfly-vmm");
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let found = pids.filter_map(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let mut words = line.split(|byte| *byte == 0);
            (words.next()? == name.as_os_str().as_encoded_bytes()).then_some(())?;
            words.find(|word| *word == b"--id");
            let vm = words.next().and_then(|id| std::str::from_utf8(id).ok()?.parse().ok());
            Some((vm, ProcessId::of(pid).ok()??))
        });
        found.collect()
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        let killed = self.daemon.take().map(|mut daemon| {
            let _ = daemon.kill();
            let _ = daemon.wait();
        });
        // Guests spin, so guests that a failed test leaves would take the CPUs from later tests.
        for (_, id) in self.vmms() {
            if let Ok(Some(process)) = Process::open(id) {
                let _ended_already = process.kill();
                let _ = process.wait(Some(WITHIN));
            }
        }
        // A daemon that stops removes them itself.
        if killed.is_some()
            && let Ok(groups) = Groups::open(&Root::Own, &self.run(), false)
        {
            // Relays end when their VM has ended.
            let until = Instant::now() + WITHIN;
            for group in groups.list().unwrap_or_default() {
                while groups.remove(group).is_err() && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            let _ = groups.close();
        }
    }
}
