//! Fetches Debian's kernel packages: apt finds, downloads and verifies a package, dpkg-deb unpacks
//! it, and the cache keeps it.

use super::error::{KernelError, on};
use crate::{cache, staging, tool};
use dayfly_boot::BootError;
use std::path::{Path, PathBuf};

/// An unpacked kernel package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelTree {
    /// Folder of the package, with `boot/` and `lib/modules/`.
    pub folder: PathBuf,
    /// Name and version of the package: `linux-image-…_<version>`.
    pub package: String,
}

/// Fetches Debian's cloud kernel of `version` (`6.12`, `6.1`) into `cache`. If `cache` is `None`,
/// the default folder is used.
///
/// A package in the cache is not fetched again. Without a network or without apt, an older package
/// in the cache is used.
///
/// # Errors
/// [`KernelError`], with the next step for the user.
pub fn fetch_debian(version: &str, cache: Option<&Path>) -> Result<KernelTree, KernelError> {
    let digits = |part: &str| {
        !part.is_empty() && part.len() <= 5 && part.bytes().all(|b| b.is_ascii_digit())
    };
    if !(2..=3).contains(&version.split('.').count()) || !version.split('.').all(digits) {
        return Err(KernelError::Version(version.chars().take(40).collect()));
    }
    let cache = cache.map_or_else(cache::default_folder, Path::to_owned);
    let folder = cache.join("kernels/debian");
    std::fs::create_dir_all(&folder).map_err(on("create", &folder))?;
    let wanted = match resolve(version).and_then(|package| Ok((candidate(&package)?, package))) {
        Ok((candidate, package)) => {
            let name = format!("{package}_{candidate}");
            if folder.join(&name).is_dir() {
                return Ok(KernelTree { folder: folder.join(&name), package: name });
            }
            download(&cache, &folder, &package, &candidate, &name).map(|()| name)
        }
        Err(error) => Err(error),
    };
    match wanted {
        Ok(name) => Ok(KernelTree { folder: folder.join(&name), package: name }),
        Err(error) => {
            let older = fallback(&folder, version).ok_or(error)?;
            tracing::warn!(
                package = %older,
                "apt gives no newer kernel; taking the one in the cache"
            );
            Ok(KernelTree { folder: folder.join(&older), package: older })
        }
    }
}

/// Whether `name` is the package of a signed cloud kernel of `version`.
fn fits(name: &str, version: &str) -> bool {
    let Some(rest) = name.strip_prefix("linux-image-").and_then(|r| r.strip_suffix("-cloud-amd64"))
    else {
        return false;
    };
    rest.strip_prefix(version).is_some_and(|rest| rest.starts_with(['.', '-', '+']))
}

fn fallback(folder: &Path, version: &str) -> Option<String> {
    let names = std::fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned());
    let fitting =
        names.filter(|n| n.split_once('_').is_some_and(|(package, _)| fits(package, version)));
    fitting.max_by(|a, b| natural(a).cmp(&natural(b)))
}

/// Sort key that compares digits as numbers, so that 6.1.0-9 comes before 6.1.0-50.
fn natural(text: &str) -> Vec<(u64, String)> {
    let mut parts = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let word = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let digits =
            rest[word..].find(|c: char| !c.is_ascii_digit()).map_or(rest.len(), |n| word + n);
        parts.push((rest[word..digits].parse().unwrap_or(0), rest[..word].to_owned()));
        rest = &rest[digits..];
    }
    parts
}

/// Finds the package of the newest cloud kernel of `version`. That is the dependency of
/// `linux-image-<version>-cloud-amd64`. If that name does not exist, it is the newest package that
/// fits, because a release's own kernel is just `linux-image-cloud-amd64`.
fn resolve(version: &str) -> Result<String, KernelError> {
    let meta = format!("linux-image-{version}-cloud-amd64");
    let mut apt = tool::tool("apt-cache");
    apt.args(["depends", "--no-recommends", "--no-suggests", &meta]);
    if let Ok(said) = tool::run(apt, "apt", |_| ()) {
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let depends = text.lines().filter_map(|l| l.trim().strip_prefix("Depends: "));
        if let Some(package) = depends.map(str::trim).find(|p| fits(p, version) && *p != meta) {
            return Ok(package.to_owned());
        }
    }
    let mut apt = tool::tool("apt-cache");
    apt.args(["pkgnames", &format!("linux-image-{version}")]);
    let said = tool::run(apt, "apt", |_| ())?;
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let fitting = text.lines().map(str::trim).filter(|name| fits(name, version) && *name != meta);
    // apt also lists names that have no version to install; they are skipped.
    let mut names: Vec<&str> = fitting.collect();
    names.sort_by_key(|name| natural(name));
    while let Some(name) = names.pop() {
        if candidate(name).is_ok() {
            return Ok(name.to_owned());
        }
    }
    Err(KernelError::NoPackage {
        version: version.to_owned(),
        expected: format!("linux-image-{version}*-cloud-amd64"),
    })
}

/// The version of `package` that apt would install.
fn candidate(package: &str) -> Result<String, KernelError> {
    let mut apt = tool::tool("apt-cache");
    apt.args(["policy", package]);
    let said = tool::run(apt, "apt", |_| ())?;
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let version =
        text.lines().find_map(|l| l.trim().strip_prefix("Candidate: ")).unwrap_or("(none)").trim();
    let word = |b: u8| b.is_ascii_alphanumeric() || b".+~:-".contains(&b);
    if version == "(none)" || version.is_empty() || !version.bytes().all(word) {
        return Err(KernelError::NoPackage {
            version: package.to_owned(),
            expected: package.to_owned(),
        });
    }
    Ok(version.to_owned())
}

fn download(
    cache: &Path,
    folder: &Path,
    package: &str,
    version: &str,
    name: &str,
) -> Result<(), KernelError> {
    let work = staging::Staging::new(cache).map_err(on("make a staging folder in", cache))?;
    let place = work.path();
    let mut apt = tool::tool("apt-get");
    // As root, apt switches to the user _apt, which cannot write into this folder. apt then warns
    // and continues as root. This option avoids the warning.
    apt.args(["-q", "-o", "APT::Sandbox::User=root", "download", &format!("{package}={version}")]);
    apt.current_dir(place);
    tool::run(apt, "apt", |_| ())?;
    let deb = std::fs::read_dir(place)
        .map_err(on("read", place))?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "deb"));
    let Some(deb) = deb else {
        let expected = format!("{package}_*.deb from apt-get download");
        let got = "none".to_owned();
        return Err(BootError::Tree { path: place.to_owned(), expected, got }.into());
    };
    let tree = place.join("tree");
    let mut dpkg = tool::tool("dpkg-deb");
    dpkg.arg("-x").arg(&deb).arg(&tree);
    tool::run(dpkg, "dpkg", |_| ())?;
    // A package that is no kernel must not enter the cache.
    dayfly_boot::KernelSource::in_tree(&tree)?;
    let target = folder.join(name);
    match std::fs::rename(&tree, &target) {
        // Another process has delivered the same package.
        Err(_) if target.is_dir() => Ok(()),
        other => other.map_err(on("write", &target)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signed_cloud_image_of_the_version_and_nothing_else() {
        for (name, version, fit) in [
            ("linux-image-6.12.117+deb12-cloud-amd64", "6.12", true),
            ("linux-image-6.1.0-56-cloud-amd64", "6.1", true),
            ("linux-image-6.12.117+deb12-cloud-amd64", "6.1", false),
            ("linux-image-6.1.0-56-cloud-amd64-unsigned", "6.1", false),
            ("linux-image-6.1.0-56-cloud-amd64-dbg", "6.1", false),
            ("linux-image-6.1.0-56-amd64", "6.1", false),
        ] {
            assert_eq!(fits(name, version), fit, "{name} {version}");
        }
        assert!(natural("linux-image-6.1.0-9-cloud") < natural("linux-image-6.1.0-50-cloud"));
    }

    #[test]
    fn a_version_is_numbers() {
        for bad in ["", "6", "6.", "6.1.2.3", "-o", "6.1;x", "6.1/..", "latest"] {
            assert!(
                matches!(
                    fetch_debian(bad, Some(Path::new("/dev/null"))),
                    Err(KernelError::Version(_))
                ),
                "{bad}"
            );
        }
    }
}
