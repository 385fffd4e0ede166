//! # store
//!
//! Everything on disk under the state folder: images, kernels, frozen disk layers, snapshots, the
//! writable layers of running VMs, and staged work that is not published yet.
//!
//! | folder | entry | files |
//! |---|---|---|
//! | `images/` | name | `disk` (raw, sparse), `tree` (its hash tree), `manifest` |
//! | `kernels/` | name | `vmlinux`, `initrd`, `manifest` |
//! | `layers/` | content id | `data` (sparse), `tree`, `map` (sealed; opaque to this crate) |
//! | `snapshots/` | name | `state`, `memory` (sparse), `manifest` |
//! | | | or, in place of `memory`, `table` ([`Table`]) |
//! | `pages/` | tenant | packs of unique pages ([`Tenant`]) |
//! | `blocks/` | digest of a disk file | its blocks by content: a cache |
//! | `vms/` | VM id | `disk<d>.<n>.data`, `disk<d>.<n>.map`: layers that belong to one VM |
//! | `staging/` | anything | unfinished work; emptied when a store opens |
//! | `reserve` | – | disk space that only a gc may spend |
//! | `lock` | – | `flock`ed by the one process that has the store open |
//!
//! ## Publishing, and what a crash leaves
//! Everything is made in `staging/` and enters its folder by one `rename` of a whole folder. So a
//! crash leaves the old state or the new one. The order for a snapshot:
//!
//! 1. every file is written, made read-only and `fsync`ed, the manifest last;
//! 2. before the table is written, the packs of pages that it names are renamed from another
//!    staging folder into `pages/<tenant>/`, which is `fsync`ed;
//! 3. the staging folder is `fsync`ed, then its parent folder;
//! 4. layers, including those that a long chain was merged into, are renamed into `layers/`, which
//!    is `fsync`ed;
//! 5. the snapshot is renamed into `snapshots/`, which is `fsync`ed.
//!
//! An unreferenced layer or pack is harmless ([`Store::gc`], [`Store::gc_pages`] remove it), and a
//! snapshot in `snapshots/` has everything it depends on. Removal works in the opposite order:
//! rename into `staging/`, `fsync`, delete.
//!
//! ## Trust
//! Manifests are sealed ([`dayfly_units::sealed`]). A disk file has a hash tree
//! ([`dayfly_units::tree`]): it is opened without being read, and each reader checks what it reads.
//! This process hashes any other file in full before its first use. It then trusts the file while
//! its device, inode, size, mtime and ctime do not change (`integrity/verify.rs`).
//! [`Store::open_snapshot`] of trusted files is then a few `fstat`s. No symbolic link is followed
//! below the state folder. [`Store::verify`] reads everything again, trusted or not.
//!
//! ## What keeps what alive
//! No reference count is stored. [`refs`] counts references from the snapshots' manifests whenever
//! they are needed, and references of this process are in memory only.
//!
//! | reference | taken by | keeps | after a crash of the daemon |
//! |---|---|---|---|
//! | manifest in `snapshots/` | a commit | images and stored layers | counts again |
//! | [`Table`] in `snapshots/` | a paged commit | pages of its tenant | counts again |
//! | [`Pin`] | a VM, an open snapshot or image | images and stored layers | gone (1) |
//! | shared layers in a [`Pin`] | a forked VM | layers that another VM froze | gone (1, 2) |
//! | folder in `vms/` | a VM | the VM's own layers | stays until [`Store::remove_vm`] |
//! | [`Lease`] | a put, a reader of pages | pages | gone; the next gc removes them |
//! | [`Freezing`] | a save or a fork | new files in `vms/`, until `keep` | files stay with the VM |
//! | entry in `staging/` | every operation | unfinished work | emptied at [`Store::open`] |
//!
//! 1. A new daemon pins what its VMs depend on ([`Store::pin`]) before it calls [`Store::gc`].
//! 2. It then reports each VM's layers ([`Store::keep_vm_layers`]): a layer that its own VM had
//!    released, and that no pin references now, is removed.
//!
//! ## Modules, from the floor up
//! | modules | concern |
//! |---|---|
//! | `errors`, `meter`, `workers` | errors, progress, threads |
//! | `blob` | the only code that changes the disk |
//! | `objects::types`, `objects::manifest` | references to files and layers; manifests |
//! | `integrity::verify`, `pages::space`, `vms::pins`, `vms::shared` | what this process knows |
//! | `inner` | the open store: folders, locks and the above |
//! | `objects`, `vms`, `pages`, `memory`, `snapshots` | operations |
//! | `gc`, `usage`, `integrity::scrub` | operations over the whole store |
//!
//! This crate contains no HTTP, no async code and no processes, and does not interpret a disk
//! layer's map.

mod blob;
mod errors;
mod format;
mod gc;
mod inner;
mod integrity;
mod lock;
mod memory;
mod meter;
mod objects;
mod pages;
mod publish;
mod published;
mod reserve;
mod snapshots;
mod usage;
mod vms;
mod watch;
mod workers;

pub use blob::probe::UnfitError;
pub use dayfly_units::{Digest, DigestError, ImageConfig, sparse};
pub use errors::{Damage, IoError};
pub use format::FormatError;
pub use gc::{GcError, GcReport, GcStagingReport};
pub use inner::{Store, StoreError};
pub use integrity::repair::{LostSnapshot, RepairError, RepairReport};
pub use integrity::scrub::{Finding, MAX_FINDINGS, Object, Scope, SearchError, VerifyReport};
pub use memory::{
    Alike, BlockHint, Classified, Comparable, DiskLayer, FoundFrame, FramesDigest, GiveFrames,
    Kind, Known, MAX_FRAMES, Materialised, MemorySpec, PutMemory, RamDisk, RamJob, RamSource,
    RamWork, Run, Table, TakeFrame, alike,
};
pub use meter::{Meter, Reading};
pub use objects::images::{Image, ImageSpec};
pub use objects::kernels::{Kernel, KernelSpec};
pub use objects::layers::OpenLayer;
pub use objects::manifest::{
    DiskRef, ImageManifest, ImageRef, KernelManifest, KernelRef, Listing, MAX_ANCESTORS,
    ManifestError, SnapshotManifest,
};
pub use objects::refs;
pub use objects::tree::{DiskFile, FileTree};
pub use objects::types::{ChainLayer, FileRef, LayerId, LayerRef, VmLayer};
pub use pages::gc::{GcPagesError, GcPagesReport};
pub use pages::pack::MAX_PACK_PAGES;
pub use pages::victims::REWRITE_BELOW_PERCENT;
pub use pages::{Group, Lease, PackWork, PagesError, Put, PutStats, Tenant, WorkError};
pub use publish::{OpenError, PutError, RemoveError};
pub use snapshots::{
    CommitError, Committed, DiskSpec, FlattenError, GroupBuffer, GroupId, MOST_LAYERS, Merge,
    Merged, OpenDisk, OpenSnapshot, PageReader, PagedSpec, Plan, Prepared, Resident, SavedSnapshot,
    Sizes, SnapshotPages, SnapshotSpec, SnapshotWriter, seal_content,
};
pub use usage::{SnapshotUse, Usage};
pub use vms::freezing::{Freeze, Freezing};
pub use vms::identify::FileId;
pub use vms::immutable::{FrozenLayer, ReplacedLayer};
pub use vms::pins::{Pin, PinError};
pub use vms::used::UsedLayerError;
pub use workers::limit_threads;

/// The failpoints of this crate, in the order of its operations ([`dayfly_units::failpoint`]).
pub const FAILPOINTS: &[&str] = &[
    "store.freeze.next_made",
    "store.freeze.map_made",
    "store.copy_layer.copied",
    "store.copy_layer.map_exchanged",
    "store.prepare.layers_staged",
    "store.prepare.done",
    "store.put_pages.staged",
    "store.put_pages.published",
    "store.commit.memory_staged",
    "store.commit.manifest_staged",
    "store.commit.layers_published",
    "store.commit.renamed",
    "store.commit.published",
    "store.release_layer.map_removed",
    "store.release_layer.data_removed",
    "store.merge.data_written",
    "store.merge.map_written",
    "store.replace.renamed",
    "store.remove.renamed",
    "store.remove.synced",
    "store.remove_vm.emptied",
    "store.gc.layer_removed",
    "store.gc_pages.marked",
    "store.gc_pages.staged",
    "store.gc_pages.published",
    "store.gc_pages.retired",
];

#[doc(hidden)]
pub mod fuzzing;

#[cfg(test)]
mod crash_beside_tests;
#[cfg(test)]
mod crash_objects_tests;
#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod damage_kinds_tests;
#[cfg(test)]
mod fixture;
#[cfg(test)]
mod fixture_pages;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod version_tests;
