//! Copies against a real file system.

use super::place::PlaceError;
use super::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

fn tree() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    let top = dir.path().join("src");
    fs::create_dir_all(top.join("sub")).expect("a folder");
    fs::write(top.join("file"), "content").expect("a file");
    fs::set_permissions(top.join("file"), fs::Permissions::from_mode(0o751)).expect("a mode");
    fs::write(top.join("sub").join("n".repeat(150)), vec![7; 70_000]).expect("a file");
    symlink("../file", top.join("sub/link")).expect("a link");
    dir
}

fn packed(source: &Path, name: Option<&str>) -> Vec<u8> {
    let mut bytes = Vec::new();
    pack(source, name.map(Path::new), &mut bytes).expect("a packed tree");
    bytes
}

fn same(top: &Path) {
    assert_eq!(fs::read(top.join("file")).expect("the file"), b"content");
    assert_eq!(fs::metadata(top.join("file")).expect("the file").mode() & 0o777, 0o751);
    assert_eq!(fs::read(top.join("sub").join("n".repeat(150))).expect("the long name"), vec![7; 70_000]);
    assert_eq!(fs::read_link(top.join("sub/link")).expect("the link"), Path::new("../file"));
}

#[test]
fn a_folder_goes_inside_another_or_takes_a_new_name_or_only_its_contents_go() {
    let dir = tree();
    let archive = packed(&dir.path().join("src"), Some("src"));
    assert_eq!(first_entry(&archive[..]).expect("an entry"), (EntryType::Directory, "src".into()));
    let there = dir.path().join("there");
    fs::create_dir(&there).expect("a folder");
    unpack(&archive[..], &there, false).expect("unpacked");
    same(&there.join("src"));
    unpack(&archive[..], &there, true).expect("unpacked");
    same(&there);
    unpack(&archive[..], &dir.path().join("new"), false).expect("unpacked");
    same(&dir.path().join("new"));
    // Once more over what is there.
    unpack(&archive[..], &there, false).expect("unpacked");
    same(&there.join("src"));
}

#[test]
fn a_file_goes_into_a_folder_or_takes_a_new_name() {
    let dir = tree();
    let archive = packed(&dir.path().join("src/file"), Some("file"));
    unpack(&archive[..], &dir.path().join("renamed"), false).expect("unpacked");
    assert_eq!(fs::read(dir.path().join("renamed")).expect("the file"), b"content");
    unpack(&archive[..], &dir.path().join("src/sub"), false).expect("unpacked");
    assert_eq!(fs::read(dir.path().join("src/sub/file")).expect("the file"), b"content");
    let refused = unpack(&archive[..], &dir.path().join("missing/"), false).expect_err("no folder");
    assert!(refused.to_string().contains("no such folder"), "{refused}");
}

#[test]
fn contents_are_packed_without_their_folder_and_owned_by_root() {
    let dir = tree();
    let bytes = packed(&dir.path().join("src"), None);
    let mut archive = Archive::new(&bytes[..]);
    let mut names = Vec::new();
    for entry in archive.entries().expect("entries") {
        let entry = entry.expect("an entry");
        assert_eq!((entry.header().uid().ok(), entry.header().gid().ok()), (Some(0), Some(0)));
        names.push(entry.path().expect("a path").display().to_string());
    }
    assert_eq!(names[..2], ["file", "sub"]);
}

#[test]
fn every_truncation_is_an_error() {
    let dir = tree();
    let archive = packed(&dir.path().join("src"), Some("src"));
    // Up to the end of the last file's data; the rest is the end mark.
    let content = archive.len() - 1024;
    for cut in (1..content).step_by(509) {
        let target = tempfile::tempdir().expect("a folder");
        let cut_at_an_entry = cut % 512 == 0;
        let result = unpack(&archive[..cut], target.path(), false);
        assert!(result.is_err() || cut_at_an_entry, "cut at {cut}");
    }
}

#[test]
fn a_hostile_archive_stays_in_its_folder() {
    let dir = tempfile::tempdir().expect("a folder");
    let inside = dir.path().join("inside");
    fs::create_dir(&inside).expect("a folder");
    let entry = |builder: &mut Builder<Vec<u8>>, path: &str, kind: EntryType, link: Option<&str>| {
        let mut header = Header::new_gnu();
        let name = &mut header.as_gnu_mut().expect("gnu").name;
        name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o755);
        let data: &[u8] = if kind.is_file() { b"evil" } else { b"" };
        header.set_size(data.len() as u64);
        if let Some(link) = link {
            header.set_link_name_literal(link).expect("a short link");
        }
        header.set_cksum();
        builder.append(&header, data).expect("memory");
    };
    let cases: [&[(&str, EntryType, Option<&str>)]; 4] = [
        &[("x", EntryType::Directory, None), ("x/../../evil", EntryType::Regular, None)],
        &[("x", EntryType::Directory, None), ("evil", EntryType::Regular, None)],
        &[
            ("x", EntryType::Directory, None),
            ("x/out", EntryType::Symlink, Some("../..")),
            ("x/out/evil", EntryType::Regular, None),
        ],
        &[("x", EntryType::Directory, None), ("x/evil", EntryType::Link, Some("/etc/hostname"))],
    ];
    for case in cases {
        let mut builder = Builder::new(Vec::new());
        for (path, kind, link) in case {
            entry(&mut builder, path, *kind, *link);
        }
        let bytes = builder.into_inner().expect("memory");
        let result = unpack(&bytes[..], &inside, false);
        assert!(!dir.path().join("evil").exists() && !inside.join("evil").exists(), "{case:?}");
        assert!(result.is_err(), "{case:?}");
    }
}

#[test]
fn dockers_rules() {
    use Kind::{File, Folder, Missing};
    let cases = [
        (Folder, false, true, false, Ok(Place::Inside)),
        (Folder, false, true, true, Ok(Place::Contents)),
        (Folder, true, false, false, Ok(Place::Inside)),
        (Missing, false, true, false, Ok(Place::As)),
        (Missing, true, true, false, Ok(Place::As)),
        (Missing, false, true, true, Ok(Place::As)),
        (Missing, true, false, false, Err(PlaceError::NoFolder)),
        (Missing, false, false, false, Ok(Place::As)),
        (File, false, false, false, Ok(Place::As)),
        (File, false, true, false, Err(PlaceError::FolderOverFile)),
        (Folder, false, false, true, Err(PlaceError::NotAFolder)),
    ];
    for (there, slash, folder, contents, expected) in cases {
        assert_eq!(place(there, slash, folder, contents), expected, "{there:?} {slash} {folder} {contents}");
    }
}
