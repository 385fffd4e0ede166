//! Clones by the dozen: each is somebody, each has what was committed, and none is had by asking again and again.
//!
//! `DAYFLY_CLONES` and `DAYFLY_FORKS` in the environment say how many where time does not matter.

use crate::harness::{BASE, dayfly, inspect, ok, sh, start, until, wait, world};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Instant;

fn times(name: &str, default: usize) -> usize {
    std::env::var(name).ok().map_or(default, |text| text.parse().unwrap())
}

fn told(what: impl Display) {
    eprintln!("e2e: {what}");
}

/// A program with random numbers of its own, which begins anew when its machine has become another.
const DRAWS: &str = r#"
import os, random, socket
own = random.Random(1)
agent = socket.socket(socket.AF_UNIX)
agent.connect("/run/dayfly/agent.sock")
agent.sendall(b"watch\n")
lines = agent.makefile("r")
assert lines.readline() == "ok\n"
open("/run/watching", "w").close()
for line in lines:
    if line.startswith("clone"):
        own.seed(os.urandom(32))
        with open("/run/drawn.new", "w") as drawn:
            drawn.write("%032x" % own.getrandbits(128))
        os.rename("/run/drawn.new", "/run/drawn")
"#;

/// Tells, when nobody can have been let in yet, what a program would see first.
const HOOK: &str = "mkdir -p /etc/dayfly/clone.d; cat >/etc/dayfly/clone.d/10-first <<'EOF'\n#!/bin/sh\n\
    test -e /run/served && echo served too early >/run/first && exit 0\n\
    od -An -tx1 -N32 /dev/urandom | tr -d ' \\n' >/run/first\nEOF\nchmod +x /etc/dayfly/clone.d/10-first";

/// What must be nobody else's, a line each: last the MAC, and the address that the kernel sends from.
const WHO: &str = "touch /run/served; cat /run/first; echo; od -An -tx1 -N32 /dev/urandom | tr -d ' \n'; echo; \
    cat /proc/sys/kernel/random/uuid /etc/machine-id; hostname; cat /run/drawn; echo; cat /sys/class/net/eth0/address; \
    python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect((\"10.88.0.1\", 9)); print(s.getsockname()[0])'";

#[test]
fn nobody_in_waves_of_clones_is_somebody_else() {
    let all = times("DAYFLY_CLONES", 8);
    // All of a wave run their hooks at once, on one emulated CPU.
    let wave = (all / 2).clamp(1, 10);
    let world = world();
    ok(&["create", "--name", "parent", BASE]);
    sh("parent", HOOK);
    let mut draws = start(&["exec", "parent", "--", "python3", "-c", DRAWS]);
    until("the program to watch", || sh("parent", "test -e /run/watching && echo yes || :") == "yes");
    let mut seen = BTreeMap::new();
    let mut done = 0;
    while done < all {
        let clones = ok(&["fork", "parent", "--count", &wave.min(all - done).to_string()]);
        let mut there = BTreeMap::new();
        for clone in clones.lines() {
            until("the program to begin anew", || sh(clone, "test -e /run/drawn && echo yes || :") == "yes");
            let who = sh(clone, WHO);
            let lines: Vec<&str> = who.lines().collect();
            assert_eq!(lines.len(), 8, "{clone}: {who}");
            assert_eq!(lines[0].len(), 64, "{clone}: {}", lines[0]);
            for (what, line) in
                ["first", "random", "uuid", "machine-id", "hostname", "drawn", "MAC", "address"]
                    .iter()
                    .zip(lines)
            {
                // Addresses are taken again when nobody has them any more.
                let seen = if ["MAC", "address"].contains(what) { &mut there } else { &mut seen };
                let before = seen.insert(line.to_owned(), (clone.to_owned(), *what));
                assert_eq!(before, None, "{what} {line} of {clone} was seen before");
            }
        }
        done += clones.lines().count();
        let clones: Vec<&str> = clones.lines().collect();
        ok(&[&["rm", "-f"], &clones[..]].concat());
    }
    told(format_args!("{done} clones of one running VM: {} facts about them, none of two", seen.len()));
    assert!(draws.try_wait().unwrap().is_none(), "the program of the parent ended");
    draws.kill().unwrap();
    wait(draws);
    world.clean();
}

/// Ten rows in each transaction, some of which reach the disk before it ends, and then its number in memory.
const WRITER: &str = r#"
import os, sqlite3, time
with open("/run/pid", "w") as pid:
    pid.write(str(os.getpid()))
db = sqlite3.connect("/root/db", isolation_level=None)
db.execute("pragma synchronous = full")
db.execute("pragma cache_size = 2")
db.execute("create table rows(transaction_number integer, n integer, text text)")
number = 0
while True:
    number += 1
    db.execute("begin immediate")
    for n in range(10):
        db.execute("insert into rows values (?, ?, ?)", (number, n, "x" * 3000))
        time.sleep(0.005)
    # So that it does not take longer and longer to look at.
    db.execute("delete from rows where transaction_number <= ?", (number - 20,))
    db.execute("commit")
    with open("/run/told.new", "w") as told:
        told.write(str(number))
    os.rename("/run/told.new", "/run/told")
"#;

/// Kills the writer, forgets what is in memory, says whether it was in the middle, and opens the database.
const OPEN: &str = r#"
kill -9 $(cat /run/pid); cat /run/told; sync; echo 3 >/proc/sys/vm/drop_caches
test -s /root/db-journal && echo " 1" || echo " 0"
python3 -c '
import sqlite3
db = sqlite3.connect("/root/db")
print(db.execute("pragma integrity_check").fetchone()[0])
print(*db.execute("select count(*), max(transaction_number), count(distinct transaction_number), count(distinct transaction_number * 10 + n) from rows").fetchone())
'
"#;

#[test]
fn a_database_that_is_written_opens_clean_in_every_clone() {
    let forks = times("DAYFLY_FORKS", 4);
    let world = world();
    ok(&["create", "--name", "writer", BASE]);
    let mut writer = start(&["exec", "writer", "--", "python3", "-c", WRITER]);
    until("the first transactions", || {
        sh("writer", "cat /run/told 2>/dev/null || echo 0").parse::<u64>().unwrap() > 1
    });
    let (mut middle, mut last) = (0, 0);
    for turn in 0..forks {
        let clone = ok(&["fork", "writer"]);
        let text = sh(&clone, OPEN);
        let words: Vec<&str> = text.split_whitespace().collect();
        let [told, hot, integrity, rows, highest, transactions, distinct] = words[..] else {
            panic!("turn {turn}: {text}")
        };
        assert_eq!(integrity, "ok", "turn {turn}");
        let number = |text: &str| text.parse::<u64>().unwrap();
        let (told, highest) = (number(told), number(highest));
        assert!(
            highest == told || highest == told + 1,
            "turn {turn}: {told} were committed, {highest} are there"
        );
        let there = highest.min(20);
        assert_eq!([rows, distinct].map(number), [there * 10; 2], "turn {turn}: part of a transaction");
        assert_eq!(number(transactions), there, "turn {turn}: one is missing");
        assert!(told > last, "turn {turn}: {told} after {last}");
        (last, middle) = (told, middle + number(hot));
        ok(&["rm", "-f", &clone]);
    }
    told(format_args!(
        "{forks} forks of a database's writer, {middle} of them in the middle of a transaction"
    ));
    assert!(middle > 0, "no fork was in the middle of a transaction");
    assert!(writer.try_wait().unwrap().is_none(), "the writer ended");
    writer.kill().unwrap();
    wait(writer);
    world.clean();
}

/// Asks for more than it may have, again and again, and writes down the answers; two seconds of that, two seconds of quiet.
const STORM: &str = r#"
import os, socket, time
while True:
    open("/run/storm", "w").close()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        agent = socket.socket(socket.AF_UNIX)
        agent.connect("/run/dayfly/agent.sock")
        agent.sendall(b"fork 3\n")
        answer = agent.makefile().readline()
        with open("/run/refused", "a") as refused:
            refused.write(answer)
    os.unlink("/run/storm")
    time.sleep(2)
"#;

/// How fast work is done in the quiet and in the storm: what else the host does hits both alike. Prints that, and how long each was.
const WORK: &str = r#"
import os, sys, time
done, took = [0, 0], [0, 0]
begun = time.monotonic()
while time.monotonic() < begun + float(sys.argv[1]):
    storm, start, n = os.path.exists("/run/storm"), time.monotonic(), 0
    while time.monotonic() < start + 0.1:
        sum(range(1000))
        n += 1
    if os.path.exists("/run/storm") == storm:
        done[storm] += n
        took[storm] += time.monotonic() - start
print(done[1] / took[1] / (done[0] / took[0]), *took)
"#;

#[test]
fn a_storm_of_forks_beyond_what_is_allowed_is_refused_and_slows_nobody() {
    // In a few seconds, beside other tests, only a storm that is not held back at all can be told from what the host does besides.
    let (seconds, least) = match times("DAYFLY_STORM_SECONDS", 0) {
        0 => ("16".to_owned(), 0.5),
        long => (long.to_string(), 0.9),
    };
    let world = world();
    ok(&["create", "--name", "calm", "--forks", "2", BASE]);
    let mut storm = start(&["exec", "calm", "--", "python3", "-c", STORM]);
    let answers = || sh("calm", "cat /run/refused 2>/dev/null | wc -l").parse::<usize>().unwrap();
    // The first are answered sooner.
    until("the storm", || answers() > 5);
    let worked = ok(&["exec", "calm", "--", "python3", "-c", WORK, &seconds]);
    assert!(storm.try_wait().unwrap().is_none(), "the storm ended");
    storm.kill().unwrap();
    wait(storm);
    let answers = sh("calm", "sort /run/refused | uniq -c");
    let why = "error: fork: expected 1 to 2 clones, got 3: this machine may have 2 at one time, 0 live";
    assert!(answers.lines().count() == 1 && answers.contains(why), "{answers}");
    told(format_args!(
        "work in a storm, by work in the quiet, and seconds of both: {worked}; {}",
        answers.trim()
    ));
    let numbers: Vec<f64> = worked.split(' ').map(|number| number.parse().unwrap()).collect();
    let [part, quiet, stormy] = numbers[..] else { panic!("{worked}") };
    assert!(quiet > 2.0 && stormy > 2.0, "{worked}");
    assert!(part >= least, "{worked}");
    assert_eq!(inspect("calm")["vm"]["state"], "running");
    assert_eq!(ok(&["ps", "-q"]).lines().count(), 1);
    world.clean();
}

#[test]
fn a_fork_is_a_template_at_once_and_when_it_is_stored() {
    let world = world();
    ok(&["create", "--name", "parent", BASE]);
    sh("parent", "echo disk >/root/before; echo keep where memory >/run/ask; cat /run/answer");
    assert_eq!(ok(&["fork", "parent", "--as", "e2e-kept"]), "e2e-kept");
    let begun = Instant::now();
    sh("parent", "echo later >/root/after");
    ok(&["create", "--name", "soon", "e2e-kept"]);
    let soon = begun.elapsed();
    ok(&["rm", "-f", "parent"]);
    let look = "cat /root/before; test -e /root/after || echo none; echo kept >/run/ask; cat /run/answer";
    let expected = |told: &str| {
        assert!(
            told.starts_with("disk\nnone\n") && told.contains(r#""kept": {"where": "memory"}"#),
            "{told}"
        );
    };
    expected(&sh("soon", look));
    let forming = || {
        let shown: serde_json::Value =
            serde_json::from_str(&ok(&["snapshots", "inspect", "e2e-kept"])).unwrap();
        shown["forming"].as_bool().unwrap()
    };
    until("it is stored", || !forming());
    told(format_args!("a clone of a fork after {soon:?}; stored after {:?}", begun.elapsed()));
    ok(&["create", "--name", "late", "e2e-kept"]);
    expected(&sh("late", look));
    ok(&["snapshot", "soon", "-t", "e2e-soon"]);
    ok(&["rm", "-f", "soon", "late"]);
    // As one that was snapshotted from the first.
    let report = dayfly(&["store", "verify"]);
    assert_eq!(report.code, 0, "{report:?}");
    ok(&["snapshots", "rm", "e2e-kept"]);
    ok(&["create", "--name", "heir", "e2e-soon"]);
    expected(&sh("heir", look));
    ok(&["rm", "-f", "heir"]);
    ok(&["snapshots", "rm", "e2e-soon"]);
    world.clean();
}
