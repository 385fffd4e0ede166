//! Finding and killing everything that a program started: by a cgroup (version 2) per program if
//! the guest supports cgroups, otherwise by the process tree.
//!
//! An empty cage is reused for the next program, because creating a cgroup costs more than all
//! other system calls of an exec together.

use dayfly_units::sync::lock;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of empty cages that are kept.
const KEEP: usize = 4;

/// Maximum number of names to skip because another agent (an earlier or a concurrent one) uses
/// them.
const MAX_FOREIGN: usize = 4096;

/// The mount point of cgroup v2.
pub const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// The agent's cgroups.
#[derive(Debug)]
pub struct Cages {
    base: Option<PathBuf>,
    next: AtomicU64,
    shelf: Mutex<Shelf>,
}

#[derive(Debug, Default)]
struct Shelf {
    free: Vec<Group>,
    /// Groups whose program ended, while a process that the program started still runs.
    left: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    dir: OwnedFd,
    name: String,
}

/// The cage of one program.
#[derive(Debug)]
pub struct Cage {
    group: Option<Group>,
}

impl Cages {
    /// Uses `root`/dayfly if `root` is a version 2 hierarchy that permits creating and killing a
    /// group (cgroup.kill, Linux 5.14). Otherwise no cgroups are used.
    #[must_use]
    pub fn open(root: &Path) -> Self {
        let base = root.join("dayfly");
        let usable = root.join("cgroup.controllers").exists()
            && (std::fs::create_dir(&base).is_ok() || base.is_dir())
            && base.join("cgroup.kill").exists();
        let cages = Self {
            base: usable.then_some(base),
            next: AtomicU64::new(0),
            shelf: Mutex::new(Shelf::default()),
        };
        // Makes a group in advance, ready for the first program.
        let first = cages.take();
        cages.give_back(first);
        cages
    }

    /// Whether cgroups are used.
    #[must_use]
    pub const fn grouped(&self) -> bool {
        self.base.is_some()
    }

    /// Returns a cage for one program: an empty one, or a new one.
    #[must_use]
    pub fn take(&self) -> Cage {
        let Some(base) = &self.base else { return Cage { group: None } };
        let mut shelf = lock(&self.shelf);
        if let Some(group) = shelf.free.pop() {
            return Cage { group: Some(group) };
        }
        let mut left = std::mem::take(&mut shelf.left);
        let free = left.iter().position(|g| !g.populated()).map(|at| left.swap_remove(at));
        shelf.left = left;
        drop(shelf);
        Cage { group: free.or_else(|| self.make(base)) }
    }

    /// Creates a new group. An existing group is never taken over, because its processes are
    /// foreign and a kill would include them.
    fn make(&self, base: &Path) -> Option<Group> {
        for _ in 0..MAX_FOREIGN {
            let name = format!("exec-{}", self.next.fetch_add(1, Ordering::Relaxed));
            let path = base.join(&name);
            match rustix::fs::mkdir(&path, Mode::from_raw_mode(0o755)) {
                Ok(()) => {}
                Err(Errno::EXIST) => continue,
                Err(_) => return None,
            }
            let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
            let dir = rustix::fs::open(&path, flags, Mode::empty()).ok()?;
            return Some(Group { dir, name });
        }
        None
    }

    /// Returns a cage after its program has been reaped.
    pub fn give_back(&self, cage: Cage) {
        let (Some(base), Some(group)) = (&self.base, cage.group) else { return };
        let populated = group.populated();
        let mut shelf = lock(&self.shelf);
        if populated {
            shelf.left.push(group);
        } else if shelf.free.len() < KEEP {
            shelf.free.push(group);
        } else {
            let _ = rustix::fs::rmdir(base.join(&group.name));
        }
    }
}

impl Group {
    fn populated(&self) -> bool {
        let mut text = [0; 256];
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let read = rustix::fs::openat(&self.dir, c"cgroup.events", flags, Mode::empty())
            .and_then(|file| rustix::io::read(&file, &mut text));
        let text = text.get(..read.unwrap_or(0)).unwrap_or_default();
        !text.split(|b| *b == b'\n').any(|line| line == b"populated 0")
    }

    fn kill(&self) -> Result<(), Errno> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, c"cgroup.kill", flags, Mode::empty())?;
        rustix::io::write(&file, b"1").map(drop)
    }
}

impl Cage {
    /// A cage without a cgroup.
    #[must_use]
    pub const fn tree() -> Self {
        Self { group: None }
    }

    /// The cgroup's folder.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.group.as_ref().map(|g| g.dir.as_fd())
    }

    /// Kills everything in the cage of the program `pid`, which must not have been reaped yet.
    pub fn kill(&self, pid: u32) {
        if self.group.as_ref().is_none_or(|g| g.kill().is_err()) {
            kill_tree(pid);
        }
    }
}

/// Kills a process, its process group, its session, and all descendants of these. Each process is
/// stopped before the next scan, so that none can fork away. A process that had left the session
/// *and* lost its parent earlier escapes; only cgroups reach it.
fn kill_tree(root: u32) {
    let mut found = HashSet::from([root]);
    let mut stopped = HashSet::new();
    for _ in 0..64 {
        let processes = processes();
        loop {
            let before = found.len();
            for p in &processes {
                if p.group == root || p.session == root || found.contains(&p.parent) {
                    found.insert(p.pid);
                }
            }
            if found.len() == before {
                break;
            }
        }
        let new: Vec<u32> = found.difference(&stopped).copied().collect();
        if new.is_empty() {
            break;
        }
        for pid in new {
            send(pid, Signal::STOP);
            stopped.insert(pid);
        }
    }
    for pid in found {
        send(pid, Signal::KILL);
    }
}

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw).filter(|p| !p.is_init()) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

struct Process {
    pid: u32,
    parent: u32,
    group: u32,
    session: u32,
}

fn processes() -> Vec<Process> {
    let Ok(folder) = std::fs::read_dir("/proc") else { return Vec::new() };
    folder
        .filter_map(|entry| {
            let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
            // The name in parentheses may hold any byte, parentheses included: the fields follow
            // the last parenthesis.
            let end = stat.iter().rposition(|b| *b == b')')?;
            let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
            let mut fields =
                rest.split_ascii_whitespace().skip(1).map(|f| f.parse::<i64>().unwrap_or(-1));
            let mut next = || fields.next().and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
            Some(Process { pid, parent: next(), group: next(), session: next() })
        })
        .collect()
}
