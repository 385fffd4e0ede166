//! Adds to a root file system what a guest needs to start, and nothing more.
//!
//! - `/dev`, `/proc`, `/sys`, `/run`, `/tmp` (1777) exist as folders; an existing symbolic link or
//!   folder stays.
//! - `/etc/machine-id` is an empty file: the agent writes a new one into every clone, and two VMs
//!   must not share one.
//! - `/etc/resolv.conf` is empty, and the agent fills it: the image's file names the nameservers of
//!   the host that built the image. A link to nothing stays: the agent puts its
//!   file in the place of the link, unless a program of the image has made the target by then.
//! - `/etc/hosts` has entries for localhost only, and the agent adds the VM's name. Container
//!   runtimes bind other files over both.
//! - In a bootstrapped system `/etc/hostname` is emptied, because mmdebstrap copies it from the
//!   build host.
//! - Everything else stays unchanged, SSH host keys too: an image for cloning should not contain
//!   any.

use super::error::{BuildError, on};
use super::tree::{Content, Kind, Meta, Tree};
use dayfly_archive::Refusal;
use std::path::Path;

const HOSTS: &str = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";

fn refused(why: Refusal) -> BuildError {
    BuildError::Verify { expected: why.expected, got: why.got }
}

/// Applies the policy of this module. `work` is an empty folder for the contents of new files.
pub fn prepare(tree: &mut Tree, work: &Path, bootstrapped: bool) -> Result<(), BuildError> {
    let folders: [(&[u8], u32); 6] = [
        (b"dev", 0o755),
        (b"proc", 0o555),
        (b"sys", 0o555),
        (b"run", 0o755),
        (b"tmp", 0o1777),
        (b"etc", 0o755),
    ];
    for (path, mode) in folders {
        let there =
            tree.find(path).map(|id| matches!(tree.node(id).kind, Kind::Dir(_) | Kind::Symlink(_)));
        if there != Some(true) {
            tree.put_at(path, Kind::empty_dir(), Meta::root(mode)).map_err(refused)?;
        }
    }
    // If `/etc` is not a real folder (a symbolic link, or missing), the image's files stay
    // unchanged.
    if tree.find(b"etc").is_none_or(|id| tree.children(id).is_none()) {
        return Ok(());
    }
    let mut empty = |path: &[u8], mode| {
        let content = Content { path: None, size_bytes: 0, data_bytes: 0 };
        tree.put_at(path, Kind::File(content), Meta::root(mode)).map_err(refused)
    };
    empty(b"etc/machine-id", 0o444)?;
    if bootstrapped {
        empty(b"etc/hostname", 0o644)?;
    }
    let path = work.join("hosts");
    std::fs::write(&path, HOSTS).map_err(on("write", &path))?;
    let content = Content { path: Some(path), size_bytes: HOSTS.len() as u64, data_bytes: 4096 };
    tree.put_at(b"etc/hosts", Kind::File(content), Meta::root(0o644)).map_err(refused)?;
    if tree.find(b"etc/resolv.conf").is_none() || tree.resolve(b"etc/resolv.conf").is_some() {
        let content = Content { path: None, size_bytes: 0, data_bytes: 0 };
        tree.put_at(b"etc/resolv.conf", Kind::File(content), Meta::root(0o644)).map_err(refused)?;
    }
    Ok(())
}
