//! Programs and VMs that outlive their client, and end as asked.

use crate::harness::{BASE, dayfly, end_of, inspect, ok, sh, until, world};

#[test]
fn programs_and_vms_outlive_their_client_and_end_as_asked() {
    let world = world();
    let first = ["/bin/sh", "-c", "echo begun; exec sleep 10000"];
    let words = ["run", "-d", "--name", "d", "--label", "tier=x", "--ttl", "7d", BASE];
    let vm = ok(&[&words[..], &first[..]].concat());
    until("the output of its program", || ok(&["logs", "d"]) == "begun");
    let listed = ok(&["ps", "--filter", "label=tier", "--format", "{{.ID}} {{.Label \"tier\"}}"]);
    assert_eq!(listed, format!("{vm} x"));

    let text = "trap 'echo ended; exit 7' TERM; echo ready; while :; do sleep 0.1; done";
    let id = ok(&["exec", "-d", "d", "/bin/sh", "-c", text]);
    until("its trap is set", || ok(&["logs", "d", &id]) == "ready");
    ok(&["program", "kill", "d", &id]);
    let waited = dayfly(&["program", "wait", "d", &id]);
    assert_eq!(waited.code, 7, "{waited:?}");
    assert_eq!(ok(&["logs", "--tail", "1", "d", &id]), "ended");
    let programs = ok(&["program", "ls", "d"]);
    assert!(programs.contains(&id) && programs.contains("exited (7)"), "{programs}");
    assert_eq!(programs.lines().count(), 3, "the one of run, too: {programs}");

    ok(&["exec", "d", "/bin/sh", "-c", "(sleep 1; echo x; echo y; touch /run/done) &"]);
    until("what was left behind writes and goes on", || sh("d", "ls /run").contains("done"));

    ok(&["run", "-d", "--rm", "--name", "brief", BASE, "/bin/true"]);
    until("a VM is removed with its program", || !ok(&["ps", "-a"]).contains("brief"));

    assert!(inspect("d")["vm"]["ends_unix_ms"].is_u64());
    ok(&["update", "--ttl", "1s", "d"]);
    assert_eq!(end_of("d").0, "ttl");
    // The clocks of this host and of the daemon's may differ a little.
    let words = ["events", "--since", "1d", "--until", "now", "--filter", "vm=d"];
    until("all events are of the past", || {
        let events = ok(&words);
        let has = |kind| events.contains(&format!(" {kind} d ({vm})"));
        has("created") && has("updated") && has("exited")
    });
    world.clean();
}
