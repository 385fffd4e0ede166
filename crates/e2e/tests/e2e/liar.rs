//! `dayfly cp` from a guest whose root has replaced the agent: the whole chain from the guest's
//! vsock through VMM, daemon and client to a folder of the user.

use crate::harness::{BASE, Ended, bin, command, dayfly, ok, on_host, sh, until, wait, world};
use dayfly_e2e::lies;
use dayfly_hostile::archives;
use dayfly_hostile::{Scratch, Verdict, check};
use std::process::{Child, Stdio};

const LIAR: &str = "/root/dayfly-liar";
/// The most by which the daemon's resident memory may grow.
const MAX_GROWTH_KIB: u64 = 32 << 10;

/// The daemon's process id, and its resident memory in KiB.
fn daemon() -> (u64, u64) {
    let got = on_host(
        "p=$(pidof dayflyd); echo $p; sed -n 's/^VmRSS:\\s*\\([0-9]*\\) kB/\\1/p' /proc/$p/status",
    );
    let numbers: Vec<u64> = got.out.lines().map(|line| line.trim().parse().unwrap()).collect();
    match numbers[..] {
        [pid, kib] => (pid, kib),
        _ => panic!("expected one dayflyd: {got:?}"),
    }
}

/// Replaces `vm`'s agent by the liar.
fn take_over(vm: &str) {
    ok(&["cp", bin().join("dayfly-liar").to_str().unwrap(), &format!("{vm}:{LIAR}")]);
    sh(vm, &format!("chmod 755 {LIAR}"));
    ok(&["exec", "-d", vm, LIAR]);
    until("the liar has the agent's socket", || {
        dayfly(&["exec", vm, "true"]).err.contains("the liar")
    });
}

/// Starts to copy `evil:PATH`.
fn begin(scratch: &Scratch, path: &str) -> Child {
    let mut command = command(&["cp", &format!("evil:{path}"), "."]);
    command.current_dir(scratch.home()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

#[test]
#[ignore = "long"]
fn an_agent_that_lies_writes_nothing_but_the_name_that_was_asked_for() {
    let world = world();
    ok(&["create", "--name", "evil", BASE]);
    ok(&["create", "--name", "good", BASE]);
    sh("good", "echo fine >/root/result.json");
    take_over("evil");
    let before = daemon();

    // These copies last until the daemon's time limit, so they run beside the others.
    let silent: Vec<_> = (lies::silent().into_iter().enumerate())
        .map(|(n, lie)| {
            let scratch = Scratch::new();
            let child = begin(&scratch, &format!("/silence-{n}/result.json"));
            (lie, scratch, child)
        })
        .collect();

    let mut peak = ("", 0);
    let mut count = 0;
    let mut copy = |path: &str, name: &'static str, verdict: &Verdict| {
        let scratch = Scratch::new();
        let ran = scratch.run(command(&["cp", &format!("evil:{path}"), "."]));
        check(name, verdict, &ran, &scratch);
        count += 1;
        if ran.peak_bytes > peak.1 {
            peak = (name, ran.peak_bytes);
        }
    };
    let mut left_out = Vec::new();
    for (n, make) in archives::all().iter().enumerate() {
        let (name, verdict) = make.about();
        if archives::LONG.contains(&name) {
            // An emulated guest takes minutes to send this archive.
            eprintln!("e2e: {name:?} is left to `cargo test -p dayfly-cli --test cp`");
            left_out.push(name);
        } else {
            copy(&format!("/archive-{n}/result.json"), name, verdict);
        }
    }
    assert_eq!(left_out, archives::LONG);
    for (n, lie) in lies::all().iter().enumerate() {
        copy(&format!("/lie-{n}/result.json"), lie.name, &lie.verdict);
    }
    assert!(count >= 60, "{count} lies");

    // The other guest and the daemon still work.
    let scratch = Scratch::new();
    let ran = scratch.run(command(&["cp", "good:/root/result.json", "."]));
    check("good", &Verdict::Written(&[("result.json", "644 fine\n")]), &ran, &scratch);
    for (lie, scratch, child) in silent {
        refused_in_the_end(&lie, &scratch, &wait(child));
    }
    let after = daemon();
    assert_eq!(after.0, before.0, "the daemon ended");
    assert!(after.1 < before.1 + MAX_GROWTH_KIB, "the daemon's memory: {before:?}, {after:?} KiB");
    eprintln!(
        "e2e: {count} lies; the most memory, {} KiB, was used for {:?}; \
         the daemon's: {} KiB, then {} KiB",
        peak.1 >> 10,
        peak.0,
        before.1,
        after.1
    );
    world.clean();
}

fn refused_in_the_end(lie: &lies::Lie, scratch: &Scratch, got: &Ended) {
    let Verdict::Refused(words) = lie.verdict else { panic!("{lie:?}") };
    assert!(
        got.code == 125 && got.err.contains(words),
        "{}: expected {words:?} in {got:?}",
        lie.name
    );
    assert_eq!(got.out, "", "{}", lie.name);
    assert_eq!(scratch.files(), Scratch::untouched_but(&[]), "{}", lie.name);
}
