//! Decisions on why a VM ended.

use crate::model::exit::exit_now;
use crate::vm::record::RecordError;
use dayfly_api::types::{ExitKind, VmExit};
use dayfly_host::groups::Usage;
use dayfly_host::oom;
use dayfly_host::process::ProcessId;
use dayfly_units::text::{LONG, escaped};
use dayfly_vmm::control::{ExitReason, ExitRecord};

/// Decides why a VM ended, from its exit record and from whether its end was requested. Does no
/// I/O.
#[must_use]
pub fn classify_exit(record: Result<ExitRecord, RecordError>, kill_asked: bool) -> VmExit {
    match record {
        Ok(ExitRecord { reason, message }) => {
            let kind = match reason {
                ExitReason::PowerOff => ExitKind::PowerOff,
                ExitReason::Reboot => ExitKind::Reboot,
                ExitReason::Panic => ExitKind::Panic,
                ExitReason::Quit => ExitKind::Killed,
                ExitReason::Failed => ExitKind::Failed,
            };
            // The message is escaped, because a guest may have taken over its VMM.
            exit_now(kind, escaped(&message, LONG).to_string())
        }
        Err(_) if kill_asked => exit_now(ExitKind::Killed, "killed on request"),
        Err(e) => exit_now(
            ExitKind::Lost,
            format!(
                "the VMM process was killed from outside, or before Linux 6.15 by the kernel for a \
                 forbidden system call: it left no exit record ({e})"
            ),
        ),
    }
}

/// As [`classify_exit`], of a VMM that `signal` killed. A VMM that was taken over may write any
/// record, but it cannot hide that the kernel killed it for a forbidden system call.
pub(crate) fn classify_end(
    signal: Option<i32>,
    record: Result<ExitRecord, RecordError>,
    kill_asked: bool,
) -> VmExit {
    if signal == Some(libc::SIGSYS) {
        let message = "the kernel killed the VMM because it made a system call that its seccomp \
                       filter forbids; the kernel's log names the call";
        return exit_now(ExitKind::Failed, message);
    }
    classify_exit(record, kill_asked)
}

/// As decided, but a VM that was killed because its deadline has passed ended for that.
#[must_use]
pub fn classify_expired(exit: VmExit, expired: bool) -> VmExit {
    // It is lost if the daemon ended before it noticed that the VMM was killed.
    if expired && matches!(exit.reason, ExitKind::Killed | ExitKind::Lost) {
        let message = "its time to live is over; `dayfly update --ttl` changes that of a VM";
        return VmExit { reason: ExitKind::Ttl, message: message.into(), ..exit };
    }
    exit
}

/// As [`classify_end`] of the VMM `process` of user `uid`, of which `exit` was decided: a VMM that
/// left no record may have been killed because memory was short. The counters of its control group
/// say that, or else the kernel's log, so that a VMM that a program killed is never taken for one.
/// `limited`: whether the VM has a limit of memory. Blocks.
#[must_use]
pub fn classify_memory(
    exit: VmExit,
    process: Option<ProcessId>,
    uid: u32,
    usage: Option<Usage>,
    limited: bool,
) -> VmExit {
    let Some(process) = process.filter(|_| exit.reason == ExitKind::Lost) else { return exit };
    let counted = usage.is_some_and(|usage| usage.oom_kills > 0);
    let line = oom::killed(process.pid, uid, started_us(process)).unwrap_or_else(|e| {
        tracing::warn!("whether process {} was killed for its memory: /dev/kmsg: {e}", process.pid);
        None
    });
    match short_of_memory(line.as_deref(), counted, limited) {
        Some(message) => exit_now(ExitKind::Memory, message),
        None => exit,
    }
}

/// Which memory was short, by the line of the kernel's log, whether the VM's control group counts a
/// kill, and whether the VM has a limit of memory; `None`: neither says that memory was short.
fn short_of_memory(line: Option<&str>, counted: bool, limited: bool) -> Option<String> {
    match line {
        // The kernel counts a kill in the group of the process, whichever memory was short.
        Some(line) if !(counted && line.starts_with(oom::IN_A_GROUP)) => {
            let text = escaped(line, LONG);
            Some(format!(
                "the kernel killed the VMM because memory was short; its log: {text}; create fewer \
                 or smaller VMs, or start dayflyd with a lower --overcommit"
            ))
        }
        _ if !counted => None,
        _ if limited => Some(
            "the kernel killed the VMM because the VM needed more memory than its control group \
             may have; create it with a larger --memory-max"
                .to_owned(),
        ),
        _ => Some(
            "the kernel killed the VMM because the host, or a control group above that of the VM, \
             was out of memory; create fewer or smaller VMs, or give that group more memory"
                .to_owned(),
        ),
    }
}

/// When a process started, in microseconds since the boot by the clock of the kernel's log, or
/// earlier. That clock is not adjusted as the one of processes is: allow 200 parts in a million.
fn started_us(process: ProcessId) -> u64 {
    let us = process.started_us();
    us.saturating_sub(us / 5000).saturating_sub(1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::record::read_exit;

    fn missing() -> Result<ExitRecord, RecordError> {
        read_exit(std::path::Path::new("/nonexistent/exit.json")).1
    }

    #[test]
    fn a_larger_limit_is_proposed_only_to_a_vm_with_a_limit() {
        let (host, group) = ("Out of memory: Killed 7", "Memory cgroup out of memory: Killed 7");
        let said = |line, counted, limited, words: &str| {
            let message = short_of_memory(line, counted, limited).unwrap();
            assert!(message.contains(words), "{message}");
            assert_eq!(message.contains("--memory-max"), words == "--memory-max", "{message}");
        };
        for limited in [false, true] {
            assert_eq!(short_of_memory(None, false, limited), None);
            said(Some(host), false, limited, "Out of memory: Killed 7");
            said(Some(host), true, limited, "Out of memory: Killed 7");
            // That of a VM without a group.
            said(Some(group), false, limited, "Memory cgroup out of memory");
        }
        for line in [None, Some(group)] {
            said(line, true, true, "--memory-max");
            said(line, true, false, "a control group above");
        }
    }

    #[test]
    fn the_record_says_why_and_its_absence_says_killed_or_lost() {
        for (reason, kind) in [
            (ExitReason::PowerOff, ExitKind::PowerOff),
            (ExitReason::Reboot, ExitKind::Reboot),
            (ExitReason::Panic, ExitKind::Panic),
            (ExitReason::Quit, ExitKind::Killed),
            (ExitReason::Failed, ExitKind::Failed),
        ] {
            let record = || Ok(ExitRecord { reason, message: "why".into() });
            // A guest that ended by itself while it was being killed keeps its own reason.
            for kill_asked in [false, true] {
                let exit = classify_exit(record(), kill_asked);
                assert_eq!((exit.reason, exit.message.as_str()), (kind, "why"));
            }
        }
        let message = "why\x1b]0;x\x07\nforged \u{9b}2J \u{202e}".to_owned();
        let exit = classify_exit(Ok(ExitRecord { reason: ExitReason::Failed, message }), false);
        assert_eq!(exit.message, r"why\x1b]0;x\x07\nforged \u{9b}2J \u{202e}");
        let record = || Ok(ExitRecord { reason: ExitReason::PowerOff, message: "lie".into() });
        for (signal, kind) in [
            (Some(31), ExitKind::Failed),
            (Some(9), ExitKind::PowerOff),
            (None, ExitKind::PowerOff),
        ] {
            assert_eq!(classify_end(signal, record(), false).reason, kind, "{signal:?}");
        }
        assert!(classify_end(Some(31), missing(), true).message.contains("seccomp"));
        assert_eq!(classify_exit(missing(), true).reason, ExitKind::Killed);
        assert_eq!(classify_exit(missing(), false).reason, ExitKind::Lost);
    }
}
