//! The guest's server and the host agree.

use dayfly_e2e::guest::{checksum, server};
use std::io::Write;
use std::process::{Command, Stdio};

/// The server's own text, run by this host's Python if it has one, gives what [`checksum`] expects.
#[test]
fn both_sides_compute_the_same() {
    let function = server();
    let until = function.find("def answer").unwrap();
    let text = format!("{}\nprint(checksum(7), end='')\n", &function[..until]);
    let python =
        Command::new("python3").arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let Ok(mut python) = python else { return };
    python.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let out = python.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout), checksum(7));
}
