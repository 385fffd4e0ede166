//! Images that others made: a program runs as its image's configuration says.

use crate::harness::{fed, ok, refused, start, wait, world};
use sha2::Digest;
use std::io::Write;
use std::path::Path;

/// Links to busybox in the image.
const APPLETS: [&str; 7] = ["sh", "id", "pwd", "echo", "nc", "cat", "grep"];

fn header(kind: tar::EntryType, size: usize, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size as u64);
    header.set_mode(mode);
    header
}

/// A root with busybox and the user `app`, a file in /run, and the resolver of its builder.
fn layer(at: &Path) {
    let mut tar = tar::Builder::new(std::fs::File::create(at).unwrap());
    let busybox = std::fs::read("/bin/busybox").unwrap();
    let file = |data: &[u8], mode| header(tar::EntryType::Regular, data.len(), mode);
    tar.append_data(&mut file(&busybox, 0o755), "bin/busybox", &busybox[..]).unwrap();
    for applet in APPLETS {
        let mut link = header(tar::EntryType::Symlink, 0, 0o777);
        tar.append_link(&mut link, format!("bin/{applet}"), "busybox").unwrap();
    }
    for (name, text) in [
        ("etc/passwd", "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n"),
        ("etc/group", "root:x:0:\napp:x:1000:\n"),
        ("etc/resolv.conf", "# of the builder\nnameserver 192.0.2.53\n"),
        ("run/svc/state", "kept\n"),
    ] {
        tar.append_data(&mut file(text.as_bytes(), 0o644), name, text.as_bytes()).unwrap();
    }
    for (name, mode) in [("tmp/", 0o1777), ("root/", 0o700)] {
        tar.append_data(&mut header(tar::EntryType::Directory, 0, mode), name, &[][..]).unwrap();
    }
    tar.into_inner().unwrap().flush().unwrap();
}

/// A docker archive of [`layer`] with the configuration `config`.
pub fn archive(folder: &Path, config: &str) -> Vec<u8> {
    let (layer_at, archive) = (folder.join("layer.tar"), folder.join("image.tar"));
    layer(&layer_at);
    let digest = hex::encode(sha2::Sha256::digest(std::fs::read(&layer_at).unwrap()));
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","config":{config},
            "rootfs":{{"type":"layers","diff_ids":["sha256:{digest}"]}}}}"#
    );
    let manifest = r#"[{"Config":"config.json","RepoTags":["tiny:1"],"Layers":["layer.tar"]}]"#;
    let mut tar = tar::Builder::new(std::fs::File::create(&archive).unwrap());
    tar.append_path_with_name(&layer_at, "layer.tar").unwrap();
    for (name, body) in [("config.json", config.as_str()), ("manifest.json", manifest)] {
        let mut header = header(tar::EntryType::Regular, body.len(), 0o644);
        tar.append_data(&mut header, name, body.as_bytes()).unwrap();
    }
    tar.into_inner().unwrap().flush().unwrap();
    std::fs::read(archive).unwrap()
}

#[test]
fn an_archive_is_loaded_under_its_reference() {
    let world = world();
    let folder = tempfile::tempdir().unwrap();
    let tiny = archive(folder.path(), r#"{"Env":["PATH=/bin"],"Cmd":["/bin/echo","loaded"]}"#);
    // The second time, the image is there already.
    for _ in 0..2 {
        let got = fed(&["load"], &tiny);
        assert_eq!((got.code, got.out.as_str()), (0, "Loaded image: tiny:1\n"), "{}", got.err);
    }
    assert_eq!(ok(&["run", "--pull", "never", "tiny:1"]), "loaded");
    let shown: serde_json::Value =
        serde_json::from_str(&ok(&["image", "inspect", "tiny:1"])).unwrap();
    let name = shown["name"].as_str().unwrap();
    let remove = || {
        for snapshot in ok(&["snapshots", "-q"]).lines().filter(|s| s.starts_with(name)) {
            ok(&["snapshots", "rm", snapshot]);
        }
        assert_eq!(ok(&["rmi", "tiny:1"]), "tiny:1");
        refused(&["rmi", "tiny:1"], &["no image named", "tiny:1"]);
    };
    // What is saved is loaded with the same name and configuration.
    let saved = folder.path().join("saved.tar").display().to_string();
    ok(&["save", "-o", &saved, "tiny:1"]);
    remove();
    assert_eq!(ok(&["load", "-i", &saved]), "Loaded image: tiny:1");
    let loaded: serde_json::Value =
        serde_json::from_str(&ok(&["image", "inspect", "tiny:1"])).unwrap();
    assert_eq!(loaded["config"], shown["config"]);
    remove();
    world.clean();
}

#[test]
fn a_program_runs_as_its_images_configuration_says() {
    const NAME: &str = "e2e-tiny";
    let world = world();
    let folder = tempfile::tempdir().unwrap();
    let config = r#"{"Env":["A=1","PATH=/bin"],"WorkingDir":"/srv/new","User":"app",
        "Entrypoint":["/bin/sh","-c"],"Cmd":["echo cmd $A"]}"#;
    let built = fed(&["image", "build", "--from", "-", NAME], &archive(folder.path(), config));
    assert_eq!((built.code, built.out.as_str()), (0, "e2e-tiny\n"), "{}", built.err);
    // The first use of an image makes a snapshot, and the next ones clone it.
    assert_eq!(ok(&["run", NAME]), "cmd 1");
    let made: Vec<String> = ok(&["snapshots", "-q"]).lines().map(str::to_owned).collect();
    let made: Vec<&String> = made.iter().filter(|name| name.starts_with(NAME)).collect();
    let [snapshot] = made[..] else { panic!("one snapshot, got {made:?}") };
    assert_eq!(ok(&["run", NAME, "echo $A; pwd; id -u"]), "1\n/srv/new\n1000");
    let flags = ["-u", "root", "-e", "A=2", "-w", "/", "--entrypoint", "/bin/sh", NAME];
    let words = [&["run"], &flags[..], &["-c", "echo $A; pwd; id -u"]].concat();
    assert_eq!(ok(&words), "2\n/\n0");
    assert_eq!(ok(&["run", "--entrypoint", "", NAME, "id", "-u"]), "1000");
    refused(&["run", "--entrypoint", "", NAME], &["name a program"]);

    // `exec` has the same environment, without the entrypoint; and what a user may in a container.
    ok(&["create", "--name", "tiny", NAME]);
    let sh = |text: &str| ok(&["exec", "tiny", "sh", "-c", text]);
    assert_eq!(sh("echo $A; pwd; id -u"), "1\n/srv/new\n1000");
    assert_eq!(sh("echo out >/dev/stdout; echo lost >/dev/stderr"), "out");
    // The image's /run is there, and nothing of its builder's network.
    assert_eq!(sh("cat /run/svc/state"), "kept");
    let resolver = sh("cat /etc/resolv.conf");
    assert!(resolver.contains("nameserver") && !resolver.contains("192.0.2.53"), "{resolver}");
    // Programs that use ICMP sockets, such as Debian's ping, need no capability.
    assert_eq!(sh("cat /proc/sys/net/ipv4/ping_group_range"), "0\t2147483647");
    // Port 80 listens (state 0A of proc_net_tcp.txt) as long as nc has not ended.
    sh("nc -l -p 80 & until grep -q ':0050 .* 0A ' /proc/net/tcp /proc/net/tcp6; do \
        kill -0 $! || exit 1; done; kill $!");
    assert_eq!(ok(&["exec", "-w", "/root", "tiny", "pwd"]), "/root");

    // A guest that is stopped powers itself off; `wait` ends with it.
    let waits = start(&["wait", "tiny"]);
    assert_eq!(ok(&["stop", "-t", "4m", "tiny"]), "tiny");
    assert_eq!(wait(waits).out, "power_off\n");
    refused(&["stop", "tiny"], &["has exited already"]);
    ok(&["rm", "tiny"]);
    // Without any time for that, the VM is killed.
    ok(&["create", "--name", "late", NAME]);
    ok(&["stop", "-t", "0", "late"]);
    assert_eq!(ok(&["wait", "late"]), "killed");
    ok(&["rm", "late"]);
    assert_eq!(ok(&["snapshots", "-q"]).matches(NAME).count(), 1);
    ok(&["snapshots", "rm", snapshot]);
    ok(&["image", "rm", NAME]);
    world.clean();
}
