//! Pending snapshots: forks that are being stored under a name (`dayfly fork --as`). Clones find
//! them by name before they are stored.

use crate::base::error::{ApiError, Outcome};
use crate::model::facts::Facts;
use crate::templates::fork_point::ForkPoint;
use dayfly_api::types;
use dayfly_units::{Name, sync::lock};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};
use tokio_util::sync::CancellationToken;

/// All pending snapshots of a daemon.
#[derive(Debug, Default)]
pub struct PendingSnapshots(Mutex<HashMap<Name, Pending>>);

#[derive(Debug)]
struct Pending {
    fork_point: Arc<ForkPoint>,
    /// Cancelled when the snapshot is removed. Its name is free once the snapshot is gone from the
    /// store too.
    removed: CancellationToken,
}

impl Pending {
    fn is_wanted(&self) -> bool {
        !self.removed.is_cancelled()
    }
}

impl PendingSnapshots {
    /// The fork point from which clones of it start.
    #[must_use]
    pub fn find(&self, name: &Name) -> Option<Arc<ForkPoint>> {
        lock(&self.0)
            .get(name)
            .filter(|pending| pending.is_wanted())
            .map(|pending| pending.fork_point.clone())
    }

    /// Whether a pending snapshot has this name.
    #[must_use]
    pub fn has(&self, name: &Name) -> bool {
        lock(&self.0).contains_key(name)
    }

    /// Adds a pending snapshot. The token is cancelled when the snapshot is removed.
    pub(crate) fn begin(
        &self,
        name: &Name,
        fork_point: Arc<ForkPoint>,
    ) -> Outcome<CancellationToken> {
        match lock(&self.0).entry(name.clone()) {
            Entry::Occupied(_) => Err(taken(name)),
            Entry::Vacant(free) => {
                let removed = CancellationToken::new();
                free.insert(Pending { fork_point, removed: removed.clone() });
                Ok(removed)
            }
        }
    }

    pub(crate) fn is_wanted(&self, name: &Name) -> bool {
        lock(&self.0).get(name).is_some_and(Pending::is_wanted)
    }

    /// Ends a pending snapshot, which is stored or has failed. `false`: it was removed meanwhile,
    /// and the caller removes it from the store before it calls [`Self::end`].
    pub(crate) fn finish(&self, name: &Name) -> bool {
        let mut all = lock(&self.0);
        let wanted = all.get(name).is_some_and(Pending::is_wanted);
        let ended = if wanted { all.remove(name) } else { None };
        drop(all);
        // Dropped outside the lock, because dropping the last reference to a fork point removes
        // files.
        drop(ended);
        wanted
    }

    pub(crate) fn end(&self, name: &Name) {
        let ended = lock(&self.0).remove(name);
        drop(ended);
    }

    /// Marks a pending snapshot as removed; `false` if there is none of this name.
    pub fn remove(&self, name: &Name) -> bool {
        let all = lock(&self.0);
        let pending = all.get(name).filter(|pending| pending.is_wanted());
        pending.map(|pending| pending.removed.cancel()).is_some()
    }

    /// One pending snapshot, in the API's form.
    #[must_use]
    pub fn shown(&self, name: &Name) -> Option<types::Snapshot> {
        self.find(name).map(|fork_point| shown(name, &fork_point.facts))
    }

    /// All pending snapshots, in the API's form.
    #[must_use]
    pub fn all(&self) -> Vec<types::Snapshot> {
        let wanted = lock(&self.0);
        let wanted = wanted.iter().filter(|(_, pending)| pending.is_wanted());
        wanted.map(|(name, pending)| shown(name, &pending.fork_point.facts)).collect()
    }
}

fn shown(name: &Name, facts: &Facts) -> types::Snapshot {
    types::Snapshot {
        name: name.clone(),
        created_unix_ms: facts.created_unix_ms,
        image: facts.image.clone(),
        kernel: facts.kernel.name.clone(),
        // `facts.snapshot` is the pending snapshot itself.
        parent: None,
        vcpus: facts.vcpus,
        max_vcpus: facts.max_vcpus.max(facts.vcpus),
        cpu_model: facts.cpu_model,
        memory_bytes: facts.memory_bytes,
        memory_stored_bytes: 0,
        layers: Vec::new(),
        layers_stored_bytes: 0,
        pending: true,
        resident: None,
    }
}

/// The error for a snapshot name that is taken.
#[must_use]
pub fn taken(name: &Name) -> ApiError {
    ApiError::conflict(format_args!("snapshot {name}: exists; remove it or choose another name"))
}
