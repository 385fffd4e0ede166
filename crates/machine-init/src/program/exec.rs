//! Runs one program for the host, with pipes or a pseudo-terminal.

use dayfly_machine_init::{ExecSpec, Exit, Kind, Root, WindowSize, read_frame, write_frame};
use rustix::event::{PollFd, PollFlags, poll};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

/// The longest that a host keeps the connection after it was sent the exit.
const LINGER: Duration = Duration::from_secs(10);

/// The init's ends of the program's standard streams.
struct Ends {
    stdin: Option<File>,
    /// Standard output (or the terminal), and standard error.
    outputs: Vec<(Kind, File)>,
    terminal: Option<File>,
}

/// Runs the program and sends its output and its exit to the host. If the host disconnects, the
/// program and its session are killed and an error is returned.
pub(crate) fn run(stream: &TcpStream, spec: &ExecSpec) -> io::Result<()> {
    let (mut child, ends) = match start(spec) {
        Ok(started) => started,
        Err(e) => {
            let program = spec.argv.first().map_or("", String::as_str);
            return write_frame(&mut &*stream, Kind::Failed, format!("{program}: {e}").as_bytes());
        }
    };
    let group = i32::try_from(child.id()).unwrap_or(0);
    let out = Mutex::new(stream);
    let send = |kind, body: &[u8]| {
        write_frame(&mut *out.lock().unwrap_or_else(PoisonError::into_inner), kind, body)
    };
    let send = &send;
    // True once the program has been waited for: another process may then have its process id.
    let gone = Mutex::new(false);
    let gone = &gone;
    std::thread::scope(|scope| {
        let input = stream.try_clone()?;
        let Ends { stdin, outputs, terminal } = ends;
        let (ends_with_input, input_ended) = mpsc::channel::<()>();
        scope.spawn(move || {
            let _dropped_at_the_end = ends_with_input;
            let ended = take_input(input, stdin, terminal.as_ref());
            let gone = gone.lock().unwrap_or_else(PoisonError::into_inner);
            if ended.is_err() && !*gone && group > 0 {
                // SAFETY: kill(2) takes no pointers. The child leads this group. `gone` is false
                // under its lock, so the child has not been waited for, and no other group can have
                // this id.
                unsafe { libc::kill(-group, libc::SIGKILL) };
            }
        });
        let pumps: Vec<_> = outputs
            .into_iter()
            .map(|(kind, mut file)| {
                scope.spawn(move || -> io::Result<()> {
                    let mut buffer = vec![0; 64 << 10];
                    loop {
                        match file.read(&mut buffer) {
                            Ok(0) => return Ok(()),
                            // The last process that used the terminal has closed it.
                            Err(e) if e.raw_os_error() == Some(libc::EIO) => return Ok(()),
                            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                                poll(&mut [PollFd::new(&file, PollFlags::IN)], None)?;
                            }
                            Err(e) => return Err(e),
                            Ok(count) => send(kind, &buffer[..count])?,
                        }
                    }
                })
            })
            .collect();
        for pump in pumps {
            drop(pump.join());
        }
        let pid = rustix::process::Pid::from_child(&child);
        let peek = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        let _ = rustix::process::waitid(rustix::process::WaitId::Pid(pid), peek);
        *gone.lock().unwrap_or_else(PoisonError::into_inner) = true;
        let exit = child.wait().map(|status| match status.signal() {
            Some(signal) => Exit::Signal(signal),
            None => Exit::Code(status.code().unwrap_or(-1)),
        });
        let sent = match exit {
            Ok(exit) => send(Kind::Exit, &serde_json::to_vec(&exit)?),
            Err(e) => send(Kind::Failed, e.to_string().as_bytes()),
        };
        // The host may still send input. If this end closed before it had read that, the connection
        // would be reset, and the exit could be lost on its way. So the input thread reads on until
        // the host, which now has the exit, disconnects.
        drop(stream.shutdown(Shutdown::Write));
        let _disconnected = input_ended.recv_timeout(LINGER);
        drop(stream.shutdown(Shutdown::Both));
        sent
    })
}

/// Feeds the program until the host disconnects, which is reported as an error.
fn take_input(
    mut stream: TcpStream,
    mut stdin: Option<File>,
    terminal: Option<&File>,
) -> io::Result<()> {
    loop {
        match read_frame(&mut stream)? {
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some((Kind::Stdin, body)) => {
                // A program that stops reading its input is no error.
                if let Some(file) = &mut stdin
                    && !feed(file, &body, &stream)?
                {
                    stdin = None;
                }
            }
            Some((Kind::StdinEnd, _)) => stdin = None,
            Some((Kind::Resize, body)) => {
                if let (Some(terminal), Ok(size)) =
                    (terminal, serde_json::from_slice::<WindowSize>(&body))
                {
                    drop(resize(terminal, size));
                }
            }
            Some((kind, _)) => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("unexpected frame {kind:?}"),
                ));
            }
        }
    }
}

/// Writes to a program that may never read, and detects meanwhile that the host has disconnected.
/// Returns false if the program reads no more.
fn feed(file: &mut File, mut bytes: &[u8], stream: &TcpStream) -> io::Result<bool> {
    while !bytes.is_empty() {
        let mut wait = [PollFd::new(file, PollFlags::OUT), PollFd::new(stream, PollFlags::RDHUP)];
        poll(&mut wait, None)?;
        if wait[1].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        match file.write(bytes) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(e)
                if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => return Ok(false),
        }
    }
    Ok(true)
}

fn resize(terminal: &File, size: WindowSize) -> io::Result<()> {
    let size = rustix::termios::Winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}

fn start(spec: &ExecSpec) -> io::Result<(Child, Ends)> {
    let (program, arguments) = spec
        .argv
        .split_first()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "no program given"))?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/root")
        .env("TERM", "linux")
        .envs(spec.env.iter().cloned());
    let nul = |e: std::ffi::NulError| io::Error::from(e);
    let root = match spec.root {
        Root::Machine => None,
        Root::Host => Some(c"/host".to_owned()),
    };
    let folder = std::ffi::CString::new(spec.cwd.as_deref().unwrap_or("/")).map_err(nul)?;
    let with_terminal = spec.tty.is_some();
    // SAFETY: between fork and exec the child makes only async-signal-safe system calls, on strings
    // that were allocated before.
    unsafe {
        command.pre_exec(move || {
            let check = |result: libc::c_int| {
                if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
            };
            check(libc::setsid())?;
            if with_terminal {
                check(libc::ioctl(0, libc::TIOCSCTTY, 0))?;
            }
            if let Some(root) = &root {
                check(libc::chroot(root.as_ptr()))?;
            }
            check(libc::chdir(folder.as_ptr()))
        });
    }
    let Some(size) = spec.tty else {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        crate::boot::expendable(child.id());
        let stdin = child.stdin.take().map(|f| File::from(OwnedFd::from(f)));
        if let Some(file) = &stdin {
            rustix::io::ioctl_fionbio(file.as_fd(), true)?;
        }
        let stdout = child.stdout.take().map(|f| (Kind::Stdout, File::from(OwnedFd::from(f))));
        let stderr = child.stderr.take().map(|f| (Kind::Stderr, File::from(OwnedFd::from(f))));
        let outputs = stdout.into_iter().chain(stderr).collect();
        return Ok((child, Ends { stdin, outputs, terminal: None }));
    };
    let master = rustix::pty::openpt(
        rustix::pty::OpenptFlags::RDWR
            | rustix::pty::OpenptFlags::NOCTTY
            | rustix::pty::OpenptFlags::CLOEXEC,
    )?;
    rustix::pty::unlockpt(&master)?;
    let slave = rustix::pty::ioctl_tiocgptpeer(
        &master,
        rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY,
    )?;
    let master = File::from(master);
    rustix::io::ioctl_fionbio(&master, true)?;
    resize(&master, size)?;
    command.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave);
    let child = command.spawn()?;
    crate::boot::expendable(child.id());
    drop(command);
    let ends = Ends {
        stdin: Some(master.try_clone()?),
        outputs: vec![(Kind::Stdout, master.try_clone()?)],
        terminal: Some(master),
    };
    Ok((child, ends))
}
