//! # packer
//!
//! The process that stores the RAM of a snapshot: `dayfly-packer`. It hashes RAM, compares it with
//! the VM's disks, and compresses and writes pages. It runs in the VM's control group, so that the
//! VM pays for the work on its snapshot (Closer, sections III and IV-B).
//!
//! ```text
//!  dayflyd                                            dayfly-packer, in the VM's group
//!    │ Begin: RAM, disks, block indexes (read-only) ──▶ │ classifies
//!    │ ◀── Frames: hash of each frame … Classified ──── │
//!    │ looks the hashes up                              │
//!    │ Pack: frames, an empty file ───────────────────▶ │ hashes, compresses, writes, syncs
//!    │ ◀─────────────────────────────────── Written ─── │
//!    │ kills it; checks footers, syncs, publishes       ╳
//! ```
//!
//! Nothing that a packer sends or writes is trusted: `dayfly_store::PackWork` has the reasons, and
//! `docs/security.md` the boundary. A packer ends when its socket is closed, and the kernel kills
//! it when its daemon ends.
//!
//! | module | concern |
//! |---|---|
//! | [`wire`] | messages between daemon and packer |
//! | [`client`] | the daemon's end |
//! | [`serve`] | the process |
//! | [`jail`], [`filter`] | its user and limits; its system calls |

pub mod client;
pub mod filter;
pub mod jail;
pub mod serve;
pub mod wire;
