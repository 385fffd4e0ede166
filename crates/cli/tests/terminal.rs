//! `dayfly` on a terminal, with a daemon that has the words of a hostile guest in every answer.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use dayfly_units::text::is_unsafe;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

/// Each kind of what a terminal obeys: title, clipboard, a bell, cursor and screen, C1, reversed
/// text, a forged line.
const HOSTILE: &str =
    "\x1b]0;owned\x07\x1b]52;c;bW9v\x07\x1b[2J\u{9b}2J\u{202e}txt\x08\nforged: line";
/// What is left of it in one line.
const SHOWN: &str =
    r"\x1b]0;owned\x07\x1b]52;c;bW9v\x07\x1b[2J\u{9b}2J\u{202e}txt\x08\nforged: line";

/// A daemon for one call: answers every request with this.
struct Fake(tempfile::TempDir);

impl Fake {
    fn answering(status: &'static str, body: Vec<u8>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("s")).unwrap();
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let (mut request, mut byte) = (Vec::new(), [0]);
                while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
                    request.extend(byte);
                }
                let head = format!(
                    "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                    body.len()
                );
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
            }
        });
        Self(folder)
    }

    fn json(status: &'static str, value: &serde_json::Value) -> Self {
        Self::answering(status, value.to_string().into_bytes())
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dayfly"));
        command.args(words).stdin(Stdio::null());
        command.env("DAYFLY_HOST", format!("unix://{}", self.0.path().join("s").display()));
        command.env("DAYFLY_HOME", self.0.path());
        command
    }

    /// What a terminal gets of both streams.
    fn on_terminal(&self, words: &[&str]) -> String {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags).unwrap();
        unlockpt(&ours).unwrap();
        let theirs = ioctl_tiocgptpeer(&ours, flags).unwrap();
        let mut settings = rustix::termios::tcgetattr(&theirs).unwrap();
        settings.make_raw();
        rustix::termios::tcsetattr(&theirs, rustix::termios::OptionalActions::Now, &settings)
            .unwrap();
        let mut command = self.command(words);
        command.stdout(theirs.try_clone().unwrap()).stderr(theirs);
        let mut child = command.spawn().unwrap();
        // The last of the other end's descriptors are the child's then.
        drop(command);
        let (mut ours, mut got, mut piece) = (File::from(ours), Vec::new(), [0; 4096]);
        // EIO is the end of a terminal.
        while let Ok(1..) = ours.read(&mut piece).inspect(|n| got.extend(&piece[..*n])) {}
        child.wait().unwrap();
        String::from_utf8(got).unwrap()
    }

    fn piped(&self, words: &[&str]) -> (Vec<u8>, String) {
        let output = self.command(words).output().unwrap();
        (output.stdout, String::from_utf8(output.stderr).unwrap())
    }
}

fn is_safe(text: &str) -> bool {
    !text.contains(|c| is_unsafe(c) && !"\n\r\t".contains(c))
}

#[test]
fn logs_are_filtered_on_a_terminal_and_raw_elsewhere() {
    let log = format!("plain\r\n\x1b[31mred\x1b[0m {HOSTILE}\n");
    let fake = Fake::answering("200 OK", log.clone().into_bytes());
    for words in [&["logs", "web"][..], &["logs", "web", "17"]] {
        let seen = fake.on_terminal(words);
        assert!(seen.starts_with("plain\r\n\x1b[31mred\x1b[0m "), "{seen:?}");
        let rest = seen.strip_prefix("plain\r\n\x1b[31mred\x1b[0m ").unwrap();
        assert!(is_safe(rest), "{rest:?}");
        assert_eq!(rest.trim_end(), SHOWN.replace(r"\n", "\n"));
        assert_eq!(fake.piped(words).0, log.as_bytes());
    }
    assert_eq!(fake.on_terminal(&["logs", "--raw", "web"]), log);
}

#[test]
fn an_error_is_escaped_on_a_terminal_and_in_a_pipe() {
    let error =
        serde_json::json!({ "code": "guest", "message": format!("in the guest: {HOSTILE}") });
    let fake = Fake::json("502 Bad Gateway", &error);
    for words in
        [&["logs", "web"][..], &["inspect", "web"], &["ps"], &["pause", "web"], &["rm", "web"]]
    {
        let (seen, (out, err)) = (fake.on_terminal(words), fake.piped(words));
        for text in [&seen, &err] {
            assert!(text.contains(r"\x1b]52;c;bW9v\x07") && is_safe(text), "{words:?}: {text:?}");
        }
        assert!(out.is_empty(), "{words:?}");
    }
}

#[test]
fn a_listing_is_escaped_and_keeps_its_rows() {
    // An image's source is what the archive said that it was built from.
    let image = serde_json::json!({ "name": "web", "digest": "0".repeat(64), "size_bytes": 1,
        "stored_bytes": 1, "source": HOSTILE, "created_unix_ms": 0, "config": {} });
    let fake = Fake::json("200 OK", &serde_json::json!({ "items": [image] }));
    let seen = fake.on_terminal(&["image", "ls"]);
    assert!(seen.contains(SHOWN) && is_safe(&seen), "{seen:?}");
    assert_eq!(seen.lines().count(), 2, "{seen}");
    let (json, _) = fake.piped(&["image", "ls", "--format", "json"]);
    let json = String::from_utf8(json).unwrap();
    assert!(is_safe(&json), "{json:?}");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&json).unwrap()["source"], HOSTILE);
}
