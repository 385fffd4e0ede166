//! Giving a clone its identity, before the agent serves any other request.
//!
//! The steps in order, each one named in its error: entropy (first, because the other steps may
//! draw random numbers), clock, hostname, files of /etc, stale seeds, the network, the image's
//! hooks, and last /run/dayfly/clone-id, which shows that all other steps are done.
//!
//! Every step can be repeated, so the host simply sends a failed identity again. Files are replaced
//! by rename, so no program reads half a file. Files are not synced, because a clone is never
//! restarted from its disk after a power loss.

mod error;
pub(crate) mod files;
mod resolver;

pub use error::{IdentityError, Step};

use crate::kernel::{Kernel, MAX_ENTROPY_BYTES};
use crate::network::{self, Settings};
use dayfly_api::agent::Identity;
use std::path::Path;

/// Minimum bytes of entropy for independent random numbers.
const MIN_ENTROPY_BYTES: usize = 64;

/// An identity with valid fields.
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
        !l.is_empty()
            && edges
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
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
        // The entropy is secret, so the error only names its length.
        .ok_or_else(|| IdentityError::Invalid {
            field: "entropy",
            expected: "64 to 4096 bytes in hexadecimal",
            got: format!("{} characters", hex.len()),
        })?;
    let bad =
        |network::Bad { field, expected, got }| IdentityError::Invalid { field, expected, got };
    Ok(Checked {
        network: identity.network.as_ref().map(Settings::check).transpose().map_err(bad)?,
        hostname: name.clone(),
        machine_id: id.clone(),
        entropy,
        wall_clock_ns: identity.wall_clock_ns,
    })
}

/// Whether all fields of `identity` are valid.
pub(crate) fn is_valid(identity: &Identity) -> bool {
    check(identity).is_ok()
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

/// Before a snapshot of the machine whose root is `root`: does what is possible before the identity
/// is known.
pub fn prepare(root: &Path) {
    files::Files { root }.prepare();
}

/// Takes on `identity` in the machine whose root is `root`. Returns whether the machine's identity
/// changed. If the machine is a clone of one that had an identity, `hooks` run before the new
/// identity is published.
///
/// # Errors
/// [`IdentityError`]; the steps before the failed one are done, and can be repeated.
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
    // The published id decides, because a failed attempt may have written the machine id without
    // running the hooks.
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
