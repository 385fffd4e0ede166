//! The modules that a guest needs before its root disk is there, in the order in which they must be loaded.

use super::{KernelError, on, read_capped};
use crate::tool;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

/// What a guest needs: its devices' drivers. What they depend on comes with them.
pub const GUEST_MODULES: &[&str] = &[
    "virtio_mmio",
    "virtio_blk",
    "vmw_vsock_virtio_transport",
    "virtio-rng",
    "pvpanic-mmio",
    "virtio_net",
    "tcp_diag",
];

/// Largest module, unpacked.
const MAX_MODULE_BYTES: u64 = 64 << 20;
/// Largest list of modules.
const MAX_LIST_BYTES: u64 = 16 << 20;

/// A module for the initramfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Its path in the initramfs: `lib/modules/<release>/kernel/….ko`.
    pub place: String,
    /// The ELF module, unpacked.
    pub bytes: Vec<u8>,
}

/// What was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// In the order in which they must be loaded.
    pub files: Vec<Module>,
    /// Asked for, but built in.
    pub builtin: Vec<String>,
}

/// A module's name as the kernel has it: no folder, no suffix, `-` as `_`.
fn name_of(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    let stem = file.split_once(".ko").map_or(file, |(stem, _)| stem);
    stem.replace('-', "_")
}

/// `modules.dep`: each module's path and those it needs, relative to the folder.
type Deps = BTreeMap<String, Vec<String>>;

fn parse_deps(text: &str) -> Deps {
    let lines = text.lines().map_while(|line| line.split_once(':'));
    lines
        .map(|(path, needs)| (path.to_owned(), needs.split_whitespace().map(str::to_owned).collect()))
        .collect()
}

/// Collects `wanted` and what they need from `folder` (`lib/modules/<release>`); `scratch` is for depmod.
pub fn collect(folder: &Path, wanted: &[&str], scratch: &Path) -> Result<Collected, KernelError> {
    let folder = &std::fs::canonicalize(folder).map_err(on("open", folder))?;
    let text = |name: &str| {
        let bytes = read_capped(&folder.join(name), MAX_LIST_BYTES)?;
        Ok::<_, KernelError>(String::from_utf8_lossy(&bytes).into_owned())
    };
    let built_in: BTreeSet<String> = text("modules.builtin")?.lines().map(name_of).collect();
    let deps = if folder.join("modules.dep").exists() {
        parse_deps(&text("modules.dep")?)
    } else {
        parse_deps(&depmod(folder, scratch)?)
    };
    let by_name: BTreeMap<String, &String> = deps.keys().map(|path| (name_of(path), path)).collect();
    let mut order: Vec<&String> = Vec::new();
    let mut found = Collected::default();
    for module in wanted {
        match by_name.get(&name_of(module)) {
            Some(path) => visit(path, &deps, &mut order, &mut BTreeSet::new()),
            None if built_in.contains(&name_of(module)) => found.builtin.push((*module).to_owned()),
            None => {
                return Err(KernelError::MissingModule {
                    path: folder.clone(),
                    module: (*module).to_owned(),
                });
            }
        }
    }
    let release = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    for path in order {
        let bytes = unpack(folder, path)?;
        let plain = path.split_once(".ko").map_or(path.as_str(), |(stem, _)| stem);
        found.files.push(Module { place: format!("lib/modules/{release}/{plain}.ko"), bytes });
    }
    Ok(found)
}

/// Depth first: what a module needs comes before it. `above` holds the modules being visited: a circle ends there.
fn visit<'a>(
    path: &'a String,
    deps: &'a Deps,
    order: &mut Vec<&'a String>,
    above: &mut BTreeSet<&'a String>,
) {
    if order.contains(&path) || !above.insert(path) {
        return;
    }
    // modules.dep lists them from the last to be loaded to the first.
    for need in deps.get(path).into_iter().flatten().rev() {
        visit(need, deps, order, above);
    }
    above.remove(path);
    order.push(path);
}

/// The text of `modules.dep`, which the package leaves to its post-installation script.
fn depmod(folder: &Path, scratch: &Path) -> Result<String, KernelError> {
    let bad = |got: &str| KernelError::Tree {
        path: folder.to_owned(),
        expected: "a folder lib/modules/<release>".to_owned(),
        got: got.to_owned(),
    };
    // depmod wants <base>/lib/modules/<release>; a link spares it a copy, and -n spares the tree its files.
    let release = folder.file_name().ok_or_else(|| bad("one without a name"))?;
    let base = scratch.join("depmod");
    let modules = base.join("lib/modules");
    std::fs::create_dir_all(&modules).map_err(on("create", &modules))?;
    std::os::unix::fs::symlink(folder, modules.join(release)).map_err(on("create", &modules))?;
    let mut command = tool::tool("depmod");
    command.arg("-n").arg("-b").arg(&base).arg(release);
    let said = tool::run(command, "kmod", |_| ())?;
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    // The first of several files printed one after another; the next begin with a comment.
    Ok(text.split("\n#").next().unwrap_or_default().lines().filter(|l| !l.starts_with('#')).fold(
        String::new(),
        |mut all, line| {
            all.push_str(line);
            all.push('\n');
            all
        },
    ))
}

/// Opens and unpacks the module `path` of `folder`; nothing outside of it.
fn unpack(folder: &Path, path: &str) -> Result<Vec<u8>, KernelError> {
    use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
    let whole: PathBuf = folder.join(path);
    let at = on("open", &whole);
    let opened = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .and_then(|dir| {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
            openat2(dir, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty(), resolve)
        });
    let file = std::fs::File::from(opened.map_err(|e| at(e.into()))?);
    let failed = |e: std::io::Error| on("unpack", &whole)(e);
    let reader: Box<dyn Read> = match path.rsplit('.').next() {
        Some("xz") => Box::new(liblzma::read::XzDecoder::new(file)),
        Some("zst") => Box::new(zstd::Decoder::new(file).map_err(failed)?),
        Some("gz") => Box::new(flate2::read::GzDecoder::new(file)),
        _ => Box::new(file),
    };
    let mut bytes = Vec::new();
    reader.take(MAX_MODULE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_MODULE_BYTES || !bytes.starts_with(b"\x7fELF") {
        return Err(KernelError::Tree {
            path: whole.clone(),
            expected: format!("an ELF module of at most {MAX_MODULE_BYTES} bytes"),
            got: format!("{} bytes beginning {}", bytes.len(), hex::encode(&bytes[..bytes.len().min(4)])),
        });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_module_needs_comes_before_it_and_circles_end() {
        let text = "k/a.ko: k/b.ko k/c.ko\nk/b.ko: k/c.ko\nk/c.ko:\nk/x.ko.xz: k/y.ko\nk/y.ko: k/x.ko.xz\n";
        let deps = parse_deps(text);
        let mut order = Vec::new();
        for path in ["k/a.ko", "k/x.ko.xz"] {
            visit(
                deps.get_key_value(path).map_or_else(|| unreachable!(), |(k, _)| k),
                &deps,
                &mut order,
                &mut BTreeSet::new(),
            );
        }
        assert_eq!(order, ["k/c.ko", "k/b.ko", "k/a.ko", "k/y.ko", "k/x.ko.xz"]);
    }

    #[test]
    fn names_are_compared_as_the_kernel_does() {
        assert_eq!(name_of("kernel/drivers/char/hw_random/virtio-rng.ko.xz"), name_of("virtio_rng"));
    }
}
