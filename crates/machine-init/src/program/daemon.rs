//! Starts the daemon, and starts it again whenever it ends.

use crate::boot::say;
use dayfly_machine_init::{DAEMON_SOCKET, DaemonConfig, DaemonStatus};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A daemon that lived this long is started again without delay.
const STEADY: Duration = Duration::from_secs(5);
/// Longest pause before the next attempt.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Deadline for a daemon's answer. It is shorter than the host's deadline for the status.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// The daemon's state, shared with the threads that report it.
#[derive(Clone, Default)]
pub(crate) struct Keeper {
    state: Arc<Mutex<(DaemonStatus, bool)>>,
}

impl Keeper {
    pub(crate) fn status(&self) -> DaemonStatus {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// The daemon's state, with the result of a request made now. A daemon whose threads all hang
    /// still has a socket, and the kernel accepts connections for it.
    pub(crate) fn ask(&self) -> DaemonStatus {
        let answering = self.status().pid.is_some() && answers(DAEMON_SOCKET, ANSWER_DEADLINE);
        let status = self.status();
        // The daemon may have ended and started again meanwhile.
        DaemonStatus { answering: answering && status.pid.is_some(), ..status }
    }

    fn change(&self, change: impl FnOnce(&mut DaemonStatus)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner).0);
    }

    /// Stops the restarts: a daemon that ends stays down.
    pub(crate) fn retire(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
    }

    fn retired(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Keeps the daemon running, from a separate thread. The daemon's output goes to `log`, or to
    /// the console if `log` is `None`.
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
                say(&format!(
                    "{}: {end}; starting it again",
                    config.argv.first().map_or("", String::as_str)
                ));
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
        let output =
            || log.and_then(|l| l.try_clone().ok()).map_or_else(Stdio::inherit, Stdio::from);
        // A socket file of the last daemon would make the daemon look alive.
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

    /// Asks until the daemon with this pid answers or has ended.
    fn watch(&self, pid: u32) {
        while self.status().pid == Some(pid) {
            if answers(DAEMON_SOCKET, ANSWER_DEADLINE) {
                self.change(|status| status.answering = status.pid == Some(pid));
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Whether the daemon at this socket answers a request. `within` limits each step.
fn answers(socket_path: &str, within: Duration) -> bool {
    let ask = || -> io::Result<bool> {
        // The deadline must hold for connect(2) too, which blocks if the daemon accepts nothing.
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        for timeout in [sockopt::Timeout::Send, sockopt::Timeout::Recv] {
            sockopt::set_socket_timeout(&socket, timeout, Some(within))?;
        }
        connect(&socket, &SocketAddrUnix::new(socket_path)?)?;
        let mut stream = UnixStream::from(socket);
        stream.write_all(b"GET /v1/info HTTP/1.1\r\nhost: dayfly\r\nconnection: close\r\n\r\n")?;
        let mut start = [0; 5];
        stream.read_exact(&mut start)?;
        Ok(&start == b"HTTP/")
    };
    ask().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// Threads of a busy host may stand still for seconds.
    const LONG: Duration = Duration::from_secs(240);

    #[test]
    fn a_daemon_answers_only_if_it_says_so_not_if_its_socket_takes_connections() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let text = path.to_str().unwrap();
        assert!(!answers(text, ANSWER_DEADLINE), "no socket");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for answer in [&b"HTTP/1.1 200 OK\r\n\r\n"[..], b"nonsense", b"HTT", b""] {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut request = Vec::new();
                    while !request.ends_with(b"\r\n\r\n") {
                        let mut byte = [0];
                        stream.read_exact(&mut byte).unwrap();
                        request.push(byte[0]);
                    }
                    stream.write_all(answer).unwrap();
                }
            });
            assert!(answers(text, LONG));
            for other in ["other bytes", "fewer bytes", "none"] {
                assert!(!answers(text, LONG), "{other}");
            }
        });
        // No process accepts: the connection succeeds, and no answer comes.
        assert!(!answers(text, Duration::from_millis(10)), "a daemon that hangs");
    }
}
