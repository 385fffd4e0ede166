//! The server: brings the machine up, then answers the host.

use crate::boot::{self, BootError, say};
use crate::daemon::Keeper;
use crate::steady;
use crate::{control, exec, status, uplink};
use dayfly_machine_init::{
    CONTROL_PORT_NAME, DAEMON_SOCKET, GUEST_CONFIG_PATH, GuestConfig, GuestShare, Kind,
    LOG_PORT_NAME, MAX_API_CONNECTIONS, MAX_EXEC_CONNECTIONS, MAX_PORTS_CONNECTIONS,
    MAX_RELAY_CONNECTIONS, PORTS_SOCKET, Request, Root, TOKEN_DEADLINE, Token, join_streams,
    read_frame, widen, write_frame,
};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long a request waits for a daemon that is starting.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of restarts, without one answer, after which the daemon counts as broken.
const HOPELESS_RESTARTS: u32 = 5;
/// How long processes have to end by themselves when the machine powers off.
const FAREWELL: Duration = Duration::from_secs(5);

/// The answer to a program that asks for the host's folders in a machine without shares.
const NO_SHARES: &str = "no folder of the host is shared with it; share one, e.g. /usr: \
    dayfly machine init --share usr=/usr";

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

/// Sends one line to the supervisor, from a process that has not opened the port yet.
pub(crate) fn send_to_host(line: &str) {
    if let Ok(mut control) = port(CONTROL_PORT_NAME) {
        drop(writeln!(control, "{}", line.replace('\n', " ")));
    }
}

/// Reads the token, which is the first line of the supervisor.
fn read_token(orders: &mut impl BufRead) -> Result<Token, BootError> {
    const LINE_BYTES: u64 = 256;
    let wrong = |e| BootError::new("control line: the token", e);
    let mut line = String::new();
    orders.take(LINE_BYTES).read_line(&mut line).map_err(wrong)?;
    let expected = || io::Error::new(io::ErrorKind::InvalidData, "expected \"token HEX\" first");
    let token = line.trim_end().strip_prefix("token ").ok_or_else(expected).map_err(wrong)?;
    Token::from_hex(token).map_err(wrong)
}

/// Brings the machine up and serves until the host sends `poweroff`.
pub(crate) fn run() -> Result<(), BootError> {
    let text =
        fs::read_to_string(GUEST_CONFIG_PATH).map_err(|e| BootError::new(GUEST_CONFIG_PATH, e))?;
    let config: GuestConfig = serde_json::from_str(&text)
        .map_err(|e| BootError::new(GUEST_CONFIG_PATH, io::Error::from(e)))?;
    // When memory runs out, the programs that run for the host must die before this server.
    drop(fs::write("/proc/self/oom_score_adj", "-1000"));
    rustix::system::sethostname(config.hostname.as_bytes())
        .map_err(|e| BootError::new("hostname", e))?;
    let line = |e| BootError::new("control line", e);
    let mut control = port(CONTROL_PORT_NAME).map_err(line)?;
    let mut orders = BufReader::new(control.try_clone().map_err(line)?);
    let token = read_token(&mut orders)?;
    let mut phase = |text: &str| drop(control.write_all(format!("phase {text}\n").as_bytes()));
    phase("loading modules");
    boot::modules(&config)?;
    // A machine without KVM still serves; `status` reports the missing KVM to its owner.
    let _held = steady::hold()
        .inspect_err(|e| say(&format!("holding a VM for steady kernel code: {e}")))
        .ok();
    // The network comes before the daemon, so that no VM is ever in one namespace with the
    // interface.
    phase("starting the network");
    let listeners = control::network()?;
    if config.uplink {
        uplink::bring_up()?;
    }
    phase("mounting the disk");
    boot::disk()?;
    fs::create_dir_all("/run/dayfly").map_err(|e| BootError::new("/run/dayfly", e))?;
    let keeper = Keeper::default();
    if let Some(daemon) = config.daemon.clone() {
        keeper.keep(daemon, port(LOG_PORT_NAME).ok());
    }
    let api = |stream: TcpStream| drop(to_daemon(&stream, DAEMON_SOCKET));
    control::serve(listeners.api, token.clone(), MAX_API_CONNECTIONS, api);
    let ports = |stream: TcpStream| drop(to_daemon(&stream, PORTS_SOCKET));
    control::serve(listeners.ports, token.clone(), MAX_PORTS_CONNECTIONS, ports);
    let relays = |stream: TcpStream| drop(to_port(&stream));
    control::serve(listeners.relay, token.clone(), MAX_RELAY_CONNECTIONS, relays);
    let with_daemon = config.daemon.is_some().then(|| keeper.clone());
    let shares = config.shares.clone();
    control::serve(listeners.exec, token, MAX_EXEC_CONNECTIONS, move |stream| {
        if let Err(e) = answer(stream, &shares, with_daemon.as_ref()) {
            say(&format!("a request of the host: {e}"));
        }
    });
    phase("mounting the host's folders");
    boot::shares(&config)?;
    if config.daemon.is_some() {
        phase("waiting for the daemon");
        wait_for_daemon(&keeper)?;
    }
    // While the machine boots, `oops=panic` makes a crash end the machine, and the host boots it
    // again. From now on VMs run, and an oops must not end them.
    drop(fs::write("/proc/sys/kernel/panic_on_oops", "0"));
    // The watchdog reports a CPU that schedules nothing, with its place in the code, after 4 s
    // instead of 20. Such stalls happen under emulation, and their cause is unknown.
    drop(fs::write("/proc/sys/kernel/watchdog_thresh", "2"));
    control.write_all(b"ready\n").map_err(line)?;
    obey(orders)?;
    keeper.retire();
    power_off(&mut control);
    Ok(())
}

/// Waits until the daemon answers.
fn wait_for_daemon(keeper: &Keeper) -> Result<(), BootError> {
    loop {
        let daemon = keeper.status();
        if daemon.answering {
            return Ok(());
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

/// Carries out the host's lines until `poweroff`.
fn obey(orders: impl BufRead) -> Result<(), BootError> {
    for line in orders.lines() {
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
    Ok(())
}

/// Joins a connection with the daemon. Waits if the daemon is just starting.
fn to_daemon(stream: &TcpStream, socket: &str) -> io::Result<()> {
    let deadline = Instant::now() + DAEMON_TIMEOUT;
    let daemon = loop {
        match UnixStream::connect(socket) {
            Ok(daemon) => break daemon,
            Err(e) if Instant::now() > deadline => return Err(e),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    widen(&daemon);
    join_streams(stream, &daemon)
}

/// Joins a connection with the port of the loopback that it names.
fn to_port(mut stream: &TcpStream) -> io::Result<()> {
    let mut port = [0; 2];
    stream.set_read_timeout(Some(TOKEN_DEADLINE))?;
    stream.read_exact(&mut port)?;
    stream.set_read_timeout(None)?;
    let daemon = TcpStream::connect((Ipv4Addr::LOCALHOST, u16::from_be_bytes(port)))?;
    daemon.set_nodelay(true)?;
    join_streams(stream, &daemon)
}

fn answer(mut stream: TcpStream, shares: &[GuestShare], keeper: Option<&Keeper>) -> io::Result<()> {
    let Some((kind, body)) = read_frame(&mut stream)? else { return Ok(()) };
    let request = match kind {
        Kind::Request => serde_json::from_slice(&body).map_err(|e| e.to_string()),
        other => Err(format!("first frame: expected a request, got {other:?}")),
    };
    match request {
        Ok(Request::Status) => {
            let status = serde_json::to_vec(&status::read(shares, keeper.map(Keeper::ask)))?;
            write_frame(&mut stream, Kind::Status, &status)
        }
        Ok(Request::Exec(spec)) if spec.root == Root::Host && shares.is_empty() => {
            write_frame(&mut stream, Kind::Failed, NO_SHARES.as_bytes())
        }
        Ok(Request::Exec(spec)) => exec::run(&stream, &spec),
        Err(text) => write_frame(&mut stream, Kind::Failed, text.as_bytes()),
    }
}

/// Whether any process is left besides PID 1, this process and kernel threads.
fn others_left() -> bool {
    let Ok(entries) = fs::read_dir("/proc") else { return false };
    entries.flatten().any(|entry| {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else {
            return false;
        };
        // Kernel threads have no command line. Zombies have none either, and need no waiting.
        pid != 1
            && pid != std::process::id()
            && fs::read(entry.path().join("cmdline")).is_ok_and(|c| !c.is_empty())
    })
}

fn power_off(control: &mut File) {
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        // SAFETY: kill(2) takes no pointers; -1 means all processes except PID 1 and the caller.
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
    // The port's driver hands the line over before write returns, so ending now loses nothing.
    boot::end(libc::RB_POWER_OFF);
}
