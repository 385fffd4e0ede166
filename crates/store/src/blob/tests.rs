use super::*;
use std::os::unix::fs::{PermissionsExt, symlink};

fn root() -> (tempfile::TempDir, Dir) {
    let folder = tempfile::tempdir().unwrap();
    let dir = Dir::root(folder.path()).unwrap();
    (folder, dir)
}

#[test]
fn no_link_is_followed() {
    let (folder, dir) = root();
    let precious = folder.path().join("precious");
    std::fs::create_dir(&precious).unwrap();
    std::fs::write(precious.join("file"), "x").unwrap();
    symlink(&precious, folder.path().join("folder-link")).unwrap();
    symlink(precious.join("file"), folder.path().join("file-link")).unwrap();
    assert_eq!(dir.sub("folder-link").unwrap_err().source.raw_os_error(), Some(libc_enotdir()));
    for result in [
        dir.open("file-link"),
        dir.open_rw("file-link"),
        dir.open_or_create("file-link"),
        dir.create("file-link"),
    ] {
        result.unwrap_err();
    }
    for link in ["folder-link", "file-link"] {
        dir.remove(link).unwrap();
        assert!(!dir.has(link).unwrap());
    }
    assert!(precious.join("file").is_file());
}

/// The error of `openat` for a symbolic link with O_DIRECTORY and O_NOFOLLOW.
fn libc_enotdir() -> i32 {
    Errno::NOTDIR.raw_os_error()
}

#[test]
fn what_is_no_regular_file_is_refused_and_does_not_block() {
    let (_folder, dir) = root();
    rustix::fs::mknodat(&dir, "pipe", FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    dir.make("folder").unwrap();
    for name in ["pipe", "folder"] {
        let error = dir.open(name).unwrap_err();
        assert!(error.path.ends_with(name), "{error}");
    }
}

#[test]
fn a_finished_file_is_read_only() {
    let (folder, dir) = root();
    dir.write("file", b"content").unwrap();
    let mode = std::fs::metadata(folder.path().join("file")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o400);
    assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"content");
}

#[test]
fn renaming_refuses_or_exchanges_but_never_overwrites() {
    let (_folder, dir) = root();
    dir.write("a", b"a").unwrap();
    dir.write("b", b"b").unwrap();
    let taken = dir.rename("a", &dir, "b", IfTaken::Refuse).unwrap_err();
    assert_eq!(taken.source.kind(), io::ErrorKind::AlreadyExists);
    dir.rename("a", &dir, "b", IfTaken::Exchange).unwrap();
    assert_eq!(std::fs::read(dir.path().join("a")).unwrap(), b"b");
    assert!(dir.rename("a", &dir, "c", IfTaken::Exchange).unwrap_err().is_not_found());
}

#[test]
fn a_stage_is_removed_with_its_content_and_what_left_it_stays() {
    let (_folder, dir) = root();
    let stage = Stage::new(&dir, "stage").unwrap();
    let deep = stage.make("a").unwrap().make("b").unwrap();
    deep.write("file", b"x").unwrap();
    stage.make("kept").unwrap();
    stage.rename("kept", &dir, "kept", IfTaken::Refuse).unwrap();
    drop(stage);
    assert_eq!(dir.entries().unwrap(), ["kept"]);
}

#[test]
fn listing_twice_lists_all_twice() {
    let (_folder, dir) = root();
    for n in 0..300 {
        dir.create(&format!("a-rather-long-name-for-a-file-{n:04}")).unwrap();
    }
    assert_eq!(dir.entries().unwrap().len(), 300);
    assert_eq!(dir.entries().unwrap().len(), 300);
}
