//! Lists, stops and continues the programs of the guest.

use crate::error::{Result, at};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::fs;

/// Fields of `/proc/PID/stat`.
struct Program {
    pid: i32,
    parent: i32,
    state: char,
    kernel: bool,
}

/// `PF_KTHREAD` of linux/sched.h, in the field `flags`.
const PF_KTHREAD: u64 = 0x0020_0000;

/// Parses a line of `/proc/PID/stat`, from the end of the name, which may contain any byte.
fn parse(pid: i32, stat: &str) -> Option<Program> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    let flags: u64 = fields.nth(4)?.parse().ok()?;
    Some(Program { pid, parent, state, kernel: flags & PF_KTHREAD != 0 })
}

fn all() -> Result<Vec<Program>> {
    let mut found = Vec::new();
    for entry in at(fs::read_dir("/proc"), &"/proc")? {
        let name = at(entry, &"/proc")?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // The process may have ended.
        let Ok(stat) = fs::read(format!("/proc/{pid}/stat")) else { continue };
        found.extend(parse(pid, &String::from_utf8_lossy(&stat)));
    }
    found.sort_by_key(|program| program.pid);
    Ok(found)
}

/// Process ids of this process and all its ancestors.
fn ancestors(all: &[Program]) -> BTreeSet<i32> {
    let mut line = BTreeSet::new();
    let mut pid = i32::try_from(std::process::id()).unwrap_or(0);
    while pid > 0 && line.insert(pid) {
        pid = all.iter().find(|program| program.pid == pid).map_or(0, |program| program.parent);
    }
    line
}

/// Sends `signal` to all programs but process 1, kernel threads and the ancestors of this one.
pub fn signal(signal: Signal) -> Result<String> {
    let all = all()?;
    let spared = ancestors(&all);
    let mut sent = 0;
    for program in all.iter().filter(|p| p.pid != 1 && !p.kernel && !spared.contains(&p.pid)) {
        let Some(pid) = Pid::from_raw(program.pid) else { continue };
        match kill_process(pid, signal) {
            Ok(()) => sent += 1,
            Err(rustix::io::Errno::SRCH) => {}
            Err(e) => {
                return Err(format!("signal {signal:?} for process {}: {e}", program.pid).into());
            }
        }
    }
    Ok(format!("{{\"programs\":{sent}}}"))
}

/// Process ids of the stopped programs.
pub fn stopped() -> Result<Vec<i32>> {
    Ok(all()?.iter().filter(|program| program.state == 'T').map(|program| program.pid).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_may_be_called_anything() {
        let program = parse(7, "7 (a) T 1) (x) T 42 7 7 0 -1 4194560 1 2").expect("a program");
        assert_eq!((program.parent, program.state, program.kernel), (42, 'T', false));
        assert!(parse(2, "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0").expect("a thread").kernel);
        assert!(parse(7, "7 (a) T 1").is_none());
    }

    #[test]
    fn ones_own_ancestors_are_known() {
        let all = all().expect("programs");
        let line = ancestors(&all);
        assert!(line.contains(&i32::try_from(std::process::id()).expect("a pid")));
        assert!(line.len() > 1, "{line:?}");
    }
}
