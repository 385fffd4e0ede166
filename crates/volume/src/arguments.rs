//! The program's command line.

use crate::owner::Id;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::io::{FdFlags, fcntl_setfd};
use std::path::PathBuf;

/// How the program is called.
pub const USAGE: &str = "usage: dayfly-volume --stream FD (--folder FD | --path PATH) \
                         [--uid N --gid N [--groups N,N,...]] [--read-only]";

/// Which folder is shared.
#[derive(Debug)]
pub enum Folder {
    /// An open folder.
    Open(OwnedFd),
    /// A path, which is opened as the caller.
    Path(PathBuf),
}

/// Whose folder it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The user.
    pub user: Id,
    /// The group of new files.
    pub group: Id,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// The command line.
#[derive(Debug)]
pub struct Arguments {
    /// The connected stream.
    pub stream: OwnedFd,
    /// The folder.
    pub folder: Folder,
    /// The caller, if it is not this process's user.
    pub caller: Option<Caller>,
    /// Every change fails.
    pub read_only: bool,
}

#[derive(Default)]
struct Given {
    stream: Option<OwnedFd>,
    folder: Option<Folder>,
    uid: Option<u32>,
    gid: Option<u32>,
    groups: Option<Vec<u32>>,
    read_only: bool,
}

/// Reads the command line, without the program's name. The caller passes descriptors that nothing
/// else in this process uses.
///
/// # Errors
/// What is wrong, and [`USAGE`].
pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Arguments, String> {
    let mut given = Given::default();
    let mut arguments = arguments.into_iter();
    while let Some(name) = arguments.next() {
        match name.as_str() {
            "--read-only" => given.read_only = true,
            _ => {
                let value = arguments.next();
                let value = value.ok_or_else(|| format!("{name}: expected a value\n{USAGE}"))?;
                option(&mut given, &name, &value)?;
            }
        }
    }
    let missing = |what: &str| format!("expected {what}\n{USAGE}");
    let caller = match (given.uid, given.gid, given.groups) {
        (Some(user), Some(group), groups) => {
            Some(Caller { user: Id(user), group: Id(group), groups: groups.unwrap_or_default() })
        }
        (None, None, None) => None,
        _ => return Err(missing("--uid and --gid, both or none")),
    };
    Ok(Arguments {
        stream: given.stream.ok_or_else(|| missing("--stream"))?,
        folder: given.folder.ok_or_else(|| missing("--folder or --path"))?,
        caller,
        read_only: given.read_only,
    })
}

fn option(given: &mut Given, name: &str, value: &str) -> Result<(), String> {
    match name {
        "--folder" | "--path" if given.folder.is_some() => {
            return Err(format!("{name}: expected one of --folder and --path, once\n{USAGE}"));
        }
        "--stream" => given.stream = Some(descriptor(name, value)?),
        "--folder" => given.folder = Some(Folder::Open(descriptor(name, value)?)),
        "--path" if value.starts_with('/') => given.folder = Some(Folder::Path(value.into())),
        "--path" => return Err(format!("--path: expected an absolute path, got {value:?}")),
        "--uid" => given.uid = Some(id(name, value)?),
        "--gid" => given.gid = Some(id(name, value)?),
        "--groups" if value.is_empty() => given.groups = Some(Vec::new()),
        "--groups" => {
            let groups = value.split(',').map(|group| id(name, group)).collect::<Result<_, _>>();
            given.groups = Some(groups?);
        }
        _ => return Err(format!("{name:?}: unknown option\n{USAGE}")),
    }
    Ok(())
}

fn id(name: &str, value: &str) -> Result<u32, String> {
    let number = value.parse().ok().filter(|id| *id != u32::MAX);
    number.ok_or_else(|| format!("{name}: expected a user's or group's number, got {value:?}"))
}

/// An inherited descriptor, which children would not inherit.
fn descriptor(name: &str, value: &str) -> Result<OwnedFd, String> {
    let wrong = || format!("{name}: expected an open descriptor above 2, got {value:?}");
    let number = value.parse::<i32>().ok().filter(|n| *n > 2).ok_or_else(wrong)?;
    // SAFETY: the process that starts this program passes the descriptor for this use only. If it
    // is not open, the next call fails, and the number is not closed.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    match fcntl_setfd(&fd, FdFlags::CLOEXEC) {
        Ok(()) => Ok(fd),
        Err(_) => {
            let _ = std::os::fd::IntoRawFd::into_raw_fd(fd);
            Err(wrong())
        }
    }
}

impl Arguments {
    /// The numbers of all descriptors that were passed.
    #[must_use]
    pub fn descriptors(&self) -> Vec<i32> {
        let folder = match &self.folder {
            Folder::Open(fd) => Some(fd.as_raw_fd()),
            Folder::Path(_) => None,
        };
        [self.stream.as_raw_fd()].into_iter().chain(folder).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::IntoRawFd;

    fn fd() -> String {
        std::fs::File::open("/").unwrap().into_raw_fd().to_string()
    }

    fn parsed(text: &[&str]) -> Result<Arguments, String> {
        parse(text.iter().map(|word| (*word).to_owned()))
    }

    #[test]
    fn a_whole_command_line() {
        let (stream, folder) = (fd(), fd());
        let line = ["--stream", &stream, "--folder", &folder, "--uid", "7", "--gid", "8"];
        let all = parsed(&[&line[..], &["--groups", "1,2", "--read-only"]].concat()).unwrap();
        let caller = Caller { user: Id(7), group: Id(8), groups: vec![1, 2] };
        assert_eq!((all.caller, all.read_only), (Some(caller), true));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |text: &[&str]| parsed(text).unwrap_err();
        assert!(wrong(&["--stream", "2"]).starts_with("--stream: expected an open descriptor"));
        assert!(wrong(&["--stream", "99999"]).starts_with("--stream: expected an open descriptor"));
        assert!(wrong(&["--path", "a"]).contains("absolute"));
        assert!(wrong(&["--uid", "-1"]).starts_with("--uid: expected"));
        assert!(wrong(&["--uid", "4294967295"]).starts_with("--uid: expected"));
        assert!(wrong(&["--groups", "1,,2"]).starts_with("--groups: expected"));
        assert!(wrong(&["--what", "1"]).contains("unknown option"));
        assert!(wrong(&["--uid"]).contains("expected a value"));
        let stream = fd();
        assert!(wrong(&["--stream", &stream, "--path", "/", "--uid", "1"]).contains("both"));
        let stream = fd();
        assert!(wrong(&["--stream", &stream]).starts_with("expected --folder or --path"));
    }
}
