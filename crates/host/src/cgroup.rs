//! cgroup v2 by plain file reads and writes (kernel: Documentation/admin-guide/cgroup-v2.rst).
//!
//! A host without cgroup v2, or without the right to use it, is supported: [`Cgroups::find`]
//! returns `None` and VMs run without a cgroup. A controller that cannot be enabled is left out,
//! and its figures read as `None`.

use dayfly_units::VmId;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The folder under the cgroup root that holds one group per VM.
pub const PARENT: &str = "dayfly";

/// The folder that holds the VMs' cgroups.
#[derive(Debug, Clone)]
pub struct Cgroups {
    parent: PathBuf,
}

/// The cgroup of one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroups {
    /// Finds the host's cgroup v2, creates [`PARENT`] in it, and enables the memory, cpu and pids
    /// controllers.
    ///
    /// `None` if there is no cgroup v2, or if this process may not create a cgroup in it.
    #[must_use]
    pub fn find() -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        Self::under(&mount_point(&mounts)?)
    }

    /// As [`Self::find`], for a cgroup v2 mounted at `root`.
    fn under(root: &Path) -> Option<Self> {
        let parent = root.join(PARENT);
        match std::fs::create_dir(&parent) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return None,
            _ => {}
        }
        for controller in ["+memory", "+cpu", "+pids"] {
            for folder in [root, &parent] {
                // The kernel refuses a controller that is missing or in use by cgroup v1; the
                // controller's figures are then absent.
                let _refused = std::fs::write(folder.join("cgroup.subtree_control"), controller);
            }
        }
        Some(Self { parent })
    }

    /// Creates the cgroup of `vm`, or takes over an existing one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn create(&self, vm: VmId) -> io::Result<Cgroup> {
        let group = self.of(vm);
        match std::fs::create_dir(&group.path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
            _ => Ok(group),
        }
    }

    /// The cgroup of `vm`, whether or not it exists.
    #[must_use]
    pub fn of(&self, vm: VmId) -> Cgroup {
        Cgroup { path: self.parent.join(vm.to_string()) }
    }

    /// The VMs that have a cgroup.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn vms(&self) -> io::Result<Vec<VmId>> {
        let mut vms = Vec::new();
        for entry in std::fs::read_dir(&self.parent)? {
            vms.extend(entry?.file_name().to_str().and_then(|n| n.parse::<VmId>().ok()));
        }
        Ok(vms)
    }
}

impl Cgroup {
    /// Opens the cgroup's folder, for [`crate::spawn::Spawn::cgroup`].
    ///
    /// # Errors
    /// The cgroup does not exist.
    pub fn open(&self) -> io::Result<OwnedFd> {
        Ok(rustix::fs::open(
            &self.path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?)
    }

    /// Bytes of memory charged to the cgroup now (`memory.current`); `None` without the memory
    /// controller.
    #[must_use]
    pub fn memory_bytes(&self) -> Option<u64> {
        self.read("memory.current")?.trim().parse().ok()
    }

    /// CPU time used so far (`usage_usec` of `cpu.stat`, in microseconds).
    #[must_use]
    pub fn cpu_time(&self) -> Option<Duration> {
        let text = self.read("cpu.stat")?;
        let us = text.lines().find_map(|l| l.strip_prefix("usage_usec "))?.trim().parse().ok()?;
        Some(Duration::from_micros(us))
    }

    /// Kills every process in the cgroup and removes the cgroup. A cgroup that does not exist is no
    /// error. Waits up to `timeout` for the processes to exit.
    ///
    /// # Errors
    /// The kernel refuses, or processes are still in the cgroup after `timeout` (`ResourceBusy`).
    pub fn remove(&self, timeout: Duration) -> io::Result<()> {
        let deadline = Instant::now() + timeout;
        // cgroup.kill exists since Linux 5.14; on an older kernel the caller must have killed the
        // processes.
        let _absent = std::fs::write(self.path.join("cgroup.kill"), "1");
        let mut pause = Duration::from_micros(200);
        loop {
            match std::fs::remove_dir(&self.path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(Duration::from_millis(10));
                }
                other => return other,
            }
        }
    }

    fn read(&self, file: &str) -> Option<String> {
        std::fs::read_to_string(self.path.join(file)).ok()
    }
}

/// Where cgroup v2 is mounted: the file system type is the first word after ` - `.
fn mount_point(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        right.starts_with("cgroup2 ").then(|| left.split(' ').nth(4).map(PathBuf::from))?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_of_version_2_is_found_and_version_1_is_not() {
        let table = "30 22 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                     31 22 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(table), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(mount_point(table.lines().next().unwrap()), None);
    }

    #[test]
    fn a_group_is_made_used_and_removed_with_its_processes() {
        let Some(groups) = Cgroups::find() else { return };
        let vm = VmId::random();
        let group = groups.create(vm).unwrap();
        assert_eq!(groups.create(vm).unwrap(), group);
        assert!(groups.vms().unwrap().contains(&vm));
        let mut spawn =
            crate::spawn::Spawn::new(crate::spawn::Program::Path("/bin/sleep".into()), "sleep");
        spawn.argv.push("1000".into());
        spawn.cgroup = Some(group.open().unwrap());
        let child = spawn.run().unwrap();
        let inside = std::fs::read_to_string(group.path.join("cgroup.procs")).unwrap();
        assert_eq!(inside.trim(), child.pid.to_string());
        assert!(group.cpu_time().is_some());
        let process = crate::process::Process::from_child(child).unwrap();
        process.kill().unwrap();
        process.wait(None).unwrap();
        group.remove(Duration::from_secs(240)).unwrap();
        group.remove(Duration::ZERO).unwrap();
        assert!(!groups.vms().unwrap().contains(&vm));
    }
}
