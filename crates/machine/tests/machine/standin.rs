//! A daemon that speaks just enough HTTP to stand in for `dayflyd`.
//!
//! `GET /name` answers the daemon's name and pid. `PUT /sink` reads a body and answers its length.
//! `GET /source/N` answers N bytes. A start with `broken` ends at once. While the file [`HANG`]
//! exists, the stand-in accepts connections and answers nothing. `GET /v1/info` answers the number
//! of VMs in the file [`VMS`].

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;

/// While this file exists, the stand-in hangs.
pub(crate) const HANG: &str = "/run/hang";

/// The number of VMs, if the file exists.
pub(crate) const VMS: &str = "/run/vms";

pub(crate) fn serve(words: &[String]) -> ExitCode {
    let name = words[0].clone();
    if name == "broken" {
        eprintln!("the stand-in is broken on purpose");
        return ExitCode::from(3);
    }
    let listener = UnixListener::bind("/run/dayfly/dayflyd.sock").unwrap();
    eprintln!("stand-in {name} listens");
    for stream in listener.incoming().flatten() {
        let name = name.clone();
        std::thread::spawn(move || drop(answer(&stream, &name)));
    }
    ExitCode::SUCCESS
}

fn answer(stream: &UnixStream, name: &str) -> std::io::Result<()> {
    while std::path::Path::new(HANG).exists() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let mut reader = BufReader::with_capacity(128 << 10, stream);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line == "\r\n" {
            break;
        }
        head.push(line);
    }
    let path = head.first().and_then(|l| l.split(' ').nth(1)).unwrap_or("/").to_owned();
    let mut out = stream;
    if let Some(count) = path.strip_prefix("/source/").and_then(|n| n.parse::<u64>().ok()) {
        write!(out, "HTTP/1.1 200 OK\r\ncontent-length: {count}\r\n\r\n")?;
        std::io::copy(&mut std::io::repeat(b'x').take(count), &mut out)?;
        return Ok(());
    }
    let body = if path == "/sink" {
        let length = head
            .iter()
            .find_map(|l| l.strip_prefix("content-length: "))
            .unwrap_or("0")
            .trim()
            .parse()
            .unwrap();
        std::io::copy(&mut reader.take(length), &mut std::io::sink())?.to_string()
    } else if let ("/v1/info", Ok(vms)) = (path.as_str(), std::fs::read_to_string(VMS)) {
        format!("{{\"version\":\"0\",\"vms\":{}}}", vms.trim())
    } else {
        format!("{name} {}", std::process::id())
    };
    write!(out, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// Sends one request from the host through the machine's API socket; returns the answer's body.
pub(crate) fn request(
    socket: &std::path::Path,
    method: &str,
    path: &str,
    body: &[u8],
) -> std::io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket)?;
    write!(stream, "{method} {path} HTTP/1.1\r\ncontent-length: {}\r\n\r\n", body.len())?;
    stream.write_all(body)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut all = Vec::new();
    stream.read_to_end(&mut all)?;
    let at =
        all.windows(4).position(|w| w == b"\r\n\r\n").ok_or(std::io::ErrorKind::UnexpectedEof)?;
    Ok(all.split_off(at + 4))
}
