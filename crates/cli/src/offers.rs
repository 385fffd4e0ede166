//! Folders of this host for VMs in the machine.
//!
//! The machine has no access to this host's files. So for each `-v FOLDER:PATH` a process of this
//! user stays behind that offers the folder to the machine's daemon, and starts `dayfly-volume` for
//! each stream that the daemon asks for. The folder is chosen here, by the command line of this
//! user, and never by the machine, which may have been taken over.
//!
//! ```text
//! dayfly run ──starts──▶ dayfly volume-keep ──offers──▶ daemon in the machine
//!     ◀─────── "ready" ──────┘      │ ◀── "STREAM" ───────┘
//!                                   └─▶ dayfly-volume ═══ STREAM ═══▶ guest
//! ```
//!
//! The machine's supervisor, which is not in the machine, lets in at most 1,024 connections at a
//! time. Each offer and each stream has one, so there are no more servers than that.
//!
//! The process ends when the daemon says that no VM has the folder any more, or when the daemon
//! cannot be connected for a minute. Its standard input is a pipe that `dayfly` keeps open: when
//! that ends, with or without a VM, the daemon need not wait for a first VM any more. Servers that
//! it started go on with their streams.

use crate::home::program;
use anyhow::{Context, Result, bail};
use dayfly_api::types::{UPGRADE_VOLUME, VolumeOffer, VolumeRequest, VolumeSource};
use dayfly_units::sync::lock;
use rustix::fs::{Mode, OFlags};
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The hidden command of the process that stays behind.
pub const COMMAND: &str = "volume-keep";
/// How long a daemon that has ended is waited for.
const GONE: Duration = Duration::from_secs(60);
/// Pause between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(200);
/// How long the daemon may take to answer. A machine may stand still for seconds.
const ANSWER: Duration = Duration::from_secs(120);
/// How long the text of a refusal may take, which follows its head at once.
const BODY: Duration = Duration::from_secs(1);
/// Bytes of the longest answer to an upgrade that is read.
const MAX_ANSWER_BYTES: usize = 16 << 10;
/// Bytes of the longest line of the daemon.
const MAX_LINE_BYTES: u64 = 64;
/// Bytes of the longest orders: 16 volumes with paths of 4 KiB, which JSON may make six times as
/// long.
const MAX_ORDERS_BYTES: u64 = 1 << 20;
/// How often a daemon receives the line that the command has ended. A daemon that does not know
/// this line ends the connection.
const MAX_LINES: u8 = 3;

/// What the process that stays behind does.
#[derive(Debug, Serialize, Deserialize)]
struct Orders {
    socket: PathBuf,
    server: PathBuf,
    offers: Vec<Offered>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Offered {
    token: String,
    path: PathBuf,
    read_only: bool,
}

/// Offers the folders of this host in `volumes` to the daemon at `socket`. In the returned list
/// the offers are in their places.
///
/// # Errors
/// A folder cannot be opened or made, or the daemon refuses.
pub fn offer(volumes: Vec<VolumeRequest>, socket: &Path) -> Result<Vec<VolumeRequest>> {
    let (mut offers, mut requests) = (Vec::new(), Vec::new());
    let uid = rustix::process::geteuid().as_raw();
    for volume in volumes {
        let VolumeSource::Path(path) = volume.source else {
            requests.push(volume);
            continue;
        };
        let mut random = [0; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let token: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let read_only = volume.read_only;
        offers.push(Offered { token: token.clone(), path: path.clone().into(), read_only });
        let source = VolumeSource::Offer(VolumeOffer { token, path, uid });
        requests.push(VolumeRequest { source, ..volume });
    }
    if !offers.is_empty() {
        start(&Orders { socket: socket.to_owned(), server: program("dayfly-volume")?, offers })?;
    }
    Ok(requests)
}

/// Starts the process that stays behind, and waits until it has made its offers.
fn start(orders: &Orders) -> Result<()> {
    let own = std::env::current_exe().context("this program")?;
    let mut child = Command::new(own)
        .arg(COMMAND)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("starting the process that offers folders to the machine")?;
    if let Some(mut stdin) = child.stdin.take() {
        let mut line = serde_json::to_vec(orders)?;
        line.push(b'\n');
        stdin.write_all(&line)?;
        // Until this process ends, in whatever way.
        std::mem::forget(stdin);
    }
    let mut said = String::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(4096).read_to_string(&mut said)?;
    }
    match said.trim() {
        "ready" => Ok(()),
        why => bail!("offering folders to the machine: {why}"),
    }
}

/// The process that stays behind: reads its orders from standard input, and says `ready` or what is
/// wrong.
#[must_use]
pub fn keep() -> ExitCode {
    // Ctrl-C at the terminal, and its end, are not for this process, nor are pipes and locks that
    // the command has inherited: others wait for the end of those.
    let _ = rustix::process::setsid();
    // SAFETY: this process has just started, and nothing in it owns a descriptor above 2.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, 0_u32) };
    if closed != 0 {
        let error = std::io::Error::last_os_error();
        let _ = writeln!(std::io::stdout(), "closing inherited descriptors: {error}");
        return ExitCode::FAILURE;
    }
    let ready = match begin() {
        Ok(ready) => ready,
        Err(e) => {
            let _ = writeln!(std::io::stdout(), "{e:#}");
            return ExitCode::FAILURE;
        }
    };
    let _ = writeln!(std::io::stdout(), "ready");
    if let Ok(null) = std::fs::File::options().read(true).write(true).open("/dev/null") {
        // Closes the pipe to the command, which waits for its end.
        let _ = rustix::stdio::dup2_stdout(&null);
    }
    let links: Vec<_> = ready.iter().map(|ready| ready.link.clone()).collect();
    std::thread::spawn(move || {
        // It has said all: what comes is the end of the command.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        links.iter().for_each(|link| link.settle());
    });
    let threads: Vec<_> =
        ready.into_iter().map(|ready| std::thread::spawn(move || ready.keep())).collect();
    for thread in threads {
        let _ = thread.join();
    }
    ExitCode::SUCCESS
}

fn begin() -> Result<Vec<Ready>> {
    let mut line = String::new();
    // Not beyond the line, because the pipe stays open.
    std::io::stdin().lock().take(MAX_ORDERS_BYTES).read_line(&mut line).context("the orders")?;
    let orders: Orders = serde_json::from_str(&line).context("the orders")?;
    let (socket, server) = (Arc::new(orders.socket), Arc::new(orders.server));
    let mut all = Vec::new();
    for Offered { token, path, read_only } in orders.offers {
        let folder = open(&path)?;
        let offer = upgraded(&socket, &format!("offers/{token}"))?;
        let (socket, server) = (socket.clone(), server.clone());
        let link = Arc::new(Link::new(offer));
        all.push(Ready { socket, server, token, folder, read_only, link });
    }
    Ok(all)
}

/// Opens a folder, which is made if it is missing.
fn open(path: &Path) -> Result<OwnedFd> {
    let shown = || format!("folder {}", path.display());
    if path.is_file() {
        bail!("{}: expected a folder, got a file; share the folder that it is in", shown());
    }
    std::fs::create_dir_all(path).with_context(shown)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).with_context(shown)
}

/// A folder that is offered.
struct Ready {
    socket: Arc<PathBuf>,
    server: Arc<PathBuf>,
    token: String,
    folder: OwnedFd,
    read_only: bool,
    link: Arc<Link>,
}

/// The connection of an offer, which may be replaced.
struct Link(Mutex<LinkState>);

struct LinkState {
    offer: Arc<UnixStream>,
    /// The command has ended.
    settled: bool,
    lines: u8,
}

impl LinkState {
    fn send(&mut self) {
        if self.settled && self.lines < MAX_LINES {
            self.lines += 1;
            // Fails if the daemon has ended.
            let _ = (&*self.offer).write_all(b"\n");
        }
    }
}

impl Link {
    fn new(offer: UnixStream) -> Self {
        Self(Mutex::new(LinkState { offer: Arc::new(offer), settled: false, lines: 0 }))
    }

    fn offer(&self) -> Arc<UnixStream> {
        lock(&self.0).offer.clone()
    }

    fn replace(&self, offer: UnixStream) {
        let mut state = lock(&self.0);
        state.offer = Arc::new(offer);
        state.send();
    }

    /// No VM is made with the folder any more, besides clones of those that have it.
    fn settle(&self) {
        let mut state = lock(&self.0);
        state.settled = true;
        state.send();
    }
}

impl Ready {
    /// Carries out the daemon's orders until it says that there will be none.
    fn keep(self) {
        loop {
            if self.serve() {
                return;
            }
            // The daemon has ended; the next one gets the offer anew.
            let since = Instant::now();
            let offer = loop {
                // First, because a daemon that answers and closes must not keep a CPU busy.
                std::thread::sleep(AGAIN);
                match upgraded(&self.socket, &format!("offers/{}", self.token)) {
                    Ok(offer) => break offer,
                    Err(_) if since.elapsed() > GONE => return,
                    Err(_) => {}
                }
            };
            self.link.replace(offer);
        }
    }

    /// Carries out the orders of one connection. Returns whether they were the last.
    fn serve(&self) -> bool {
        let offer = self.link.offer();
        let mut lines = BufReader::new(&*offer);
        loop {
            let mut line = String::new();
            match (&mut lines).take(MAX_LINE_BYTES).read_line(&mut line) {
                Ok(1..) => {}
                _ => return false,
            }
            match line.trim_end() {
                "end" => return true,
                stream if is_stream(stream) => {
                    // The daemon reports to its client that no stream came.
                    let _ = self.stream(stream);
                }
                _ => return false,
            }
        }
    }

    /// Makes a stream, and starts a server for it.
    fn stream(&self, name: &str) -> Result<()> {
        let stream = upgraded(&self.socket, &format!("streams/{name}"))?;
        let (stream_fd, folder_fd) = (stream.as_raw_fd(), self.folder.as_raw_fd());
        let mut command = Command::new(self.server.as_path());
        command.args(["--stream", &stream_fd.to_string(), "--folder", &folder_fd.to_string()]);
        if rustix::process::geteuid().is_root() {
            command.args(["--uid", "0", "--gid", "0"]);
        }
        if self.read_only {
            command.arg("--read-only");
        }
        let numbers = [stream_fd, folder_fd];
        // SAFETY: between fork and exec only fcntl(2) is called, on descriptors that `stream` and
        // `self` keep open.
        unsafe {
            command.pre_exec(move || {
                for number in numbers {
                    let fd = std::os::fd::BorrowedFd::borrow_raw(number);
                    fcntl_setfd(fd, FdFlags::empty())?;
                }
                Ok(())
            });
        }
        let command = command.env_clear().stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = command.stderr(Stdio::null()).process_group(0).spawn()?;
        std::thread::spawn(move || {
            // Reaps it.
            let _ = child.wait();
        });
        Ok(())
    }
}

/// Whether a line names a stream.
fn is_stream(line: &str) -> bool {
    line.len() == 32 && line.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Reads until an instant, however slowly the bytes come.
struct Until<'a> {
    stream: &'a UnixStream,
    end: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        (&mut &*self.stream).read(buffer)
    }
}

/// A connection of the daemon after the upgrade at `/v1/volumes/…`.
fn upgraded(socket: &Path, path: &str) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
    let head = format!(
        "POST /v1/volumes/{path} HTTP/1.1\r\nHost: d\r\nContent-Length: 0\r\n\
         Connection: upgrade\r\nUpgrade: {UPGRADE_VOLUME}\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    let mut until = Until { stream: &stream, end: Instant::now() + ANSWER };
    let (mut answer, mut byte) = (Vec::new(), [0]);
    // Byte by byte, because what follows is the guest's.
    while !answer.ends_with(b"\r\n\r\n") {
        if answer.len() >= MAX_ANSWER_BYTES || until.read(&mut byte)? == 0 {
            bail!("the daemon's answer to {path}: expected a head, got {} bytes", answer.len());
        }
        answer.extend(byte);
    }
    if answer.starts_with(b"HTTP/1.1 101 ") {
        stream.set_read_timeout(None)?;
        return Ok(stream);
    }
    let mut body = String::new();
    until.end = Instant::now() + BODY;
    let _ = until.take(4096).read_to_string(&mut body);
    let error = serde_json::from_str::<dayfly_api::types::ApiError>(&body);
    let first = String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned();
    bail!("the machine's daemon: {}", error.map_or(first, |error| error.message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn an_offer_is_made_anew_until_the_daemon_says_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let daemon = std::thread::spawn(move || {
            for says in ["", "nonsense\n", "end\n"] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).unwrap();
                    head.extend(byte);
                }
                let head = String::from_utf8(head).unwrap();
                assert!(head.starts_with("POST /v1/volumes/offers/t HTTP/1.1\r\n"), "{head}");
                assert!(head.contains("\r\nUpgrade: dayfly-volume\r\n"), "{head}");
                stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nx: y\r\n\r\n").unwrap();
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                assert_eq!(byte, *b"\n");
                stream.write_all(says.as_bytes()).unwrap();
            }
        });
        let offer = upgraded(&socket, "offers/t").unwrap();
        let shared = open(&folder.path().join("new/folder")).unwrap();
        let (socket, server) = (Arc::new(socket), Arc::new(PathBuf::from("/bin/false")));
        let token = "t".to_owned();
        let link = Arc::new(Link::new(offer));
        // Daemons that come later receive it too.
        link.settle();
        Ready { socket, server, token, folder: shared, read_only: false, link }.keep();
        daemon.join().unwrap();
        assert!(folder.path().join("new/folder").is_dir());
    }

    #[test]
    fn a_refusal_of_the_daemon_is_passed_on() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let daemon = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let body = r#"{"code":"invalid","message":"token: expected digits"}"#;
            write!(stream, "HTTP/1.1 400 Bad Request\r\n\r\n{body}").unwrap();
        });
        let refused = upgraded(&socket, "offers/t").unwrap_err().to_string();
        assert_eq!(refused, "the machine's daemon: token: expected digits");
        daemon.join().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let file = open(&folder.path().join("file")).unwrap_err().to_string();
        assert!(file.contains("expected a folder, got a file"), "{file}");
    }
}
