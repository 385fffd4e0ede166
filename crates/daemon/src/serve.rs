//! The life of the daemon process: lock, store, adoption, socket, shutdown.

use crate::base::activation;
use crate::base::config::{Config, PACKER_NAME, RELAY_NAME, SOCKET_PATH_MAX, STREAMS_NAME};
use crate::base::error::blocking;
use crate::base::groups::GroupStock;
use crate::base::heap;
use crate::daemon::Daemon;
use crate::http::routes::{self, extract::Peer};
use crate::model::vm_slot::MAX_VMS;
use crate::net::keeper as net_keeper;
use crate::net::publisher::Publisher;
use crate::ops::{adopt, keeper, memory_time, self_fork, space};
use crate::templates::cache::TemplateCache;
use crate::templates::pagers::{PAGER_NAME, Pagers};
use crate::vm::Vm;
use crate::vmm::requested::Requested;
use crate::vmm::sizes::shape_of;
use anyhow::{Context, bail};
use dayfly_host::process::Named;
use dayfly_packer::jail::USER as PACKERS;
use dayfly_pager::jail;
use dayfly_store::Store;
use dayfly_sys::populate::Mapped;
use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sd_notify::NotifyState;
use std::fs::{DirBuilder, File, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// The most connections that wait to be accepted; the kernel takes at most net.core.somaxconn.
const BACKLOG: i32 = 4096;

/// Serves until `end` resolves. VMs survive it, except those that end with a connection or a bake.
///
/// # Errors
/// Another daemon holds the lock; a folder, the store, a thread or the socket cannot be had.
pub async fn serve(config: Config, end: impl Future<Output = ()>) -> anyhow::Result<()> {
    let got = config.longest_socket_path();
    if got > SOCKET_PATH_MAX {
        bail!(
            "run folder {}: expected socket paths of at most {SOCKET_PATH_MAX} bytes in it, \
             got {got}",
            config.run.display()
        );
    }
    folder(&config.run, 0o755)?;
    folder(&config.vms(), 0o711)?;
    let _lock = lock(&config)?;
    folder(&config.state, 0o700)?;
    let store =
        Store::open(&config.state).map_err(|e| anyhow::anyhow!(dayfly_units::error::chain(&e)))?;
    // It is missing on a full disk: each gc and each removal tries again.
    if let Err(e) = store.keep_reserve() {
        tracing::warn!("no reserve for gc: {}", dayfly_units::error::chain(&e));
    }
    let (self_forks, opened) = tokio::sync::mpsc::unbounded_channel();
    let daemon = Arc::new(new(config, store, self_forks)?);
    let limits = daemon.config.limits();
    daemon
        .space
        .publish(&limits)
        .with_context(|| format!("limits of disks, {}", limits.display()))?;
    daemon.launcher.run_dirs.sweep()?;
    daemon.launcher.run_dirs.prepare()?;
    daemon.templates.store().prepare_vm_layers(1)?;
    drop(daemon.volumes.sweep());
    daemon.launcher.zygotes.warm().map_err(|e| anyhow::anyhow!(dayfly_units::error::chain(&e)))?;
    tokio::spawn(self_fork::keep(daemon.clone(), opened));
    // The VMMs are asked while clients are served.
    adopt::adopt(&daemon).await.context("VMs of an earlier daemon")?.detach_all();
    for vm in daemon.registry.all() {
        vm.facts.request.iter().for_each(|key| daemon.requests.adopt(key, vm.id));
    }
    let requested = Requested::read(daemon.config.requested());
    let keeper = tokio::spawn(keeper::keep(daemon.clone(), requested.clone()));
    let space = tokio::spawn(space::keep(daemon.clone()));
    tokio::spawn(memory_time::keep(daemon.clone()));
    let wiring = tokio::spawn(net_keeper::keep(daemon.networks.clone(), daemon.stop.clone()));
    serve_publisher(&daemon)?;
    let collector = tokio::spawn(daemon.templates.clone().keep_collected(daemon.stop.clone()));
    tokio::spawn(heap::give_back(daemon.stop.clone()));
    let warming = tokio::spawn(warm(daemon.clone(), requested));
    let path = daemon.config.socket();
    let (listener, own_socket) = api_socket(&path)?;
    let app = routes::router(daemon.clone()).context("the OpenAPI document")?;
    let stop = daemon.stop.clone();
    let server = axum::serve(listener, app.into_make_service_with_connect_info::<Peer>())
        .with_graceful_shutdown(async move { stop.cancelled().await });
    let mut server = tokio::spawn(server.into_future());
    tracing::info!(socket = %path.display(), vms = daemon.registry.len(), "serving");
    // Without systemd, or if it does not listen, nothing waits for this.
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    tokio::select! {
        () = end => {}
        ended = &mut server => bail!("the server ended by itself: {ended:?}"),
    }
    tracing::info!("asked to stop");
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    // From here on operations undo themselves, and no client can connect. Clients of a socket of
    // systemd wait for the next daemon.
    if own_socket {
        let _ = std::fs::remove_file(&path);
    }
    daemon.stop.cancel();
    // A pager that is started ahead must have been, to be ended below.
    settle(&daemon, server, [keeper, space, wiring, collector, warming]).await;
    daemon.launcher.run_dirs.end();
    daemon.launcher.zygotes.end();
    daemon.templates.end_pager();
    daemon.groups.end();
    let shared = daemon.clone();
    let _ = tokio::task::spawn_blocking(move || shared.networks.end()).await;
    tracing::info!(vms = daemon.registry.len(), "stopped; VMs live on");
    Ok(())
}

/// A daemon with its control groups, and without VMs.
fn new(
    config: Config,
    store: Store,
    self_forks: UnboundedSender<(Arc<Vm>, UnixListener)>,
) -> anyhow::Result<Daemon> {
    let nodes = dayfly_host::numa::nodes().context("looking at the host's memory")?;
    // Before it starts a process, so that all its processes are in its group.
    let groups = GroupStock::open(&config.group_root, &config.run, true);
    groups.limit_disks_of(config.disk_folders());
    let uids = config.first_uid..config.first_uid.saturating_add(MAX_VMS);
    let ours = vec![
        (Named::Exactly(config.vmm_name()), uids.clone()),
        (Named::OfVms(config.vms(), RELAY_NAME), uids.clone()),
        (Named::OfVms(config.vms(), STREAMS_NAME), uids),
        (Named::Exactly(config.run.join(PAGER_NAME)), jail::USER..jail::USER + 1),
        (Named::OfVms(config.vms(), PACKER_NAME), PACKERS..PACKERS + 1),
    ];
    if let Err(why) = groups.begin_cpus(&config.main_cpus, &nodes, ours) {
        groups.end();
        bail!(why);
    }
    let pagers = Pagers::new(&config).in_groups(groups.clone());
    Daemon::new(config, TemplateCache::new(store, pagers), groups, nodes, self_forks)
        .context("threads, and VMs of an earlier daemon")
}

/// Prepares the daemon's first creation, which would otherwise take ten times as long as others.
async fn warm(daemon: Arc<Daemon>, requested: Requested) {
    let templates = daemon.templates.clone();
    let warmed = blocking(move || {
        Mapped::find().touch();
        let newest = templates.prepare()?;
        newest.map(|newest| Ok((shape_of(&newest)?, newest.name))).transpose()
    });
    let newest = warmed.await.unwrap_or_else(|e| {
        tracing::warn!("nothing is prepared for the first creation: {e}");
        None
    });
    let newest = newest.map(|(shape, name)| {
        daemon.pool.expect_shape(shape);
        name
    });
    keeper::announce(&daemon, &requested, newest).await;
}

/// Serves the machine's supervisor, if that listens for published ports.
fn serve_publisher(daemon: &Daemon) -> anyhow::Result<()> {
    if let (Some(path), Some(publisher)) = (&daemon.config.ports, daemon.networks.publisher()) {
        let listener = Publisher::listen(path)
            .with_context(|| format!("the supervisor's socket {}", path.display()))?;
        tokio::spawn(publisher.clone().keep(listener, daemon.stop.clone()));
    }
    Ok(())
}

/// Makes the folder `path`, or accepts an existing one that only this user can write. Removes the
/// permission bits of an existing folder that `mode` lacks.
fn folder(path: &Path, mode: u32) -> anyhow::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .with_context(|| format!("making {}", path.display()))?;
    let found =
        std::fs::metadata(path).with_context(|| format!("looking at {}", path.display()))?;
    let (own, owner) = (rustix::process::geteuid().as_raw(), found.uid());
    if owner != own {
        bail!(
            "{}: expected a folder of user {own}, got one of user {owner}; \
             name another, or chown it",
            path.display()
        );
    }
    let got = found.mode() & 0o777;
    if got & 0o022 != 0 {
        bail!(
            "{}: expected a folder that only its owner may write, got mode {got:o}; chmod go-w it",
            path.display()
        );
    }
    if got & !mode != 0 {
        tracing::warn!("{}: mode {got:o} becomes {:o}", path.display(), got & mode);
        std::fs::set_permissions(path, Permissions::from_mode(got & mode))
            .with_context(|| format!("mode of {}", path.display()))?;
    }
    Ok(())
}

/// Locks the run folder, so that it has one daemon: a file in it, which stays, and the folder
/// itself, which is locked even if the file was removed. The kernel releases both flock(2) locks
/// when the process ends.
fn lock(config: &Config) -> anyhow::Result<[File; 2]> {
    let path = config.lock();
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .with_context(|| format!("opening {}", path.display()))?;
    let folder =
        File::open(&config.run).with_context(|| format!("opening {}", config.run.display()))?;
    let held = |file: &File| flock(file, FlockOperation::NonBlockingLockExclusive).is_err();
    if held(&file) || held(&folder) {
        let mut holder = String::new();
        let _ = (&file).take(20).read_to_string(&mut holder);
        bail!("{}: held by another dayflyd (pid {})", path.display(), holder.trim());
    }
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok([file, folder])
}

/// The socket of systemd, or one of this daemon's on `path`; and whether it is this daemon's.
fn api_socket(path: &Path) -> anyhow::Result<(UnixListener, bool)> {
    match activation::passed(path)? {
        Some(passed) => Ok((UnixListener::from_std(passed).context("socket of systemd")?, false)),
        None => Ok((listen(path)?, true)),
    }
}

/// Waits until connections, tasks and roll-backs have ended, for as long as a shutdown may take.
async fn settle<S>(daemon: &Daemon, server: JoinHandle<S>, tasks: [JoinHandle<()>; 5]) {
    let quiet = async {
        let _ = server.await;
        for task in tasks {
            let _ = task.await;
        }
        daemon.undo.close();
        daemon.undo.wait().await;
    };
    if timeout(daemon.config.deadlines.shutdown, quiet).await.is_err() {
        tracing::warn!("not everything ended in time; the next daemon sweeps what is left");
    }
}

/// Listens on `path` with mode 0600. An existing socket is left over from an earlier daemon,
/// because this one holds the lock.
fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("removing {}", path.display()));
        }
        _ => {}
    }
    bind(path).with_context(|| format!("listening on {}", path.display()))
}

/// A listener on `path` that only this user can connect to. The mode of the socket becomes that of
/// the file (unix_bind in net/unix/af_unix.c), so no umask of other threads matters.
fn bind(path: &Path) -> std::io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, BACKLOG)?;
    UnixListener::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_api_s_socket_is_the_daemon_s_user_s_alone_and_the_umask_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let umask = || std::fs::read_to_string("/proc/self/status").unwrap();
        let umask = || umask().lines().find(|line| line.starts_with("Umask:")).unwrap().to_owned();
        let before = umask();
        assert_ne!(before.split_whitespace().last().unwrap(), "0177", "else this shows nothing");
        // The second listener replaces the socket of an earlier daemon.
        for _ in 0..2 {
            let listener = listen(&path).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
            let (accepted, connected) =
                tokio::join!(listener.accept(), tokio::net::UnixStream::connect(&path));
            assert!(accepted.is_ok() && connected.is_ok());
        }
        assert_eq!(umask(), before);
    }

    #[test]
    fn a_run_folder_without_its_lock_file_is_locked() {
        let run = tempfile::tempdir().unwrap();
        let config = Config { run: run.path().into(), ..crate::fixture::config(run.path()) };
        let first = lock(&config).unwrap();
        for _ in 0..2 {
            assert!(lock(&config).unwrap_err().to_string().contains("held by another dayflyd"));
            std::fs::remove_file(config.lock()).unwrap();
        }
        drop(first);
        lock(&config).unwrap();
    }

    #[test]
    fn a_folder_that_others_could_change_is_refused_and_one_that_they_could_read_is_closed() {
        let outer = tempfile::tempdir().unwrap();
        let path = outer.path().join("a/b");
        let mode = || std::fs::metadata(&path).unwrap().mode() & 0o777;
        let set = |mode| std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        folder(&path, 0o700).unwrap();
        assert_eq!(mode(), 0o700);
        for open in [0o755, 0o750, 0o701, 0o500] {
            set(open);
            folder(&path, 0o700).unwrap();
            assert_eq!(mode(), open & 0o700);
        }
        for shared in [0o777, 0o720, 0o702] {
            set(shared);
            let refused = folder(&path, 0o755).unwrap_err().to_string();
            assert!(
                refused.contains(&format!("{shared:o}")) && refused.contains("chmod"),
                "{refused}"
            );
        }
        set(0o700);
        std::os::unix::fs::chown(&path, Some(12345), None).expect("these tests need CAP_CHOWN");
        let refused = folder(&path, 0o700).unwrap_err().to_string();
        assert!(refused.contains("12345") && refused.contains("chown"), "{refused}");
        let file = outer.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(folder(&file, 0o700).is_err());
    }
}
