//! The control groups of a daemon, and their counters of CPU time.

use crate::prelude::*;

/// Where time goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The group of the daemon and of zygotes.
    Main,
    /// The groups of VMs.
    Vms,
    /// The groups of pagers.
    Templates,
    /// Threads of the kernel that are in none of these groups.
    Kernel,
    /// Other programs.
    Foreign,
}

/// To whom time is charged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pub part: Part,
    /// The group below the tree, such as `vms/3`; empty outside of it.
    pub group: String,
}

/// The tree of control groups of one daemon, in the hierarchy that counts CPU time.
#[derive(Debug, Clone)]
pub struct Tree {
    /// The controller in `/proc/PID/cgroup`: `cpuacct`, or nothing for v2.
    controller: &'static str,
    /// The tree's path as `/proc/PID/cgroup` has it.
    path: String,
    /// Its folder.
    folder: PathBuf,
}

/// The group of a process in the hierarchy of `controller`; `None` if there is no such process or
/// hierarchy.
fn group_of(pid: u32, controller: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let found = text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let has = parts.next()?.split(',').any(|own| own == controller);
        has.then(|| parts.next())?
    });
    found.map(str::to_owned)
}

/// The mounted folder of the group `path` in the hierarchy of `controller`.
fn folder_of(controller: &str, path: &str) -> Result<PathBuf> {
    let mounts = crate::proc::read("/proc/self/mountinfo")?;
    let found = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1)?);
        let is = match controller {
            "" => kind == "cgroup2",
            _ => kind == "cgroup" && options.split(',').any(|own| own == controller),
        };
        let below = Path::new(path).strip_prefix(root).ok().filter(|_| is)?;
        Some(Path::new(point).join(below))
    });
    found.with_context(|| format!("{controller:?}: no mounted hierarchy with the group {path}"))
}

impl Tree {
    /// That of the daemon `pid`, which is in `main`.
    pub fn of(pid: u32) -> Result<Self> {
        let candidates = ["cpuacct", ""].into_iter();
        let mut found = candidates.filter_map(|controller| {
            let group = group_of(pid, controller)?;
            let path = group.strip_suffix("/main")?.to_owned();
            path.contains("dayfly-").then_some((controller, path))
        });
        let (controller, path) = found.next_back().context(
            "the daemon has no control group to itself: this scenario needs the right to make \
             some (docs/limits.md)",
        )?;
        let folder = folder_of(controller, &path)?;
        Ok(Self { controller, path, folder })
    }

    /// To whom a process is charged; `None` if there is no such process.
    pub fn owner_of(&self, pid: u32) -> Option<Owner> {
        let group = group_of(pid, self.controller)?;
        let below = Path::new(&group).strip_prefix(&self.path).ok();
        let below = below.and_then(Path::to_str).unwrap_or_default();
        let part = match below.split('/').next() {
            Some("main") => Part::Main,
            Some("vms" | "booked") => Part::Vms,
            Some("templates") => Part::Templates,
            _ => Part::Foreign,
        };
        Some(Owner { part, group: below.to_owned() })
    }

    /// The CPU time of a group with all groups below it, in seconds.
    fn seconds(&self, group: &str) -> Result<f64> {
        let folder = self.folder.join(group);
        let number = |text: &str| text.trim().parse::<u64>().ok();
        let ns = match self.controller {
            "" => {
                let text = std::fs::read_to_string(folder.join("cpu.stat"))?;
                let line = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
                line.and_then(number).map(|us| us * 1000)
            }
            _ => number(&std::fs::read_to_string(folder.join("cpuacct.usage"))?),
        };
        let ns = ns.with_context(|| format!("{}: expected a number", folder.display()))?;
        Ok(Duration::from_nanos(ns).as_secs_f64())
    }
}

/// The counters of a tree, in seconds of CPU time.
#[derive(Debug, Clone, Copy)]
pub struct Counters {
    main: f64,
    vms: f64,
    templates: f64,
}

impl Counters {
    /// Reads them.
    pub fn read(tree: &Tree) -> Result<Self> {
        // Without VMs that book CPUs there is no such group.
        let booked = tree.seconds("booked").unwrap_or(0.0);
        let (vms, templates) = (tree.seconds("vms")? + booked, tree.seconds("templates")?);
        Ok(Self { main: tree.seconds("main")?, vms, templates })
    }

    /// What was added since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            main: self.main - before.main,
            vms: self.vms - before.vms,
            templates: self.templates - before.templates,
        }
    }

    /// The seconds of a part; 0 of what is in no group.
    pub const fn of(&self, part: Part) -> f64 {
        match part {
            Part::Main => self.main,
            Part::Vms => self.vms,
            Part::Templates => self.templates,
            Part::Kernel | Part::Foreign => 0.0,
        }
    }

    pub fn figures(&self) -> Value {
        let Self { main, vms, templates } = *self;
        json!({ "main": rounded(main), "vms": rounded(vms), "templates": rounded(templates) })
    }
}
