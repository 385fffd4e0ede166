//! `make install` and `make uninstall`, into a folder.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn install(words: &[&str], folder: &Path) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install");
    let output = Command::new(script)
        .args(words)
        .env("DESTDIR", folder)
        .env("PREFIX", "/usr/local")
        .env_remove("UNITS")
        .env("HOME", "/nowhere")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// Files and links below `folder`.
fn files(folder: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(&entry.path()));
        } else {
            found.insert(entry.path());
        }
    }
    found
}

#[test]
fn what_is_installed_runs_and_is_removed_again() {
    let folder = tempfile::tempdir().unwrap();
    let foreign = folder.path().join("usr/local/bin/foreign");
    std::fs::create_dir_all(foreign.parent().unwrap()).unwrap();
    std::fs::write(&foreign, "").unwrap();
    // Twice: an upgrade.
    for _ in 0..2 {
        let said = install(&[], folder.path());
        assert!(said.contains("systemctl enable --now dayflyd.socket"), "{said}");
    }
    let at = |path: &str| folder.path().join("usr/local").join(path);
    for program in ["dayfly", "dayflyd"] {
        let output = Command::new(at("bin").join(program)).arg("--version").output().unwrap();
        assert!(output.status.success());
        assert!(String::from_utf8_lossy(&output.stdout).starts_with(program), "{output:?}");
    }
    for program in [
        "dayfly-vmm",
        "dayfly-pager",
        "dayfly-packer",
        "dayfly-volume",
        "dayfly-relay",
        "dayfly-agent",
        "dayfly-machine-init",
    ] {
        assert!(at("lib/dayfly").join(program).is_file(), "{program}");
    }
    for page in ["dayfly.1", "dayfly-run.1", "dayfly-image-build.1"] {
        let page = std::fs::read_to_string(at("share/man/man1").join(page)).unwrap();
        assert!(page.contains(".SH NAME") && page.contains(".SH OPTIONS"), "{page}");
    }
    let bash = at("share/bash-completion/completions/dayfly");
    assert!(std::fs::read_to_string(bash).unwrap().contains("_dayfly()"));
    let unit = folder.path().join("etc/systemd/system/dayflyd.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    assert!(unit.contains("ExecStart=/usr/local/lib/dayfly/dayflyd\n"), "{unit}");
    assert!(unit.contains("KillMode=process\n"), "else a restart would end all VMs: {unit}");

    install(&["remove"], folder.path());
    assert_eq!(files(folder.path()), [foreign].into());
}
