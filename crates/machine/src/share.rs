//! Folders of the host that the machine may see. Each one is requested by name.
//!
//! ```text
//! NAME=PATH        read-only
//! NAME=PATH:ro     read-only
//! NAME=PATH:rw     the machine may write
//! ```
//! In the machine a share is at `/shares/NAME`. Programs that run with the shared folders as their
//! root ([`crate::Root::Host`]) see the share at its path on the host. File systems that are
//! mounted below PATH on the host are not part of the share.

use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Upper limit for a machine's shares: each takes a PCI slot and a process of the host.
pub(crate) const MAX_SHARES: usize = 8;
/// Longest name in bytes. A virtiofs tag has at most 36 bytes (virtio 1.2, section 5.11.4), and
/// five of them are the prefix `host-`.
const MAX_NAME_BYTES: usize = 31;

/// The machine's access to a shared folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Read only. The mount on the host is read-only, so even a machine that was taken over cannot
    /// write.
    #[default]
    ReadOnly,
    /// Read and write as root of the host within the folder. Device nodes cannot be created.
    ReadWrite,
}

/// One shared folder of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Name of the folder below `/shares` in the machine.
    pub name: String,
    /// Path of the folder on the host. `resolve` makes the path absolute.
    pub path: PathBuf,
    /// The machine's access.
    pub access: Access,
}

/// Why a folder cannot be shared.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// The text is no `NAME=PATH[:ro|:rw]`.
    #[error(
        "share {text:?}: expected NAME=PATH, NAME=PATH:ro or NAME=PATH:rw, e.g. src=/home/me/src"
    )]
    Form {
        /// The given text.
        text: String,
    },
    /// The name is unusable as a folder or as a virtiofs tag.
    #[error(
        "share {name:?}: a name has 1 to {MAX_NAME_BYTES} of a-z, 0-9, '-', '_' and begins with \
         a letter or digit"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// Two shares have one name.
    #[error("share {name}: the name is given twice; give each folder another name")]
    Twice {
        /// The name.
        name: String,
    },
    /// The machine has too many shares.
    #[error(
        "shares: expected at most {MAX_SHARES}, got {got}; share a folder that contains several \
         of them"
    )]
    Many {
        /// Number of given shares.
        got: usize,
    },
    /// The folder does not exist or is not accessible.
    #[error("share {name}: {}: {source}; name a folder that exists", path.display())]
    Missing {
        /// Name of the share.
        name: String,
        /// Path of the folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The path is no folder.
    #[error("share {name}: {}: expected a folder, got another kind of file", path.display())]
    NoFolder {
        /// Name of the share.
        name: String,
        /// The given path.
        path: PathBuf,
    },
    /// The path is the whole file system, or a file system of the kernel.
    #[error(
        "share {name}: {} is never shared; name the folders below it that are needed",
        path.display()
    )]
    Whole {
        /// Name of the share.
        name: String,
        /// The path after symbolic links are resolved.
        path: PathBuf,
    },
    /// A writable share would let the machine change the files from which the host starts it.
    #[error(
        "share {name}: {} contains the machine's own folder {}, so it can only be shared \
         read-only (:ro)",
        path.display(), machine.display()
    )]
    Own {
        /// Name of the share.
        name: String,
        /// The path after symbolic links are resolved.
        path: PathBuf,
        /// The machine's own folder.
        machine: PathBuf,
    },
}

impl FromStr for Share {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Self, ShareError> {
        let form = || ShareError::Form { text: text.to_owned() };
        let (name, rest) = text.split_once('=').ok_or_else(form)?;
        let (path, access) = match rest.rsplit_once(':') {
            Some((path, "ro")) => (path, Access::ReadOnly),
            Some((path, "rw")) => (path, Access::ReadWrite),
            _ => (rest, Access::ReadOnly),
        };
        if path.is_empty() {
            return Err(form());
        }
        let share = Self { name: name.to_owned(), path: path.into(), access };
        share.check_name()?;
        Ok(share)
    }
}

impl std::fmt::Display for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let access = match self.access {
            Access::ReadOnly => "ro",
            Access::ReadWrite => "rw",
        };
        write!(f, "{}={}:{access}", self.name, self.path.display())
    }
}

impl Share {
    fn check_name(&self) -> Result<(), ShareError> {
        let good = |(at, byte): (usize, u8)| {
            byte.is_ascii_lowercase()
                || byte.is_ascii_digit()
                || (at > 0 && matches!(byte, b'-' | b'_'))
        };
        if (1..=MAX_NAME_BYTES).contains(&self.name.len())
            && self.name.bytes().enumerate().all(good)
        {
            return Ok(());
        }
        Err(ShareError::Name { name: self.name.clone() })
    }

    /// Resolves symbolic links and refuses folders that are never shared. `machine` is the
    /// machine's own folder.
    fn resolve(&self, machine: &Path) -> Result<Self, ShareError> {
        self.check_name()?;
        let name = || self.name.clone();
        let missing =
            |source| ShareError::Missing { name: name(), path: self.path.clone(), source };
        let path = self.path.canonicalize().map_err(missing)?;
        if !fs::metadata(&path).map_err(missing)?.is_dir() {
            return Err(ShareError::NoFolder { name: name(), path });
        }
        let never = ["/proc", "/sys", "/dev"].iter().any(|root| path.starts_with(root));
        if path == Path::new("/") || never {
            return Err(ShareError::Whole { name: name(), path });
        }
        let own = machine.starts_with(&path) || path.starts_with(machine);
        if own && self.access == Access::ReadWrite {
            return Err(ShareError::Own { name: name(), path, machine: machine.to_owned() });
        }
        Ok(Self { name: name(), path, access: self.access })
    }

    /// The share's virtiofs tag.
    pub(crate) fn tag(&self) -> String {
        format!("host-{}", self.name)
    }
}

/// Resolves all shares of the machine in the folder `machine` to absolute paths. Outer folders come
/// before those inside them, so the shares can be mounted in this order.
pub(crate) fn resolve(shares: &[Share], machine: &Path) -> Result<Vec<Share>, ShareError> {
    if shares.len() > MAX_SHARES {
        return Err(ShareError::Many { got: shares.len() });
    }
    let mut all = Vec::with_capacity(shares.len());
    for share in shares {
        if all.iter().any(|known: &Share| known.name == share.name) {
            return Err(ShareError::Twice { name: share.name.clone() });
        }
        all.push(share.resolve(machine)?);
    }
    all.sort_by_key(|share| share.path.components().count());
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_is_that_of_docker_with_a_name() {
        let share: Share = "src=/home/me/src".parse().unwrap();
        assert_eq!(
            share,
            Share { name: "src".into(), path: "/home/me/src".into(), access: Access::ReadOnly }
        );
        assert_eq!("a=/x:ro".parse::<Share>().unwrap().access, Access::ReadOnly);
        assert_eq!("a=/x:rw".parse::<Share>().unwrap().access, Access::ReadWrite);
        // Other colons and further equals signs belong to the path.
        assert_eq!("a=/x:y=z:rw".parse::<Share>().unwrap().path, Path::new("/x:y=z"));
        assert_eq!("a=/x:RW".parse::<Share>().unwrap().path, Path::new("/x:RW"));
    }

    #[test]
    fn texts_that_are_no_share_are_refused() {
        for text in
            ["", "/usr", "usr", "=/usr", "a=", "a=:ro", "A=/usr", "a/b=/usr", "../x=/usr", ".=/u"]
        {
            assert!(text.parse::<Share>().is_err(), "{text:?}");
        }
        let long = "a".repeat(MAX_NAME_BYTES);
        assert!(format!("{long}=/usr").parse::<Share>().is_ok());
        assert!(format!("{long}a=/usr").parse::<Share>().is_err());
    }

    #[test]
    fn a_share_that_is_written_is_read_again() {
        for text in ["a=/usr:ro", "b-1_=/x:rw:ro", "c=/x=y:rw"] {
            assert_eq!(text.parse::<Share>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_root_in_any_spelling_is_never_shared() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/", &link).unwrap();
        let link = link.display().to_string();
        for path in
            ["/", "//", "/.", "/usr/..", "/../", link.as_str(), "/proc", "/proc/1", "/sys", "/dev"]
        {
            let share: Share = format!("all={path}").parse().unwrap();
            let error = resolve(&[share], Path::new("/m")).unwrap_err();
            assert!(matches!(error, ShareError::Whole { .. }), "{path}: {error}");
        }
    }

    #[test]
    fn what_does_not_exist_or_is_no_folder_is_refused_with_its_name() {
        let refused = |text: &str| {
            resolve(&[text.parse().unwrap()], Path::new("/m")).unwrap_err().to_string()
        };
        assert_eq!(
            refused("x=/no/such"),
            "share x: /no/such: No such file or directory (os error 2); name a folder that exists"
        );
        assert!(refused("x=/etc/passwd").contains("expected a folder"));
    }

    #[test]
    fn the_machines_own_folder_is_never_writable() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let home = folder.path().canonicalize().unwrap();
        let machine = home.join("machine");
        fs::create_dir_all(machine.join("in")).unwrap();
        for path in [home.as_path(), &machine, &machine.join("in")] {
            let share = |access| Share { name: "x".into(), path: path.to_owned(), access };
            assert!(resolve(&[share(Access::ReadOnly)], &machine).is_ok());
            let error = resolve(&[share(Access::ReadWrite)], &machine).unwrap_err();
            assert!(matches!(error, ShareError::Own { .. }), "{}: {error}", path.display());
        }
    }

    #[test]
    fn names_are_unique_and_folders_come_outermost_first() {
        let shares =
            |texts: &[&str]| -> Vec<Share> { texts.iter().map(|t| t.parse().unwrap()).collect() };
        let machine = Path::new("/m");
        let sorted = resolve(&shares(&["a=/usr/lib", "b=/usr"]), machine).unwrap();
        assert_eq!(sorted.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["b", "a"]);
        let twice = resolve(&shares(&["a=/usr", "a=/etc"]), machine).unwrap_err();
        assert!(matches!(twice, ShareError::Twice { .. }), "{twice}");
        let many: Vec<Share> =
            (0..=MAX_SHARES).map(|n| format!("s{n}=/usr").parse().unwrap()).collect();
        assert!(matches!(resolve(&many, machine), Err(ShareError::Many { got: 9 })));
    }
}
