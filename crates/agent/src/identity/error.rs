//! Why taking on an identity failed, and in which step.

use crate::network::NetworkError;
use dayfly_api::agent::{Failure, FailureCode};
use rustix::io::Errno;
use std::path::PathBuf;

/// A step of taking on an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// RNDADDENTROPY and RNDRESEEDCRNG.
    Entropy,
    /// `clock_settime(CLOCK_REALTIME)`.
    Clock,
    /// `sethostname(2)`.
    Hostname,
    /// /etc/hostname.
    HostnameFile,
    /// /etc/hosts.
    HostsFile,
    /// /etc/machine-id and D-Bus's copy.
    MachineId,
    /// Removing seeds and keys that two machines must not share.
    StaleState,
    /// The interface's addresses and routes, connections, /etc/resolv.conf.
    Network,
    /// Running /etc/dayfly/clone.d.
    Hooks,
    /// Writing to /run/dayfly.
    Publish,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Entropy => "entropy",
            Self::Clock => "clock",
            Self::Hostname => "hostname",
            Self::HostnameFile => "hostname file",
            Self::HostsFile => "hosts file",
            Self::MachineId => "machine id",
            Self::StaleState => "stale state",
            Self::Network => "network",
            Self::Hooks => "hooks",
            Self::Publish => "publish",
        })
    }
}

/// Why taking on an identity failed.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A field is invalid; no step was done.
    #[error("identity: {field}: expected {expected}, got {got}")]
    Invalid {
        /// The field's name.
        field: &'static str,
        /// A description of valid values.
        expected: &'static str,
        /// The value.
        got: String,
    },
    /// The kernel refused a step.
    #[error("identity: {step}: {errno}")]
    Kernel {
        /// The step.
        step: Step,
        /// The kernel's error.
        errno: Errno,
    },
    /// The network step failed.
    #[error("identity: {step}: {0}", step = Step::Network)]
    Network(#[from] NetworkError),
    /// A hook failed.
    #[error("identity: {step}: {0}", step = Step::Hooks)]
    Hook(String),
    /// A file could not be changed.
    #[error("identity: {step}: {path}: {errno}")]
    File {
        /// The step.
        step: Step,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
    },
}

impl From<&IdentityError> for Failure {
    fn from(error: &IdentityError) -> Self {
        let code = match error {
            IdentityError::Invalid { .. } => FailureCode::Invalid,
            IdentityError::File { errno: Errno::NOSPC | Errno::DQUOT, .. } => FailureCode::NoSpace,
            IdentityError::Kernel { errno: Errno::PERM | Errno::ACCESS, .. }
            | IdentityError::File { errno: Errno::PERM | Errno::ACCESS | Errno::ROFS, .. } => {
                FailureCode::NotPermitted
            }
            IdentityError::Network(error)
                if matches!(error.errno(), Some(Errno::PERM | Errno::ACCESS)) =>
            {
                FailureCode::NotPermitted
            }
            IdentityError::Kernel { .. }
            | IdentityError::File { .. }
            | IdentityError::Network(_)
            | IdentityError::Hook(_) => FailureCode::Io,
        };
        Self { code, message: error.to_string() }
    }
}
