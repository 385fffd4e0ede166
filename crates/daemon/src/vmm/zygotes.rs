//! The zygotes, one for each memory node, from which all VMMs are forked ([`dayfly_vmm::zygote`]).
//!
//! A VMM inherits the CPUs and the memory policy of its zygote, and therefore of its node. A zygote
//! is started when it is first needed, and again after it has ended or is worn.

use crate::base::config::Config;
use crate::base::groups::{GroupLease, GroupStock};
use dayfly_host::numa::Node;
use dayfly_host::process::Process;
use dayfly_host::spawn::{FIRST_FD, Namespaces, Program, Spawn, SpawnError, Stdio};
use dayfly_units::{error::chain, sync::lock};
use dayfly_vmm::config::{VmmConfig, ZygoteConfig};
use dayfly_vmm::zygote::Client;
use dayfly_vmm::zygote::client::{ClientError, Forked, Group};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

/// Why no VMM was forked.
#[derive(Debug, thiserror::Error)]
pub enum ZygoteError {
    /// /dev/kvm cannot be opened.
    #[error("starting a zygote: /dev/kvm")]
    Kvm(#[source] io::Error),
    /// The socket pair for the zygote cannot be made.
    #[error("starting a zygote: a socket")]
    Socket(#[source] io::Error),
    /// The zygote's process cannot be started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// The zygote's pidfd cannot be opened.
    #[error("starting a zygote: its process")]
    Process(#[source] io::Error),
    /// The zygote did not fork the VMM.
    #[error("forking a VMM: {}", chain(.0))]
    Client(#[from] ClientError),
}

/// Time limit for the end of a zygote.
const LAST: Duration = Duration::from_secs(2);

/// How often a zygote is started again for one VMM, if the zygote is killed before it has forked.
const TRIES: u32 = 2;

/// A running zygote.
#[derive(Debug)]
struct Running {
    /// `None` only while this is dropped.
    client: Option<Client<GroupLease>>,
    process: Process,
}

impl Drop for Running {
    fn drop(&mut self) {
        // The zygote ends when its connection is closed.
        if let Some(client) = self.client.take() {
            client.end(LAST);
        }
        if let Err(e) = self.process.wait(Some(LAST)) {
            tracing::warn!("a zygote does not end: {e}");
        }
    }
}

impl Running {
    fn fork(
        &mut self,
        config: &VmmConfig,
        fds: &[BorrowedFd<'_>],
        groups: &GroupStock,
    ) -> Result<Forked<GroupLease>, ClientError> {
        let client = self.client.as_mut().ok_or(ClientError::Gone)?;
        client.fork(config, fds, || group(groups))
    }
}

#[derive(Debug)]
struct Zygote {
    node: Node,
    running: Mutex<Option<Running>>,
}

/// A control group for the next pre-forked VMM.
fn group(groups: &GroupStock) -> Option<Group<GroupLease>> {
    groups.take().map(|(owner, entry)| Group { owner, entry })
}

/// All zygotes of a daemon.
#[derive(Debug)]
pub struct Zygotes {
    program: PathBuf,
    name: PathBuf,
    folder: PathBuf,
    within: Duration,
    groups: GroupStock,
    zygotes: Vec<Zygote>,
}

impl Zygotes {
    /// A zygote for each of `nodes`, none of them started. VMMs are made in `groups`.
    #[must_use]
    pub fn new(config: &Config, nodes: &[Node], groups: GroupStock) -> Self {
        let of = |node: &Node| Zygote { node: node.clone(), running: Mutex::default() };
        Self {
            program: config.vmm.clone(),
            name: config.vmm_name(),
            folder: config.vms(),
            within: config.deadlines.control,
            groups,
            zygotes: nodes.iter().map(of).collect(),
        }
    }

    /// Starts all zygotes that do not run, so that the first request does not wait for them.
    ///
    /// # Errors
    /// [`ZygoteError`].
    pub fn warm(&self) -> Result<(), ZygoteError> {
        for zygote in &self.zygotes {
            let mut running = lock(&zygote.running);
            if running.is_none() {
                *running = Some(self.start(&zygote.node, &self.groups)?);
            }
        }
        Ok(())
    }

    /// Has the zygote of this node make the next pre-forked VMM. Does not wait for it.
    pub fn prepare(&self, node: usize) {
        // If the lock is taken, its holder prepares; if the zygote has ended, the next fork
        // notices.
        if let Ok(mut running) = self.zygote(node).running.try_lock()
            && let Some(client) = running.as_mut().and_then(|running| running.client.as_mut())
        {
            let _ = client.prepare(|| group(&self.groups));
        }
    }

    fn zygote(&self, node: usize) -> &Zygote {
        &self.zygotes[node.min(self.zygotes.len() - 1)]
    }

    /// Forks a VMM on this node. A descriptor in `config` is the index of a descriptor in `fds`.
    ///
    /// # Errors
    /// [`ZygoteError`].
    pub fn fork(
        &self,
        node: usize,
        config: &VmmConfig,
        fds: &[OwnedFd],
    ) -> Result<Forked<GroupLease>, ZygoteError> {
        let zygote = self.zygote(node);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut running = lock(&zygote.running);
        let worn = running.take_if(|r| r.client.as_ref().is_none_or(Client::is_worn));
        let mut ending: Vec<Running> = worn.into_iter().collect();
        let forked = self.fork_from(&zygote.node, &mut running, &mut ending, config, &fds);
        drop(running);
        // After the lock, because other forks must not wait for the end of these zygotes.
        drop(ending);
        forked
    }

    /// Forks a VMM from the zygote `running`, or from a new one. Moves zygotes that have gone to
    /// `ending`.
    fn fork_from(
        &self,
        node: &Node,
        running: &mut Option<Running>,
        ending: &mut Vec<Running>,
        config: &VmmConfig,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Forked<GroupLease>, ZygoteError> {
        let mut own = running.take();
        let mut tries = 0;
        loop {
            // The last try is without a group, in case that none can be entered.
            let without = GroupStock::default();
            let groups = if tries < TRIES { &self.groups } else { &without };
            let started = own.take().map_or_else(|| self.start(node, groups), Ok);
            let forked = started.and_then(|mut own| match own.fork(config, fds, groups) {
                Ok(child) => {
                    *running = Some(own);
                    Ok(child)
                }
                Err(e) => {
                    ending.push(own);
                    Err(e.into())
                }
            });
            match forked {
                Err(ZygoteError::Client(
                    e @ (ClientError::Gone | ClientError::Wire(_) | ClientError::Timeout(_)),
                )) if tries < TRIES => {
                    tries += 1;
                    tracing::warn!("a zygote has gone, starting another: {}", chain(&e));
                }
                forked => return forked,
            }
        }
    }

    /// The pids of the running zygotes.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        let running =
            |zygote: &Zygote| lock(&zygote.running).as_ref().map(|own| own.process.id().pid);
        self.zygotes.iter().filter_map(running).collect()
    }

    /// Ends all zygotes; VMMs live on.
    pub fn end(&self) {
        for zygote in &self.zygotes {
            drop(lock(&zygote.running).take());
        }
    }

    fn start(&self, node: &Node, groups: &GroupStock) -> Result<Running, ZygoteError> {
        let (ours, theirs) = UnixStream::pair().map_err(ZygoteError::Socket)?;
        let mut spawn = Spawn::new(Program::Path(self.program.clone()), &self.name);
        spawn.argv.extend(Client::<GroupLease>::arguments(FIRST_FD).map(Into::into));
        spawn.namespaces = Namespaces::MOUNT.and(Namespaces::NET);
        spawn.fds = vec![(theirs.into(), FIRST_FD)];
        spawn.stderr = Stdio::Inherit;
        let process = Process::from_child(spawn.run()?).map_err(ZygoteError::Process)?;
        let mut running = Running { client: None, process };
        let config = ZygoteConfig {
            folder: self.folder.clone(),
            cpus: node.cpus.clone(),
            node: node.number,
        };
        let kvm =
            File::options().read(true).write(true).open("/dev/kvm").map_err(ZygoteError::Kvm)?;
        let first = || group(groups);
        running.client = Some(Client::new(ours, &config, kvm.as_fd(), self.within, first)?);
        Ok(running)
    }
}
