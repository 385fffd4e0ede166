//! Makes `vmlinux` and `initramfs` from the kernel's package and the programs to carry, and knows when they are stale.

use crate::config::InitOptions;
use crate::cpio;
use crate::elf;
use crate::files::{self, FileError};
use crate::kernel::{Kernel, KernelError};
use crate::layout::Layout;
use crate::proto::{DaemonConfig, GUEST_CONFIG_PATH, GuestConfig, GuestShare};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Raised when what we write into the initramfs changes in a way that its inputs do not show.
const RECIPE: u32 = 1;
/// `--patience` of `dayflyd` where nobody says: an emulated CPU is about 20 times slower than the one it runs on, and shares that with all that its user does.
const PATIENCE: &str = "4";

/// Why the machine's kernel and initramfs could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The kernel's package.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A program of the host that is needed.
    #[error("{program}: {why} (Debian package {package})")]
    Program {
        /// Which.
        program: String,
        /// What happened.
        why: String,
        /// Where it comes from.
        package: &'static str,
    },
    /// A program to carry that would not run in the machine.
    #[error("{path}: expected a static ELF program, got one that needs the loader {loader}")]
    Dynamic {
        /// Which.
        path: PathBuf,
        /// Its `PT_INTERP`.
        loader: String,
    },
}

/// One input: what `stat` says, so that an unchanged file is not read, and what is in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Input {
    path: PathBuf,
    bytes: u64,
    inode: u64,
    modified_ns: i128,
    blake3: String,
}

/// From what the present build was made.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    recipe: u32,
    inputs: BTreeMap<String, Input>,
    config: GuestConfig,
    digest: String,
}

/// The state of the build after [`ensure`].
#[derive(Debug, Clone)]
pub(crate) struct Build {
    /// Changes whenever the machine would boot something else.
    pub(crate) digest: String,
    /// What changed, when it was made anew and there was one before.
    pub(crate) changed: Option<String>,
}

/// The programs and their places in the machine.
fn programs(options: &InitOptions) -> Result<BTreeMap<String, PathBuf>, BuildError> {
    let mut programs = BTreeMap::new();
    programs.insert("init".to_owned(), options.init_program.clone());
    programs.insert("bin/busybox".to_owned(), find_busybox()?);
    if let Some(daemon) = &options.daemon {
        programs.insert("usr/bin/dayflyd".to_owned(), daemon.clone());
    }
    if let Some(vmm) = &options.vmm {
        programs.insert("usr/bin/dayfly-vmm".to_owned(), vmm.clone());
    }
    if let Some(pager) = &options.pager {
        programs.insert("usr/bin/dayfly-pager".to_owned(), pager.clone());
    }
    Ok(programs)
}

fn find_busybox() -> Result<PathBuf, BuildError> {
    let fails = |why: &str| BuildError::Program {
        program: "busybox".to_owned(),
        why: why.to_owned(),
        package: "busybox-static",
    };
    let mut places = ["/bin/busybox", "/usr/bin/busybox"].iter().map(PathBuf::from);
    let path = places.find(|p| p.exists()).ok_or_else(|| fails("not found in /bin or /usr/bin"))?;
    let body = fs::read(&path).map_err(|e| FileError::new("reading", &path, e))?;
    if elf::needs_a_linker(&body) {
        return Err(fails("expected a static program, got one that needs a dynamic linker"));
    }
    Ok(path)
}

fn stat(path: &Path) -> Result<(u64, u64, i128), FileError> {
    let meta = fs::metadata(path).map_err(|e| FileError::new("reading", path, e))?;
    Ok((meta.len(), meta.ino(), i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec())))
}

/// The input as it is now; its content is read only when `stat` differs from `before`.
fn input(path: &Path, before: Option<&Input>) -> Result<Input, FileError> {
    let (bytes, inode, modified_ns) = stat(path)?;
    if let Some(before) = before
        && (before.path.as_path(), before.bytes, before.inode, before.modified_ns)
            == (path, bytes, inode, modified_ns)
    {
        return Ok(before.clone());
    }
    let body = fs::read(path).map_err(|e| FileError::new("reading", path, e))?;
    let blake3 = blake3::hash(&body).to_hex().to_string();
    Ok(Input { path: path.to_owned(), bytes, inode, modified_ns, blake3 })
}

/// Makes kernel and initramfs anew when an input has changed. An input that has vanished since the last build is no
/// change: the initramfs has a copy.
pub(crate) fn ensure(
    layout: &Layout,
    options: &InitOptions,
    shares: &[PathBuf],
) -> Result<Build, BuildError> {
    let before: Option<Record> = files::read_json(&layout.build()).ok().flatten();
    let before = before.filter(|_| layout.vmlinux().exists() && layout.initramfs().exists());
    let old = |place: &str| before.as_ref().and_then(|b| b.inputs.get(place));
    let programs = programs(options)?;
    let mut inputs = BTreeMap::new();
    let mut vanished = false;
    let mut take = |place: &str, path: &Path| -> Result<(), BuildError> {
        match (input(path, old(place)), old(place)) {
            (Ok(now), _) => drop(inputs.insert(place.to_owned(), now)),
            (Err(e), Some(had)) if e.source.kind() == io::ErrorKind::NotFound => {
                vanished = true;
                inputs.insert(place.to_owned(), had.clone());
            }
            (Err(e), _) => return Err(e.into()),
        }
        Ok(())
    };
    for (place, path) in &programs {
        take(place, path)?;
    }
    let kernel = Kernel::find(&options.kernel_tree);
    match (&kernel, old("kernel")) {
        (Ok(kernel), _) => take("kernel", &kernel.image)?,
        (Err(_), Some(had)) => take("kernel", &had.path)?,
        (Err(_), None) => {}
    }
    let config = guest_config(options, shares);
    let digest = digest(&inputs, &config);
    if let Some(before) = &before
        && (before.digest == digest || vanished)
    {
        if before.inputs != inputs {
            // Touched, but the same inside.
            files::write_json(&layout.build(), &Record { inputs, ..before.clone() })?;
        }
        return Ok(Build { digest: before.digest.clone(), changed: None });
    }
    let changed = before.as_ref().map(|before| difference(before, &inputs, &config));
    make(layout, &programs, &kernel?, config.clone())?;
    files::write_json(&layout.build(), &Record { recipe: RECIPE, inputs, config, digest: digest.clone() })?;
    Ok(Build { digest, changed })
}

fn digest(inputs: &BTreeMap<String, Input>, config: &GuestConfig) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{RECIPE} {}", env!("CARGO_PKG_VERSION")).as_bytes());
    for (place, input) in inputs {
        hasher.update(format!("\n{place} {}", input.blake3).as_bytes());
    }
    hasher.update(format!("\n{config:?}").as_bytes());
    hasher.finalize().to_hex().to_string()
}

fn difference(before: &Record, inputs: &BTreeMap<String, Input>, config: &GuestConfig) -> String {
    let mut what: Vec<&str> = inputs
        .iter()
        .filter(|(place, now)| before.inputs.get(*place).is_none_or(|was| was.blake3 != now.blake3))
        .map(|(place, _)| place.rsplit('/').next().unwrap_or(place))
        .collect();
    what.extend(before.inputs.keys().filter(|k| !inputs.contains_key(*k)).map(String::as_str));
    if before.config != *config || before.recipe != RECIPE {
        what.push("the machine's settings");
    }
    what.join(", ")
}

fn guest_config(options: &InitOptions, shares: &[PathBuf]) -> GuestConfig {
    let mut env = options.daemon_env.clone();
    for (name, value) in [("RUST_BACKTRACE", "1"), ("DAYFLY_PATIENCE", PATIENCE)] {
        if !env.iter().any(|(known, _)| known == name) {
            env.push((name.to_owned(), value.to_owned()));
        }
    }
    let mut argv = vec!["/usr/bin/dayflyd".to_owned()];
    argv.extend(options.daemon_arguments.iter().cloned());
    let tag = |(index, path): (usize, &PathBuf)| GuestShare {
        tag: format!("share{index}"),
        path: path.display().to_string(),
    };
    let live =
        options.shares.iter().filter(|p| !shares.contains(p)).map(|p| p.display().to_string()).collect();
    GuestConfig {
        modules: Vec::new(),
        daemon: options.daemon.is_some().then_some(DaemonConfig { argv, env }),
        shares: shares.iter().enumerate().map(tag).collect(),
        live,
        hostname: "dayfly-machine".to_owned(),
    }
}

/// The loader that a dynamically linked ELF program asks for.
fn loader(file: &[u8]) -> Option<String> {
    let table = usize::try_from(u64::from_le_bytes(file.get(0x20..0x28)?.try_into().ok()?)).ok()?;
    let size = usize::from(u16::from_le_bytes(file.get(0x36..0x38)?.try_into().ok()?));
    let count = usize::from(u16::from_le_bytes(file.get(0x38..0x3a)?.try_into().ok()?));
    for index in 0..count {
        let header = file.get(table.checked_add(index * size)?..)?.get(..0x38)?;
        if header.get(..4)? == 3u32.to_le_bytes() {
            let offset = usize::try_from(u64::from_le_bytes(header.get(8..16)?.try_into().ok()?)).ok()?;
            let name = file.get(offset..)?.split(|b| *b == 0).next()?;
            return Some(String::from_utf8_lossy(name).into_owned());
        }
    }
    None
}

fn make(
    layout: &Layout,
    programs: &BTreeMap<String, PathBuf>,
    kernel: &Kernel,
    mut config: GuestConfig,
) -> Result<(), BuildError> {
    let modules = kernel.modules()?;
    config.modules = modules.iter().filter(|m| m.load).map(|m| m.name.clone()).collect();
    let fail = |e: io::Error| FileError::new("writing", &layout.initramfs(), e);
    let mut archive = cpio::Writer::new(Vec::with_capacity(32 << 20));
    let module_folder = format!("lib/modules/{}", kernel.version);
    for folder in [
        "bin",
        "dev",
        "etc",
        "lib",
        "lib/modules",
        &module_folder,
        "proc",
        "root",
        "run",
        "sbin",
        "sys",
        "tmp",
        "usr",
        "usr/bin",
        "usr/sbin",
        "var",
        "var/lib",
        "host",
        "hostfs",
    ] {
        archive.folder(folder, 0o755).map_err(fail)?;
    }
    // The kernel opens it for init before anything is mounted.
    archive.character_device("dev/console", 0o600, (5, 1)).map_err(fail)?;
    for (place, path) in programs {
        let body = fs::read(path).map_err(|e| FileError::new("reading", path, e))?;
        if let Some(loader) = loader(&body).filter(|_| body.starts_with(b"\x7fELF")) {
            return Err(BuildError::Dynamic { path: path.clone(), loader });
        }
        archive.file(place, 0o755, &elf::shear(body)).map_err(fail)?;
    }
    for applet in applets(&programs["bin/busybox"])? {
        archive.link(&format!("bin/{applet}"), "busybox").map_err(fail)?;
    }
    let mut dependencies = String::new();
    for module in &modules {
        archive.file(&format!("{module_folder}/{}.ko", module.name), 0o644, &module.body).map_err(fail)?;
        let needs: Vec<String> = module.needs.iter().map(|n| format!(" {n}.ko")).collect();
        dependencies.push_str(&format!("{}.ko:{}\n", module.name, needs.concat()));
    }
    archive.file(&format!("{module_folder}/modules.dep"), 0o644, dependencies.as_bytes()).map_err(fail)?;
    archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n").map_err(fail)?;
    archive.file("etc/group", 0o644, b"root:x:0:\n").map_err(fail)?;
    archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost dayfly-machine\n").map_err(fail)?;
    let text = serde_json::to_vec(&config).map_err(|e| fail(e.into()))?;
    archive.file(GUEST_CONFIG_PATH.trim_start_matches('/'), 0o644, &text).map_err(fail)?;
    let archive = archive.finish().map_err(fail)?;
    files::write(&layout.vmlinux(), &kernel.vmlinux()?)?;
    files::write(&layout.initramfs(), &archive)?;
    Ok(())
}

fn applets(busybox: &Path) -> Result<Vec<String>, BuildError> {
    let wrong = |why: String| BuildError::Program {
        program: busybox.display().to_string(),
        why,
        package: "busybox-static",
    };
    let out = Command::new(busybox).arg("--list").output().map_err(|e| wrong(e.to_string()))?;
    let mut names: Vec<String> = String::from_utf8_lossy(&out.stdout)
        .lines()
        .filter(|n| !n.is_empty() && *n != "busybox" && n.bytes().all(|b| b.is_ascii_graphic() && b != b'/'))
        .map(str::to_owned)
        .collect();
    names.dedup();
    if names.len() < 50 {
        return Err(wrong(format!("--list: expected some hundred names, got {}", names.len())));
    }
    Ok(names)
}
