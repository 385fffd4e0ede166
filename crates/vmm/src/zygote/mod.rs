//! The zygote: a process that has done the work common to all VMMs, and forks a pre-forked VMM,
//! which becomes the next VMM.
//!
//! ```text
//! daemon ──ZygoteConfig, /dev/kvm──▶ zygote: empty mount and network namespace,
//!                                     capability bounds, limits, filters compiled,
//!                                     CPUs and memory node chosen
//!        ──Fork, group──────────────▶  │ clone3(new PID, IPC, UTS namespace)
//!        ◀──Forked { pid } ────────────┤
//!           + pidfd, socket            ▼
//!        ──VmmConfig, descriptors───▶ pre-forked VMM: has a KVM VM of the last shape,
//!                                     and its threads. Becomes a VMM: root, user, guest.
//! ```
//!
//! A forked VMM avoids 0.5 ms for exec and linking, 0.4 ms for a network namespace, and the waits
//! of mounts (Swift Birth and Quick Death, section 4.1.2: work that does not depend on the request
//! precedes it). VMMs share the zygote's pages until they write them. The pre-forked VMM reads the
//! daemon's message itself, so no third process has to run first.
//!
//! A pre-forked VMM is in the control group of its future VM before it does anything
//! ([`dayfly_sys::group`]), so that all of its work is charged to that VM (Closer, section IV-B).
//!
//! The price: VMMs of one zygote have their code at the same addresses, so an attacker with the
//! addresses of one VMM has those of all. Therefore a zygote forks at most [`client::MOST_FORKS`]
//! VMMs and is then replaced.
//!
//! The zygote has one thread, so its fork is a whole process. It ignores SIGCHLD, so VMMs that end
//! leave no zombie; the daemon holds their pidfds. The zygote and the pre-forked VMM end when the
//! daemon closes the connection; VMMs live on.

pub mod client;
mod error;
mod fork;
mod layout;
mod message;
mod name;
mod placement;
mod serve;

pub use client::Client;
pub use error::ZygoteError;
pub use message::{Command, Enter, Report};
pub use name::NameError;
pub use serve::{Child, run};
