//! What a command says about a machine that ended, or that runs older programs.

use crate::files::{self, FileError};
use crate::machine::Machine;
use crate::run_state::{Ended, Running, boot_id, unix_ms};
use crate::start::kernel_crashed;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The last lines of the console in a report.
const CONSOLE_LINES: usize = 5;
/// Lines of a crash before these, in a report. Registers and a call trace follow them.
const CRASH_LINES: usize = 2;
/// Lines of the console among which a crash is looked for.
const CONSOLE_SEARCHED_LINES: usize = 200;

/// The end of a machine, reported to the next command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndReport {
    /// The time of the end, in milliseconds since 1970; `None` if no process saw it.
    pub at_unix_ms: Option<u64>,
    /// Why the machine ended.
    pub cause: String,
    /// Number of VMs in the machine at the last count, ended ones that were not removed included.
    pub vms: Option<u64>,
    /// Whether a command asked for the end.
    pub asked: bool,
    /// The last lines of the console, if no command asked for the end.
    pub console: String,
}

impl fmt::Display for EndReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the machine ")?;
        match (self.asked, self.at_unix_ms) {
            (true, _) => f.write_str("was stopped")?,
            (false, Some(_)) => f.write_str("ended unasked")?,
            (false, None) => f.write_str("ended unasked at an unknown time")?,
        }
        if let Some(at) = self.at_unix_ms {
            write!(f, " {} ago", age(unix_ms().saturating_sub(at)))?;
        }
        if !self.asked {
            write!(f, ": {}", self.cause)?;
        }
        match self.vms {
            Some(0) => f.write_str("; it had no VMs")?,
            Some(1) => f.write_str("; its VM ended with it")?,
            Some(vms) => write!(f, "; its {vms} VMs ended with it")?,
            None => f.write_str("; its VMs, if it had any, ended with it")?,
        }
        if !self.console.is_empty() {
            write!(f, "\n--- last lines of its console:\n{}", self.console)?;
        }
        Ok(())
    }
}

/// A duration in the largest unit that it fills.
fn age(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0..120 => format!("{s} s"),
        120..7200 => format!("{} min", s / 60),
        7200..172_800 => format!("{} h", s / 3600),
        _ => format!("{} days", s / 86_400),
    }
}

/// Content of `noticed.json`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Noticed {
    since_unix_ms: u64,
    version: String,
}

/// The last end of a machine that is down, as its files show it. The time is 0 if no process saw
/// the end. `None` if no run of the machine is known.
pub(crate) fn end_of(running: Option<&Running>, ended: Option<Ended>) -> Option<Ended> {
    let Some(running) = running else { return ended };
    // A supervisor that could not begin leaves the record of an earlier run.
    if let Some(ended) = ended.filter(|ended| ended.at_unix_ms >= running.since_unix_ms) {
        return Some(ended);
    }
    let cause = if running.boot_id.is_empty() || running.boot_id == boot_id() {
        "killed, or the host went down"
    } else {
        "the host went down or was restarted"
    };
    let vms = running.vms;
    Some(Ended { at_unix_ms: 0, vms, ..Ended::now(false, cause.to_owned()) })
}

/// The first lines that show a crash, and the last lines.
fn end_of_console(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let (before, last) = lines.split_at(lines.len().saturating_sub(CONSOLE_LINES));
    let crash = before.iter().filter(|line| kernel_crashed(line)).take(CRASH_LINES);
    crash.chain(last).copied().collect::<Vec<_>>().join("\n")
}

impl Machine {
    /// The report of the last end, for a caller that holds the command lock of a machine that is
    /// down. `None` if it was reported before. An end that was asked for and had no VMs needs no
    /// report.
    pub(crate) fn end_report(&self) -> Result<Option<EndReport>, FileError> {
        let running: Option<Running> = files::read_json(&self.layout.running())?;
        let ended: Option<Ended> = files::read_json(&self.layout.ended())?;
        let asked = running.is_none();
        let Some(end) = end_of(running.as_ref(), ended).filter(|end| !end.reported) else {
            return Ok(None);
        };
        self.mark_reported(&end)?;
        if asked && end.vms == Some(0) {
            return Ok(None);
        }
        let console = if asked {
            String::new()
        } else {
            end_of_console(&files::tail(&self.layout.console_log(), CONSOLE_SEARCHED_LINES))
        };
        Ok(Some(EndReport {
            at_unix_ms: (end.at_unix_ms > 0).then_some(end.at_unix_ms),
            cause: end.cause,
            vms: end.vms,
            asked,
            console,
        }))
    }

    /// Notes that the user knows of the end.
    fn mark_reported(&self, end: &Ended) -> Result<(), FileError> {
        // A record of an unknown time must be newer than the run, so that it is not made again.
        let at_unix_ms = if end.at_unix_ms == 0 { unix_ms() } else { end.at_unix_ms };
        let end = Ended { reported: true, at_unix_ms, ..end.clone() };
        files::write_json(&self.layout.ended(), &end)
    }

    /// Notes that the user knows of the last end, because a command has just brought it about.
    pub(crate) fn forget_end(&self) -> Result<(), FileError> {
        match files::read_json::<Ended>(&self.layout.ended())? {
            Some(end) => self.mark_reported(&end),
            None => Ok(()),
        }
    }

    /// Whether a command of `version` is the first that finds this run of the machine with older
    /// programs. Later calls return `false`, so that the user reads the notice once.
    #[must_use]
    pub fn first_notice(&self, version: &str) -> bool {
        let Ok(Some(running)) = files::read_json::<Running>(&self.layout.running()) else {
            return true;
        };
        let (path, version) = (self.layout.noticed(), version.to_owned());
        let now = Noticed { since_unix_ms: running.since_unix_ms, version };
        if files::read_json::<Noticed>(&path).ok().flatten().as_ref() == Some(&now) {
            return false;
        }
        // If the note cannot be written, the notice appears again.
        drop(files::write_json(&path, &now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::InitOptions;
    use crate::layout::Layout;
    use std::fs;

    fn machine(folder: &std::path::Path) -> Machine {
        let layout = Layout { folder: folder.to_owned() };
        Machine { layout, options: InitOptions::default(), shared_all: false }
    }

    fn running(since_unix_ms: u64, boot_id: &str) -> Running {
        Running {
            since_unix_ms,
            ready: true,
            build_digest: "d".to_owned(),
            options: InitOptions::default(),
            boot_id: boot_id.to_owned(),
            boot_crashes: 0,
            vms: Some(2),
            uplink: None,
        }
    }

    #[test]
    fn each_end_is_reported_once_with_its_cause_and_its_vms() {
        let folder = tempfile::tempdir().unwrap();
        let machine = machine(folder.path());
        let put = |running: Option<Running>, ended: Option<Ended>| {
            for path in [machine.layout.running(), machine.layout.ended()] {
                files::remove(&path).unwrap();
            }
            if let Some(running) = running {
                files::write_json(&machine.layout.running(), &running).unwrap();
            }
            if let Some(ended) = ended {
                files::write_json(&machine.layout.ended(), &ended).unwrap();
            }
        };
        let report = || machine.end_report().unwrap().map(|report| report.to_string());
        fs::write(machine.layout.console_log(), "one\r\ntwo\r\n").unwrap();
        let crash = Ended { vms: Some(3), ..Ended::now(false, "QEMU ended: signal 9".to_owned()) };
        let stop = Ended { vms: Some(3), ..Ended::now(true, "stopped".to_owned()) };
        let idle = Ended { vms: Some(0), ..stop.clone() };
        let before = Ended { at_unix_ms: 5, ..crash.clone() };
        let console = "\n--- last lines of its console:\none\ntwo";
        for (now, end, said) in [
            (None, None, None),
            (None, Some(idle), None),
            (
                None,
                Some(stop),
                Some("the machine was stopped 0 s ago; its 3 VMs ended with it".to_owned()),
            ),
            (
                Some(running(7, &boot_id())),
                Some(crash),
                Some(format!(
                    "the machine ended unasked 0 s ago: QEMU ended: signal 9; its 3 VMs ended \
                     with it{console}"
                )),
            ),
            (
                Some(running(7, &boot_id())),
                None,
                Some(format!(
                    "the machine ended unasked at an unknown time: killed, or the host went down; \
                     its 2 VMs ended with it{console}"
                )),
            ),
            (
                Some(running(7, "another boot")),
                Some(before),
                Some(format!(
                    "the machine ended unasked at an unknown time: the host went down or was \
                     restarted; its 2 VMs ended with it{console}"
                )),
            ),
        ] {
            put(now, end);
            assert_eq!(report(), said);
            assert_eq!(report(), None, "once");
        }
    }

    #[test]
    fn an_end_that_a_command_brought_about_is_not_reported_again() {
        let folder = tempfile::tempdir().unwrap();
        let machine = machine(folder.path());
        let end = Ended { vms: Some(3), ..Ended::now(true, "stopped".to_owned()) };
        files::write_json(&machine.layout.ended(), &end).unwrap();
        machine.forget_end().unwrap();
        assert_eq!(machine.end_report().unwrap(), None);
        let kept: Ended = files::read_json(&machine.layout.ended()).unwrap().unwrap();
        assert!(kept.clean, "the next start relies on it");
    }

    #[test]
    fn older_programs_are_noticed_once_for_each_run_and_version() {
        let folder = tempfile::tempdir().unwrap();
        let machine = machine(folder.path());
        files::write_json(&machine.layout.running(), &running(7, "b")).unwrap();
        assert!(machine.first_notice("2"));
        assert!(!machine.first_notice("2"));
        assert!(machine.first_notice("3"));
        assert!(!machine.first_notice("3"));
        files::write_json(&machine.layout.running(), &running(8, "b")).unwrap();
        assert!(machine.first_notice("3"));
        assert!(!machine.first_notice("3"));
    }

    #[test]
    fn a_crash_is_quoted_although_a_call_trace_follows_it() {
        let trace = (0..30).map(|n| format!("trace {n}\n")).collect::<String>();
        let text = format!("before\nKernel panic - not syncing: why\n{trace}");
        let quoted = end_of_console(&text);
        assert_eq!(quoted.lines().count(), 1 + CONSOLE_LINES, "{quoted}");
        assert!(quoted.starts_with("Kernel panic - not syncing: why\ntrace 25\n"), "{quoted}");
        assert_eq!(end_of_console("Oops: one\ntwo"), "Oops: one\ntwo");
        assert_eq!(end_of_console(""), "");
    }

    #[test]
    fn an_age_has_one_unit() {
        let seconds = [0, 119, 120, 7199, 7200, 172_799, 172_800];
        assert_eq!(
            seconds.map(|s| age(s * 1000)),
            ["0 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 days"]
        );
    }
}
