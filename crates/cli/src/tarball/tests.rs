//! Copies against a real file system.

use super::place::PlaceError;
use super::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use tar::{Archive, Builder, EntryType, Header};

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

fn unpack_as(archive: &[u8], name: &str, destination: &Path, contents: bool) -> Result<u64> {
    unpack(archive, Some(OsStr::new(name)), destination, contents, false)
}

fn same(top: &Path) {
    assert_eq!(fs::read(top.join("file")).expect("the file"), b"content");
    assert_eq!(fs::metadata(top.join("file")).expect("the file").mode() & 0o777, 0o751);
    assert_eq!(
        fs::read(top.join("sub").join("n".repeat(150))).expect("the long name"),
        vec![7; 70_000]
    );
    assert_eq!(fs::read_link(top.join("sub/link")).expect("the link"), Path::new("../file"));
}

#[test]
fn a_folder_goes_inside_another_or_takes_a_new_name_or_only_its_contents_go() {
    let dir = tree();
    let archive = packed(&dir.path().join("src"), Some("src"));
    let first = first_entry(&archive[..]).expect("an entry").head;
    assert_eq!((first.kind, first.path.as_slice()), (Kind::Folder, &b"src/"[..]));
    let there = dir.path().join("there");
    fs::create_dir(&there).expect("a folder");
    unpack_as(&archive, "src", &there, false).expect("unpacked");
    same(&there.join("src"));
    unpack_as(&archive, "src", &there, true).expect("unpacked");
    same(&there);
    unpack_as(&archive, "src", &dir.path().join("new"), false).expect("unpacked");
    same(&dir.path().join("new"));
    // A second copy over the first one.
    unpack_as(&archive, "src", &there, false).expect("unpacked");
    same(&there.join("src"));
}

#[test]
fn a_file_goes_into_a_folder_or_takes_a_new_name() {
    let dir = tree();
    let archive = packed(&dir.path().join("src/file"), Some("file"));
    unpack_as(&archive, "file", &dir.path().join("renamed"), false).expect("unpacked");
    assert_eq!(fs::read(dir.path().join("renamed")).expect("the file"), b"content");
    unpack_as(&archive, "file", &dir.path().join("src/sub"), false).expect("unpacked");
    assert_eq!(fs::read(dir.path().join("src/sub/file")).expect("the file"), b"content");
    let refused =
        unpack_as(&archive, "file", &dir.path().join("missing/"), false).expect_err("no folder");
    assert!(format!("{refused:#}").contains("no such folder"), "{refused:#}");
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
    assert_eq!(names[..2], ["file", "sub/"]);
}

#[test]
fn every_truncation_is_an_error_that_leaves_nothing() {
    let dir = tree();
    let archive = packed(&dir.path().join("src"), Some("src"));
    let target = tempfile::tempdir().expect("a folder");
    // One of the two zero blocks at the end is enough.
    for cut in (0..archive.len() - 1024).step_by(101).chain([archive.len() - 1024]) {
        let result = unpack_as(&archive[..cut], "src", target.path(), false);
        assert!(result.is_err(), "cut at {cut}");
        assert!(fs::read_dir(target.path()).expect("it").next().is_none(), "cut at {cut}");
    }
}

#[test]
fn links_holes_and_bits() {
    let dir = tempfile::tempdir().expect("a folder");
    let top = dir.path().join("src");
    fs::create_dir(&top).expect("a folder");
    fs::write(top.join("a"), "tool").expect("a file");
    fs::set_permissions(top.join("a"), fs::Permissions::from_mode(0o6755)).expect("a mode");
    fs::hard_link(top.join("a"), top.join("b")).expect("a link");
    let sparse = fs::File::create(top.join("sparse")).expect("a file");
    sparse.set_len(64 << 20).expect("a length");
    let archive = packed(&top, Some("src"));
    assert!(archive.len() < 10_000, "{}", archive.len());
    unpack_as(&archive, "src", &dir.path().join("new"), false).expect("unpacked");
    let stat = |name: &str| fs::metadata(dir.path().join("new").join(name)).expect("the file");
    assert_eq!((stat("a").ino(), stat("a").mode() & 0o7777), (stat("b").ino(), 0o755));
    assert!(stat("sparse").len() == 64 << 20 && stat("sparse").blocks() < 1000);
}

#[test]
fn a_link_in_the_destination_is_replaced_and_a_conflict_changes_nothing() {
    let dir = tree();
    let archive = packed(&dir.path().join("src"), Some("src"));
    let (there, other) = (dir.path().join("there"), dir.path().join("other"));
    fs::create_dir_all(there.join("src")).expect("a folder");
    fs::create_dir(&other).expect("a folder");
    fs::write(other.join("kept"), "kept").expect("a file");
    symlink(other.join("kept"), there.join("src/file")).expect("a link");
    // The archive holds a folder where the target has a link to a folder: the link is neither
    // followed nor replaced.
    symlink(&other, there.join("src/sub")).expect("a link");
    let refused =
        format!("{:#}", unpack_as(&archive, "src", &there, false).expect_err("a conflict"));
    assert!(refused.contains("\"src/sub\"") && refused.contains("a symbolic link"), "{refused}");
    assert!(
        there.join("src/file").is_symlink(),
        "something was moved before the conflict was found"
    );
    fs::remove_file(there.join("src/sub")).expect("the link");
    unpack_as(&archive, "src", &there, false).expect("unpacked");
    same(&there.join("src"));
    assert_eq!(fs::read(other.join("kept")).expect("the file"), b"kept");
    // A folder is not replaced by a file.
    let archive = packed(&dir.path().join("src/file"), Some("sub"));
    unpack_as(&archive, "sub", &there.join("src"), false).expect_err("a conflict");
    same(&there.join("src"));
}

#[test]
fn two_copies_into_one_folder_do_not_mix() {
    let dir = tempfile::tempdir().expect("a folder");
    let there = dir.path().join("there");
    fs::create_dir(&there).expect("a folder");
    let archive = |content: u8| {
        let top = dir.path().join(content.to_string()).join("src");
        fs::create_dir_all(&top).expect("a folder");
        fs::write(top.join("x"), vec![content; 100_000]).expect("a file");
        fs::write(top.join(format!("only{content}")), "x").expect("a file");
        packed(&top, Some("src"))
    };
    let (one, two) = (archive(1), archive(2));
    /// A reader of bytes that calls a function in the middle.
    struct Meanwhile<'a, F: FnOnce()>(&'a [u8], Option<F>);
    impl<F: FnOnce()> Read for Meanwhile<'_, F> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            if self.0.len() < 50_000
                && let Some(act) = self.1.take()
            {
                act();
            }
            let some = into.len().min(10_000);
            self.0.read(&mut into[..some])
        }
    }
    let slow = Meanwhile(
        &one,
        Some(|| {
            assert!(!there.join("src").exists(), "something appeared before it was complete");
            unpack_as(&two, "src", &there, false).expect("unpacked");
            assert_eq!(fs::read(there.join("src/x")).expect("the file"), vec![2; 100_000]);
        }),
    );
    unpack(slow, Some(OsStr::new("src")), &there, false, false).expect("unpacked");
    let content = fs::read(there.join("src/x")).expect("the file");
    assert!(content == vec![1; 100_000], "the copies were mixed");
    let mut names: Vec<_> =
        fs::read_dir(there.join("src")).expect("it").map(|e| e.expect("it").file_name()).collect();
    names.sort();
    assert_eq!(names, ["only1", "only2", "x"]);
    assert_eq!(fs::read_dir(&there).expect("it").count(), 1);
}

#[test]
fn a_hostile_archive_stays_in_its_folder() {
    let dir = tempfile::tempdir().expect("a folder");
    let inside = dir.path().join("inside");
    fs::create_dir(&inside).expect("a folder");
    let entry =
        |builder: &mut Builder<Vec<u8>>, path: &str, kind: EntryType, link: Option<&str>| {
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
        let result = unpack_as(&bytes, "x", &inside, false);
        assert!(!dir.path().join("evil").exists() && !inside.join("evil").exists(), "{case:?}");
        assert!(result.is_err(), "{case:?}");
        assert!(fs::read_dir(&inside).expect("it").next().is_none(), "{case:?}");
    }
}

#[test]
fn dockers_rules() {
    use There::{File, Folder, Missing};
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
        assert_eq!(
            place(there, slash, folder, contents),
            expected,
            "{there:?} {slash} {folder} {contents}"
        );
    }
}
