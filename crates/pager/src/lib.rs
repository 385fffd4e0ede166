//! # pager
//!
//! Memory that arrives while clones run. A pager is a process for one template whose RAM is not
//! complete yet ([`serve`]). It fills the template, a memfd, once for all clones, in this order:
//!
//! 1. pages that clones wait for;
//! 2. pages beside those;
//! 3. the recorded working set;
//! 4. all other pages.
//!
//! When no page is missing, the pager unregisters all clones, seals the memfd and exits.
//!
//! ```text
//! vCPU touches a missing page
//!   └─▶ userfaultfd of its VMM ─▶ fault thread: frame ─▶ batch ─▶ Source::fetch
//!         (pages of packs are hashed here; disks were hashed before)  │
//!   UFFDIO_WAKE ◀─ pages are in the memfd ◀─ UFFDIO_COPY ◀────────────┘
//!     for every clone that waits for the batch
//! batch: the result of one read: pages of a compressed group, or consecutive blocks
//!        (Efficiently Restoring VMs, section 3.3)
//! ```
//!
//! Efficiently Restoring Virtual Machines, section 3, restores lazily and fetches the rest in the
//! background. Its races between guest, disk and missing pages cannot occur here: packs and frozen
//! layers are never written. A guest writes only to its own layer and to its own anonymous memory.
//!
//! | module | concern |
//! |---|---|
//! | [`source`], [`stored`] | the source of pages; the store as a source |
//! | [`template`] | the memfd, which batches are present, and which clones wait |
//! | [`clones`] | a clone's regions and descriptors; its release, or its kill with a cause |
//! | `replace` | a page that a clone made before the pager did |
//! | [`policy`], [`order`] | which frames come together; what is fetched ahead of faults |
//! | [`streams`] | sequential faults |
//! | `begin` | the plan that the daemon sends |
//! | [`serve`], `threads` | the process, and its threads |
//! | `workers` | threads that are started before there is work |
//! | [`jail`], [`filter`] | the process's user and limits; its system calls |
//! | `pace` | measured fetch times, and when to wait instead of seeking |
//! | [`wire`], [`client`] | messages between daemon, pager and VMM |
//! | [`guest`] | a clone without a VMM, for tests and benchmarks |
//!
//! This crate contains no HTTP, no snapshot names, no creation of VMs, and no knowledge of a VM's
//! purpose.

// First, because other modules use its macro.
#[macro_use]
pub mod error;

mod begin;
pub mod client;
pub mod clones;
pub mod filter;
#[doc(hidden)]
pub mod fuzzing;
pub mod guest;
pub mod jail;
pub mod order;
mod pace;
pub mod policy;
mod replace;
pub mod serve;
pub mod source;
pub mod stored;
pub mod streams;
pub mod template;
mod threads;
pub mod wire;
mod workers;
