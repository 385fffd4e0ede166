//! The commands that give a user what the machine needs of the host.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const TUN: &str = "/dev/net/tun";

/// Opens `/dev/net/tun`, as the machine's supervisor does.
///
/// # Errors
/// The system's error, and the command that root runs against it.
pub fn tun() -> Result<(), (io::Error, String)> {
    match File::options().read(true).write(true).open(TUN) {
        Ok(_) => Ok(()),
        Err(e) => {
            let command = tun_command(e.kind());
            Err((e, command))
        }
    }
}

/// The command for root after an error of opening `/dev/net/tun`.
pub(crate) fn tun_command(error: io::ErrorKind) -> String {
    tun_command_of(error, &fs::read_to_string("/proc/misc").unwrap_or_default())
}

fn tun_command_of(error: io::ErrorKind, misc: &str) -> String {
    let driver = misc.lines().any(|line| line.split_whitespace().nth(1) == Some("tun"));
    match (error, driver) {
        (io::ErrorKind::PermissionDenied, _) => format!("chmod 666 {TUN}"),
        (_, true) => format!("mkdir -p /dev/net && mknod -m 666 {TUN} c 10 200"),
        (_, false) => format!("modprobe tun && chmod 666 {TUN}"),
    }
}

/// The command for root that lets this user open `/dev/kvm`.
pub(crate) fn kvm_command() -> String {
    let owner = fs::metadata("/dev/kvm").map(|device| (device.mode(), device.gid()));
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    let user = std::env::var("USER").unwrap_or_else(|_| "USER".to_owned());
    kvm_command_of(owner.ok(), &groups, &user)
}

/// A group that may read and write the device gets the user; root's own group never does.
fn kvm_command_of(owner: Option<(u32, u32)>, groups: &str, user: &str) -> String {
    let group = owner.filter(|(mode, gid)| mode & 0o060 == 0o060 && *gid != 0).and_then(|o| {
        groups.lines().find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            (fields.nth(1)?.parse() == Ok(o.1)).then(|| name.to_owned())
        })
    });
    match group {
        Some(group) => format!("usermod -aG {group} {user}, and let {user} log in again"),
        None => "chmod 666 /dev/kvm".to_owned(),
    }
}

/// The command for root that gives `user` the 65536 subordinate ids (subuid(5)) that programs such
/// as mmdebstrap need; `None` if the user has them.
#[must_use]
pub fn subordinate_ids(user: &str, uid: u32) -> Option<String> {
    let read = |path: &str| fs::read_to_string(Path::new(path)).unwrap_or_default();
    subordinate_ids_of(user, uid, &[read("/etc/subuid"), read("/etc/subgid")])
}

fn subordinate_ids_of(user: &str, uid: u32, files: &[String; 2]) -> Option<String> {
    const COUNT: u64 = 1 << 16;
    const FIRST: u64 = 100_000;
    let ranges = |file: &str| -> Vec<(String, u64, u64)> {
        let range = |line: &str| {
            let mut fields = line.trim().split(':');
            let (name, first, count) = (fields.next()?, fields.next()?, fields.next()?);
            Some((name.to_owned(), first.parse().ok()?, count.parse().ok()?))
        };
        file.lines().filter_map(range).collect()
    };
    let given = |file: &String| {
        let own = |name: &str| name == user || name == uid.to_string();
        ranges(file).iter().any(|(name, _, count)| own(name) && *count >= COUNT)
    };
    if files.iter().all(given) {
        return None;
    }
    let ends = files.iter().flat_map(|file| ranges(file));
    let first = ends.map(|(_, first, count)| first.saturating_add(count)).max();
    let first = first.unwrap_or(FIRST).max(FIRST);
    let last = first.saturating_add(COUNT - 1);
    Some(format!("usermod --add-subuids {first}-{last} --add-subgids {first}-{last} {user}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_of_tun_has_its_command() {
        use io::ErrorKind::{NotFound, PermissionDenied};
        let loaded = " 10 fuse\n200 tun\n";
        assert_eq!(tun_command_of(PermissionDenied, ""), "chmod 666 /dev/net/tun");
        assert!(tun_command_of(NotFound, loaded).contains("mknod -m 666 /dev/net/tun c 10 200"));
        assert!(tun_command_of(NotFound, "200 tuna\n").starts_with("modprobe tun"));
    }

    #[test]
    fn a_group_that_may_use_kvm_gets_the_user_and_roots_group_does_not() {
        let groups = "root:x:0:\nnogroup\nkvm:x:108:a,b\n";
        let command = |owner| kvm_command_of(owner, groups, "ann");
        assert!(command(Some((0o20_660, 108))).starts_with("usermod -aG kvm ann, "));
        for other in [Some((0o20_660, 0)), Some((0o20_640, 108)), Some((0o20_660, 7)), None] {
            assert_eq!(command(other), "chmod 666 /dev/kvm", "{other:?}");
        }
    }

    #[test]
    fn subordinate_ids_lie_behind_those_of_others() {
        let of = |uids: &str, gids: &str| {
            subordinate_ids_of("ann", 1000, &[uids.to_owned(), gids.to_owned()])
        };
        let own = "ann:100000:65536\n";
        assert_eq!(of(own, own), None);
        assert_eq!(of("1000:5:65536\n", own), None);
        let command = of("", "").expect("a command");
        assert_eq!(command, "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 ann");
        let command = of("ann:100000:65535\n", "bob:300000:65536\nodd\n:::\n");
        assert!(command.expect("a command").contains("--add-subuids 365536-431071"));
        assert!(of("ann:1:99999999999999999999\n", "x:18446744073709551615:9\n").is_some());
    }
}
