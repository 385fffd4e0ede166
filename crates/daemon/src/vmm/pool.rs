//! The warm pool: what is made ahead of demand. Warm VMMs are jailed, with devices created and no
//! guest. Warm clones are warm VMMs with a restored snapshot, whose vCPUs are not started.
//!
//! The work of creating a VM that does not depend on the request is done before the request comes
//! (Swift Birth and Quick Death, section 4.1.2). A warm VMM fits every snapshot of its [`Shape`]. A
//! warm clone belongs to one snapshot: memory mapped, state loaded, working set prefetched; only
//! the identity is missing.
//!
//! The number that waits follows the demand: the takes of the busiest recent seconds, and none
//! after ten minutes without a request. An empty pool delays no request, because the request then
//! makes its VMM. The pool's work has a lower priority and waits for a moment without a request, if
//! there is one. A request with a program counts until the program's first output
//! ([`UnderWay::lasting`]).
//!
//! ```text
//!   keeper ──launch──▶ warm VMM ──restore──▶ warm clone ──take──▶ VM
//!                         └────────────────take────────────────▶
//!   waiting ──died, surplus, snapshot removed, stop──▶ ended
//! ```
//!
//! If a daemon is killed, its warm VMMs stay. They have no record, so the next daemon sweeps them.
//! The next daemon begins with a warm clone of each snapshot that was requested last
//! ([`crate::vmm::requested`]).

use crate::base::groups::GroupLease;
use crate::model::disk::Disk;
use crate::model::vm_slot::VmSlot;
use crate::templates::memory_backing::MemoryBacking;
use crate::vmm::demand::{Demand, IDLE, LEAST, WINDOW};
use crate::vmm::link::Link;
use crate::vmm::sizes::Template;
use dayfly_host::process::Process;
use dayfly_store::Pin;
use dayfly_units::{Name, VmId, sync::lock};
use dayfly_vmm::config::Shape;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::timeout;

/// Time limit of [`Pool::expect`] for the first warm clone.
const EXPECT: Duration = Duration::from_secs(5);
/// Time for which the keeper waits for creations and removals in progress.
pub(crate) const YIELD: Duration = Duration::from_millis(100);

/// A warm VMM or a warm clone.
#[derive(Debug)]
pub struct WarmVmm {
    /// Its id, slot and node.
    pub vm_slot: VmSlot,
    /// Its process.
    pub process: Arc<Process>,
    /// The connection for its commands.
    pub link: Link,
    /// Its control group, which becomes that of its VM.
    pub group: Option<GroupLease>,
    pub(crate) shape: Shape,
    /// The guest, if this is a warm clone.
    pub guest: Option<Guest>,
}

impl WarmVmm {
    /// Whether this is a warm clone.
    #[must_use]
    pub fn has_guest(&self) -> bool {
        self.guest.is_some()
    }
}

/// The guest of a warm clone.
#[derive(Debug)]
pub struct Guest {
    /// The VM's disks, with its writable layers.
    pub disks: Vec<Disk>,
    /// What its RAM is mapped from.
    pub backing: MemoryBacking,
    /// Keeps the disks' layers in the store.
    pub pin: Pin,
    /// Version of the agent in the guest.
    pub agent_version: String,
    pub(crate) template: Template,
}

#[derive(Debug, Default)]
struct Shelves {
    warm_vmms: HashMap<Shape, VecDeque<WarmVmm>>,
    warm_clones: HashMap<Template, VecDeque<WarmVmm>>,
    demand: HashMap<Template, Demand>,
    /// Demand for warm VMMs themselves, from forks and from snapshots that will soon be cloned.
    shapes: HashMap<Shape, Demand>,
    closed: bool,
}

impl Shelves {
    pub(crate) fn put(&mut self, warm: WarmVmm) {
        let shelf = match &warm.guest {
            Some(guest) => self.warm_clones.entry(guest.template.clone()).or_default(),
            None => self.warm_vmms.entry(warm.shape).or_default(),
        };
        shelf.push_back(warm);
    }

    fn count(&self) -> usize {
        self.warm_vmms.values().chain(self.warm_clones.values()).map(VecDeque::len).sum()
    }

    /// What too few of wait, warm VMMs first because they fit any snapshot. The limits are `most`
    /// clones of a snapshot, and one more of the warm VMMs of a shape.
    fn short(&self, now: Instant, most: usize) -> impl Iterator<Item = Missing> {
        let warm_vmms = |shape| self.warm_vmms.get(&shape).map_or(0, VecDeque::len);
        let shapes =
            self.demand.keys().map(|template| template.shape).chain(self.shapes.keys().copied());
        let shapes = shapes
            .filter(move |shape| warm_vmms(*shape) < self.warm_vmms(*shape, now).min(most + 1));
        let warm_clones = |template| self.warm_clones.get(template).map_or(0, VecDeque::len);
        let templates = self.demand.iter();
        let templates =
            templates.filter(move |(t, demand)| warm_clones(t) < demand.target(now).min(most));
        let templates = templates.map(|(template, _)| Missing::WarmClone(template.clone()));
        shapes.map(Missing::WarmVmm).chain(templates)
    }

    /// The number of warm VMMs of this shape that should wait.
    fn warm_vmms(&self, shape: Shape, now: Instant) -> usize {
        let recent = |demand: &Demand| now.duration_since(demand.last) <= IDLE;
        let used =
            self.demand.iter().any(|(template, demand)| template.shape == shape && recent(demand));
        let by_themselves = self.shapes.get(&shape).map_or(0, |demand| demand.target(now));
        by_themselves.max(if used { LEAST } else { 0 })
    }
}

/// What should be made next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    WarmVmm(Shape),
    WarmClone(Template),
}

/// The warm pool of a daemon.
#[derive(Debug)]
pub struct Pool {
    /// The most that wait. If the pool is full, what was not requested for longest is removed for
    /// other demand.
    all: usize,
    shelves: Mutex<Shelves>,
    pub(crate) wanted: Notify,
    /// The name of the snapshot of which a warm clone is being made.
    pub(crate) making: watch::Sender<Option<Name>>,
    /// Notified when [`Self::put`] adds a warm VMM or warm clone.
    shelved: Notify,
    creations: AtomicUsize,
    removals: AtomicUsize,
    pub(crate) quiet: Notify,
}

/// Marks a creation or a removal as in progress until it is dropped.
#[derive(Debug)]
pub struct UnderWay {
    pool: Arc<Pool>,
    of: fn(&Pool) -> &AtomicUsize,
}

/// Keeps a creation in progress until it is dropped, but only up to its time limit.
#[derive(Debug)]
pub struct Lasting(#[expect(dead_code, reason = "it is waited for, not used")] oneshot::Sender<()>);

impl UnderWay {
    /// Stays in progress until the returned value is dropped, but at most for `longest`.
    #[must_use]
    pub fn lasting(self, longest: Duration) -> Lasting {
        let (here, gone) = oneshot::channel();
        tokio::spawn(async move {
            let _ = timeout(longest, gone).await;
            drop(self);
        });
        Lasting(here)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if (self.of)(&self.pool).fetch_sub(1, Ordering::SeqCst) == 1 && self.pool.is_quiet() {
            self.pool.quiet.notify_waiters();
            // The keeper is not woken by a take, because it would use the CPU that the new guest
            // needs.
            self.pool.wanted.notify_one();
        }
    }
}

impl Pool {
    /// An empty pool for at most `all` warm VMMs and clones.
    #[must_use]
    pub fn new(all: usize) -> Self {
        Self {
            all,
            shelves: Mutex::default(),
            wanted: Notify::new(),
            making: watch::Sender::new(None),
            shelved: Notify::new(),
            creations: AtomicUsize::new(0),
            removals: AtomicUsize::new(0),
            quiet: Notify::new(),
        }
    }

    /// Whether more than one creation is in progress.
    pub fn busy(&self) -> bool {
        self.creations.load(Ordering::SeqCst) > 1
    }

    /// Marks a creation as in progress until the result is dropped.
    pub fn creation(self: &Arc<Self>) -> UnderWay {
        self.under_way(|pool| &pool.creations)
    }

    /// Marks a removal as in progress until the result is dropped. A client waits for it, and no
    /// client waits for the pool.
    pub fn removal(self: &Arc<Self>) -> UnderWay {
        self.under_way(|pool| &pool.removals)
    }

    fn under_way(self: &Arc<Self>, of: fn(&Self) -> &AtomicUsize) -> UnderWay {
        of(self).fetch_add(1, Ordering::SeqCst);
        UnderWay { pool: self.clone(), of }
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.creations.load(Ordering::SeqCst) == 0 && self.removals.load(Ordering::SeqCst) == 0
    }

    /// Takes the warm clone of this snapshot that has waited longest on the node; otherwise a warm
    /// VMM of its shape, if there is one. Counts as demand.
    pub fn take(&self, template: &Template, node: usize) -> Option<WarmVmm> {
        let mut shelves = lock(&self.shelves);
        let now = Instant::now();
        shelves
            .demand
            .entry(template.clone())
            .or_insert_with(|| Demand::new(now))
            .note(now, self.all);
        let Shelves { warm_vmms, warm_clones, .. } = &mut *shelves;
        alive(warm_clones.get_mut(template), Some(node))
            .or_else(|| alive(warm_vmms.get_mut(&template.shape), Some(node)))
    }

    /// Takes the warm VMM of this shape that has waited longest on the node, for a fork. Counts as
    /// demand.
    pub fn take_warm_vmm(&self, shape: Shape, node: usize) -> Option<WarmVmm> {
        let mut shelves = lock(&self.shelves);
        let now = Instant::now();
        shelves.shapes.entry(shape).or_insert_with(|| Demand::new(now)).note(now, self.all);
        alive(shelves.warm_vmms.get_mut(&shape), Some(node))
    }

    /// The node of the warm VMM of this shape that has waited longest.
    pub fn node_of_warm_vmm(&self, shape: Shape) -> Option<usize> {
        lock(&self.shelves).warm_vmms.get(&shape)?.front().map(|warm| warm.vm_slot.node)
    }

    /// The node of the warm clone of this snapshot that has waited longest; otherwise of a warm VMM
    /// of its shape.
    pub fn node_of(&self, template: &Template) -> Option<usize> {
        let shelves = lock(&self.shelves);
        let first =
            |shelf: Option<&VecDeque<WarmVmm>>| shelf?.front().map(|warm| warm.vm_slot.node);
        first(shelves.warm_clones.get(template))
            .or_else(|| first(shelves.warm_vmms.get(&template.shape)))
    }

    /// RAM of the guests of all warm VMMs and clones in bytes, by node.
    pub(crate) fn memory_by_node(&self, nodes: usize) -> Vec<u64> {
        let mut memory = vec![0; nodes];
        let shelves = lock(&self.shelves);
        for warm in shelves.warm_vmms.values().chain(shelves.warm_clones.values()).flatten() {
            if let Some(bytes) = memory.get_mut(warm.vm_slot.node) {
                *bytes += warm.shape.memory_bytes;
            }
        }
        memory
    }

    /// Announces that snapshots of this shape will soon be cloned.
    pub fn expect_shape(&self, shape: Shape) {
        let now = Instant::now();
        lock(&self.shelves).shapes.entry(shape).or_insert_with(|| Demand::new(now)).last = now;
        self.wanted.notify_one();
    }

    /// Announces that this snapshot will soon be cloned.
    pub fn announce(&self, template: &Template) {
        let now = Instant::now();
        lock(&self.shelves)
            .demand
            .entry(template.clone())
            .or_insert_with(|| Demand::new(now))
            .last = now;
        self.wanted.notify_one();
    }

    /// Names of the snapshots with demand, the one that was requested or announced last first.
    pub(crate) fn requested(&self) -> Vec<Name> {
        let shelves = lock(&self.shelves);
        let mut known: Vec<_> = shelves.demand.iter().collect();
        known.sort_by_key(|(_, demand)| std::cmp::Reverse(demand.last));
        known.into_iter().map(|(template, _)| template.name.clone()).collect()
    }

    /// Announces that this snapshot will soon be cloned. Waits until one warm clone of it is ready,
    /// for a few seconds at most.
    pub async fn expect(&self, template: &Template) {
        self.announce(template);
        let ready = async {
            loop {
                let shelved = self.shelved.notified();
                if lock(&self.shelves)
                    .warm_clones
                    .get(template)
                    .is_some_and(|shelf| !shelf.is_empty())
                {
                    return;
                }
                shelved.await;
            }
        };
        let _ = timeout(EXPECT, ready).await;
    }

    /// Adds a warm VMM or clone. Returns it if the pool is closed.
    pub(crate) fn put(&self, warm: WarmVmm) -> Option<WarmVmm> {
        let mut shelves = lock(&self.shelves);
        if shelves.closed {
            return Some(warm);
        }
        shelves.put(warm);
        drop(shelves);
        self.shelved.notify_waiters();
        None
    }

    /// The number that waits, and how many of these are warm clones.
    pub fn waiting(&self) -> (usize, usize) {
        let shelves = lock(&self.shelves);
        (shelves.count(), shelves.warm_clones.values().map(VecDeque::len).sum())
    }

    /// The number of warm VMMs that will need a writable layer for their guest.
    pub(crate) fn layers(&self) -> usize {
        let shelves = lock(&self.shelves);
        shelves
            .warm_vmms
            .iter()
            .filter(|(shape, _)| shape.disks > 0)
            .map(|(_, shelf)| shelf.len())
            .sum()
    }

    /// Takes the warm VMM or clone with this id.
    pub(crate) fn remove(&self, id: VmId) -> Option<WarmVmm> {
        let mut shelves = lock(&self.shelves);
        let Shelves { warm_vmms, warm_clones, .. } = &mut *shelves;
        warm_vmms.values_mut().chain(warm_clones.values_mut()).find_map(|shelf| {
            let place = shelf.iter().position(|warm| warm.vm_slot.id == id)?;
            shelf.remove(place)
        })
    }

    /// What should be made next; `None` if enough wait or the pool is full.
    pub(crate) fn missing(&self) -> Option<Missing> {
        let shelves = lock(&self.shelves);
        if shelves.count() >= self.all {
            return None;
        }
        // The last place is for a warm VMM.
        shelves.short(Instant::now(), self.all - 1).next()
    }

    /// Lets the remembered demand fade, and takes out the surplus.
    pub(crate) fn surplus(&self) -> Vec<WarmVmm> {
        let mut shelves = lock(&self.shelves);
        let now = Instant::now();
        let (full, most) = (shelves.count() >= self.all, self.all.saturating_sub(1));
        // A requested warm clone has priority over warm VMMs that were requested earlier.
        let crowded = full
            && shelves.short(now, most).any(|missing| matches!(missing, Missing::WarmClone(_)));
        shelves.shapes.retain(|_, demand| {
            demand.fade(now);
            demand.target(now) > 0 && !(crowded && now.duration_since(demand.last) > WINDOW)
        });
        // Demand of the last seconds stays, even if the pool is full. Older demand also stays
        // unless something else lacks its place.
        let resting = shelves.demand.iter().filter(|(_, d)| now.duration_since(d.last) > WINDOW);
        let oldest = resting.min_by_key(|(_, d)| d.last).map(|(template, _)| template.clone());
        let others = |oldest: &Template| {
            shelves.short(now, most).any(|missing| match missing {
                Missing::WarmVmm(shape) => shape != oldest.shape,
                Missing::WarmClone(template) => template != *oldest,
            })
        };
        let in_the_way = oldest.filter(|oldest| full && others(oldest));
        let Shelves { warm_clones, demand, .. } = &mut *shelves;
        let mut out = Vec::new();
        if let Some(template) = in_the_way {
            demand.remove(&template);
        }
        demand.retain(|_, demand| {
            demand.fade(now);
            demand.target(now) > 0
        });
        warm_clones.retain(|template, shelf| {
            let target = demand.get(template).map_or(0, |demand| demand.target(now).min(most));
            out.extend(shelf.drain(target.min(shelf.len())..));
            !shelf.is_empty()
        });
        let most: Vec<(Shape, usize)> = shelves
            .warm_vmms
            .keys()
            .map(|shape| (*shape, shelves.warm_vmms(*shape, now)))
            .collect();
        for (shape, most) in most {
            if let Some(shelf) = shelves.warm_vmms.get_mut(&shape) {
                out.extend(shelf.drain(most.min(shelf.len())..));
            }
        }
        shelves.warm_vmms.retain(|_, shelf| !shelf.is_empty());
        out
    }

    /// Closes the pool, and takes out everything.
    pub(crate) fn close(&self) -> Vec<WarmVmm> {
        let mut shelves = lock(&self.shelves);
        shelves.closed = true;
        let warm_vmms: Vec<WarmVmm> =
            shelves.warm_vmms.drain().flat_map(|(_, shelf)| shelf).collect();
        warm_vmms
            .into_iter()
            .chain(shelves.warm_clones.drain().flat_map(|(_, shelf)| shelf))
            .collect()
    }

    /// Takes out all warm clones of snapshots called `name`, and forgets their demand.
    pub(crate) fn forget(&self, name: &Name) -> Vec<WarmVmm> {
        let mut shelves = lock(&self.shelves);
        shelves.demand.retain(|template, _| template.name != *name);
        let Shelves { warm_clones, .. } = &mut *shelves;
        warm_clones
            .extract_if(|template, _| template.name == *name)
            .flat_map(|(_, shelf)| shelf)
            .collect()
    }

    /// Takes a warm VMM of this shape on any node. Does not count as demand.
    pub(crate) fn waiting_vmm(&self, shape: Shape) -> Option<WarmVmm> {
        alive(lock(&self.shelves).warm_vmms.get_mut(&shape), None)
    }

    /// Forgets the demand for a snapshot that cannot be cloned, so that nothing is made for it.
    pub(crate) fn give_up(&self, template: &Template) {
        lock(&self.shelves).demand.remove(template);
    }
}

/// Takes the first whose process lives, on `node` if given. The watcher of a process that has ended
/// removes it.
fn alive(shelf: Option<&mut VecDeque<WarmVmm>>, node: Option<usize>) -> Option<WarmVmm> {
    let shelf = shelf?;
    let fits = |warm: &WarmVmm| node.is_none_or(|node| warm.vm_slot.node == node);
    let place =
        shelf.iter().position(|warm| fits(warm) && warm.process.is_alive().unwrap_or(false))?;
    shelf.remove(place)
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
