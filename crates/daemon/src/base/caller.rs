//! The user of the process that made a connection to the API's socket.

use rustix::net::sockopt::socket_peercred;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// The most supplementary groups that are asked for. Linux allows 65,536; few users have ten.
const MOST_GROUPS: usize = 1024;

/// A user of the host, with groups.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// The user id.
    pub uid: u32,
    /// The primary group id.
    pub gid: u32,
    /// The supplementary group ids. They are empty for root, whose rights do not depend on them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<u32>,
}

impl Caller {
    /// The user of the process that connected to `socket`, as the kernel noted it then: the process
    /// may have ended or changed its user since.
    ///
    /// # Errors
    /// The kernel's error, or the user has too many groups.
    pub fn of(socket: &impl AsFd) -> io::Result<Self> {
        let peer = socket_peercred(socket)?;
        let (uid, gid) = (peer.uid.as_raw(), peer.gid.as_raw());
        let groups = if uid == 0 { Vec::new() } else { groups(socket.as_fd())? };
        Ok(Self { uid, gid, groups })
    }
}

/// The supplementary groups of the process that connected (SO_PEERGROUPS of socket(7)).
fn groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; MOST_GROUPS];
    let mut bytes = libc::socklen_t::try_from(size_of_val(&groups[..])).unwrap_or_default();
    // SAFETY: getsockopt writes at most `bytes` bytes to `groups`, which has that size.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    groups.truncate(usize::try_from(bytes).unwrap_or_default() / size_of::<u32>());
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_caller_has_the_ids_of_its_thread_when_it_connected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&path, mode).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(folder.path(), mode).unwrap();
        let own = UnixStream::connect(&path).unwrap();
        let accepted = listener.accept().unwrap().0;
        assert_eq!(Caller::of(&accepted).unwrap(), Caller::default(), "tests run as root");
        drop(own);
        let other = std::thread::spawn(move || {
            let groups = [7_u32, 8];
            // SAFETY: the bare system calls change only this thread's user (credentials(7)), which
            // ends below.
            let changed = unsafe {
                libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr())
                    | libc::syscall(libc::SYS_setresgid, 2345, 2345, 2345)
                    | libc::syscall(libc::SYS_setresuid, 1234, 1234, 1234)
            };
            assert_eq!(changed, 0, "{}", io::Error::last_os_error());
            UnixStream::connect(path).unwrap()
        });
        let stream = other.join().unwrap();
        let accepted = listener.accept().unwrap().0;
        drop(stream);
        let expected = Caller { uid: 1234, gid: 2345, groups: vec![7, 8] };
        assert_eq!(Caller::of(&accepted).unwrap(), expected, "its process may have ended");
    }
}
