//! What the machine boots: a kernel taken from an unpacked Debian package, and the modules it needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Loaded before the daemon starts, in an order that satisfies their dependencies.
pub(crate) const MODULES: &[&str] = &[
    "virtio_net",
    "virtio_blk",
    "virtio_rng",
    "kvm_amd",
    "tun",
    "vhost_vsock",
    "overlay",
    "virtio_balloon",
    "veth",
    "nf_tables",
    "nft_chain_nat",
    "nft_masq",
    "nft_ct",
];

/// Carried so that `modprobe` finds them; names that a kernel has built in or lacks are left out.
const EXTRA_MODULES: &[&str] = &[
    "bridge",
    "loop",
    "vsock_loopback",
    "dm_mod",
    "dm_snapshot",
    "dm_thin_pool",
    "nbd",
    "ublk_drv",
    "virtio_mmio",
    "macvlan",
    "vhost_net",
    "sch_ingress",
    "act_mirred",
    "cls_u32",
    "msr",
];

/// No module of a distribution is near this; a longer one is refused before it is unpacked whole.
const MAX_MODULE_BYTES: u64 = 64 << 20;
/// The same for the kernel itself.
const MAX_KERNEL_BYTES: u64 = 512 << 20;

/// Why no kernel or module could be had.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Reading failed.
    #[error("{path}: {source}")]
    Read {
        /// What was read.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The folder holds no kernel, or several.
    #[error(
        "{tree}: expected one boot/vmlinuz-VERSION or boot/vmlinux-VERSION (an unpacked linux-image package), got {found}"
    )]
    Count {
        /// Where.
        tree: PathBuf,
        /// How many.
        found: usize,
    },
    /// Not a kernel that we can unpack.
    #[error("{path}: {what}")]
    Format {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it, expected and got.
        what: String,
    },
    /// A module that the machine cannot do without is missing.
    #[error("{tree}: no module {name} under lib/modules/{version}, and it is not built in")]
    Module {
        /// Where.
        tree: PathBuf,
        /// The kernel's version.
        version: String,
        /// Which module.
        name: String,
    },
}

/// A kernel in an unpacked package.
pub(crate) struct Kernel {
    tree: PathBuf,
    /// As `uname -r` says it.
    pub(crate) version: String,
    /// The packed (or plain) kernel.
    pub(crate) image: PathBuf,
}

/// A module to carry.
pub(crate) struct Module {
    pub(crate) name: String,
    /// Unpacked.
    pub(crate) body: Vec<u8>,
    pub(crate) needs: Vec<String>,
    /// Whether it is loaded at the machine's start.
    pub(crate) load: bool,
}

fn read(path: &Path) -> Result<Vec<u8>, KernelError> {
    fs::read(path).map_err(|source| KernelError::Read { path: path.to_owned(), source })
}

impl Kernel {
    /// Finds the one kernel below `tree`.
    pub(crate) fn find(tree: &Path) -> Result<Self, KernelError> {
        let boot = tree.join("boot");
        let entries =
            fs::read_dir(&boot).map_err(|source| KernelError::Read { path: boot.clone(), source })?;
        let mut found: Vec<(String, PathBuf)> = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|source| KernelError::Read { path: boot.clone(), source })?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(version) = name.strip_prefix("vmlinuz-").or_else(|| name.strip_prefix("vmlinux-")) {
                found.push((version.to_owned(), entry.path()));
            }
        }
        match <[_; 1]>::try_from(found) {
            Ok([(version, image)]) => Ok(Self { tree: tree.to_owned(), version, image }),
            Err(found) => Err(KernelError::Count { tree: tree.to_owned(), found: found.len() }),
        }
    }

    /// The kernel as an ELF file.
    pub(crate) fn vmlinux(&self) -> Result<Vec<u8>, KernelError> {
        let file = read(&self.image)?;
        let wrong = |what: String| KernelError::Format { path: self.image.clone(), what };
        if file.starts_with(b"\x7fELF") {
            return Ok(file);
        }
        let payload = bz_payload(&file).map_err(wrong)?;
        let mut elf = Vec::new();
        let result = if payload.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            // The payload ends with four bytes of length, which are no frame: read one frame only.
            zstd::stream::read::Decoder::with_buffer(payload)
                .and_then(|d| d.single_frame().take(MAX_KERNEL_BYTES).read_to_end(&mut elf))
        } else if payload.starts_with(b"\xfd7zXZ\0") {
            liblzma::read::XzDecoder::new(payload).take(MAX_KERNEL_BYTES).read_to_end(&mut elf)
        } else {
            let start = payload.get(..4).unwrap_or(payload);
            return Err(wrong(format!(
                "packed kernel: expected zstd (28b52ffd) or xz (fd377a58), got {start:02x?}"
            )));
        };
        result.map_err(|e| wrong(format!("unpacking the kernel: {e}")))?;
        if elf.len() as u64 == MAX_KERNEL_BYTES {
            return Err(wrong(format!(
                "unpacked kernel: expected less than {MAX_KERNEL_BYTES} bytes, got more"
            )));
        }
        if !elf.starts_with(b"\x7fELF") {
            return Err(wrong(format!("unpacked kernel: expected an ELF file, got {:02x?}", elf.get(..4))));
        }
        Ok(elf)
    }

    /// The modules to carry, each after those it needs.
    pub(crate) fn modules(&self) -> Result<Vec<Module>, KernelError> {
        let root = self.tree.join("lib/modules").join(&self.version);
        let mut files = BTreeMap::new();
        walk(&root.join("kernel"), &mut files)?;
        let built_in: BTreeSet<String> = String::from_utf8_lossy(&read(&root.join("modules.builtin"))?)
            .lines()
            .filter_map(|line| module_name(Path::new(line)))
            .collect();
        let mut carried = Vec::new();
        let mut seen = BTreeSet::new();
        for (name, load) in MODULES.iter().map(|n| (n, true)).chain(EXTRA_MODULES.iter().map(|n| (n, false)))
        {
            if !load && !files.contains_key(*name) {
                continue;
            }
            self.add(name, load, &files, &built_in, &mut seen, &mut carried)?;
        }
        Ok(carried)
    }

    fn add(
        &self,
        name: &str,
        load: bool,
        files: &BTreeMap<String, PathBuf>,
        built_in: &BTreeSet<String>,
        seen: &mut BTreeSet<String>,
        carried: &mut Vec<Module>,
    ) -> Result<(), KernelError> {
        if built_in.contains(name) || !seen.insert(name.to_owned()) {
            return Ok(());
        }
        let path = files.get(name).ok_or_else(|| KernelError::Module {
            tree: self.tree.clone(),
            version: self.version.clone(),
            name: name.to_owned(),
        })?;
        let body = without_signature(unpack_module(path)?);
        let needs = needs(&body);
        for need in &needs {
            self.add(need, load, files, built_in, seen, carried)?;
        }
        carried.push(Module { name: name.to_owned(), body, needs, load });
        Ok(())
    }
}

/// The packed part of a bzImage (Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length).
fn bz_payload(file: &[u8]) -> Result<&[u8], String> {
    if file.get(0x202..0x206) != Some(b"HdrS") {
        return Err(format!(
            "expected a bzImage with HdrS at byte 0x202, got {:02x?}",
            file.get(0x202..0x206)
        ));
    }
    let word = |at: usize| -> Option<usize> {
        let bytes = file.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let sectors = usize::from(file[0x1f1]);
    let sectors = if sectors == 0 { 4 } else { sectors };
    let (Some(offset), Some(length)) = (word(0x248), word(0x24c)) else {
        return Err("expected a bzImage header of 592 bytes, got a shorter file".to_owned());
    };
    let start = (sectors + 1) * 512 + offset;
    file.get(start..start.saturating_add(length)).ok_or_else(|| {
        format!("packed kernel at byte {start}: expected {length} bytes, got a file of {} in all", file.len())
    })
}

/// `kvm-amd.ko.xz` is `kvm_amd`.
fn module_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    Some(name.split_once(".ko")?.0.replace('-', "_"))
}

fn walk(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), KernelError> {
    let fail = |source| KernelError::Read { path: folder.to_owned(), source };
    for entry in fs::read_dir(folder).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let path = entry.path();
        if entry.file_type().map_err(fail)?.is_dir() {
            walk(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

fn unpack_module(path: &Path) -> Result<Vec<u8>, KernelError> {
    let file = read(path)?;
    let mut body = Vec::new();
    let result = match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => liblzma::read::XzDecoder::new(&file[..]).take(MAX_MODULE_BYTES).read_to_end(&mut body),
        Some("zst") => zstd::stream::read::Decoder::new(&file[..])
            .and_then(|d| d.take(MAX_MODULE_BYTES).read_to_end(&mut body)),
        _ => return Ok(file),
    };
    result.map_err(|source| KernelError::Read { path: path.to_owned(), source })?;
    if body.len() as u64 == MAX_MODULE_BYTES {
        let what = format!("unpacked module: expected less than {MAX_MODULE_BYTES} bytes, got more");
        return Err(KernelError::Format { path: path.to_owned(), what });
    }
    Ok(body)
}

/// Cuts off what `scripts/sign-file` appended (include/linux/module_signature.h): checking it takes an emulated CPU longer
/// than everything else about loading a module. Whoever may change the initramfs could as well change the kernel.
fn without_signature(mut body: Vec<u8>) -> Vec<u8> {
    const MARK: &[u8] = b"~Module signature appended~\n";
    // struct module_signature: eight bytes, then the signature's length, big-endian.
    const RECORD_BYTES: usize = 12;
    let end = body.strip_suffix(MARK).and_then(|rest| {
        let length: [u8; 4] = rest.get(rest.len().checked_sub(4)?..)?.try_into().ok()?;
        rest.len().checked_sub(RECORD_BYTES)?.checked_sub(usize::try_from(u32::from_be_bytes(length)).ok()?)
    });
    body.truncate(end.unwrap_or(body.len()));
    body
}

/// The `depends=` line of a module's `.modinfo`, as depmod writes it to modules.dep.
fn needs(body: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = body.windows(KEY.len()).position(|w| w == KEY) else { return Vec::new() };
    let list = body[at + KEY.len()..].split(|b| *b == 0).next().unwrap_or_default();
    String::from_utf8_lossy(list).split(',').filter(|n| !n.is_empty()).map(|n| n.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_read_from_modinfo() {
        assert_eq!(needs(b"x\0license=GPL\0depends=kvm,ccp-x\0intree=Y\0"), ["kvm", "ccp_x"]);
        assert!(needs(b"x\0depends=\0intree=Y\0").is_empty());
        assert!(needs(b"").is_empty());
    }

    #[test]
    fn signatures_are_cut_off_and_nothing_else_is() {
        let mark = b"~Module signature appended~\n";
        let signed = [b"module".as_slice(), b"pkcs7", &[0; 8], &5u32.to_be_bytes(), mark].concat();
        assert_eq!(without_signature(signed.clone()), b"module");
        for length in 0..signed.len() {
            assert_eq!(without_signature(signed[..length].to_vec()), &signed[..length], "{length}");
        }
        // A length that reaches before the start.
        let hostile = [b"m".as_slice(), &[0; 8], &u32::MAX.to_be_bytes(), mark].concat();
        assert_eq!(without_signature(hostile.clone()), hostile);
        assert_eq!(without_signature(mark.to_vec()), mark);
    }

    #[test]
    fn truncated_kernels_are_refused() {
        for length in 0..0x260 {
            let mut file = vec![0u8; length];
            if length >= 0x206 {
                file[0x202..0x206].copy_from_slice(b"HdrS");
            }
            if length >= 0x250 {
                file[0x24c] = 1;
            }
            assert!(bz_payload(&file).is_err(), "{length}");
        }
    }
}
