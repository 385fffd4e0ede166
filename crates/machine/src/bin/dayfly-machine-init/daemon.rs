//! Starts the daemon, and again whenever it ends.

use crate::boot::say;
use dayfly_machine::guest::{DAEMON_SOCKET, DaemonConfig, DaemonStatus};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A daemon that lived this long is started again without delay.
const STEADY: Duration = Duration::from_secs(5);
/// The longest pause before the next attempt.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// The daemon's state, shared with those who report it.
#[derive(Clone, Default)]
pub(crate) struct Keeper {
    state: Arc<Mutex<(DaemonStatus, bool)>>,
}

impl Keeper {
    pub(crate) fn status(&self) -> DaemonStatus {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    fn change(&self, change: impl FnOnce(&mut DaemonStatus)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner).0);
    }

    /// From now on an ended daemon stays down.
    pub(crate) fn retire(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
    }

    fn retired(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Keeps the daemon running in a thread of its own; its output goes to `log`, or the console without one.
    pub(crate) fn keep(&self, config: DaemonConfig, log: Option<File>) {
        let keeper = self.clone();
        std::thread::spawn(move || {
            let mut pause = Duration::from_millis(50);
            while !keeper.retired() {
                let begun = Instant::now();
                let end = keeper.run_once(&config, log.as_ref());
                if keeper.retired() {
                    return;
                }
                say(&format!("{}: {end}; starting it again", config.argv.first().map_or("", String::as_str)));
                keeper.change(|status| {
                    status.restarts = status.restarts.saturating_add(1);
                    status.last_end = Some(end);
                });
                pause = if begun.elapsed() > STEADY {
                    Duration::from_millis(50)
                } else {
                    (pause * 2).min(MAX_PAUSE)
                };
                std::thread::sleep(pause);
            }
        });
    }

    fn run_once(&self, config: &DaemonConfig, log: Option<&File>) -> String {
        let Some((program, arguments)) = config.argv.split_first() else {
            return "no program given".to_owned();
        };
        let output = || log.and_then(|l| l.try_clone().ok()).map_or_else(Stdio::inherit, Stdio::from);
        // A socket file of the last daemon would make it look alive.
        drop(fs::remove_file(DAEMON_SOCKET));
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(config.env.iter().cloned())
            .stdin(Stdio::null())
            .stdout(output())
            .stderr(output());
        command.process_group(0);
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(e) => return format!("could not be started: {e}"),
        };
        crate::boot::expendable(child.id());
        self.change(|status| status.pid = Some(child.id()));
        let watcher = self.clone();
        let pid = child.id();
        std::thread::spawn(move || watcher.watch(pid));
        let end = child.wait();
        self.change(|status| {
            status.pid = None;
            status.answering = false;
        });
        match end {
            Ok(status) => match status.signal() {
                Some(signal) => format!("ended by signal {signal}"),
                None => format!("ended with code {}", status.code().unwrap_or(-1)),
            },
            Err(e) => format!("lost: {e}"),
        }
    }

    /// Asks until the daemon with this pid answers or is gone.
    fn watch(&self, pid: u32) {
        while self.status().pid == Some(pid) {
            if answers() {
                self.change(|status| status.answering = status.pid == Some(pid));
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Whether something at the daemon's socket speaks HTTP.
fn answers() -> bool {
    let ask = || -> io::Result<bool> {
        let mut stream = UnixStream::connect(DAEMON_SOCKET)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: dayfly\r\nconnection: close\r\n\r\n")?;
        let mut start = [0; 5];
        stream.read_exact(&mut start)?;
        Ok(&start == b"HTTP/")
    };
    ask().unwrap_or(false)
}
