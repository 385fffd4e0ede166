//! Kernels, programs and modules of others.

use crate::target::{Heap, Outcome, Target, planted};
use dayfly_boot::{elf, fuzzing, modules, release_of, unpack_vmlinux};
use std::io::Write;

/// The targets of this file.
pub const TARGETS: &[Target] = &[
    Target {
        name: "kernel-image",
        what: "bzImages and ELF files",
        stateful: false,
        most_bytes: 8192,
        // A decompressor has buffers, and the unpacked kernel may have `UNPACKED` bytes.
        heap: Heap { fixed: 32 << 20, per_byte: 256 },
        run: kernel,
        seeds: kernel_seeds,
    },
    Target {
        name: "kernel-modules",
        what: "modules, their signatures and lists",
        stateful: false,
        most_bytes: 4096,
        heap: Heap { fixed: 64 << 10, per_byte: 256 },
        run: module,
        seeds: || {
            let mark = b"~Module signature appended~\n";
            vec![
                b"k/a.ko: k/b.ko k/c.ko.xz\nk/b.ko:\n# more\n".to_vec(),
                b"\x7fELF\0license=GPL\0depends=kvm,ccp-x\0intree=Y\0".to_vec(),
                [&b"module"[..], b"pkcs7", &[0; 8], &5_u32.to_be_bytes(), mark].concat(),
            ]
        },
    },
];

/// The most bytes of an unpacked kernel here; the real limit is far above what fuzzing can spend.
const UNPACKED: u32 = 1 << 20;

fn kernel_seeds() -> Vec<Vec<u8>> {
    let elf = fuzzing::small_kernel(300);
    let length = u32::try_from(elf.len()).unwrap().to_le_bytes();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(&elf).unwrap();
    let zstd = zstd::encode_all(&elf[..], 19).unwrap();
    // A block of LZ4 that is nothing but literals.
    let extra = u8::try_from(elf.len() - 15 - 255).unwrap();
    let literals = [&[0xf0, 255, extra][..], &elf].concat();
    let block = u32::try_from(literals.len()).unwrap().to_le_bytes();
    let lz4 = [&[0x02, 0x21, 0x4c, 0x18][..], &block, &literals].concat();
    let mut interpreter = elf.clone();
    interpreter[64] = 3;
    interpreter[72..74].copy_from_slice(&[130, 0]);
    vec![
        fuzzing::small_image(&gzip.finish().unwrap()),
        fuzzing::small_image(&[&zstd[..], &length].concat()),
        fuzzing::small_image(&[&lz4[..], &length].concat()),
        fuzzing::small_image(&[&b"\xfd7zXZ\0"[..], &length].concat()),
        interpreter,
        elf,
    ]
}

/// The length that a bzImage states for its unpacked kernel.
fn stated(file: &[u8]) -> Option<u32> {
    let number = |at: usize| Some(u32::from_le_bytes(*file.get(at..)?.first_chunk()?));
    let sectors = match *file.get(0x1f1)? {
        0 => 4,
        n => usize::from(n),
    };
    let start = (sectors + 1) * 512 + number(0x248)? as usize;
    number(start.checked_add(number(0x24c)? as usize)?.checked_sub(4)?)
}

fn kernel(input: &[u8]) -> Outcome {
    let loader = elf::loader(input);
    if let Some(loader) = &loader {
        assert!(loader.len() <= 3 * 4096 && !loader.chars().any(char::is_control), "{loader:?}");
    }
    let is_static = elf::check_static(input, "fuzz").is_ok();
    assert!(!(is_static && loader.is_some_and(|name| !name.is_empty())), "static, with a loader");
    let shorn = elf::shear(input.to_vec());
    assert!(shorn.len() <= input.len(), "longer than before");
    if elf::check(input, "fuzz").is_ok() {
        assert_eq!(elf::check(&shorn, "fuzz"), Ok(()), "shorn, it is no program any more");
        assert_eq!(elf::shear(shorn.clone()), shorn, "shorn twice");
    }
    if stated(input).is_some_and(|stated| stated > UNPACKED) {
        return Outcome::Refused;
    }
    let Ok(kernel) = unpack_vmlinux(input) else { return Outcome::Refused };
    assert_eq!(elf::check(&kernel, "fuzz"), Ok(()), "an unpacked kernel is one");
    if let Ok(release) = release_of(&kernel) {
        assert!(release.len() <= 64 && release.is_ascii(), "{release:?}");
        planted(|| release.len() == 7);
    }
    Outcome::Accepted
}

fn module(input: &[u8]) -> Outcome {
    let body = modules::without_signature(input.to_vec());
    assert!(input.starts_with(&body), "not a beginning of the module");
    let signed = body.len() < input.len();
    let needs = fuzzing::stated_needs(input);
    assert!(
        needs.iter().all(|name| !name.is_empty() && !name.contains(['-', ',', '\0'])),
        "{needs:?}"
    );
    let text = String::from_utf8_lossy(input);
    let listed = fuzzing::modules_dep(&text);
    planted(|| listed.iter().any(|(_, needs)| needs.len() == 5));
    Outcome::of(signed || !needs.is_empty() || !listed.is_empty())
}
