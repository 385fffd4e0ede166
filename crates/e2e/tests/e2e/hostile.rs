//! Attacks by a guest on its host: at worst the guest itself is lost.

use crate::harness::{BASE, dayfly, end_of, ok, on_host, refused, sh, state_dir, until, world};

/// Requests a clone from the host directly, not through the agent: once from any port, and once
/// from a port that only root may bind.
const FORK_BY_VSOCK: &str = r#"
import errno, socket, struct
for port in (None, 700):
    host = socket.socket(socket.AF_VSOCK)
    host.settimeout(200)
    try:
        if port:
            host.bind((socket.VMADDR_CID_ANY, port))
        host.connect((2, 1026))
        request = b'{"op":"fork","count":1}'
        host.sendall(struct.pack("<IB", len(request), 1) + request)
        print(port, host.recv(4096))
    except OSError as e:
        print(port, errno.errorcode[e.errno])
"#;

#[test]
fn only_root_of_a_guest_has_clones_of_it() {
    let world = world();
    ok(&["create", "--name", "self", "--forks", "2", BASE]);
    let vms = || ok(&["ps", "-aq"]).lines().count();
    let by_user = ok(&["exec", "--user", "nobody", "self", "--", "python3", "-c", FORK_BY_VSOCK]);
    assert_eq!(by_user, "None ECONNRESET\n700 EACCES");
    // The agent checks the user that connects, whatever the socket's mode is.
    sh(
        "self",
        "chmod 777 /run/dayfly /run/dayfly/agent.sock; cp -L /run/dayfly/dayfly-fork /tmp; \
         chmod 755 /tmp/dayfly-fork",
    );
    let asked = dayfly(&["exec", "--user", "nobody", "self", "/tmp/dayfly-fork"]);
    assert!(asked.code == 1 && asked.err.contains("expected a program of user 0"), "{asked:?}");
    assert_eq!(vms(), 1);
    assert!(sh("self", "/run/dayfly/dayfly-fork").starts_with("0 "));
    assert_eq!(vms(), 2);
    world.clean();
}

/// Forks its VM once; the clone writes 4 MB to its disk and powers itself off.
const FORK_AND_DIE: &str = "n=$(/run/dayfly/dayfly-fork 1) || exit 7; \
    case $n in 0*) exit 0;; esac; head -c 4000000 /dev/urandom >/root/junk; sync; \
    echo o >/proc/sysrq-trigger; sleep 1000";

#[test]
fn clones_that_die_count_until_they_are_removed() {
    let world = world();
    ok(&["create", "--name", "mother", "--forks", "1", BASE]);
    let ids = || ok(&["ps", "-aq"]).lines().map(ToOwned::to_owned).collect::<Vec<_>>();
    let before = ids();
    sh("mother", FORK_AND_DIE);
    let clone = ids().into_iter().find(|id| !before.contains(id)).expect("a clone");
    assert_eq!(end_of(&clone).0, "power_off");
    let used = || -> u64 {
        let got = on_host(&format!("du -sk {}/vms | cut -f1", state_dir()));
        got.out.trim().parse().unwrap_or_else(|_| panic!("{got:?}"))
    };
    let (vms, kib) = (ids(), used());
    for _ in 0..5 {
        let more = dayfly(&["exec", "mother", "/run/dayfly/dayfly-fork"]);
        assert!(
            more.code == 1 && more.err.contains("may have 1 at one time, 0 live, 1 ended"),
            "{more:?}"
        );
    }
    assert_eq!(ids(), vms);
    // The VM itself writes little meanwhile.
    assert!(used() < kib + 2048, "{kib} KiB before, {} after", used());
    ok(&["rm", &clone]);
    sh("mother", FORK_AND_DIE);
    world.clean();
}

#[test]
fn a_program_is_refused_at_once_where_accounts_cannot_be_read() {
    let world = world();
    for (name, file, make, why) in [
        ("fifo", "passwd", "mkfifo /etc/passwd", "etc/passwd: expected a regular file, got a fifo"),
        ("folder", "group", "mkdir /etc/group", "etc/group: expected a regular file, got a folder"),
        (
            "device",
            "passwd",
            "ln -s /dev/zero /etc/passwd",
            "expected a regular file, got a character device",
        ),
        (
            "long",
            "passwd",
            "truncate -s 1T /etc/passwd",
            "etc/passwd: expected at most 4194304 bytes",
        ),
    ] {
        ok(&["create", "--name", name, BASE]);
        sh(name, &format!("rm /etc/{file}; {make}"));
        refused(&["exec", name, "true"], &[why]);
    }
    world.clean();
}

#[test]
fn the_newest_output_of_a_detached_program_is_kept() {
    let world = world();
    ok(&["create", "--name", "talks", BASE]);
    let program = "yes 0123456789abcde | head -c 5242880; echo; echo the newest line; sleep 1000";
    let pid = ok(&["exec", "-d", "talks", "/bin/sh", "-c", program]);
    until("the newest line", || ok(&["logs", "talks", &pid]).ends_with("\nthe newest line"));
    let log = ok(&["logs", "talks", &pid]);
    assert!(log.len() <= 300 << 10 && log.starts_with("[dayfly: "), "{} bytes", log.len());
    // The console's log does not have it.
    assert!(!ok(&["logs", "talks"]).contains("the newest line"));
    refused(
        &["logs", "talks", "1"],
        &["detached program 1: expected one whose output is kept", &pid],
    );
    // A clone has the logs of its programs.
    let clone = ok(&["fork", "talks"]);
    assert_eq!(ok(&["logs", &clone, &pid]), log);
    world.clean();
}

#[test]
fn what_a_guest_says_reaches_a_pipe_as_it_is_and_an_error_escaped() {
    let world = world();
    ok(&["create", "--name", "rude", BASE]);
    let rude = "\x1b]52;c;bW9v\x07\u{9b}2J\u{202e}";
    assert_eq!(sh("rude", &format!("printf '%s' '{rude}'")), rude);
    let got = dayfly(&["exec", "-w", &format!("/{rude}\nforged: line"), "rude", "true"]);
    assert_eq!(got.code, 127, "{got:?}");
    assert!(!got.err.contains(|c: char| c.is_control() && c != '\n'), "{:?}", got.err);
    assert_eq!(got.err.lines().count(), 1, "{:?}", got.err);
    world.clean();
}
