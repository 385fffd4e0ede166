//! Starts a machine, again after each crash of its kernel during boot.

use crate::errors::StartError;
use crate::files::{self, FileError};
use crate::initramfs;
use crate::machine::Machine;
use crate::supervisor::{Ended, Orders, Report, Running};
use crate::{disk, qemu};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a running machine may take to answer, and to start its daemon again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of kernel crashes during boot that a start tolerates: it boots again after each.
const BOOT_CRASHES: u32 = 3;
/// Console texts that show a crash of the kernel or of a part of it. `oops=panic` turns a partial
/// crash into a panic, unless the kernel has stopped entirely.
const CRASHES: [&str; 4] =
    ["Kernel panic", "Oops: ", "exited with irqs disabled", "---[ end trace"];
/// How long the machine may take to become ready.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// How the program that uses this library starts itself again as the supervisor. With these words,
/// the program must call [`crate::supervisor_main`] with the argument that follows them.
#[derive(Debug, Clone)]
pub struct Reexec {
    /// Path of the program, usually `/proc/self/exe`.
    pub program: PathBuf,
    /// The first arguments, e.g. `["machine", "supervise"]`.
    pub words: Vec<OsString>,
}

/// The result of [`Machine::start`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Started {
    /// The machine was running already.
    WasRunning,
    /// The machine was started.
    Fresh {
        /// Milliseconds from the supervisor's start until the machine was ready.
        boot_ms: u64,
        /// Why a running machine was restarted, if one was.
        replaced: Option<String>,
    },
}

/// The result of waiting for a machine that seems to run.
enum Found {
    Ready,
    Gone,
    Silent,
}

impl Machine {
    /// Starts the machine. Returns when the machine answers, and its daemon too, if one is
    /// configured. A running machine is restarted only if its build (kernel, programs, settings),
    /// its CPUs or its memory have changed.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running.
    pub fn start(
        &self,
        reexec: &Reexec,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Started, StartError> {
        let _lock = self.command(progress)?;
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
            progress(&format!(
                "{} is gone; the machine runs the copy from its last build",
                path.display()
            ));
        }
        let mut replaced = None;
        if self.alive() {
            let running: Option<Running> = files::read_json(&self.layout.running())?;
            let reason = running.and_then(|running| self.difference(&running, &build));
            replaced = match reason {
                Some(reason) => Some(reason),
                None => match self.wait_ready()? {
                    Found::Ready => return Ok(Started::WasRunning),
                    Found::Gone => None,
                    Found::Silent => Some("it did not answer".to_owned()),
                },
            };
            if let Some(reason) = &replaced {
                progress(&format!("restarting the machine: {reason}"));
            }
            self.stop_locked(Duration::from_secs(20))?;
        }
        if qemu::find_qemu().is_none() {
            return Err(StartError::Missing {
                program: "qemu-system-x86_64",
                package: "qemu-system-x86",
            });
        }
        self.sweep_locked()?;
        self.check_disk(progress)?;
        self.turn_logs()?;
        let begun = Instant::now();
        // QEMU's emulation (7.2) has a race if a kernel patches code that another CPU runs, and a
        // booting kernel does.
        let mut crashes_left = BOOT_CRASHES;
        let orders = Orders {
            folder: self.layout.folder.clone(),
            options: self.options.clone(),
            shares,
            build_digest: build.digest,
        };
        while let Err(error) = self.launch(reexec, &orders, progress) {
            if crashes_left == 0 || !kernel_crashed(&error.to_string()) {
                return Err(error);
            }
            crashes_left -= 1;
            progress("the machine's kernel crashed during boot under emulation; starting again");
            self.sweep_locked()?;
        }
        Ok(Started::Fresh { boot_ms: millis(begun.elapsed()), replaced })
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

    /// Waits until a machine with a live supervisor is ready. The supervisor may have been killed a
    /// moment ago. The machine may also boot by itself, if the command that started it was killed.
    fn wait_ready(&self) -> Result<Found, StartError> {
        let boot = Instant::now() + START_TIMEOUT;
        let mut answer = None;
        while self.alive() {
            let running: Option<Running> = files::read_json(&self.layout.running())?;
            let ready = running.is_some_and(|r| r.ready);
            if ready {
                let deadline = *answer.get_or_insert_with(|| Instant::now() + ANSWER_TIMEOUT);
                let daemon = match self.ask_status() {
                    Ok(_) if self.options.daemon.is_none() => return Ok(Found::Ready),
                    Ok(status) => status.daemon.unwrap_or_default(),
                    Err(_) if Instant::now() > deadline => return Ok(Found::Silent),
                    Err(_) => {
                        std::thread::sleep(Duration::from_millis(50));
                        continue;
                    }
                };
                if daemon.answering {
                    return Ok(Found::Ready);
                }
                if Instant::now() > deadline {
                    // The machine's VMs may still run, so this command must not end them.
                    let last = daemon.last_end.unwrap_or_else(|| "it has not ended yet".to_owned());
                    let cause = format!(
                        "its daemon does not answer (started again {} times; {last})",
                        daemon.restarts
                    );
                    return Err(self.failed(cause));
                }
            } else if Instant::now() > boot {
                return Ok(Found::Silent);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(Found::Gone)
    }

    /// The error for a failed start, with the last lines of the logs.
    fn failed(&self, cause: String) -> StartError {
        let tail =
            [self.layout.console_log(), self.layout.daemon_log()].map(|log| {
                match files::tail(&log, 20) {
                    text if text.is_empty() => String::new(),
                    text => format!("\n--- last lines of {}:\n{text}", log.display()),
                }
            });
        StartError::Failed { cause, tail: tail.concat() }
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
