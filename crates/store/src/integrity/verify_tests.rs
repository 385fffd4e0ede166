use super::*;
use std::os::unix::fs::FileExt;

fn sample(folder: &Path) -> (PathBuf, File, FileRef) {
    let path = folder.join("file");
    std::fs::write(&path, vec![3; 10_000]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let content = digest(&file, Kind::Sparse).unwrap();
    (path, file, content)
}

#[test]
fn a_file_is_hashed_once_until_it_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file, content) = sample(folder.path());
    let verifier = Verifier::default();
    let known = |v: &Verifier| v.slot(&path).lock().unwrap().is_some();
    settle(&file);
    verifier.check(&path, &file, &content, Kind::Sparse).unwrap();
    assert!(known(&verifier));
    // Damage that keeps the stamp cannot be made here. So test the reverse: a file with a recorded
    // stamp and digest passes although its content differs.
    let other = FileRef { digest: Digest([9; 32]), ..content };
    let hashed = Hashed::written(file.try_clone().unwrap(), other).unwrap();
    verifier.remember(&[(path.clone(), &hashed)]);
    verifier.check(&path, &file, &other, Kind::Sparse).unwrap();
    verifier.forget(folder.path());
    assert!(!known(&verifier));
    verifier.check(&path, &file, &content, Kind::Sparse).unwrap();
    file.write_all_at(&[4], 5000).unwrap();
    match verifier.check(&path, &file, &content, Kind::Sparse) {
        Err(VerifyError::Damage(Damage::Content { file, place, expected, .. })) => {
            assert_eq!((file, place.as_str()), (path.clone(), "digest of the content"));
            assert_eq!(expected, content.digest.to_string());
        }
        other => panic!("{other:?}"),
    }
    assert!(!known(&verifier));
}

/// Waits until the kernel's clock has moved on since the file's last change.
fn settle(file: &File) {
    std::thread::sleep(Stamp::of(file).unwrap().racy());
}

#[test]
fn a_file_that_changed_just_now_is_hashed_again() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file, content) = sample(folder.path());
    let verifier = Verifier::default();
    let known = || verifier.slot(&path).lock().unwrap().is_some();
    // Each change makes the file as it was; the times are those of the change. A busy host may
    // pause this thread for longer than two ticks, so one of many must suffice.
    let mut fresh = 0;
    for _ in 0..100 {
        file.write_all_at(&[3], 5000).unwrap();
        verifier.check(&path, &file, &content, Kind::Sparse).unwrap();
        fresh += usize::from(!known());
    }
    assert!(fresh > 0, "a file that may change within the same tick was trusted");
    settle(&file);
    verifier.check(&path, &file, &content, Kind::Sparse).unwrap();
    assert!(known());
}

#[test]
fn a_file_that_changed_since_it_was_hashed_is_not_remembered() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file, _) = sample(folder.path());
    let verifier = Verifier::default();
    let known = || verifier.slot(&path).lock().unwrap().is_some();
    let hashed = Hashed::of(file.try_clone().unwrap(), Kind::Plain).unwrap();
    // Names and modes may change until a file is published.
    std::fs::hard_link(&path, folder.path().join("name")).unwrap();
    verifier.remember(&[(path.clone(), &hashed)]);
    assert!(known());
    settle(&file);
    file.write_all_at(&[4], 5000).unwrap();
    verifier.remember(&[(path.clone(), &hashed)]);
    assert!(!known(), "the digest is that of the content before");
}

#[test]
fn a_name_may_go_while_a_file_is_hashed_and_a_write_may_not() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file, content) = sample(folder.path());
    let verifier = Verifier::default();
    let known = || verifier.knows(&path, &Stamp::of(&file).unwrap());
    let second = folder.path().join("second");
    std::fs::hard_link(&path, &second).unwrap();
    settle(&file);
    let gone = second.clone();
    after_reading::once(move || std::fs::remove_file(gone).unwrap());
    verifier.check(&path, &file, &content, Kind::Sparse).unwrap();
    assert!(known() && !second.exists());

    std::fs::hard_link(&path, &second).unwrap();
    let gone = second.clone();
    after_reading::once(move || std::fs::remove_file(gone).unwrap());
    assert_eq!(Hashed::of(file.try_clone().unwrap(), Kind::Sparse).unwrap().content, content);

    let write = |file: &File| {
        let file = file.try_clone().unwrap();
        move || file.write_all_at(&[3], 5000).unwrap()
    };
    settle(&file);
    after_reading::once(write(&file));
    Hashed::of(file.try_clone().unwrap(), Kind::Sparse).unwrap_err();
    settle(&file);
    verifier.forget(folder.path());
    after_reading::once(write(&file));
    let error = verifier.check(&path, &file, &content, Kind::Sparse).unwrap_err();
    assert!(error.to_string().contains("modification time"), "{error}");
    assert!(!known());
}

#[test]
fn trust_outlives_a_second_name_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file, content) = sample(folder.path());
    let (verifier, second) = (Verifier::default(), folder.path().join("second"));
    let known = || verifier.knows(&path, &Stamp::of(&file).unwrap());
    let trusted = || {
        std::fs::hard_link(&path, &second).unwrap();
        settle(&file);
        verifier.check(&path, &file, &content, Kind::Sparse).unwrap();
        assert!(known());
    };
    let around = |change: &dyn Fn()| {
        let before = Stamp::of(&file).unwrap();
        change();
        verifier.unlinked(before, Stamp::of(&file).unwrap());
    };
    let unlink = || std::fs::remove_file(&second).unwrap();
    trusted();
    around(&unlink);
    assert!(known(), "it is hashed again");
    trusted();
    around(&|| {
        unlink();
        file.write_all_at(&[3], 5000).unwrap();
    });
    assert!(!known(), "a write is not a removed name");
    // Something changed the file before.
    trusted();
    file.write_all_at(&[3], 5000).unwrap();
    around(&unlink);
    assert!(!known());
}

#[test]
fn a_wrong_size_is_reported_before_anything_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file, content) = sample(folder.path());
    file.set_len(9_999).unwrap();
    match Verifier::default().check(&path, &file, &content, Kind::Plain) {
        Err(VerifyError::Damage(Damage::Content { place, expected, got, .. })) => {
            assert_eq!(
                (place.as_str(), expected.as_str(), got.as_str()),
                ("size in bytes", "10000", "9999")
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_file_stands_at_its_start_after_hashing() {
    let folder = tempfile::tempdir().unwrap();
    let (_, file, _) = sample(folder.path());
    for kind in [Kind::Sparse, Kind::Plain] {
        digest(&file, kind).unwrap();
        assert_eq!((&file).stream_position().unwrap(), 0);
    }
}
