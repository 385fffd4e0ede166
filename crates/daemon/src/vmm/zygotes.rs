//! The zygotes, one for each memory node, from which all VMMs are forked ([`dayfly_vmm::zygote`]).
//!
//! A VMM inherits the CPUs and the memory policy of its zygote, and therefore of its node. A zygote
//! is started when it is first needed, and again after it has ended or is worn.

use crate::base::config::Config;
use crate::base::groups::{GroupLease, GroupStock};
use dayfly_host::cpus::{self, CpuList};
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
    /// The CPUs of the host cannot be listed.
    #[error("starting a zygote: the CPUs of the host")]
    Cpus(#[source] io::Error),
    /// There is no control group with the booked CPUs.
    #[error("a control group with booked CPUs")]
    Group(#[source] io::Error),
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

    /// Forks a VMM into a group with booked CPUs.
    fn fork_on(
        &mut self,
        config: &VmmConfig,
        fds: &[BorrowedFd<'_>],
        group: Group<GroupLease>,
        cpus: &CpuList,
    ) -> Result<Forked<GroupLease>, ClientError> {
        let client = self.client.as_mut().ok_or(ClientError::Gone)?;
        client.fork_on(config, fds, group, cpus.iter().collect())
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
    /// CPUs of dayflyd and of zygotes, and of no VM; empty: VMs have all.
    main: CpuList,
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
            main: config.main_cpus.clone(),
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
    /// With `cpus`, which are booked, the VMM is forked into a group with them: the pre-forked one,
    /// which is in another group, waits for another VM.
    ///
    /// # Errors
    /// [`ZygoteError`].
    pub fn fork(
        &self,
        node: usize,
        config: &VmmConfig,
        fds: &[OwnedFd],
        cpus: Option<&CpuList>,
    ) -> Result<Forked<GroupLease>, ZygoteError> {
        let zygote = self.zygote(node);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut running = lock(&zygote.running);
        let worn = running.take_if(|r| r.client.as_ref().is_none_or(Client::is_worn));
        let mut ending: Vec<Running> = worn.into_iter().collect();
        let forked = self.fork_from(&zygote.node, &mut running, &mut ending, config, &fds, cpus);
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
        cpus: Option<&CpuList>,
    ) -> Result<Forked<GroupLease>, ZygoteError> {
        let mut own = running.take();
        let mut tries = 0;
        loop {
            // The last try is without a group, in case that none can be entered.
            let without = GroupStock::default();
            let last = tries == TRIES && cpus.is_none();
            let groups = if last { &without } else { &self.groups };
            let started = own.take().map_or_else(|| self.start(node, groups), Ok);
            let booked = cpus.map(|cpus| self.groups.booked(cpus)).transpose();
            let booked = booked.map_err(ZygoteError::Group);
            let forked = started.and_then(|mut own| {
                let forked = match booked.map(|booked| booked.zip(cpus)) {
                    Ok(Some(((owner, entry), cpus))) => {
                        own.fork_on(config, fds, Group { owner, entry }, cpus)
                    }
                    Ok(None) => {
                        if last {
                            self.groups.has_stray();
                        }
                        own.fork(config, fds, groups)
                    }
                    Err(e) => {
                        *running = Some(own);
                        return Err(e);
                    }
                };
                match forked {
                    Ok(child) => {
                        *running = Some(own);
                        Ok(child)
                    }
                    Err(e) => {
                        ending.push(own);
                        Err(e.into())
                    }
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
        let (folder, node_number) = (self.folder.clone(), node.number);
        let config = if self.main.is_empty() {
            let (cpus, vmm_cpus) = (node.cpus.clone(), Vec::new());
            ZygoteConfig { folder, cpus, vmm_cpus, node: node_number }
        } else {
            // The zygote inherits the CPUs of dayflyd, and its VMMs shall not.
            let all = || Ok(cpus::online().map_err(ZygoteError::Cpus)?.iter().collect());
            let of_node = Some(node.cpus.clone()).filter(|cpus| !cpus.is_empty());
            let vmm_cpus = of_node.map_or_else(all, Ok::<_, ZygoteError>)?;
            ZygoteConfig { folder, cpus: Vec::new(), vmm_cpus, node: node_number }
        };
        let kvm =
            File::options().read(true).write(true).open("/dev/kvm").map_err(ZygoteError::Kvm)?;
        let first = || group(groups);
        running.client = Some(Client::new(ours, &config, kvm.as_fd(), self.within, first)?);
        Ok(running)
    }
}
