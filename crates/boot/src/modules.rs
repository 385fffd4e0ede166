//! Collects modules and their dependencies from `lib/modules/<release>`, in load order.
//!
//! A module's dependencies are those that `modules.dep` lists. A package that is only unpacked has
//! no such file, because its post-installation script makes it. Then the dependencies are those in
//! each module's `.modinfo` section (`depends=`). Only the modules that are collected are read, and
//! no program such as depmod is needed.

mod all;
mod body;
mod names;
pub(crate) mod needs;

pub use all::{files, lists};
pub use body::{packed, without_signature};

use crate::error::{BootError, on};
use crate::files::MAX_KERNEL_BYTES;
use body::unpack;
use names::{list, name_of};
use needs::Needs;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Upper limit for collected modules, which is also the limit of a kernel's manifest.
const MAX_MODULES: usize = 1024;

/// A module for the initramfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// The module's name in the kernel's spelling, with `_` in place of `-`.
    pub name: String,
    /// The module's path below `lib/modules/<release>`, without a suffix of a compression.
    pub path: String,
    /// The unpacked ELF module.
    pub bytes: Vec<u8>,
    /// The names of all modules that must be loaded before this one, in load order. Dependencies
    /// that form a circle are left out.
    pub needs: Vec<String>,
    /// Whether only optional modules need this module.
    pub optional: bool,
}

/// The result of [`collect`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Modules {
    /// Name of the modules' folder, which is the kernel's release.
    pub release: String,
    /// The modules in load order.
    pub files: Vec<Module>,
    /// Required modules that the kernel has built in.
    pub builtin: Vec<String>,
}

/// Collects `required` and `optional` modules with all their dependencies from `folder`
/// (`lib/modules/<release>`). Optional modules that the kernel lacks are left out.
///
/// # Errors
/// [`BootError::MissingModule`] for a required module or a dependency that is neither a file nor
/// built in, [`BootError::Tree`] for damaged or too many modules, and [`BootError::Io`].
pub fn collect(folder: &Path, required: &[&str], optional: &[&str]) -> Result<Modules, BootError> {
    let folder = std::fs::canonicalize(folder).map_err(on("open", folder))?;
    let built_in: BTreeSet<String> =
        list(&folder, "modules.builtin")?.lines().map(name_of).collect();
    let needs = Needs::of(&folder)?;
    let release = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let found = Modules { release, ..Modules::default() };
    let mut collector =
        Collector { folder, built_in, needs, seen: BTreeSet::new(), bytes: 0, found };
    // A missing module is reported before any module is read.
    let mut paths = Vec::new();
    for name in required {
        match collector.needs.path_of(name) {
            Some(path) => paths.push(path.to_owned()),
            None if collector.built_in.contains(&name_of(name)) => {
                collector.found.builtin.push((*name).to_owned());
            }
            None => return Err(collector.missing(name)),
        }
    }
    for path in paths {
        collector.visit(&path, false)?;
    }
    for name in optional {
        if let Some(path) = collector.needs.path_of(name).map(str::to_owned) {
            collector.visit(&path, true)?;
        }
    }
    Ok(collector.found)
}

/// Modules under collection.
struct Collector {
    folder: PathBuf,
    /// The names of the modules that are built in.
    built_in: BTreeSet<String>,
    needs: Needs,
    /// Paths of the modules that were visited.
    seen: BTreeSet<String>,
    /// Bytes of the collected modules.
    bytes: u64,
    found: Modules,
}

impl Collector {
    fn missing(&self, module: &str) -> BootError {
        BootError::MissingModule { path: self.folder.clone(), module: module.to_owned() }
    }

    /// Collects the module at `path` after its dependencies, depth first. A dependency circle ends
    /// at the first module that was seen before. The steps are on the heap, because a hostile list
    /// can make a chain of any length.
    fn visit(&mut self, path: &str, optional: bool) -> Result<(), BootError> {
        let mut steps = vec![Step::Enter(path.to_owned())];
        while let Some(step) = steps.pop() {
            match step {
                Step::Enter(path) if !self.seen.insert(path.clone()) => {}
                Step::Enter(path) => {
                    let bytes = unpack(&self.folder, &path)?;
                    self.count(&path, bytes.len() as u64)?;
                    let needs = self.needs.paths_for(&path, &bytes, &self.built_in);
                    let needs = needs.map_err(|module| self.missing(&module))?;
                    let enter = needs.iter().rev().cloned().map(Step::Enter).collect::<Vec<_>>();
                    steps.push(Step::Leave { path, bytes, needs });
                    steps.extend(enter);
                }
                Step::Leave { path, bytes, needs } => {
                    let needs = self.closure(&needs);
                    let plain = path.split_once(".ko").map_or(path.as_str(), |(stem, _)| stem);
                    let (name, path) = (name_of(&path), format!("{plain}.ko"));
                    self.found.files.push(Module { name, path, bytes, needs, optional });
                }
            }
        }
        Ok(())
    }

    /// Counts a module against the limits.
    fn count(&mut self, path: &str, bytes: u64) -> Result<(), BootError> {
        self.bytes += bytes;
        if self.seen.len() <= MAX_MODULES && self.bytes <= MAX_KERNEL_BYTES {
            return Ok(());
        }
        Err(BootError::Tree {
            path: self.folder.clone(),
            expected: format!("at most {MAX_MODULES} modules of {MAX_KERNEL_BYTES} bytes in all"),
            got: format!("more at {path:?}"),
        })
    }

    /// The names of the collected modules at `paths` and of everything that they need, in load
    /// order.
    fn closure(&self, paths: &[String]) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for name in paths.iter().map(|path| name_of(path)) {
            // A module of a circle is not collected yet.
            let Some(module) = self.found.files.iter().find(|m| m.name == name) else { continue };
            for name in module.needs.iter().chain([&module.name]) {
                if !names.contains(name) {
                    names.push(name.clone());
                }
            }
        }
        names
    }
}

/// One step of [`Collector::visit`].
enum Step {
    /// Reads the module at this path and visits its dependencies.
    Enter(String),
    /// Collects a module whose dependencies are collected.
    Leave { path: String, bytes: Vec<u8>, needs: Vec<String> },
}

#[cfg(test)]
#[path = "modules_tests.rs"]
mod tests;
