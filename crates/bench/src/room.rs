//! A store, a run folder and a daemon of our own, in a temporary folder.

use crate::bake;
use anyhow::{Context, Result, bail};
use dayfly_api::client::Client;
use dayfly_api::types::{CreateRequest, NetworkRequest, Source, Vm};
use dayfly_host::process::{Process, ProcessId};
use dayfly_units::{Name, VmId};
use dayfly_vmm::control;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long anything here may take before it counts as hung.
const WITHIN: Duration = Duration::from_secs(60);
/// For how long nothing may change for the pool to count as full.
const QUIET: Duration = Duration::from_millis(60);

/// The folder, and the daemon if it runs. Dropped, it takes everything with it.
#[derive(Debug)]
pub struct Room {
    folder: tempfile::TempDir,
    /// On a tmpfs, as /run is.
    run: tempfile::TempDir,
    programs: PathBuf,
    daemon: Option<Child>,
    /// Asks the daemon.
    pub client: Client,
}

/// A birth as client and VMM saw it, in microseconds of one clock.
#[derive(Debug)]
pub struct Birth {
    /// The VM.
    pub vm: Vm,
    /// Just before the request was sent.
    pub sent_us: u64,
    /// When the answer had been read.
    pub answered_us: u64,
    /// The restored guest's first write to a port.
    pub written_us: u64,
}

impl Birth {
    /// Request to first port write.
    pub fn took_us(&self) -> u64 {
        self.written_us - self.sent_us
    }
}

impl Room {
    /// A room with an empty store.
    pub fn new(programs: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("dfbench").tempdir().context("a temporary folder")?;
        let run = tempfile::Builder::new().prefix("dfbench").tempdir_in("/dev/shm").context("/dev/shm")?;
        let client = Client::new(run.path().join("dayflyd.sock"));
        Ok(Self { folder, run, programs: programs.to_owned(), daemon: None, client })
    }

    /// The store's folder.
    pub fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// The daemon's run folder.
    pub fn run(&self) -> PathBuf {
        self.run.path().to_owned()
    }

    /// The program that is a VMM; `DAYFLY_VMM` names another, as for the daemon.
    pub fn vmm(&self) -> PathBuf {
        std::env::var_os("DAYFLY_VMM").map_or_else(|| self.programs.join("dayfly-vmm"), PathBuf::from)
    }

    /// What VMMs of this room are called in process listings.
    pub fn vmm_name(&self) -> PathBuf {
        self.run().join("dayfly-vmm")
    }

    /// A snapshot of a guest that obeys `words` and then waits; see [`bake`]. Not while the daemon runs.
    pub fn bake(&self, name: &Name, memory_bytes: u64, words: &str) -> Result<()> {
        bake::bake(self, name, memory_bytes, words).with_context(|| format!("baking {name}"))
    }

    /// The memory file of a snapshot.
    pub fn memory_of(&self, name: &Name) -> PathBuf {
        self.state().join("snapshots").join(name.as_str()).join("memory")
    }

    /// Starts the daemon, and waits until it answers.
    pub async fn start(&mut self) -> Result<()> {
        self.start_with(&[]).await
    }

    /// As [`Self::start`], with arguments.
    pub async fn start_with(&mut self, arguments: &[&str]) -> Result<()> {
        let log = std::fs::File::options().append(true).create(true).open(self.folder.path().join("log"))?;
        let daemon = Command::new(self.programs.join("dayflyd"))
            .env("DAYFLY_STATE", self.state())
            .env("DAYFLY_RUN", self.run())
            .env("DAYFLY_VMM", self.vmm())
            .env_remove("RUST_LOG")
            // Thousands of VMs of which each touches next to nothing.
            .args(["--overcommit", "10000", "--network", "none"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("starting dayflyd")?;
        let daemon = self.daemon.insert(daemon);
        let begun = Instant::now();
        loop {
            if self.client.info().await.is_ok() {
                return Ok(());
            }
            if daemon.try_wait()?.is_some() || begun.elapsed() > WITHIN {
                bail!("dayflyd did not start:\n{}", self.log());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// What the daemon has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Stops the daemon as an administrator would.
    pub fn stop(&mut self) -> Result<()> {
        let Some(mut daemon) = self.daemon.take() else { return Ok(()) };
        kill_process(pid(&daemon)?, Signal::TERM)?;
        daemon.wait()?;
        Ok(())
    }

    /// Asks for a clone of `snapshot`; gives it, and when that was asked.
    pub async fn create(&self, snapshot: &Name) -> Result<(Vm, u64)> {
        let request = CreateRequest {
            source: Source::Snapshot(snapshot.clone()),
            name: None,
            labels: BTreeMap::new(),
            forks: 0,
            network: NetworkRequest::default(),
        };
        let sent_us = crate::common::now_us();
        Ok((self.client.create(&request).await?, sent_us))
    }

    /// As [`Self::create`], with all its times.
    pub async fn birth(&self, snapshot: &Name) -> Result<Birth> {
        let (vm, sent_us) = self.create(snapshot).await?;
        let answered_us = crate::common::now_us();
        let written_us = self.first_port_write_us(vm.id)?;
        Ok(Birth { vm, sent_us, answered_us, written_us })
    }

    /// When the guest of a VM first wrote to a port. It may be about to.
    pub fn first_port_write_us(&self, id: VmId) -> Result<u64> {
        let begun = Instant::now();
        while begun.elapsed() < WITHIN {
            let status = self.control(id).and_then(|mut control| Ok(control.status()?));
            let status = status.with_context(|| {
                let exit = self.run().join(format!("vms/{id}/exit.json"));
                format!("VM {id}; its exit record: {:?}", std::fs::read_to_string(exit).unwrap_or_default())
            })?;
            if let Some((_, us)) = status.phases.iter().find(|(phase, _)| phase == "first port write") {
                return Ok(*us);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        bail!("VM {id}: its guest wrote to no port");
    }

    /// A connection to the VMM of a VM.
    pub fn control(&self, id: VmId) -> Result<control::Client> {
        let path = self.run().join(format!("vms/{id}/control.sock"));
        Ok(control::Client::connect(&path, Some(WITHIN))?)
    }

    /// What the guest of a VM has written to its console.
    pub fn console(&self, id: VmId) -> String {
        std::fs::read_to_string(self.run().join(format!("vms/{id}/console.log"))).unwrap_or_default()
    }

    /// How much that is.
    pub fn console_bytes(&self, id: VmId) -> Result<u64> {
        Ok(std::fs::metadata(self.run().join(format!("vms/{id}/console.log")))?.len())
    }

    /// Removes a VM that runs; the microseconds until the daemon answered.
    pub async fn remove(&self, id: VmId) -> Result<u64> {
        let before = crate::common::now_us();
        self.client.remove_vm(&id.to_string(), true).await?;
        Ok(crate::common::now_us() - before)
    }

    /// How many VMMs wait in the daemon's pool, and how many of them have their guest already. Asked of the daemon: looking through the folders
    /// of thousands of VMs is work that grows with them, just before the birth that is to be measured.
    pub async fn waiting(&self) -> Result<(usize, usize)> {
        let metrics = self.client.metrics().await?;
        let number = |name: &str| {
            let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            value.and_then(|n| n.parse().ok()).with_context(|| format!("{name} in /metrics"))
        };
        Ok((number("dayfly_waiting")?, number("dayfly_waiting_clones")?))
    }

    /// Waits until the pool is as full as it gets: a clone and a shell wait at least, and nothing changed for a while.
    pub async fn pool_is_full(&self) -> Result<()> {
        let begun = Instant::now();
        let mut before = ((0, 0), Instant::now());
        while begun.elapsed() < WITHIN {
            let now = self.waiting().await?;
            let (all, primed) = now;
            if now != before.0 {
                before = (now, Instant::now());
            } else if before.1.elapsed() >= QUIET && primed > 0 && primed < all {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let (all, primed) = before.0;
        bail!("the pool did not fill within {WITHIN:?}: {all} wait, {primed} of them clones:\n{}", self.log())
    }

    /// Stops the daemon and counts the processes that are still there: there should be none.
    pub fn end(&mut self) -> Result<usize> {
        self.stop()?;
        let left = self.vmms();
        for id in &left {
            eprintln!("leaked: VMM process {}", id.pid);
        }
        Ok(left.len())
    }

    /// All VMM processes of this room.
    fn vmms(&self) -> Vec<ProcessId> {
        processes(&self.vmm_name()).into_iter().map(|vmm| vmm.process).collect()
    }

    /// The daemon's process.
    pub fn daemon(&self) -> Result<u32> {
        Ok(self.daemon.as_ref().context("the daemon does not run")?.id())
    }
}

/// A process of a room that is not the daemon.
#[derive(Debug, Clone, Copy)]
pub struct Vmm {
    /// It.
    pub process: ProcessId,
    /// Its VM; the zygote and its spare have none.
    pub vm: Option<VmId>,
    /// Its parent's pid.
    pub parent: u32,
}

/// All processes called `name`, which no other room's are; zombies have no name.
pub fn processes(name: &Path) -> Vec<Vmm> {
    let pids = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    pids.filter_map(|entry| Vmm::at(entry.file_name().to_str()?.parse().ok()?, name)).collect()
}

impl Vmm {
    /// The process with this pid, if it is called `name`.
    pub fn at(pid: u32, name: &Path) -> Option<Self> {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let mut words = line.split(|byte| *byte == 0);
        (words.next()? == name.as_os_str().as_encoded_bytes()).then_some(())?;
        let process = ProcessId::of(pid).ok()??;
        words.find(|word| *word == b"--id");
        let vm = words.next().and_then(|id| std::str::from_utf8(id).ok()?.parse().ok());
        Some(Self { process, vm, parent: parent(pid)?.0 })
    }
}

/// The parent of a process, and the letter of its state.
pub fn parent(pid: u32) -> Option<(u32, char)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit(')').next()?.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((fields.next()?.parse().ok()?, state))
}

fn pid(child: &Child) -> Result<Pid> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process id")
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        let processes: Vec<_> =
            self.vmms().into_iter().filter_map(|id| Process::open(id).ok().flatten()).collect();
        for process in &processes {
            let _ = process.kill();
        }
        for process in &processes {
            let _ = process.wait(Some(WITHIN));
        }
    }
}
