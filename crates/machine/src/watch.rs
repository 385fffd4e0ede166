//! Waits for the end of a machine, and finds its cause.

use crate::confine::lock_children;
use crate::lines::Lines;
use crate::progress::{Report, SupervisorError, report, system};
use crate::run_state::Ended;
use dayfly_machine_init::timespec;
use rustix::event::{PollFd, PollFlags, poll};
use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// If QEMU ends within this time after another child, QEMU's end counts as the cause.
const QEMU_FOLLOWS: Duration = Duration::from_millis(500);

/// How long QEMU may take to end after it has closed its devices.
const QEMU_ENDS: Duration = Duration::from_secs(15);

/// Interval at which the machine receives the host's time.
const TIME_EVERY: Duration = Duration::from_secs(30);

/// Waits for the machine's end and returns its cause.
pub(crate) fn wait_for_end(
    signals: &OwnedFd,
    control: &mut UnixStream,
    qemu_pid: u32,
    children: &BTreeMap<u32, String>,
    ready: &mut dyn FnMut() -> Result<(), SupervisorError>,
) -> Result<Ended, SupervisorError> {
    let mut lines = Lines::default();
    let mut control_open = true;
    let mut watch = Watch::default();
    let (mut is_ready, mut next_time) = (false, Instant::now() + TIME_EVERY);
    loop {
        let mut wait = vec![PollFd::new(signals, PollFlags::IN)];
        if control_open {
            wait.push(PollFd::new(&*control, PollFlags::IN));
        }
        let until = watch.lost.as_ref().map_or(next_time, |(until, _)| *until);
        match poll(&mut wait, Some(&timespec(until.saturating_duration_since(Instant::now())))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(system("poll")(e.into())),
        }
        if let Some((until, cause)) = &watch.lost
            && Instant::now() >= *until
        {
            return Ok(Ended::now(false, cause.clone()));
        }
        let (signalled, spoken) =
            (!wait[0].revents().is_empty(), wait.get(1).is_some_and(|w| !w.revents().is_empty()));
        drop(wait);
        if Instant::now() >= next_time {
            next_time = Instant::now() + TIME_EVERY;
            if is_ready {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                drop(control.write_all(format!("time {}\n", now.as_nanos()).as_bytes()));
            }
        }
        if spoken {
            let (new, open) = lines.read(control);
            control_open = open;
            for line in new {
                match line.split_once(' ').unwrap_or((&line, "")) {
                    ("phase", text) => report(&Report::Phase(text.to_owned())),
                    ("failed", text) => {
                        return Ok(Ended::now(
                            false,
                            format!("the machine's start failed: {text}"),
                        ));
                    }
                    ("ready", _) => {
                        ready()?;
                        (is_ready, next_time) = (true, Instant::now());
                    }
                    ("bye", _) => watch.bye = true,
                    _ => eprintln!("control line: unknown {line:?}"),
                }
            }
        }
        if signalled && let Some(end) = watch.signal(signals, control, qemu_pid, children)? {
            return Ok(end);
        }
    }
}

/// What the supervisor knows about the machine's end.
#[derive(Default)]
struct Watch {
    /// Whether the machine was asked to power off.
    asked: bool,
    /// Whether the machine said that it powers off.
    bye: bool,
    /// If a virtiofsd has ended: its end, and when that counts as the machine's end.
    lost: Option<(Instant, String)>,
}

impl Watch {
    /// Handles one signal. Returns the machine's end if QEMU has ended.
    fn signal(
        &mut self,
        signals: &OwnedFd,
        control: &mut UnixStream,
        qemu_pid: u32,
        children: &BTreeMap<u32, String>,
    ) -> Result<Option<Ended>, SupervisorError> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        rustix::io::read(signals, &mut info).map_err(|e| system("signalfd")(e.into()))?;
        let number = u32::from_ne_bytes(info[..4].try_into().unwrap_or_default());
        if i32::try_from(number).is_ok_and(|n| n != libc::SIGCHLD) {
            if !self.asked {
                self.asked = true;
                drop(control.write_all(b"poweroff\n"));
            }
            return Ok(None);
        }
        while let Some((pid, how)) = reap() {
            if pid == qemu_pid {
                // QEMU's end also ends virtiofsd, whose end may be seen first; QEMU's end is the
                // cause.
                return Ok(Some(if self.asked && self.bye {
                    Ended::now(true, "stopped".to_owned())
                } else {
                    Ended::now(false, format!("QEMU ended unexpectedly: {how}"))
                }));
            }
            if let Some(name) = children.get(&pid) {
                // virtiofsd ends with code 0 when QEMU has closed its connection. QEMU then still
                // takes a while to free its memory.
                let time_limit = if how == "code 0" { QEMU_ENDS } else { QEMU_FOLLOWS };
                self.lost.get_or_insert_with(|| {
                    (Instant::now() + time_limit, format!("{name} ended unexpectedly: {how}"))
                });
            }
        }
        Ok(None)
    }
}

/// Reaps one ended child or orphan, and says how it ended.
fn reap() -> Option<(u32, String)> {
    let mut status = 0;
    let _children = lock_children();
    // SAFETY: `status` outlives the call. `_children` keeps other threads from starting a child,
    // and so from waiting for one.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    let pid = u32::try_from(pid).ok().filter(|pid| *pid > 0)?;
    let how = if libc::WIFSIGNALED(status) {
        format!("signal {}", libc::WTERMSIG(status))
    } else {
        format!("code {}", libc::WEXITSTATUS(status))
    };
    Some((pid, how))
}
