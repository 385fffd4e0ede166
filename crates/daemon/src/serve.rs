//! A daemon's run: lock, store, adoption, socket, and the end.

use crate::config::{Config, SOCKET_PATH_MAX};
use crate::daemon::Daemon;
use crate::depot::Depot;
use crate::pagers::Pagers;
use crate::vm::pool;
use crate::{adopt, heap, net, routes};
use anyhow::{Context, bail};
use dayfly_store::Store;
use rustix::fs::{FlockOperation, flock};
use std::fs::{DirBuilder, File, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::time::timeout;

/// Serves until `end` resolves. VMs live on, apart from those whose connection or bake ends with the daemon.
///
/// # Errors
/// What keeps the daemon from serving: another daemon, a folder, the socket.
pub async fn serve(config: Config, end: impl Future<Output = ()>) -> anyhow::Result<()> {
    let got = config.longest_socket_path();
    if got > SOCKET_PATH_MAX {
        bail!(
            "run folder {}: expected socket paths of at most {SOCKET_PATH_MAX} bytes in it, got {got}",
            config.run.display()
        );
    }
    folder(&config.run, 0o755)?;
    folder(&config.vms(), 0o711)?;
    let _lock = lock(&config)?;
    folder(&config.state, 0o700)?;
    let store = Store::open(&config.state).map_err(|e| anyhow::anyhow!(crate::error::chain(&e)))?;
    let nodes = dayfly_host::numa::nodes().context("looking at the host's memory")?;
    let pagers = Pagers::new(&config);
    let daemon = Daemon::new(config, Depot::new(store, pagers), nodes).context("starting threads")?;
    let daemon = Arc::new(daemon);
    daemon.berths.sweep()?;
    daemon.berths.prepare()?;
    daemon.depot.store().prepare_vm_layers(1)?;
    daemon.zygotes.warm().map_err(|e| anyhow::anyhow!(crate::error::chain(&e)))?;
    adopt::adopt(&daemon).await;
    let keeper = tokio::spawn(pool::keep(daemon.clone()));
    let wiring = tokio::spawn(net::keep(daemon.clone()));
    let collector = tokio::spawn(daemon.depot.clone().keep_collected(daemon.stop.clone()));
    tokio::spawn(heap::give_back(daemon.stop.clone()));
    let path = daemon.config.socket();
    let listener = listen(&path)?;
    let app = routes::router(daemon.clone()).context("the OpenAPI document")?;
    let stop = daemon.stop.clone();
    let server = axum::serve(listener, app.into_make_service())
        .with_graceful_shutdown(async move { stop.cancelled().await });
    let mut server = tokio::spawn(server.into_future());
    tracing::info!(socket = %path.display(), vms = daemon.registry.len(), "serving");
    tokio::select! {
        () = end => {}
        ended = &mut server => bail!("the server ended by itself: {ended:?}"),
    }
    tracing::info!("asked to stop");
    // Nobody new is served; operations undo themselves.
    let _ = std::fs::remove_file(&path);
    daemon.stop.cancel();
    let quiet = async {
        let _ = server.await;
        let _ = keeper.await;
        let _ = wiring.await;
        let _ = collector.await;
        daemon.undo.close();
        daemon.undo.wait().await;
    };
    if timeout(daemon.config.deadlines.shutdown, quiet).await.is_err() {
        tracing::warn!("not everything ended in time; the next daemon sweeps what is left");
    }
    daemon.berths.end();
    daemon.zygotes.end();
    let shared = daemon.clone();
    let _ = tokio::task::spawn_blocking(move || shared.networks.end()).await;
    tracing::info!(vms = daemon.registry.len(), "stopped; VMs live on");
    Ok(())
}

fn folder(path: &Path, mode: u32) -> anyhow::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .with_context(|| format!("making {}", path.display()))
}

/// One daemon for each run folder. The file stays; its lock goes with the process.
fn lock(config: &Config) -> anyhow::Result<File> {
    let path = config.lock();
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .with_context(|| format!("opening {}", path.display()))?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut holder = String::new();
        let _ = (&file).take(20).read_to_string(&mut holder);
        bail!("{}: held by another dayflyd (pid {})", path.display(), holder.trim());
    }
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(file)
}

/// Listens for this user only. A socket that is there belongs to a daemon that is gone: we hold its lock.
fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("removing {}", path.display()));
        }
        _ => {}
    }
    // The socket is never there with a wider mode than it has in the end.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener.with_context(|| format!("listening on {}", path.display()))?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))
        .with_context(|| format!("mode of {}", path.display()))?;
    Ok(listener)
}
