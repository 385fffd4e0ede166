//! A client of the agent, and an agent in this process on a unix socket.
#![allow(dead_code, clippy::unwrap_used, reason = "tests; each binary uses a part of it")]

use dayfly_agent::exec::Programs;
use dayfly_agent::exec::cage::{CGROUP_ROOT, Cages};
use dayfly_agent::kernel::Kernel;
use dayfly_agent::network::{NetworkError, Settings};
use dayfly_agent::server::{Agent, Listener};
use dayfly_api::agent::{
    ExecSpec, Exit, FrameKind, HEADER_BYTES, Identity, Reply, Request, decode_header, encode,
};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A kernel that records its calls.
#[derive(Default, Clone)]
pub struct Fake {
    pub calls: Arc<Mutex<Vec<String>>>,
    pub fails: Arc<Mutex<bool>>,
}

impl Fake {
    fn call(&self, text: String) -> Result<(), Errno> {
        self.calls.lock().unwrap().push(text);
        if *self.fails.lock().unwrap() { Err(Errno::PERM) } else { Ok(()) }
    }
}

impl Kernel for Fake {
    fn reseed(&self, bytes: &[u8]) -> Result<(), Errno> {
        self.call(format!("reseed {}", bytes.len()))
    }
    fn set_clock(&self, ns: u64) -> Result<(), Errno> {
        self.call(format!("clock {ns}"))
    }
    fn set_hostname(&self, name: &str) -> Result<(), Errno> {
        self.call(format!("hostname {name}"))
    }
    fn set_network(&self, _: &Path, new: Option<&Settings>, _: bool) -> Result<(), NetworkError> {
        // Most tests use machines without a network.
        new.map_or(Ok(()), |new| {
            self.call(format!("network {}", new.address)).map_err(NetworkError::Netlink)
        })
    }
    fn end(&self, reboot: bool) {
        let _ = self.call(format!("end {reboot}"));
    }
}

pub struct Guest {
    folder: tempfile::TempDir,
    pub kernel: Fake,
}

impl Guest {
    /// An agent whose identity files are in a temporary folder; programs see the real machine.
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["etc", "run", "proc"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        for name in ["etc/passwd", "etc/group", "proc/meminfo"] {
            std::fs::copy(Path::new("/").join(name), folder.path().join(name)).unwrap();
        }
        let kernel = Fake::default();
        let cages = Cages::open(Path::new(CGROUP_ROOT));
        let programs = Programs::new(folder.path().into(), cages, false);
        let agent = Agent::new(folder.path().into(), Box::new(kernel.clone()), programs);
        let listener: Arc<dyn Listener> =
            Arc::new(UnixListener::bind(folder.path().join("s")).unwrap());
        agent.serve(&listener).unwrap();
        Self { folder, kernel }
    }

    pub fn root(&self) -> PathBuf {
        self.folder.path().into()
    }

    pub fn connect(&self) -> Client {
        let stream = UnixStream::connect(self.folder.path().join("s")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(240))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(240))).unwrap();
        Client { stream }
    }

    pub fn ask(&self, request: &Request) -> Reply {
        let mut client = self.connect();
        client.request(request);
        client.reply()
    }

    pub fn exec(&self, spec: ExecSpec, stdin: &[u8]) -> Output {
        let takes = spec.stdin;
        let mut client = self.connect();
        client.request(&Request::Exec(Box::new(spec)));
        let first = client.reply();
        let Reply::Started { pid, .. } = first else { panic!("{first:?}") };
        let mut writer = Client { stream: client.stream.try_clone().unwrap() };
        let stdin = stdin.to_vec();
        let feeder = std::thread::spawn(move || {
            if takes {
                for piece in stdin.chunks(100_000) {
                    if writer.try_send(FrameKind::Stdin, piece).is_err() {
                        return;
                    }
                }
                let _ = writer.try_send(FrameKind::StdinEnd, &[]);
            }
        });
        let output = client.output(pid);
        feeder.join().unwrap();
        output
    }

    pub fn sh(&self, script: &str) -> Output {
        self.exec(sh(script), b"")
    }
}

pub fn sh(script: &str) -> ExecSpec {
    argv(&["/bin/sh", "-c", script])
}

/// Starts a program and returns its process id.
pub fn started(client: &mut Client, spec: ExecSpec) -> u32 {
    client.request(&Request::Exec(Box::new(spec)));
    match client.reply() {
        Reply::Started { pid, .. } => pid,
        other => panic!("{other:?}"),
    }
}

pub fn argv(argv: &[&str]) -> ExecSpec {
    ExecSpec {
        argv: argv.iter().map(|a| (*a).to_owned()).collect(),
        env: BTreeMap::new(),
        ..ExecSpec::default()
    }
}

pub fn identity(name: &str, digit: char) -> Identity {
    Identity {
        hostname: name.into(),
        machine_id: digit.to_string().repeat(32),
        wall_clock_ns: 1_800_000_000_000_000_000,
        entropy: "a5".repeat(64),
        number: 0,
        network: None,
        answer_ms: None,
        cpus: None,
    }
}

#[derive(Debug)]
pub struct Output {
    pub pid: u32,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub exit: Exit,
}

impl Output {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

pub struct Client {
    pub stream: UnixStream,
}

impl Client {
    pub fn try_send(&mut self, kind: FrameKind, body: &[u8]) -> io::Result<()> {
        self.stream.write_all(&encode(kind, body))
    }

    pub fn send(&mut self, kind: FrameKind, body: &[u8]) {
        self.try_send(kind, body).unwrap();
    }

    pub fn request(&mut self, request: &Request) {
        self.send(FrameKind::Request, &serde_json::to_vec(request).unwrap());
    }

    /// Sends several requests in one packet, so that all have arrived before the first is served.
    pub fn requests(&mut self, requests: &[&Request]) {
        let frame = |request| encode(FrameKind::Request, &serde_json::to_vec(request).unwrap());
        let packet: Vec<u8> = requests.iter().copied().flat_map(frame).collect();
        self.stream.write_all(&packet).unwrap();
    }

    /// Reads a frame; `None` at the end of the connection.
    pub fn frame(&mut self) -> Option<(FrameKind, Vec<u8>)> {
        let mut header = [0; HEADER_BYTES];
        match self.stream.read_exact(&mut header) {
            Ok(()) => {}
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
                ) =>
            {
                return None;
            }
            Err(e) => panic!("{e}"),
        }
        let (kind, length) = decode_header(header).unwrap();
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).unwrap();
        Some((kind, body))
    }

    pub fn reply(&mut self) -> Reply {
        match self.frame() {
            Some((FrameKind::Reply, body)) => serde_json::from_slice(&body).unwrap(),
            other => panic!("expected a reply, got {other:?}"),
        }
    }

    pub fn output(&mut self, pid: u32) -> Output {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.frame() {
                Some((FrameKind::Stdout, body)) => stdout.extend(body),
                Some((FrameKind::Stderr, body)) => stderr.extend(body),
                Some((FrameKind::Exit, body)) => {
                    assert_eq!(self.frame(), None, "nothing follows an exit");
                    return Output {
                        pid,
                        stdout,
                        stderr,
                        exit: serde_json::from_slice(&body).unwrap(),
                    };
                }
                other => panic!("expected output or an exit, got {other:?}"),
            }
        }
    }
}

/// Whether a process runs (a zombie does not).
pub fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| {
        !s.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z') || rest.starts_with('X'))
    })
}

/// Waits until `done` returns true, at most two minutes, which end only a hang.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("not within two minutes: {what}");
}
