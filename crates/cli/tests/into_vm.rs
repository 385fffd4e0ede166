//! `dayfly cp` both ways, with the agent's own code at the other end: a daemon of this test answers
//! for a VM whose disk is a folder.

#![allow(clippy::unwrap_used, reason = "tests")]

use dayfly_agent::archive;
use dayfly_api::agent::{Failure, FailureCode};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A VM.
struct Guest {
    all: tempfile::TempDir,
}

impl Guest {
    fn start() -> Self {
        let all = tempfile::tempdir().unwrap();
        for folder in ["root", "here"] {
            std::fs::create_dir(all.path().join(folder)).unwrap();
        }
        let listener = UnixListener::bind(all.path().join("s")).unwrap();
        let root = all.path().join("root");
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let root = root.clone();
                // A client that has seen enough closes its connection.
                std::thread::spawn(move || drop(answer(&stream.unwrap(), &root)));
            }
        });
        Self { all }
    }

    /// A path of its disk.
    fn at(&self, path: &str) -> PathBuf {
        self.all.path().join("root").join(path)
    }

    /// A path of the host's folder that `dayfly` is run in.
    fn here(&self, path: &str) -> PathBuf {
        self.all.path().join("here").join(path)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dayfly"));
        command.arg("cp").args(args).current_dir(self.here(""));
        command.env("DAYFLY_HOST", format!("unix://{}", self.all.path().join("s").display()));
        command
    }

    fn run(&self, args: &[&str]) -> (Option<i32>, String) {
        said(self.command(args).output().unwrap())
    }

    fn cp(&self, from: &str, to: &str) {
        assert_eq!(self.run(&[from, to]), (Some(0), String::new()), "{from} {to}");
    }

    /// Sends an archive.
    fn send(&self, bytes: &[u8], to: &str) -> (Option<i32>, String) {
        let mut child =
            self.command(&["-", to]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A client that fails reads no more.
        let _ = child.stdin.take().unwrap().write_all(bytes);
        said(child.wait_with_output().unwrap())
    }
}

/// The exit code and the error; progress, which a slow host shows, is left out.
fn said(output: Output) -> (Option<i32>, String) {
    let text = String::from_utf8(output.stderr).unwrap();
    let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("dayfly: ")).collect();
    (output.status.code(), errors.join("\n"))
}

fn answer(stream: &UnixStream, root: &Path) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let (mut request, mut line) = (String::new(), String::new());
    reader.read_line(&mut request)?;
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let mut words = request.split(' ');
    let (method, target) = (words.next().unwrap(), words.next().unwrap());
    let respond = |status: &str, body: &[u8]| {
        let mut out = stream;
        write!(
            out,
            "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )?;
        out.write_all(body)
    };
    if target == "/v1/info" {
        // A daemon before `upgrades`, whose archives are bodies of HTTP.
        return respond("200 OK", INFO.as_bytes());
    }
    let Some((_, path)) = target.split_once("?path=") else {
        // The VM itself, asked for after something in it was not found.
        return respond("200 OK", VM.as_bytes());
    };
    let path = decoded(path);
    let path = format!("{}{path}", root.display());
    let result = match method {
        "GET" => {
            let mut bytes = Vec::new();
            archive::pack(&path, &mut bytes).map(|()| bytes).map_err(|e| Failure::from(&e))
        }
        _ => archive::unpack(Path::new(&path), &mut Chunked { reader, left: 0, ended: false })
            .map(|()| Vec::new())
            .map_err(|e| Failure::from(&e)),
    };
    match result {
        Ok(bytes) => respond("200 OK", &bytes),
        Err(failure) => {
            let code = if failure.code == FailureCode::NotFound { "not_found" } else { "guest" };
            let error = serde_json::json!({"code": code, "message": failure.message});
            respond("404 Not Found", error.to_string().as_bytes())
        }
    }
}

const INFO: &str = r#"{"version": "0.1.0", "pid": 1, "host_kernel": "6.1", "kvm": "svm", "vms": 1,
    "state_dir": "/"}"#;
const VM: &str = r#"{"vm": {"id": "000000000001", "name": "a", "state": "running", "exit": null,
    "snapshot": null, "image": "i", "kernel": "k", "vcpus": 1, "memory_bytes": 1,
    "created_unix_ms": 1, "ready_us": 1, "ephemeral": false, "labels": {}}, "pid": 1,
    "private_kib": 1, "resident_kib": 1, "disk_bytes": 1, "guest": null, "warnings": [],
    "timeline": []}"#;

/// Undoes `%2F`.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, more @ ..] = rest {
        if *first == b'%' {
            bytes.push(u8::from_str_radix(std::str::from_utf8(&more[..2]).unwrap(), 16).unwrap());
            rest = &more[2..];
        } else {
            bytes.push(*first);
            rest = more;
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// A body in chunks; one that breaks off is an error, as it is for the daemon.
struct Chunked<R> {
    reader: R,
    left: usize,
    ended: bool,
}

impl<R: BufRead> Read for Chunked<R> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        if self.ended {
            return Ok(0);
        }
        if self.left == 0 {
            let mut line = String::new();
            if self.reader.read_line(&mut line)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            self.left = usize::from_str_radix(line.trim(), 16).unwrap();
            if self.left == 0 {
                self.ended = true;
                return Ok(0);
            }
        }
        let most = self.left.min(into.len());
        let n = self.reader.read(&mut into[..most])?;
        if n == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= n;
        if self.left == 0 {
            self.reader.read_line(&mut String::new())?;
        }
        Ok(n)
    }
}

fn read(path: PathBuf) -> String {
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn names(folder: PathBuf) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_link_at_the_end_of_the_destination_is_followed() {
    let guest = Guest::start();
    std::fs::create_dir_all(guest.at("usr/bin")).unwrap();
    std::fs::create_dir_all(guest.at("deep/real")).unwrap();
    symlink("usr/bin", guest.at("bin")).unwrap();
    symlink("real", guest.at("deep/lnk")).unwrap();
    symlink("deep/lnk", guest.at("two")).unwrap();
    std::fs::write(guest.at("t"), "old").unwrap();
    symlink("t", guest.at("s")).unwrap();
    symlink("fresh", guest.at("dangling")).unwrap();
    symlink("loop", guest.at("loop")).unwrap();
    std::fs::write(guest.here("x"), "x").unwrap();
    for (destination, path) in [
        ("a:/bin", "usr/bin/x"),
        ("a:/deep/lnk/", "deep/real/x"),
        ("a:/two", "deep/real/x"),
        ("a:/two/", "deep/real/x"),
        ("a:/s", "t"),
        ("a:/dangling", "fresh"),
        ("a:/deep/lnk/new", "deep/real/new"),
        ("a:/", "x"),
        ("a:deep", "deep/x"),
    ] {
        let _ = std::fs::remove_file(guest.at(path));
        guest.cp("x", destination);
        assert_eq!(read(guest.at(path)), "x", "{destination}");
    }
    for link in ["bin", "deep/lnk", "two", "s", "dangling"] {
        assert!(guest.at(link).is_symlink(), "{link} is no link any more");
    }
    let (code, text) = guest.run(&["x", "a:/loop"]);
    assert!(code == Some(125) && text.contains("at most 40 links"), "{text}");
    let (code, text) = guest.run(&["x", "a:/none/"]);
    assert!(code == Some(125) && text.contains("no such folder"), "{text}");
    assert_eq!(names(guest.at("deep/real")), ["new", "x"]);
}

#[test]
fn trees_go_in_and_out_with_links_holes_and_capabilities() {
    let guest = Guest::start();
    std::fs::create_dir_all(guest.here("tree/sub")).unwrap();
    std::fs::write(guest.here("tree/n0"), vec![b'n'; 1_000_000]).unwrap();
    for n in 1..10 {
        std::fs::hard_link(guest.here("tree/n0"), guest.here(&format!("tree/n{n}"))).unwrap();
    }
    std::fs::File::create(guest.here("tree/sub/holes")).unwrap().set_len(64 << 20).unwrap();
    std::fs::write(guest.here("tree/Icon\r"), "odd").unwrap();
    symlink("n0", guest.here("tree/link")).unwrap();
    let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let root = dayfly_units::needs::root();
    if root {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(guest.here("tree/n0"), "security.capability", capability, flags)
            .unwrap();
    }
    guest.cp("tree", "a:/in");
    let (code, text) = guest.run(&["--capabilities", "a:/in", "out"]);
    assert_eq!(code, Some(0), "{text}");
    guest.cp("a:/in", "plain");
    let (code, text) = guest.run(&["--capabilities", "a:/in/.", "."]);
    assert_eq!(code, Some(0), "{text}");
    // A VM's program has no rights here, unless that is asked for.
    let none =
        rustix::fs::getxattr(guest.here("plain/n9"), "security.capability", &mut [0_u8; 64][..]);
    assert_eq!(none.unwrap_err(), rustix::io::Errno::NODATA);
    for top in [guest.at("in"), guest.here("out"), guest.here("")] {
        let stat = |name: &str| std::fs::metadata(top.join(name)).unwrap();
        assert!(
            (1..10).all(|n| stat(&format!("n{n}")).ino() == stat("n0").ino()),
            "{}",
            top.display()
        );
        assert!(stat("sub/holes").len() == 64 << 20 && stat("sub/holes").blocks() < 1000);
        assert_eq!(read(top.join("Icon\r")), "odd");
        assert_eq!(std::fs::read_link(top.join("link")).unwrap(), Path::new("n0"));
        if root {
            let mut value = [0; 64];
            let n = rustix::fs::getxattr(top.join("n9"), "security.capability", &mut value[..])
                .unwrap();
            assert_eq!(value[..n], capability[..]);
        }
    }
    // What a link leads to, if that is asked for.
    symlink("in", guest.at("lnk")).unwrap();
    guest.cp("a:/lnk", "as-link");
    assert!(guest.here("as-link").is_symlink());
    // The VM chose where that leads: it is not followed, unless the user says so.
    for source in ["a:/in", "a:/in/."] {
        let (code, text) = guest.run(&[source, "as-link"]);
        assert!(
            code == Some(125) && text.contains("got a link") && text.contains("as-link/"),
            "{text}"
        );
    }
    guest.cp("a:/lnk/", "as-folder");
    assert_eq!(read(guest.here("as-folder/Icon\r")), "odd");
    guest.cp("a:/in/sub/..", "up");
    assert_eq!(read(guest.here("up/Icon\r")), "odd");
}

#[test]
fn streams() {
    let guest = Guest::start();
    std::fs::create_dir(guest.at("in")).unwrap();
    // The size of a large file is in a pax record only.
    let large = [
        &tar(b'x', b"p", b"10 size=5\n")[..],
        &tar_sized(b'0', b"big.bin", 0, b"AAAAA"),
        &[0; 1024],
    ]
    .concat();
    assert_eq!(guest.send(&large, "a:/in"), (Some(0), String::new()));
    assert_eq!(read(guest.at("in/big.bin")), "AAAAA");
    // A record with line breaks.
    let value = "SCHILY.acl.access=user::rw-\ngroup::r--\nother::r--\n\n";
    let record = format!("{} {value}", value.len() + 3);
    let acl =
        [&tar(b'x', b"p", record.as_bytes())[..], &tar(b'0', b"acl", b"x"), &[0; 1024]].concat();
    assert_eq!(guest.send(&acl, "a:/in"), (Some(0), String::new()));
    assert_eq!(read(guest.at("in/acl")), "x");
    // A stream that breaks off leaves nothing, and says where.
    let cut =
        [&tar(b'0', b"first", b"1")[..], &tar(b'0', b"second", &[b'2'; 4096])[..2048]].concat();
    let (code, text) = guest.send(&cut, "a:/in");
    assert!(code == Some(125) && text.contains("expected"), "{text}");
    assert_eq!(names(guest.at("in")), ["acl", "big.bin"]);
    // Out, through a pipe, and in again.
    let out = guest.command(&["a:/in", "-"]).output().unwrap();
    assert!(out.status.success());
    assert_eq!(guest.send(&out.stdout, "a:/"), (Some(0), String::new()));
    // A file of /proc has no length.
    std::fs::create_dir(guest.at("proc")).unwrap();
    let text = std::fs::read_to_string("/proc/version").unwrap();
    let mut bytes = Vec::new();
    archive::pack("/proc/version", &mut bytes).unwrap();
    assert_eq!(guest.send(&bytes, "a:/proc"), (Some(0), String::new()));
    assert_eq!(read(guest.at("proc/version")), text);
}

fn tar(kind: u8, name: &[u8], data: &[u8]) -> Vec<u8> {
    tar_sized(kind, name, data.len() as u64, data)
}

fn tar_sized(kind: u8, name: &[u8], size: u64, data: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_mode(0o644);
    header.set_size(size);
    header.set_cksum();
    let mut out = [header.as_bytes(), data].concat();
    out.resize(out.len().next_multiple_of(512), 0);
    out
}
