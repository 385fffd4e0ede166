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
    verifier.trust(&path, &file, other.digest);
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
    while !Stamp::of(file).unwrap().is_settled() {
        std::thread::yield_now();
    }
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
fn a_name_may_go_while_a_file_is_hashed_and_a_write_may_not() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file, content) = sample(folder.path());
    let verifier = Verifier::default();
    let known = || {
        let known = *lock(&verifier.slot(&path));
        known.is_some_and(|(stamp, _)| stamp == Stamp::of(&file).unwrap())
    };
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
    let hashed = || Hashed::of(file.try_clone().unwrap(), Kind::Sparse, &mut |_, _| Ok(()));
    assert_eq!(hashed().unwrap().content, content);

    let write = |file: &File| {
        let file = file.try_clone().unwrap();
        move || file.write_all_at(&[3], 5000).unwrap()
    };
    settle(&file);
    after_reading::once(write(&file));
    hashed().unwrap_err();
    settle(&file);
    verifier.forget(folder.path());
    after_reading::once(write(&file));
    let error = verifier.check(&path, &file, &content, Kind::Sparse).unwrap_err();
    assert!(error.to_string().contains("modification time"), "{error}");
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
