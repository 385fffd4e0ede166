//! Programs on a terminal.

mod common;

use common::{Client, Guest, sh, started};
use dayfly_api::agent::{ExecSpec, FrameKind, WindowSize};

#[test]
fn a_terminal_with_a_size_that_changes() {
    let guest = Guest::start();
    let mut client = guest.connect();
    let spec = ExecSpec {
        stdin: true,
        pty: Some(WindowSize { rows: 24, cols: 80 }),
        ..sh("tty >/dev/null && stty size; trap 'stty size' WINCH; echo up; until read x; do :; \
             done; echo got $x $TERM; ps -o tty= -p $$ >/dev/null; cat; echo err >&2")
    };
    let pid = started(&mut client, spec);
    let mut seen = String::new();
    let until = |client: &mut Client, seen: &mut String, wanted: &str| {
        while !seen.contains(wanted) {
            let (kind, body) = client.frame().unwrap();
            assert_eq!(kind, FrameKind::Stdout);
            seen.push_str(&String::from_utf8_lossy(&body));
        }
    };
    until(&mut client, &mut seen, "24 80\r\nup\r\n");
    client.send(FrameKind::Resize, br#"{"rows":50,"cols":132}"#);
    // The signal arrives before `sh` reads, or interrupts the read, which `sh` then repeats.
    client.send(FrameKind::Stdin, b"hello\n");
    until(&mut client, &mut seen, "got hello xterm\r\n");
    assert!(seen.contains("50 132\r\n"), "{seen}");
    client.send(FrameKind::StdinEnd, &[]);
    let out = client.output(pid);
    assert!(out.text().contains("err\r\n") && out.stderr.is_empty(), "{out:?}");
    assert_eq!(out.exit.code, Some(0));
}

#[test]
fn a_terminal_loses_no_output_at_its_end() {
    let guest = Guest::start();
    for _ in 0..20 {
        let spec = ExecSpec { pty: Some(WindowSize { rows: 24, cols: 80 }), ..sh("seq 1 20000") };
        let out = guest.exec(spec, b"");
        assert_eq!(out.text().lines().count(), 20_000);
    }
}
