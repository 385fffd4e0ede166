//! Starts the CPUs that this machine has and its snapshot did not have.
//!
//! Linux booted with `maxcpus=`, so all CPUs that the machine may have are present, and those that
//! it has answer when they are started. Others must not be tried: the kernel waits 10 s for each.

use dayfly_api::agent::Reply;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::Path;

/// The folder of the CPUs, below the root.
const FOLDER: &str = "sys/devices/system/cpu";
/// The most CPUs that are started, whatever the host asks for.
const MOST: u32 = 1024;

/// Starts the CPUs below `wanted` that do not run, in the machine whose root is `root`. After the
/// first one that does not start, the others are not tried, because each may take 10 s.
pub(crate) fn start(root: &Path, wanted: u32) -> Reply {
    let folder = root.join(FOLDER);
    let started = start_all(&folder, wanted.min(MOST));
    // What the kernel says, even after an error.
    let now = online(&folder);
    let why = match (&started, &now) {
        (Err(why), _) => Some(why.clone()),
        (Ok(()), Err(error)) => Some(error.to_string()),
        (Ok(()), Ok(_)) => None,
    };
    Reply::Cpus { online: now.map_or(0, |running| count(&running)), why }
}

fn start_all(folder: &Path, wanted: u32) -> Result<(), String> {
    let running = online(folder).map_err(|e| format!("CPUs: {e}"))?;
    let missing = (0..wanted).filter(|cpu| !running.iter().any(|range| range.contains(cpu)));
    for cpu in missing {
        let file = folder.join(format!("cpu{cpu}/online"));
        let opened = std::fs::File::options().write(true).open(file);
        opened.and_then(|mut file| file.write_all(b"1")).map_err(|e| format!("CPU {cpu}: {e}"))?;
    }
    Ok(())
}

/// The CPUs that run.
fn online(folder: &Path) -> io::Result<Vec<RangeInclusive<u32>>> {
    let path = folder.join("online");
    let text = std::fs::read_to_string(&path)
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
    parse(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{text:?}")))
}

/// Parses a list of CPUs (`Documentation/admin-guide/cputopology.rst`), such as `0-2,5`.
fn parse(list: &str) -> Option<Vec<RangeInclusive<u32>>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').map(range).collect()
}

fn count(running: &[RangeInclusive<u32>]) -> u32 {
    let last = |range: &RangeInclusive<u32>| u64::from(*range.end()) + 1;
    let cpus = running.iter().map(|range| last(range).saturating_sub(u64::from(*range.start())));
    u32::try_from(cpus.sum::<u64>()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of which CPU 0 runs, with the files of `present` CPUs.
    fn machine(present: u32) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(FOLDER);
        for cpu in 1..present {
            std::fs::create_dir_all(folder.join(format!("cpu{cpu}"))).unwrap();
            std::fs::write(folder.join(format!("cpu{cpu}/online")), "0").unwrap();
        }
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("online"), "0\n").unwrap();
        root
    }

    fn file(root: &tempfile::TempDir, name: &str) -> String {
        std::fs::read_to_string(root.path().join(FOLDER).join(name)).unwrap()
    }

    #[test]
    fn each_cpu_of_the_machine_is_started_and_no_other() {
        let root = machine(16);
        // The kernel would have changed the list.
        assert_eq!(start(root.path(), 4), Reply::Cpus { online: 1, why: None });
        for cpu in 1..16 {
            let expected = if cpu < 4 { "1" } else { "0" };
            assert_eq!(file(&root, &format!("cpu{cpu}/online")), expected, "CPU {cpu}");
        }
    }

    #[test]
    fn a_cpu_that_runs_is_left_alone() {
        let root = machine(4);
        std::fs::write(root.path().join(FOLDER).join("online"), "0,2-3\n").unwrap();
        assert_eq!(start(root.path(), 4), Reply::Cpus { online: 3, why: None });
        assert_eq!(file(&root, "cpu1/online"), "1");
        assert_eq!(file(&root, "cpu2/online"), "0");
    }

    #[test]
    fn the_first_cpu_that_does_not_start_is_named_and_the_last_one_tried() {
        let root = machine(8);
        std::fs::remove_file(root.path().join(FOLDER).join("cpu2/online")).unwrap();
        let Reply::Cpus { online: 1, why: Some(why) } = start(root.path(), 8) else { panic!() };
        assert!(why.starts_with("CPU 2: No such file"), "{why}");
        assert_eq!(
            (file(&root, "cpu1/online"), file(&root, "cpu3/online")),
            ("1".into(), "0".into())
        );
        let none = tempfile::tempdir().unwrap();
        let Reply::Cpus { online: 0, why: Some(why) } = start(none.path(), 2) else { panic!() };
        assert!(why.contains("cpu/online: No such file"), "{why}");
    }

    #[test]
    fn lists_of_the_kernel_are_read_and_others_refused() {
        let counted = |list: &str| parse(list).map(|running| count(&running));
        for (list, expected) in
            [("0\n", 1), ("0-3\n", 4), ("0,2-3,7", 4), ("0-4294967295", u32::MAX), ("5-2", 0)]
        {
            assert_eq!(counted(list), Some(expected), "{list}");
        }
        for bad in ["", "\n", "a", "0-", "-1", "0,,1", "4294967296"] {
            assert_eq!(counted(bad), None, "{bad:?}");
        }
    }
}
