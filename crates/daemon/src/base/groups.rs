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

use crate::base::error::ApiError;
use dayfly_api::types::{ErrorCode, VmLimits, VmUsage};
use dayfly_host::groups::{GroupError, GroupName, Groups, Limits, NoGroups, Root, Usage};
use dayfly_host::priority::background;
use dayfly_sys::group::Entry;
use dayfly_units::sync::lock;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The groups that wait for a VMM after a start, and the most that wait after VMs have ended. A
/// group takes about 42 KiB of the kernel's memory.
const READY: usize = 8;
const MOST_READY: usize = 512;

/// How long a returned group waits for the end of a process that is still in it.
const PAUSE: Duration = Duration::from_millis(20);
/// The same of a group that an earlier daemon left.
const LEFT_PAUSE: Duration = Duration::from_secs(1);

/// Part of RAM that page tables of guest and VMM take: two tables of 8 bytes for each 4 KiB, and
/// the levels above.
const TABLES_FRACTION: u64 = 128;

/// The range of `cpu_max_millicpus`; the kernel takes no less than 1 ms of CPU time in a period.
pub const MILLICPUS: std::ops::RangeInclusive<u32> = 10..=1_024_000;
/// The range of `cpu_weight`, which is that of cgroup v2.
pub const WEIGHTS: std::ops::RangeInclusive<u32> = 1..=10_000;
/// The least `memory_max_bytes`: some times what a VMM takes beside RAM and page tables.
pub const LEAST_MEMORY_BYTES: u64 = 16 << 20;
/// The least `pids_max` without vCPUs: some times the other threads of a VMM.
pub const LEAST_PIDS: u32 = 16;

/// The groups of a daemon, or why it has none.
#[derive(Debug, Clone)]
pub struct GroupStock(Result<Arc<Stock>, Arc<str>>);

#[derive(Debug)]
struct Stock {
    groups: Groups,
    state: Mutex<State>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct State {
    /// Groups of this daemon: ready, handed out or returned.
    own: BTreeSet<GroupName>,
    ready: VecDeque<(GroupName, Entry)>,
    returned: Vec<GroupName>,
    /// Groups of an earlier daemon whose processes this daemon does not know, such as a pager. They
    /// are removed when they are empty.
    left: Vec<GroupName>,
    /// The next number of a new group.
    next: u32,
    ended: bool,
}

/// The group of one VM or pager. A drop returns it, which does not end a process in it.
#[derive(Debug)]
pub struct GroupLease {
    name: GroupName,
    stock: Arc<Stock>,
}

impl Drop for GroupLease {
    fn drop(&mut self) {
        lock(&self.stock.state).returned.push(self.name);
        self.stock.changed.notify_one();
    }
}

impl GroupLease {
    /// Its number, by which the next daemon finds it.
    #[must_use]
    pub fn number(&self) -> u32 {
        match self.name {
            GroupName::Main => 0,
            GroupName::Template(number) | GroupName::Vm(number) => number,
        }
    }

    /// Sets the limits of a VM with this RAM. Makes no system call if there are none. Blocks for
    /// some microseconds.
    ///
    /// # Errors
    /// The host has no controller for a limit, or the kernel refuses its value.
    pub fn limit(&self, limits: &VmLimits, ram_bytes: u64) -> Result<(), ApiError> {
        if limits.is_none() {
            return Ok(());
        }
        self.stock.groups.set(self.name, &host_limits(limits, ram_bytes)).map_err(refused)
    }

    /// What its processes have used; `None` if the host does not say.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        let usage = self.stock.groups.usage(self.name);
        usage.inspect_err(|e| tracing::warn!("the use of control group {}: {e}", self.name)).ok()
    }
}

/// The use in the API's form.
#[must_use]
pub const fn shown(usage: &Usage) -> VmUsage {
    let Usage { cpu_us, cpu_user_us, cpu_system_us, memory_bytes, memory_peak_bytes, .. } = *usage;
    VmUsage { cpu_us, cpu_user_us, cpu_system_us, memory_bytes, memory_peak_bytes }
}

fn host_limits(limits: &VmLimits, ram_bytes: u64) -> Limits {
    let VmLimits { cpu_max_millicpus, cpu_weight, memory_max_bytes, pids_max } = *limits;
    let beyond = ram_bytes.saturating_add(ram_bytes / TABLES_FRACTION);
    let memory_max_bytes = memory_max_bytes.map(|bytes| bytes.saturating_add(beyond));
    Limits { cpu_max_millicpus, cpu_weight, memory_max_bytes, pids_max }
}

fn refused(error: GroupError) -> ApiError {
    let code = match error {
        GroupError::NoController { .. } => ErrorCode::Invalid,
        GroupError::Refused { .. } => ErrorCode::Internal,
    };
    ApiError::new(code, error)
}

/// Checks what can be checked of limits without the host.
fn check_range(limits: &VmLimits, vcpus: u8) -> Result<(), ApiError> {
    let pids = LEAST_PIDS + u32::from(vcpus);
    let wrong = |limit: &str, least: u64, most: u64, got: u64| {
        Err(ApiError::invalid(format_args!("{limit}: expected {least} to {most}, got {got}")))
    };
    match *limits {
        VmLimits { cpu_max_millicpus: Some(got), .. } if !MILLICPUS.contains(&got) => {
            let (least, most) = (*MILLICPUS.start(), *MILLICPUS.end());
            wrong("cpu_max_millicpus", least.into(), most.into(), got.into())
        }
        VmLimits { cpu_weight: Some(got), .. } if !WEIGHTS.contains(&got) => {
            wrong("cpu_weight", (*WEIGHTS.start()).into(), (*WEIGHTS.end()).into(), got.into())
        }
        VmLimits { memory_max_bytes: Some(got), .. } if got < LEAST_MEMORY_BYTES => {
            wrong("memory_max_bytes", LEAST_MEMORY_BYTES, u64::MAX, got)
        }
        VmLimits { pids_max: Some(got), .. } if got < pids => {
            wrong("pids_max", pids.into(), u32::MAX.into(), got.into())
        }
        _ => Ok(()),
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
        let groups = match Groups::open(root, run) {
            Ok(groups) => groups,
            Err(why) => {
                if !matches!(why, NoGroups::Off) {
                    tracing::info!("VMs have no control groups: {why}");
                }
                return Self::none(&why);
            }
        };
        if join && let Err(e) = groups.join_main() {
            tracing::warn!("this daemon is not in its control group: {e}");
        }
        let last = groups.list().unwrap_or_default().into_iter().map(|name| match name {
            GroupName::Main => 0,
            GroupName::Template(number) | GroupName::Vm(number) => number,
        });
        let next = last.max().map_or(0, |last| last.wrapping_add(1));
        let state = Mutex::new(State { next, ..State::default() });
        let (changed, thread) = (Condvar::new(), Mutex::default());
        let stock = Arc::new(Stock { groups, state, changed, thread });
        let keeper = stock.clone();
        let thread = std::thread::Builder::new().name("groups".to_owned());
        match thread.spawn(move || background(|| keeper.keep())) {
            Ok(thread) => *lock(&stock.thread) = Some(thread),
            Err(e) => tracing::warn!("control groups are not made ahead: {e}"),
        }
        Self(Ok(stock))
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

    /// Checks the limits of a VM with this number of vCPUs, before anything of it exists.
    ///
    /// # Errors
    /// A value is out of its range, or this daemon cannot limit that.
    pub fn check(&self, limits: &VmLimits, vcpus: u8) -> Result<(), ApiError> {
        if limits.is_none() {
            return Ok(());
        }
        check_range(limits, vcpus)?;
        match &self.0 {
            Ok(stock) => stock.groups.controllers().check(&host_limits(limits, 0)).map_err(refused),
            Err(why) => Err(ApiError::invalid(format_args!(
                "limits: expected none, because VMs of this daemon have no control groups: {why}"
            ))),
        }
    }

    /// A group for a VMM, and how the VMM enters it. Makes one if none is ready.
    #[must_use]
    pub fn take(&self) -> Option<(GroupLease, Entry)> {
        let stock = self.0.as_ref().ok()?;
        let ready = lock(&stock.state).ready.pop_front();
        stock.changed.notify_one();
        let (name, entry) = match ready {
            Some(ready) => ready,
            None => stock.make_or_warn(GroupName::Vm)?,
        };
        Some((GroupLease { name, stock: stock.clone() }, entry))
    }

    /// A new group for a pager.
    #[must_use]
    pub fn template(&self) -> Option<(GroupLease, Entry)> {
        let stock = self.0.as_ref().ok()?;
        let (name, entry) = stock.make_or_warn(GroupName::Template)?;
        Some((GroupLease { name, stock: stock.clone() }, entry))
    }

    /// The group of a VM that an earlier daemon started. `pid` is its VMM; `None` if that has
    /// ended. There is none if the VMM is not in the group, or if another process is.
    #[must_use]
    pub fn adopt(&self, number: u32, pid: Option<u32>) -> Option<GroupLease> {
        let stock = self.0.as_ref().ok()?;
        let name = GroupName::Vm(number);
        let inside = stock.groups.processes(name).ok()?;
        if !pid.map_or(inside.is_empty(), |pid| inside.contains(&pid)) {
            return None;
        }
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
                state.left.push(name);
            }
        }
        drop(state);
        stock.changed.notify_one();
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
        let left = std::mem::take(&mut state.left);
        let unused: Vec<_> = ready.chain(returned).chain(left).collect();
        drop(state);
        for name in unused {
            stock.remove(name);
        }
        if let Err(e) = stock.groups.close() {
            tracing::warn!("leaving control groups: {e}");
        }
    }
}

impl Stock {
    /// Makes a group under a new number.
    fn make(&self, kind: fn(u32) -> GroupName) -> io::Result<(GroupName, Entry)> {
        let name = {
            let mut state = lock(&self.state);
            let name = kind(state.next);
            state.next = state.next.wrapping_add(1);
            // Before it is made, so that no leak search takes it for a leak.
            state.own.insert(name);
            name
        };
        let made = self.groups.make(name).and_then(|()| self.groups.entry(name));
        let entry = made.inspect_err(|_| self.remove(name))?;
        Ok((name, entry))
    }

    fn make_or_warn(&self, kind: fn(u32) -> GroupName) -> Option<(GroupName, Entry)> {
        let made = self.make(kind);
        made.inspect_err(|e| tracing::warn!("a process without a control group: {e}")).ok()
    }

    /// Removes a group, if no process is in it.
    fn remove(&self, name: GroupName) {
        if let Err(e) = self.groups.remove(name) {
            tracing::warn!("removing a control group: {e}");
        }
        // One that is left is a leak once its last process has ended, and swept.
        lock(&self.state).own.remove(&name);
    }

    /// Makes and takes back groups until the daemon ends.
    fn keep(&self) {
        while let Some((returned, left)) = self.work() {
            let used: Vec<_> = returned.into_iter().filter(|name| !self.took_back(*name)).collect();
            let left: Vec<_> = left.into_iter().filter(|name| !self.took_back(*name)).collect();
            if !used.is_empty() {
                std::thread::sleep(PAUSE);
            }
            let mut state = lock(&self.state);
            state.returned.extend(used);
            state.left.extend(left);
            let short = state.ready.len() < READY;
            drop(state);
            if short {
                match self.make(GroupName::Vm) {
                    Ok(made) => self.add(made),
                    Err(e) => {
                        tracing::warn!("no control group is made ahead: {e}");
                        std::thread::sleep(PAUSE);
                    }
                }
            }
        }
    }

    /// Waits for work. Returns the groups to take back; `None` at the end of the daemon.
    fn work(&self) -> Option<(Vec<GroupName>, Vec<GroupName>)> {
        let mut state = lock(&self.state);
        let begun = Instant::now();
        loop {
            let look = !state.left.is_empty() && begun.elapsed() >= LEFT_PAUSE;
            if state.ended {
                return None;
            }
            if look || !state.returned.is_empty() || state.ready.len() < READY {
                let left = if look { std::mem::take(&mut state.left) } else { Vec::new() };
                return Some((std::mem::take(&mut state.returned), left));
            }
            state = if state.left.is_empty() {
                self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                let woken = self.changed.wait_timeout(state, LEFT_PAUSE);
                woken.unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }

    fn add(&self, made: (GroupName, Entry)) {
        let mut state = lock(&self.state);
        if state.ended {
            drop(state);
            self.remove(made.0);
        } else {
            state.ready.push_back(made);
        }
    }

    /// Takes back a group: as a ready one, or removes it. `false`: a process is in it.
    fn took_back(&self, name: GroupName) -> bool {
        if matches!(self.groups.is_used(name), Ok(true)) {
            return false;
        }
        let room = lock(&self.state).ready.len() < MOST_READY;
        let again = room && matches!(name, GroupName::Vm(_));
        match (again && self.groups.reset(name).unwrap_or(false)).then(|| self.groups.entry(name)) {
            Some(Ok(entry)) => self.add((name, entry)),
            _ => self.remove(name),
        }
        true
    }
}

#[cfg(test)]
#[path = "groups_tests.rs"]
mod tests;
