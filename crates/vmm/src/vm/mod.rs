//! One VM. A [`WarmVmm`] has all parts that do not depend on the guest; a boot or a restore turns
//! it into a [`Vm`].
//!
//! ```text
//!                  ┌──boot────┐
//! WarmVmm::new ──▶ WarmVmm    ├──▶ Vm: Paused ⇄ Running     Save: only while Paused, stays Paused
//!                  └──restore─┘
//! ```
//!
//! A warm VMM may be made long before it is needed. A clone then costs only the mapping of its
//! memory, the loading of its state and its first instruction. The source is section 4.1.2 of
//! Swift Birth and Quick Death: work that does not depend on the request precedes it. The threads
//! of a warm VMM are parked, with their seccomp filters installed.
//!
//! The clocks of a restored VM are set when it first runs, not when it is loaded. A clone that
//! waits therefore loses no time and has no backlog of timers.

mod bare;
mod boot;
mod dirty;
mod error;
mod live;
mod machine;
mod precopy;
mod ram;
mod restore;
mod saving;
mod warm;

pub use bare::Bare;
pub use error::{BuildError, ConnectError, SaveError, VmError};
pub use machine::Vm;
pub use restore::Files;
pub use warm::{Host, WarmVmm};
