use crate::fixture::store;
use crate::{Store, StoreError};

#[test]
fn a_store_without_its_lock_file_is_locked() {
    let root = tempfile::tempdir().unwrap();
    let first = store(root.path());
    for _ in 0..2 {
        std::fs::remove_file(root.path().join("lock")).unwrap();
        let error = Store::open(root.path()).unwrap_err();
        assert!(
            matches!(&error, StoreError::Locked { holder, .. } if holder == "unknown"),
            "{error}"
        );
    }
    drop(first);
    let second = Store::open(root.path()).unwrap();
    let holder = std::fs::read_to_string(root.path().join("lock")).unwrap();
    assert_eq!(holder.trim(), std::process::id().to_string());
    drop(second);
}

/// A daemon of an earlier version, which does not lock the folder.
#[test]
fn a_store_of_which_only_the_file_is_locked_is_locked() {
    let root = tempfile::tempdir().unwrap();
    drop(store(root.path()));
    let file = std::fs::File::open(root.path().join("lock")).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    assert!(matches!(Store::open(root.path()), Err(StoreError::Locked { .. })));
    drop(file);
    Store::open(root.path()).unwrap();
}
