//! The back end for cgroup v1 (kernel: Documentation/admin-guide/cgroup-v1): each controller has
//! its own hierarchy, or shares one.

use super::backend::Backend;
use super::files::{keyed, named, number, read, without_cache, write};
use super::limits::{Controllers, CpuTime, GroupError, IO_MAX, IoMax, Limits, Usage, cpus};
use super::name::{BOOKED, GroupName};
use super::place::Hierarchy;
use super::tree::was_made;
use crate::disks::Disk;
use dayfly_sys::group::Entry;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// The file with the limit of memory and swap together.
const MEMSW: &str = "memory.memsw.limit_in_bytes";
/// A group with at most this much memory left can be used again: counters that are kept for each
/// CPU, and the kernel's own objects.
const LEFT_BYTES: u64 = 1 << 20;
/// The usual weight of a group, and `cpu.shares` of that weight.
const WEIGHT: u64 = 100;
const SHARES: u64 = 1024;
const SHARES_RANGE: (u64, u64) = (2, 262_144);

#[derive(Debug)]
pub(super) struct V1 {
    hierarchies: Vec<Hierarchy>,
    folders: Vec<PathBuf>,
}

impl V1 {
    pub(super) fn new(hierarchies: Vec<Hierarchy>, name: &str) -> Self {
        let folders = hierarchies.iter().map(|of| of.base.join(name)).collect();
        Self { hierarchies, folders }
    }

    /// The file of a group in the hierarchy of this controller.
    fn file(&self, controller: &str, group: &Path, file: &str) -> Option<PathBuf> {
        let has = |of: &Hierarchy| of.controllers.iter().any(|own| own == controller);
        let at = self.hierarchies.iter().position(has)?;
        Some(self.folders[at].join(group).join(file))
    }

    fn has(&self, controller: &str) -> bool {
        self.file(controller, Path::new(""), "").is_some()
    }

    fn number(&self, controller: &str, group: &Path, file: &str) -> io::Result<Option<u64>> {
        self.file(controller, group, file).map_or(Ok(None), |path| number(&path))
    }

    fn write(&self, controller: &str, group: &Path, file: &str, text: &str) -> io::Result<()> {
        self.file(controller, group, file).map_or(Ok(()), |path| write(&path, text))
    }

    /// Whether memory and swap together can be limited.
    fn has_swap_limit(&self, group: &Path) -> bool {
        self.file("memory", group, MEMSW).is_some_and(|path| path.exists())
    }

    /// The hierarchies in which this process moves into `main`. Not that of cpu, in which the
    /// daemon keeps the weight of the group in which it was started: in the tree, it would get a
    /// part of the tree's.
    fn joined(&self) -> impl Iterator<Item = (&Hierarchy, &PathBuf)> {
        let pairs = self.hierarchies.iter().zip(&self.folders);
        pairs.filter(|(of, _)| of.joins && !of.controllers.iter().any(|own| own == "cpu"))
    }
}

/// `cpu.shares` of a weight.
pub(super) fn shares(weight: u32) -> u64 {
    (u64::from(weight) * SHARES / WEIGHT).clamp(SHARES_RANGE.0, SHARES_RANGE.1)
}

impl Backend for V1 {
    fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    fn controllers(&self) -> Controllers {
        let [cpu, memory, pids] = ["cpu", "memory", "pids"].map(|name| self.has(name));
        Controllers { cpu, memory, pids }
    }

    fn enable(&self, _group: &Path) -> io::Result<()> {
        // Each group of a hierarchy has its controllers.
        Ok(())
    }

    fn weigh(&self) {
        let shares = (SHARES * cpus()).min(SHARES_RANGE.1).to_string();
        for group in ["", "vms", BOOKED] {
            // With the usual weight, VMs get less beside other programs. The last one may be
            // missing.
            let _ = self.write("cpu", Path::new(group), "cpu.shares", &shares);
        }
        let above = self.hierarchies.iter().flat_map(|of| of.base.ancestors());
        for folder in above.filter(|folder| was_made(folder)) {
            // Fails in the hierarchies without cpu.
            let _ = write(&folder.join("cpu.shares"), &shares);
        }
    }

    fn lift_rates(&self, group: &Path) -> io::Result<()> {
        self.write("cpu", group, "cpu.cfs_quota_us", "-1")
    }

    fn check_io(&self) -> Result<(), GroupError> {
        Err(GroupError::OnlyV2 { limit: IO_MAX })
    }

    fn limit_io(&self, _group: &Path, _io_max: &IoMax, _disks: &[Disk]) -> Result<(), GroupError> {
        Err(GroupError::OnlyV2 { limit: IO_MAX })
    }

    fn entry(&self, group: &Path) -> io::Result<Entry> {
        let open = |folder: &PathBuf| {
            let path = folder.join(group).join("tasks");
            let file = File::options().write(true).open(&path).map_err(named(&path))?;
            Ok(file.into())
        };
        self.folders.iter().map(open).collect::<io::Result<_>>().map(Entry::Tasks)
    }

    fn set(&self, group: &Path, limits: &Limits) -> Result<(), GroupError> {
        let set = |controller, file, limit, value: Option<u64>| match value {
            Some(value) => self
                .write(controller, group, file, &value.to_string())
                .map_err(GroupError::refused(limit)),
            None => Ok(()),
        };
        let shares = limits.cpu_weight.map(shares);
        set("cpu", "cpu.cfs_quota_us", "cpu_max", limits.cpu_quota_us())?;
        set("cpu", "cpu.shares", "cpu_weight", shares)?;
        set("memory", "memory.limit_in_bytes", "memory_max", limits.memory_max_bytes)?;
        // After the limit of memory alone, which must not be above it. A kernel without accounting
        // of swap has no such file.
        if limits.memory_max_bytes.is_some() && self.has_swap_limit(group) {
            set("memory", MEMSW, "memory_max", limits.memory_max_bytes)?;
        }
        set("pids", "pids.max", "pids_max", limits.pids_max.map(u64::from))
    }

    fn usage(&self, group: &Path) -> io::Result<Usage> {
        for folder in self.folders.iter().map(|folder| folder.join(group)) {
            std::fs::metadata(&folder).map_err(named(&folder))?;
        }
        let us = |file| {
            let ns = self.number("cpuacct", group, file)?;
            io::Result::Ok(ns.unwrap_or(0) / 1000)
        };
        let cpu = match self.has("cpuacct") {
            true => Some(CpuTime {
                all_us: us("cpuacct.usage")?,
                user_us: us("cpuacct.usage_user")?,
                system_us: us("cpuacct.usage_sys")?,
            }),
            false => None,
        };
        let memory = |file| self.number("memory", group, file);
        let oom = self.file("memory", group, "memory.oom_control");
        let oom = oom.map(|path| read(&path)).transpose()?.flatten().unwrap_or_default();
        Ok(Usage {
            cpu,
            memory_bytes: memory("memory.usage_in_bytes")?,
            memory_peak_bytes: memory("memory.max_usage_in_bytes")?,
            oom_kills: keyed(&oom, "oom_kill").unwrap_or(0),
        })
    }

    fn unreclaimable_bytes(&self, group: &Path) -> io::Result<Option<u64>> {
        let used = self.number("memory", group, "memory.usage_in_bytes")?;
        let stat = self.file("memory", group, "memory.stat");
        let stat = stat.map(|path| read(&path)).transpose()?.flatten().unwrap_or_default();
        Ok(used
            .map(|used| without_cache(used, &stat, ["total_active_file", "total_inactive_file"])))
    }

    fn reset(&self, group: &Path) -> io::Result<bool> {
        let Usage { memory_bytes, oom_kills, .. } = self.usage(group)?;
        // The counter of kills cannot be reset. Memory that is still in use, such as pages of a
        // file, would be charged to the next VM.
        if oom_kills > 0 || memory_bytes.is_some_and(|bytes| bytes > LEFT_BYTES) {
            return Ok(false);
        }
        if self.has_swap_limit(group) {
            self.write("memory", group, MEMSW, "-1")?;
        }
        for (controller, file, text) in [
            ("cpu", "cpu.cfs_quota_us", "-1"),
            ("cpu", "cpu.shares", "1024"),
            ("cpuacct", "cpuacct.usage", "0"),
            ("memory", "memory.limit_in_bytes", "-1"),
            ("memory", "memory.max_usage_in_bytes", "0"),
            ("pids", "pids.max", "max"),
        ] {
            self.write(controller, group, file, text)?;
        }
        Ok(true)
    }

    fn join_main(&self) -> io::Result<()> {
        for (_, folder) in self.joined() {
            write(&folder.join(GroupName::Main.path()).join("cgroup.procs"), "0")?;
        }
        Ok(())
    }

    fn leave_main(&self) -> io::Result<bool> {
        for (of, _) in self.joined() {
            write(&of.own.join("cgroup.procs"), "0")?;
        }
        Ok(true)
    }

    fn shared(&self) -> io::Result<Option<&Path>> {
        // A group of v1 may have processes and groups.
        Ok(None)
    }
}
