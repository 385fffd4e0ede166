//! The guest's half of `dayfly-bench io`: `dayfly-witness serve` runs programs for the benchmark,
//! and sends and receives bytes.
//!
//! A connection begins with an [`Order`], a line of JSON. Datagrams to the same port are sent back.
//! This is for guests of benchmarks: any client that reaches the port runs programs as root.

use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// The port, TCP and UDP.
pub const PORT: u16 = 5001;
/// Most bytes of an order.
pub const MAX_ORDER_BYTES: u64 = 64 << 10;
/// Most bytes of one call of send(2) or recv(2).
pub const CHUNK_BYTES: usize = 64 << 10;
/// Longest datagram that is sent back whole.
const DATAGRAM_BYTES: usize = 2048;

/// What a connection is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Order {
    /// Runs a text for /bin/sh. The answer is [`Ran`], a line of JSON.
    Run {
        /// The text.
        text: String,
    },
    /// Sends zeroes for this long, then ends the connection.
    Send {
        /// Milliseconds.
        millis: u64,
    },
    /// Receives until the client ends its direction. The answer is a line with the number of bytes.
    Receive,
    /// Sends back what the client sends.
    Echo,
}

/// What a program wrote, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ran {
    /// The exit code; none after a signal.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Serves at `port` of all addresses.
///
/// # Errors
/// The port cannot be bound.
pub fn serve(port: u16) -> io::Result<Infallible> {
    let at = (Ipv4Addr::UNSPECIFIED, port);
    serve_on(&TcpListener::bind(at)?, UdpSocket::bind(at)?)
}

/// As [`serve`], with sockets that are bound already.
///
/// # Errors
/// No thread can be started.
pub fn serve_on(listener: &TcpListener, datagrams: UdpSocket) -> io::Result<Infallible> {
    thread::Builder::new().spawn(move || send_back(&datagrams))?;
    loop {
        // A client that is gone already is no reason to end.
        let Ok((stream, _)) = listener.accept() else { continue };
        thread::Builder::new().spawn(move || {
            if let Err(error) = obey(&stream) {
                eprintln!("dayfly-witness: {error}");
            }
        })?;
    }
}

fn send_back(socket: &UdpSocket) {
    let mut datagram = [0; DATAGRAM_BYTES];
    loop {
        if let Ok((len, from)) = socket.recv_from(&mut datagram) {
            let _lost = socket.send_to(&datagram[..len], from);
        }
    }
}

fn obey(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut reader, mut line) = (BufReader::new(stream), Vec::new());
    reader.by_ref().take(MAX_ORDER_BYTES).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        // The client looks whether the port is served.
        return Ok(());
    }
    match serde_json::from_slice(&line)? {
        Order::Run { text } => answer(stream, &serde_json::to_string(&run(&text)?)?),
        Order::Send { millis } => send(stream, Duration::from_millis(millis)),
        Order::Receive => answer(stream, &receive(&mut reader)?.to_string()),
        Order::Echo => echo(&mut reader, stream),
    }
}

fn answer(mut stream: &TcpStream, line: &str) -> io::Result<()> {
    stream.write_all(format!("{line}\n").as_bytes())
}

fn run(text: &str) -> io::Result<Ran> {
    let output = Command::new("/bin/sh").args(["-c", text]).stdin(Stdio::null()).output()?;
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Ok(Ran { code: output.status.code(), stdout, stderr })
}

fn send(mut stream: &TcpStream, time: Duration) -> io::Result<()> {
    let (zeroes, begun) = (vec![0; CHUNK_BYTES], Instant::now());
    while begun.elapsed() < time {
        stream.write_all(&zeroes)?;
    }
    stream.shutdown(Shutdown::Write)
}

fn receive(reader: &mut impl Read) -> io::Result<u64> {
    let (mut bytes, mut got) = (vec![0; CHUNK_BYTES], 0);
    loop {
        match reader.read(&mut bytes) {
            Ok(0) => return Ok(got),
            Ok(len) => got += len as u64,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn echo(reader: &mut impl Read, mut stream: &TcpStream) -> io::Result<()> {
    let mut bytes = [0; DATAGRAM_BYTES];
    loop {
        match reader.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(len) => stream.write_all(&bytes[..len])?,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}
