//! Finds a kernel and its modules in an unpacked package.

use crate::error::{BootError, on};
use std::path::{Path, PathBuf};

/// The files that a kernel is built from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSource {
    /// Path of a vmlinuz or an ELF vmlinux.
    pub kernel: PathBuf,
    /// Path of `lib/modules/<release>`. If `None`, everything that a guest needs must be built in;
    /// this is not checked.
    pub modules: Option<PathBuf>,
}

impl KernelSource {
    /// Finds the files in an unpacked package: `boot/vmlinuz-<release>` (or `boot/vmlinux-…`) and
    /// `lib/modules/<release>`.
    ///
    /// # Errors
    /// [`BootError::Tree`] unless there is exactly one kernel with one folder of modules, and
    /// [`BootError::Io`].
    pub fn in_tree(tree: &Path) -> Result<Self, BootError> {
        let kernel = only(&tree.join("boot"), "vmlinu")?;
        let modules = tree.join("lib/modules");
        let modules = if modules.is_dir() { modules } else { tree.join("usr/lib/modules") };
        let name = kernel.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let release = name.strip_prefix("vmlinuz-").or_else(|| name.strip_prefix("vmlinux-"));
        let named = release.map(|r| modules.join(r)).filter(|folder| folder.is_dir());
        let modules = named.map_or_else(|| only(&modules, ""), Ok)?;
        Ok(Self { kernel, modules: Some(modules) })
    }
}

/// The only entry of `folder` whose name begins with `prefix`.
fn only(folder: &Path, prefix: &str) -> Result<PathBuf, BootError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(on("read", folder))? {
        let entry = entry.map_err(on("read", folder))?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            found.push(entry.path());
        }
    }
    <[PathBuf; 1]>::try_from(found).map(|[path]| path).map_err(|found| BootError::Tree {
        path: folder.to_owned(),
        expected: format!("one {prefix}*"),
        got: format!("{} (give the folder of one unpacked linux-image package)", found.len()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn tree(kernels: &[&str], modules: &[&str]) -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir_all(tree.path().join("boot")).unwrap();
        fs::write(tree.path().join("boot/System.map-6.1"), b"").unwrap();
        for kernel in kernels {
            fs::write(tree.path().join("boot").join(kernel), b"").unwrap();
        }
        for release in modules {
            fs::create_dir_all(tree.path().join("lib/modules").join(release)).unwrap();
        }
        tree
    }

    #[test]
    fn modules_are_those_of_the_kernel_by_name_or_the_only_ones() {
        for (kernel, modules, expected) in [
            ("vmlinuz-6.1", &["6.1", "6.12"][..], "6.1"),
            ("vmlinux-6.12", &["6.1", "6.12"], "6.12"),
            ("vmlinuz-6.1", &["6.1-custom"], "6.1-custom"),
            ("vmlinuz", &["6.1"], "6.1"),
        ] {
            let tree = tree(&[kernel], modules);
            let source = KernelSource::in_tree(tree.path()).unwrap();
            assert_eq!(source.kernel, tree.path().join("boot").join(kernel));
            assert_eq!(source.modules.unwrap(), tree.path().join("lib/modules").join(expected));
        }
    }

    #[test]
    fn no_kernel_and_several_are_counted() {
        for (kernels, modules, words) in [
            (&[][..], &["6.1"][..], "boot: expected one vmlinu*, got 0"),
            (&["vmlinuz-6.1", "vmlinux-6.12"], &["6.1"], "boot: expected one vmlinu*, got 2"),
            (&["vmlinuz-6.1"], &["6.2", "6.3"], "lib/modules: expected one *, got 2"),
        ] {
            let text =
                KernelSource::in_tree(tree(kernels, modules).path()).unwrap_err().to_string();
            assert!(text.contains(words), "{words}: {text}");
        }
        let text = KernelSource::in_tree(tree(&["vmlinuz-6.1"], &[]).path()).unwrap_err();
        assert!(text.to_string().contains("usr/lib/modules"), "{text}");
    }
}
