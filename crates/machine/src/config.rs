//! The configuration of a machine.

use crate::share::Share;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Options of [`crate::Machine::init`], kept as `machine.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InitOptions {
    /// Number of virtual CPUs. Emulation of several crashes the machine's kernel
    /// (docs/lab-notes/machine-cpus.md).
    pub cpus: u32,
    /// Memory in MiB. The host only provides the memory that the machine touches.
    pub memory_mib: u64,
    /// NUMA nodes, 1 to 4, between which CPUs and memory are divided evenly. They show placement
    /// only, because emulation has no latencies.
    pub numa_nodes: u32,
    /// Length of the sparse disk in bytes. It is fixed when the disk is made.
    pub disk_bytes: u64,
    /// Folder of an unpacked `linux-image-…-amd64` package.
    pub kernel_tree: PathBuf,
    /// Path of the machine's init, a static program (`dayfly-machine-init`).
    pub init_program: PathBuf,
    /// Path of `dayflyd`. Without a daemon the machine only serves exec.
    pub daemon: Option<PathBuf>,
    /// Arguments of `dayflyd`.
    pub daemon_arguments: Vec<String>,
    /// Variables added to the environment of `dayflyd`.
    pub daemon_env: Vec<(String, String)>,
    /// Path of `dayfly-vmm`.
    pub vmm: Option<PathBuf>,
    /// Path of `dayfly-pager`.
    pub pager: Option<PathBuf>,
    /// Path of `dayfly-volume`.
    pub volume: Option<PathBuf>,
    /// Path of `dayfly-relay`.
    pub relay: Option<PathBuf>,
    /// Whether machine and VMs reach what the user's host reaches.
    pub network: bool,
    /// Folders of the host that the machine sees.
    // Files of older versions have plain paths under "shares", see [`Stored`].
    #[serde(rename = "folders")]
    pub shares: Vec<Share>,
}

/// Defaults for fields that a `machine.json` of an older version lacks.
impl Default for InitOptions {
    fn default() -> Self {
        Self {
            cpus: 1,
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
            volume: None,
            relay: None,
            network: true,
            shares: Vec::new(),
        }
    }
}

impl InitOptions {
    /// Options with one CPU, 4 GiB of memory and 64 GiB of sparse disk, without shares and without
    /// a daemon.
    #[must_use]
    pub fn new(kernel_tree: PathBuf, init_program: PathBuf) -> Self {
        Self { kernel_tree, init_program, ..Self::default() }
    }
}

/// Fields that older versions wrote into `machine.json`, and that have no effect any more.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Old {
    /// Requested the host's whole root file system in the machine.
    host_files: bool,
    /// Requested further folders, as plain paths.
    shares: Vec<serde_json::Value>,
}

/// The decoded `machine.json`.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) options: InitOptions,
    /// Whether the file requests host files in the form of older versions, which has no effect.
    pub(crate) shared_all: bool,
}

impl<'de> Deserialize<'de> for Stored {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(from)?;
        let wrong = serde::de::Error::custom;
        let old: Old = serde_json::from_value(value.clone()).unwrap_or_default();
        let options = serde_json::from_value(value).map_err(wrong)?;
        Ok(Self { options, shared_all: old.host_files || !old.shares.is_empty() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::Access;

    #[test]
    fn an_older_file_is_read_with_defaults_that_work() {
        let options: InitOptions = serde_json::from_str(r#"{"cpus":3}"#).unwrap();
        assert_eq!(options, InitOptions { cpus: 3, ..InitOptions::default() });
        assert_eq!(options.numa_nodes, 1, "zero nodes would be memory that virtiofsd cannot map");
    }

    #[test]
    fn host_files_of_an_older_file_are_not_shared_and_that_is_known() {
        for (text, shared_all) in [
            (r#"{"cpus":3,"host_files":true,"shares":[]}"#, true),
            (r#"{"cpus":3,"host_files":true,"shares":["/src","/tmp"]}"#, true),
            (r#"{"cpus":3,"host_files":false,"shares":["/src"]}"#, true),
            (r#"{"cpus":3,"host_files":false,"shares":[]}"#, false),
            (r#"{"cpus":3}"#, false),
        ] {
            let stored: Stored = serde_json::from_str(text).unwrap();
            assert_eq!(stored.options, InitOptions { cpus: 3, ..InitOptions::default() }, "{text}");
            assert_eq!(stored.shared_all, shared_all, "{text}");
        }
    }

    #[test]
    fn shares_are_kept_and_say_nothing_old() {
        let share = Share { name: "src".into(), path: "/src".into(), access: Access::ReadWrite };
        let options = InitOptions { shares: vec![share], ..InitOptions::default() };
        let stored: Stored =
            serde_json::from_str(&serde_json::to_string(&options).unwrap()).unwrap();
        assert_eq!(stored.options, options);
        assert!(!stored.shared_all);
    }
}
