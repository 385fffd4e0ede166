//! The back end for cgroup v2 (kernel: Documentation/admin-guide/cgroup-v2.rst): one hierarchy.

use super::backend::Backend;
use super::files::{keyed, named, number, read, without_cache, write};
use super::limits::{
    CPU_PERIOD_US, Controllers, CpuTime, GroupError, IO_MAX, IoMax, Limits, Usage, cpus,
};
use super::name::{BOOKED, GroupName};
use super::place::V2Place;
use super::tree::was_made;
use crate::disks::Disk;
use dayfly_sys::group::Entry;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::path::{Path, PathBuf};

/// The weight of `main` against all VMs together, which have the usual 100: without the daemon no
/// VM is created or removed.
const MAIN_WEIGHT: u64 = 10_000;
/// The usual weight of a group.
const WEIGHT: u64 = 100;

#[derive(Debug)]
pub(super) struct V2 {
    place: V2Place,
    /// The tree, as a list of one.
    tree: [PathBuf; 1],
}

impl V2 {
    pub(super) fn new(place: V2Place, name: &str) -> Self {
        let tree = [place.base.join(name)];
        Self { place, tree }
    }

    fn at(&self, group: &Path, file: &str) -> PathBuf {
        self.tree[0].join(group).join(file)
    }

    /// Gives the groups in `folder` those of the controllers that it has itself. The kernel refuses
    /// one that it cannot give, such as cpu while a thread of another group has real-time priority.
    fn enable_in(folder: &Path, controllers: &[&str]) -> io::Result<()> {
        let own = read(&folder.join("cgroup.controllers"))?.unwrap_or_default();
        let used = own.split_whitespace().filter(|name| controllers.contains(name));
        let enable =
            |name: &str| write(&folder.join("cgroup.subtree_control"), &format!("+{name}"));
        // All of them, whichever fails.
        used.map(enable).fold(Ok(()), io::Result::and)
    }

    /// Gives all groups of VMs the controller io. That costs each of their disk requests a little,
    /// so it is done when the first limit is set.
    fn enable_io(&self) -> io::Result<()> {
        let own = ["", "vms", BOOKED].map(|group| self.tree[0].join(group));
        let folders = self.place.above.iter().chain(&own);
        // Without VMs that book CPUs, there is no such folder.
        folders.map(|folder| Self::enable_in(folder, &["io"])).fold(Ok(()), io::Result::and)
    }

    /// Whether the tree's base is the root of all groups, which alone has no such file. Such a path
    /// as `/` is no evidence, because a cgroup namespace has its own.
    fn is_in_root(&self) -> bool {
        !self.place.base.join("cgroup.type").exists()
    }
}

impl Backend for V2 {
    fn folders(&self) -> &[PathBuf] {
        &self.tree
    }

    fn controllers(&self) -> Controllers {
        let given = read(&self.at("vms".as_ref(), "cgroup.subtree_control"));
        let given = given.ok().flatten().unwrap_or_default();
        let has = |name| given.split_whitespace().any(|other| other == name);
        Controllers { cpu: has("cpu"), memory: has("memory"), pids: has("pids") }
    }

    fn enable(&self, group: &Path) -> io::Result<()> {
        let above: &[PathBuf] = if group == Path::new("") { &self.place.above } else { &[] };
        let usual = ["cpu", "memory", "pids"];
        // Those that other groups may not have come last.
        let all = ["cpu", "memory", "pids", "cpuset", "io"];
        let controllers = if group == Path::new(BOOKED) { &all[..] } else { &usual };
        let enable = |folder: &Path| Self::enable_in(folder, controllers);
        let above = above.iter().map(|folder| enable(folder)).fold(Ok(()), io::Result::and);
        let own = enable(&self.tree[0].join(group));
        above.and(own)
    }

    fn weigh(&self) {
        let weight = (WEIGHT * cpus()).min(MAIN_WEIGHT);
        for (group, weight) in
            [("", weight), ("vms", weight), (BOOKED, weight), ("main", MAIN_WEIGHT)]
        {
            // Without the controller, or without the group, there is no such file.
            let _ = write(&self.at(group.as_ref(), "cpu.weight"), &weight.to_string());
        }
        for folder in self.place.above.iter().filter(|folder| was_made(folder)) {
            let _ = write(&folder.join("cpu.weight"), &weight.to_string());
        }
    }

    fn lift_rates(&self, group: &Path) -> io::Result<()> {
        let cpu = match write(&self.at(group, "cpu.max"), "max") {
            // Without the controller.
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            lifted => lifted,
        };
        let path = self.at(group, "io.max");
        let limits = read(&path)?.unwrap_or_default();
        let disks = limits.lines().filter_map(|line| line.split_whitespace().next());
        let lift = |disk| write(&path, &format!("{disk} rbps=max wbps=max riops=max wiops=max"));
        disks.map(lift).fold(cpu, io::Result::and)
    }

    fn check_io(&self) -> Result<(), GroupError> {
        // Enabled later, if the first of the groups above has it.
        let first = self.place.above.first().map(|first| read(&first.join("cgroup.controllers")));
        let first = first.and_then(Result::ok).flatten().unwrap_or_default();
        match first.split_whitespace().any(|name| name == "io") {
            true => Ok(()),
            false => Err(GroupError::NoController { limit: IO_MAX, controller: "io" }),
        }
    }

    fn limit_io(&self, group: &Path, io_max: &IoMax, disks: &[Disk]) -> Result<(), GroupError> {
        let path = self.at(group, "io.max");
        let enabled = if path.exists() { Ok(()) } else { self.enable_io() };
        let keys = io_max.keys();
        let set = |disk| write(&path, &format!("{disk}{keys}"));
        // The first error says more, unless all the same is as it should be.
        let set = disks.iter().try_for_each(set).map_err(|e| enabled.err().unwrap_or(e));
        set.map_err(GroupError::refused(IO_MAX))
    }

    fn entry(&self, group: &Path) -> io::Result<Entry> {
        let (path, flags) = (self.at(group, ""), OFlags::RDONLY | OFlags::DIRECTORY);
        let folder = rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::empty());
        folder.map(Entry::Folder).map_err(|e| named(&path)(e.into()))
    }

    fn set(&self, group: &Path, limits: &Limits) -> Result<(), GroupError> {
        let set = |file, limit, value: Option<String>| match value {
            Some(value) => write(&self.at(group, file), &value).map_err(GroupError::refused(limit)),
            None => Ok(()),
        };
        let quota = limits.cpu_quota_us().map(|us| format!("{us} {CPU_PERIOD_US}"));
        set("cpu.max", "cpu_max", quota)?;
        set("cpu.weight", "cpu_weight", limits.cpu_weight.map(|weight| weight.to_string()))?;
        let memory = limits.memory_max_bytes.map(|bytes| bytes.to_string());
        set("memory.max", "memory_max", memory)?;
        let swap = self.at(group, "memory.swap.max");
        if limits.memory_max_bytes.is_some() && swap.exists() {
            // Otherwise the group would swap instead of ending.
            write(&swap, "0").map_err(GroupError::refused("memory_max"))?;
        }
        set("pids.max", "pids_max", limits.pids_max.map(|most| most.to_string()))
    }

    fn usage(&self, group: &Path) -> io::Result<Usage> {
        let path = self.at(group, "cpu.stat");
        // Each group has this file, with or without the controller.
        let cpu = std::fs::read_to_string(&path).map_err(named(&path))?;
        let events = read(&self.at(group, "memory.events"))?.unwrap_or_default();
        let cpu = |key| keyed(&cpu, key).unwrap_or(0);
        Ok(Usage {
            cpu: Some(CpuTime {
                all_us: cpu("usage_usec"),
                user_us: cpu("user_usec"),
                system_us: cpu("system_usec"),
            }),
            memory_bytes: number(&self.at(group, "memory.current"))?,
            memory_peak_bytes: number(&self.at(group, "memory.peak"))?,
            oom_kills: keyed(&events, "oom_kill").unwrap_or(0),
        })
    }

    fn unreclaimable_bytes(&self, group: &Path) -> io::Result<Option<u64>> {
        let used = number(&self.at(group, "memory.current"))?;
        let stat = read(&self.at(group, "memory.stat"))?.unwrap_or_default();
        Ok(used.map(|used| without_cache(used, &stat, ["active_file", "inactive_file"])))
    }

    fn reset(&self, _group: &Path) -> io::Result<bool> {
        // Neither cpu.stat nor memory.peak can be reset for all readers.
        Ok(false)
    }

    fn join_main(&self) -> io::Result<()> {
        if !self.place.joins {
            return Ok(());
        }
        write(&self.at(&GroupName::Main.path(), "cgroup.procs"), "0")
    }

    fn leave_main(&self) -> io::Result<bool> {
        if !self.place.joins {
            return Ok(true);
        }
        let given = read(&self.place.own.join("cgroup.subtree_control"))?.unwrap_or_default();
        if !(self.is_in_root() || given.trim().is_empty()) {
            // EBUSY: only the root may have processes and give controllers.
            return Ok(false);
        }
        write(&self.place.own.join("cgroup.procs"), "0").map(|()| true)
    }

    fn shared(&self) -> io::Result<Option<&Path>> {
        if !self.place.joins || self.is_in_root() {
            return Ok(None);
        }
        let processes = read(&self.place.own.join("cgroup.procs"))?.unwrap_or_default();
        Ok((!processes.trim().is_empty()).then_some(self.place.own.as_path()))
    }
}
