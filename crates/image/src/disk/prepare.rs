//! What a root file system gets so that a guest can start from it, and nothing more.
//!
//! - `/dev`, `/proc`, `/sys`, `/run`, `/tmp` (1777) exist as folders; a symbolic link or folder that is there stays.
//! - `/etc/machine-id` is an empty file: the agent writes a new one into every clone, and two machines must not share one.
//! - `/etc/resolv.conf` exists (empty where it was missing), so that there is a file to bind or write to.
//! - `/etc/hosts` that is missing or empty says where localhost is; container runtimes bind their own over it.
//! - Of a bootstrapped system `/etc/resolv.conf` and `/etc/hostname` are emptied: they were the build host's.
//! - Everything else stays as it is, SSH host keys too: an image that is to be cloned should not have any.

use super::error::{BuildError, on};
use super::tree::{Content, Kind, Meta, Refusal, Tree};
use std::path::Path;

const HOSTS: &str = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";

fn refused(why: Refusal) -> BuildError {
    BuildError::Verify { expected: why.expected, got: why.got }
}

/// Applies the policy above; `work` is an empty folder for the contents of new files.
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
        let there = tree.find(path).map(|id| matches!(tree.node(id).kind, Kind::Dir(_) | Kind::Symlink(_)));
        if there != Some(true) {
            tree.put(path, Kind::empty_dir(), Meta::root(mode)).map_err(refused)?;
        }
    }
    // An /etc that is a link is left to the image.
    if tree.find(b"etc").is_none_or(|id| tree.children(id).is_none()) {
        return Ok(());
    }
    let mut empty = |path: &[u8], mode| {
        let content = Content { path: None, size_bytes: 0, data_bytes: 0 };
        tree.put(path, Kind::File(content), Meta::root(mode)).map_err(refused)
    };
    empty(b"etc/machine-id", 0o444)?;
    if bootstrapped {
        empty(b"etc/resolv.conf", 0o644)?;
        empty(b"etc/hostname", 0o644)?;
    } else if tree.find(b"etc/resolv.conf").is_none() {
        let content = Content { path: None, size_bytes: 0, data_bytes: 0 };
        tree.put(b"etc/resolv.conf", Kind::File(content), Meta::root(0o644)).map_err(refused)?;
    }
    let nothing = |id| matches!(&tree.node(id).kind, Kind::File(content) if content.size_bytes == 0);
    if tree.find(b"etc/hosts").is_none_or(nothing) {
        let path = work.join("hosts");
        std::fs::write(&path, HOSTS).map_err(on("write", &path))?;
        let content = Content { path: Some(path), size_bytes: HOSTS.len() as u64, data_bytes: 4096 };
        tree.put(b"etc/hosts", Kind::File(content), Meta::root(0o644)).map_err(refused)?;
    }
    Ok(())
}
