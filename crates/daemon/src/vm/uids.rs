//! The range of user ids of VMs: one that no user of the host may have, and that no user may map
//! into a user namespace (subuid(5), login.defs(5)). Otherwise such a user could signal VMMs.

use crate::model::vm_slot::MAX_VMS;
use std::io;
use std::ops::Range;
use std::path::Path;

/// The first candidate, and the number of candidates: consecutive ranges of [`MAX_VMS`] ids, so
/// that two daemons' ranges are the same or have no id in common. They are above the ids that
/// shadow-utils and systemd give away by default, and fit a signed 32-bit number.
const FIRST: u32 = 0x7100_0000;
const CANDIDATES: u32 = 512;
/// SUB_UID_MIN and SUB_UID_MAX of shadow-utils if `/etc/login.defs` does not set them.
const SUBORDINATE: (u64, u64) = (100_000, 600_100_000);

/// The files that say which ids others may have; an absent file is empty.
#[derive(Debug, Clone, Default)]
pub struct IdFiles {
    /// `/etc/subuid` and `/etc/subgid`: `name:first:count`.
    pub subordinate: Vec<String>,
    /// `/etc/passwd` and `/etc/group`: the id is the third field.
    pub users: Vec<String>,
    /// `/etc/login.defs`.
    pub login_defs: String,
    /// `/proc/self/uid_map` and `/proc/self/gid_map`: `inside outside count`.
    pub maps: Vec<String>,
}

/// Why VMs get no user ids.
#[derive(Debug, thiserror::Error)]
pub enum UidError {
    /// A file exists and cannot be read.
    #[error("user ids of VMs: {0}")]
    Read(&'static str, #[source] io::Error),
    /// Every candidate has an id that is taken, or that this user namespace lacks.
    #[error(
        "user ids of VMs: expected {MAX_VMS} consecutive ids from {FIRST} to {last} that neither \
         /etc/subuid, /etc/subgid, /etc/login.defs, /etc/passwd nor /etc/group gives away and that \
         this user namespace has, got none",
        last = FIRST + CANDIDATES * MAX_VMS - 1
    )]
    None,
}

impl IdFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// [`UidError::Read`].
    pub fn read() -> Result<Self, UidError> {
        let read = |path: &'static str| match std::fs::read(Path::new(path)) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            Err(e) => Err(UidError::Read(path, e)),
        };
        Ok(Self {
            subordinate: vec![read("/etc/subuid")?, read("/etc/subgid")?],
            users: vec![read("/etc/passwd")?, read("/etc/group")?],
            login_defs: read("/etc/login.defs")?,
            maps: vec![read("/proc/self/uid_map")?, read("/proc/self/gid_map")?],
        })
    }

    /// The ranges that others may have.
    fn taken(&self) -> Vec<Range<u64>> {
        let subordinate =
            self.subordinate.iter().flat_map(|text| text.lines()).filter_map(|line| {
                let mut fields =
                    line.split(':').skip(1).map(|field| field.trim().parse::<u64>().ok());
                let (first, count) = (fields.next()??, fields.next()??);
                Some(first..first.saturating_add(count))
            });
        let users = self.users.iter().flat_map(|text| text.lines()).filter_map(|line| {
            let id = line.split(':').nth(2)?.parse::<u64>().ok()?;
            Some(id..id + 1)
        });
        let defined = ["SUB_UID", "SUB_GID"].map(|kind| {
            let (first, last) = SUBORDINATE;
            let first = self.defined(&format!("{kind}_MIN")).unwrap_or(first);
            let last = self.defined(&format!("{kind}_MAX")).unwrap_or(last);
            first..last.saturating_add(1)
        });
        subordinate.chain(users).chain(defined).collect()
    }

    /// The last value of a key in login.defs.
    fn defined(&self, key: &str) -> Option<u64> {
        let value = |line: &str| {
            let mut words = line.split_ascii_whitespace();
            (words.next()? == key).then(|| words.next()?.parse().ok())?
        };
        self.login_defs.lines().filter_map(value).next_back()
    }

    /// Whether this user namespace has all ids of `range`.
    fn is_mapped(&self, range: &Range<u64>) -> bool {
        self.maps.iter().all(|text| {
            text.lines().any(|line| {
                let mut numbers = line.split_ascii_whitespace().map(|word| word.parse::<u64>());
                match (numbers.next(), numbers.nth(1)) {
                    (Some(Ok(inside)), Some(Ok(count))) => {
                        inside <= range.start && range.end <= inside.saturating_add(count)
                    }
                    _ => false,
                }
            })
        })
    }

    /// The first id of the first candidate that is free. User and group ids are alike.
    ///
    /// # Errors
    /// [`UidError::None`].
    pub fn choose(&self) -> Result<u32, UidError> {
        let taken = self.taken();
        let range = |first: u32| u64::from(first)..u64::from(first) + u64::from(MAX_VMS);
        let free = |first: &u32| {
            let range = range(*first);
            let apart = |taken: &Range<u64>| taken.end <= range.start || range.end <= taken.start;
            taken.iter().all(apart) && self.is_mapped(&range)
        };
        (0..CANDIDATES).map(|n| FIRST + n * MAX_VMS).find(free).ok_or(UidError::None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn files() -> IdFiles {
        IdFiles { maps: vec!["0 0 4294967295\n".to_owned(); 2], ..IdFiles::default() }
    }

    #[test]
    fn this_host_has_a_range() {
        let first = IdFiles::read().unwrap().choose().unwrap();
        assert!(first >= FIRST);
    }

    #[test]
    fn a_range_that_a_file_gives_away_is_passed_over() {
        let usual = files().choose().unwrap();
        assert_eq!(usual, FIRST);
        let next = FIRST + MAX_VMS;
        let last_of_usual = next - 1;
        let in_it = [
            IdFiles { subordinate: vec![format!("eve:{last_of_usual}:1")], ..files() },
            IdFiles { subordinate: vec![String::new(), format!("x:1:{}", FIRST)], ..files() },
            IdFiles { users: vec![format!("eve:x:{FIRST}:0::/:/bin/sh")], ..files() },
            IdFiles { login_defs: format!("#\nSUB_UID_MAX\t {FIRST}"), ..files() },
            IdFiles { login_defs: format!("SUB_GID_MAX {FIRST} # x"), ..files() },
            IdFiles {
                maps: vec![format!("{next} 0 99999999"), "0 0 4294967295".into()],
                ..files()
            },
        ];
        for files in in_it {
            assert_eq!(files.choose().unwrap(), next, "{files:?}");
        }
        let beside = [
            IdFiles { subordinate: vec![format!("eve:{next}:65536")], ..files() },
            IdFiles { subordinate: vec!["eve:100000:65536\nnonsense\na:b:c\n".into()], ..files() },
            IdFiles { users: vec![format!("eve:x:{}:0", FIRST - 1)], ..files() },
            IdFiles { login_defs: "SUB_UID_MAX 600100000".into(), ..files() },
        ];
        for files in beside {
            assert_eq!(files.choose().unwrap(), FIRST, "{files:?}");
        }
    }

    #[test]
    fn without_a_free_range_there_is_an_error() {
        let all = IdFiles { subordinate: vec!["eve:0:4294967295".into()], ..files() };
        let none = IdFiles { maps: vec!["0 100000 65536".into()], ..files() };
        for files in [all, none] {
            let error = files.choose().unwrap_err().to_string();
            assert!(error.contains("/etc/subuid") && error.contains("1895825408"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn the_chosen_range_overlaps_no_range_of_subuid(
            ranges in prop::collection::vec((0_u64..1 << 24, 1_u64..1 << 20), 0..40),
        ) {
            let ranges: Vec<_> =
                ranges.into_iter().map(|(at, count)| (u64::from(FIRST) + at, count)).collect();
            let text: String =
                ranges.iter().map(|(first, count)| format!("u:{first}:{count}\n")).collect();
            if let Ok(first) = (IdFiles { subordinate: vec![text], ..files() }).choose() {
                let (first, end) = (u64::from(first), u64::from(first) + u64::from(MAX_VMS));
                prop_assert!(ranges.iter().all(|(at, count)| at + count <= first || end <= *at));
            }
        }
    }
}
