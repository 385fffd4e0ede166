//! The process that offers folders of this host to the machine.

#![allow(clippy::unwrap_used, reason = "tests")]

use rustix::io::{FdFlags, fcntl_setfd};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

/// Accepts the offer of a folder, as the machine's daemon does.
fn accepted(listener: &UnixListener) -> UnixStream {
    let (mut stream, _) = listener.accept().unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.extend(byte);
    }
    stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\n\r\n").unwrap();
    stream
}

#[test]
fn the_keeper_inherits_nothing_and_says_that_its_command_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    // A lock or a pipe of the program that starts `dayfly`.
    let (mut end, inherited) = UnixStream::pair().unwrap();
    fcntl_setfd(&inherited, FdFlags::empty()).unwrap();
    let mut keeper = Command::new(env!("CARGO_BIN_EXE_dayfly"))
        .arg("volume-keep")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(inherited);
    let orders = serde_json::json!({
        "socket": socket,
        "server": "/bin/false",
        "offers": [{"token": "t", "path": folder.path(), "read_only": true}],
    });
    let mut stdin = keeper.stdin.take().unwrap();
    writeln!(stdin, "{orders}").unwrap();
    let mut offer = accepted(&listener);
    let mut line = String::new();
    BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    // Ends at once, because the keeper does not have the other end.
    assert_eq!(end.read(&mut [0]).unwrap(), 0, "fd {}", end.as_raw_fd());
    drop(stdin);
    let mut byte = [0];
    offer.read_exact(&mut byte).unwrap();
    assert_eq!(byte, *b"\n");
    offer.write_all(b"end\n").unwrap();
    assert!(keeper.wait().unwrap().success());
}
