//! Why a zygote ended.

use super::name::NameError;
use crate::control::wire::WireError;
use crate::jail::JailError;
use crate::seccomp::FilterError;
use crate::vcpu::state::StateError;
use crate::vm::BuildError;
use std::io;

/// Why a zygote ended.
#[derive(Debug, thiserror::Error)]
pub enum ZygoteError {
    /// The conversation with the daemon failed.
    #[error("zygote")]
    Wire(#[from] WireError),
    /// A message is not the expected JSON.
    #[error("zygote: message")]
    Config(#[source] serde_json::Error),
    /// A system call failed.
    #[error("zygote: {0}")]
    Step(&'static str, #[source] io::Error),
    /// The place for the id in the arguments was not found.
    #[error("zygote: its command line")]
    Name(#[from] NameError),
    /// A step of the jail that the zygote does ahead failed.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// A filter could not be compiled.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// KVM did not list its MSRs.
    #[error("zygote")]
    Msrs(#[source] StateError),
    /// The KVM VM of a pre-forked VMM could not be made.
    #[error("a pre-forked VMM")]
    Bare(#[from] BuildError),
}

pub(super) fn step<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> ZygoteError {
    move |error| ZygoteError::Step(what, error.into())
}
