//! References between stored objects: pure functions of the snapshots' manifests, so that a
//! property test can compare them with a model.

use crate::objects::manifest::SnapshotManifest;
use crate::objects::types::LayerId;
use dayfly_units::{Digest, Name};
use std::collections::{BTreeMap, BTreeSet};

/// For every layer, the names of the snapshots whose disks use it.
#[must_use]
pub fn layer_users(snapshots: &[SnapshotManifest]) -> BTreeMap<LayerId, BTreeSet<Name>> {
    let mut users: BTreeMap<LayerId, BTreeSet<Name>> = BTreeMap::new();
    for snapshot in snapshots {
        for layer in snapshot.disks.iter().flat_map(|disk| &disk.layers) {
            users.entry(layer.id).or_default().insert(snapshot.name.clone());
        }
    }
    users
}

/// The layers of `present` that no snapshot references.
#[must_use]
pub fn unreferenced(
    present: &BTreeSet<LayerId>,
    snapshots: &[SnapshotManifest],
) -> BTreeSet<LayerId> {
    let users = layer_users(snapshots);
    present.iter().copied().filter(|id| !users.contains_key(id)).collect()
}

/// The snapshots that depend on the image `name`; with `replacement`, only those that need another
/// digest.
#[must_use]
pub fn users_of_image(
    snapshots: &[SnapshotManifest],
    name: &Name,
    replacement: Option<Digest>,
) -> BTreeSet<Name> {
    let needs = |s: &&SnapshotManifest| {
        s.disks.iter().any(|d| &d.image.name == name && replacement != Some(d.image.digest))
    };
    snapshots.iter().filter(needs).map(|s| s.name.clone()).collect()
}

#[cfg(test)]
#[path = "refs_tests.rs"]
mod tests;
