//! Disk and memory use of the guest.

use dayfly_api::agent::Stat;
use std::io;
use std::path::{Path, PathBuf};

/// Why the figures cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StatError {
    /// `statvfs(2)` failed.
    #[error("{path}: file system statistics: {source}")]
    Disk {
        /// The folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// /proc/meminfo cannot be read, or lacks a line.
    #[error("{path}: {what}: {source}")]
    Memory {
        /// The file.
        path: PathBuf,
        /// The operation or the line.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Reads the statistics of `root`'s file system, and `root`/proc/meminfo.
///
/// # Errors
/// [`StatError`].
pub fn stat(root: &Path) -> Result<Stat, StatError> {
    let fs = rustix::fs::statvfs(root)
        .map_err(|e| StatError::Disk { path: root.to_owned(), source: e.into() })?;
    let path = root.join("proc/meminfo");
    let text = std::fs::read_to_string(&path).map_err(|source| StatError::Memory {
        path: path.clone(),
        what: "read",
        source,
    })?;
    let line = |what: &'static str| {
        memory_bytes(&text, what).ok_or_else(|| StatError::Memory {
            path: path.clone(),
            what,
            source: io::Error::new(io::ErrorKind::InvalidData, "expected a line of a number of kB"),
        })
    };
    Ok(Stat {
        disk_total_bytes: fs.f_blocks.saturating_mul(fs.f_frsize),
        disk_available_bytes: fs.f_bavail.saturating_mul(fs.f_frsize),
        disk_available_files: fs.f_favail,
        memory_total_bytes: line("MemTotal:")?,
        memory_available_bytes: line("MemAvailable:")?,
    })
}

fn memory_bytes(text: &str, what: &str) -> Option<u64> {
    let rest = text.lines().find_map(|l| l.strip_prefix(what))?;
    let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_size() {
        let stat = stat(Path::new("/")).unwrap();
        assert!(
            stat.disk_available_bytes <= stat.disk_total_bytes && stat.disk_total_bytes > 0,
            "{stat:?}"
        );
        assert!(stat.memory_available_bytes <= stat.memory_total_bytes, "{stat:?}");
        assert!(stat.memory_available_bytes > 1 << 20, "{stat:?}");
    }

    #[test]
    fn a_folder_without_proc_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let error = stat(folder.path()).unwrap_err().to_string();
        assert!(error.contains("proc/meminfo"), "{error}");
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        for text in ["", "MemTotal: x kB", "MemTotal: 99999999999999999999 kB", "MemTotal: 1 MB"] {
            std::fs::write(folder.path().join("proc/meminfo"), text).unwrap();
            assert!(stat(folder.path()).unwrap_err().to_string().contains("MemTotal"), "{text}");
        }
    }
}
