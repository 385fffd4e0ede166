//! Upkeep of the store: numbers, a search for damage, and removing what nothing needs, in the API's words.
//!
//! Both run beside births, bakes and snapshots on blocking threads, a search with low priority; one search and one collection at a time. They end
//! soon after who asked for them has gone.

use crate::daemon::Daemon;
use crate::depot::Depot;
use crate::error::{Fault, Outcome, blocking, chain};
use crate::ndjson::{StopWhenDropped, Teller, metered};
use dayfly_api::types::{
    Collected, Counted, Damaged, ErrorCode, LeftAlone, MAX_PROGRESS_BYTES, MemoryKinds, Pages, SnapshotUse,
    StoreStats, StoreUsage, Unreadable, Verified, VerifyRequest,
};
use dayfly_host::priority;
use dayfly_store::{
    Damage, Finding, Frames, GcError, GcPagesError, Meter, Object, Scope, SearchError, VerifyReport,
};
use dayfly_units::PAGE_SIZE;
use std::sync::Arc;
use tokio::sync::Mutex;

/// As many snapshots are named beside something damaged.
const MAX_USERS: usize = 64;
/// As many damaged packs are named that a collection leaves alone; a verification names them all.
const MAX_LEFT: usize = 500;

/// Whose turn it is.
#[derive(Debug, Default)]
pub struct Turns {
    verify: Mutex<()>,
    gc: Mutex<()>,
}

#[cfg(test)]
impl Turns {
    /// A search of somebody's.
    pub(crate) async fn hold(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.verify.lock().await
    }
}

/// The store in numbers.
///
/// # Errors
/// A folder cannot be listed.
pub fn stats(depot: &Depot) -> Outcome<StoreStats> {
    let stats = depot.store().stats(&depot.tenant())?;
    let pages = stats.pages;
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    let ratio = |of: u64, to: u64| if to == 0 { 0.0 } else { of as f64 / to as f64 };
    Ok(StoreStats {
        images: counted(stats.images),
        kernels: counted(stats.kernels),
        layers: counted(stats.layers),
        snapshots: counted(stats.snapshots),
        block_indexes: counted(stats.block_indexes),
        pages: Pages {
            unique: pages.unique_pages,
            raw_bytes: pages.raw_bytes,
            stored_bytes: pages.compressed_bytes,
            referring_frames: pages.referring_frames,
            packs: pages.packs,
            damaged_packs: pages.damaged_packs,
            index_disk_bytes: pages.pack_bytes.saturating_sub(pages.compressed_bytes),
            index_memory_bytes: pages.index_bytes,
        },
        memory: memory(stats.frames),
        dedup_ratio: pages.dedupe_ratio,
        compression_ratio: ratio(pages.raw_bytes, pages.compressed_bytes),
        unreadable: stats.unreadable,
    })
}

/// What each snapshot takes, the one that would give back the most first.
///
/// # Errors
/// A folder cannot be listed.
pub fn usage(depot: &Depot) -> Outcome<StoreUsage> {
    let usage = depot.store().usage(&depot.tenant())?;
    let shown = |used: dayfly_store::SnapshotUse| SnapshotUse {
        own_stored_bytes: used.own_bytes(),
        name: used.name,
        memory_bytes: used.memory_bytes,
        memory: memory(used.frames),
        own_page_bytes: used.own_page_bytes,
        own_layer_bytes: used.own_layer_bytes,
        layers: counted(used.layers),
    };
    let mut snapshots: Vec<SnapshotUse> = usage.snapshots.into_iter().map(shown).collect();
    // Those that are alike stay in the order of their names.
    snapshots.sort_by_key(|used| std::cmp::Reverse(used.own_stored_bytes));
    let unreadable = usage.unreadable.into_iter().map(|(name, message)| Unreadable { name, message });
    Ok(StoreUsage { snapshots, unreadable: unreadable.collect() })
}

fn counted(of: dayfly_store::Counted) -> Counted {
    let dayfly_store::Counted { count, apparent_bytes, disk_bytes } = of;
    Counted { count, apparent_bytes, disk_bytes }
}

fn memory(frames: Frames) -> MemoryKinds {
    let bytes = |frames: u64| frames.saturating_mul(PAGE_SIZE);
    let Frames { zero, free, disk, shared, own } = frames;
    MemoryKinds {
        zero_bytes: bytes(zero),
        free_bytes: bytes(free),
        disk_bytes: bytes(disk),
        shared_bytes: bytes(shared),
        own_bytes: bytes(own),
    }
}

/// Reads and hashes what was asked for.
///
/// # Errors
/// There is no such snapshot, or the host cannot read.
pub async fn verify(daemon: Arc<Daemon>, request: VerifyRequest, tell: Teller) -> Outcome<Verified> {
    let shared = daemon.clone();
    let _turn = turn(&daemon.turns.verify, &tell, "waiting for another verification").await;
    let scope = Scope::Tenant { tenant: daemon.depot.tenant(), snapshots: request.snapshots };
    let work =
        move |meter: &Meter| priority::background(|| Ok(shared.depot.store().verify(&scope, meter)?));
    Ok(shown(told(&tell, work).await?))
}

/// Removes what nothing needs.
///
/// # Errors
/// The host cannot remove something.
pub async fn gc(daemon: Arc<Daemon>, tell: Teller) -> Outcome<Collected> {
    let shared = daemon.clone();
    let _turn = turn(&daemon.turns.gc, &tell, "waiting for another collection").await;
    tell.phase("removing disk layers that nobody needs").await;
    // Of normal priority: births wait where it holds the store's lock.
    told(&tell, move |meter: &Meter| collect(&shared.depot, meter)).await
}

async fn turn<'a>(of: &'a Mutex<()>, tell: &Teller, waiting: &str) -> tokio::sync::MutexGuard<'a, ()> {
    if let Ok(turn) = of.try_lock() {
        return turn;
    }
    tell.phase(waiting).await;
    of.lock().await
}

/// Does blocking work, tells how far it is, and stops it when this is dropped.
async fn told<T, F>(tell: &Teller, work: F) -> Outcome<T>
where
    T: Send + 'static,
    F: FnOnce(&Meter) -> Outcome<T> + Send + 'static,
{
    let meter = Arc::new(Meter::default());
    let _stop = StopWhenDropped(meter.clone());
    let same = meter.clone();
    metered(tell, &meter, blocking(move || work(&same))).await
}

fn collect(depot: &Depot, meter: &Meter) -> Outcome<Collected> {
    let store = depot.store();
    let mut collected = Collected::default();
    match store.gc() {
        Ok(report) => {
            collected.layers = report.layers.len() as u64;
            collected.layer_bytes = report.freed_bytes;
        }
        Err(GcError::Unreadable { snapshot, source }) => {
            collected.left_alone.push(unreadable("all disk layers", &snapshot, &source));
        }
        Err(e @ GcError::Io(_)) => return Err(e.into()),
    }
    match store.gc_pages_of(&depot.tenant(), meter) {
        Ok(report) => {
            collected.pages = report.dropped_pages;
            collected.packs = report.packs;
            collected.pack_bytes = report.freed_bytes;
            collected.block_indexes = report.block_indexes;
            collected.block_index_bytes = report.block_index_bytes;
            collected.left_alone.extend(report.damage.iter().take(MAX_LEFT).map(damaged_pack));
        }
        Err(GcPagesError::Unreadable { snapshot, source }) => {
            collected.left_alone.push(unreadable("all pages", &snapshot, &source));
        }
        Err(GcPagesError::Damage(damage)) => collected.left_alone.push(damaged_pack(&damage)),
        Err(GcPagesError::Io(e)) => return Err(e.into()),
    }
    let staging = store.gc_staging()?;
    (collected.staged, collected.staged_bytes) = (staging.entries, staging.freed_bytes);
    Ok(collected)
}

fn unreadable(what: &str, snapshot: &str, why: &dyn std::error::Error) -> LeftAlone {
    LeftAlone {
        what: format!("{what}: snapshot {snapshot} cannot be read, so what it needs is not known"),
        message: chain(why),
        next: format!("dayfly snapshots rm {snapshot}, then dayfly store gc"),
    }
}

fn damaged_pack(damage: &Damage) -> LeftAlone {
    LeftAlone {
        what: "a pack".to_owned(),
        message: damage.to_string(),
        next: "dayfly store verify names the snapshots that need it; once they are removed it can go"
            .to_owned(),
    }
}

fn shown(report: VerifyReport) -> Verified {
    let found = report.damage.len() as u64;
    let damaged = within_a_line(report.damage.into_iter().map(damaged));
    let more_damaged = report.more_damage + (found - damaged.len() as u64);
    Verified {
        images: report.images,
        kernels: report.kernels,
        layers: report.layers,
        snapshots: report.snapshots,
        packs: report.packs,
        pages: report.pages,
        block_indexes: report.block_indexes,
        damaged,
        more_damaged,
    }
}

/// As many as fit into half of the longest line that a client reads.
fn within_a_line(all: impl Iterator<Item = Damaged>) -> Vec<Damaged> {
    let mut left = MAX_PROGRESS_BYTES / 2;
    let fits =
        |damaged: &Damaged| match serde_json::to_vec(damaged).map(|json| left.checked_sub(json.len() + 1)) {
            Ok(Some(rest)) => {
                left = rest;
                true
            }
            _ => false,
        };
    all.take_while(fits).collect()
}

fn damaged(mut finding: Finding) -> Damaged {
    let others = finding.snapshots.len().saturating_sub(MAX_USERS);
    finding.snapshots.truncate(MAX_USERS);
    let next = next(&finding);
    let Finding { object, name, text, mut snapshots } = finding;
    if others > 0 {
        snapshots.push(format!("and {others} more"));
    }
    Damaged { kind: kind(object).to_owned(), name, message: text, snapshots, next }
}

fn kind(object: Object) -> &'static str {
    match object {
        Object::Image => "image",
        Object::Kernel => "kernel",
        Object::Layer => "layer",
        Object::Snapshot => "snapshot",
        Object::Pack => "pack",
        Object::BlockIndex => "block_index",
    }
}

/// What to do about something damaged, when there is no copy to put back in its place.
fn next(finding: &Finding) -> String {
    let Finding { object, name, snapshots, .. } = finding;
    let users = snapshots.join(" ");
    let again = format!("dayfly snapshots rm {users}, make them again, and dayfly store gc");
    match object {
        Object::Image if snapshots.is_empty() => {
            format!("dayfly image rm {name}, and build it again")
        }
        Object::Image => format!(
            "build it again from what it was built from: the very same disk takes its place; another one needs dayfly snapshots rm {users} first"
        ),
        Object::Kernel => {
            format!("dayfly kernel rm {name}, and fetch or add it again; snapshots do not need it")
        }
        Object::Snapshot => format!("dayfly snapshots rm {name}, and make it again"),
        Object::Layer | Object::Pack if snapshots.is_empty() => {
            "no snapshot is known to need it: dayfly store gc removes it, or says why not".to_owned()
        }
        Object::Layer | Object::Pack => again,
        Object::BlockIndex => {
            "nothing is lost: it is a cache, and is made again by the next bake of its image".to_owned()
        }
    }
}

impl From<SearchError> for Fault {
    fn from(e: SearchError) -> Self {
        match e {
            SearchError::NotFound { .. } => {
                Self::new(ErrorCode::NotFound, format_args!("{e}; dayfly snapshots lists them"))
            }
            SearchError::Io(e) => e.into(),
        }
    }
}

#[cfg(test)]
#[path = "upkeep_tests.rs"]
mod tests;
