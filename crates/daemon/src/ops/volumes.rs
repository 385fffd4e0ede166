//! The volumes of VMs: opened before a VM is made, mounted before its first program starts, and
//! watched while it lives.
//!
//! ```text
//!  checked ─▶ opened with the client's rights ─▶ guest has its identity ─▶ for each volume:
//!     agent mounts it ─▶ the stream and the folder go to `dayfly-volume` ─▶ its end is watched
//! ```
//!
//! Neither the daemon nor its restart matters to a volume that is mounted: the server has the
//! stream to the guest, and ends with it. A server that ends before its VM is not replaced, because
//! the guest's kernel has ended the file system; `inspect` and an event say it.

use crate::base::caller::Caller;
use crate::base::config::VOLUME_NAME;
use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::pidfd::readable;
use crate::daemon::Daemon;
use crate::model::volumes::{VolumeFacts, VolumeState, checked};
use crate::ops::programs::needs;
use crate::vm::{OpenVolume, Vm, record};
use crate::vmm::agent_link::{AgentLink, LinkError};
use crate::vmm::source::Opened;
use crate::volumes::folder::{self, FolderError};
use crate::volumes::named::Found;
use crate::volumes::offers;
use crate::volumes::server::{self, Order, ServerError, explained};
use dayfly_api::agent::{Reply, Request, protocol_of};
use dayfly_api::types::{ErrorCode, EventKind, VolumeOffer, VolumeRequest, VolumeSource};
use dayfly_host::process::Process;
use dayfly_units::error::chain;
use dayfly_units::text::{SHORT, escaped};
use dayfly_units::{Name, VmId};
use rustix::io::Errno;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// The version of the agent's protocol that mounts volumes.
const MOUNT: u32 = 2;

/// From the end of a server until its VM has ended, if the VM's end is the cause. After the VM's
/// end, until a server that still runs is killed.
const WITH_ITS_VM: Duration = Duration::from_secs(2);

/// The volumes that a client asks for.
///
/// # Errors
/// What is wrong with which one; or the client's user is not known.
pub fn asked(
    daemon: &Daemon,
    requests: &[VolumeRequest],
    caller: Option<&Caller>,
) -> Outcome<Vec<VolumeFacts>> {
    if requests.is_empty() {
        return Ok(Vec::new());
    }
    let owner = known(caller)?;
    let of_host = requests.iter().find_map(|volume| match &volume.source {
        VolumeSource::Path(path) => Some(path),
        VolumeSource::Name(_) | VolumeSource::Offer(_) => None,
    });
    if let Some(path) = of_host.filter(|_| daemon.config.ports.is_some()) {
        let shown: String = path.chars().take(200).collect();
        return Err(ApiError::invalid(format_args!(
            "volume {shown:?}: this daemon runs in a machine, which has no access to the folders \
             of the user's host; `dayfly` without DAYFLY_HOST offers the folder from there; or use \
             a named volume (-v NAME:/PATH), or `dayfly cp`"
        )));
    }
    let offered = |volume: &VolumeRequest| matches!(volume.source, VolumeSource::Offer(_));
    if daemon.config.ports.is_none() && requests.iter().any(offered) {
        return Err(ApiError::invalid(
            "volumes: expected a path or a name, got an offer: this daemon runs in no machine, and \
             opens folders by path",
        ));
    }
    checked(requests, owner)
}

/// The user of a client.
///
/// # Errors
/// The connection does not say it.
pub fn known(caller: Option<&Caller>) -> Outcome<&Caller> {
    caller.ok_or_else(|| {
        ApiError::invalid(
            "volumes: expected a connection over a unix socket, which says whose rights the client \
             has; got one that does not say it",
        )
    })
}

/// Checks that the agent of a VM that is made from `opened` can mount volumes. That of a cold boot
/// is not known yet.
///
/// # Errors
/// [`ErrorCode::State`]: the agent is that of an earlier version, in a snapshot.
pub(crate) fn supported(opened: &Opened, volumes: &[VolumeFacts]) -> Outcome<()> {
    let Some(version) = opened.agent_version() else { return Ok(()) };
    let got = protocol_of(version);
    if volumes.is_empty() || got >= MOUNT {
        return Ok(());
    }
    Err(ApiError::new(
        ErrorCode::State,
        format_args!(
            "volumes: expected an agent with protocol {MOUNT} in the snapshot, got {got} (version \
             {:?}); bake the snapshot anew",
            escaped(version, SHORT)
        ),
    ))
}

/// Opens the folders of volumes, each with the rights of its client.
///
/// # Errors
/// Names the volume and what its client may not do.
pub async fn open(daemon: &Arc<Daemon>, volumes: &[VolumeFacts]) -> Outcome<Vec<OpenVolume>> {
    if volumes.is_empty() {
        return Ok(Vec::new());
    }
    for volume in volumes {
        if let VolumeSource::Offer(VolumeOffer { token, path, .. }) = &volume.source {
            offers::checked(token)?;
            daemon.offers.made(token, path).await?;
        }
    }
    let program = server::program(&daemon.config);
    if !program.is_file() {
        return Err(ApiError::internal(format_args!(
            "volumes: {}: expected the program {VOLUME_NAME} beside dayfly-vmm, got none",
            program.display()
        )));
    }
    let mut open = Vec::with_capacity(volumes.len());
    for volume in volumes {
        open.push(opened(daemon, volume).await?);
    }
    Ok(open)
}

async fn opened(daemon: &Arc<Daemon>, volume: &VolumeFacts) -> Outcome<OpenVolume> {
    let owner = &volume.owner;
    match &volume.source {
        VolumeSource::Path(path) => {
            let folder = folder::open(Path::new(path), owner, daemon.config.deadlines.agent).await;
            let folder = folder.map_err(|error| not_opened(&error))?;
            Ok(OpenVolume { folder: Some(folder), hold: None })
        }
        VolumeSource::Name(name) => {
            let (daemon, owner, name) = (daemon.clone(), owner.clone(), name.clone());
            let (folder, hold) = blocking(move || daemon.volumes.open(&owner, &name)).await?;
            Ok(OpenVolume { folder: Some(folder), hold: Some(hold) })
        }
        VolumeSource::Offer(_) => Ok(OpenVolume { folder: None, hold: None }),
    }
}

fn not_opened(error: &FolderError) -> ApiError {
    let code = match error {
        FolderError::Refused { errno: Errno::NOSPC | Errno::DQUOT, .. } => ErrorCode::Exhausted,
        FolderError::Late { .. } => ErrorCode::Timeout,
        FolderError::Rights { .. } => ErrorCode::Internal,
        FolderError::Refused { .. } | FolderError::Upwards(_) | FolderError::File(_) => {
            ErrorCode::Invalid
        }
    };
    ApiError::new(code, format_args!("volume {}", chain(error)))
}

/// Mounts the volumes of a VM whose guest has its identity, and starts their servers.
///
/// # Errors
/// Names the volume. Servers that were started end with the VM.
pub async fn mount(daemon: &Arc<Daemon>, vm: &Arc<Vm>) -> Outcome<()> {
    let open = vm.volumes.take();
    if vm.facts.volumes.is_empty() {
        return Ok(());
    }
    if open.len() != vm.facts.volumes.len() {
        return Err(ApiError::internal("volumes of a VM that were not opened"));
    }
    needs(vm, MOUNT, "mounting volumes")?;
    vm.update(|live| live.volumes = vec![VolumeState::default(); open.len()]);
    for (number, (volume, open)) in vm.facts.volumes.iter().zip(open).enumerate() {
        let mounted = mount_one(daemon, vm, number, volume, open).await;
        mounted
            .map_err(|e| e.during(format_args!("volume {} at {}", volume.name(), volume.target)))?;
    }
    Ok(())
}

async fn mount_one(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    number: usize,
    volume: &VolumeFacts,
    open: OpenVolume,
) -> Outcome<()> {
    let doing = "mounting a volume";
    let within = daemon.config.deadlines.agent;
    let mut link = AgentLink::connect(&vm.dir.vsock(), within).await?;
    let (path, name) = (volume.target.clone(), volume.name().to_owned());
    link.send(&Request::Mount { path, name, read_only: volume.read_only }, doing).await?;
    match link.reply(doing).await? {
        Reply::Ok => {}
        reply => {
            let got = format!("{reply:?}").chars().take(SHORT).collect();
            return Err(LinkError::Unexpected { doing, expected: "Ok", got }.into());
        }
    }
    let stream = link.into_stream().into_std().map_err(ApiError::internal)?;
    // From now on the stream has FUSE messages, and the server reads and writes them.
    stream.set_nonblocking(false).map_err(ApiError::internal)?;
    let (config, dir, owner) = (daemon.config.clone(), vm.dir.clone(), volume.owner.clone());
    let (read_only, vm, daemon) = (volume.read_only, vm.clone(), daemon.clone());
    let OpenVolume { folder, hold } = open;
    let other = match &volume.source {
        VolumeSource::Offer(VolumeOffer { token, path, .. }) => {
            Some(daemon.offers.stream(token, path, within).await?)
        }
        VolumeSource::Path(_) | VolumeSource::Name(_) => None,
    };
    blocking(move || {
        let stream = stream.into();
        let process = match (folder, other) {
            (Some(folder), _) => {
                let order = Order { stream, folder, owner: &owner, read_only, dir: &dir, number };
                server::start(&config, order, within)
            }
            (None, Some(other)) => server::join(&dir, stream, other.into()),
            (None, None) => return Err(ApiError::internal("a volume without a folder")),
        };
        let process = process.map_err(|e| not_served(&e))?;
        // Here, because a caller that goes away would lose the process.
        let id = process.id();
        watch(&daemon, vm.clone(), number, process);
        // A VM that has ended meanwhile has none.
        vm.update(|live| {
            if let Some(volume) = live.volumes.get_mut(number) {
                volume.server = Some(id);
            }
        });
        drop(hold);
        Ok(())
    })
    .await
}

fn not_served(error: &ServerError) -> ApiError {
    let code = match error {
        ServerError::Refused { .. } => ErrorCode::Invalid,
        ServerError::Late(_) => ErrorCode::Timeout,
        ServerError::Io { .. } | ServerError::Spawn(_) => ErrorCode::Internal,
    };
    ApiError::new(code, chain(error))
}

/// Waits for the end of the server of a VM's volume. Must be called in a Tokio runtime.
fn watch(daemon: &Arc<Daemon>, vm: Arc<Vm>, number: usize, process: Process) {
    let daemon = daemon.clone();
    let id = process.id();
    daemon.volume_servers.add(id);
    tokio::spawn(async move {
        tokio::select! {
            ended = readable(&process) => {
                if let Err(e) = ended {
                    tracing::error!(vm = %vm.id, "waiting for the server of a volume: {e}");
                }
            }
            () = vm.wait_gone() => {
                // Its stream has ended. One that hangs all the same, such as in a network file
                // system, must not stay.
                if timeout(WITH_ITS_VM, readable(&process)).await.is_err()
                    && let Err(e) = process.kill()
                {
                    tracing::error!(vm = %vm.id, "ending the server of a volume: {e}");
                }
                let _ = readable(&process).await;
            }
        }
        let log = vm.dir.volume_log(number);
        let how = blocking(move || {
            // Reaps it, if it is a child of this daemon.
            let ended = process.wait(Some(Duration::ZERO)).map_err(ApiError::internal)?;
            Ok(explained(ended, &log))
        });
        let how = how.await.unwrap_or_else(|error| error.0.message);
        daemon.volume_servers.remove(id);
        lost(&daemon, &vm, number, how).await;
    });
}

/// Notes that a server has ended, unless its VM ends too.
async fn lost(daemon: &Arc<Daemon>, vm: &Arc<Vm>, number: usize, how: String) {
    if timeout(WITH_ITS_VM, vm.wait_gone()).await.is_ok()
        || !daemon.registry.holds(vm)
        || vm.live().kill_asked
    {
        return;
    }
    let Some(volume) = vm.facts.volumes.get(number) else { return };
    let why = format!(
        "volume {} at {}: its server has ended ({how}); programs of the guest get ENOTCONN until \
         the VM is restarted",
        volume.name(),
        volume.target
    );
    tracing::warn!(vm = %vm.id, name = %vm.name, "{why}");
    vm.update(|live| {
        if let Some(state) = live.volumes.get_mut(number) {
            *state = VolumeState { server: None, problem: Some(why.clone()) };
        }
    });
    record::note(&daemon.registry, vm).await;
    daemon.happened_because(vm, EventKind::VolumeLost, why);
}

/// Watches the servers of an adopted VM, and notes those that have ended meanwhile. Must be called
/// in a Tokio runtime.
pub fn follow(daemon: &Arc<Daemon>, vm: &Arc<Vm>) {
    for (number, state) in vm.live().volumes.into_iter().enumerate() {
        let Some(id) = state.server else { continue };
        match Process::open(id) {
            Ok(Some(process)) => watch(daemon, vm.clone(), number, process),
            Ok(None) => {
                let (daemon, vm, log) = (daemon.clone(), vm.clone(), vm.dir.volume_log(number));
                tokio::spawn(async move {
                    let how = blocking(move || Ok(explained(None, &log))).await;
                    lost(&daemon, &vm, number, how.unwrap_or_default()).await;
                });
            }
            Err(e) => tracing::error!(vm = %vm.id, "the server of a volume: {e}"),
        }
    }
}

/// Whether a VM has the folder that is offered with this token.
#[must_use]
pub fn is_used(daemon: &Daemon, token: &str) -> bool {
    let offered = |volume: &VolumeFacts| match &volume.source {
        VolumeSource::Offer(offer) => offer.token == token,
        VolumeSource::Path(_) | VolumeSource::Name(_) => false,
    };
    daemon.registry.all().iter().any(|vm| vm.facts.volumes.iter().any(offered))
}

/// A named volume of a user, and the VMs that have it.
#[derive(Debug)]
pub struct Listed {
    /// The volume.
    pub volume: Found,
    /// The VMs, those included that have ended.
    pub vms: Vec<VmId>,
}

/// The named volumes of a user, by name.
///
/// # Errors
/// The file system's error.
pub async fn list(daemon: &Arc<Daemon>, uid: u32) -> Outcome<Vec<Listed>> {
    let same = daemon.clone();
    let found = blocking(move || same.volumes.list(uid)).await?;
    let listed = |volume: Found| Listed { vms: users(daemon, uid, &volume.name), volume };
    Ok(found.into_iter().map(listed).collect())
}

/// One named volume of a user.
///
/// # Errors
/// There is none.
pub async fn find(daemon: &Arc<Daemon>, uid: u32, name: Name) -> Outcome<Listed> {
    let (same, wanted) = (daemon.clone(), name.clone());
    let volume = blocking(move || same.volumes.find(uid, &wanted)).await?;
    Ok(Listed { volume, vms: users(daemon, uid, &name) })
}

/// Makes a named volume of a user, or finds it.
///
/// # Errors
/// The file system's error.
pub async fn create(daemon: &Arc<Daemon>, caller: &Caller, name: Name) -> Outcome<Listed> {
    let (same, caller, wanted) = (daemon.clone(), caller.clone(), name.clone());
    let uid = caller.uid;
    let volume = blocking(move || same.volumes.ensure(&caller, &wanted)).await?;
    Ok(Listed { volume, vms: users(daemon, uid, &name) })
}

/// Removes a named volume of a user, with its files.
///
/// # Errors
/// There is none, or a VM has it.
pub async fn remove(daemon: &Arc<Daemon>, uid: u32, name: Name) -> Outcome<()> {
    // The client of such a VM may have ended just before, and expects it to be gone.
    for vm in having(daemon, uid, &name).filter(|vm| vm.leaving()) {
        let _ = timeout(daemon.config.deadlines.control, vm.wait_gone()).await;
    }
    let same = daemon.clone();
    blocking(move || {
        let used_by = || {
            let vm = having(&same, uid, &name).find(|vm| !(vm.leaving() && vm.is_gone()))?;
            Some(format!("VM {}{}", vm.name, if vm.phase().alive() { "" } else { " (ended)" }))
        };
        same.volumes.remove(uid, &name, used_by)
    })
    .await
}

fn users(daemon: &Daemon, uid: u32, name: &Name) -> Vec<VmId> {
    having(daemon, uid, name).map(|vm| vm.id).collect()
}

/// The VMs that have a named volume.
fn having<'a>(
    daemon: &Daemon,
    uid: u32,
    name: &'a Name,
) -> impl Iterator<Item = Arc<Vm>> + use<'a> {
    let has = move |volume: &VolumeFacts| {
        volume.owner.uid == uid && matches!(&volume.source, VolumeSource::Name(own) if own == name)
    };
    // Also one that is being removed, or whose VMM does not answer: its server may still write.
    daemon.registry.all().into_iter().filter(move |vm| vm.facts.volumes.iter().any(has))
}

#[cfg(test)]
#[path = "volumes_tests.rs"]
mod tests;
