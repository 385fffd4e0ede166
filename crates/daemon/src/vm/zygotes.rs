//! The zygotes, one for each memory node: what every VMM is forked from ([`dayfly_vmm::zygote`]).
//!
//! A VMM's threads run on its node's CPUs and its memory comes from its node, because its zygote's do. A zygote is started when
//! it is first needed, and anew when it has died or is worn.

use super::registry::lock;
use crate::config::Config;
use crate::error::chain;
use dayfly_host::numa::Node;
use dayfly_host::process::Process;
use dayfly_host::spawn::{Child, FIRST_FD, Namespaces, Program, Spawn, SpawnError, Stdio};
use dayfly_vmm::config::{VmmConfig, ZygoteConfig};
use dayfly_vmm::zygote::Client;
use dayfly_vmm::zygote::client::ClientError;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

/// Why there is no VMM.
#[derive(Debug, thiserror::Error)]
pub enum ZygoteError {
    /// No KVM for it.
    #[error("starting a zygote: /dev/kvm")]
    Kvm(#[source] io::Error),
    /// No socket for it.
    #[error("starting a zygote: a socket")]
    Socket(#[source] io::Error),
    /// It was not started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// Its process.
    #[error("starting a zygote: its process")]
    Process(#[source] io::Error),
    /// It does not do what it is asked.
    #[error("forking a VMM: {}", chain(.0))]
    Client(#[from] ClientError),
}

/// How long one may take to end.
const LAST: Duration = Duration::from_secs(2);

/// How many more are started for one VMM where they are killed before they have forked it.
const TRIES: u32 = 2;

/// A zygote that runs.
#[derive(Debug)]
struct Running {
    /// `None` only while it is dropped.
    client: Option<Client>,
    process: Process,
}

impl Drop for Running {
    fn drop(&mut self) {
        // It ends with its connection.
        if let Some(client) = self.client.take() {
            client.end(LAST);
        }
        if let Err(e) = self.process.wait(Some(LAST)) {
            tracing::warn!("a zygote does not end: {e}");
        }
    }
}

impl Running {
    fn fork(&mut self, config: &VmmConfig, fds: &[BorrowedFd<'_>]) -> Result<Child, ClientError> {
        let (pid, pidfd) = self.client.as_mut().ok_or(ClientError::Gone)?.fork(config, fds)?;
        Ok(Child { pid, pidfd })
    }
}

#[derive(Debug)]
struct Zygote {
    node: Node,
    running: Mutex<Option<Running>>,
}

/// All zygotes of a daemon.
#[derive(Debug)]
pub struct Zygotes {
    program: PathBuf,
    name: PathBuf,
    folder: PathBuf,
    within: Duration,
    zygotes: Vec<Zygote>,
}

impl Zygotes {
    /// One for each of `nodes`; none is started yet.
    #[must_use]
    pub fn new(config: &Config, nodes: &[Node]) -> Self {
        let of = |node: &Node| Zygote { node: node.clone(), running: Mutex::default() };
        Self {
            program: config.vmm.clone(),
            name: config.vmm_name(),
            folder: config.vms(),
            within: config.deadlines.control,
            zygotes: nodes.iter().map(of).collect(),
        }
    }

    /// Starts those that do not run, so that the first birth need not.
    ///
    /// # Errors
    /// [`ZygoteError`].
    pub fn warm(&self) -> Result<(), ZygoteError> {
        for zygote in &self.zygotes {
            let mut running = lock(&zygote.running);
            if running.is_none() {
                *running = Some(self.start(&zygote.node)?);
            }
        }
        Ok(())
    }

    /// Has a spare made for the next VMM on the node at place `node`, and does not wait for it.
    pub fn prepare(&self, node: usize) {
        // Where it is in use somebody else prepares; where it has died the next to use it notices.
        if let Ok(mut running) = self.zygote(node).running.try_lock()
            && let Some(client) = running.as_mut().and_then(|running| running.client.as_mut())
        {
            let _ = client.prepare();
        }
    }

    fn zygote(&self, node: usize) -> &Zygote {
        &self.zygotes[node.min(self.zygotes.len() - 1)]
    }

    /// A new VMM on the node at place `node`. Descriptors in `config` are numbered by their places in `fds`.
    ///
    /// # Errors
    /// [`ZygoteError`].
    pub fn fork(&self, node: usize, config: &VmmConfig, fds: &[OwnedFd]) -> Result<Child, ZygoteError> {
        let zygote = self.zygote(node);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut running = lock(&zygote.running);
        let worn = |r: &Running| r.client.as_ref().is_none_or(Client::is_worn);
        let mut own = running.take_if(|r| !worn(r));
        *running = None;
        let mut tries = 0;
        loop {
            let forked = own.take().map_or_else(|| self.start(&zygote.node), Ok).and_then(|mut own| {
                let child = own.fork(config, &fds)?;
                *running = Some(own);
                Ok(child)
            });
            match forked {
                Err(ZygoteError::Client(e @ (ClientError::Gone | ClientError::Wire(_)))) if tries < TRIES => {
                    tries += 1;
                    tracing::warn!("a zygote has gone, starting another: {}", chain(&e));
                }
                forked => return forked,
            }
        }
    }

    /// The processes of those that run.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        let running = |zygote: &Zygote| lock(&zygote.running).as_ref().map(|own| own.process.id().pid);
        self.zygotes.iter().filter_map(running).collect()
    }

    /// Ends them; VMMs live on.
    pub fn end(&self) {
        for zygote in &self.zygotes {
            drop(lock(&zygote.running).take());
        }
    }

    fn start(&self, node: &Node) -> Result<Running, ZygoteError> {
        let (ours, theirs) = UnixStream::pair().map_err(ZygoteError::Socket)?;
        let mut spawn = Spawn::new(Program::Path(self.program.clone()), &self.name);
        spawn.argv.extend(Client::arguments(FIRST_FD).map(Into::into));
        spawn.namespaces = Namespaces::MOUNT.and(Namespaces::NET);
        spawn.fds = vec![(theirs.into(), FIRST_FD)];
        spawn.stderr = Stdio::Inherit;
        let process = Process::from_child(spawn.run()?).map_err(ZygoteError::Process)?;
        let mut running = Running { client: None, process };
        let config = ZygoteConfig { folder: self.folder.clone(), cpus: node.cpus.clone(), node: node.number };
        let kvm = File::options().read(true).write(true).open("/dev/kvm").map_err(ZygoteError::Kvm)?;
        running.client = Some(Client::new(ours, &config, kvm.as_fd(), self.within)?);
        Ok(running)
    }
}
