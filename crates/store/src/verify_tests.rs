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
    verifier.check(&path, &file, &content, Kind::Sparse).unwrap();
    assert!(known(&verifier));
    // To see that it is not read again: damage that leaves no trace in the stamp cannot be made, so look at the other side:
    // a stamp that is remembered with a digest passes without a look at the content.
    verifier.remember(&path, &file, Digest([9; 32]));
    verifier.check(&path, &file, &FileRef { digest: Digest([9; 32]), ..content }, Kind::Sparse).unwrap();
    verifier.forget(folder.path());
    assert!(!known(&verifier));
    verifier.check(&path, &file, &content, Kind::Sparse).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
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

#[test]
fn a_wrong_size_is_told_before_anything_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file, content) = sample(folder.path());
    file.set_len(9_999).unwrap();
    match Verifier::default().check(&path, &file, &content, Kind::Plain) {
        Err(VerifyError::Damage(Damage::Content { place, expected, got, .. })) => {
            assert_eq!((place.as_str(), expected.as_str(), got.as_str()), ("size in bytes", "10000", "9999"));
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
