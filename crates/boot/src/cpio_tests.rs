//! Archives read back by the host's cpio and by busybox.

use super::*;
use crate::initramfs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

fn sample() -> Vec<u8> {
    let mut archive = initramfs(&["dev", "proc"]);
    archive.file("d/empty", 0o644, b"");
    archive.file("d/sub/five", 0o600, b"12345");
    archive.link("d/link", "sub/five");
    archive.char_device("d/null", 0o666, 1, 3);
    archive.folder("d/sub");
    archive.finish().unwrap()
}

/// Runs `program`, which reads the archive, and returns its output.
fn read_by(program: &[&str], folder: &Path) -> String {
    let mut child = Command::new(program[0])
        .args(&program[1..])
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&sample()).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{program:?}");
    String::from_utf8(out.stdout).unwrap()
}

#[test]
fn two_readers_list_every_entry_with_its_kind() {
    let bytes = sample();
    assert_eq!(bytes, sample(), "the same calls give the same bytes");
    assert!(bytes.len().is_multiple_of(512));
    let folder = tempfile::tempdir().unwrap();
    for program in [&["cpio", "-itv", "--quiet"][..], &["busybox", "cpio", "-tv"]] {
        let text = read_by(program, folder.path());
        let expected = [
            ("drwxr-xr-x", " dev"),
            ("drwxr-xr-x", " proc"),
            ("crw-------", " dev/console"),
            ("drwxr-xr-x", " d"),
            ("-rw-r--r--", " d/empty"),
            ("drwxr-xr-x", " d/sub"),
            ("-rw-------", " d/sub/five"),
            ("lrwxrwxrwx", " d/link -> sub/five"),
            ("crw-rw-rw-", " d/null"),
        ];
        assert_eq!(text.lines().count(), expected.len(), "{program:?}: {text}");
        for (line, (mode, name)) in text.lines().zip(expected) {
            assert!(line.starts_with(mode) && line.ends_with(name), "{program:?}: {line}");
        }
        assert!(text.lines().any(|l| l.contains(" 5 ") && l.ends_with("five")), "{text}");
    }
    read_by(&["cpio", "-id", "--quiet", "--no-preserve-owner", "d/*"], folder.path());
    assert_eq!(std::fs::read(folder.path().join("d/link")).unwrap(), b"12345");
    assert_eq!(std::fs::read(folder.path().join("d/empty")).unwrap(), b"");
}

#[test]
fn what_does_not_fit_is_named() {
    assert_eq!(length("d/file", u32::MAX as usize).unwrap(), u32::MAX);
    let text = length("d/file", 1 << 32).unwrap_err().to_string();
    assert!(text.starts_with("d/file: too long for a newc archive"), "{text}");
}

#[test]
fn an_entry_that_was_left_out_is_the_result() {
    let mut archive = Archive { too_long: length("first", 1 << 32).err(), ..Archive::default() };
    archive.file("second", 0o644, b"");
    let text = archive.finish().unwrap_err().to_string();
    assert!(text.starts_with("first: "), "{text}");
}
