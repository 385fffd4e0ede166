//! The API's socket as systemd passes it (sd_listen_fds(3)).

use anyhow::{Context, ensure};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// The listening socket at `path` that this process was started with, or `None` if it was started
/// without sockets. The socket's file is systemd's: the daemon does not remove it.
///
/// # Errors
/// Several sockets were passed, or one that is no listening unix socket at `path`, or one that
/// every user may connect to: a client may do what this user may.
pub fn passed(path: &Path) -> anyhow::Result<Option<UnixListener>> {
    let mut passed = sd_notify::listen_fds().context("sockets of systemd (LISTEN_FDS)")?;
    let Some(descriptor) = passed.next() else { return Ok(None) };
    let more = passed.len();
    ensure!(more == 0, "sockets of systemd: expected one, got {}; see dayflyd.socket", more + 1);
    let listener = taken(descriptor, path).with_context(|| {
        format!("socket of systemd: expected one that listens on {}", path.display())
    })?;
    Ok(Some(listener))
}

/// The socket with this descriptor, if it is as [`passed`] promises. The number keeps a descriptor
/// as well, which is closed on exec.
fn taken(descriptor: RawFd, path: &Path) -> anyhow::Result<UnixListener> {
    let process = pidfd_open(getpid(), PidfdFlags::empty())?;
    let socket: OwnedFd = pidfd_getfd(process, descriptor, PidfdGetfdFlags::empty())?;
    let (domain, kind) = (sockopt::socket_domain(&socket)?, sockopt::socket_type(&socket)?);
    ensure!(
        domain == AddressFamily::UNIX && kind == SocketType::STREAM,
        "got a socket of another kind; the unit needs ListenStream="
    );
    ensure!(sockopt::socket_acceptconn(&socket)?, "got one that does not listen");
    let listener = UnixListener::from(socket);
    let address = listener.local_addr()?;
    let found = address.as_pathname();
    ensure!(
        found == Some(path),
        "got one at {}; ListenStream= and dayflyd --run must agree",
        found.map_or_else(|| "no path".to_owned(), |found| found.display().to_string())
    );
    let mode = std::fs::metadata(path)?.mode() & 0o777;
    ensure!(
        mode & 0o007 == 0,
        "got one of mode {mode:o}, which every user may connect to; SocketMode=0600"
    );
    listener.set_nonblocking(true)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_passed_socket_is_taken_only_if_it_is_the_api_s() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        set_permissions(&path, Permissions::from_mode(0o660)).unwrap();
        let taken_socket = taken(listener.as_raw_fd(), &path).unwrap();
        let client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        taken_socket.accept().unwrap();

        let why = |descriptor, path| format!("{:#}", taken(descriptor, path).unwrap_err());
        let other = folder.path().join("other");
        assert!(why(listener.as_raw_fd(), &other).contains("must agree"));
        assert!(why(client.as_raw_fd(), &path).contains("does not listen"));
        let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(why(udp.as_raw_fd(), &path).contains("another kind"));
        set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        assert!(why(listener.as_raw_fd(), &path).contains("666"));
        let file = std::fs::File::open(folder.path()).unwrap();
        taken(file.as_raw_fd(), &path).unwrap_err();
    }
}
