//! Forks of a running VM: the clones have the VM's state of one instant and a new identity, and the
//! VM runs on.

use crate::harness::{BASE, dayfly, fed, inspect, ok, refused, sh, start, until, wait, world};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::time::Duration;

/// Counts in a file in memory, without end.
const COUNTING: &str = "i=0; while :; do i=$((i+1)); echo $i >/run/count.new; \
    mv /run/count.new /run/count; sleep 0.05; done";

fn count(vm: &str) -> u64 {
    sh(vm, "cat /run/count 2>/dev/null || echo 0").parse().unwrap()
}

/// Forks `vm` and returns the clones' ids.
fn fork(vm: &str, more: &[&str]) -> Vec<String> {
    let mut words = vec!["fork", vm];
    words.extend(more);
    ok(&words).lines().map(ToOwned::to_owned).collect()
}

#[test]
fn clones_of_a_running_vm_have_its_memory_its_disk_and_its_programs() {
    let world = world();
    ok(&["create", "--name", "parent", BASE]);
    sh("parent", "echo disk >/root/before; echo keep where memory >/run/ask; cat /run/answer");
    let attached = start(&["exec", "parent", "--", "/bin/sh", "-c", COUNTING]);
    until("the counter", || count("parent") > 3);
    let clones = fork("parent", &["--count", "2"]);
    assert_eq!(clones.len(), 2);
    sh("parent", "echo later >/root/after; echo keep later yes >/run/ask; cat /run/answer");
    let mut seen = BTreeSet::new();
    for vm in ["parent"].into_iter().chain(clones.iter().map(String::as_str)) {
        let identity = "hostname; cat /etc/machine-id /run/dayfly/clone-id; \
            od -An -tx1 -N32 /dev/urandom | tr -d ' \n'";
        let out = sh(vm, identity);
        let lines: BTreeSet<String> = out.lines().map(ToOwned::to_owned).collect();
        assert!(lines.len() >= 3 && seen.is_disjoint(&lines), "{vm}: {out}, of others {seen:?}");
        seen.extend(lines);
        // In a clone the counter has no client, but it runs.
        let then = count(vm);
        assert!(then > 3, "{vm}: {then}");
        until("the counter to go on", || count(vm) > then);
    }
    for clone in &clones {
        assert_eq!(sh(clone, "cat /root/before; test -e /root/after || echo none"), "disk\nnone");
        let kept = sh(clone, "echo kept >/run/ask; cat /run/answer");
        assert!(kept.contains(r#""kept": {"where": "memory"}"#), "{kept}");
        assert_eq!(inspect(clone)["vm"]["forked_from"], inspect("parent")["vm"]["id"]);
        sh(clone, "echo mine >/root/mine");
    }
    // The parent's client still runs. Its end stops the counter in the parent, not in the clones.
    let mut attached = attached;
    assert!(attached.try_wait().unwrap().is_none(), "the fork broke a connection of the parent");
    attached.kill().unwrap();
    wait(attached);
    until("the counter to end with its client", || {
        let then = count("parent");
        std::thread::sleep(Duration::from_millis(700));
        count("parent") == then
    });
    let then = count(&clones[0]);
    until("the clone's counter to go on", || count(&clones[0]) > then);

    // A clone of a clone after its ancestors are removed, and a snapshot of that clone.
    let [grandchild] =
        <[String; 1]>::try_from(fork(&clones[1], &["--name", "grandchild", "-l", "a=b"])).unwrap();
    ok(&["rm", "-f", "parent", &clones[0], &clones[1]]);
    assert_eq!(inspect(&grandchild)["vm"]["labels"]["a"], "b");
    assert_eq!(sh("grandchild", "hostname; cat /root/before /root/mine"), "grandchild\ndisk\nmine");
    ok(&["snapshot", "grandchild", "-t", "e2e-forked"]);
    ok(&["rm", "-f", "grandchild"]);
    ok(&["create", "--name", "heir", "e2e-forked"]);
    assert_eq!(sh("heir", "cat /root/before /root/mine"), "disk\nmine");
    ok(&["rm", "-f", "heir"]);
    ok(&["snapshots", "rm", "e2e-forked"]);
    world.clean();
}

/// Accepts connections on a vsock port, one after the other, answers every line with the host name,
/// and appends to a file how each connection ended.
const LISTENER: &str = r#"
import socket
listener = socket.socket(socket.AF_VSOCK)
listener.bind((socket.VMADDR_CID_ANY, 7000))
listener.listen()
with open("/run/listens", "w"):
    pass
while True:
    stream, _ = listener.accept()
    try:
        while stream.recv(100):
            stream.sendall(socket.gethostname().encode() + b"\n")
        how = "closed"
    except OSError as e:
        how = e.strerror
    stream.close()
    with open("/run/ends", "a") as ends:
        ends.write(how + "\n")
"#;

#[test]
fn a_connection_ends_in_the_clone_and_goes_on_in_the_parent() {
    let world = world();
    ok(&["create", "--name", "parent", BASE]);
    let program = start(&["exec", "parent", "--", "python3", "-c", LISTENER]);
    until("the program to listen", || {
        sh("parent", "test -e /run/listens && echo yes; true") == "yes"
    });
    let mut open = start(&["connect", "parent", "7000"]);
    let (mut input, mut output) =
        (open.stdin.take().unwrap(), BufReader::new(open.stdout.take().unwrap()));
    let mut ask = || {
        let mut line = String::new();
        input.write_all(b"who\n").unwrap();
        output.read_line(&mut line).unwrap();
        line
    };
    assert_eq!(ask(), "parent\n");
    let [clone] = <[String; 1]>::try_from(fork("parent", &["--name", "clone"])).unwrap();
    // The inherited connection has ended, so the program accepts the next one.
    let got = fed(&["connect", &clone, "7000"], b"who\n");
    assert_eq!((got.code, got.out.as_str()), (0, "clone\n"), "{}", got.err);
    let ends = || sh("clone", "cat /run/ends").lines().map(str::to_owned).collect::<Vec<_>>();
    until("the second end", || ends().len() > 1);
    assert_eq!(ends(), ["Connection reset by peer", "closed"]);
    assert_eq!(ask(), "parent\n", "the parent's connection did not outlive the fork");
    assert_eq!(sh("parent", "test -e /run/ends || echo none"), "none");
    drop(input);
    wait(open);
    until("the end in the parent", || sh("parent", "cat /run/ends 2>/dev/null; true") == "closed");
    let mut program = program;
    program.kill().unwrap();
    wait(program);
    world.clean();
}

#[test]
fn a_fork_beyond_the_hosts_memory_is_refused_and_the_vm_goes_on() {
    let world = world();
    ok(&["create", "--name", "only", BASE]);
    refused(&["fork", "only", "--count", "4096"], &["memory", "missing"]);
    refused(&["fork", "absent"], &["absent"]);
    // It runs for the fork, and is paused again.
    ok(&["pause", "only"]);
    assert_eq!(fork("only", &[]).len(), 1);
    let state = || inspect("only")["vm"]["state"].clone();
    until("it is paused again", || state() == "paused");
    ok(&["unpause", "only"]);
    assert_eq!(fork("only", &[]).len(), 1);
    sh("only", "true");
    world.clean();
}

/// Appends to a journal on disk, and after each fsync writes the number of entries to a file in
/// memory.
const JOURNAL: &str = r#"
import os
journal = os.open("/root/journal", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
with open("/run/pid", "w") as pid:
    pid.write(str(os.getpid()))
n = 0
while True:
    n += 1
    os.write(journal, b"%08d\n" % n)
    os.fsync(journal)
    with open("/run/synced.new", "w") as synced:
        synced.write(str(n))
    os.rename("/run/synced.new", "/run/synced")
"#;

#[test]
fn a_journal_is_neither_ahead_of_memory_nor_behind_it() {
    let world = world();
    ok(&["create", "--name", "writer", BASE]);
    let writer = start(&["exec", "writer", "--", "python3", "-c", JOURNAL]);
    until("the journal", || sh("writer", "test -e /run/synced && echo yes || :") == "yes");
    let mut last = 0;
    for turn in 0..6 {
        until("one more entry", || sh("writer", "cat /run/synced").parse::<u64>().unwrap() > last);
        let clone = fork("writer", &[]).pop().unwrap();
        // The writer also runs in the clone, so it is stopped first. The page cache is dropped, so
        // that the journal comes from the disk.
        let look = "kill -STOP $(cat /run/pid); cat /run/synced; echo; sync; \
                    echo 3 >/proc/sys/vm/drop_caches; \
                    tail -n 1 /root/journal; wc -l </root/journal";
        let out = sh(&clone, look);
        let numbers: Vec<u64> = out.split_whitespace().map(|n| n.parse().unwrap()).collect();
        let [memory, disk, lines] = numbers[..] else { panic!("{out}") };
        assert!(
            disk == memory || disk == memory + 1,
            "turn {turn}: memory says {memory}, the journal {disk}"
        );
        assert_eq!(lines, disk, "every entry is there");
        assert!(memory > last, "turn {turn}: {memory} after {last}");
        last = memory;
        assert!(!dayfly(&["exec", &clone, "dmesg"]).out.contains("EXT4-fs error"), "turn {turn}");
        ok(&["rm", "-f", &clone]);
    }
    let mut writer = writer;
    assert!(writer.try_wait().unwrap().is_none(), "the writer ended");
    writer.kill().unwrap();
    wait(writer);
    world.clean();
}

/// Requests a fork over the agent's socket.
const ASK: &str = r#"
import socket
agent = socket.socket(socket.AF_UNIX)
agent.connect("/run/dayfly/agent.sock")
agent.sendall(b"fork\n")
answer = agent.makefile().readline()
open("/root/asked", "w").write(answer)
print(answer, end="")
"#;

#[test]
fn a_vm_forks_itself_as_often_as_its_owner_allows() {
    let world = world();
    ok(&["create", "--name", "self", "--forks", "2", BASE]);
    // As fork(2), the command returns in the parent and in each clone, inside a running `sh`.
    let ids = sh(
        "self",
        "x=before; n=$(/run/dayfly/dayfly-fork 2); echo \"$x $n\" >/root/answer; echo $n",
    );
    let words: Vec<&str> = ids.split(' ').collect();
    let [zero, one, two] = words[..] else { panic!("{ids:?}") };
    assert_eq!((zero, sh("self", "cat /root/answer")), ("0", format!("before {ids}")));
    for (number, clone) in [("1", one), ("2", two)] {
        until("the clone to know its number", || {
            sh(clone, "cat /root/answer 2>/dev/null || :") == format!("before {number}")
        });
        assert_eq!(inspect(clone)["vm"]["forked_from"], inspect("self")["vm"]["id"]);
        let own = dayfly(&["exec", clone, "/run/dayfly/dayfly-fork"]);
        assert!(own.code == 1 && own.err.contains("may not fork itself"), "{own:?}");
    }
    assert_ne!(sh(one, "cat /run/dayfly/clone-id"), sh(two, "cat /run/dayfly/clone-id"));
    let more = dayfly(&["exec", "self", "/run/dayfly/dayfly-fork"]);
    assert!(more.code == 1 && more.err.contains("may have 2 at one time, 2 live"), "{more:?}");
    ok(&["rm", "-f", two]);
    let answer = ok(&["exec", "self", "--", "python3", "-c", ASK]);
    let third = answer.strip_prefix("0 ").unwrap();
    until("the clone to know its number", || sh(third, "cat /root/asked 2>/dev/null || :") == "1");
    // Another user than root may not fork.
    let other = dayfly(&["exec", "--user", "nobody", "self", "/run/dayfly/dayfly-fork"]);
    assert_ne!(other.code, 0, "{other:?}");
    let unasked = dayfly(&["exec", "self", "/run/dayfly/dayfly-fork", "many"]);
    assert!(
        unasked.code == 1 && unasked.err.contains("expected `fork`, `fork COUNT`"),
        "{unasked:?}"
    );
    world.clean();
}

/// Watches with a barrier: acknowledges each fork before the fork happens, and notes afterwards in
/// which VM it runs.
const WATCH: &str = r#"
import os, signal, socket, time
signal.signal(37, lambda *_: open("/run/signalled", "a").write("37\n"))
agent = socket.socket(socket.AF_UNIX)
agent.connect("/run/dayfly/agent.sock")
agent.sendall(b"watch barrier 37\n")
lines = agent.makefile("rw")
assert lines.readline() == "ok\n"
open("/run/watching", "w").close()
for line in lines:
    if line == "fork\n":
        with open("/run/held", "a") as held:
            held.write("held\n")
        lines.write("go\n")
        lines.flush()
    else:
        with open("/run/is.new", "w") as name:
            name.write(line)
        os.rename("/run/is.new", "/run/is")
"#;

/// Installs a hook that notes its environment and the clone's identity.
const HOOK: &str = "mkdir -p /etc/dayfly/clone.d; \
    cat >/etc/dayfly/clone.d/10-identity <<'EOF'\n#!/bin/sh\n\
    echo $DAYFLY_CLONE_NUMBER $DAYFLY_HOSTNAME $(hostname) $DAYFLY_CLONE_ID \
    $(cat /etc/machine-id /run/dayfly/clone-id) >/run/hooked\n\
    EOF\nchmod +x /etc/dayfly/clone.d/10-identity; cat /run/dayfly/clone-id";

#[test]
fn hooks_and_programs_that_watch_learn_of_a_fork_before_it_is_served() {
    let world = world();
    ok(&["create", "--name", "watched", BASE]);
    let own = sh("watched", HOOK);
    // Detached, because a program with a client ends in the clones of a snapshot, where the client
    // is missing.
    let begin = "setsid python3 /run/watch.py </dev/null >/dev/null 2>&1 & echo $! >/run/pid";
    sh("watched", &format!("cat >/run/watch.py <<'EOF'\n{WATCH}\nEOF\n{begin}"));
    until("the program to watch", || {
        sh("watched", "test -e /run/watching && echo yes || :") == "yes"
    });
    let clones = fork("watched", &["--count", "2"]);
    for (number, clone) in (1..).zip(&clones) {
        // No wait: the hooks end before the agent serves the first program.
        let out = sh(clone, "hostname; cat /run/dayfly/clone-id /run/hooked");
        let [name, id, hooked] = out.lines().collect::<Vec<_>>()[..] else { panic!("{out}") };
        assert_eq!(hooked, format!("{number} {name} {name} {id} {id} {own}"), "{clone}");
        until("the program to learn its VM", || {
            sh(clone, "cat /run/is 2>/dev/null || :") == format!("clone {number} {id}")
        });
        assert_eq!(sh(clone, "cat /run/held /run/signalled"), "held\n37");
    }
    until("the parent to go on", || sh("watched", "cat /run/is 2>/dev/null || :") == "parent");
    assert_eq!(
        sh("watched", "cat /run/held; ls /run/signalled /run/hooked 2>/dev/null || :"),
        "held"
    );
    // The clones of a snapshot also run the hooks and notify programs that watch.
    ok(&["snapshot", "watched", "-t", "e2e-watched"]);
    ok(&["create", "--name", "heir", "e2e-watched"]);
    let out = sh("heir", "cat /run/hooked");
    assert!(out.starts_with("0 heir heir ") && out.ends_with(&own), "{out}");
    until("the heir to learn its VM", || sh("heir", "cat /run/is").starts_with("clone 0 "));
    assert_eq!(sh("watched", "cat /run/is; wc -l </run/held"), "parent\n2");
    // A clone whose hook fails is never served.
    sh(
        "watched",
        "f=/etc/dayfly/clone.d/20-fails; printf '#!/bin/sh\\nexit 7\\n' >$f; chmod +x $f",
    );
    let before = ok(&["ps", "-q"]);
    refused(&["fork", "watched"], &["/etc/dayfly/clone.d/20-fails: expected exit code 0, got 7"]);
    // The client gets its answer before the clone is removed.
    until("the failed clone to be gone", || ok(&["ps", "-q"]) == before);
    sh("watched", "kill -0 $(cat /run/pid)");
    ok(&["rm", "-f", "heir"]);
    ok(&["snapshots", "rm", "e2e-watched"]);
    world.clean();
}
