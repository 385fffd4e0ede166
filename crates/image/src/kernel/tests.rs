//! Kernels are built once, and errors name what is missing.

use super::*;
use crate::kernel::build_modules;
use dayfly_boot::fuzzing::{small_image, small_kernel};
use sha2::Digest;
use std::io::Write;
use std::process::{Command, Stdio};

/// A small kernel.
fn elf() -> Vec<u8> {
    small_kernel(3000)
}

fn length_of(data: &[u8]) -> [u8; 4] {
    u32::try_from(data.len()).unwrap().to_le_bytes()
}

fn sample() -> Vec<u8> {
    let module = |name: &str, bytes: &[u8]| modules::Module {
        name: name.to_owned(),
        path: format!("kernel/{name}.ko"),
        bytes: bytes.to_vec(),
        needs: vec![],
        optional: false,
    };
    let found = Modules {
        release: "6.12.1".to_owned(),
        files: vec![module("b", b"123"), module("sub/a", b"")],
        builtin: vec![],
    };
    pack(b"agent!", &found).unwrap()
}

#[test]
fn cpio_reads_what_we_write() {
    let bytes = sample();
    assert_eq!(bytes, sample());
    // The bytes are those of the versions before, so kernels in caches stay valid.
    let golden = "e6bfe0eb3fa2446ab8b4bdcc6ef2e56bd583e8c8adf3d2fe882a2d4cf019f4ab";
    assert_eq!(hex::encode(sha2::Sha256::digest(&bytes)), golden);
    assert!(bytes.len().is_multiple_of(512));
    let temp = tempfile::tempdir().unwrap();
    let cpio = |args: &[&str]| {
        let mut child = Command::new("cpio")
            .args(args)
            .current_dir(temp.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success());
        String::from_utf8(out.stdout).unwrap()
    };
    let names: Vec<String> = cpio(&["-it", "--quiet"]).lines().map(str::to_owned).collect();
    let expected = "dev proc sys newroot dev/console etc etc/dayfly etc/dayfly/modules lib \
        lib/modules lib/modules/6.12.1 lib/modules/6.12.1/kernel \
        lib/modules/6.12.1/kernel/b.ko lib/modules/6.12.1/kernel/sub \
        lib/modules/6.12.1/kernel/sub/a.ko init";
    assert_eq!(names, expected.split_whitespace().collect::<Vec<_>>());
    let long = cpio(&["-itv", "--quiet"]);
    let line =
        |name: &str| long.lines().find(|l| l.ends_with(&format!(" {name}"))).unwrap().to_owned();
    assert!(
        line("dev/console").starts_with("crw-------") && line("dev/console").contains("5,   1"),
        "{long}"
    );
    assert!(line("init").starts_with("-rwxr-xr-x"), "{long}");
    cpio(&[
        "-id",
        "--quiet",
        "--no-preserve-owner",
        "init",
        "etc/dayfly/modules",
        "lib/modules/6.12.1/kernel/b.ko",
    ]);
    assert_eq!(std::fs::read(temp.path().join("init")).unwrap(), b"agent!");
    assert_eq!(std::fs::read(temp.path().join("lib/modules/6.12.1/kernel/b.ko")).unwrap(), b"123");
    let list = std::fs::read_to_string(temp.path().join("etc/dayfly/modules")).unwrap();
    assert_eq!(list, "/lib/modules/6.12.1/kernel/b.ko\n/lib/modules/6.12.1/kernel/sub/a.ko\n");
}

/// A tree like an unpacked package's, with an ELF for every module.
fn tree(folder: &Path, without: &str) {
    let kernel = folder.join("lib/modules/6.12.1/kernel");
    std::fs::create_dir_all(&kernel).unwrap();
    std::fs::create_dir_all(folder.join("boot")).unwrap();
    let packed = zstd::encode_all(&elf()[..], 19).unwrap();
    let payload = [&packed[..], &length_of(&elf())].concat();
    std::fs::write(folder.join("boot/vmlinuz-6.12.1"), small_image(&payload)).unwrap();
    let mut dep = String::new();
    for (number, name) in GUEST_MODULES.iter().enumerate().filter(|(_, name)| **name != without) {
        let module = [b"\x7fELF module ", name.as_bytes()].concat();
        std::fs::write(kernel.join(format!("{name}.ko")), module).unwrap();
        dep.push_str(&format!(
            "kernel/{name}.ko:{}\n",
            if number == 0 { " kernel/virtio-rng.ko" } else { "" }
        ));
    }
    std::fs::write(folder.join("lib/modules/6.12.1/modules.dep"), dep).unwrap();
    std::fs::write(folder.join("lib/modules/6.12.1/modules.builtin"), "kernel/virtio_blk.ko\n")
        .unwrap();
}

#[test]
fn a_kernel_is_built_once() {
    let temp = tempfile::tempdir().unwrap();
    let (cache, agent, out) =
        (temp.path().join("cache"), temp.path().join("agent"), temp.path().join("out"));
    tree(&temp.path().join("tree"), "virtio_blk");
    std::fs::write(&agent, elf()).unwrap();
    let source = KernelSource::in_tree(&temp.path().join("tree")).unwrap();
    let first = build(&source, &agent, Some(&cache), &out).unwrap();
    assert!(!first.cached);
    assert_eq!(first.manifest.release, "6.12.1+deb12-cloud-amd64");
    assert_eq!(first.manifest.builtin, ["virtio_blk"]);
    let names: Vec<&str> =
        first.manifest.modules.iter().map(|m| m.rsplit('/').next().unwrap()).collect();
    assert_eq!(
        names,
        [
            "virtio-rng.ko",
            "virtio_mmio.ko",
            "vmw_vsock_virtio_transport.ko",
            "pvpanic-mmio.ko",
            "virtio_net.ko",
            "tcp_diag.ko",
            "virtio_balloon.ko"
        ]
    );
    assert_eq!(std::fs::read(&first.vmlinux).unwrap(), elf());
    assert_eq!(digest(&std::fs::read(&first.initrd).unwrap()), first.manifest.initrd);
    assert_eq!(KernelManifest::load(&out.join(MANIFEST_NAME)).unwrap(), first.manifest);

    let again = build(&source, &agent, Some(&cache), &out).unwrap();
    assert!(again.cached);
    assert_eq!(again.manifest, first.manifest);
    let mut other = elf();
    other.push(1);
    std::fs::write(&agent, other).unwrap();
    let changed = build(&source, &agent, Some(&cache), &out).unwrap();
    assert!(!changed.cached);
    assert_ne!(changed.manifest.initrd, first.manifest.initrd);

    // A damaged cache entry is built again.
    let entries = cache.join("kernels/built");
    for entry in
        std::fs::read_dir(&entries).unwrap().map(Result::unwrap).filter(|e| e.path().is_dir())
    {
        let place = entry.path().join(INITRD_NAME);
        std::fs::remove_file(&place).unwrap();
        std::fs::write(&place, b"damaged").unwrap();
    }
    assert!(!build(&source, &agent, Some(&cache), &out).unwrap().cached);
    assert_eq!(std::fs::read_dir(cache.join("staging")).unwrap().count(), 0);
}

#[test]
fn what_is_missing_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let agent = temp.path().join("agent");
    std::fs::write(&agent, elf()).unwrap();
    let place = temp.path().join("tree");
    tree(&place, "virtio-rng");
    let source = KernelSource::in_tree(&place).unwrap();
    let failed = |agent: &Path| {
        build(&source, agent, Some(&temp.path().join("cache")), &temp.path().join("out"))
            .unwrap_err()
            .to_string()
    };
    let text = failed(&agent);
    assert!(
        text.contains("module virtio-rng: expected a file or an entry in modules.builtin"),
        "{text}"
    );
    // A list that leads out of the folder is refused.
    let list = "kernel/virtio_mmio.ko: ../../../../outside.ko\n";
    std::fs::write(
        place.join("lib/modules/6.12.1/modules.dep"),
        list.to_owned() + "../../../../outside.ko:\n",
    )
    .unwrap();
    std::fs::write(temp.path().join("outside.ko"), b"\x7fELF").unwrap();
    let all = GUEST_MODULES.join(".ko\n") + ".ko\n";
    std::fs::write(place.join("lib/modules/6.12.1/modules.builtin"), all).unwrap();
    let text = failed(&agent);
    assert!(text.contains("open") && text.contains("outside.ko"), "{text}");
    let text = failed(Path::new("/bin/sh"));
    assert!(text.contains("/bin/sh") && text.contains("a static program"), "{text}");
    std::fs::write(&agent, "#!/bin/sh").unwrap();
    assert!(failed(&agent).contains("agent at byte 0: expected a 64-bit"), "{}", failed(&agent));
    std::fs::write(place.join("boot/vmlinuz-6.13"), b"").unwrap();
    let text = KernelSource::in_tree(&place).unwrap_err().to_string();
    assert!(text.contains("expected one vmlinu*, got 2"), "{text}");
}

#[test]
fn the_disk_of_modules_has_regular_files_of_the_package_only() {
    let temp = tempfile::tempdir().unwrap();
    let place = temp.path().join("tree");
    tree(&place, "virtio_blk");
    let outside = temp.path().join("outside");
    std::fs::write(&outside, b"of the user").unwrap();
    let mut source = KernelSource::in_tree(&place).unwrap();
    let failed = |source: &KernelSource| {
        let (cache, out) = (temp.path().join("cache"), temp.path().join("out"));
        build_modules(source, Some(&cache), &out).unwrap_err().to_string()
    };
    let folder = place.join("lib/modules/6.12.1");
    for name in ["kernel/a.ko.xz", "modules.order"] {
        let at = folder.join(name);
        std::os::unix::fs::symlink(&outside, &at).unwrap();
        let text = failed(&source);
        assert!(text.starts_with("open ") && text.contains(name), "{text}");
        std::fs::remove_file(&at).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &at, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let text = failed(&source);
        assert!(text.contains(name), "{text}");
        assert!(text.contains("expected a regular file, got a pipe"), "{text}");
        std::fs::remove_file(&at).unwrap();
    }
    // depmod accepts no folder whose name does not begin with a version.
    for name in ["mine", "6", "6.", "v6.12"] {
        let renamed = place.join("lib/modules").join(name);
        std::fs::rename(source.modules.as_ref().unwrap(), &renamed).unwrap();
        source.modules = Some(renamed);
        let text = failed(&source);
        assert!(text.contains("rename it") && text.contains(&format!("got {name:?}")), "{text}");
    }
}
