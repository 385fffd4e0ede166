//! Making a clone the machine it is to be, before anything else is served.
//!
//! The steps, in this order, each named in the error when it fails: entropy (first: whatever follows may draw random
//! numbers), clock, hostname, files of /etc, stale seeds, the network, the image's hooks, and last /run/dayfly/clone-id, which says that all others are done.
//! Every step can be repeated: a failed identity is simply sent again. Files are replaced by rename, so nobody reads
//! half of one; they are not synced, since a clone that loses its power is not started again from its disk.

mod files;
mod resolver;

use crate::kernel::{Kernel, MAX_ENTROPY_BYTES};
use crate::network::{self, NetworkError, Settings};
use dayfly_api::agent::{Failure, FailureCode, Identity};
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// The least entropy, in bytes, that makes a clone's random numbers its own.
const MIN_ENTROPY_BYTES: usize = 64;

/// What is being done.
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
    /// Seeds and keys that two machines must not share.
    StaleState,
    /// The interface's addresses and routes, connections, /etc/resolv.conf.
    Network,
    /// /etc/dayfly/clone.d.
    Hooks,
    /// /run/dayfly.
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

/// Why an identity was not taken on.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Nothing was done.
    #[error("identity: {field}: expected {expected}, got {got}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        got: String,
    },
    /// The kernel refused.
    #[error("identity: {step}: {errno}")]
    Kernel {
        /// Which step.
        step: Step,
        /// Why.
        errno: Errno,
    },
    /// The machine did not get its place on the network.
    #[error("identity: {step}: {0}", step = Step::Network)]
    Network(#[from] NetworkError),
    /// A hook failed.
    #[error("identity: {step}: {0}", step = Step::Hooks)]
    Hook(String),
    /// A file could not be changed.
    #[error("identity: {step}: {path}: {errno}")]
    File {
        /// Which step.
        step: Step,
        /// Which file.
        path: PathBuf,
        /// Why.
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
            IdentityError::Network(error) if matches!(error.errno(), Some(Errno::PERM | Errno::ACCESS)) => {
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

/// An identity whose fields were checked.
#[derive(Debug)]
struct Checked {
    hostname: String,
    machine_id: String,
    entropy: Vec<u8>,
    wall_clock_ns: u64,
    network: Option<Settings>,
}

fn short(text: &str) -> String {
    format!("{:?}", text.chars().take(80).collect::<String>())
}

fn check(identity: &Identity) -> Result<Checked, IdentityError> {
    let name = &identity.hostname;
    let label = |l: &str| {
        let edges = !l.starts_with('-') && !l.ends_with('-');
        !l.is_empty() && edges && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    if name.len() > 64 || !name.split('.').all(label) {
        let expected = "1 to 64 letters, digits, '-', '_' in labels joined by '.'";
        return Err(IdentityError::Invalid { field: "hostname", expected, got: short(name) });
    }
    let id = &identity.machine_id;
    let nibble = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if id.len() != 32 || !id.bytes().all(nibble) || id.bytes().all(|b| b == b'0') {
        let expected = "32 lower-case hexadecimal digits, not all zero";
        return Err(IdentityError::Invalid { field: "machine_id", expected, got: short(id) });
    }
    let hex = &identity.entropy;
    let entropy = bytes_of(hex)
        .filter(|b| (MIN_ENTROPY_BYTES..=MAX_ENTROPY_BYTES).contains(&b.len()))
        // What arrives here is secret: the error says how much came, not what.
        .ok_or_else(|| IdentityError::Invalid {
            field: "entropy",
            expected: "64 to 4096 bytes in hexadecimal",
            got: format!("{} characters", hex.len()),
        })?;
    let bad = |network::Bad { field, expected, got }| IdentityError::Invalid { field, expected, got };
    Ok(Checked {
        network: identity.network.as_ref().map(Settings::check).transpose().map_err(bad)?,
        hostname: name.clone(),
        machine_id: id.clone(),
        entropy,
        wall_clock_ns: identity.wall_clock_ns,
    })
}

fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    let digit = |b: &u8| char::from(*b).to_digit(16).and_then(|d| u8::try_from(d).ok());
    let pairs = hex.as_bytes().chunks(2);
    pairs
        .map(|pair| match pair {
            [high, low] => Some((digit(high)? << 4) | digit(low)?),
            _ => None,
        })
        .collect()
}

/// Before a snapshot of the machine whose root is `root`: does what can be done before the identity is known.
pub fn prepare(root: &Path) {
    files::Files { root }.prepare();
}

/// Takes on `identity` in the machine whose root is `root`. Whether it is another machine than before; where it is a clone of one that had an identity,
/// `hooks` are called before that is known to anybody.
///
/// # Errors
/// [`IdentityError`]; the steps before the failed one are done, and can be done again.
pub fn take_on(
    kernel: &dyn Kernel,
    root: &Path,
    identity: &Identity,
    hooks: impl FnOnce() -> Result<(), String>,
) -> Result<bool, IdentityError> {
    let new = check(identity)?;
    let by_kernel = |step| move |errno| IdentityError::Kernel { step, errno };
    kernel.reseed(&new.entropy).map_err(by_kernel(Step::Entropy))?;
    kernel.set_clock(new.wall_clock_ns).map_err(by_kernel(Step::Clock))?;
    kernel.set_hostname(&new.hostname).map_err(by_kernel(Step::Hostname))?;
    let files = files::Files { root };
    let was = files.published()?;
    let old = files.write_hostname(&new.hostname)?;
    files.fix_hosts(old.as_deref(), &new.hostname)?;
    // One that failed in the middle has its machine id, and not been told of it.
    let clone = was.as_deref().is_some_and(|was| was != format!("{}\n", new.machine_id).as_bytes());
    let changed = files.write_machine_id(&new.machine_id)? || clone || was.is_none();
    if changed {
        files.drop_stale()?;
    }
    kernel.set_network(root, new.network.as_ref(), clone)?;
    files.write_nameservers(new.network.as_ref().map_or(&[], |network| &network.nameservers))?;
    if clone {
        hooks().map_err(IdentityError::Hook)?;
    }
    files.publish(&new.machine_id, was.as_deref())?;
    Ok(changed)
}

#[cfg(test)]
mod tests;
