//! What is made ahead of demand: shells, which are jailed VMMs with everything but a guest, and primed clones, which are shells
//! with a guest that only has to be let go.
//!
//! The work of a birth that depends on nothing in the request is done before it comes (Swift Birth and Quick Death, section
//! 4.1.2). A shell fits every snapshot of its [`Shape`]. A primed clone is of one snapshot: memory mapped, state
//! loaded, working set laid ready, and an identity of its own still to come. How many wait follows the demand: as many as were
//! taken at the busiest of the last seconds, and none once nobody has asked for ten minutes. An empty pool delays nobody: a
//! birth then makes what it needs. What is made ahead is made at a lower priority, and while no birth is under way, where there is
//! such a moment; a birth with a program lasts until that has said something ([`UnderWay::lasting`]).
//!
//! ```text
//!  keeper ──launch──▶ shell ──prime──▶ clone ──take──▶ birth       waiting ──died, too many, removed, stop──▶ ended
//!                       └──────────take──────────────▶
//! ```
//!
//! A daemon that is killed leaves what waits; it has no record, so the next one sweeps it.

use super::Disk;
use super::beneath::Beneath;
use super::birth::Part;
use super::demand::{Demand, IDLE, LEAST, TICK, WINDOW};
use super::launch::{self, Fds, Launched};
use super::link::{self, Link};
use super::record::read_json;
use super::registry::{Seat, lock};
use super::source::{CloneOf, Template};
use crate::daemon::Daemon;
use crate::error::{Fault, Outcome, blocking, chain};
use dayfly_api::types::ErrorCode;
use dayfly_host::priority::background;
use dayfly_host::process::Process;
use dayfly_store::Pin;
use dayfly_units::{Name, VmId};
use dayfly_vmm::config::{Shape, Start};
use dayfly_vmm::control::{Command, ExitRecord};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

/// How long whoever expects births waits for the first clone.
const EXPECT: Duration = Duration::from_secs(5);
/// How long the keeper holds back for births and deaths that are under way.
const YIELD: Duration = Duration::from_millis(100);

/// A VMM that waits.
#[derive(Debug)]
pub struct Shell {
    /// Its id and slot.
    pub seat: Seat,
    /// Its process.
    pub process: Arc<Process>,
    /// The connection to it.
    pub link: Link,
    shape: Shape,
    /// The guest of a primed clone.
    pub guest: Option<Guest>,
}

impl Shell {
    /// Whether it has its guest.
    #[must_use]
    pub fn is_primed(&self) -> bool {
        self.guest.is_some()
    }
}

/// What a primed clone has.
#[derive(Debug)]
pub struct Guest {
    /// Its disks.
    pub disks: Vec<Disk>,
    /// What its RAM is mapped from.
    pub beneath: Beneath,
    /// Keeps their layers in the store.
    pub pin: Pin,
    /// Of the agent in it.
    pub agent_version: String,
    template: Template,
}

#[derive(Debug, Default)]
struct Shelves {
    shells: HashMap<Shape, VecDeque<Shell>>,
    primed: HashMap<Template, VecDeque<Shell>>,
    demand: HashMap<Template, Demand>,
    /// Demand for shells by themselves: of VMs that are forked, and of snapshots that will soon be asked for.
    shapes: HashMap<Shape, Demand>,
    closed: bool,
}

impl Shelves {
    fn put(&mut self, shell: Shell) {
        let shelf = match &shell.guest {
            Some(guest) => self.primed.entry(guest.template.clone()).or_default(),
            None => self.shells.entry(shell.shape).or_default(),
        };
        shelf.push_back(shell);
    }

    fn count(&self) -> usize {
        self.shells.values().chain(self.primed.values()).map(VecDeque::len).sum()
    }

    /// What too few wait of, with at most so many clones of a snapshot, and a shell more; first the shells, which fit anything.
    fn short(&self, now: Instant, most: usize) -> impl Iterator<Item = Missing> {
        let shells = |shape| self.shells.get(&shape).map_or(0, VecDeque::len);
        let shapes = self.demand.keys().map(|template| template.shape).chain(self.shapes.keys().copied());
        let shapes = shapes.filter(move |shape| shells(*shape) < self.shells(*shape, now).min(most + 1));
        let primed = |template| self.primed.get(template).map_or(0, VecDeque::len);
        let templates = self.demand.iter();
        let templates = templates.filter(move |(t, demand)| primed(t) < demand.target(now).min(most));
        let templates = templates.map(|(template, _)| Missing::Primed(template.clone()));
        shapes.map(Missing::Shell).chain(templates)
    }

    /// How many shells of this shape are to wait.
    fn shells(&self, shape: Shape, now: Instant) -> usize {
        let recent = |demand: &Demand| now.duration_since(demand.last) <= IDLE;
        let used = self.demand.iter().any(|(template, demand)| template.shape == shape && recent(demand));
        let by_themselves = self.shapes.get(&shape).map_or(0, |demand| demand.target(now));
        by_themselves.max(if used { LEAST } else { 0 })
    }
}

/// What is to be made.
#[derive(Debug, PartialEq, Eq)]
enum Missing {
    Shell(Shape),
    Primed(Template),
}

/// All that wait.
#[derive(Debug)]
pub struct Pool {
    /// The most that wait in all. Where it is reached, what was not asked for longest makes room.
    all: usize,
    shelves: Mutex<Shelves>,
    wanted: Notify,
    /// Something was put away.
    shelved: Notify,
    births: AtomicUsize,
    deaths: AtomicUsize,
    quiet: Notify,
}

/// A birth or a death is under way.
#[derive(Debug)]
pub struct UnderWay {
    pool: Arc<Pool>,
    of: fn(&Pool) -> &AtomicUsize,
}

/// The birth is under way until this is dropped, but not for ever.
#[derive(Debug)]
pub struct Lasting(#[expect(dead_code, reason = "it is waited for, not used")] oneshot::Sender<()>);

impl UnderWay {
    /// Goes on until the end of what is given, but at most `longest`.
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
            // Not when something was taken: the keeper would take the CPU that the guest needs.
            self.pool.wanted.notify_one();
        }
    }
}

impl Pool {
    /// An empty one, in which at most `all` wait.
    #[must_use]
    pub fn new(all: usize) -> Self {
        Self {
            all,
            shelves: Mutex::default(),
            wanted: Notify::new(),
            shelved: Notify::new(),
            births: AtomicUsize::new(0),
            deaths: AtomicUsize::new(0),
            quiet: Notify::new(),
        }
    }

    /// Whether several births are under way.
    pub fn busy(&self) -> bool {
        self.births.load(Ordering::SeqCst) > 1
    }

    /// Says that a birth is under way, until it is dropped.
    pub fn birth(self: &Arc<Self>) -> UnderWay {
        self.under_way(|pool| &pool.births)
    }

    /// Says that a death is under way, until it is dropped: somebody waits for it, and nobody for what is made ahead. By itself this made
    /// 512 deaths at once little faster (ARCHITECTURE.md).
    pub fn death(self: &Arc<Self>) -> UnderWay {
        self.under_way(|pool| &pool.deaths)
    }

    fn under_way(self: &Arc<Self>, of: fn(&Self) -> &AtomicUsize) -> UnderWay {
        of(self).fetch_add(1, Ordering::SeqCst);
        UnderWay { pool: self.clone(), of }
    }

    fn is_quiet(&self) -> bool {
        self.births.load(Ordering::SeqCst) == 0 && self.deaths.load(Ordering::SeqCst) == 0
    }

    /// The clone of this snapshot that waits longest on the node, else a shell for it, if there is one.
    pub fn take(&self, template: &Template, node: usize) -> Option<Shell> {
        let mut shelves = lock(&self.shelves);
        let now = Instant::now();
        shelves.demand.entry(template.clone()).or_insert_with(|| Demand::new(now)).note(now, self.all);
        let Shelves { shells, primed, .. } = &mut *shelves;
        alive(primed.get_mut(template), Some(node))
            .or_else(|| alive(shells.get_mut(&template.shape), Some(node)))
    }

    /// The shell of this shape that waits longest on the node, for what is no clone of a snapshot.
    pub fn take_shell(&self, shape: Shape, node: usize) -> Option<Shell> {
        let mut shelves = lock(&self.shelves);
        let now = Instant::now();
        shelves.shapes.entry(shape).or_insert_with(|| Demand::new(now)).note(now, self.all);
        alive(shelves.shells.get_mut(&shape), Some(node))
    }

    /// Where the shell of this shape is that waits longest.
    pub fn node_of_shell(&self, shape: Shape) -> Option<usize> {
        lock(&self.shelves).shells.get(&shape)?.front().map(|shell| shell.seat.node)
    }

    /// The node of the clone of this snapshot that waits longest, else of a shell for it.
    pub fn node_of(&self, template: &Template) -> Option<usize> {
        let shelves = lock(&self.shelves);
        let first = |shelf: Option<&VecDeque<Shell>>| shelf?.front().map(|shell| shell.seat.node);
        first(shelves.primed.get(template)).or_else(|| first(shelves.shells.get(&template.shape)))
    }

    /// The guests' memory of all that wait, by node.
    fn memory_by_node(&self, nodes: usize) -> Vec<u64> {
        let mut memory = vec![0; nodes];
        let shelves = lock(&self.shelves);
        for shell in shelves.shells.values().chain(shelves.primed.values()).flatten() {
            if let Some(bytes) = memory.get_mut(shell.seat.node) {
                *bytes += shell.shape.memory_bytes;
            }
        }
        memory
    }

    /// Takes back what was not used.
    pub fn give_back(&self, shell: Shell) {
        lock(&self.shelves).put(shell);
    }

    /// Says that snapshots of this shape will soon be cloned.
    pub fn expect_shape(&self, shape: Shape) {
        let now = Instant::now();
        lock(&self.shelves).shapes.entry(shape).or_insert_with(|| Demand::new(now)).last = now;
        self.wanted.notify_one();
    }

    /// Says that this snapshot will soon be cloned, and waits until one clone of it is ready, but not for long.
    pub async fn expect(&self, template: &Template) {
        let now = Instant::now();
        lock(&self.shelves).demand.entry(template.clone()).or_insert_with(|| Demand::new(now)).last = now;
        self.wanted.notify_one();
        let ready = async {
            loop {
                let shelved = self.shelved.notified();
                if lock(&self.shelves).primed.get(template).is_some_and(|shelf| !shelf.is_empty()) {
                    return;
                }
                shelved.await;
            }
        };
        let _ = timeout(EXPECT, ready).await;
    }

    /// Puts it away; gives it back where nothing is to wait any more.
    fn put(&self, shell: Shell) -> Option<Shell> {
        let mut shelves = lock(&self.shelves);
        if shelves.closed {
            return Some(shell);
        }
        shelves.put(shell);
        drop(shelves);
        self.shelved.notify_waiters();
        None
    }

    /// How many wait, and how many of them are primed clones.
    pub fn waiting(&self) -> (usize, usize) {
        let shelves = lock(&self.shelves);
        (shelves.count(), shelves.primed.values().map(VecDeque::len).sum())
    }

    /// How many writable layers those that have no guest yet will want.
    fn layers(&self) -> usize {
        let shelves = lock(&self.shelves);
        shelves.shells.iter().filter(|(shape, _)| shape.disks > 0).map(|(_, shelf)| shelf.len()).sum()
    }

    /// Takes out the one with this id.
    fn remove(&self, id: VmId) -> Option<Shell> {
        let mut shelves = lock(&self.shelves);
        let Shelves { shells, primed, .. } = &mut *shelves;
        shells.values_mut().chain(primed.values_mut()).find_map(|shelf| {
            let place = shelf.iter().position(|shell| shell.seat.id == id)?;
            shelf.remove(place)
        })
    }

    /// What too few wait of.
    fn missing(&self) -> Option<Missing> {
        let shelves = lock(&self.shelves);
        if shelves.count() >= self.all {
            return None;
        }
        // The last place is a shell's.
        shelves.short(Instant::now(), self.all - 1).next()
    }

    /// Lets the remembered demand fade, and takes out what is then too much.
    fn surplus(&self) -> Vec<Shell> {
        let mut shelves = lock(&self.shelves);
        let now = Instant::now();
        let (full, most) = (shelves.count() >= self.all, self.all.saturating_sub(1));
        // A clone that is asked for goes before shells that were.
        let crowded = full && shelves.short(now, most).any(|missing| matches!(missing, Missing::Primed(_)));
        shelves.shapes.retain(|_, demand| {
            demand.fade(now);
            demand.target(now) > 0 && !(crowded && now.duration_since(demand.last) > WINDOW)
        });
        // What is asked for right now stays, however full it is; and so does all where nothing else is to take its place.
        let resting = shelves.demand.iter().filter(|(_, d)| now.duration_since(d.last) > WINDOW);
        let oldest = resting.min_by_key(|(_, d)| d.last).map(|(template, _)| template.clone());
        let others = |oldest: &Template| {
            shelves.short(now, most).any(|missing| match missing {
                Missing::Shell(shape) => shape != oldest.shape,
                Missing::Primed(template) => template != *oldest,
            })
        };
        let in_the_way = oldest.filter(|oldest| full && others(oldest));
        let Shelves { primed, demand, .. } = &mut *shelves;
        let mut out = Vec::new();
        if let Some(template) = in_the_way {
            demand.remove(&template);
        }
        demand.retain(|_, demand| {
            demand.fade(now);
            demand.target(now) > 0
        });
        primed.retain(|template, shelf| {
            let target = demand.get(template).map_or(0, |demand| demand.target(now).min(most));
            out.extend(shelf.drain(target.min(shelf.len())..));
            !shelf.is_empty()
        });
        let most: Vec<(Shape, usize)> =
            shelves.shells.keys().map(|shape| (*shape, shelves.shells(*shape, now))).collect();
        for (shape, most) in most {
            if let Some(shelf) = shelves.shells.get_mut(&shape) {
                out.extend(shelf.drain(most.min(shelf.len())..));
            }
        }
        shelves.shells.retain(|_, shelf| !shelf.is_empty());
        out
    }

    /// Takes out all, for ever.
    fn close(&self) -> Vec<Shell> {
        let mut shelves = lock(&self.shelves);
        shelves.closed = true;
        let shells: Vec<Shell> = shelves.shells.drain().flat_map(|(_, shelf)| shelf).collect();
        shells.into_iter().chain(shelves.primed.drain().flat_map(|(_, shelf)| shelf)).collect()
    }

    /// Takes out all clones of snapshots called `name`, which is being removed.
    fn forget(&self, name: &Name) -> Vec<Shell> {
        let mut shelves = lock(&self.shelves);
        shelves.demand.retain(|template, _| template.name != *name);
        let Shelves { primed, .. } = &mut *shelves;
        primed.extract_if(|template, _| template.name == *name).flat_map(|(_, shelf)| shelf).collect()
    }

    /// The snapshot cannot be cloned: nothing is made ahead for it.
    fn give_up(&self, template: &Template) {
        lock(&self.shelves).demand.remove(template);
    }
}

/// Takes out the first that lives, of this node where that matters; one that has died is left to its watcher.
fn alive(shelf: Option<&mut VecDeque<Shell>>, node: Option<usize>) -> Option<Shell> {
    let shelf = shelf?;
    let fits = |shell: &Shell| node.is_none_or(|node| shell.seat.node == node);
    let place = shelf.iter().position(|shell| fits(shell) && shell.process.is_alive().unwrap_or(false))?;
    shelf.remove(place)
}

/// Keeps the pool as full as the demand says, until the daemon stops; then ends all shells.
pub async fn keep(daemon: Arc<Daemon>) {
    let mut last_look = Instant::now();
    while !daemon.stop.is_cancelled() {
        if last_look.elapsed() >= TICK {
            last_look = Instant::now();
            let surplus = daemon.pool.surplus();
            if !surplus.is_empty() {
                end(&daemon, surplus).await;
                trim_layers(&daemon).await;
            }
        }
        if let Some(missing) = daemon.pool.missing() {
            hold_back(&daemon.pool).await;
            let made = match &missing {
                Missing::Shell(shape) => make(&daemon, *shape).await.map(|shell| (shell, true)),
                Missing::Primed(template) => prime(&daemon, template).await,
            };
            match (made, &missing) {
                (Ok((shell, new)), _) => shelve(&daemon, shell, new).await,
                // It was killed, which says nothing of the next one.
                (Err(fault), _) if fault.0.code == ErrorCode::Guest => {
                    tracing::warn!("making {missing:?} ahead of demand: {fault}");
                    // By a host without memory, perhaps.
                    tokio::time::sleep(YIELD).await;
                }
                (Err(fault), Missing::Primed(template)) if fault.0.code == ErrorCode::NotFound => {
                    tracing::debug!("making {missing:?} ahead of demand: {fault}"); // it was removed meanwhile
                    daemon.pool.give_up(template);
                }
                (Err(fault), Missing::Primed(template)) => {
                    tracing::error!("making {missing:?} ahead of demand: {fault}");
                    daemon.pool.give_up(template);
                }
                (Err(fault), Missing::Shell(_)) => {
                    tracing::error!("making {missing:?} ahead of demand: {fault}");
                    tokio::time::sleep(TICK).await; // births make their own meanwhile
                }
            }
            continue;
        }
        tokio::select! {
            () = daemon.pool.wanted.notified() => {}
            () = tokio::time::sleep(TICK) => {}
            () = daemon.stop.cancelled() => {}
        }
    }
    end(&daemon, daemon.pool.close()).await;
}

/// Removes layers made ahead that no shell waits for any more. One stays, for who finds no shell.
async fn trim_layers(daemon: &Arc<Daemon>) {
    let (depot, layers) = (daemon.depot.clone(), daemon.pool.layers() + 1);
    if let Err(fault) = blocking(move || Ok(depot.store().trim_vm_layers(layers)?)).await {
        // The next start sweeps them.
        tracing::warn!("layers made ahead: {fault}");
    }
}

/// Waits until no birth and no death is under way, but not for long.
async fn hold_back(pool: &Pool) {
    let quiet = pool.quiet.notified();
    if !pool.is_quiet() {
        let _ = timeout(YIELD, quiet).await;
    }
}

/// A new shell.
async fn make(daemon: &Arc<Daemon>, shape: Shape) -> Outcome<Shell> {
    // Births go where VMMs wait, so these are spread as births are to be.
    let waiting = daemon.pool.memory_by_node(daemon.nodes.len());
    let seat = daemon.registry.seat(daemon.budget.emptiest(&waiting))?;
    let (maker, layers) = (daemon.clone(), daemon.pool.layers() + 1);
    let start = Start::Shell { shape, record: false };
    let made = blocking(move || {
        background(|| {
            let launched = launch::launch(&maker, seat, start, Fds::default(), true)?;
            if shape.disks > 0
                && let Err(e) = maker.depot.store().prepare_vm_layers(layers)
            {
                // Births make their own.
                tracing::warn!("layers for the next VMs: {}", chain(&e));
            }
            Ok(launched)
        })
    });
    match made.await {
        Ok(Launched { process, link, ready: _ }) => Ok(Shell { seat, process, link, shape, guest: None }),
        Err(fault) => {
            discard(daemon, seat).await;
            Err(fault)
        }
    }
}

/// A shell, one that waits if there is one, with its guest; also says whether it is a new one.
async fn prime(daemon: &Arc<Daemon>, template: &Template) -> Outcome<(Shell, bool)> {
    let waiting = alive(lock(&daemon.pool.shelves).shells.get_mut(&template.shape), None);
    let new = waiting.is_none();
    let mut shell = match waiting {
        Some(shell) => shell,
        None => make(daemon, template.shape).await?,
    };
    let (maker, wanted, seat, vmm) = (daemon.clone(), template.clone(), shell.seat, shell.process.clone());
    let guest = move || {
        let open = maker.depot.open_snapshot(&wanted.name)?;
        if Template::of(&open)? != wanted {
            return Err(Fault::not_found(format_args!("snapshot {}: is another one by now", wanted.name)));
        }
        Ok((
            open.manifest.agent_version.clone(),
            CloneOf::new(&maker, seat.id, &vmm, (&open).into(), Part::Pool)?,
        ))
    };
    let primed = async {
        let (agent_version, clone) = blocking(move || background(guest)).await?;
        let CloneOf { config, fds, disks, beneath, pin } = clone;
        let within = daemon.config.deadlines.control;
        link::tell(&mut shell.link, &Command::Restore(config), &fds, within).await?;
        Ok(Guest { disks, beneath, pin, agent_version, template: template.clone() })
    };
    match primed.await {
        Ok(guest) => Ok((Shell { guest: Some(guest), ..shell }, new)),
        Err(fault) => {
            let killed = was_killed(daemon, &shell).await;
            end(daemon, vec![shell]).await;
            Err(if killed { Fault::new(ErrorCode::Guest, "its VMM was killed from outside") } else { fault })
        }
    }
}

/// Whether a shell has ended, and not by itself: that would be in its exit record.
async fn was_killed(daemon: &Daemon, shell: &Shell) -> bool {
    // Where its connection broke it is ending.
    let ended = timeout(YIELD, super::death::readable(&shell.process)).await;
    let record = daemon.config.vm(shell.seat.id).exit();
    matches!(ended, Ok(Ok(())))
        && blocking(move || Ok(read_json::<ExitRecord>(&record).is_err())).await == Ok(true)
}

/// Puts away what was made, and watches it if it is new.
async fn shelve(daemon: &Arc<Daemon>, shell: Shell, new: bool) {
    let (id, process) = (shell.seat.id, shell.process.clone());
    match daemon.pool.put(shell) {
        None if new => watch(daemon, id, process),
        // It may have died while it was on no shelf, where its watcher did not find it.
        None if !process.is_alive().unwrap_or(false) => {
            end(daemon, daemon.pool.remove(id).into_iter().collect()).await
        }
        None => {}
        Some(shell) => end(daemon, vec![shell]).await,
    }
}

/// Removes what dies while it waits.
fn watch(daemon: &Arc<Daemon>, id: VmId, process: Arc<Process>) {
    let daemon = daemon.clone();
    tokio::spawn(async move {
        if let Err(e) = super::death::readable(&process).await {
            tracing::error!("waiting for a shell: {e}");
            return;
        }
        if let Some(shell) = daemon.pool.remove(id) {
            tracing::warn!(shell = %id, "a shell ended while it waited");
            end(&daemon, vec![shell]).await;
            daemon.pool.wanted.notify_one();
        }
    });
}

/// Ends the clones that wait of snapshots called `name`, which is being removed.
pub async fn forget(daemon: &Arc<Daemon>, name: &Name) {
    end(daemon, daemon.pool.forget(name)).await;
}

/// Ends shells and removes what they have.
async fn end(daemon: &Arc<Daemon>, shells: Vec<Shell>) {
    let asked = shells.iter().map(|shell| shell.process.kill()).collect::<Vec<_>>();
    for (shell, asked) in shells.into_iter().zip(asked) {
        let within = daemon.config.deadlines.reap;
        let ended = blocking(move || {
            asked.map_err(|e| Fault::internal(format_args!("SIGKILL for a shell: {e}")))?;
            shell.process.wait(Some(within)).map_err(|e| Fault::internal(format_args!("a shell: {e}")))?;
            // Its pin goes here.
            Ok(shell.seat)
        });
        match ended.await {
            Ok(seat) => discard(daemon, seat).await,
            Err(fault) => tracing::error!("{fault}"),
        }
    }
}

/// Removes the files of a shell whose process is gone, and gives its seat back.
async fn discard(daemon: &Arc<Daemon>, seat: Seat) {
    let (path, depot) = (daemon.config.vm(seat.id), daemon.depot.clone());
    let removed = blocking(move || match std::fs::remove_dir_all(path.path()) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Fault::internal(format_args!("removing {}: {e}", path.path().display())))
        }
        _ => depot.remove_vm(seat.id),
    });
    match removed.await {
        Ok(()) => daemon.registry.unseat(seat),
        Err(fault) => tracing::error!("{fault}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_store::Digest;

    fn template(name: &str, memory_bytes: u64) -> Template {
        let shape = Shape { memory_bytes, vcpus: 1, disks: 1, nets: 0 };
        Template { name: name.parse().unwrap(), fingerprint: Digest::of(b"s"), shape }
    }

    #[test]
    fn a_full_pool_makes_room_for_something_else_and_for_nothing() {
        // One in which nothing may wait is full.
        let pool = Pool::new(0);
        let asked = |name: &str, memory_bytes, ago| {
            let demand = Demand::new(Instant::now().checked_sub(ago).unwrap());
            lock(&pool.shelves).demand.insert(template(name, memory_bytes), demand);
        };
        let known = || lock(&pool.shelves).demand.len();
        asked("a", 64 << 20, WINDOW * 2);
        pool.surplus();
        assert_eq!(known(), 1, "it was forgotten, for nothing");
        asked("b", 128 << 20, Duration::ZERO);
        pool.surplus();
        assert_eq!(known(), 1);
        assert!(lock(&pool.shelves).demand.contains_key(&template("b", 128 << 20)), "the newer one went");
    }

    #[test]
    fn as_many_shells_wait_as_forks_took_at_once() {
        let pool = Pool::new(64);
        let (few, many) = (template("a", 64 << 20).shape, template("b", 128 << 20).shape);
        pool.expect_shape(few);
        for _ in 0..20 {
            assert!(pool.take_shell(many, 0).is_none());
        }
        let wanted = |shape| lock(&pool.shelves).shells(shape, Instant::now());
        assert_eq!((wanted(few), wanted(many)), (LEAST, 20));
        assert!(matches!(pool.missing(), Some(Missing::Shell(_))));
    }

    #[tokio::test]
    async fn a_birth_lasts_until_its_program_has_said_something_but_not_for_ever() {
        let pool = Arc::new(Pool::new(1));
        let ended = async || {
            let none = async {
                while pool.births.load(Ordering::SeqCst) > 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            timeout(Duration::from_secs(5), none).await.is_ok()
        };
        let lasting = pool.birth().lasting(Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(pool.births.load(Ordering::SeqCst), 1, "it ended by itself");
        drop(lasting);
        assert!(ended().await, "it goes on after its end");
        let _silent = pool.birth().lasting(Duration::from_millis(20));
        assert!(ended().await, "it goes on for ever");
    }
}
