//! IPv4 forwarding, which a network namespace has on or off for all interfaces at once (ip_forward
//! of ip-sysctl.rst).
//!
//! Guests need forwarding. A host that did not forward before must not become a router between its
//! other networks. So the daemon notes the interfaces that the host had. The packet filter then
//! passes only packets of guests, and packets of a bridge or veth that appeared later. The program
//! that made such an interface, such as a container engine, expects forwarding, because it was on
//! when the program started.
//!
//! The note is a file in /run, one per network namespace, because several daemons may share a host.
//! The last daemon to end removes the note and switches forwarding off again.
//!
//! A note's name holds the boot id and the namespace's cookie (SO_NETNS_COOKIE, Linux 5.14), which
//! the kernel never reuses within a boot. An inode number is not enough: the kernel reuses the
//! smallest free one, so a new namespace would inherit the note of an old one.
//!
//! A note whose namespace is gone applies to no other namespace. If /run survives a reboot, the
//! next boot's daemon removes the note. Earlier removal is unsafe: a namespace can live without a
//! process or mount that a daemon sees, and a daemon that lost its note would take its host for a
//! router.

use super::error::{NetError, call, file};
use rustix::net::{AddressFamily, SocketType, socket};
use std::collections::BTreeSet;
use std::io::{Error, ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

const SWITCH: &str = "/proc/sys/net/ipv4/ip_forward";
const BOOT: &str = "/proc/sys/kernel/random/boot_id";
/// The folder of the notes.
const FOLDER: &str = "/run";
/// Prefix of the notes' names.
const NOTES: &str = "dayfly-forwarding.";
/// Bytes of a boot id, which is a UUID.
const BOOT_ID_BYTES: usize = 36;
/// Name prefix of the daemons' uplinks.
const UPLINKS: &str = "dayfly";
/// Maximum bytes of a note. Interface names have at most 15 bytes, so a longer file is no note.
const MAX_NOTE_BYTES: u64 = 1 << 20;

/// The cookie of the calling thread's network namespace, unique within this boot.
fn cookie() -> Result<u64, NetError> {
    // asm-generic/socket.h
    const SO_NETNS_COOKIE: libc::c_int = 71;
    const BYTES: libc::socklen_t = 8;
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None).map_err(call("a socket"))?;
    let (mut cookie, mut bytes) = (0_u64, BYTES);
    // SAFETY: the kernel writes at most `bytes` bytes to `cookie`, which has that size, and the
    // actual size to `bytes`; it keeps neither pointer.
    let result = unsafe {
        let value = (&raw mut cookie).cast();
        libc::getsockopt(any.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, value, &raw mut bytes)
    };
    if result == 0 && bytes == BYTES {
        Ok(cookie)
    } else {
        Err(NetError::Call("getsockopt(SO_NETNS_COOKIE) of Linux 5.14", Error::last_os_error()))
    }
}

fn boot_id() -> Result<String, NetError> {
    let boot = Path::new(BOOT);
    let id = std::fs::read_to_string(boot).map_err(file("reading", boot))?;
    Ok(id.trim_end().to_owned())
}

/// The path of the note of the calling thread's namespace.
pub(super) fn note_path() -> Result<PathBuf, NetError> {
    Ok(Path::new(FOLDER).join(format!("{NOTES}{}.{}", boot_id()?, cookie()?)))
}

/// Removes notes of earlier boots, whose namespaces do not exist any more.
fn sweep(boot: &str) -> Result<(), NetError> {
    let folder = Path::new(FOLDER);
    for entry in std::fs::read_dir(folder).map_err(file("reading", folder))? {
        let entry = entry.map_err(file("reading", folder))?;
        let name = entry.file_name();
        let boot_of = name.to_str().and_then(|name| name.strip_prefix(NOTES)?.split_once('.'));
        if boot_of.is_some_and(|(id, _)| id.len() == BOOT_ID_BYTES && id != boot) {
            match std::fs::remove_file(entry.path()) {
                Err(e) if e.kind() != ErrorKind::NotFound => {
                    return Err(file("removing", &entry.path())(e));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Writes a note atomically (temporary file and rename).
fn write(note: &Path, text: &str) -> Result<(), NetError> {
    // Daemons that write the note at the same time write the same text.
    let new = note.with_added_extension(format!("{}.new", std::process::id()));
    let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, note));
    written.map_err(file("writing", note)).inspect_err(|_| _ = std::fs::remove_file(&new))
}

/// Interfaces of the calling thread's namespace, except loopback and uplinks.
fn interfaces() -> Result<BTreeSet<String>, NetError> {
    let folder = Path::new("/proc/thread-self/net/dev");
    let text = std::fs::read_to_string(folder).map_err(file("reading", folder))?;
    let names = text.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned()));
    Ok(names.filter(|name| name != "lo" && !name.starts_with(UPLINKS)).collect())
}

/// The interfaces that the host had when it did not forward, from the note of an earlier daemon or
/// noted now. `None` if forwarding is on and there is no note: the host is a router.
///
/// # Errors
/// The note cannot be read or written.
pub(super) fn note() -> Result<Option<BTreeSet<String>>, NetError> {
    let (note, switch) = (note_path()?, Path::new(SWITCH));
    match std::fs::File::open(&note) {
        Ok(opened) => {
            let mut text = String::new();
            opened
                .take(MAX_NOTE_BYTES)
                .read_to_string(&mut text)
                .map_err(file("reading", &note))?;
            Ok(Some(text.lines().map(str::to_owned).collect()))
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let was = std::fs::read_to_string(switch).map_err(file("reading", switch))?;
            if was.trim() != "0" {
                return Ok(None);
            }
            let now = interfaces()?;
            let text: String = now.iter().map(|name| format!("{name}\n")).collect();
            write(&note, &text)?;
            // An old note applies to no namespace, so one that stays does no harm.
            let _ = sweep(&boot_id()?);
            Ok(Some(now))
        }
        Err(e) => Err(file("opening", &note)(e)),
    }
}

/// Writes a note without interfaces, for a namespace whose note is lost although dayfly switched
/// forwarding on. Without the old interfaces the filter passes packets of every bridge and veth.
///
/// # Errors
/// The note cannot be written.
pub(super) fn note_again() -> Result<BTreeSet<String>, NetError> {
    write(&note_path()?, "")?;
    Ok(BTreeSet::new())
}

/// Switches forwarding on.
///
/// # Errors
/// The host refuses the write.
pub(super) fn switch_on() -> Result<(), NetError> {
    let switch = Path::new(SWITCH);
    std::fs::write(switch, "1").map_err(file("setting", switch))
}

/// Switches forwarding off if dayfly switched it on and no other daemon needs it.
///
/// # Errors
/// The host refuses the write or the removal of the note.
pub(super) fn switch_off() -> Result<(), NetError> {
    let (note, switch) = (note_path()?, Path::new(SWITCH));
    let folder = Path::new("/proc/thread-self/net/dev");
    let text = std::fs::read_to_string(folder).map_err(file("reading", folder))?;
    if text.lines().any(|line| line.trim_start().starts_with(UPLINKS)) {
        return Ok(());
    }
    if !note.try_exists().map_err(file("looking for", &note))? {
        return Ok(());
    }
    // Forwarding goes off before the note is removed: a daemon that finds forwarding on and no note
    // takes its host for a router.
    std::fs::write(switch, "0").map_err(file("setting", switch))?;
    match std::fs::remove_file(&note) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(file("removing", &note)(e)),
        _ => Ok(()),
    }
}
