//! Small kernels packed in every way, and initramfs archives read back by cpio.

use super::*;
use proptest::prelude::*;
use std::io::Write;
use std::process::{Command, Stdio};

/// The smallest file that is a kernel to us: one segment, a banner.
fn elf() -> Vec<u8> {
    let mut elf = vec![0; 64 + 56];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    elf[16] = 2;
    elf[18] = 62;
    elf[32] = 64;
    elf[54] = 56;
    elf[56] = 1;
    elf[64] = 1;
    elf.extend_from_slice(b"Linux version %s (fmt)\0Linux version 6.12.1+deb12-cloud-amd64 (someone) #1\0");
    elf.extend((0..3000u32).map(|i| (i * i % 251).to_le_bytes()[0]));
    let length = u64::try_from(elf.len()).unwrap();
    elf[64 + 32..64 + 40].copy_from_slice(&length.to_le_bytes());
    elf
}

/// A bzImage with this payload.
fn image(payload: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 3 * 512];
    image[0x1f1] = 1;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    image[0x248..0x24c].copy_from_slice(&512_u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    image.extend_from_slice(payload);
    image
}

fn length_of(data: &[u8]) -> [u8; 4] {
    u32::try_from(data.len()).unwrap().to_le_bytes()
}

/// The payload of a kernel packed in each way, without the length behind it.
fn packed(data: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(data).unwrap();
    let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 6);
    xz.write_all(data).unwrap();
    let mut lz4 = vec![0x02, 0x21, 0x4c, 0x18];
    for block in data.chunks(1000) {
        let block = lz4_flex::block::compress(block);
        lz4.extend_from_slice(&length_of(&block));
        lz4.extend_from_slice(&block);
    }
    vec![
        ("zstd", zstd::encode_all(data, 19).unwrap()),
        ("gzip", gzip.finish().unwrap()),
        ("xz", xz.finish().unwrap()),
        ("lz4", lz4),
    ]
}

fn images() -> Vec<(&'static str, Vec<u8>)> {
    let elf = elf();
    let whole = |(name, mut payload): (&'static str, Vec<u8>)| {
        if name != "gzip" {
            payload.extend_from_slice(&length_of(&elf));
        }
        (name, image(&payload))
    };
    packed(&elf).into_iter().map(whole).collect()
}

#[test]
fn every_way_of_packing_unpacks() {
    for (name, image) in images() {
        assert_eq!(unpack_vmlinux(&image).map_err(|e| format!("{name}: {e}")).unwrap(), elf());
    }
    assert!(matches!(unpack_vmlinux(&elf()).unwrap(), std::borrow::Cow::Borrowed(_)));
    assert_eq!(release_of(&elf()).unwrap(), "6.12.1+deb12-cloud-amd64");
    assert!(release_of(b"Linux version %s").is_err());
}

#[test]
fn every_truncation_is_refused() {
    for (name, image) in images() {
        for length in 0..image.len() {
            let error = unpack_vmlinux(&image[..length]).err();
            assert!(error.is_some(), "{name} cut to {length} bytes");
            assert!(error.unwrap().to_string().contains(" at byte "), "{name} cut to {length} bytes");
        }
    }
    let elf = elf();
    for length in 0..elf.len() {
        assert!(unpack_vmlinux(&elf[..length]).is_err(), "ELF cut to {length} bytes");
    }
}

#[test]
fn a_length_that_lies_is_refused() {
    let elf = elf();
    for (name, payload) in packed(&elf).into_iter().filter(|(name, _)| *name != "gzip") {
        for lie in [0, 1, elf.len() - 1, elf.len() + 1, 600 << 20] {
            let stated = u32::try_from(lie).unwrap().to_le_bytes();
            let text = unpack_vmlinux(&image(&[&payload[..], &stated].concat())).unwrap_err().to_string();
            assert!(text.starts_with("unpacked length at byte"), "{name} {lie}: {text}");
        }
    }
    // A bomb: 64 MiB of zeroes behind a stated length of 1 MiB are not unpacked to their end.
    let bomb = zstd::encode_all(std::io::repeat(0).take(64 << 20), 1).unwrap();
    let text =
        unpack_vmlinux(&image(&[&bomb[..], &(1_u32 << 20).to_le_bytes()].concat())).unwrap_err().to_string();
    assert!(text.contains("expected 1048576 bytes, got 1048577"), "{text}");
}

use std::io::Read;

#[test]
fn other_compressions_are_named() {
    for (magic, name) in [
        (&b"\x5d\0\0\x80"[..], "lzma"),
        (b"BZh9", "bzip2"),
        (b"\x89LZO", "lzo"),
        (b"abcdefgh", "616263646566"),
    ] {
        let payload = [magic, &[0; 40]].concat();
        let text = unpack_vmlinux(&image(&payload)).unwrap_err().to_string();
        assert!(text.contains(name) && text.contains("not supported"), "{text}");
    }
}

#[test]
fn what_is_no_kernel_is_named_with_its_place() {
    let good = images().remove(0).1;
    let mut cases: Vec<(usize, &[u8], &str)> = vec![
        (0x1fe, &[0, 0], "boot flag at byte 510"),
        (0x202, b"Nope", "setup header at byte 514: expected HdrS, got Nope"),
        (0x206, &[2, 2], "boot protocol at byte 518: expected 0x0208 or later, got 0x0202"),
        (0x248, &[0xff; 4], "payload length at byte 588"),
        (0x24c, &[0xff; 4], "payload length at byte 588"),
        (0x24c, &[3, 0, 0, 0], "payload length at byte 588: expected more than 4 bytes"),
    ];
    cases.push((0x1f1, &[0xff], "payload"));
    for (at, bytes, words) in cases {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        let text = unpack_vmlinux(&bad).unwrap_err().to_string();
        assert!(text.contains(words), "{words}: {text}");
    }
    let mut arm = elf();
    arm[18] = 183;
    assert!(unpack_vmlinux(&arm).unwrap_err().to_string().contains("expected 62 (x86-64), got 183"));
}

proptest! {
    #[test]
    fn any_change_is_no_panic(which in 0usize..4, at in 0usize..5000, byte in any::<u8>()) {
        let mut image = images().remove(which).1;
        let at = at % image.len();
        image[at] = byte;
        if let Ok(elf) = unpack_vmlinux(&image) {
            let _ = release_of(&elf);
        }
        let mut elf = elf();
        let at = at % elf.len();
        elf[at] = byte;
        let _ = unpack_vmlinux(&elf);
        let _ = vmlinux::check_agent(&elf);
    }
}

fn sample() -> Vec<u8> {
    let module = |name: &str, bytes: &[u8]| modules::Module {
        place: format!("lib/modules/6.12.1/kernel/{name}.ko"),
        bytes: bytes.to_vec(),
    };
    let found =
        modules::Collected { files: vec![module("b", b"123"), module("sub/a", b"")], builtin: vec![] };
    initramfs(b"agent!", &found)
}

#[test]
fn cpio_reads_what_we_write() {
    let bytes = sample();
    assert_eq!(bytes, sample());
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
    let expected = "dev proc sys newroot dev/console etc etc/dayfly etc/dayfly/modules lib lib/modules \
        lib/modules/6.12.1 lib/modules/6.12.1/kernel lib/modules/6.12.1/kernel/b.ko lib/modules/6.12.1/kernel/sub \
        lib/modules/6.12.1/kernel/sub/a.ko init";
    assert_eq!(names, expected.split_whitespace().collect::<Vec<_>>());
    let long = cpio(&["-itv", "--quiet"]);
    let line = |name: &str| long.lines().find(|l| l.ends_with(&format!(" {name}"))).unwrap().to_owned();
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

/// A tree as a package has it, with an ELF for every module, packed in different ways.
fn tree(folder: &Path, without: &str) {
    let kernel = folder.join("lib/modules/6.12.1/kernel");
    std::fs::create_dir_all(&kernel).unwrap();
    std::fs::create_dir_all(folder.join("boot")).unwrap();
    std::fs::write(folder.join("boot/vmlinuz-6.12.1"), &images()[0].1).unwrap();
    let mut dep = String::new();
    for (number, name) in GUEST_MODULES.iter().enumerate().filter(|(_, name)| **name != without) {
        let module = [b"\x7fELF module ", name.as_bytes()].concat();
        let (suffix, bytes) = match number {
            0 => (".xz", packed(&module)[2].1.clone()),
            1 => (".zst", packed(&module)[0].1.clone()),
            2 => (".gz", packed(&module)[1].1.clone()),
            _ => ("", module),
        };
        std::fs::write(kernel.join(format!("{name}.ko{suffix}")), bytes).unwrap();
        dep.push_str(&format!(
            "kernel/{name}.ko{suffix}:{}\n",
            if number == 0 { " kernel/virtio-rng.ko" } else { "" }
        ));
    }
    std::fs::write(folder.join("lib/modules/6.12.1/modules.dep"), dep).unwrap();
    std::fs::write(folder.join("lib/modules/6.12.1/modules.builtin"), "kernel/virtio_blk.ko\n").unwrap();
}

#[test]
fn a_kernel_is_built_once() {
    let temp = tempfile::tempdir().unwrap();
    let (cache, agent, out) = (temp.path().join("cache"), temp.path().join("agent"), temp.path().join("out"));
    tree(&temp.path().join("tree"), "virtio_blk");
    std::fs::write(&agent, elf()).unwrap();
    let source = KernelSource::in_tree(&temp.path().join("tree")).unwrap();
    let first = build(&source, &agent, Some(&cache), &out).unwrap();
    assert!(!first.cached);
    assert_eq!(first.manifest.release, "6.12.1+deb12-cloud-amd64");
    assert_eq!(first.manifest.builtin, ["virtio_blk"]);
    let names: Vec<&str> = first.manifest.modules.iter().map(|m| m.rsplit('/').next().unwrap()).collect();
    assert_eq!(
        names,
        [
            "virtio-rng.ko",
            "virtio_mmio.ko",
            "vmw_vsock_virtio_transport.ko",
            "pvpanic-mmio.ko",
            "virtio_net.ko",
            "tcp_diag.ko"
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

    // An entry that was damaged is made again.
    let entries = cache.join("kernels/built");
    for entry in std::fs::read_dir(&entries).unwrap().map(Result::unwrap).filter(|e| e.path().is_dir()) {
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
    assert!(text.contains("module virtio-rng: expected a file or an entry in modules.builtin"), "{text}");
    // A list that leads out of the folder.
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
