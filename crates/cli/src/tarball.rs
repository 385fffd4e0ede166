//! Tar streams for `cp`: the destination (docker's rules), packing and unpacking.
//!
//! An archive from a VM counts as hostile. It may write only the one name that the user requested,
//! and only after the whole archive has arrived.

mod place;

pub use place::{Place, There, place};

use anyhow::{Context, Result, bail};
use dayfly_archive::pack::{self, Options, PackError};
use dayfly_archive::unpack::{Links, Policy, Stage, Target};
use dayfly_archive::{
    ArchiveError, Entry, EntryPath, Kind, Limits, Reader, Refusal, Writer, show, xattr,
};
use rustix::fs::{CWD, Mode, OFlags};
use std::ffi::OsStr;
use std::io::{self, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Upper limit for the entries of one copy.
const MAX_ENTRIES: u64 = 10_000_000;
/// Upper limit for zeroes after an archive's end, in bytes. GNU tar pads to 10 KiB, other writers
/// to at most 1 MiB.
const MAX_PADDING: u64 = 1 << 20;

/// What this host accepts from a VM's archive. User ids, set-user-id bits and devices of a VM have
/// no meaning on this host. No link is followed. File capabilities would make a program from the VM
/// root on this host.
const POLICY: Policy = Policy {
    links: Links::Never,
    owners: false,
    mode_mask: 0o777,
    special: false,
    xattrs: xattr::of_users,
};

/// Packs `source`, with everything below it, as a tar stream under the name `name`. If `name` is
/// `None`, only the content of `source` is packed.
///
/// The owner of every entry becomes root, because the user's ids have no meaning in a VM. Modes,
/// times, links, holes and file capabilities are kept.
///
/// # Errors
/// If a file cannot be read, or if the stream cannot be written.
pub fn pack(source: &Path, name: Option<&Path>, out: impl Write) -> io::Result<()> {
    // Sockets, pipes and devices have no meaning elsewhere, so they are skipped, as in docker.
    let options = Options {
        owner: Some((0, 0)),
        special: false,
        one_file_system: false,
        xattrs: xattr::without_owners,
    };
    // As in docker, a link that the user names is packed as a link, unless the path ends in '/'.
    let through = name.is_none() || source.as_os_str().as_bytes().ends_with(b"/");
    let (folder, last) = match (source.parent(), source.file_name()) {
        (Some(parent), Some(last)) if !through => (parent, last),
        _ => (source, OsStr::new(".")),
    };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(CWD, folder, flags, Mode::empty()).map_err(|errno| {
        let error = io::Error::from(errno);
        io::Error::new(error.kind(), format!("{}: {error}", source.display()))
    })?;
    let shown = name.map_or(&[][..], |name| name.as_os_str().as_bytes());
    let mut writer = Writer::new(out);
    let packed = pack::pack(&mut writer, folder.as_fd(), last, shown, options);
    packed.map_err(|error| match error {
        PackError::Write { cause, .. } => cause,
        other => io::Error::other(other),
    })?;
    writer.finish().map(drop)
}

/// The first entry of a tar stream.
///
/// # Errors
/// If the stream is no archive, or is empty.
pub fn first_entry(stream: impl Read) -> Result<Entry> {
    first(&mut Reader::new(BufReader::new(stream), Limits::NONE))
}

fn first<R: Read>(reader: &mut Reader<R>) -> Result<Entry> {
    reader.next_entry()?.context("expected an archive from the VM, got an empty one")
}

/// Unpacks a VM's archive for a request of `name`, by docker's rules for `destination`.
///
/// The archive must begin with an entry called `name`, and hold nothing beside it. If `name` is
/// `None` (the VM's root folder), it may hold anything. With `contents`, the content of that folder
/// is unpacked without the folder. With `capabilities`, file capabilities are kept too, if this
/// process may set them.
///
/// Returns the number of devices and pipes, which are skipped.
///
/// # Errors
/// If the archive is refused, or if the rules forbid the copy; `destination` is unchanged then.
pub fn unpack(
    stream: impl Read,
    name: Option<&OsStr>,
    destination: &Path,
    contents: bool,
    capabilities: bool,
) -> Result<u64> {
    let policy =
        if capabilities { Policy { xattrs: xattr::without_owners, ..POLICY } } else { POLICY };
    let limits = Limits { max_entries: MAX_ENTRIES, max_bytes: u64::MAX };
    let mut reader = Reader::new(BufReader::with_capacity(64 << 10, stream), limits);
    let top = first(&mut reader)?;
    check_top(&top, name)?;
    let is_folder = top.head.kind == Kind::Folder;
    let (folder, new_name) = destination_of(destination, name, is_folder, contents)?;
    let target = Target::open(&folder)?;
    let mut stage = Stage::new(&target, policy)?;
    let mut next = Some(top);
    while let Some(mut entry) = next {
        let path = moved(&entry, &entry.head.path, name, new_name.as_deref())?;
        if entry.head.kind == Kind::HardLink {
            entry.head.link =
                moved(&entry, &entry.head.link, name, new_name.as_deref())?.as_bytes().to_vec();
        }
        stage.add(&mut reader, &entry, &path)?;
        next = reader.next_entry()?;
    }
    reader.finish(MAX_PADDING)?;
    let left_out = stage.left_out();
    if left_out > 0 && !is_folder {
        bail!(
            "expected a file, a folder or a link, got a device or a pipe, which cannot be copied"
        );
    }
    stage.commit()?;
    Ok(left_out)
}

fn refused(entry: &Entry, expected: impl Into<String>, got: impl Into<String>) -> ArchiveError {
    entry.refused(Refusal { expected: expected.into(), got: got.into() })
}

/// Checks that the first entry is the requested one.
fn check_top(top: &Entry, name: Option<&OsStr>) -> Result<(), ArchiveError> {
    let path = EntryPath::parse(&top.head.path).map_err(|why| top.refused(why))?;
    let (right, asked) = match name {
        Some(name) => (path.as_bytes() == name.as_bytes(), show(name.as_bytes())),
        None => (path.is_root() && top.head.kind == Kind::Folder, ".".to_owned()),
    };
    if right && top.head.kind != Kind::HardLink {
        return Ok(());
    }
    let got = format!("{} called \"{}\"", top.head.kind.name(), show(&top.head.path));
    Err(refused(top, format!("what was asked for, \"{asked}\", as the first entry"), got))
}

/// The folder to unpack into, and the name in it; no name if only contents are unpacked.
///
/// A link is followed only if the user wrote a '/' after it. An earlier copy from a VM may have
/// made the link, and then the VM chose its target.
fn destination_of(
    destination: &Path,
    name: Option<&OsStr>,
    is_folder: bool,
    contents: bool,
) -> Result<(std::path::PathBuf, Option<Vec<u8>>)> {
    let slash = destination.as_os_str().as_encoded_bytes().ends_with(b"/");
    let found =
        if slash { std::fs::metadata(destination) } else { std::fs::symlink_metadata(destination) };
    let there = match found {
        Ok(metadata) if metadata.is_symlink() => {
            let shown = destination.display();
            bail!(
                "{shown}: expected a folder, a file or a new name, got a link; write {shown}/ to \
                 follow it"
            );
        }
        Ok(metadata) if metadata.is_dir() => There::Folder,
        Ok(_) => There::File,
        Err(e) if e.kind() == io::ErrorKind::NotFound => There::Missing,
        Err(e) => return Err(e).with_context(|| destination.display().to_string()),
    };
    let place = place(there, slash, is_folder, contents);
    Ok(match place.with_context(|| destination.display().to_string())? {
        Place::Inside => (destination.to_path_buf(), name.map(|name| name.as_bytes().to_vec())),
        Place::Contents => (destination.to_path_buf(), None),
        Place::As => {
            let name = destination.file_name();
            let name = name.with_context(|| format!("{}: no name", destination.display()))?;
            let parent = destination.parent().filter(|p| !p.as_os_str().is_empty());
            (parent.unwrap_or(Path::new(".")).to_path_buf(), Some(name.as_bytes().to_vec()))
        }
    })
}

/// Replaces the first component of `path`, which must be `old`, by `new`. `old` and `new` may be
/// `None`.
fn moved(
    entry: &Entry,
    path: &[u8],
    old: Option<&OsStr>,
    new: Option<&[u8]>,
) -> Result<EntryPath, ArchiveError> {
    let path = EntryPath::parse(path).map_err(|why| entry.refused(why))?;
    let mut parts: Vec<&[u8]> = path.parts().collect();
    if let Some(old) = old {
        if parts.first() != Some(&old.as_bytes()) {
            let expected = format!("nothing beside \"{}\"", show(old.as_bytes()));
            return Err(refused(entry, expected, format!("\"{}\"", show(path.as_bytes()))));
        }
        parts.remove(0);
    }
    let whole = [new.unwrap_or(b"."), &parts.join(&b'/')].join(&b'/');
    EntryPath::parse(&whole).map_err(|why| entry.refused(why))
}

#[cfg(test)]
mod tests;
