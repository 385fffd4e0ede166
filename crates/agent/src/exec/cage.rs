//! How everything that a program started is found and killed: a control group (version 2) of its own where the guest
//! has them, otherwise its process tree.
//!
//! A cage that is empty again is used for the next program: making a control group costs more than all other system
//! calls of an exec together.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Empty cages that are kept.
const KEEP: usize = 4;

/// Groups of another agent (one before this, or beside it) that are stepped over.
const MAX_FOREIGN: usize = 4096;

/// Where control groups are mounted.
pub const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// The agent's control groups.
#[derive(Debug)]
pub struct Cages {
    base: Option<PathBuf>,
    next: AtomicU64,
    shelf: Mutex<Shelf>,
}

#[derive(Debug, Default)]
struct Shelf {
    free: Vec<Group>,
    /// Their program ended, but something it started lives on.
    left: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    dir: OwnedFd,
    name: String,
}

/// One program's cage.
#[derive(Debug)]
pub struct Cage {
    group: Option<Group>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A worker that panicked leaves lists of folders, which are valid at every point.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Cages {
    /// Uses `root`/dayfly where `root` is a version 2 hierarchy in which a group can be made and killed as a whole
    /// (Linux 5.14), else none.
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
        // The first program finds one ready.
        let first = cages.take();
        cages.give_back(first);
        cages
    }

    /// Whether control groups are used.
    #[must_use]
    pub const fn grouped(&self) -> bool {
        self.base.is_some()
    }

    /// A cage for one program.
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

    /// A new group: never one that is there already, which is somebody's and would be killed with ours.
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

    /// Takes a cage back once its program has been reaped.
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
    /// A cage without a control group.
    #[must_use]
    pub const fn tree() -> Self {
        Self { group: None }
    }

    /// The control group's folder.
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

/// Kills a process, its process group, its session, and everything that descends from any of them. Each is stopped
/// before the next look, so that none forks away. What has left the session *and* lost its parent before escapes:
/// only control groups reach that.
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
            // The name in parentheses may hold anything, parentheses too: the fields follow the last one.
            let end = stat.iter().rposition(|b| *b == b')')?;
            let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
            let mut fields = rest.split_ascii_whitespace().skip(1).map(|f| f.parse::<i64>().unwrap_or(-1));
            let mut next = || fields.next().and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
            Some(Process { pid, parent: next(), group: next(), session: next() })
        })
        .collect()
}
