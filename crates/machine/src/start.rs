//! Starts a machine, again after each crash of its kernel during boot.

use crate::decide::{Action, Consent, Found, Purpose, decide};
use crate::errors::StartError;
use crate::files::{self, FileError};
use crate::found::{START_TIMEOUT, Seen};
use crate::initramfs;
use crate::machine::Machine;
use crate::progress::Report;
use crate::run_state::{Ended, Running};
use crate::supervisor::Orders;
use crate::{disk, qemu};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Number of kernel crashes during boot that a start tolerates: it boots again after each.
const BOOT_CRASHES: u32 = 3;
/// Console texts that show a crash of the kernel or of a part of it. `oops=panic` turns a partial
/// crash into a panic, unless the kernel has stopped entirely.
const CRASHES: [&str; 4] =
    ["Kernel panic", "Oops: ", "exited with irqs disabled", "---[ end trace"];

/// How the program that uses this library starts itself again as the supervisor. With these words,
/// the program must call [`crate::supervisor_main`] with the argument that follows them.
#[derive(Debug, Clone)]
pub struct Reexec {
    /// Path of the program, usually `/proc/self/exe`.
    pub program: PathBuf,
    /// The first arguments, e.g. `["machine", "supervise"]`.
    pub words: Vec<OsString>,
}

/// What a start is for, and whom it may ask.
pub struct StartOrder<'a> {
    /// How to start the supervisor.
    pub reexec: &'a Reexec,
    /// What the caller wants of the machine.
    pub purpose: Purpose,
    /// Whether a machine may be ended although it may hold VMs.
    pub consent: Consent,
    /// Asks the machine's daemon how many VMs live; `None` if it does not say.
    pub count_vms: &'a dyn Fn() -> Option<u64>,
    /// Asks the user a question whose answer is yes or no, for [`Consent::Ask`].
    pub confirm: &'a dyn Fn(&str) -> bool,
}

impl<'a> StartOrder<'a> {
    /// A start for use, which ends no machine with VMs.
    #[must_use]
    pub fn to_use(reexec: &'a Reexec, count_vms: &'a dyn Fn() -> Option<u64>) -> Self {
        let (purpose, consent) = (Purpose::Use, Consent::None);
        Self { reexec, purpose, consent, count_vms, confirm: &|_| false }
    }
}

/// What a start says to the user.
#[derive(Debug, Clone, Copy)]
pub enum Note<'a> {
    /// A step that has begun.
    Step(&'a str),
    /// A line that stays.
    Line(&'a str),
}

/// The result of [`Machine::start`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Started {
    /// The machine was running already.
    WasRunning {
        /// How its programs or settings differ from those of this installation.
        differs: Option<String>,
        /// Number of VMs that live in it; `None` if its daemon did not say.
        vms: Option<u64>,
    },
    /// The machine was started.
    Fresh {
        /// Milliseconds from the supervisor's start until the machine was ready.
        boot_ms: u64,
        /// Why a running machine was restarted, if one was.
        replaced: Option<String>,
        /// How often the kernel crashed during boot, and was started again.
        boot_crashes: u32,
    },
}

/// A machine about which [`decide`] has decided.
enum Settled {
    /// It serves.
    Serves(Started),
    /// It is down.
    Down,
    /// It was ended for this reason.
    Ended(String),
}

impl Machine {
    /// Starts the machine. Returns when the machine answers, and its daemon too, if one is
    /// configured. [`crate::decide`] says when a running machine is restarted.
    ///
    /// # Errors
    /// [`StartError`]; nothing new is left running.
    pub fn start(
        &self,
        order: &StartOrder<'_>,
        note: &mut dyn FnMut(Note<'_>),
    ) -> Result<Started, StartError> {
        let _lock = self.command(&mut |text| note(Note::Step(text)))?;
        let shares = self.shares()?;
        if !shares.is_empty() && qemu::find_virtiofsd().is_none() {
            return Err(StartError::Missing {
                program: "virtiofsd",
                package: "qemu-system-common",
            });
        }
        if self.shared_all {
            files::write_json(&self.layout.config(), &self.options)?;
        }
        let build = initramfs::ensure(&self.layout, &self.options, &shares)?;
        for path in &build.missing {
            note(Note::Step(&format!(
                "{} is gone; the machine runs the copy from its last build",
                path.display()
            )));
        }
        let replaced = match self.settle(order, &build, note)? {
            Settled::Serves(started) => return Ok(started),
            Settled::Down => {
                if let Some(report) = self.end_report()? {
                    note(Note::Line(&report.to_string()));
                }
                None
            }
            Settled::Ended(reason) => Some(reason),
        };
        if qemu::find_qemu().is_none() {
            return Err(StartError::Missing {
                program: "qemu-system-x86_64",
                package: "qemu-system-x86",
            });
        }
        self.sweep_locked()?;
        self.check_disk(&mut |text| note(Note::Step(text)))?;
        self.turn_logs()?;
        let orders = Orders {
            folder: self.layout.folder.clone(),
            options: self.options.clone(),
            shares,
            build_digest: build.digest,
            boot_crashes: 0,
        };
        let begun = Instant::now();
        let boot_crashes = self.boot(order.reexec, orders, note)?;
        Ok(Started::Fresh { boot_ms: millis(begun.elapsed()), replaced, boot_crashes })
    }

    /// Decides about a running machine, and ends it if it is to be replaced.
    fn settle(
        &self,
        order: &StartOrder<'_>,
        build: &initramfs::Build,
        note: &mut dyn FnMut(Note<'_>),
    ) -> Result<Settled, StartError> {
        if !self.alive() {
            return Ok(Settled::Down);
        }
        let running: Option<Running> = files::read_json(&self.layout.running())?;
        let differs = running.and_then(|running| self.difference(&running, build));
        // A user who has agreed to lose all VMs need not wait for the machine's answer.
        let agreed = (order.purpose, order.consent) == (Purpose::Restart, Consent::Given);
        let seen = if agreed {
            Seen { found: Found::Silent, details: String::new() }
        } else {
            self.look(order.count_vms)?
        };
        let vms = if let Found::Ready { vms } = seen.found { vms } else { None };
        match decide(seen.found, differs.is_some(), order.purpose, order.consent) {
            Action::Boot => return Ok(Settled::Down),
            Action::Serve | Action::ServeOutdated => {
                return Ok(Settled::Serves(Started::WasRunning { differs, vms }));
            }
            Action::Refuse => return Err(self.kept(&seen, order.purpose)),
            Action::Ask => {
                let question = format!("{}. Restart it, and end all its VMs?", self.state(&seen));
                if !(order.confirm)(&question) {
                    return Err(self.kept(&seen, order.purpose));
                }
            }
            Action::Replace => {}
        }
        let reason = match (order.purpose, differs) {
            (Purpose::Restart, _) => "on request".to_owned(),
            (Purpose::Use, Some(differs)) => differs,
            (Purpose::Use, None) => "it was never ready".to_owned(),
        };
        note(Note::Step(&format!("restarting the machine: {reason}")));
        self.stop_locked(Duration::from_secs(20))?;
        // The result has the reason.
        self.forget_end()?;
        Ok(Settled::Ended(reason))
    }

    /// What was found, as the begin of a sentence.
    fn state(&self, seen: &Seen) -> String {
        let before = match self.last_count() {
            Some(vms) => format!("{vms} at the last count"),
            None => "their number is unknown".to_owned(),
        };
        match seen.found {
            Found::Ready { vms: Some(1) } => "the machine runs a VM".to_owned(),
            Found::Ready { vms: Some(vms) } => format!("the machine runs {vms} VMs"),
            Found::Ready { vms: None } => {
                "the machine's daemon does not say how many VMs live, so it may be of another \
                 version"
                    .to_owned()
            }
            Found::DaemonSilent => format!(
                "the machine's daemon does not answer ({}), and its VMs may live ({before})",
                seen.details
            ),
            Found::Paused => {
                format!("the machine is paused: {}; its VMs live ({before})", seen.details)
            }
            Found::Silent | Found::NeverReady | Found::Down => {
                format!("the machine does not answer, and its VMs may live ({before})")
            }
        }
    }

    /// The error for a machine that is not ended.
    fn kept(&self, seen: &Seen, purpose: Purpose) -> StartError {
        let explained = matches!(seen.found, Found::Ready { .. } | Found::Paused);
        let tail = if explained { String::new() } else { self.tails() };
        let next = match (purpose, seen.found) {
            (Purpose::Restart, _) => {
                "a restart ends them: `dayfly machine restart --force` restarts it all the same"
            }
            (Purpose::Use, Found::Paused) => "free space, and repeat the command",
            (Purpose::Use, _) => {
                "wait and repeat the command, or end all its VMs with `dayfly machine restart`"
            }
        };
        StartError::Kept { why: self.state(seen), next: next.to_owned(), tail }
    }

    /// Boots, again after each crash of the kernel, and returns the number of crashes.
    fn boot(
        &self,
        reexec: &Reexec,
        mut orders: Orders,
        note: &mut dyn FnMut(Note<'_>),
    ) -> Result<u32, StartError> {
        // QEMU's emulation (7.2) has a race if a kernel patches code that another CPU runs, and a
        // booting kernel does.
        while let Err(error) = self.launch(reexec, &orders, &mut |text| note(Note::Step(text))) {
            self.forget_end()?;
            if orders.boot_crashes == BOOT_CRASHES || !kernel_crashed(&error.to_string()) {
                return Err(error);
            }
            orders.boot_crashes += 1;
            note(Note::Line(&format!(
                "the machine's kernel crashed during boot under emulation ({} of at most \
                 {BOOT_CRASHES} times); starting again",
                orders.boot_crashes
            )));
            self.sweep_locked()?;
        }
        Ok(orders.boot_crashes)
    }

    /// Why the running machine differs from the one to start; `None` if it does not.
    fn difference(&self, running: &Running, build: &initramfs::Build) -> Option<String> {
        let mut what = Vec::new();
        if running.build_digest != build.digest {
            what.push(
                build
                    .changed
                    .clone()
                    .unwrap_or_else(|| "the carried programs, kernel or settings".to_owned()),
            );
        }
        if (running.options.cpus, running.options.memory_mib)
            != (self.options.cpus, self.options.memory_mib)
        {
            what.push("CPUs or memory".to_owned());
        }
        (!what.is_empty()).then(|| format!("changed: {}", what.join(", ")))
    }

    /// The error for a failed start, with the last lines of the logs.
    fn failed(&self, cause: String) -> StartError {
        StartError::Failed { cause, tail: self.tails() }
    }

    /// The last lines of the logs, with their names.
    fn tails(&self) -> String {
        let tails = [self.layout.console_log(), self.layout.daemon_log()].map(|log| {
            match files::tail(&log, 20) {
                text if text.is_empty() => String::new(),
                text => format!("\n--- last lines of {}:\n{text}", log.display()),
            }
        });
        tails.concat()
    }

    /// Renames each log, so that one older version is kept.
    fn turn_logs(&self) -> Result<(), FileError> {
        for log in
            [self.layout.console_log(), self.layout.daemon_log(), self.layout.supervisor_log()]
        {
            if log.exists() {
                let old = log.with_extension("log.1");
                fs::rename(&log, &old).map_err(|e| FileError::new("renaming", &log, e))?;
            }
        }
        Ok(())
    }

    fn launch(
        &self,
        reexec: &Reexec,
        orders: &Orders,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(), StartError> {
        let spawn = |source| StartError::Spawn { program: reexec.program.clone(), source };
        let text = serde_json::to_string(orders).map_err(|e| spawn(io::Error::from(e)))?;
        let log = self.layout.supervisor_log();
        let log = File::create(&log).map_err(|e| FileError::new("making", &log, e))?;
        let (reader, writer) = io::pipe().map_err(spawn)?;
        let mut child = Command::new(&reexec.program)
            .args(&reexec.words)
            .arg(text)
            .stdin(Stdio::null())
            .stdout(writer)
            .stderr(log)
            .current_dir("/")
            .spawn()
            .map_err(spawn)?;
        // Stage one ends as soon as it has forked the supervisor.
        child.wait().map_err(spawn)?;
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                if let Ok(report) = serde_json::from_str::<Report>(&line)
                    && sender.send(report).is_err()
                {
                    return;
                }
            }
        });
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let cause = match lines.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(Report::Phase(text)) => {
                    progress(&text);
                    continue;
                }
                Ok(Report::Ready) => return Ok(()),
                Ok(Report::Failed(cause)) => cause,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    format!("not ready after {} s", START_TIMEOUT.as_secs())
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let said = files::tail(&self.layout.supervisor_log(), 5);
                    format!(
                        "the supervisor ended without a word{}{said}",
                        if said.is_empty() { "" } else { ": " }
                    )
                }
            };
            let error = self.failed(cause);
            self.stop_locked(Duration::ZERO)?;
            return Err(error);
        }
    }

    /// Repairs the disk if the last end was unclean.
    fn check_disk(&self, progress: &mut dyn FnMut(&str)) -> Result<(), StartError> {
        let ended: Option<Ended> = files::read_json(&self.layout.ended())?;
        if ended.is_some_and(|e| e.clean) || !self.layout.life_lock().exists() {
            return Ok(());
        }
        progress("checking the machine's disk after an unclean end");
        disk::check(&self.layout.disk())
    }
}

/// Whether a console's text, or an error that quotes it, shows a crash of the machine's kernel.
#[must_use]
pub fn kernel_crashed(text: &str) -> bool {
    CRASHES.iter().any(|mark| text.contains(mark))
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crashed_kernel_differs_from_a_machine_that_cannot_start() {
        for text in [
            "the machine ended: [    1.9] Kernel panic - not syncing: Fatal exception",
            "not ready within 120 s; its console: [    2.1] Oops: 0002 [#1] PREEMPT SMP NOPTI",
            "[    2.1] note: swapper/0[1] exited with irqs disabled",
        ] {
            assert!(kernel_crashed(text), "{text}");
        }
        for text in [
            "qemu-system-x86_64: cannot set up guest memory",
            "not ready within 120 s; its console: ",
            "",
        ] {
            assert!(!kernel_crashed(text), "{text}");
        }
    }
}
