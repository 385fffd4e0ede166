//! The server: brings the machine up, then answers the host.

use crate::boot::{self, BootError, say};
use crate::daemon::Keeper;
use crate::steady;
use crate::{exec, status};
use dayfly_machine::guest::{
    API_PORT, CONTROL_PORT_NAME, DAEMON_SOCKET, EXEC_PORT, GUEST_CONFIG_PATH, GuestConfig, Kind,
    LOG_PORT_NAME, Request, join_streams, read_frame, widen, write_frame,
};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long a request waits for a daemon that is being started.
const DAEMON_PATIENCE: Duration = Duration::from_secs(30);
/// A daemon that ended this often before it ever answered will not.
const HOPELESS_RESTARTS: u32 = 5;
/// How many connections may wait to be accepted.
const BACKLOG: i32 = 1024;
/// How long processes have to end by themselves when the machine powers off.
const FAREWELL: Duration = Duration::from_secs(5);

/// Opens a virtio-serial port by its name.
fn port(name: &str) -> io::Result<File> {
    for entry in fs::read_dir("/sys/class/virtio-ports")? {
        let entry = entry?;
        if fs::read_to_string(entry.path().join("name")).is_ok_and(|n| n.trim() == name) {
            return File::options()
                .read(true)
                .write(true)
                .open(format!("/dev/{}", entry.file_name().to_string_lossy()));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("no virtio-serial port named {name}")))
}

/// One line to the supervisor, from a process that has not opened the port yet.
pub(crate) fn tell_host(line: &str) {
    if let Ok(mut control) = port(CONTROL_PORT_NAME) {
        drop(writeln!(control, "{}", line.replace('\n', " ")));
    }
}

/// Brings the machine up and serves until the host says `poweroff`.
pub(crate) fn run() -> Result<(), BootError> {
    let text = fs::read_to_string(GUEST_CONFIG_PATH).map_err(|e| BootError::new(GUEST_CONFIG_PATH, e))?;
    let config: GuestConfig =
        serde_json::from_str(&text).map_err(|e| BootError::new(GUEST_CONFIG_PATH, io::Error::from(e)))?;
    // When memory runs out, whatever runs for the host is worth less than reaching the machine.
    drop(fs::write("/proc/self/oom_score_adj", "-1000"));
    rustix::system::sethostname(config.hostname.as_bytes()).map_err(|e| BootError::new("hostname", e))?;
    let mut control = port(CONTROL_PORT_NAME).map_err(|e| BootError::new("control line", e))?;
    let mut phase = |text: &str| drop(control.write_all(format!("phase {text}\n").as_bytes()));
    phase("loading modules");
    boot::modules(&config)?;
    // A machine without KVM is still a machine: its owner is told by `status`.
    let _held =
        steady::hold().inspect_err(|e| say(&format!("holding a VM for steady kernel code: {e}"))).ok();
    phase("mounting the disk");
    boot::disk()?;
    fs::create_dir_all("/run/dayfly").map_err(|e| BootError::new("/run/dayfly", e))?;
    let keeper = Keeper::default();
    if let Some(daemon) = config.daemon.clone() {
        keeper.keep(daemon, port(LOG_PORT_NAME).ok());
    }
    phase("starting the network");
    boot::network()?;
    listen(API_PORT, |stream| drop(to_daemon(&stream)))?;
    let with_daemon = config.daemon.is_some().then(|| keeper.clone());
    listen(EXEC_PORT, move |stream| {
        if let Err(e) = answer(stream, with_daemon.as_ref()) {
            say(&format!("a request of the host: {e}"));
        }
    })?;
    phase("mounting the host's files");
    if let Err(e) = boot::host_files(&config) {
        say(&e.to_string());
    }
    if config.daemon.is_some() {
        phase("waiting for the daemon");
        loop {
            let daemon = keeper.status();
            if daemon.answering {
                break;
            }
            if daemon.restarts >= HOPELESS_RESTARTS {
                let last = daemon.last_end.unwrap_or_default();
                let step = format!(
                    "the daemon did not answer and was started {} times, the last one",
                    daemon.restarts
                );
                return Err(BootError::new(step, io::Error::other(last)));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    // A crash while it boots is the end, and it is booted again (`oops=panic`); from now on there are VMs that it need not take along.
    drop(fs::write("/proc/sys/kernel/panic_on_oops", "0"));
    // A CPU that schedules nobody is said to do so, with where it is, after 4 s instead of 20: it happens here, and is not understood.
    drop(fs::write("/proc/sys/kernel/watchdog_thresh", "2"));
    control.write_all(b"ready\n").map_err(|e| BootError::new("control line", e))?;
    let reader = control.try_clone().map_err(|e| BootError::new("control line", e))?;
    for line in BufReader::new(reader).lines() {
        let line = line.map_err(|e| BootError::new("control line", e))?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("poweroff", _) => break,
            ("time", text) => {
                if let Err(e) = status::set_time(text) {
                    say(&format!("setting the clock: {e}"));
                }
            }
            _ => say(&format!("control line: unknown {line:?}")),
        }
    }
    keeper.retire();
    power_off(&mut control);
    Ok(())
}

fn listen(port: u16, serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Result<(), BootError> {
    let fail = |e: io::Error| BootError::new(format!("TCP port {port}"), e);
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).map_err(fail)?;
    // Again, for a longer queue than the library's: a SYN that finds it full is tried again only after a second.
    rustix::net::listen(&listener, BACKLOG).map_err(|e| fail(e.into()))?;
    let serve = std::sync::Arc::new(serve);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            drop(stream.set_nodelay(true));
            widen(&stream);
            let serve = std::sync::Arc::clone(&serve);
            let thread = std::thread::Builder::new().stack_size(256 << 10);
            if let Err(e) = thread.spawn(move || serve(stream)) {
                say(&format!("a connection of the host: {e}"));
            }
        }
    });
    Ok(())
}

/// Joins a connection with the daemon, and waits for one that is just being started.
fn to_daemon(stream: &TcpStream) -> io::Result<()> {
    let deadline = Instant::now() + DAEMON_PATIENCE;
    let daemon = loop {
        match UnixStream::connect(DAEMON_SOCKET) {
            Ok(daemon) => break daemon,
            Err(e) if Instant::now() > deadline => return Err(e),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    widen(&daemon);
    join_streams(stream, &daemon)
}

fn answer(mut stream: TcpStream, keeper: Option<&Keeper>) -> io::Result<()> {
    let Some((kind, body)) = read_frame(&mut stream)? else { return Ok(()) };
    let request = match kind {
        Kind::Request => serde_json::from_slice(&body).map_err(|e| e.to_string()),
        other => Err(format!("first frame: expected a request, got {other:?}")),
    };
    match request {
        Ok(Request::Status) => {
            let status = serde_json::to_vec(&status::read(keeper.map(Keeper::status)))?;
            write_frame(&mut stream, Kind::Status, &status)
        }
        Ok(Request::Exec(spec)) => exec::run(&stream, &spec),
        Err(text) => write_frame(&mut stream, Kind::Failed, text.as_bytes()),
    }
}

/// Whether any process besides PID 1, this one and the kernel's is left.
fn others_left() -> bool {
    let Ok(entries) = fs::read_dir("/proc") else { return false };
    entries.flatten().any(|entry| {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { return false };
        // Kernel threads have no command line; zombies have none either and need no time.
        pid != 1
            && pid != std::process::id()
            && fs::read(entry.path().join("cmdline")).is_ok_and(|c| !c.is_empty())
    })
}

fn power_off(control: &mut File) {
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        // SAFETY: kill(2) takes no pointers; -1 means all but PID 1 and the caller.
        unsafe { libc::kill(-1, signal) };
        let deadline = Instant::now() + FAREWELL;
        while others_left() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    for at in ["/host/var/lib/dayfly", "/var/lib/dayfly"] {
        if let Err(e) = rustix::mount::unmount(at, rustix::mount::UnmountFlags::empty()) {
            say(&format!("unmounting {at}: {e}"));
        }
    }
    rustix::fs::sync();
    drop(control.write_all(b"bye\n"));
    // The port's driver hands the line over before write returns, so nothing is lost by ending now.
    boot::end(libc::RB_POWER_OFF);
}
