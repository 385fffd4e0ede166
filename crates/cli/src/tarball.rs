//! Tar streams for `cp`: what goes where (docker's rules), packing and unpacking.

mod place;

pub use place::{Kind, Place, place};

use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};
use tar::{Archive, Builder, EntryType, Header};

/// Writes `source`, and all below it, as a tar stream in which it is called `name`; without a name, only what is below it.
///
/// Owners become root (the user's ids mean nothing in a VM); modes, times and symbolic links are kept.
///
/// # Errors
/// When a file cannot be read or the stream not be written.
pub fn pack(source: &Path, name: Option<&Path>, out: impl Write) -> io::Result<()> {
    let mut builder = Builder::new(out);
    builder.follow_symlinks(false);
    for entry in walkdir::WalkDir::new(source).sort_by_file_name() {
        let entry = entry?;
        let below = entry.path().strip_prefix(source).unwrap_or(entry.path());
        let path = match name {
            Some(name) if below.as_os_str().is_empty() => name.to_path_buf(),
            Some(name) => name.join(below),
            None if below.as_os_str().is_empty() => continue,
            None => below.to_path_buf(),
        };
        // The top may be a link that the user named: it is packed as the link it is, as docker does.
        let metadata = entry.metadata()?;
        let mut header = Header::new_gnu();
        header.set_metadata(&metadata);
        header.set_uid(0);
        header.set_gid(0);
        let kind = metadata.file_type();
        if kind.is_symlink() {
            header.set_size(0);
            builder.append_link(&mut header, &path, std::fs::read_link(entry.path())?)?;
        } else if kind.is_dir() {
            header.set_size(0);
            builder.append_data(&mut header, &path, io::empty())?;
        } else if kind.is_file() {
            let file = std::fs::File::open(entry.path())?;
            // A file that changes its length under us must not shift what follows it.
            let length = metadata.len();
            let exact = file.take(length).chain(io::repeat(0)).take(length);
            builder.append_data(&mut header, &path, exact)?;
        }
        // Sockets, pipes and devices mean nothing elsewhere: left out, as docker does.
    }
    builder.into_inner()?.flush()
}

/// The kind of the first entry of a tar stream, and its name.
///
/// # Errors
/// When the stream is no archive or empty.
pub fn first_entry(stream: impl Read) -> io::Result<(EntryType, PathBuf)> {
    let mut archive = Archive::new(stream);
    let first = archive.entries()?.next();
    let first = first.ok_or_else(|| invalid("the VM sent an empty archive".into()))??;
    Ok((first.header().entry_type(), first.path()?.into_owned()))
}

/// Unpacks a tar stream whose first entry is what was asked for, by docker's rules for `destination`.
///
/// # Errors
/// When the stream breaks, an entry lies outside the first one or would leave the folder, or the rules say no.
pub fn unpack(stream: impl Read + Send, destination: &Path, contents: bool) -> io::Result<()> {
    let mut archive = Archive::new(stream);
    let mut entries = archive.entries()?.peekable();
    let (top, is_folder) = match entries.peek() {
        Some(Ok(first)) => (normal(&first.path()?)?, first.header().entry_type().is_dir()),
        Some(Err(_)) | None => {
            return Err(match entries.next() {
                Some(Err(e)) => e,
                _ => invalid("the VM sent an empty archive".into()),
            });
        }
    };
    let slash = destination.as_os_str().as_encoded_bytes().ends_with(b"/");
    let there = match std::fs::metadata(destination) {
        Ok(metadata) if metadata.is_dir() => Kind::Folder,
        Ok(_) => Kind::File,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Kind::Missing,
        Err(e) => return Err(e),
    };
    let place = place(there, slash, is_folder, contents);
    let place = place.map_err(|e| invalid(format!("{}: {e}", destination.display())))?;
    let (folder, name) = match place {
        Place::Inside => (destination.to_path_buf(), PathBuf::from(top.file_name().unwrap_or_default())),
        Place::Contents => (destination.to_path_buf(), PathBuf::new()),
        Place::As => {
            let name = destination
                .file_name()
                .ok_or_else(|| invalid(format!("{}: no name", destination.display())))?;
            let parent = destination.parent().filter(|p| !p.as_os_str().is_empty());
            (parent.unwrap_or(Path::new(".")).to_path_buf(), PathBuf::from(name))
        }
    };
    // Names are changed on the way through a pipe; who unpacks sees an ordinary archive, and guards its folder against `..`
    // and symbolic links as for any other.
    let (reader, writer) = io::pipe()?;
    std::thread::scope(|scope| {
        let unpacking = scope.spawn(move || {
            let mut archive = Archive::new(reader);
            archive.set_overwrite(true);
            archive.unpack(&folder)
        });
        let mut renamed = Builder::new(writer);
        let mut rename = || -> io::Result<()> {
            for entry in entries.by_ref() {
                let mut entry = entry?;
                let mut header = entry.header().clone();
                let Some(path) = moved(&normal(&entry.path()?)?, &top, &name)? else { continue };
                match (header.entry_type(), entry.link_name()?) {
                    (EntryType::Link, Some(link)) => {
                        let link = moved(&normal(&link)?, &top, &name)?;
                        let link = link.ok_or_else(|| invalid("a hard link to the folder itself".into()))?;
                        renamed.append_link(&mut header, path, link)?;
                    }
                    (EntryType::Symlink, Some(link)) => {
                        renamed.append_link(&mut header, path, link)?;
                    }
                    _ => {
                        let size = entry.size();
                        header.set_size(size);
                        if !header.entry_type().is_dir() && !header.entry_type().is_file() {
                            header.set_entry_type(EntryType::Regular);
                        }
                        renamed.append_data(&mut header, path, &mut entry)?;
                    }
                }
            }
            Ok(())
        };
        let result = rename();
        // Closes the pipe in either case: who unpacks waits for its end.
        let closed = renamed.into_inner().map(drop);
        let unpacked = unpacking.join().unwrap_or_else(|_| Err(io::Error::other("unpacking stopped")));
        match (result, unpacked) {
            // A pipe that nobody reads any more: the other side knows why.
            (Err(e), Err(cause)) if e.kind() == io::ErrorKind::BrokenPipe => Err(cause),
            (Err(e), _) | (Ok(()), Err(e)) => Err(e),
            (Ok(()), Ok(())) => closed,
        }
    })
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// A path of an archive without `/` at its start and without `.`; one with `..` is refused.
fn normal(path: &Path) -> io::Result<PathBuf> {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => out.push(part),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(invalid(format!("archive entry {}: expected no \"..\"", path.display())));
            }
        }
    }
    Ok(out)
}

/// `path` with its start `top` replaced by `name`; `None`: that is the folder which is there already.
fn moved(path: &Path, top: &Path, name: &Path) -> io::Result<Option<PathBuf>> {
    let below = path.strip_prefix(top).map_err(|_| {
        invalid(format!("archive entry {}: expected it in {}", path.display(), top.display()))
    })?;
    let path = if below.as_os_str().is_empty() { name.to_path_buf() } else { name.join(below) };
    Ok((!path.as_os_str().is_empty()).then_some(path))
}

#[cfg(test)]
mod tests;
