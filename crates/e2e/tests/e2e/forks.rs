//! Clones of a machine that runs: they have what it had at one instant, are somebody else, and it goes on.

use crate::harness::{BASE, dayfly, fed, inspect, ok, refused, sh, start, until, wait, world};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::time::Duration;

/// Counts in a file in memory, without end.
const COUNTING: &str =
    "i=0; while :; do i=$((i+1)); echo $i >/run/count.new; mv /run/count.new /run/count; sleep 0.05; done";

fn count(vm: &str) -> u64 {
    sh(vm, "cat /run/count 2>/dev/null || echo 0").parse().unwrap()
}

/// Forks `vm`; the clones' ids.
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
        let tell =
            "hostname; cat /etc/machine-id /run/dayfly/clone-id; od -An -tx1 -N32 /dev/urandom | tr -d ' \n'";
        let told = sh(vm, tell);
        let lines: BTreeSet<String> = told.lines().map(ToOwned::to_owned).collect();
        assert!(lines.len() >= 3 && seen.is_disjoint(&lines), "{vm}: {told}, of others {seen:?}");
        seen.extend(lines);
        // Nobody reads what it writes in a clone, but it runs.
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
    // The parent's client is still there, and what it started goes with it, only there.
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

    // A clone of a clone, when nothing else of the family is left; and a snapshot of that.
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

/// Takes connections on a vsock port, one after the other: tells how each ended, and answers every line with the host's name.
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
    until("the program to listen", || sh("parent", "test -e /run/listens && echo yes; true") == "yes");
    let mut open = start(&["connect", "parent", "7000"]);
    let (mut input, mut output) = (open.stdin.take().unwrap(), BufReader::new(open.stdout.take().unwrap()));
    let mut ask = || {
        let mut line = String::new();
        input.write_all(b"who\n").unwrap();
        output.read_line(&mut line).unwrap();
        line
    };
    assert_eq!(ask(), "parent\n");
    let [clone] = <[String; 1]>::try_from(fork("parent", &["--name", "clone"])).unwrap();
    // What it inherited is over, so that the same program takes the next one.
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
    refused(&["fork", "nobody"], &["nobody"]);
    ok(&["pause", "only"]);
    refused(&["fork", "only"], &["cannot fork a VM that is paused"]);
    ok(&["unpause", "only"]);
    assert_eq!(fork("only", &[]).len(), 1);
    sh("only", "true");
    world.clean();
}

/// Appends to a journal on disk, and tells in memory how far it is once that is on disk.
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
    with open("/run/told.new", "w") as told:
        told.write(str(n))
    os.rename("/run/told.new", "/run/told")
"#;

#[test]
fn a_journal_is_neither_ahead_of_memory_nor_behind_it() {
    let world = world();
    ok(&["create", "--name", "writer", BASE]);
    let writer = start(&["exec", "writer", "--", "python3", "-c", JOURNAL]);
    until("the journal", || sh("writer", "test -e /run/told && echo yes || :") == "yes");
    let mut last = 0;
    for turn in 0..6 {
        let clone = fork("writer", &[]).pop().unwrap();
        // In the clone it writes on: stopped, memory and disk are looked at once it stands. What the page cache holds is left out.
        let look = "kill -STOP $(cat /run/pid); cat /run/told; echo; sync; echo 3 >/proc/sys/vm/drop_caches; \
                    tail -n 1 /root/journal; wc -l </root/journal";
        let told = sh(&clone, look);
        let numbers: Vec<u64> = told.split_whitespace().map(|n| n.parse().unwrap()).collect();
        let [memory, disk, lines] = numbers[..] else { panic!("{told}") };
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

/// A few lines of Python against the agent's socket.
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
fn a_machine_forks_itself_as_often_as_its_owner_allows() {
    let world = world();
    ok(&["create", "--name", "self", "--forks", "2", BASE]);
    // Two answers to one question, as of fork(2), in the middle of a shell.
    let told = sh("self", "x=before; n=$(/run/dayfly/dayfly-fork 2); echo \"$x $n\" >/root/told; echo $n");
    let words: Vec<&str> = told.split(' ').collect();
    let [zero, one, two] = words[..] else { panic!("{told:?}") };
    assert_eq!((zero, sh("self", "cat /root/told")), ("0", format!("before {told}")));
    for (number, clone) in [("1", one), ("2", two)] {
        until("the clone to know its number", || {
            sh(clone, "cat /root/told 2>/dev/null || :") == format!("before {number}")
        });
        assert_eq!(inspect(clone)["vm"]["forked_from"], inspect("self")["vm"]["id"]);
        let own = dayfly(&["exec", clone, "/run/dayfly/dayfly-fork"]);
        assert!(own.code == 1 && own.err.contains("may not fork itself"), "{own:?}");
    }
    assert_ne!(sh(one, "cat /run/dayfly/clone-id"), sh(two, "cat /run/dayfly/clone-id"));
    let more = dayfly(&["exec", "self", "/run/dayfly/dayfly-fork"]);
    assert!(more.code == 1 && more.err.contains("may have 2 at one time, 2 live"), "{more:?}");
    ok(&["rm", "-f", two]);
    let told = ok(&["exec", "self", "--", "python3", "-c", ASK]);
    let third = told.strip_prefix("0 ").unwrap();
    until("the clone to know its number", || sh(third, "cat /root/asked 2>/dev/null || :") == "1");
    // Another user of the guest has no say.
    let other = dayfly(&["exec", "--user", "nobody", "self", "/run/dayfly/dayfly-fork"]);
    assert_ne!(other.code, 0, "{other:?}");
    let unasked = dayfly(&["exec", "self", "/run/dayfly/dayfly-fork", "many"]);
    assert!(unasked.code == 1 && unasked.err.contains("expected `fork`, `fork COUNT`"), "{unasked:?}");
    world.clean();
}

/// Holds its writes while its machine is forked, and tells which machine it is in then.
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
        with open("/run/is.new", "w") as told:
            told.write(line)
        os.rename("/run/is.new", "/run/is")
"#;

const HOOK: &str = "mkdir -p /etc/dayfly/clone.d; cat >/etc/dayfly/clone.d/10-tell <<'EOF'\n#!/bin/sh\n\
    echo $DAYFLY_CLONE_NUMBER $DAYFLY_HOSTNAME $(hostname) $DAYFLY_CLONE_ID $(cat /etc/machine-id /run/dayfly/clone-id) >/run/hooked\n\
    EOF\nchmod +x /etc/dayfly/clone.d/10-tell; cat /run/dayfly/clone-id";

#[test]
fn hooks_and_programs_that_watch_learn_of_a_fork_before_it_is_served() {
    let world = world();
    ok(&["create", "--name", "watched", BASE]);
    let own = sh("watched", HOOK);
    // A program of its own: one that a client waits for would end in the clones of a snapshot, where nobody does.
    let begin = "setsid python3 /run/watch.py </dev/null >/dev/null 2>&1 & echo $! >/run/pid";
    sh("watched", &format!("cat >/run/watch.py <<'EOF'\n{WATCH}\nEOF\n{begin}"));
    until("the program to watch", || sh("watched", "test -e /run/watching && echo yes || :") == "yes");
    let clones = fork("watched", &["--count", "2"]);
    for (number, clone) in (1..).zip(&clones) {
        // Nothing is waited for: all of it was done before the first program was let in.
        let told = sh(clone, "hostname; cat /run/dayfly/clone-id /run/hooked");
        let [name, id, hooked] = told.lines().collect::<Vec<_>>()[..] else { panic!("{told}") };
        assert_eq!(hooked, format!("{number} {name} {name} {id} {id} {own}"), "{clone}");
        until("the program to learn who it is", || {
            sh(clone, "cat /run/is 2>/dev/null || :") == format!("clone {number} {id}")
        });
        assert_eq!(sh(clone, "cat /run/held /run/signalled"), "held\n37");
    }
    until("the parent to go on", || sh("watched", "cat /run/is 2>/dev/null || :") == "parent");
    assert_eq!(sh("watched", "cat /run/held; ls /run/signalled /run/hooked 2>/dev/null || :"), "held");
    // A snapshot's clones are told, too.
    ok(&["snapshot", "watched", "-t", "e2e-watched"]);
    ok(&["create", "--name", "heir", "e2e-watched"]);
    let told = sh("heir", "cat /run/hooked");
    assert!(told.starts_with("0 heir heir ") && told.ends_with(&own), "{told}");
    until("the heir to learn who it is", || sh("heir", "cat /run/is").starts_with("clone 0 "));
    assert_eq!(sh("watched", "cat /run/is; wc -l </run/held"), "parent\n2");
    // A clone that cannot be made what it is to be is never served.
    sh(
        "watched",
        "printf '#!/bin/sh\\nexit 7\\n' >/etc/dayfly/clone.d/20-fails; chmod +x /etc/dayfly/clone.d/20-fails",
    );
    let before = ok(&["ps", "-q"]);
    refused(&["fork", "watched"], &["/etc/dayfly/clone.d/20-fails: expected exit code 0, got 7"]);
    // Who asked is answered before it is gone.
    until("the one that failed to be gone", || ok(&["ps", "-q"]) == before);
    sh("watched", "kill -0 $(cat /run/pid)");
    ok(&["rm", "-f", "heir"]);
    ok(&["snapshots", "rm", "e2e-watched"]);
    world.clean();
}
