//! Store maintenance: statistics, verification, and gc, in the API's form.
//!
//! Verification and gc run on blocking threads beside all other operations; verification has a low
//! priority. At most one of each runs at a time. Both stop soon after their client has gone.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::progress::{ProgressSender, StopWhenDropped, metered};
use crate::daemon::Daemon;
use crate::templates::cache::TemplateCache;
use dayfly_api::types::{
    CollectRequest, Collected, Damaged, ErrorCode, LeftAlone, LostSnapshot, MAX_PROGRESS_BYTES,
    Repaired, SnapshotUse, StoreStats, StoreUsage, Verified, VerifyRequest,
};
use dayfly_host::priority;
use dayfly_store::{
    Damage, Finding, GcError, GcPagesError, Meter, Object, RepairError, RepairReport, Scope,
    SearchError, VerifyReport,
};
use dayfly_units::{Name, error::chain, failpoint};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::Mutex;

/// The most snapshots that are named beside a damaged object.
const MAX_USERS: usize = 64;
/// The most damaged packs that gc names; verification names them all.
const MAX_LEFT: usize = 500;

/// Statistics of the store.
///
/// # Errors
/// A folder cannot be listed.
pub fn stats(templates: &TemplateCache) -> Outcome<StoreStats> {
    Ok(templates.store().stats(&templates.tenant())?)
}

/// Bytes of each snapshot, the one whose removal frees the most first.
///
/// # Errors
/// A folder cannot be listed.
pub fn usage(templates: &TemplateCache) -> Outcome<StoreUsage> {
    let usage = templates.store().usage(&templates.tenant())?;
    let shown = |used: dayfly_store::SnapshotUse| SnapshotUse {
        own_stored_bytes: used.own_bytes(),
        name: used.name,
        memory_bytes: used.memory_bytes,
        memory: used.memory,
        own_page_bytes: used.own_page_bytes,
        own_layer_bytes: used.own_layer_bytes,
        layers: used.layers,
    };
    let mut snapshots: Vec<SnapshotUse> = usage.snapshots.into_iter().map(shown).collect();
    // The sort is stable: equal ones stay in the order of their names.
    snapshots.sort_by_key(|used| std::cmp::Reverse(used.own_stored_bytes));
    Ok(StoreUsage { snapshots, unreadable: usage.unreadable })
}

/// Reads and hashes the requested snapshots, or the whole store.
///
/// # Errors
/// No such snapshot, or the host cannot read.
pub async fn verify(
    daemon: Arc<Daemon>,
    request: VerifyRequest,
    progress: ProgressSender,
) -> Outcome<Verified> {
    let shared = daemon.clone();
    let _turn =
        turn(&daemon.maintenance.verify, &progress, "waiting for another verification").await;
    let scope = Scope::Tenant { tenant: daemon.templates.tenant(), snapshots: request.snapshots };
    let work = move |meter: &Meter| {
        priority::background(|| Ok(shared.templates.store().verify(&scope, meter)?))
    };
    Ok(shown(reported(&progress, work).await?))
}

/// Removes objects that nothing references.
///
/// # Errors
/// A snapshot in `without` does not exist, or the host cannot remove an object.
pub async fn gc(
    daemon: Arc<Daemon>,
    request: CollectRequest,
    progress: ProgressSender,
) -> Outcome<Collected> {
    let shared = daemon.clone();
    let _turn = turn(&daemon.maintenance.gc, &progress, "waiting for another collection").await;
    progress.phase("removing disk layers that nothing needs").await;
    let without: BTreeSet<Name> = request.without.into_iter().collect();
    // At normal priority, because requests wait while gc holds the store's lock.
    reported(&progress, move |meter: &Meter| collect(&shared.templates, &without, meter)).await
}

/// Verifies the store and repairs what can be repaired.
///
/// # Errors
/// The host cannot read, write or remove an object.
pub async fn repair(daemon: Arc<Daemon>, progress: ProgressSender) -> Outcome<Repaired> {
    let shared = daemon.clone();
    let _gc = turn(&daemon.maintenance.gc, &progress, "waiting for a collection").await;
    let _verify = turn(&daemon.maintenance.verify, &progress, "waiting for a verification").await;
    let work = move |meter: &Meter| {
        let templates = &shared.templates;
        priority::background(|| Ok(templates.store().repair(&templates.tenant(), meter)?))
    };
    Ok(repaired(reported(&progress, work).await?))
}

async fn turn<'a>(
    of: &'a Mutex<()>,
    progress: &ProgressSender,
    waiting: &str,
) -> tokio::sync::MutexGuard<'a, ()> {
    if let Ok(turn) = of.try_lock() {
        return turn;
    }
    progress.phase(waiting).await;
    of.lock().await
}

/// Runs blocking work, reports its progress, and stops the work when this future is dropped.
async fn reported<T, F>(progress: &ProgressSender, work: F) -> Outcome<T>
where
    T: Send + 'static,
    F: FnOnce(&Meter) -> Outcome<T> + Send + 'static,
{
    let meter = Arc::new(Meter::default());
    let _stop = StopWhenDropped(meter.clone());
    let same = meter.clone();
    metered(progress, &meter, blocking(move || work(&same))).await
}

fn collect(
    templates: &TemplateCache,
    without: &BTreeSet<Name>,
    meter: &Meter,
) -> Outcome<Collected> {
    let store = templates.store();
    for name in without {
        if let Err(e @ dayfly_store::OpenError::NotFound { .. }) = store.snapshot(name) {
            return Err(e.into());
        }
    }
    let mut collected = Collected::default();
    match store.gc_without(without) {
        Ok(report) => {
            collected.layers = report.layers.len() as u64;
            collected.layer_bytes = report.freed_bytes;
        }
        Err(GcError::Unreadable { snapshot, source }) => {
            collected.left_alone.push(unreadable("all disk layers", &snapshot, &source));
        }
        Err(GcError::Version { snapshot, source }) => {
            collected.left_alone.push(other_version("all disk layers", &snapshot, &source));
        }
        Err(e @ GcError::Io(_)) => return Err(e.into()),
    }
    failpoint::reached("daemon.gc.layers");
    match store.gc_pages_of(&templates.tenant(), without, meter) {
        Ok(report) => {
            collected.left_alone.extend(report.no_space.map(no_space));
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
        Err(GcPagesError::Version { snapshot, source }) => {
            collected.left_alone.push(other_version("all pages", &snapshot, &source));
        }
        Err(GcPagesError::Damage(damage)) => collected.left_alone.push(damaged_pack(&damage)),
        Err(GcPagesError::Io(e)) => return Err(e.into()),
    }
    failpoint::reached("daemon.gc.pages");
    let staging = store.gc_staging()?;
    (collected.staged, collected.staged_bytes) = (staging.entries, staging.freed_bytes);
    Ok(collected)
}

fn unreadable(what: &str, snapshot: &str, why: &dyn std::error::Error) -> LeftAlone {
    LeftAlone {
        what: format!("{what}: snapshot {snapshot} cannot be read, so what it needs is not known"),
        message: chain(why),
        next: format!(
            "dayfly snapshots rm {snapshot}, then dayfly store gc; or dayfly store gc --without \
             {snapshot}, which keeps the snapshot's own files"
        ),
    }
}

fn no_space(message: String) -> LeftAlone {
    LeftAlone {
        what: "packs that are mostly unused: the disk is too full to rewrite them".to_owned(),
        message,
        next: "dayfly snapshots rm what is not needed, or free other space of the disk; then \
               dayfly store gc"
            .to_owned(),
    }
}

fn other_version(what: &str, snapshot: &str, why: &dyn std::error::Error) -> LeftAlone {
    LeftAlone {
        what: format!(
            "{what}: another version of dayfly made snapshot {snapshot}, so what it needs is not \
             known"
        ),
        message: chain(why),
        next: format!(
            "start that version; or dayfly snapshots rm {snapshot}, then dayfly store gc"
        ),
    }
}

fn damaged_pack(damage: &Damage) -> LeftAlone {
    LeftAlone {
        what: "a pack".to_owned(),
        message: damage.to_string(),
        next:
            "dayfly store verify names the snapshots that need it; once they are removed it can go"
                .to_owned(),
    }
}

fn repaired(report: RepairReport) -> Repaired {
    let lost = report.lost.into_iter().map(|lost| {
        let next = format!(
            "dayfly snapshots rm {0}, and make it again; an image is built again from what it was \
             built from, and a bake of the same content brings pages back",
            lost.name
        );
        let dayfly_store::LostSnapshot { name, pages, causes } = lost;
        LostSnapshot { name, lost_pages: pages, causes, next }
    });
    Repaired {
        healed_pages: report.healed_pages,
        packs: report.gc.packs,
        pack_bytes: report.gc.freed_bytes,
        block_indexes: report.block_indexes,
        hash_trees: report.hash_trees,
        lost: lost.collect(),
        damaged: within_a_line(report.damage.into_iter().map(damaged)),
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

/// The damaged objects that fit into half of the longest line that a client reads.
fn within_a_line(all: impl Iterator<Item = Damaged>) -> Vec<Damaged> {
    let mut left = MAX_PROGRESS_BYTES / 2;
    let fits = |damaged: &Damaged| match serde_json::to_vec(damaged)
        .map(|json| left.checked_sub(json.len() + 1))
    {
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
        Object::HashTree => "hash_tree",
    }
}

/// The next step for the operator, if there is no copy of the damaged object to put back.
fn next(finding: &Finding) -> String {
    let Finding { object, name, snapshots, .. } = finding;
    let users = snapshots.join(" ");
    let again = format!("dayfly snapshots rm {users}, make them again, and dayfly store gc");
    match object {
        Object::Image if snapshots.is_empty() => {
            format!("dayfly image rm {name}, and build it again")
        }
        Object::Image => format!(
            "build it again from what it was built from: the very same disk takes its place; \
             another one needs dayfly snapshots rm {users} first"
        ),
        Object::Kernel => {
            format!("dayfly kernel rm {name}, and fetch or add it again; snapshots do not need it")
        }
        Object::Snapshot => format!("dayfly snapshots rm {name}, and make it again"),
        Object::Layer | Object::Pack if snapshots.is_empty() => {
            "no snapshot is known to need it: dayfly store gc removes it, or says why not"
                .to_owned()
        }
        Object::Layer => again,
        Object::Pack => format!(
            "dayfly store repair, or a bake with the same pages, brings them back; if not: {again}"
        ),
        Object::BlockIndex => {
            "nothing is lost: it is a cache, and is made again by the next bake of its image"
                .to_owned()
        }
        Object::HashTree => {
            "nothing is lost: dayfly store repair makes it again from its disk file".to_owned()
        }
    }
}

impl From<RepairError> for ApiError {
    fn from(e: RepairError) -> Self {
        match e {
            RepairError::Search(e) => e.into(),
            RepairError::Io(e) => e.into(),
            e => Self::new(ErrorCode::Internal, chain(&e)),
        }
    }
}

impl From<SearchError> for ApiError {
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
#[path = "maintenance_tests.rs"]
mod tests;
