//! Kernels packed with every compression, cut, changed and with lengths that lie.

use super::*;
use crate::samples::{elf, image, images, packed};
use proptest::prelude::*;
use std::io::Read;

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
            assert!(
                error.unwrap().to_string().contains(" at byte "),
                "{name} cut to {length} bytes"
            );
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
            let text =
                unpack_vmlinux(&image(&[&payload[..], &stated].concat())).unwrap_err().to_string();
            assert!(text.starts_with("unpacked length at byte"), "{name} {lie}: {text}");
        }
    }
    // A decompression bomb: 64 MiB of zeroes with a stated length of 1 MiB are not unpacked to the
    // end.
    let bomb = zstd::encode_all(std::io::repeat(0).take(64 << 20), 1).unwrap();
    let text = unpack_vmlinux(&image(&[&bomb[..], &(1_u32 << 20).to_le_bytes()].concat()))
        .unwrap_err()
        .to_string();
    assert!(text.contains("expected 1048576 bytes, got 1048577"), "{text}");
}

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
    assert!(
        unpack_vmlinux(&arm).unwrap_err().to_string().contains("expected 62 (x86-64), got 183")
    );
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
        let mut program = elf();
        let at = at % program.len();
        program[at] = byte;
        let _ = unpack_vmlinux(&program);
        let _ = elf::check_static(&program, "agent");
        let _ = elf::loader(&program);
        let _ = elf::shear(program);
    }
}
