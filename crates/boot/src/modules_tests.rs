//! Closures of modules from both sources of dependencies, in load order.

use super::*;
use crate::samples::packed;
use std::fs;

/// A folder of modules. The content of each module states its dependencies.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new(modules: &[(&str, &str)], built_in: &str) -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(tree.folder()).unwrap();
        fs::write(tree.folder().join("modules.builtin"), built_in).unwrap();
        for (path, needs) in modules {
            let body = [b"\x7fELF\0depends=", needs.as_bytes(), b"\0"].concat();
            let bytes = match path.rsplit('.').next() {
                Some("zst") => packed(&body)[0].1.clone(),
                Some("gz") => packed(&body)[1].1.clone(),
                Some("xz") => packed(&body)[2].1.clone(),
                _ => body,
            };
            let path = tree.folder().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        tree
    }

    fn folder(&self) -> PathBuf {
        self.0.path().join("6.1")
    }

    fn list(&self, text: &str) {
        fs::write(self.folder().join("modules.dep"), text).unwrap();
    }

    fn collect(&self, required: &[&str], optional: &[&str]) -> Result<Modules, String> {
        collect(&self.folder(), required, optional).map_err(|e| e.to_string())
    }
}

fn names(modules: &Modules) -> Vec<&str> {
    modules.files.iter().map(|m| m.name.as_str()).collect()
}

const CHAIN: &[(&str, &str)] = &[
    ("kernel/a.ko.xz", "b,c-c"),
    ("kernel/deep/b.ko.zst", "c_c"),
    ("kernel/c-c.ko.gz", ""),
    ("kernel/x.ko", "y"),
    ("kernel/y.ko", "x"),
    ("kernel/notes.txt", ""),
];

#[test]
fn what_a_module_needs_comes_before_it_and_circles_end() {
    let tree = Tree::new(CHAIN, "");
    let stated = tree.collect(&["a", "x"], &[]).unwrap();
    assert_eq!(names(&stated), ["c_c", "b", "a", "y", "x"]);
    assert_eq!(stated.files[0].path, "kernel/c-c.ko");
    assert_eq!(stated.files[2].needs, ["c_c", "b"]);
    assert_eq!(stated.release, "6.1");
    // The same from a list, which has every dependency in reverse load order.
    tree.list(
        "kernel/a.ko.xz: kernel/deep/b.ko.zst kernel/c-c.ko.gz\n\
         kernel/deep/b.ko.zst: kernel/c-c.ko.gz\nkernel/c-c.ko.gz:\n\
         kernel/x.ko: kernel/y.ko\nkernel/y.ko: kernel/x.ko\n",
    );
    assert_eq!(tree.collect(&["a", "x"], &[]).unwrap(), stated);
}

#[test]
fn a_list_counts_more_than_what_modules_state() {
    let tree = Tree::new(CHAIN, "");
    tree.list("kernel/a.ko.xz: kernel/y.ko\nkernel/y.ko:\n");
    assert_eq!(names(&tree.collect(&["a"], &[]).unwrap()), ["y", "a"]);
    let text = tree.collect(&["b"], &[]).unwrap_err();
    assert!(text.contains("module b: expected a file"), "{text}");
}

#[test]
fn what_is_built_in_or_optional_may_be_missing() {
    let built_in = "kernel/in.ko\nkernel/also-in.ko\n";
    let tree = Tree::new(&[("kernel/a.ko", "in,b"), ("kernel/b.ko", "")], built_in);
    let found = tree.collect(&["b", "also_in"], &["a", "none"]).unwrap();
    assert_eq!(names(&found), ["b", "a"]);
    assert_eq!(found.builtin, ["also_in"]);
    assert_eq!(found.files.iter().map(|m| m.optional).collect::<Vec<_>>(), [false, true]);
    assert_eq!(found.files[1].needs, ["b"]);
    let text = tree.collect(&["none"], &[]).unwrap_err();
    assert!(text.contains("module none: expected a file or an entry in modules.builtin"), "{text}");
    let tree = Tree::new(&[("kernel/a.ko", "none")], "");
    let text = tree.collect(&["a"], &[]).unwrap_err();
    assert!(text.contains("module none: expected a file"), "{text}");
}

#[test]
fn a_path_out_of_the_folder_is_refused() {
    let tree = Tree::new(CHAIN, "");
    fs::write(tree.0.path().join("outside.ko"), b"\x7fELF").unwrap();
    tree.list("kernel/y.ko: ../outside.ko\n");
    let text = tree.collect(&["y"], &[]).unwrap_err();
    assert!(text.contains("open") && text.contains("outside.ko"), "{text}");
    // A symbolic link out of the folder, in a package without a list.
    fs::remove_file(tree.folder().join("modules.dep")).unwrap();
    std::os::unix::fs::symlink("../../outside.ko", tree.folder().join("kernel/link.ko")).unwrap();
    let text = tree.collect(&["link"], &[]).unwrap_err();
    assert!(text.contains("open") && text.contains("link.ko"), "{text}");
}

#[test]
fn the_number_of_modules_is_limited() {
    let modules: Vec<(String, String)> =
        (0..1025).map(|n| (format!("kernel/m{n}.ko"), format!("m{}", n + 1))).collect();
    let modules: Vec<(&str, &str)> =
        modules.iter().map(|(path, needs)| (path.as_str(), needs.as_str())).collect();
    let tree = Tree::new(&modules, "kernel/m1025.ko\n");
    assert_eq!(tree.collect(&["m1"], &[]).unwrap().files.len(), 1024);
    let text = tree.collect(&["m0"], &[]).unwrap_err();
    assert!(text.contains("at most 1024 modules"), "{text}");
}

#[test]
fn a_kernel_without_modules_has_them_built_in() {
    let tree = Tree::new(&[], "kernel/a.ko\n");
    assert_eq!(tree.collect(&["a"], &["b"]).unwrap().builtin, ["a"]);
}
