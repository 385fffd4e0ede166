//! A process's memory use, from `/proc/<pid>/smaps_rollup` (proc(5)).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

/// Memory of one process, in KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Resident memory; shared pages count in full.
    pub rss_kib: u64,
    /// Resident memory; each shared page is divided by the number of processes that map it.
    pub pss_kib: u64,
    /// Pages that no other process maps, clean and dirty: what the end of this process would free.
    pub private_kib: u64,
    /// The dirty part of `private_kib`.
    pub private_dirty_kib: u64,
    /// Pages that belong to no file; for a clone, the pages that it has written itself.
    pub anonymous_kib: u64,
}

/// Reads the memory use of process `pid`.
///
/// # Errors
/// The file cannot be read: `NotFound` if there is no such process, `PermissionDenied` if it
/// belongs to another user.
pub fn of(pid: u32) -> io::Result<Memory> {
    Ok(parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?))
}

/// Bytes of memory that belong to process `pid` and to no file (`RssAnon` of proc_pid_status(5)).
/// Takes the same time for any amount of memory, other than [`of`].
///
/// # Errors
/// As [`of`].
pub fn anonymous(pid: u32) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    // A process without memory, such as a zombie, has no such line.
    Ok(kib(&text, "RssAnon:").unwrap_or(0).saturating_mul(1024))
}

/// Bytes of memory that the host can still give to programs without swapping (`MemAvailable` of
/// proc_meminfo(5)).
///
/// # Errors
/// The file cannot be read, or has no such line.
pub fn available() -> io::Result<u64> {
    /// The line is the third, in all kernels that have it (fs/proc/meminfo.c).
    const FIRST_LINES: usize = 512;
    // Kept open, and read with one system call, because each creation of a VM asks.
    static FILE: OnceLock<File> = OnceLock::new();
    let path = "/proc/meminfo";
    let file = match FILE.get() {
        Some(file) => file,
        None => {
            let file = File::open(path)?;
            FILE.get_or_init(|| file)
        }
    };
    let mut lines = [0; FIRST_LINES];
    let read = file.read_at(&mut lines, 0)?;
    let text = String::from_utf8_lossy(lines.get(..read).unwrap_or_default());
    let kib = kib(&text, "MemAvailable:").ok_or_else(|| {
        let what = format!("{path}: expected a line MemAvailable: in {read} bytes, got none");
        io::Error::new(io::ErrorKind::InvalidData, what)
    })?;
    Ok(kib.saturating_mul(1024))
}

/// The number in the line that begins with `key`.
fn kib(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Missing and malformed lines count as 0.
fn parse(text: &str) -> Memory {
    let mut memory = Memory::default();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(key), Some(Ok(kib))) = (words.next(), words.next().map(str::parse::<u64>)) else {
            continue;
        };
        match key {
            "Rss:" => memory.rss_kib = kib,
            "Pss:" => memory.pss_kib = kib,
            "Private_Clean:" => memory.private_kib = memory.private_kib.saturating_add(kib),
            "Private_Dirty:" => {
                memory.private_dirty_kib = kib;
                memory.private_kib = memory.private_kib.saturating_add(kib);
            }
            "Anonymous:" => memory.anonymous_kib = kib,
            _ => {}
        }
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollup_is_read() {
        let text = "55d0-7fff ---p 00000000 00:00 0   [rollup]\nRss:   9712 kB\nPss:  3000 \
                    kB\nPss_Dirty: 1 kB\n\
                    Private_Clean:  12 kB\nPrivate_Dirty:  1000 kB\nAnonymous:  900 kB\n";
        let expected = Memory {
            rss_kib: 9712,
            pss_kib: 3000,
            private_kib: 1012,
            private_dirty_kib: 1000,
            anonymous_kib: 900,
        };
        assert_eq!(parse(text), expected);
        assert_eq!(parse("garbage\nRss: x kB\nRss:"), Memory::default());
    }

    #[test]
    fn the_host_has_memory_available() {
        let bytes = available().unwrap();
        assert!((1 << 20..1 << 50).contains(&bytes), "{bytes}");
        assert_eq!(kib("MemAvailableX: 3 kB\nMemAvailable:  12 kB\n", "MemAvailable:"), Some(12));
        assert_eq!(kib("MemFree: 3 kB\n", "MemAvailable:"), None);
    }

    #[test]
    fn our_own_memory_grows_with_what_we_touch() {
        let own = || anonymous(std::process::id()).unwrap();
        let (before, anonymous_before) = (of(std::process::id()).unwrap(), own());
        let block = vec![1_u8; 32 << 20];
        let after = of(std::process::id()).unwrap();
        assert!(block.iter().all(|&b| b == 1));
        assert!(after.anonymous_kib >= before.anonymous_kib + (24 << 10), "{before:?} {after:?}");
        assert!(after.private_kib <= after.rss_kib, "{after:?}");
        assert!(own() >= anonymous_before + (24 << 20), "{anonymous_before} {}", own());
    }
}
