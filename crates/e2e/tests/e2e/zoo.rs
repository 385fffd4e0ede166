//! Images that tools of others made (`scripts/image-zoo`): each runs in a VM, or is refused with
//! the reason.

use crate::harness::{World, bin, dayfly, ok, refused, sh, world};
use dayfly_registry::testing::LocalRegistry;
use dayfly_units::needs;
use std::process::Command;

/// Prints the attributes of the entries of the image `links`.
const LINKS: &str = "stat -c '%a %u:%g %Y' /owned/file; stat -c %h /odd/first; \
    readlink /odd/relative; readlink /odd/absolute; readlink /odd/dangling; \
    stat -c '%F %t:%T' /odd/block; stat -c '%F %t:%T' /odd/null; stat -c %F /odd/fifo; \
    set -- /odd/*; echo $#; cat /odd/-rf";
const LINKED: &str = "4751 1234:5678 981173106\n2\n../etc/passwd\n/etc/passwd\nnowhere\n\
    block special file 7:0\ncharacter special file 1:3\nfifo\n12\nx";
/// What the image `removals`, and what was copied from it, prints.
const REMOVED: &str = "hello 1000 /data above other 0";

/// The images of the registry: name, words after the image, expected output.
const RUN: [(&str, &[&str], &str); 10] = [
    ("removals", &[], REMOVED),
    ("schema2", &[], REMOVED),
    ("zstd", &[], REMOVED),
    ("platforms", &[], "amd64"),
    ("links", &["/bin/sh", "-c", LINKS], LINKED),
    ("many", &["/bin/sh", "-c", "ls /many | wc -l; cat /many/file-4999"], "5000\n4999"),
    (
        "absolute",
        &["/bin/sh", "-c", "cat /zoo/file /zoo/real/entry; readlink /zoo/link"],
        "absolute\nbelow\n/zoo/real",
    ),
    ("python", &[], "5050 3"),
    ("static", &[], "static 1 0"),
    ("capability", &["/bin/sh", "-c", "id -u; /able/cat /etc/secret"], "0\nsecret"),
];

/// Removes an image, and the snapshots that its use made.
fn remove(world: &World, image: &str) {
    world.remove_all();
    let shown: serde_json::Value = serde_json::from_str(&ok(&["image", "inspect", image])).unwrap();
    let name = shown["name"].as_str().unwrap();
    for snapshot in ok(&["snapshots", "-q"]).lines().filter(|s| s.starts_with(name)) {
        ok(&["snapshots", "rm", snapshot]);
    }
    ok(&["rmi", image]);
}

#[test]
#[ignore = "minutes: makes images with other tools, and boots each"]
fn images_of_other_tools_run_or_are_refused() {
    if !needs::registry() {
        return;
    }
    let world = world();
    let folder = tempfile::tempdir().unwrap();
    let registry = LocalRegistry::start().unwrap();
    let script = bin().join("../../../scripts/image-zoo");
    let made = Command::new(script).arg(folder.path()).arg(registry.host()).status().unwrap();
    assert!(made.success(), "{made}");
    let of = |name: &str| format!("{}/zoo/{name}:1", registry.host());

    for (name, words, expected) in RUN {
        let image = of(name);
        let got = dayfly(&[&["run", image.as_str()], words].concat());
        assert_eq!((got.code, got.out.trim_end()), (0, expected), "{name}: {}", got.err);
        if name == "capability" {
            // Only the file's capability lets this user read.
            let as_app = |cat: &str| dayfly(&["run", "-u", "app", &image, cat, "/etc/secret"]);
            assert_eq!(as_app("/able/cat").out, "secret\n");
            assert_eq!(as_app("/bin/cat").code, 1);
        }
        remove(&world, &image);
    }
    refused(&["run", &of("foreign")], &["linux/amd64", "linux/arm64"]);
    // debugfs, which writes the disk, reads a line for each name.
    refused(&["run", &of("breaks")], &["line breaks", "\\nline"]);

    let archive = folder.path().join("archive.tar").display().to_string();
    assert_eq!(ok(&["load", "-i", &archive]), "Loaded image: zoo/archive:1");
    assert_eq!(ok(&["run", "--pull", "never", "zoo/archive:1"]), REMOVED);
    remove(&world, "zoo/archive:1");

    // systemd as PID 1 of a VM, until all of its units have started.
    let image = of("systemd");
    ok(&["create", "--boot", &image, "--init", "/sbin/init", "--name", "systemd"]);
    let state = "systemctl is-system-running --wait || systemctl --failed --no-pager";
    assert_eq!(sh("systemd", state), "running");
    assert_eq!(sh("systemd", "cat /proc/1/comm"), "systemd");
    remove(&world, &image);
    world.clean();
}
