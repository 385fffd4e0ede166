//! The control groups of VMs and pagers ([`dayfly_host::groups`]): made ahead, handed out, taken
//! back.
//!
//! ```text
//!  thread `groups`: make ──▶ ready ──take──▶ GroupLease: a pre-forked VMM, a warm VMM, a VM
//!                     ▲                          │ drop, when the process is gone
//!                     └──── reset ◀── returned ◀─┘
//!                               └──▶ removed
//! ```
//!
//! A creation takes a ready group with its descriptors, and makes no system call for it (Closer,
//! section IV-B: the secondary container is there before its work). A host without groups, or a
//! daemon without the right to make them, gives `None`: VMs then run in the daemon's group, and a
//! limit is refused.

use crate::base::cpu_alloc::Cpus;
use crate::base::error::{ApiError, Outcome};
use crate::base::group_limits::{host_limits, refused};
use dayfly_api::types::VmLimits;
use dayfly_host::groups::{GroupName, Groups, Limits, NoGroups, Root, Usage};
use dayfly_host::priority::background;
use dayfly_host::reaper::KeptOff;
use dayfly_sys::group::Entry;
use dayfly_units::sync::lock;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// The groups that wait for a VMM after a start, and the most that wait after VMs have ended. A
/// group takes about 42 KiB of the kernel's memory.
const READY: usize = 8;
const MOST_READY: usize = 512;

/// When a returned group in which a process is still ending is looked at again.
const PAUSE: Duration = Duration::from_millis(20);
/// The same of a group that an earlier daemon left, or that cannot be looked at.
const LEFT_PAUSE: Duration = Duration::from_secs(1);
/// When another group is made after one could not be made.
const RETRY: Duration = Duration::from_secs(10);
/// How many numbers are tried for a new group.
const TRIES: u32 = 1000;

/// The groups of a daemon, or why it has none.
#[derive(Debug, Clone)]
pub struct GroupStock(pub(super) Result<Arc<Stock>, Arc<str>>);

#[derive(Debug)]
pub(super) struct Stock {
    pub(super) groups: Groups,
    pub(super) state: Mutex<State>,
    /// Locked before `state`.
    pub(super) cpus: Mutex<Cpus>,
    /// CPUs of dayflyd, and those that VMs have booked: other VMs' memory is not freed there.
    pub(super) off: Arc<KeptOff>,
    /// Notified when CPUs were given back.
    pub(super) given_back: Arc<Notify>,
    /// The folders on whose disks rates are limited.
    pub(super) folders: OnceLock<Vec<PathBuf>>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Groups of this daemon: ready, handed out, returned or waiting.
    own: BTreeSet<GroupName>,
    ready: VecDeque<(GroupName, Entry)>,
    returned: Vec<GroupName>,
    /// Groups that are looked at again at this time: a process is in them. Some are those of an
    /// earlier daemon, such as of a pager.
    waiting: Vec<(GroupName, Instant)>,
    /// Those of them that were looked at once.
    ending: BTreeSet<GroupName>,
    /// The next number of a new group; `None` if all were used.
    next: Option<u32>,
    /// When another group may be made, after one could not be.
    retry: Option<Instant>,
    pub(super) ended: bool,
}

/// The group of one VM or pager. A drop returns it, which does not end a process in it.
#[derive(Debug)]
pub struct GroupLease {
    pub(super) name: GroupName,
    pub(super) stock: Arc<Stock>,
}

impl Drop for GroupLease {
    fn drop(&mut self) {
        lock(&self.stock.state).returned.push(self.name);
        self.stock.changed.notify_one();
    }
}

impl GroupLease {
    /// Whether it has booked CPUs.
    #[must_use]
    pub const fn has_cpus(&self) -> bool {
        matches!(self.name, GroupName::Booked(_))
    }

    /// Its number, by which the next daemon finds it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.name.number()
    }

    /// How a new process enters the group. Blocks for some microseconds.
    ///
    /// # Errors
    /// A file of the group cannot be opened.
    pub fn entry(&self) -> io::Result<Entry> {
        self.stock.groups.entry(self.name)
    }

    /// Sets the limits of a VM with this RAM, except those of rates ([`Self::cap`]). Makes no
    /// system call if there are none. Blocks for some microseconds.
    ///
    /// # Errors
    /// The host has no controller for a limit, or the kernel refuses its value.
    pub fn limit(&self, limits: &VmLimits, ram_bytes: u64) -> Result<(), ApiError> {
        let limits = Limits { cpu_max_millicpus: None, ..host_limits(limits, ram_bytes) };
        if limits.is_none() {
            return Ok(());
        }
        self.stock.groups.set(self.name, &limits).map_err(refused)
    }

    /// The group's tree, which differs from those of daemons with another place.
    #[must_use]
    pub fn tree(&self) -> String {
        self.stock.tree()
    }

    /// Bytes of its memory that the kernel cannot reclaim; `None` if the host does not say.
    #[must_use]
    pub fn unreclaimable_bytes(&self) -> Option<u64> {
        let bytes = self.stock.groups.unreclaimable_bytes(self.name);
        bytes
            .inspect_err(|e| tracing::warn!("the memory of control group {}: {e}", self.name))
            .ok()
            .flatten()
    }

    /// What its processes have used; `None` if the host does not say.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        let usage = self.stock.groups.usage(self.name);
        usage.inspect_err(|e| tracing::debug!("the use of control group {}: {e}", self.name)).ok()
    }
}

impl Default for GroupStock {
    /// No groups.
    fn default() -> Self {
        Self::none(&NoGroups::Off)
    }
}

impl GroupStock {
    /// No groups, because of `why`.
    #[must_use]
    pub fn none(why: &NoGroups) -> Self {
        Self(Err(why.to_string().into()))
    }

    /// The groups of the daemon with the run folder `run`. Moves this process into `main` if
    /// `join`, and starts the thread that makes groups. Blocks.
    #[must_use]
    pub fn open(root: &Root, run: &Path, join: bool) -> Self {
        let opened = Groups::open(root, run, join).and_then(|groups| {
            let list = groups.list().map_err(NoGroups::Listing)?;
            Ok((groups, list))
        });
        let (groups, list) = match opened {
            Ok(opened) => opened,
            Err(why) => {
                if !matches!(why, NoGroups::Off) {
                    tracing::info!("VMs have no control groups: {why}");
                }
                return Self::none(&why);
            }
        };
        if let Some(e) = groups.not_joined() {
            tracing::warn!("this daemon is not in its control group: {e}");
        }
        if let Some(e) = groups.not_enabled() {
            tracing::warn!("a controller of control groups cannot be used: {e}");
        }
        let next = list.into_iter().map(GroupName::number).max();
        let next = next.map_or(Some(0), |last| last.checked_add(1));
        let state = Mutex::new(State { next, ..State::default() });
        let (changed, thread) = (Condvar::new(), Mutex::default());
        let (cpus, given_back, folders) = (Mutex::default(), Arc::default(), OnceLock::new());
        let off = Arc::default();
        let stock =
            Arc::new(Stock { groups, state, cpus, off, given_back, folders, changed, thread });
        let keeper = stock.clone();
        let thread = std::thread::Builder::new().name("groups".to_owned());
        match thread.spawn(move || background(|| keeper.keep())) {
            Ok(thread) => *lock(&stock.thread) = Some(thread),
            Err(e) => tracing::warn!("control groups are not made ahead: {e}"),
        }
        Self(Ok(stock))
    }

    /// CPUs on which no memory of other VMs is freed. They change with each booking.
    #[must_use]
    pub fn kept_off(&self) -> Arc<KeptOff> {
        self.0.as_ref().map(|stock| stock.off.clone()).unwrap_or_default()
    }

    /// The groups for the leak search; `None` without groups.
    #[must_use]
    pub fn groups(&self) -> Option<&Groups> {
        self.0.as_ref().ok().map(|stock| &stock.groups)
    }

    /// The groups that this daemon uses or has ready.
    #[must_use]
    pub fn own(&self) -> BTreeSet<GroupName> {
        self.0.as_ref().map(|stock| lock(&stock.state).own.clone()).unwrap_or_default()
    }

    pub(super) fn stock(&self) -> Outcome<&Arc<Stock>> {
        self.0.as_ref().map_err(|why| {
            ApiError::invalid(format_args!(
                "limits: expected none, because VMs of this daemon have no control groups: {why}; \
                 docs/limits.md says what helps"
            ))
        })
    }

    /// A group for a VMM, and how the VMM enters it. Makes one if none is ready.
    #[must_use]
    pub fn take(&self) -> Option<(GroupLease, Entry)> {
        let stock = self.0.as_ref().ok()?;
        let ready = lock(&stock.state).ready.pop_front();
        stock.changed.notify_one();
        let (name, mut entry) = match ready {
            Some(ready) => ready,
            None => stock.make_or_warn(GroupName::Vm)?,
        };
        // It may have been made before the first CPU was booked. Otherwise no system call.
        if let Err(e) = stock.groups.complete(&mut entry) {
            tracing::warn!("the CPUs that VMs share: {e}");
            self.has_stray();
        }
        Some((GroupLease { name, stock: stock.clone() }, entry))
    }

    /// A new group for a pager.
    #[must_use]
    pub fn template(&self) -> Option<(GroupLease, Entry)> {
        let stock = self.0.as_ref().ok()?;
        let (name, entry) = stock.make_or_warn(GroupName::Template)?;
        Some((GroupLease { name, stock: stock.clone() }, entry))
    }

    /// The group `number` of `tree`, which an earlier daemon gave to a VM. `pid` is its VMM; `None`
    /// if that has ended. There is none if the VMM is not in the group, or if another process is.
    #[must_use]
    pub fn adopt(&self, tree: &str, number: u32, pid: Option<u32>) -> Option<GroupLease> {
        let stock = self.0.as_ref().ok()?;
        if stock.tree() != tree {
            return None;
        }
        let inside = |name: &GroupName| {
            let inside = match pid {
                Some(pid) => stock.groups.contains(*name, pid),
                None => stock.groups.is_used(*name).map(|used| !used),
            };
            inside.unwrap_or(false)
        };
        let name = [GroupName::Vm(number), GroupName::Booked(number)].into_iter().find(inside)?;
        let new = lock(&stock.state).own.insert(name);
        new.then(|| GroupLease { name, stock: stock.clone() })
    }

    /// Takes over the groups of an earlier daemon that were not adopted. They are removed when they
    /// are empty, which ends no process.
    pub fn take_the_rest(&self) {
        let Ok(stock) = &self.0 else { return };
        let found = stock.groups.list().unwrap_or_else(|e| {
            tracing::warn!("control groups of an earlier daemon: {e}");
            Vec::new()
        });
        let mut state = lock(&stock.state);
        for name in found {
            if state.own.insert(name) {
                state.returned.push(name);
            }
        }
        drop(state);
        stock.changed.notify_one();
        self.share_the_rest();
    }

    /// Removes the groups that nothing uses, and the tree if no VM is left. Groups that are
    /// returned later stay for the next daemon. Blocks.
    pub fn end(&self) {
        let Ok(stock) = &self.0 else { return };
        lock(&stock.state).ended = true;
        stock.changed.notify_one();
        let thread = lock(&stock.thread).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that makes control groups has panicked");
        }
        let mut state = lock(&stock.state);
        let ready = std::mem::take(&mut state.ready).into_iter().map(|(name, _)| name);
        let returned = std::mem::take(&mut state.returned);
        let waiting = std::mem::take(&mut state.waiting).into_iter().map(|(name, _)| name);
        let unused: Vec<_> = ready.chain(returned).chain(waiting).collect();
        drop(state);
        for name in unused {
            // One that stays is for the next daemon.
            let _ = stock.remove(name);
        }
        if let Err(e) = stock.groups.close() {
            tracing::warn!("leaving control groups: {e}");
        }
    }
}

impl Stock {
    /// The folder of the tree in the first hierarchy.
    fn tree(&self) -> String {
        self.groups.folders().first().map_or_else(String::new, |path| path.display().to_string())
    }

    /// Makes a group under a new number.
    fn make(&self, kind: fn(u32) -> GroupName) -> io::Result<(GroupName, Entry)> {
        self.make_by(kind, |name| self.groups.make(name))
    }

    /// As [`Self::make`], by `make`.
    pub(super) fn make_by(
        &self,
        kind: fn(u32) -> GroupName,
        make: impl Fn(GroupName) -> io::Result<()>,
    ) -> io::Result<(GroupName, Entry)> {
        let mut tries = 0..TRIES;
        loop {
            let name = {
                let mut state = lock(&self.state);
                let number = state.next.ok_or_else(|| io::Error::other("all numbers are used"))?;
                let name = kind(number);
                state.next = number.checked_add(1);
                // Before it is made, so that no leak search takes it for a leak.
                state.own.insert(name);
                name
            };
            match make(name) {
                Ok(()) => {
                    let entry = self.groups.entry(name);
                    if entry.is_err() {
                        // No process is in it yet.
                        let _ = self.remove(name);
                    }
                    return Ok((name, entry?));
                }
                Err(e) => {
                    lock(&self.state).own.remove(&name);
                    // It is not that of this daemon.
                    if e.kind() != io::ErrorKind::AlreadyExists || tries.next().is_none() {
                        return Err(e);
                    }
                }
            }
        }
    }

    fn make_or_warn(&self, kind: fn(u32) -> GroupName) -> Option<(GroupName, Entry)> {
        let made = self.make(kind);
        made.inspect_err(|e| tracing::warn!("a process without a control group: {e}")).ok()
    }

    /// Removes a group. `false`: a process is in it, and this daemon keeps it.
    fn remove(&self, name: GroupName) -> bool {
        let removed = self.groups.remove(name).unwrap_or_else(|e| {
            tracing::warn!("removing a control group: {e}");
            // A leak, which a sweep removes if that is possible later.
            true
        });
        if removed {
            lock(&self.state).own.remove(&name);
            if let GroupName::Booked(number) = name {
                self.forget_booked(number);
            }
        }
        removed
    }

    /// Makes and takes back groups until the daemon ends.
    fn keep(&self) {
        while let Some((make, back)) = self.work() {
            if make {
                match self.make(GroupName::Vm) {
                    Ok(made) => self.add(made),
                    Err(e) => {
                        tracing::warn!("no control group is made ahead: {e}");
                        lock(&self.state).retry = Some(Instant::now() + RETRY);
                    }
                }
            }
            for name in back {
                if let Some(pause) = self.take_back(name) {
                    lock(&self.state).waiting.push((name, Instant::now() + pause));
                }
            }
        }
    }

    /// Waits for work: whether to make a group, and the groups to take back. `None` at the end of
    /// the daemon.
    fn work(&self) -> Option<(bool, Vec<GroupName>)> {
        let mut state = lock(&self.state);
        loop {
            if state.ended {
                return None;
            }
            let now = Instant::now();
            let make = state.ready.len() < READY && state.retry.is_none_or(|at| at <= now);
            let due = state.waiting.extract_if(.., |(_, at)| *at <= now).map(|(name, _)| name);
            let mut back: Vec<_> = due.collect();
            back.append(&mut state.returned);
            if make || !back.is_empty() {
                return Some((make, back));
            }
            let times = state.waiting.iter().map(|(_, at)| *at);
            let next = times.chain(state.retry.filter(|at| *at > now)).min();
            state = match next {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    let woken = self.changed.wait_timeout(state, at.saturating_duration_since(now));
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn add(&self, made: (GroupName, Entry)) {
        let mut state = lock(&self.state);
        if state.ended {
            drop(state);
            // One that stays is for the next daemon.
            let _ = self.remove(made.0);
        } else {
            state.ready.push_back(made);
        }
    }

    /// Takes back a group: as a ready one, or removes it. Returns when to try again, if a process
    /// is in it or the host does not say.
    fn take_back(&self, name: GroupName) -> Option<Duration> {
        match self.groups.is_used(name) {
            Ok(false) => {}
            // Another program removed it, or a removal was interrupted.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return self.end_group(name),
            Ok(true) => return Some(self.pause(name)),
            Err(_) => return Some(LEFT_PAUSE),
        }
        let room = lock(&self.state).ready.len() < MOST_READY;
        let again = room && matches!(name, GroupName::Vm(_));
        match (again && self.groups.reset(name).unwrap_or(false)).then(|| self.groups.entry(name)) {
            Some(Ok(entry)) => {
                lock(&self.state).ending.remove(&name);
                self.add((name, entry));
                None
            }
            _ => self.end_group(name),
        }
    }

    /// Removes a group. Returns when to try again: the kernel may still refuse for a moment after
    /// the last process has ended (EBUSY).
    fn end_group(&self, name: GroupName) -> Option<Duration> {
        if !self.remove(name) {
            return Some(self.pause(name));
        }
        lock(&self.state).ending.remove(&name);
        None
    }

    /// When to look again at a group with a process: soon at first. A pager, or a VM that was not
    /// adopted, may be in it for long.
    fn pause(&self, name: GroupName) -> Duration {
        if lock(&self.state).ending.insert(name) { PAUSE } else { LEFT_PAUSE }
    }
}

#[cfg(test)]
#[path = "groups_tests.rs"]
mod tests;
