//! What a machine is made of.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// What [`crate::Machine::init`] is told; kept as `machine.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InitOptions {
    /// Virtual CPUs.
    pub cpus: u32,
    /// Memory in MiB; the host gives only what the machine touches.
    pub memory_mib: u64,
    /// NUMA nodes, 1 to 4, between which CPUs and memory are divided evenly. They show placement; emulation has no
    /// latencies.
    pub numa_nodes: u32,
    /// Length of the sparse disk in bytes; fixed when the machine is first made.
    pub disk_bytes: u64,
    /// An unpacked `linux-image-…-amd64` package.
    pub kernel_tree: PathBuf,
    /// The static program that is the machine's init (`dayfly-machine-init`).
    pub init_program: PathBuf,
    /// `dayflyd`; without it the machine only serves exec.
    pub daemon: Option<PathBuf>,
    /// Arguments of `dayflyd`.
    pub daemon_arguments: Vec<String>,
    /// Added to the environment of `dayflyd`.
    pub daemon_env: Vec<(String, String)>,
    /// `dayfly-vmm`.
    pub vmm: Option<PathBuf>,
    /// `dayfly-pager`.
    pub pager: Option<PathBuf>,
    /// Whether the host's files are shown in the machine at /host.
    pub host_files: bool,
    /// Folders of the host that change while the machine runs (a build's output), shown read-only and fresh below
    /// /host; also those that lie on another file system than `/`.
    pub shares: Vec<PathBuf>,
}

/// What a `machine.json` of an older version does not name.
impl Default for InitOptions {
    fn default() -> Self {
        Self {
            cpus: 2,
            memory_mib: 4096,
            numa_nodes: 1,
            disk_bytes: 64 << 30,
            kernel_tree: PathBuf::new(),
            init_program: PathBuf::new(),
            daemon: None,
            daemon_arguments: Vec::new(),
            daemon_env: Vec::new(),
            vmm: None,
            pager: None,
            host_files: true,
            shares: Vec::new(),
        }
    }
}

impl InitOptions {
    /// Two CPUs, 4 GiB of memory, 64 GiB of sparse disk, the host's files, no daemon.
    #[must_use]
    pub fn new(kernel_tree: PathBuf, init_program: PathBuf) -> Self {
        Self { kernel_tree, init_program, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_file_is_read_with_defaults_that_work() {
        let options: InitOptions = serde_json::from_str(r#"{"cpus":3}"#).unwrap();
        assert_eq!(options, InitOptions { cpus: 3, ..InitOptions::default() });
        assert_eq!(options.numa_nodes, 1, "zero nodes would be memory that virtiofsd cannot map");
    }
}
