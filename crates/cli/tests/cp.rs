//! `dayfly cp` from a VM whose agent lies: a daemon of this test answers with archives made to do
//! harm.
//!
//! Each is asked for as `result.json`. Whatever it says, nothing but that name may appear, nothing
//! at all if it is refused, and the program may not use more than 32 MiB.

#![allow(clippy::unwrap_used, reason = "tests")]

use dayfly_hostile::archives::{self, Archive};
use dayfly_hostile::{Ran, Scratch, check};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

const HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: application/x-tar\r\nconnection: close\r\n\r\n";

/// Waits for a request, which is read to its end.
fn request(listener: &UnixListener) -> UnixStream {
    let (stream, _) = listener.accept().unwrap();
    let mut request = BufReader::new(&stream);
    let mut line = String::new();
    while request.read_line(&mut line).unwrap() > 2 {
        line.clear();
    }
    stream
}

/// Answers one request with `archive`; ends when the client has enough.
fn serve(socket: &Path, archive: Archive) -> std::thread::JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let stream = request(&listener);
        let mut out = &stream;
        let mut answer = HEAD.as_bytes().chain(archive.bytes);
        let mut buffer = vec![0; 64 << 10];
        loop {
            let n = answer.read(&mut buffer).unwrap();
            if n == 0 || out.write_all(&buffer[..n]).is_err() {
                return;
            }
        }
    })
}

/// Runs `dayfly cp evil:PATH DESTINATION` against a daemon that answers with `archive`.
fn cp(scratch: &Scratch, path: &str, destination: &str, archive: Archive) -> Ran {
    let socket = scratch.beside("d.sock");
    let server = serve(&socket, archive);
    let mut command = Command::new(env!("CARGO_BIN_EXE_dayfly"));
    command.args(["cp", &format!("evil:{path}"), destination]);
    command.env("DAYFLY_HOST", format!("unix://{}", socket.display()));
    let ran = scratch.run(command);
    server.join().unwrap();
    std::fs::remove_file(&socket).unwrap();
    ran
}

#[test]
fn an_archive_that_lies_writes_nothing_but_the_name_that_was_asked_for() {
    let mut peak = ("", 0);
    let mut count = 0;
    for make in archives::all() {
        let (name, verdict) = make.about();
        let scratch = Scratch::new();
        let ran = cp(&scratch, "/tmp/result.json", ".", make.archive());
        check(name, verdict, &ran, &scratch);
        count += 1;
        if ran.peak_bytes > peak.1 {
            peak = (name, ran.peak_bytes);
        }
    }
    assert!(count >= 20, "{count}");
    println!("{count} archives; the most memory, {} KiB, was used for {:?}", peak.1 >> 10, peak.0);
}

#[test]
fn contents_stay_below_the_folder_that_was_asked_for() {
    let all = tempfile::tempdir().unwrap();
    for (kind, code, word) in
        [("contents", 0, ""), ("dot", 125, "what was asked for"), ("beside", 125, "nothing beside")]
    {
        let destination = all.path().join(kind);
        std::fs::create_dir(&destination).unwrap();
        let (scratch, to) = (Scratch::new(), destination.to_str().unwrap());
        let ran = cp(&scratch, "/tmp/result.json/.", to, archives::named(kind));
        assert_eq!(ran.code, Some(code), "{kind}: {}", ran.stderr);
        assert!(ran.stderr.contains(word), "{kind}: {}", ran.stderr);
        assert_eq!(scratch.files(), Scratch::untouched_but(&[]), "{kind}");
        let names = std::fs::read_dir(&destination).unwrap().count();
        assert_eq!(names, if code == 0 { 2 } else { 0 }, "{kind}");
    }
}

#[test]
fn a_copy_that_is_interrupted_leaves_nothing() {
    let all = tempfile::tempdir().unwrap();
    let socket = all.path().join("d.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let home = all.path().join("home");
    std::fs::create_dir(&home).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_dayfly"))
        .args(["cp", "evil:/tmp/result.json", "."])
        .current_dir(&home)
        .env("DAYFLY_HOST", format!("unix://{}", socket.display()))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let stream = request(&listener);
    (&stream).write_all(HEAD.as_bytes()).unwrap();
    let mut half = Vec::new();
    archives::named("honest").bytes.read_to_end(&mut half).unwrap();
    (&stream).write_all(&half[..600]).unwrap();
    // Its stage is there once the first entry has arrived.
    let mut staged = false;
    while !staged {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it had begun");
        staged = std::fs::read_dir(&home).unwrap().next().is_some();
        std::thread::yield_now();
    }
    // SAFETY: a signal to a child that was not waited for.
    assert_eq!(unsafe { libc::kill(child.id().cast_signed(), libc::SIGINT) }, 0);
    assert_eq!(child.wait().unwrap().code(), Some(125));
    assert_eq!(std::fs::read_dir(&home).unwrap().count(), 0);
    drop(stream);
}

#[test]
fn a_path_that_was_forgotten_is_an_error() {
    for args in [["web:", "."], [".", "web:"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_dayfly"))
            .arg("cp")
            .args(args)
            .env("DAYFLY_HOST", "unix:///nowhere/at/all")
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(125) && text.contains("got no path"),
            "{args:?}: {text}"
        );
    }
}
