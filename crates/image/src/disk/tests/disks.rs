//! Finished disks, read back with e2fsprogs.

use super::*;
use crate::disk::{BuildOptions, BuiltImage, Size, Source, build};
use crate::manifest::{ImageManifest, Sealed};
use dayfly_units::Bytes;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

fn options(cache: &Path, size: Size) -> BuildOptions {
    BuildOptions { size, cache: Some(cache.to_owned()), ..BuildOptions::default() }
}

pub(super) fn make(
    source: &Source,
    cache: &Path,
    out: &str,
    size: Size,
) -> Result<BuiltImage, BuildError> {
    build(source, &options(cache, size), &cache.join(out), &mut |_| ())
}

/// The output of debugfs for one request.
fn debugfs(image: &BuiltImage, request: &str) -> String {
    let out = Command::new("/usr/sbin/debugfs")
        .arg("-R")
        .arg(request)
        .arg(&image.root_ext4)
        .output()
        .unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn bytes_of(image: &BuiltImage, path: &str) -> Vec<u8> {
    let out = tempfile::NamedTempFile::new().unwrap();
    debugfs(image, &format!("dump \"{path}\" {}", out.path().display()));
    std::fs::read(out.path()).unwrap()
}

fn says(image: &BuiltImage, request: &str, words: &[&str]) {
    let text = debugfs(image, request);
    assert!(words.iter().all(|w| text.contains(w)), "{request}: {words:?} in {text}");
}

/// A docker archive of one layer.
fn docker(folder: &Path, layer: &[u8]) -> Source {
    let config = serde_json::json!({"os": "linux", "architecture": "amd64",
        "rootfs": {"type": "layers", "diff_ids": [crate::disk::blobs::sha256(layer)]}})
    .to_string();
    let manifest = serde_json::json!([{"Config": "c.json", "RepoTags": null, "Layers": ["l.tar"]}])
        .to_string();
    let path = folder.join("saved.tar");
    let members = [
        file("c.json", config.as_bytes()),
        file("l.tar", layer),
        file("manifest.json", manifest.as_bytes()),
    ];
    std::fs::write(&path, archive(&members)).unwrap();
    Source::detect(&path, None).unwrap()
}

/// An archive with one entry of each kind, with names that debugfs might misread.
pub(super) fn everything() -> Vec<u8> {
    let mut device = raw(b'3', b"dev/null", b"", 0o666, b"");
    let mut header = tar::Header::from_byte_slice(&device[..512]).clone();
    header.set_device_major(1).unwrap();
    header.set_device_minor(3).unwrap();
    header.set_cksum();
    device[..512].copy_from_slice(header.as_bytes());
    let mut sparse = b"1\n1048576\n5\n".to_vec();
    sparse.resize(512, 0);
    sparse.extend_from_slice(b"there");
    let owner: [(&str, &[u8]); 4] = [
        ("uid", b"100000"),
        ("gid", b"70000"),
        ("mtime", b"4102444800.25"),
        ("SCHILY.xattr.security.capability", b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
    ];
    let sparse_records: [(&str, &[u8]); 3] = [
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.name", b"sparse"),
        ("GNU.sparse.realsize", b"2097152"),
    ];
    archive(&[
        raw(b'5', b"home", b"", 0o2751, b""),
        pax(&owner),
        raw(b'0', b"home/ping", b"", 0o4755, b"ping"),
        hard_link("home/pong", "home/ping"),
        symlink("short", "home/ping"),
        symlink("long", &"x/".repeat(100)),
        dir("dev"),
        device,
        raw(b'6', b"pipe", b"", 0o600, b""),
        pax(&sparse_records),
        file("GNUSparseFile.0/sparse", &sparse),
        file("<12>", b"angle"),
        file("a \"b\" c", b"quotes"),
        file("-f", b"dash"),
        file("#x", b"hash"),
        file("\u{fc}ml", b"utf8"),
        dir("lost+found"),
        file("etc/machine-id", b"0123456789abcdef0123456789abcdef\n"),
        file("etc/resolv.conf", b"nameserver 9.9.9.9\n"),
    ])
}

#[test]
fn everything_arrives_and_the_same_input_gives_the_same_disk() {
    let temp = tempfile::tempdir().unwrap();
    let source = docker(temp.path(), &everything());
    let image =
        make(&source, &temp.path().join("one"), "out", Size::Total(Bytes::mib(64))).unwrap();
    says(
        &image,
        "stat /home/ping",
        &["Mode: 04755", "User: 100000", "Group: 70000", "Links: 2", "security.capability (20)"],
    );
    says(&image, "stat /home/ping", &["mtime: 0xf4865700:3b9aca01 -- Fri Jan 1 00:00:00 2100"]);
    assert_eq!(bytes_of(&image, "/home/pong"), b"ping");
    says(&image, "stat /home", &["Type: directory", "Mode: 02751", "mtime: 0x5f5e1000"]);
    says(&image, "stat /short", &["Type: symlink", "Fast link dest: \"home/ping\""]);
    assert_eq!(bytes_of(&image, "/long").len(), 200);
    says(&image, "stat /dev/null", &["Type: character special", "Mode: 0666", "number: 01:03"]);
    says(&image, "stat /pipe", &["Type: FIFO", "Mode: 0600"]);
    says(&image, "stat /sparse", &["Size: 2097152", "Blockcount: 8"]);
    assert_eq!(&bytes_of(&image, "/sparse")[(1 << 20) - 1..(1 << 20) + 6], b"\0there\0");
    for (name, data) in [
        ("/<12>", "angle"),
        ("/a \"\"b\"\" c", "quotes"),
        ("/-f", "dash"),
        ("/#x", "hash"),
        ("/\u{fc}ml", "utf8"),
    ] {
        assert_eq!(bytes_of(&image, name), data.as_bytes(), "{name}");
    }
    says(&image, "stat /etc/machine-id", &["Size: 0", "Mode: 0444"]);
    assert_eq!(bytes_of(&image, "/etc/resolv.conf"), b"");
    assert!(bytes_of(&image, "/etc/hosts").starts_with(b"127.0.0.1\tlocalhost\n"));
    for (folder, mode) in [("proc", "0555"), ("sys", "0555"), ("run", "0755"), ("tmp", "01777")] {
        says(&image, &format!("stat /{folder}"), &["Type: directory", mode]);
    }
    says(&image, "stats", &["Reserved block count: 0", "metadata_csum"]);
    says(&image, "stat <8>", &["Size: 16777216"]);
    // A guest's kernel initialises groups without this mark, and so writes into the layer of every
    // clone.
    let groups = Command::new("/usr/sbin/dumpe2fs").arg(&image.root_ext4).output().unwrap();
    let groups = String::from_utf8_lossy(&groups.stdout).into_owned();
    // 64 MiB are one block group.
    assert_eq!(groups.matches("ITABLE_ZEROED").count(), 1, "{groups}");

    let stat = image.root_ext4.metadata().unwrap();
    assert_eq!((stat.len(), stat.permissions().mode() & 0o777), (64 << 20, 0o444));
    assert!(stat.blocks() * 512 <= image.manifest.content_bytes + (1 << 20), "{stat:?}");
    let on_disk = ImageManifest::load(&temp.path().join("one/out/manifest")).unwrap();
    assert_eq!(on_disk, image.manifest);
    assert_eq!(std::fs::read_dir(temp.path().join("one/staging")).unwrap().count(), 0);

    // A build in another second and another folder gives the same bytes.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let again = make(
        &source,
        &temp.path().join("another, longer place"),
        "out",
        Size::Total(Bytes::mib(64)),
    )
    .unwrap();
    assert_eq!(again.manifest.digest, image.manifest.digest);
    let other = docker(temp.path(), &archive(&[file("a", b"1")]));
    let other =
        make(&other, &temp.path().join("one"), "other", Size::Total(Bytes::mib(64))).unwrap();
    assert_ne!(other.manifest.digest, image.manifest.digest);
}

#[test]
fn sizes() {
    let temp = tempfile::tempdir().unwrap();
    let source = docker(temp.path(), &archive(&[file("a", &vec![7; 20 << 20])]));
    let auto = make(&source, temp.path(), "auto", Size::Auto).unwrap();
    assert_eq!(auto.manifest.size_bytes, 2 << 30);
    let free = make(&source, temp.path(), "free", Size::Free(Bytes::mib(100))).unwrap();
    let stats = debugfs(&free, "stats");
    let blocks: u64 =
        stats.split("Free blocks: ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(
        (100..140).contains(&(blocks / 256)),
        "{} MiB free of {}",
        blocks / 256,
        free.manifest.size_bytes
    );
    let error = make(&source, temp.path(), "small", Size::Total(Bytes::mib(30))).unwrap_err();
    let BuildError::TooSmall { needed_bytes, asked_bytes } = error else { panic!("{error}") };
    assert_eq!(asked_bytes, 30 << 20);
    // The size that the error names is enough.
    make(&source, temp.path(), "enough", Size::Total(Bytes(needed_bytes))).unwrap();
    assert!(!temp.path().join("small").exists());
}

#[test]
fn a_folder_is_taken_as_it_is() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path().join("root");
    std::fs::create_dir_all(root.join("d/e")).unwrap();
    std::fs::write(root.join("d/f"), b"data").unwrap();
    std::fs::hard_link(root.join("d/f"), root.join("g")).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", root.join("l")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    let sparse = std::fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(50 << 20).unwrap();
    let privileged = dayfly_units::needs::root();
    if privileged {
        std::os::unix::fs::chown(root.join("d/f"), Some(1234), Some(70_000)).unwrap();
    }
    std::fs::set_permissions(root.join("d/f"), std::fs::Permissions::from_mode(0o4750)).unwrap();
    xattr::set(root.join("d/f"), "user.note", b"n").unwrap();
    let image = make(
        &Source::detect(&root, None).unwrap(),
        temp.path(),
        "out",
        Size::Total(Bytes::mib(64)),
    )
    .unwrap();
    says(&image, "stat /d/f", &["Mode: 04750", "Links: 2", "user.note (1) = \"n\""]);
    if privileged {
        says(&image, "stat /d/f", &["User: 1234", "Group: 70000"]);
    }
    says(&image, "stat /l", &["Fast link dest: \"/etc/passwd\""]);
    says(&image, "stat /sparse", &["Size: 52428800", "Blockcount: 0"]);
    says(&image, "stat /socket", &["not found"]);
    assert_eq!(bytes_of(&image, "/g"), b"data");
}

#[test]
fn an_attack_leaves_nothing_behind() {
    let temp = tempfile::tempdir().unwrap();
    let target = temp.path().join("target");
    let cache = temp.path().join("cache");
    for entries in [
        vec![file(&format!("../../../../../../../../..{}", target.display()), b"x")],
        vec![pax(&[("path", format!("..{}", target.display()).as_bytes())]), file("ok", b"x")],
        vec![file("ok", b"x"), hard_link("e", "../../ok")],
    ] {
        let source = docker(temp.path(), &archive(&entries));
        let text = make(&source, &cache, "out", Size::Auto).unwrap_err().to_string();
        assert!(text.contains("saved.tar: l.tar: entry") && text.contains("expected"), "{text}");
        assert!(!target.exists() && !cache.join("out").exists());
        assert_eq!(std::fs::read_dir(cache.join("staging")).unwrap().count(), 0);
    }
}

#[test]
fn a_name_that_debugfs_cannot_write_is_refused() {
    let temp = tempfile::tempdir().unwrap();
    let source = docker(temp.path(), &archive(&[file("a\nrm b", b"x")]));
    let text = make(&source, temp.path(), "out", Size::Auto).unwrap_err().to_string();
    assert!(text.contains("line breaks") && text.contains("rm b"), "{text}");
}

#[test]
fn neither_folder_nor_archive() {
    let temp = tempfile::tempdir().unwrap();
    assert!(matches!(Source::detect(&temp.path().join("none"), None), Err(BuildError::Io { .. })));
    assert!(matches!(
        Source::detect(Path::new("/dev/null"), None),
        Err(BuildError::UnknownSource { .. })
    ));
    let path = temp.path().join("x.tar");
    std::fs::write(&path, archive(&[file("x", b"")])).unwrap();
    let text = make(&Source::detect(&path, None).unwrap(), temp.path(), "out", Size::Auto)
        .unwrap_err()
        .to_string();
    assert!(text.contains("neither manifest.json nor index.json"), "{text}");
    std::fs::write(&path, b"no archive at all, but long enough to be one".repeat(20)).unwrap();
    let text = make(&Source::detect(&path, None).unwrap(), temp.path(), "out", Size::Auto)
        .unwrap_err()
        .to_string();
    assert!(text.contains("x.tar") && text.contains("tar header"), "{text}");
}

/// Reads the same image as umoci and skopeo write it, if they are installed.
#[test]
fn images_of_umoci_and_skopeo() {
    let temp = tempfile::tempdir().unwrap();
    let run = |program: &str, args: &[&str]| {
        let out = Command::new(program).args(args).current_dir(temp.path()).output();
        out.map(|o| {
            assert!(
                o.status.success(),
                "{program} {args:?}: {}",
                String::from_utf8_lossy(&o.stderr)
            )
        })
    };
    if run("umoci", &["init", "--layout", "layout"]).is_err() {
        println!("umoci is not installed: its images were not tried");
        return;
    }
    std::fs::create_dir_all(temp.path().join("new/sub")).unwrap();
    std::fs::write(temp.path().join("new/sub/file"), b"from umoci").unwrap();
    run("umoci", &["new", "--image", "layout:t"]).unwrap();
    run("umoci", &["insert", "--image", "layout:t", "--rootless", "new", "/opt"]).unwrap();
    run("umoci", &["insert", "--image", "layout:t", "--rootless", "new", "/gone"]).unwrap();
    run("umoci", &["insert", "--image", "layout:t", "--rootless", "--whiteout", "/gone/sub"])
        .unwrap();
    run(
        "umoci",
        &["config", "--image", "layout:t", "--config.env", "X=1", "--config.cmd", "/opt/sub/file"],
    )
    .unwrap();
    let layout = Source::detect(&temp.path().join("layout"), Some("t".to_owned())).unwrap();
    assert!(matches!(layout, Source::OciLayout { .. }));
    let image = make(&layout, temp.path(), "from-layout", Size::Total(Bytes::mib(64))).unwrap();
    assert_eq!(bytes_of(&image, "/opt/sub/file"), b"from umoci");
    says(&image, "stat /gone/sub", &["not found"]);
    assert_eq!(image.manifest.run.cmd, ["/opt/sub/file"]);
    assert!(image.manifest.run.env.contains(&"X=1".to_owned()));
    if run(
        "skopeo",
        &["copy", "--insecure-policy", "oci:layout:t", "docker-archive:saved.tar:name:tag"],
    )
    .is_err()
    {
        println!("skopeo is not installed: its archives were not tried");
        return;
    }
    let source = Source::detect(&temp.path().join("saved.tar"), None).unwrap();
    let saved = make(&source, temp.path(), "from-archive", Size::Total(Bytes::mib(64))).unwrap();
    assert_eq!(saved.manifest.digest, image.manifest.digest);
    assert_eq!(saved.manifest.run, image.manifest.run);
}

#[test]
fn names_of_the_host_that_built_the_image_are_replaced() {
    let temp = tempfile::tempdir().unwrap();
    for (number, (resolver, left)) in [
        (vec![], true),
        (vec![file("etc/resolv.conf", b"nameserver 192.0.2.53\n")], true),
        (vec![file("etc/resolv.conf", b"# comments only\n")], true),
        (
            vec![
                symlink("etc/resolv.conf", "../run/r/stub"),
                dir("run/r"),
                file("run/r/stub", b"nameserver 192.0.2.53\n"),
            ],
            true,
        ),
        // The agent replaces it, unless a program has made the target by then.
        (vec![symlink("etc/resolv.conf", "../run/r/stub")], false),
    ]
    .into_iter()
    .enumerate()
    {
        let mut layer = vec![file("etc/hosts", b"192.0.2.1 builder\n")];
        layer.extend(resolver);
        let source = docker(temp.path(), &archive(&layer));
        let out = format!("out{number}");
        let image = make(&source, temp.path(), &out, Size::Total(Bytes::mib(64))).unwrap();
        let expected = if left { "Type: regular" } else { "Type: symlink" };
        says(&image, "stat /etc/resolv.conf", &[expected]);
        assert_eq!(bytes_of(&image, "/etc/resolv.conf"), b"", "{number}");
        let hosts = String::from_utf8(bytes_of(&image, "/etc/hosts")).unwrap();
        assert!(hosts.starts_with("127.0.0.1\tlocalhost\n") && !hosts.contains("builder"));
    }
}

#[test]
fn an_archive_is_read_from_a_pipe() {
    let temp = tempfile::tempdir().unwrap();
    let Source::Archive { path: saved, .. } = docker(temp.path(), &archive(&[file("a", b"1")]))
    else {
        unreachable!("docker() makes an archive")
    };
    let plain = std::fs::read(saved).unwrap();
    for (name, sent) in
        [("plain", plain.clone()), ("packed", zstd::encode_all(&plain[..], 1).unwrap())]
    {
        let pipe = temp.path().join(name);
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let writer = std::thread::spawn({
            let pipe = pipe.clone();
            move || std::fs::write(pipe, sent).unwrap()
        });
        let source = Source::detect(&pipe, None).unwrap();
        let out = format!("out-{name}");
        let image = make(&source, temp.path(), &out, Size::Total(Bytes::mib(64))).unwrap();
        writer.join().unwrap();
        assert_eq!(bytes_of(&image, "/a"), b"1");
    }
}
