//! Paths of the machine's files, all in `<home>/machine`.

use std::path::{Path, PathBuf};

/// Longest path of a unix socket (unix(7): sun_path has 108 bytes, the last of them NUL).
pub(crate) const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The paths in `<home>/machine`.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) folder: PathBuf,
}

impl Layout {
    pub(crate) fn of_home(home: &Path) -> Self {
        Self { folder: home.join("machine") }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The user's configuration ([`crate::InitOptions`]).
    pub(crate) fn config(&self) -> PathBuf {
        self.at("machine.json")
    }

    /// The unpacked kernel.
    pub(crate) fn vmlinux(&self) -> PathBuf {
        self.at("vmlinux")
    }

    pub(crate) fn initramfs(&self) -> PathBuf {
        self.at("initramfs")
    }

    /// The inputs of `vmlinux` and `initramfs`.
    pub(crate) fn build(&self) -> PathBuf {
        self.at("build.json")
    }

    pub(crate) fn disk(&self) -> PathBuf {
        self.at("disk.img")
    }

    /// A lock, held while one command changes the machine.
    pub(crate) fn command_lock(&self) -> PathBuf {
        self.at("command.lock")
    }

    /// A lock that the supervisor, QEMU and every virtiofsd hold as long as they live.
    pub(crate) fn life_lock(&self) -> PathBuf {
        self.at("life.lock")
    }

    /// Exists while the machine runs, and after an end that no command asked for.
    pub(crate) fn running(&self) -> PathBuf {
        self.at("running.json")
    }

    /// The cause of the machine's last end.
    pub(crate) fn ended(&self) -> PathBuf {
        self.at("ended.json")
    }

    /// Why QEMU has paused the machine; empty bytes if it has not.
    pub(crate) fn paused(&self) -> PathBuf {
        self.at("paused")
    }

    /// The version for which the notice of older programs was printed last.
    pub(crate) fn noticed(&self) -> PathBuf {
        self.at("noticed.json")
    }

    pub(crate) fn api_socket(&self) -> PathBuf {
        self.at("api.sock")
    }

    pub(crate) fn exec_socket(&self) -> PathBuf {
        self.at("exec.sock")
    }

    /// Mount point of a share in the supervisor's mount namespace.
    pub(crate) fn share_mount(&self, index: usize) -> PathBuf {
        self.at(&format!("share{index}"))
    }

    /// QEMU's root folder in the supervisor's mount namespace.
    pub(crate) fn jail(&self) -> PathBuf {
        self.at("jail")
    }

    pub(crate) fn console_log(&self) -> PathBuf {
        self.at("console.log")
    }

    pub(crate) fn daemon_log(&self) -> PathBuf {
        self.at("daemon.log")
    }

    pub(crate) fn supervisor_log(&self) -> PathBuf {
        self.at("supervisor.log")
    }
}
