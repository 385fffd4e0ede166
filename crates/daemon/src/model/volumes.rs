//! The volumes of a VM, as its record has them.

use crate::base::caller::Caller;
use crate::base::error::{ApiError, Outcome};
use dayfly_api::types::{MAX_VOLUMES, VmVolume, VolumeOffer, VolumeRequest, VolumeSource};
use dayfly_host::process::ProcessId;
use serde::{Deserialize, Serialize};

/// The longest path of a folder in the host or the guest, in bytes.
const MAX_PATH_BYTES: usize = 4095;

/// A volume that a client asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeFacts {
    /// Where its files are.
    pub source: VolumeSource,
    /// Absolute path in the guest.
    pub target: String,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The client, with whose rights its files are opened. Clones of a fork keep it.
    pub owner: Caller,
}

/// The state of a volume of a VM that lives.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeState {
    /// The process that serves its files.
    pub server: Option<ProcessId>,
    /// Why the guest cannot use it any more.
    #[serde(default)]
    pub problem: Option<String>,
}

impl VolumeFacts {
    /// The text that names its source in messages, and in the guest's list of mounts.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.source {
            VolumeSource::Path(path) | VolumeSource::Offer(VolumeOffer { path, .. }) => path,
            VolumeSource::Name(name) => name.as_str(),
        }
    }

    /// The volume in the API's form.
    #[must_use]
    pub fn shown(&self, state: Option<&VolumeState>) -> VmVolume {
        // The token of an offer is of no use to clients.
        let (source, uid) = match &self.source {
            VolumeSource::Offer(VolumeOffer { path, uid, .. }) => {
                (VolumeSource::Path(path.clone()), *uid)
            }
            source => (source.clone(), self.owner.uid),
        };
        VmVolume {
            source,
            target: self.target.clone(),
            read_only: self.read_only,
            uid,
            problem: state.and_then(|state| state.problem.clone()),
        }
    }
}

/// The components of a path that name a folder.
fn components(path: &str) -> impl Iterator<Item = &str> + Clone {
    path.split('/').filter(|name| !name.is_empty() && *name != ".")
}

/// Checks an absolute path.
fn absolute(what: &str, path: &str) -> Outcome<()> {
    let shown: String = path.chars().take(200).collect();
    if !path.starts_with('/') || path.contains('\0') {
        return Err(ApiError::invalid(format_args!(
            "volume: {what}: expected an absolute path, got {shown:?}"
        )));
    }
    if path.len() > MAX_PATH_BYTES {
        return Err(ApiError::invalid(format_args!(
            "volume: {what}: expected at most {MAX_PATH_BYTES} bytes, got {}: {shown:?}…",
            path.len()
        )));
    }
    Ok(())
}

/// Checks the volumes that `owner` asks for. They are sorted, so that one that is mounted inside
/// another comes after it.
///
/// # Errors
/// Names what is wrong with which volume.
pub fn checked(requests: &[VolumeRequest], owner: &Caller) -> Outcome<Vec<VolumeFacts>> {
    if requests.len() > MAX_VOLUMES {
        return Err(ApiError::invalid(format_args!(
            "volumes: expected at most {MAX_VOLUMES}, got {}",
            requests.len()
        )));
    }
    let mut volumes = Vec::with_capacity(requests.len());
    for VolumeRequest { source, target, read_only } in requests {
        if let VolumeSource::Path(path) | VolumeSource::Offer(VolumeOffer { path, .. }) = source {
            absolute("the host's folder", path)?;
        }
        absolute("the guest's folder", target)?;
        if components(target).next().is_none() || components(target).any(|name| name == "..") {
            return Err(ApiError::invalid(format_args!(
                "volume: the guest's folder: expected one below / without .., got {target:?}"
            )));
        }
        let (source, owner) = (source.clone(), owner.clone());
        let target = components(target).fold(String::new(), |path, name| path + "/" + name);
        volumes.push(VolumeFacts { source, target, read_only: *read_only, owner });
    }
    volumes.sort_by_key(|volume: &VolumeFacts| components(&volume.target).count());
    for (n, volume) in volumes.iter().enumerate() {
        if volumes[..n].iter().any(|before| before.target == volume.target) {
            return Err(ApiError::invalid(format_args!(
                "volumes: {}: expected one volume for this folder of the guest, got two",
                volume.target
            )));
        }
    }
    Ok(volumes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(source: &str, target: &str) -> VolumeRequest {
        let source = match source.parse() {
            Ok(name) => VolumeSource::Name(name),
            Err(_) => VolumeSource::Path(source.into()),
        };
        VolumeRequest { source, target: target.into(), read_only: false }
    }

    fn asked(volumes: &[(&str, &str)]) -> Outcome<Vec<String>> {
        let requests: Vec<_> = volumes.iter().map(|(s, t)| request(s, t)).collect();
        let volumes = checked(&requests, &Caller::default())?;
        Ok(volumes.into_iter().map(|volume| volume.target).collect())
    }

    #[test]
    fn inner_volumes_come_after_outer_ones() {
        let targets = asked(&[("/a", "/x/y/z/"), ("b", "/x"), ("/c", "//x/./y"), ("/", "/w")]);
        assert_eq!(targets.unwrap(), ["/x", "/w", "/x/y", "/x/y/z"]);
        assert_eq!(asked(&[]).unwrap(), [""; 0]);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_was_expected() {
        let long = format!("/{}", "a".repeat(MAX_PATH_BYTES));
        for (source, target, says) in [
            ("./a", "/x", "host's folder: expected an absolute path, got \"./a\""),
            ("", "/x", "host's folder: expected an absolute path"),
            ("/a\0", "/x", "absolute path"),
            ("/a", "x", "guest's folder: expected an absolute path"),
            ("/a", "/", "one below /"),
            ("/a", "/.", "one below /"),
            ("/a", "/b/../c", "without .."),
            (&long, "/x", "expected at most 4095 bytes, got 4096"),
            ("/a", &long, "expected at most 4095 bytes, got 4096"),
        ] {
            let refused = asked(&[(source, target)]).unwrap_err().0.message;
            assert!(refused.contains(says), "{source:?} {target:?}: {refused}");
        }
        let twice = asked(&[("/a", "/x"), ("b", "/x/")]).unwrap_err().0.message;
        assert!(twice.contains("/x: expected one volume"), "{twice}");
        let many = vec![request("/a", "/x"); MAX_VOLUMES + 1];
        let many = checked(&many, &Caller::default()).unwrap_err().0.message;
        assert!(many.contains("at most 16, got 17"), "{many}");
    }
}
