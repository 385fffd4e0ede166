//! Unpacks an archive into a folder of this host and nowhere else, completely or not at all.
//!
//! ```text
//!  Target::open ──▶ Stage::new ──▶ Stage::add (each entry) ──▶ Stage::commit
//!                       │                │ error, or dropped         │ error
//!                       ▼                ▼                           ▼
//!              a hidden folder      the hidden folder is removed   (conflicts are detected first)
//!              in the target        and nothing else has changed
//! ```
//!
//! The stage is a folder with mode 0700 in the target, so a move into place is a rename. Names that
//! lead out of the stage are refused twice. [`EntryPath`] accepts no `..`, and every folder is
//! opened by `openat2` with `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS`. Links from the archive are
//! either refused or resolved here, component by component inside the stage ([`Links`]). Two stages
//! in one folder do not see each other. The next stage in a target removes a stage whose process
//! was killed.

use crate::error::{Refusal, show};
use crate::folder::{FOLDER, INSIDE, open_folder};
use crate::header::Kind;
use crate::hidden;
use crate::path::{EntryPath, components};
use crate::place::{Attributes, Place, attributes};
use crate::policy::write_error;
use crate::reader::{Entry, Reader};
use crate::xattr;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, linkat, mkdirat, statat};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

pub use crate::policy::{Links, Policy, UnpackError};

/// Upper limit for the folders with attributes in one archive: 40 bytes of memory each.
pub const MAX_FOLDERS: usize = 1 << 18;
/// Deepest staged folder. Moving a stage holds up to three descriptors for each level, and a
/// process usually has 1024.
const MAX_DEPTH: usize = 256;
/// Upper limit for symbolic links followed in one path (Linux: `MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// The open folder that an archive is unpacked into.
#[derive(Debug)]
pub struct Target {
    pub(crate) folder: OwnedFd,
    path: PathBuf,
    is_root: bool,
}

impl Target {
    /// Opens an existing folder; symbolic links in its path are followed.
    ///
    /// # Errors
    /// [`UnpackError::Target`].
    pub fn open(path: &Path) -> Result<Self, UnpackError> {
        let failed = |errno| UnpackError::Target { path: path.to_owned(), what: "open", errno };
        let flags = FOLDER.difference(OFlags::NOFOLLOW);
        let folder = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(failed)?;
        let (here, root) = (rustix::fs::fstat(&folder), rustix::fs::stat("/"));
        let is_root =
            matches!((here, root), (Ok(a), Ok(b)) if a.st_dev == b.st_dev && a.st_ino == b.st_ino);
        Ok(Self { folder, path: path.to_owned(), is_root })
    }

    fn failed(&self, what: &'static str) -> impl Fn(Errno) -> UnpackError {
        move |errno| UnpackError::Target { path: self.path.clone(), what, errno }
    }

    /// Waits until everything in the target's file system is on disk.
    ///
    /// # Errors
    /// [`UnpackError::Target`].
    pub fn sync(&self) -> Result<(), UnpackError> {
        rustix::fs::syncfs(&self.folder).map_err(self.failed("write to disk"))
    }

    /// The flags to resolve a path among the target's existing files.
    pub(crate) fn resolve(&self, links: Links) -> ResolveFlags {
        let within = match (links, self.is_root) {
            (Links::Never, _) => ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
            (Links::Within, true) => ResolveFlags::IN_ROOT,
            (Links::Within, false) => ResolveFlags::BENEATH,
        };
        within | ResolveFlags::NO_MAGICLINKS
    }
}

/// A partly unpacked archive. If the value is dropped before [`Self::commit`], nothing is left
/// behind.
#[derive(Debug)]
pub struct Stage<'t> {
    pub(crate) target: &'t Target,
    pub(crate) policy: Policy,
    /// Name of the hidden folder in the target.
    name: OsString,
    pub(crate) tree: OwnedFd,
    /// Inode number and attributes of each staged folder that an entry describes.
    pub(crate) folders: Vec<(u64, Attributes)>,
    left_out: u64,
}

impl<'t> Stage<'t> {
    /// Makes an empty stage in `target`, and removes stages there whose process was killed.
    ///
    /// # Errors
    /// [`UnpackError::Target`].
    pub fn new(target: &'t Target, policy: Policy) -> Result<Self, UnpackError> {
        hidden::sweep(target.folder.as_fd());
        let made = hidden::make(target.folder.as_fd());
        let (name, tree) = made.map_err(target.failed("make a folder for what is not complete"))?;
        Ok(Self { target, policy, name, tree, folders: Vec::new(), left_out: 0 })
    }

    /// Number of devices and pipes that were skipped.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Stages the last entry of `reader` under the name `path`. The entry replaces an earlier one
    /// of the same name, unless exactly one of the two is a folder.
    ///
    /// # Errors
    /// [`UnpackError`]; the stage must not be used afterwards.
    pub fn add<R: Read>(
        &mut self,
        reader: &mut Reader<R>,
        entry: &Entry,
        path: &EntryPath,
    ) -> Result<(), UnpackError> {
        let refused = |why| UnpackError::Archive(entry.refused(why));
        let attributes = attributes(&entry.head, self.policy.mode_mask).map_err(refused)?;
        let kind = entry.head.kind;
        let Some((folder, name)) = path.split_last() else {
            // `./` is the target itself, which exists and stays unchanged.
            if kind == Kind::Folder {
                return Ok(());
            }
            let expected = "a folder".to_owned();
            return Err(refused(Refusal { expected, got: kind.name() }));
        };
        if matches!(kind, Kind::Fifo | Kind::Char | Kind::Block) && !self.policy.special {
            self.left_out += 1;
            return Ok(());
        }
        if kind == Kind::Folder {
            let folder = self.folder(path, entry)?;
            return self.describe(&folder, attributes, entry);
        }
        let parent = self.folder(&folder, entry)?;
        let place = Place { parent: parent.as_fd(), name, entry, policy: self.policy };
        match kind {
            Kind::File => place.file(attributes, reader),
            Kind::Symlink => place.symlink(attributes),
            Kind::HardLink => self.hard_link(&place),
            Kind::Fifo | Kind::Char | Kind::Block => place.node(attributes),
            Kind::Folder | Kind::Other(_) => {
                let expected = "a file, folder, link, device or pipe".to_owned();
                Err(refused(Refusal { expected, got: kind.name() }))
            }
        }
    }

    /// Records a folder's owner, mode and time for later. Extended attributes are set at once,
    /// because they do not disturb the use of the folder.
    fn describe(
        &mut self,
        folder: &OwnedFd,
        attributes: Attributes,
        entry: &Entry,
    ) -> Result<(), UnpackError> {
        let failed = |what| move |errno| write_error(entry, what, errno);
        if self.folders.len() >= MAX_FOLDERS {
            let expected = format!("at most {MAX_FOLDERS} folders");
            return Err(entry.refused(Refusal { expected, got: "more".to_owned() }).into());
        }
        xattr::write(folder, &entry.head.xattrs, self.policy.xattrs)
            .map_err(failed("set its attributes"))?;
        let inode = rustix::fs::fstat(folder).map_err(failed("look at it"))?.st_ino;
        self.folders.push((inode, attributes));
        Ok(())
    }

    /// Opens a staged folder. Missing folders are created.
    fn folder(&self, path: &EntryPath, entry: &Entry) -> Result<OwnedFd, UnpackError> {
        match open_folder(&self.tree, &path.to_path(), INSIDE) {
            Ok(folder) => Ok(folder),
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => {
                let parts = path.parts().map(<[u8]>::to_vec).collect();
                let way = self.walk(parts, entry, true)?;
                open_folder(&self.tree, &way, INSIDE)
                    .map_err(|e| write_error(entry, "open its folder", e))
            }
            Err(errno) => Err(write_error(entry, "open its folder", errno)),
        }
    }

    /// Resolves `parts` inside the stage as the kernel resolves a path inside a root. Missing
    /// folders are created if `make` is set. Returns a path without links.
    fn walk(&self, parts: Vec<Vec<u8>>, entry: &Entry, make: bool) -> Result<PathBuf, UnpackError> {
        let failed = |what| move |errno| write_error(entry, what, errno);
        let refused = |expected: &str, got: String| {
            UnpackError::Archive(entry.refused(Refusal { expected: expected.to_owned(), got }))
        };
        let mut way = PathBuf::new();
        let mut todo: Vec<Vec<u8>> = parts.into_iter().rev().collect();
        let mut followed = 0;
        while let Some(part) = todo.pop() {
            if part == b".." {
                // The parent of the root is the root. The parent of any other target lies outside
                // it.
                if !way.pop() && !self.target.is_root {
                    return Err(refused(
                        "a folder inside the target",
                        "a link that leads out of it".into(),
                    ));
                }
                continue;
            }
            // Links may lead deeper than any entry's name, and the code that walks the stage needs
            // a limited depth.
            if way.components().count() >= MAX_DEPTH {
                return Err(refused(
                    &format!("at most {MAX_DEPTH} folders deep"),
                    "a deeper one".into(),
                ));
            }
            let name = OsStr::from_bytes(&part);
            let here = open_folder(&self.tree, &way, INSIDE).map_err(failed("open its folder"))?;
            let stat = match statat(&here, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) if make => {
                    mkdirat(&here, name, Mode::from_raw_mode(0o755))
                        .map_err(failed("make its folder"))?;
                    way.push(name);
                    continue;
                }
                other => other.map_err(failed("look at its folder"))?,
            };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => way.push(name),
                FileType::Symlink if self.policy.links == Links::Within => {
                    followed += 1;
                    if followed > MAX_LINKS || todo.len() > MAX_DEPTH {
                        let expected = format!("at most {MAX_LINKS} symbolic links in a path");
                        return Err(refused(&expected, "more, or a loop".to_owned()));
                    }
                    let target = rustix::fs::readlinkat(&here, name, Vec::new());
                    let target = target.map_err(failed("read a link on its way"))?;
                    if target.as_bytes().starts_with(b"/") {
                        if !self.target.is_root {
                            let got = format!("a link to {}", show(target.as_bytes()));
                            return Err(refused("a folder inside the target", got));
                        }
                        way.clear();
                    }
                    todo.extend(components(target.as_bytes()).rev().map(<[u8]>::to_vec));
                }
                FileType::Symlink => {
                    let got = format!(
                        "the symbolic link \"{}\"",
                        show(way.join(name).as_os_str().as_bytes())
                    );
                    return Err(refused("a folder on its way", got));
                }
                _ => {
                    return Err(refused(
                        "a folder on its way",
                        format!("a file at \"{}\"", show(&part)),
                    ));
                }
            }
        }
        Ok(way)
    }

    fn hard_link(&self, place: &Place<'_>) -> Result<(), UnpackError> {
        let entry = place.entry;
        let refused = |why| UnpackError::Archive(entry.refused(why));
        let to = EntryPath::parse(&entry.head.link).map_err(refused)?;
        let Some((folder, name)) = to.split_last() else {
            return Err(refused(Refusal {
                expected: "a link to a file".into(),
                got: "one to the root".into(),
            }));
        };
        let look = |folder: OwnedFd| {
            let stat = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
            Ok((folder, FileType::from_raw_mode(stat.st_mode)))
        };
        let staged = || {
            let parts = folder.parts().map(<[u8]>::to_vec).collect();
            let way = self.walk(parts, entry, false).ok()?;
            open_folder(&self.tree, &way, INSIDE).and_then(look).ok()
        };
        // If the archive has no such file, the link may name an existing file of the target. Only a
        // policy whose sender may write that file anyway allows this.
        let there = || match self.policy.links {
            Links::Within => {
                let how = self.target.resolve(Links::Within);
                open_folder(&self.target.folder, &folder.to_path(), how).and_then(look)
            }
            Links::Never => Err(Errno::NOENT),
        };
        let (folder, kind) = match staged() {
            Some(found) => found,
            None => there().map_err(|errno| match errno {
                Errno::NOENT | Errno::XDEV => refused(Refusal {
                    expected: "a link to a file that came before".to_owned(),
                    got: format!("one to \"{}\"", show(&entry.head.link)),
                }),
                errno => write_error(entry, "look at its target", errno),
            })?,
        };
        if kind == FileType::Directory {
            let (expected, got) = ("a link to a file".to_owned(), "a link to a folder".to_owned());
            return Err(refused(Refusal { expected, got }));
        }
        place.make(|| linkat(&folder, name, place.parent, place.name, AtFlags::empty()))
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        hidden::remove(self.target.folder.as_fd(), &self.name, self.tree.as_fd());
    }
}
