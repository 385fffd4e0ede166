//! Resolving a program's user from the guest's /etc/passwd and /etc/group. The agent does not use
//! libc's name-service switch, because it is static and the switch would load libraries of the
//! guest.

/// Maximum bytes read of either file.
pub const MAX_FILE_BYTES: usize = 4 << 20;
/// Maximum number of supplementary groups of a program; Linux allows 65,536 (`NGROUPS_MAX`).
const MAX_GROUPS: usize = 1024;

/// A resolved user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary group ids in ascending order, including the primary group.
    pub groups: Vec<u32>,
    /// Home folder; `/` if none is known.
    pub home: String,
}

/// Why a user cannot be resolved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    /// The user is neither a name in /etc/passwd nor a number.
    #[error("user {0:?}: expected a name in /etc/passwd or a number")]
    NoUser(String),
    /// The group is neither a name in /etc/group nor a number.
    #[error("group {0:?}: expected a name in /etc/group or a number")]
    NoGroup(String),
}

struct Entry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

fn entries(passwd: &str) -> impl Iterator<Item = Entry<'_>> {
    passwd.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|n| !n.is_empty())?;
        let uid = number(fields.nth(1)?)?;
        let gid = number(fields.next()?)?;
        let home = fields.nth(1).unwrap_or_default();
        Some(Entry { name, uid, gid, home })
    })
}

/// `(name, gid, members)` of every line.
fn groups(group: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    group.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|n| !n.is_empty())?;
        let gid = number(fields.nth(1)?)?;
        Some((name, gid, fields.next().unwrap_or_default()))
    })
}

/// Parses a user or group id. The largest number is refused, because it means "no change" to the
/// kernel.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if digits { text.parse().ok().filter(|n| *n != u32::MAX) } else { None }
}

/// Resolves `name`, `uid`, `name:group` or `uid:gid` as docker does; empty means root. A name in
/// the file takes precedence over a number. A number without an entry gets group 0. Naming a group
/// means no supplementary groups.
///
/// # Errors
/// [`UserError`].
pub fn resolve(spec: &str, passwd: &str, group: &str) -> Result<Account, UserError> {
    let (user, wanted) = match spec.split_once(':') {
        Some((user, group)) => (user, (!group.is_empty()).then_some(group)),
        None => (spec, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let as_number = number(user);
    let entry = entries(passwd)
        .find(|e| e.name == user)
        .or_else(|| as_number.and_then(|uid| entries(passwd).find(|e| e.uid == uid)));
    let (uid, gid, home, name) = match (&entry, as_number) {
        (Some(e), _) => (e.uid, e.gid, e.home, Some(e.name)),
        (None, Some(0)) => (0, 0, "/root", None),
        (None, Some(uid)) => (uid, 0, "/", None),
        (None, None) => return Err(UserError::NoUser(user.chars().take(64).collect())),
    };
    let gid = match wanted {
        None => gid,
        Some(wanted) => groups(group)
            .find(|(name, ..)| *name == wanted)
            .map(|(_, gid, _)| gid)
            .or_else(|| number(wanted))
            .ok_or_else(|| UserError::NoGroup(wanted.chars().take(64).collect()))?,
    };
    let mut all = vec![gid];
    if let (Some(name), None) = (name, wanted) {
        let member = |members: &str| members.split(',').any(|m| m.trim() == name);
        all.extend(
            groups(group).filter(|(_, _, m)| member(m)).map(|(_, gid, _)| gid).take(MAX_GROUPS),
        );
    }
    all.sort_unstable();
    all.dedup();
    let home = if home.is_empty() { "/" } else { home };
    Ok(Account { uid, gid, groups: all, home: home.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbad line\nn:x:y:z\n\
                          ann:x:1000:100:Ann:/home/ann:/bin/sh\n\
                          7:x:1007:1007::/home/seven:\nnone:x:4294967295:0::/:\nbare:x:5:6\n";
    const GROUP: &str =
        "root:x:0:\nusers:x:100:\nwheel:x:10:bob,ann\nx:x:q:ann\ndisk:x:6:ann\nannex:x:11:annex";

    fn ids(spec: &str) -> Result<(u32, u32, Vec<u32>, String), UserError> {
        resolve(spec, PASSWD, GROUP).map(|a| (a.uid, a.gid, a.groups, a.home))
    }

    #[test]
    fn names_numbers_and_groups() {
        assert_eq!(ids("").unwrap(), (0, 0, vec![0], "/root".into()));
        assert_eq!(ids("ann").unwrap(), (1000, 100, vec![6, 10, 100], "/home/ann".into()));
        assert_eq!(ids("1000").unwrap(), (1000, 100, vec![6, 10, 100], "/home/ann".into()));
        assert_eq!(ids("ann:wheel").unwrap(), (1000, 10, vec![10], "/home/ann".into()));
        assert_eq!(ids("ann:12").unwrap(), (1000, 12, vec![12], "/home/ann".into()));
        assert_eq!(ids("4000:5000").unwrap(), (4000, 5000, vec![5000], "/".into()));
        assert_eq!(ids("4000").unwrap(), (4000, 0, vec![0], "/".into()));
        assert_eq!(ids(":100").unwrap(), (0, 100, vec![100], "/root".into()));
        assert_eq!(ids("7").unwrap().0, 1007, "a name in the file goes before a number");
        assert_eq!(ids("bare").unwrap(), (5, 6, vec![6], "/".into()));
        assert_eq!(resolve("", "", "").unwrap().home, "/root");
    }

    #[test]
    fn no_user_becomes_root_by_mistake() {
        for bad in [
            "nobody",
            "n",
            "none",
            "4294967295",
            "-1",
            "+0",
            "0x0",
            " 0",
            "99999999999",
            "bad line",
        ] {
            assert!(matches!(ids(bad), Err(UserError::NoUser(_))), "{bad:?}: {:?}", ids(bad));
        }
        for bad in ["ann:nogroup", "ann:-1", "ann:4294967295", "ann:x", "0:0:0"] {
            assert!(matches!(ids(bad), Err(UserError::NoGroup(_))), "{bad:?}: {:?}", ids(bad));
        }
    }

    proptest! {
        #[test]
        fn any_file_is_read_without_a_panic(
            spec in ".{0,20}",
            passwd in "([a-z0-9:,\n]{0,200})",
            group in "([a-z0-9:,\n]{0,200})",
        ) {
            if let Ok(account) = resolve(&spec, &passwd, &group) {
                prop_assert!(account.uid != u32::MAX && account.gid != u32::MAX);
                prop_assert!(account.groups.contains(&account.gid));
            }
        }
    }
}
