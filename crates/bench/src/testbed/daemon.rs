//! A daemon with its own store and run folder, in temporary folders.

use crate::prelude::*;

use super::host::now_us;
use super::processes::Vmm;
use crate::requests::{create, metric};
use dayfly_api::client::Client;
use dayfly_api::types::{RemoveManyRequest, Source, Vm};
use dayfly_host::process::Process;
use dayfly_vmm::{control, meter};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::process::{Child, Command, Stdio};

/// How long anything here may take before it counts as hung.
const WITHIN: Duration = Duration::from_secs(60);
/// The pool counts as full if nothing changed for so long.
const QUIET: Duration = Duration::from_millis(60);

/// The folders, and the daemon if it runs. A drop ends all processes and removes the folders.
#[derive(Debug)]
pub struct Testbed {
    folder: tempfile::TempDir,
    /// On a tmpfs, as /run is.
    run: tempfile::TempDir,
    programs: PathBuf,
    daemon: Option<Child>,
    /// A client of the daemon.
    pub client: Client,
}

impl Testbed {
    /// A testbed with an empty store in a new folder below `below`, whose daemon does not run.
    pub(super) fn new(places: &Places, below: &Path) -> Result<Self> {
        ensure!(
            Path::new("/dev/kvm").exists(),
            "/dev/kvm: not found; this scenario needs KVM, even one that emulates"
        );
        let mut prefix = tempfile::Builder::new();
        let folders = prefix.prefix("dfbench");
        let folder = folders.tempdir_in(below).context("a temporary folder")?;
        let run = folders.tempdir_in("/dev/shm").context("/dev/shm")?;
        let client = Client::new(run.path().join("dayflyd.sock"));
        Ok(Self { folder, run, programs: places.programs.clone(), daemon: None, client })
    }

    /// A folder that is removed with the testbed.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The store's folder.
    pub fn state(&self) -> PathBuf {
        self.folder().join("state")
    }

    /// The daemon's run folder.
    pub fn run(&self) -> &Path {
        self.run.path()
    }

    pub(super) fn of_vm(&self, id: VmId, file: &str) -> PathBuf {
        self.run().join(format!("vms/{id}/{file}"))
    }

    /// The name of this testbed's VMMs in process listings.
    pub fn vmm_name(&self) -> PathBuf {
        self.run().join("dayfly-vmm")
    }

    /// Starts the daemon with `arguments`, and waits until it answers. VMs have a network if
    /// `--network` is among them. `DAYFLY_VMM` names another VMM's program.
    pub async fn start(&mut self, arguments: &[&str]) -> Result<()> {
        let log = std::fs::File::options().append(true).create(true).open(self.log_file())?;
        let vmm = std::env::var_os("DAYFLY_VMM").map(PathBuf::from);
        let network: &[&str] = match arguments.contains(&"--network") {
            true => &[],
            false => &["--network", "none"],
        };
        let daemon = Command::new(self.programs.join("dayflyd"))
            .env("DAYFLY_STATE", self.state())
            .env("DAYFLY_RUN", self.run())
            .env("DAYFLY_VMM", vmm.unwrap_or_else(|| self.programs.join("dayfly-vmm")))
            .env_remove("RUST_LOG")
            // Thousands of VMs of which each touches next to nothing.
            .args(["--overcommit", "10000"])
            .args(network)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("starting dayflyd")?;
        let daemon = self.daemon.insert(daemon);
        let begun = Instant::now();
        while self.client.info().await.is_err() {
            if daemon.try_wait()?.is_some() || begun.elapsed() > WITHIN {
                bail!("dayflyd did not start:\n{}", self.log());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    fn log_file(&self) -> PathBuf {
        self.folder().join("log")
    }

    /// What the daemon has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// The daemon's process.
    pub fn daemon(&self) -> Result<u32> {
        Ok(self.daemon.as_ref().context("the daemon does not run")?.id())
    }

    /// Stops the daemon as an administrator would.
    pub fn stop(&mut self) -> Result<()> {
        let Some(mut daemon) = self.daemon.take() else { return Ok(()) };
        kill_process(Pid::from_child(&daemon), Signal::TERM)?;
        daemon.wait()?;
        Ok(())
    }

    /// Stops the daemon; counts and prints the VMM processes that are left, where none should be.
    pub fn end(&mut self) -> Result<usize> {
        self.stop()?;
        let left = Vmm::all(&self.vmm_name());
        left.iter().for_each(|vmm| eprintln!("leaked: VMM process {}", vmm.process.pid));
        println!("  leaked processes: {}", left.len());
        Ok(left.len())
    }

    /// Stops the daemon, and writes the figures with the number of VMM processes that are left.
    pub fn finish(&mut self, report: &Report, mut figures: Value) -> Result<()> {
        figures["leaked"] = self.end()?.into();
        report.write(figures)
    }

    /// Asks for a clone of `snapshot`; returns it, and when the request was sent.
    pub async fn create(&self, snapshot: &Name) -> Result<(Vm, u64)> {
        let request = create(Source::Snapshot(snapshot.clone()), &[]);
        let sent_us = now_us();
        Ok((self.client.create(&request).await?, sent_us))
    }

    /// When the guest of a VM first wrote to a port; waits until it has.
    pub fn first_port_write_us(&self, id: VmId) -> Result<u64> {
        let begun = Instant::now();
        while begun.elapsed() < WITHIN {
            let status = self.control(id).and_then(|mut control| Ok(control.status()?));
            let status = status.with_context(|| {
                let exit = std::fs::read(self.of_vm(id, "exit.json")).unwrap_or_default();
                let record = String::from_utf8_lossy(meter::split(&exit).1).into_owned();
                format!("VM {id}; its exit record: {record:?}")
            })?;
            let mut phases = status.phases.iter();
            if let Some((_, us)) = phases.find(|(phase, _)| phase == "first port write") {
                return Ok(*us);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        bail!("VM {id}: its guest wrote to no port");
    }

    /// A connection to the VMM of a VM.
    pub fn control(&self, id: VmId) -> Result<control::Client> {
        Ok(control::Client::connect(&self.of_vm(id, "control.sock"), Some(WITHIN))?)
    }

    /// What the guest of a VM has written to its console.
    pub fn console(&self, id: VmId) -> String {
        std::fs::read_to_string(self.of_vm(id, "console.log")).unwrap_or_default()
    }

    /// Waits until the console of a VM ends with `end`.
    pub async fn console_ends(&self, id: VmId, end: &str, within: Duration) -> Result<()> {
        let begun = Instant::now();
        while !self.console(id).ends_with(end) {
            if begun.elapsed() > within {
                let got = self.console(id);
                bail!("VM {id}: its console does not end with {end:?} after {within:?}: {got:?}");
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    /// Removes VMs by one request; returns the microseconds until the daemon answered, or 0 if
    /// there are no VMs.
    pub async fn remove_all(&self, ids: &[VmId]) -> Result<u64> {
        if ids.is_empty() {
            return Ok(0);
        }
        let vms = ids.iter().map(ToString::to_string).collect();
        let begun = now_us();
        self.client.remove_many(&RemoveManyRequest { vms, force: true }).await?;
        Ok(now_us() - begun)
    }

    /// Removes a VM that runs; returns the microseconds until the daemon answered.
    pub async fn remove(&self, id: VmId) -> Result<u64> {
        let begun = now_us();
        self.client.remove_vm(&id.to_string(), true).await?;
        Ok(now_us() - begun)
    }

    /// How many VMMs wait in the daemon's pool, and how many of them are warm clones. The daemon is
    /// asked, because a search through the folders of thousands of VMs would disturb the birth that
    /// is measured next.
    pub(super) async fn waiting(&self) -> Result<(usize, usize)> {
        let metrics = self.client.metrics().await?;
        let clones = metric(&metrics, "dayfly_waiting_clones")?;
        Ok((metric(&metrics, "dayfly_waiting")?, clones))
    }

    /// Waits for this time as [`Self::pool_is_full`] does: a host that slept would be slower.
    pub async fn settled(&self, time: Duration) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.waiting().await?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Waits until the pool is as full as it gets: at least a warm clone and a warm VMM wait, and
    /// nothing changed for [`QUIET`].
    pub async fn pool_is_full(&self) -> Result<()> {
        let begun = Instant::now();
        let mut before = ((0, 0), begun);
        while begun.elapsed() < WITHIN {
            let now @ (all, clones) = self.waiting().await?;
            if now != before.0 {
                before = (now, Instant::now());
            } else if before.1.elapsed() >= QUIET && clones > 0 && clones < all {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let ((all, clones), log) = (before.0, self.log());
        bail!(
            "the pool did not fill within {WITHIN:?}: {all} wait, {clones} of them clones:\n{log}"
        )
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        let vmms = Vmm::all(&self.vmm_name()).into_iter();
        let processes: Vec<_> =
            vmms.filter_map(|vmm| Process::open(vmm.process).ok().flatten()).collect();
        processes.iter().for_each(|process| drop(process.kill()));
        processes.iter().for_each(|process| drop(process.wait(Some(WITHIN))));
        // A daemon that stops right after a removal leaves it: the VM still has its address.
        let _not_there = unmount(self.run().join("netns"), UnmountFlags::DETACH);
    }
}
