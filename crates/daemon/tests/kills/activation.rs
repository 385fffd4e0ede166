//! The daemon as a service of systemd: it gets its socket (sd_listen_fds(3)), says when it serves
//! (sd_notify(3)), and clients wait for the next daemon instead of being refused.

use crate::guest;
use crate::testbed::{Activation, Testbed, WITHIN, until};
use anyhow::{Context, Result, ensure};
use dayfly_api::client::Client;
use std::fs::{DirBuilder, Permissions, set_permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener};

/// The service's next message.
fn message(notify: &UnixDatagram) -> Result<String> {
    let mut bytes = [0; 64];
    let got = notify.recv(&mut bytes).context("a message to NOTIFY_SOCKET")?;
    Ok(String::from_utf8_lossy(&bytes[..got]).trim().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_of_systemd_serves_its_socket_and_leaves_it_to_the_next() -> Result<()> {
    let mut bed = Testbed::new()?;
    guest::store(&bed, guest::GUEST, 'l')?;
    DirBuilder::new().mode(0o755).create(bed.run())?;
    let path = bed.run().join("dayflyd.sock");
    let notify_path = bed.run().with_file_name("notify");
    let notify = UnixDatagram::bind(&notify_path)?;
    notify.set_read_timeout(Some(WITHIN))?;
    let socket = UnixListener::bind(&path)?;
    set_permissions(&path, Permissions::from_mode(0o600))?;
    bed.activation = Some(Activation { socket, notify: notify_path });

    bed.start().await?;
    ensure!(message(&notify)? == "READY=1", "it did not say that it serves");
    bed.stop()?;
    ensure!(message(&notify)? == "STOPPING=1", "it did not say that it stops");
    ensure!(path.exists(), "a daemon removed the socket that is systemd's");

    // Asked while no daemon runs.
    let early = Client::new(path.clone());
    let asked = tokio::spawn(async move { early.info().await.map(drop) });
    until("the client is connected", async || Ok(connected(&path)?)).await?;
    bed.start().await?;
    asked.await?.context("a client that came before the daemon")?;
    ensure!(message(&notify)? == "READY=1", "the second did not say that it serves");
    bed.kill()?;

    // A socket that every user may connect to is refused.
    set_permissions(&path, Permissions::from_mode(0o666))?;
    let refused = bed.start().await.err().context("a daemon served a socket of every user")?;
    ensure!(refused.to_string().contains("did not start"), "{refused:#}");
    let log = std::fs::read_to_string(bed.log_file())?;
    ensure!(log.contains("got one of mode 666"), "{log}");
    Ok(())
}

/// Whether a client's connection waits at `path` (/proc/net/unix: state 2 is connecting, a row for
/// each end).
fn connected(path: &std::path::Path) -> Result<bool> {
    let text = std::fs::read_to_string("/proc/net/unix")?;
    let wanted = path.to_str().context("a path in UTF-8")?;
    Ok(text.lines().filter(|line| line.ends_with(wanted)).count() > 1)
}
