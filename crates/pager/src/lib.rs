//! # pager
//!
//! The room for memory that has not arrived: a process for each template that is not whole yet ([`serve`]). It fills the template, a
//! memfd, once for all clones: first what they wait for, then what lies beside that, then what is known that clones touch first, then all
//! the rest. When nothing is missing its work is done: it lets go of all clones, seals the memfd and ends.
//!
//! ```text
//!  vCPU touches a page that is missing
//!    └─▶ userfaultfd of its VMM ──▶ a fault thread: frame ─▶ batch ─▶ Source::fetch (pages of packs are hashed, disks were)
//!                                      │ another clone waits for that batch: it is woken too        │
//!                                      └──── UFFDIO_WAKE ◀── the pages are in the memfd ◀── UFFDIO_COPY over it
//!  a batch: what one read gives: the pages of a compressed group, or blocks in a row (Efficiently Restoring VMs, section 3.3)
//! ```
//!
//! Efficiently Restoring Virtual Machines, section 3, restores lazily and fetches the rest in the background; its races between guest, disk and
//! missing pages cannot occur here: what pages are read from, packs and frozen layers, is never written, and a guest's own writes go to a
//! layer of its own and to anonymous memory of its own.
//!
//! | module | concern |
//! |---|---|
//! | [`source`], [`stored`] | where pages come from; out of the store |
//! | [`template`] | the memfd, which batches are there, who waits for which |
//! | [`clones`] | a clone's regions and descriptors; how it is let go, or killed with a cause |
//! | [`policy`], [`order`] | what comes together; what is fetched before anybody asks |
//! | [`streams`] | what is asked for one after the other |
//! | [`learn`] | what recorded runs say of both |
//! | [`serve`], `threads` | the process, and its threads |
//! | `pace` | what fetching takes, and what is better waited for |
//! | [`wire`], [`client`] | what daemon, pager and VMM tell each other |
//! | [`uffd`] | userfaultfd(2) |
//! | [`guest`] | a clone without a VMM, for tests and benchmarks |
//!
//! What may not enter: HTTP, snapshots' names, births, what a VM is for.

pub mod client;
pub mod clones;
pub mod guest;
pub mod learn;
pub mod order;
mod pace;
pub mod policy;
pub mod serve;
pub mod source;
pub mod stored;
pub mod streams;
pub mod template;
mod threads;
pub mod uffd;
pub mod wire;
