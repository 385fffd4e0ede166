//! Disks that are saved and built again have the same content.

use super::disks::{everything, make};
use super::*;
use crate::disk::{Listing, Size, Source};
use crate::save::{SavedImage, write, write_layer};
use dayfly_archive::{Limits as TarLimits, Reader};
use dayfly_units::{Bytes, ImageConfig, needs};
use std::fs::File;
use std::process::Command;

const SIZE: Size = Size::Total(Bytes::mib(64));

/// An access control list as the system calls have it: the owner, user 1000, the group, the mask
/// and others.
const LIST: [u8; 44] = [
    2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 4, 0, 232, 3, 0, 0, 4, 0, 5, 0, 255, 255,
    255, 255, 16, 0, 5, 0, 255, 255, 255, 255, 32, 0, 5, 0, 255, 255, 255, 255,
];

/// What [`everything`] does not have: a list, many attributes, more extents than an inode holds, a
/// folder with a hash tree, a block device with a large number, a time before 1970.
fn more() -> Vec<u8> {
    let mut device = raw(b'4', b"dev/disk", b"", 0o660, b"");
    let mut header = tar::Header::from_byte_slice(&device[..512]).clone();
    header.set_device_major(259).unwrap();
    header.set_device_minor(700).unwrap();
    header.set_cksum();
    device[..512].copy_from_slice(header.as_bytes());
    let large = vec![b'v'; 3000];
    let records: [(&str, &[u8]); 5] = [
        ("SCHILY.xattr.system.posix_acl_access", &LIST),
        ("SCHILY.xattr.user.large", &large),
        ("SCHILY.xattr.user.small", b""),
        ("SCHILY.xattr.trusted.opaque", b"y"),
        ("mtime", b"-1.5"),
    ];
    let (count, step) = (40, 16384);
    let mut sparse = format!("{count}\n").into_bytes();
    for n in 0..count {
        sparse.extend_from_slice(format!("{}\n4096\n", n * step).as_bytes());
    }
    sparse.resize(512, 0);
    sparse.resize(512 + count * 4096, b'd');
    let length = (count * step).to_string();
    let pieces: [(&str, &[u8]); 3] = [
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.name", b"pieces"),
        ("GNU.sparse.realsize", length.as_bytes()),
    ];
    let mut all = vec![
        raw(b'5', b"./", b"", 0o711, b""),
        pax(&records),
        file("listed", b"x"),
        dir("dev"),
        device,
        pax(&pieces),
        file("GNUSparseFile.0/pieces", &sparse),
        file("empty", b""),
        dir("many"),
    ];
    all.extend((0..600).map(|n| file(&format!("many/{n:0>100}"), b"")));
    archive(&all)
}

fn config() -> ImageConfig {
    let words = |text: &str| text.split(' ').map(str::to_owned).collect();
    ImageConfig {
        entrypoint: words("/bin/a b"),
        cmd: words("c"),
        env: words("A=1 B=x=y"),
        workdir: "/srv".into(),
        user: "app:app".into(),
        exposed: words("53/udp 80/tcp"),
    }
}

fn save(images: &[SavedImage]) -> Vec<u8> {
    let mut out = Vec::new();
    write(images, &mut out, &mut |_| ()).unwrap();
    out
}

fn layer(disk: &Path) -> Vec<u8> {
    let mut out = Vec::new();
    write_layer(&File::open(disk).unwrap(), &mut out).unwrap();
    out
}

fn saved(disk: &Path, names: &[&str]) -> SavedImage {
    SavedImage {
        disk: File::open(disk).unwrap(),
        config: config(),
        names: names.iter().map(|name| (*name).to_owned()).collect(),
        created: "2026-11-28T00:00:00Z".into(),
        comment: "a test".into(),
    }
}

#[test]
fn a_disk_that_is_saved_and_built_again_has_the_same_content() {
    let temp = tempfile::tempdir().unwrap();
    let layers = [everything(), more()];
    let source = docker(temp.path(), &layers);
    let first = make(&source, &temp.path().join("cache"), "first", SIZE).unwrap();
    let archive = save(&[saved(&first.root_ext4, &["docker.io/library/app:1", "x.example/y:2"])]);
    assert_eq!(
        archive,
        save(&[saved(&first.root_ext4, &["docker.io/library/app:1", "x.example/y:2"])]),
        "the same image gives the same archive"
    );
    let path = temp.path().join("saved.tar");
    std::fs::write(&path, &archive).unwrap();
    let listing =
        Listing::open(&path, Some(&temp.path().join("list")), Limits::default(), &mut |_| ());
    let listing = listing.unwrap();
    let names: Vec<_> = listing.images.iter().map(|image| &image.names).collect();
    assert_eq!(names, [&["app:1", "x.example/y:2"]]);
    let again = make(&listing.source(&listing.images[0]), &temp.path().join("again"), "out", SIZE);
    let again = again.unwrap();
    assert_eq!(again.manifest.run, config());
    assert_eq!(layer(&again.root_ext4), layer(&first.root_ext4), "the content");
    // And by the names of the OCI layout.
    let folder = temp.path().join("layout");
    std::fs::create_dir(&folder).unwrap();
    assert!(tar_in(&folder, &path), "GNU tar reads it");
    std::fs::remove_file(folder.join("manifest.json")).unwrap();
    for tag in ["1", "2"] {
        let source = Source::detect(&folder, Some(tag.to_owned())).unwrap();
        let built = make(&source, &temp.path().join("again"), tag, SIZE).unwrap();
        assert_eq!(built.manifest.digest, again.manifest.digest, "{tag}");
    }
}

fn tar_in(folder: &Path, archive: &Path) -> bool {
    Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(folder).status().unwrap().success()
}

#[test]
fn what_is_saved_has_all_attributes_and_holes() {
    let temp = tempfile::tempdir().unwrap();
    let source = docker(temp.path(), &[everything(), more()]);
    let built = make(&source, &temp.path().join("cache"), "out", SIZE).unwrap();
    let bytes = layer(&built.root_ext4);
    assert!(bytes.len() < 2 << 20, "holes take no place: {} bytes", bytes.len());
    let mut reader = Reader::new(bytes.as_slice(), TarLimits::NONE);
    let mut seen = std::collections::BTreeMap::new();
    while let Some(entry) = reader.next_entry().unwrap() {
        seen.insert(String::from_utf8(entry.head.path.clone()).unwrap(), entry.head.clone());
    }
    let root = &seen["./"];
    assert_eq!((root.mode, root.uid), (0o711, 0));
    let ping = &seen["home/ping"];
    assert_eq!((ping.mode, ping.uid, ping.gid), (0o4755, 100_000, 70_000));
    assert_eq!((ping.mtime_s, ping.mtime_ns), (4_102_444_800, 250_000_000));
    assert_eq!(ping.xattrs[&b"security.capability"[..]].len(), 20);
    assert_eq!(seen["home/pong"].link, b"home/ping");
    assert_eq!(seen["long"].link.len(), 200);
    assert_eq!((seen["dev/null"].device, seen["dev/disk"].device), ((1, 3), (259, 700)));
    let listed = &seen["listed"];
    assert_eq!((listed.mtime_s, listed.mtime_ns), (-2, 500_000_000));
    assert_eq!(listed.xattrs[&b"system.posix_acl_access"[..]], LIST);
    assert_eq!(listed.xattrs[&b"user.large"[..]], vec![b'v'; 3000]);
    assert_eq!(listed.xattrs[&b"user.small"[..]], b"");
    assert_eq!(listed.xattrs[&b"trusted.opaque"[..]], b"y");
    assert!(!seen.contains_key("lost+found/"), "the folder of mke2fs: {:?}", seen.keys());
    assert_eq!(seen.keys().filter(|name| name.starts_with("many/")).count(), 601);
}

#[test]
fn images_that_are_saved_together_share_what_is_equal() {
    let temp = tempfile::tempdir().unwrap();
    let source = docker(temp.path(), &[archive(&[file("a", &vec![7; 1 << 20])])]);
    let built = make(&source, &temp.path().join("cache"), "out", SIZE).unwrap();
    let one = save(&[saved(&built.root_ext4, &["a:1"])]);
    let two = save(&[saved(&built.root_ext4, &["a:1"]), saved(&built.root_ext4, &[])]);
    assert!(two.len() < one.len() + (64 << 10), "{} and {} bytes", one.len(), two.len());
    let path = temp.path().join("saved.tar");
    std::fs::write(&path, two).unwrap();
    let listing = Listing::open(&path, Some(temp.path()), Limits::default(), &mut |_| ()).unwrap();
    assert_eq!(listing.images.len(), 2);
    assert_eq!((listing.images[0].names.len(), listing.images[1].names.len()), (1, 0));
}

#[test]
fn skopeo_reads_what_is_saved() {
    if !needs::registry() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let source = docker(temp.path(), &[everything(), more()]);
    let built = make(&source, &temp.path().join("cache"), "out", SIZE).unwrap();
    let path = temp.path().join("saved.tar");
    std::fs::write(&path, save(&[saved(&built.root_ext4, &["docker.io/library/app:1"])])).unwrap();
    let skopeo = |arguments: &[&str]| {
        let out = Command::new("skopeo").env("TMPDIR", temp.path()).args(arguments).output();
        let out = out.unwrap();
        assert!(out.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    for from in ["oci-archive", "docker-archive"] {
        let place = |name: &str| format!("{from}:{}:{name}", path.display());
        let place = place(if from == "oci-archive" { "1" } else { "docker.io/library/app:1" });
        let shown: serde_json::Value = serde_json::from_str(&skopeo(&["inspect", &place])).unwrap();
        assert_eq!(shown["Architecture"], "amd64", "{from}: {shown}");
        assert_eq!(shown["Env"], serde_json::json!(["A=1", "B=x=y"]), "{from}: {shown}");
        let config: serde_json::Value =
            serde_json::from_str(&skopeo(&["inspect", "--config", &place])).unwrap();
        assert_eq!(config["config"]["User"], "app:app", "{from}: {config}");
        // A copy verifies all digests.
        let to = format!("dir:{}", temp.path().join(from).display());
        skopeo(&["copy", "--insecure-policy", "-q", &place, &to]);
    }
}

/// A docker archive of these layers.
fn docker(folder: &Path, layers: &[Vec<u8>]) -> Source {
    let diffs: Vec<String> = layers.iter().map(|l| crate::disk::blobs::sha256(l)).collect();
    let config = serde_json::json!({"os": "linux", "architecture": "amd64",
        "rootfs": {"type": "layers", "diff_ids": diffs}});
    let names: Vec<String> = (0..layers.len()).map(|n| format!("l{n}.tar")).collect();
    let manifest =
        serde_json::json!([{"Config": "c.json", "RepoTags": null, "Layers": names}]).to_string();
    let mut members = vec![file("c.json", config.to_string().as_bytes())];
    members.extend(names.iter().zip(layers).map(|(name, layer)| file(name, layer)));
    members.push(file("manifest.json", manifest.as_bytes()));
    let path = folder.join("docker.tar");
    std::fs::write(&path, archive(&members)).unwrap();
    Source::detect(&path, None).unwrap()
}
