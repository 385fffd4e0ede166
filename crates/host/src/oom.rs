//! Which processes the kernel killed because memory was short, from its log (`/dev/kmsg`,
//! Documentation/ABI/testing/dev-kmsg).
//!
//! A process that was killed for its memory ends by SIGKILL, as one that a program killed. The
//! kernel writes a line for each (mm/oom_kill.c, `__oom_kill_process`), whether the host or a group
//! was out of memory:
//!
//! ```text
//! 3,1571,11952900442,-;Out of memory: Killed process 3077 (dayfly-vmm) total-vm:…, UID:70001 …
//! ```

use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, read};
use std::io;

/// The longest record of the log (PRINTK_MESSAGE_MAX).
const RECORD: usize = 8192;
/// How the line of a process begins that was killed because memory of a control group was short.
pub const IN_A_GROUP: &str = "Memory cgroup out of memory";
/// The most records that are read: more than any log has.
const MOST_RECORDS: usize = 1 << 20;

/// Whether the kernel has killed process `pid` of user `uid` because memory was short, at
/// `since_us` or later. Returns the line of the log.
///
/// `since_us` is when the process started, in microseconds since the boot: the log may name an
/// earlier process with the same pid. Pids are those of the host: in a PID namespace no process is
/// found.
///
/// # Errors
/// The log cannot be read, which needs CAP_SYSLOG if kernel.dmesg_restrict is set.
pub fn killed(pid: u32, uid: u32, since_us: u64) -> io::Result<Option<String>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let log = open("/dev/kmsg", flags, Mode::empty())?;
    let mut record = [0; RECORD];
    for _ in 0..MOST_RECORDS {
        match read(&log, &mut record) {
            Ok(0) | Err(Errno::AGAIN) => return Ok(None),
            Ok(length) => {
                if let Some(text) = names(&record[..length], pid, uid, since_us) {
                    return Ok(Some(text));
                }
            }
            // The record was overwritten; the next read gives the oldest one that is left.
            Err(Errno::PIPE | Errno::INTR) => {}
            // A record that is longer than any.
            Err(Errno::INVAL) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(None)
}

/// The text of a record, if it says that this process was killed.
fn names(record: &[u8], pid: u32, uid: u32, since_us: u64) -> Option<String> {
    let record = std::str::from_utf8(record).ok()?;
    let (head, text) = record.split_once(';')?;
    let text = text.lines().next()?;
    let mut fields = head.split(',');
    // Severity in the lowest three bits, then the facility. Programs cannot write as the kernel,
    // which is facility 0.
    let facility = fields.next()?.parse::<u32>().ok()? >> 3;
    let at_us = fields.nth(1)?.parse::<u64>().ok()?;
    let (why, victim) = text.split_once(": Killed process ")?;
    let memory = why.starts_with("Out of memory") || why == IN_A_GROUP;
    let (number, rest) = victim.split_once(" (")?;
    // The program's name comes first, and may have any text in it.
    let (_, rest) = rest.rsplit_once(" UID:")?;
    let user = rest.split(' ').next()?;
    let same = number.parse() == Ok(pid) && user.parse() == Ok(uid);
    (facility == 0 && at_us >= since_us && memory && same).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "Killed process 3077 (dayfly-vmm) total-vm:1097424kB, anon-rss:61400kB, \
                        file-rss:0kB, shmem-rss:0kB, UID:70001 pgtables:300kB oom_score_adj:500";

    #[test]
    fn only_the_kernel_s_own_line_on_this_process_counts() {
        let record = |head: &str, why: &str| format!("{head};{why}: {LINE}\n SUBSYSTEM=x\n");
        let named = |record: String| names(record.as_bytes(), 3077, 70001, 500);
        for why in ["Out of memory", "Memory cgroup out of memory"] {
            let found = named(record("3,1571,500,-", why));
            assert_eq!(found, Some(format!("{why}: {LINE}")));
        }
        let none = [
            record("3,1571,499,-", "Out of memory"),
            record("11,1571,500,-", "Out of memory"),
            record("3,1571,500,-", "Another says"),
            record("3,1571,500,-", "Out of memory").replace("3077", "3078"),
            record("3,1571,500,-", "Out of memory").replace("UID:70001", "UID:70002"),
            // The name of another process.
            record("3,1571,500,-", "Out of memory").replace("3077 (dayfly-vmm)", "1 (3077 (x)"),
            String::new(),
            "3,1,500,-;".to_owned(),
        ];
        for record in none {
            assert_eq!(named(record.clone()), None, "{record}");
        }
    }
}
