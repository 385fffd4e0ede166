//! Shells made ahead of demand: jailed VMMs with everything but a guest.
//!
//! The work of a birth that depends on nothing in the request is done before it comes (Swift Birth and Quick Death, section
//! 4.1.2). A shell fits every snapshot of its [`Shape`]. How many wait follows the demand: as many as were taken at
//! the busiest of the last seconds, and none once nobody has asked for ten minutes. An empty pool delays nobody: a birth
//! then makes its own shell. Shells are made while no birth is under way, where there is such a moment.
//!
//! ```text
//!  keeper ──launch──▶ waiting ──take──▶ birth          waiting ──died, too many, daemon stops──▶ ended, folder removed
//! ```
//!
//! A daemon that is killed leaves its shells; they have no record, so the next one sweeps them.

use super::launch::{self, Fds, LaunchError};
use super::registry::{Seat, lock};
use crate::config::Config;
use crate::daemon::Daemon;
use crate::error::{Fault, Outcome, blocking};
use dayfly_host::process::Process;
use dayfly_units::VmId;
use dayfly_vmm::config::{Shape, Start};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio::time::timeout;

/// The fewest that wait of a shape that is in use.
const LEAST: usize = 2;
/// The most that wait of one shape; about 2 MiB each.
const MOST: usize = 64;
/// Demand is what was taken within this time.
const WINDOW: Duration = Duration::from_secs(2);
/// How often surplus is looked for, and by how much the remembered demand fades: a quarter each time.
const TICK: Duration = Duration::from_secs(2);
/// A shape that nobody has asked for as long is not in use.
const IDLE: Duration = Duration::from_secs(600);
/// How long the keeper holds back for births that are under way.
const YIELD: Duration = Duration::from_millis(100);

/// A VMM that waits for its guest.
#[derive(Debug)]
pub struct Shell {
    /// Its id and slot.
    pub seat: Seat,
    /// Its process.
    pub process: Arc<Process>,
    shape: Shape,
}

/// The demand for shells of one shape.
#[derive(Debug)]
struct Demand {
    taken: VecDeque<Instant>,
    peak: usize,
    last: Instant,
}

impl Demand {
    fn new(now: Instant) -> Self {
        Self { taken: VecDeque::new(), peak: 0, last: now }
    }

    fn note(&mut self, now: Instant) {
        self.last = now;
        self.taken.push_back(now);
        self.forget(now);
        self.peak = self.peak.max(self.taken.len());
    }

    fn forget(&mut self, now: Instant) {
        while self.taken.len() > MOST
            || self.taken.front().is_some_and(|then| now.duration_since(*then) > WINDOW)
        {
            self.taken.pop_front();
        }
    }

    fn fade(&mut self, now: Instant) {
        self.forget(now);
        self.peak = self.taken.len().max(self.peak - self.peak.div_ceil(4));
    }

    /// How many shall wait.
    fn target(&self, now: Instant) -> usize {
        if now.duration_since(self.last) > IDLE { 0 } else { self.peak.clamp(LEAST, MOST) }
    }
}

#[derive(Debug, Default)]
struct Shelves {
    waiting: HashMap<Shape, VecDeque<Shell>>,
    demand: HashMap<Shape, Demand>,
    closed: bool,
}

/// All shells that wait.
#[derive(Debug, Default)]
pub struct Pool {
    shelves: Mutex<Shelves>,
    wanted: Notify,
    births: AtomicUsize,
    quiet: Notify,
}

/// A birth is under way.
#[derive(Debug)]
pub struct UnderWay<'a>(&'a Pool);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if self.0.births.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.quiet.notify_waiters();
        }
    }
}

impl Pool {
    /// Says that a birth is under way, until it is dropped.
    pub fn birth(&self) -> UnderWay<'_> {
        self.births.fetch_add(1, Ordering::SeqCst);
        UnderWay(self)
    }

    /// The shell of this shape that waits longest, if there is one.
    pub fn take(&self, shape: Shape) -> Option<Shell> {
        let mut shelves = lock(&self.shelves);
        let now = Instant::now();
        shelves.demand.entry(shape).or_insert_with(|| Demand::new(now)).note(now);
        self.wanted.notify_one();
        let waiting = shelves.waiting.get_mut(&shape)?;
        // One that has died is left to its watcher.
        let alive = waiting.iter().position(|shell| shell.process.is_alive().unwrap_or(false))?;
        waiting.remove(alive)
    }

    /// Says that shells of this shape will soon be asked for.
    pub fn expect(&self, shape: Shape) {
        let now = Instant::now();
        let mut shelves = lock(&self.shelves);
        shelves.demand.entry(shape).or_insert_with(|| Demand::new(now)).last = now;
        self.wanted.notify_one();
    }

    /// Takes a shell back that was not used.
    pub fn give_back(&self, shell: Shell) {
        lock(&self.shelves).waiting.entry(shell.shape).or_default().push_front(shell);
        self.wanted.notify_one();
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.shelves).waiting.values().map(VecDeque::len).sum()
    }

    fn put(&self, shell: Shell) -> Result<(), Shell> {
        let mut shelves = lock(&self.shelves);
        if shelves.closed {
            return Err(shell);
        }
        shelves.waiting.entry(shell.shape).or_default().push_back(shell);
        Ok(())
    }

    fn remove(&self, shape: Shape, id: VmId) -> Option<Shell> {
        let mut shelves = lock(&self.shelves);
        let waiting = shelves.waiting.get_mut(&shape)?;
        let place = waiting.iter().position(|shell| shell.seat.id == id)?;
        waiting.remove(place)
    }

    /// A shape of which too few wait.
    fn missing(&self) -> Option<Shape> {
        let shelves = lock(&self.shelves);
        let now = Instant::now();
        let waiting = |shape| shelves.waiting.get(shape).map_or(0, VecDeque::len);
        shelves.demand.iter().find(|(shape, d)| waiting(shape) < d.target(now)).map(|(shape, _)| *shape)
    }

    /// Lets the remembered demand fade, and takes out what is then too much.
    fn surplus(&self) -> Vec<Shell> {
        let mut shelves = lock(&self.shelves);
        let now = Instant::now();
        let Shelves { waiting, demand, .. } = &mut *shelves;
        let mut out = Vec::new();
        demand.retain(|shape, demand| {
            demand.fade(now);
            let target = demand.target(now);
            if let Some(waiting) = waiting.get_mut(shape) {
                out.extend(waiting.drain(target.min(waiting.len())..));
            }
            target > 0
        });
        out
    }

    /// Takes out all, for ever.
    fn close(&self) -> Vec<Shell> {
        let mut shelves = lock(&self.shelves);
        shelves.closed = true;
        shelves.waiting.drain().flat_map(|(_, shells)| shells).collect()
    }
}

/// Starts a shell; with `record`, one that notes which pages its guest touches. Blocks.
///
/// # Errors
/// [`LaunchError`]; what is in its folder is left for the caller to remove.
pub fn launch(config: &Config, seat: Seat, shape: Shape, record: bool) -> Result<Arc<Process>, LaunchError> {
    let launched = launch::launch(config, seat, Start::Shell { shape, record }, Fds::default())?;
    Ok(Arc::new(launched.process))
}

/// Keeps the pool as full as the demand says, until the daemon stops; then ends all shells.
pub async fn keep(daemon: Arc<Daemon>) {
    let mut last_look = Instant::now();
    while !daemon.stop.is_cancelled() {
        if last_look.elapsed() >= TICK {
            last_look = Instant::now();
            end(&daemon, daemon.pool.surplus()).await;
        }
        if let Some(shape) = daemon.pool.missing() {
            hold_back(&daemon.pool).await;
            if let Err(fault) = fill(&daemon, shape).await {
                tracing::error!("making a shell ahead of demand: {fault}");
                tokio::time::sleep(TICK).await; // births make their own meanwhile
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

/// Waits until no birth is under way, but not for long.
async fn hold_back(pool: &Pool) {
    let quiet = pool.quiet.notified();
    if pool.births.load(Ordering::SeqCst) > 0 {
        let _ = timeout(YIELD, quiet).await;
    }
}

async fn fill(daemon: &Arc<Daemon>, shape: Shape) -> Outcome<()> {
    let seat = daemon.registry.seat()?;
    let maker = daemon.clone();
    let made = blocking(move || Ok(launch(&maker.config, seat, shape, false)?)).await;
    let process = match made {
        Ok(process) => process,
        Err(fault) => {
            discard(daemon, seat).await;
            return Err(fault);
        }
    };
    match daemon.pool.put(Shell { seat, process: process.clone(), shape }) {
        Ok(()) => watch(daemon, shape, seat.id, process),
        Err(shell) => end(daemon, vec![shell]).await,
    }
    Ok(())
}

/// Removes a shell that dies while it waits.
fn watch(daemon: &Arc<Daemon>, shape: Shape, id: VmId, process: Arc<Process>) {
    let daemon = daemon.clone();
    tokio::spawn(async move {
        if let Err(e) = super::death::readable(&process).await {
            tracing::error!("waiting for a shell: {e}");
            return;
        }
        if let Some(shell) = daemon.pool.remove(shape, id) {
            tracing::warn!(shell = %id, "a shell ended while it waited for a guest");
            end(&daemon, vec![shell]).await;
            daemon.pool.wanted.notify_one();
        }
    });
}

/// Ends shells and removes what they have.
async fn end(daemon: &Arc<Daemon>, shells: Vec<Shell>) {
    let asked = shells.iter().map(|shell| shell.process.kill()).collect::<Vec<_>>();
    for (shell, asked) in shells.into_iter().zip(asked) {
        let within = daemon.config.deadlines.reap;
        let ended = blocking(move || {
            asked.map_err(|e| Fault::internal(format_args!("SIGKILL for a shell: {e}")))?;
            shell.process.wait(Some(within)).map_err(|e| Fault::internal(format_args!("a shell: {e}")))?;
            Ok(shell.seat)
        });
        match ended.await {
            Ok(seat) => discard(daemon, seat).await,
            Err(fault) => tracing::error!("{fault}"),
        }
    }
}

/// Removes the folder of a shell whose process is gone, and gives its seat back.
async fn discard(daemon: &Arc<Daemon>, seat: Seat) {
    let path = daemon.config.vm(seat.id);
    let removed = blocking(move || match std::fs::remove_dir_all(path.path()) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Fault::internal(format_args!("removing {}: {e}", path.path().display())))
        }
        _ => Ok(()),
    });
    match removed.await {
        Ok(()) => daemon.registry.unseat(seat),
        Err(fault) => tracing::error!("{fault}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_wait_as_were_taken_at_the_busiest_moment_and_fewer_later() {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut demand = Demand::new(begun);
        assert_eq!(demand.target(begun), LEAST);
        for ms in 0..20 {
            demand.note(at(ms));
        }
        assert_eq!(demand.target(at(20)), 20);
        let mut targets = Vec::new();
        for tick in 2..12u64 {
            demand.fade(at(tick * 2000));
            targets.push(demand.target(at(tick * 2000)));
        }
        assert!(targets.is_sorted_by(|a, b| a >= b), "{targets:?}");
        assert_eq!((targets[0], targets.last()), (15, Some(&LEAST)));
        assert_eq!(demand.target(begun + IDLE), LEAST);
        assert_eq!(demand.target(begun + IDLE + WINDOW), 0);
    }

    #[test]
    fn no_demand_fills_the_host() {
        let begun = Instant::now();
        let mut demand = Demand::new(begun);
        for _ in 0..10_000 {
            demand.note(begun);
        }
        assert_eq!(demand.target(begun), MOST);
        assert!(demand.taken.len() <= MOST);
    }
}
