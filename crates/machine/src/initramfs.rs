//! Builds `vmlinux` and `initramfs` from the kernel's package and the programs to include, and
//! detects when they are stale.

use crate::config::InitOptions;
use crate::files::{self, FileError};
use crate::layout::Layout;
use crate::modules::{EXTRA_MODULES, MODULES};
use crate::share::{Access, Share};
use dayfly_boot::modules::{self, Modules};
use dayfly_boot::{
    Archive, BootError, KernelSource, MAX_KERNEL_BYTES, elf, initramfs, read_capped, unpack_vmlinux,
};
use dayfly_machine_init::{DaemonConfig, GUEST_CONFIG_PATH, GuestConfig, GuestShare, PORTS_SOCKET};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Version of the initramfs's layout. A change of the layout that its inputs do not show must raise
/// the number.
const RECIPE: u32 = 4;
/// Timeout factor of `dayflyd` (`DAYFLY_TIMEOUT_FACTOR`) unless the caller sets one. An emulated
/// CPU is about 20 times slower than its host CPU, which also runs the user's programs.
const TIMEOUT_FACTOR: &str = "4";

/// Why the machine's kernel and initramfs could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The kernel's package or a program to include is unusable.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// A file operation failed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A required program of the host is missing or failed.
    #[error("{program}: {why} (Debian package {package})")]
    Program {
        /// Name of the program.
        program: String,
        /// The cause.
        why: String,
        /// The Debian package that contains the program.
        package: &'static str,
    },
    /// An input has vanished, so the initramfs cannot be built again with another change.
    #[error(
        "{path}: gone, and the machine has changed since it was built; run: dayfly machine init"
    )]
    Gone {
        /// Path of the input.
        path: PathBuf,
    },
    /// A program to include needs a dynamic loader, so it would not run in the machine.
    #[error("{path}: expected a static ELF program, got one that needs the loader {loader}")]
    Dynamic {
        /// Path of the program.
        path: PathBuf,
        /// The loader in its `PT_INTERP`.
        loader: String,
    },
}

/// One input: its digest, and its `stat` values, by which an unchanged file need not be read again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Input {
    path: PathBuf,
    bytes: u64,
    inode: u64,
    modified_ns: i128,
    blake3: String,
}

/// The inputs of the present build.
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
    /// The changed inputs, if this call replaced an earlier build.
    pub(crate) changed: Option<String>,
    /// Inputs that do not exist any more; the initramfs has copies.
    pub(crate) missing: Vec<PathBuf>,
}

/// The programs to include, by their place in the machine.
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
    // Machines of older versions were made without them.
    for (given, name) in [
        (&options.volume, "dayfly-volume"),
        (&options.relay, "dayfly-relay"),
        (&None, "dayfly-packer"),
    ] {
        let beside = || Some(options.daemon.as_ref()?.with_file_name(name));
        let path = given.clone().or_else(|| beside().filter(|path| path.is_file()));
        if let Some(path) = path {
            programs.insert(format!("usr/bin/{name}"), path);
        }
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
    if elf::loader(&read_capped(&path, MAX_KERNEL_BYTES)?).is_some() {
        return Err(fails("expected a static program, got one that needs a dynamic linker"));
    }
    Ok(path)
}

fn stat(path: &Path) -> Result<(u64, u64, i128), FileError> {
    let meta = fs::metadata(path).map_err(|e| FileError::new("reading", path, e))?;
    Ok((
        meta.len(),
        meta.ino(),
        i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()),
    ))
}

/// The present input. The file is read only if its `stat` values differ from `before`.
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

/// Builds kernel and initramfs if an input has changed. An input that has vanished since the last
/// build is no change by itself, because the initramfs has a copy.
pub(crate) fn ensure(
    layout: &Layout,
    options: &InitOptions,
    shares: &[Share],
) -> Result<Build, BuildError> {
    let before: Option<Record> = files::read_json(&layout.build()).ok().flatten();
    let before = before.filter(|_| layout.vmlinux().exists() && layout.initramfs().exists());
    let old = |place: &str| before.as_ref().and_then(|b| b.inputs.get(place));
    let programs = programs(options)?;
    let mut inputs = BTreeMap::new();
    let mut missing: Vec<PathBuf> = Vec::new();
    let mut take = |place: &str, path: &Path| -> Result<(), BuildError> {
        match (input(path, old(place)), old(place)) {
            (Ok(now), _) => drop(inputs.insert(place.to_owned(), now)),
            (Err(e), Some(had))
                if had.path == path && e.source.kind() == io::ErrorKind::NotFound =>
            {
                missing.push(path.to_owned());
                inputs.insert(place.to_owned(), had.clone());
            }
            (Err(e), _) => return Err(e.into()),
        }
        Ok(())
    };
    for (place, path) in &programs {
        take(place, path)?;
    }
    let kernel = KernelSource::in_tree(&options.kernel_tree);
    match (&kernel, old("kernel")) {
        (Ok(kernel), _) => take("kernel", &kernel.kernel)?,
        (Err(_), Some(had)) => take("kernel", &had.path)?,
        (Err(_), None) => {}
    }
    let config = guest_config(options, shares);
    let digest = digest(&inputs, &config);
    if let Some(before) = &before
        && before.digest == digest
    {
        if before.inputs != inputs {
            // The file was touched, but its content is unchanged.
            files::write_json(&layout.build(), &Record { inputs, ..before.clone() })?;
        }
        return Ok(Build { digest, changed: None, missing });
    }
    if let Some(path) = missing.into_iter().next() {
        return Err(BuildError::Gone { path });
    }
    let changed = before.as_ref().map(|before| difference(before, &inputs, &config));
    make(layout, &programs, &kernel?, config.clone())?;
    files::write_json(
        &layout.build(),
        &Record { recipe: RECIPE, inputs, config, digest: digest.clone() },
    )?;
    Ok(Build { digest, changed, missing: Vec::new() })
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

fn guest_config(options: &InitOptions, shares: &[Share]) -> GuestConfig {
    let mut env = options.daemon_env.clone();
    for (name, value) in [
        ("RUST_BACKTRACE", "1"),
        ("DAYFLY_TIMEOUT_FACTOR", TIMEOUT_FACTOR),
        ("DAYFLY_PORTS", PORTS_SOCKET),
    ] {
        if !env.iter().any(|(known, _)| known == name) {
            env.push((name.to_owned(), value.to_owned()));
        }
    }
    let mut argv = vec!["/usr/bin/dayflyd".to_owned()];
    argv.extend(options.daemon_arguments.iter().cloned());
    let share = |share: &Share| GuestShare {
        name: share.name.clone(),
        tag: share.tag(),
        path: share.path.display().to_string(),
        writable: share.access == Access::ReadWrite,
    };
    GuestConfig {
        modules: Vec::new(),
        daemon: options.daemon.is_some().then_some(DaemonConfig { argv, env }),
        shares: shares.iter().map(share).collect(),
        links: root_links(shares),
        hostname: "dayfly-machine".to_owned(),
        uplink: options.network,
    }
}

/// Symbolic links in the host's root that lead into a share. With a merged /usr, /bin and /lib are
/// such links.
fn root_links(shares: &[Share]) -> Vec<(String, String)> {
    let link = |name: &str| {
        let path = Path::new("/").join(name);
        let target = fs::read_link(&path).ok()?;
        let leads_to = path.canonicalize().ok()?;
        let shared = shares.iter().any(|share| leads_to.starts_with(&share.path));
        shared.then(|| (name.to_owned(), target.display().to_string()))
    };
    ["bin", "lib", "lib32", "lib64", "libx32", "sbin"].into_iter().filter_map(link).collect()
}

/// The folders of the machine's own tree.
const FOLDERS: &[&str] = &[
    "bin", "dev", "etc", "lib", "proc", "root", "run", "sbin", "sys", "tmp", "usr/bin", "usr/sbin",
    "var/lib", "host", "shares",
];

fn make(
    layout: &Layout,
    programs: &BTreeMap<String, PathBuf>,
    kernel: &KernelSource,
    mut config: GuestConfig,
) -> Result<(), BuildError> {
    let packed = read_capped(&kernel.kernel, MAX_KERNEL_BYTES)?;
    let vmlinux = unpack_vmlinux(&packed)
        .map_err(|source| BootError::Format { path: kernel.kernel.clone(), source })?;
    let modules = match &kernel.modules {
        Some(folder) => modules::collect(folder, MODULES, EXTRA_MODULES)?,
        None => Modules::default(),
    };
    config.modules = modules.files.iter().filter(|m| !m.optional).map(|m| m.name.clone()).collect();
    let mut archive = initramfs(FOLDERS);
    for (place, path) in programs {
        let body = read_capped(path, MAX_KERNEL_BYTES)?;
        if let Some(loader) = elf::loader(&body) {
            return Err(BuildError::Dynamic { path: path.clone(), loader });
        }
        archive.file(place, 0o755, &elf::shear(body));
    }
    for applet in applets(&programs["bin/busybox"])? {
        archive.link(&format!("bin/{applet}"), "busybox");
    }
    add_modules(&mut archive, modules);
    archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n");
    archive.file("etc/group", 0o644, b"root:x:0:\n");
    archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost dayfly-machine\n");
    let text = serde_json::to_vec(&config)
        .map_err(|e| FileError::new("writing", &layout.initramfs(), io::Error::from(e)))?;
    archive.file(GUEST_CONFIG_PATH.trim_start_matches('/'), 0o644, &text);
    let archive = archive.finish()?;
    files::write(&layout.vmlinux(), &vmlinux)?;
    files::write(&layout.initramfs(), &archive)?;
    Ok(())
}

/// Adds the modules and their `modules.dep`, all in one folder, where init finds a module by its
/// name.
fn add_modules(archive: &mut Archive, modules: Modules) {
    let folder = format!("lib/modules/{}", modules.release);
    let mut dependencies = String::new();
    for module in modules.files {
        let body = modules::without_signature(module.bytes);
        archive.file(&format!("{folder}/{}.ko", module.name), 0o644, &body);
        // A line of modules.dep names the dependencies in reverse load order.
        let needs: Vec<String> = module.needs.iter().rev().map(|n| format!(" {n}.ko")).collect();
        dependencies.push_str(&format!("{}.ko:{}\n", module.name, needs.concat()));
    }
    archive.file(&format!("{folder}/modules.dep"), 0o644, dependencies.as_bytes());
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
        .filter(|n| {
            !n.is_empty() && *n != "busybox" && n.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
        })
        .map(str::to_owned)
        .collect();
    names.dedup();
    if names.len() < 50 {
        return Err(wrong(format!("--list: expected some hundred names, got {}", names.len())));
    }
    Ok(names)
}
