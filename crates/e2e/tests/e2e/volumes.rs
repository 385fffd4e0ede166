//! Volumes: files pass in both directions, and what the ends of VMs, servers and daemons do.

use crate::harness::{
    BASE, World, dayfly, home, inspect, machine, ok, on_host, refused, sh, until, world,
};
use std::path::PathBuf;

/// The snapshot that the tests make.
const KEPT: &str = "e2e-volumes";

/// The servers of volumes that run.
fn servers() -> usize {
    on_host("pidof dayfly-volume").out.split_whitespace().count()
}

/// Kills the daemon and waits until another answers.
fn another_daemon() {
    // By its number: other processes of its program join streams, and live on.
    let lock: PathBuf = if machine() { "/run/dayfly".into() } else { home().join("run") };
    on_host(&format!("kill -9 $(cat {}/dayflyd.lock)", lock.display()));
    until("another daemon answers", || dayfly(&["ps"]).code == 0);
}

fn problem(vm: &str, volume: usize) -> String {
    let problem = &inspect(vm)["vm"]["volumes"][volume]["problem"];
    problem.as_str().unwrap_or_default().to_owned()
}

fn end(world: &World, volumes: &[&str]) {
    world.remove_all();
    until("the servers have ended", || servers() == 0);
    for volume in volumes {
        ok(&["volume", "rm", volume]);
    }
    world.clean();
}

#[test]
fn a_named_volume_outlives_its_vms() {
    let world = world();
    let write = "echo one >/data/a && stat -c '%u %g' /data /data/a";
    let words = ["run", "-v", "e2e-named:/data", BASE, "--", "sh", "-c", write];
    assert_eq!(ok(&words), "0 0\n0 0");
    ok(&["create", "--name", "reader", "-v", "e2e-named:/data:ro", BASE]);
    assert_eq!(sh("reader", "cat /data/a; echo x 2>&- >/data/b || echo refused"), "one\nrefused");
    let shown = &inspect("reader")["vm"]["volumes"][0];
    assert_eq!((&shown["target"], &shown["read_only"]), (&"/data".into(), &true.into()));
    assert_eq!(ok(&["volume", "ls", "-q", "--filter", "name=named"]), "e2e-named");
    refused(&["volume", "rm", "e2e-named"], &["VM reader has it"]);
    assert_eq!(servers(), 1);
    end(&world, &["e2e-named"]);
}

/// A folder of the user's host, which is outside of the machine if there is one.
#[test]
fn a_folder_of_the_users_host_is_shared_with_the_users_rights() {
    let world = world();
    let folder = tempfile::tempdir().unwrap();
    let own = |name: &str| folder.path().join(name);
    std::fs::write(own("in"), "from the host").unwrap();
    std::fs::create_dir(own("sub")).unwrap();
    let shared = |to: &str| format!("{}:{to}", folder.path().display());
    let program = "cat /work/in && echo out >/work/sub/out && stat -c %u /work/in && ls /work";
    let words = ["run", "-v", &shared("/work"), BASE, "--", "sh", "-c", program];
    assert_eq!(ok(&words), "from the host0\nin\nsub");
    assert_eq!(std::fs::read_to_string(own("sub/out")).unwrap(), "out\n");
    use std::os::unix::fs::MetadataExt;
    let user = rustix::process::geteuid().as_raw();
    assert_eq!(std::fs::metadata(own("sub/out")).unwrap().uid(), user, "it is the user's own");

    // A missing folder is made; a read-only one stays as it is.
    let new = format!("{}:/new:ro", own("new/folder").display());
    ok(&["create", "--name", "stays", "-v", &shared("/work"), "-v", &new, BASE]);
    assert!(own("new/folder").is_dir());
    assert_eq!(sh("stays", "touch /new/x 2>&- || echo refused"), "refused");
    std::fs::write(own("later"), "x").unwrap();
    assert_eq!(sh("stays", "cat /work/later; head -c 3M /dev/zero >/work/big; sync"), "x");
    assert_eq!(std::fs::metadata(own("big")).unwrap().len(), 3 << 20);
    let shown = inspect("stays")["vm"]["volumes"][0]["source"].clone();
    assert_eq!(shown["path"], folder.path().to_str().unwrap());
    // A fork asks for another stream.
    let fork = ok(&["fork", "stays"]);
    assert_eq!(sh(&fork, "cat /work/later; echo fork >/work/fork"), "x");
    assert_eq!(std::fs::read_to_string(own("fork")).unwrap(), "fork\n");
    another_daemon();
    assert_eq!(sh("stays", "cat /work/fork"), "fork");
    ok(&["rm", "-f", &fork]);
    ok(&["restart", "-t", "60s", "stays"]);
    assert_eq!(sh("stays", "cat /work/fork"), "fork");
    let file = format!("{}:/file", own("in").display());
    refused(&["create", "-v", &file, BASE], &["expected a folder, got a file"]);
    end(&world, &[]);
}

#[test]
#[ignore = "minutes: make long"]
fn volumes_of_clones_forks_and_vms_that_start_again() {
    let world = world();
    ok(&["volume", "create", "e2e-data"]);
    let volumes = ["-v", "e2e-data:/data", "-v", "e2e-other:/data/in side:ro"];
    ok(&[&["create", "--name", "one"], &volumes[..], &[BASE]].concat());
    sh("one", "echo first >/data/a");
    assert_eq!(sh("one", "cd '/data/in side' && ls; touch x 2>&- || echo refused"), "refused");

    // A program that has a file open, and is in the folder. In a clone both are of the VM before.
    let program = "cd /data; exec 3<a; while sleep 0.2; do cat <&3; ls; done >/root/out 2>&1";
    ok(&["exec", "-d", "one", "--", "sh", "-c", program]);
    until("it runs", || sh("one", "cat /root/out 2>&1 || :").contains("first"));
    let fork = ok(&["fork", "one"]);
    assert_eq!(
        sh(&fork, "cat /data/a; echo fork >/data/f; grep -c ' /data ' /proc/mounts"),
        "first\n1"
    );
    until("the clone's program gets ENOTCONN", || {
        sh(&fork, "cat /root/out").contains("not connected")
    });
    assert_eq!(sh("one", "cat /data/f; grep -c connected /root/out || :"), "fork\n0");
    assert_eq!(servers(), 4);

    // A clone of a snapshot has none, unless it asks for them.
    ok(&["snapshot", "one", "-t", KEPT]);
    ok(&["create", "--name", "none", KEPT]);
    assert_eq!(
        sh("none", "mountpoint /data; ls -A /data | grep -v 'in side'; :"),
        "/data is not a mountpoint"
    );
    ok(&["create", "--name", "again", "-v", "e2e-data:/data", KEPT]);
    assert_eq!(sh("again", "cat /data/f && echo again >/data/g"), "fork");
    assert_eq!(sh("one", "cat /data/g"), "again");

    // A daemon that is killed takes nothing along, and the next one knows all.
    another_daemon();
    assert_eq!(sh("one", "echo later >/data/l; cat /data/f"), "fork");
    assert_eq!(sh(&fork, "cat /data/l"), "later");
    assert_eq!(ok(&["doctor", "--leaks"]).matches("process").count(), 0);
    refused(&["volume", "rm", "e2e-data"], &["has it"]);

    // A server that is killed is noticed.
    let kill = "kill $(for p in $(pidof dayfly-volume); do \
                 grep -lz \"$1\" /proc/$p/cmdline; done | head -n 1 | cut -d / -f 3)";
    let id = inspect("again")["vm"]["id"].as_str().unwrap().to_owned();
    on_host(&kill.replace("$1", &id));
    until("it is noticed", || problem("again", 0).contains("ENOTCONN"));
    assert!(sh("again", "cat /data/f 2>&1 || :").contains("not connected"));
    until("there is an event", || {
        let since = ["events", "--since", "1d", "--until", "now", "--filter", "kind=volume_lost"];
        ok(&since).contains("again")
    });
    ok(&["restart", "-t", "60s", "again"]);
    assert_eq!((sh("again", "cat /data/f"), problem("again", 0)), ("fork".into(), String::new()));

    // A VM that ends ends its servers, and has its volumes again when it starts.
    ok(&["rm", "-f", &fork, "none", "again"]);
    ok(&["kill", "one"]);
    until("its servers have ended", || servers() == 0);
    refused(&["volume", "rm", "e2e-data"], &["VM one (ended)"]);
    ok(&["start", "one"]);
    assert_eq!(
        sh("one", "cat /data/l; touch '/data/in side/x' 2>&- || echo refused"),
        "later\nrefused"
    );
    ok(&["snapshots", "rm", KEPT]);
    end(&world, &["e2e-data", "e2e-other"]);
}
