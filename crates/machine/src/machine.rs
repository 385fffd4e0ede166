//! A machine on this host: made, opened, swept. `start` and `stop` have the other commands.

use crate::config::{InitOptions, Stored};
use crate::disk;
use crate::errors::InitError;
use crate::files::{self, FileError};
use crate::initramfs;
use crate::layout::{Layout, MAX_SOCKET_PATH_BYTES};
use crate::lock;
use crate::share::{self, Share, ShareError};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a command waits for another command on the same machine.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(180);
/// A machine that exists on this host, running or not.
#[derive(Debug, Clone)]
pub struct Machine {
    pub(crate) layout: Layout,
    pub(crate) options: InitOptions,
    /// Whether `machine.json` is of an older version, which shared the host's files.
    pub(crate) shared_all: bool,
}

impl Machine {
    /// Makes the machine below `home`, or changes its options. An existing disk is kept. Nothing is
    /// started.
    ///
    /// # Errors
    /// [`InitError`]; an existing machine stays as it is.
    pub fn init(
        home: &Path,
        options: &InitOptions,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, InitError> {
        check("CPUs", u64::from(options.cpus), 1, 64)?;
        check("NUMA nodes", u64::from(options.numa_nodes), 1, u64::from(options.cpus.min(4)))?;
        check("memory in MiB", options.memory_mib, 512, 1 << 20)?;
        check("disk in bytes", options.disk_bytes, 64 << 20, 16 << 40)?;
        fs::create_dir_all(home).map_err(|e| FileError::new("making", home, e))?;
        let home = home.canonicalize().map_err(|e| FileError::new("resolving", home, e))?;
        if home.to_str().is_none() {
            return Err(FileError::new(
                "using",
                &home,
                io::Error::other("QEMU's options take only UTF-8 paths"),
            )
            .into());
        }
        let layout = Layout::of_home(&home);
        let socket = layout.exec_socket();
        let length = socket.as_os_str().as_bytes().len();
        if length > MAX_SOCKET_PATH_BYTES {
            return Err(InitError::Path { path: socket, length });
        }
        fs::create_dir_all(&layout.folder)
            .map_err(|e| FileError::new("making", &layout.folder, e))?;
        let mut options = options.clone();
        options.shares = share::resolve(&options.shares, &layout.folder)?;
        let machine = Self { layout, options, shared_all: false };
        let _lock = machine.command(progress)?;
        progress("unpacking the machine's kernel and modules");
        initramfs::ensure(&machine.layout, &machine.options, &machine.options.shares)?;
        if !machine.layout.disk().exists() {
            progress("making the machine's disk");
            disk::make(&machine.layout.disk(), machine.options.disk_bytes)?;
        }
        files::write_json(&machine.layout.config(), &machine.options)?;
        Ok(machine)
    }

    /// Opens the machine below `home`.
    ///
    /// # Errors
    /// [`InitError::None`] if no machine was made there.
    pub fn open(home: &Path) -> Result<Self, InitError> {
        let none = || InitError::None(home.to_owned());
        let home = home.canonicalize().map_err(|_| none())?;
        let layout = Layout::of_home(&home);
        let stored: Stored = files::read_json(&layout.config())?.ok_or_else(none)?;
        Ok(Self { layout, options: stored.options, shared_all: stored.shared_all })
    }

    /// The machine's options.
    #[must_use]
    pub fn options(&self) -> &InitOptions {
        &self.options
    }

    /// Path of the socket for the daemon's API, which works while the machine runs.
    #[must_use]
    pub fn api_socket(&self) -> PathBuf {
        self.layout.api_socket()
    }

    /// Path of the socket for the exec channel, which works while the machine runs.
    #[must_use]
    pub fn exec_socket(&self) -> PathBuf {
        self.layout.exec_socket()
    }

    /// The folder with all files of the machine.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.layout.folder
    }

    pub(crate) fn command(&self, progress: &mut dyn FnMut(&str)) -> Result<File, FileError> {
        lock::exclusive(&self.layout.command_lock(), COMMAND_TIMEOUT, || {
            progress("waiting for another command on the machine")
        })
    }

    /// A notice for the user: what an older version shared and this version does not. The notice
    /// disappears once the machine is started or made again.
    #[must_use]
    pub fn notice(&self) -> Option<&'static str> {
        self.shared_all.then_some(
            "this host's files are no longer shown in the machine; folders are shared by name: \
             dayfly machine init --share NAME=PATH",
        )
    }

    /// The shared folders, with absolute paths.
    pub(crate) fn shares(&self) -> Result<Vec<Share>, ShareError> {
        share::resolve(&self.options.shares, &self.layout.folder)
    }

    /// Removes the leftovers of an unclean end: socket files and staged files. Mounts and processes
    /// disappear with the supervisor. Does nothing while the machine runs or while another command
    /// changes it.
    ///
    /// # Errors
    /// [`FileError`]
    pub fn sweep(&self) -> Result<(), FileError> {
        let Ok(_lock) = lock::exclusive(&self.layout.command_lock(), Duration::ZERO, || {}) else {
            return Ok(());
        };
        if self.alive() { Ok(()) } else { self.sweep_locked() }
    }

    /// [`Self::sweep`] for a caller that holds the command lock of a machine that is down.
    pub(crate) fn sweep_locked(&self) -> Result<(), FileError> {
        files::remove(&self.layout.api_socket())?;
        files::remove(&self.layout.exec_socket())?;
        files::remove(&self.layout.paused())?;
        for entry in fs::read_dir(&self.layout.folder)
            .map_err(|e| FileError::new("reading", &self.layout.folder, e))?
        {
            let path = entry.map_err(|e| FileError::new("reading", &self.layout.folder, e))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let staged = name.contains(".new.") || name == "disk.new";
            if staged || (name.starts_with("fs") && name.ends_with(".sock")) {
                files::remove(&path)?;
            }
        }
        Ok(())
    }
}

fn check(what: &'static str, got: u64, least: u64, most: u64) -> Result<(), InitError> {
    if (least..=most).contains(&got) {
        return Ok(());
    }
    Err(InitError::Option { what, expected: format!("{least} to {most}"), got })
}
