use super::*;

fn cache(most: u64) -> (tempfile::TempDir, BlobCache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = BlobCache::new(folder.path().join("registry"), Bytes(most));
    (folder, cache)
}

fn blob(bytes: &[u8]) -> Blob {
    Blob { digest: BlobDigest::of(bytes), size: bytes.len() as u64 }
}

fn mine(claim: Claim) -> Partial {
    match claim {
        Claim::Mine(partial) => partial,
        Claim::There => panic!("expected a partial file, got a blob"),
    }
}

fn stored(cache: &BlobCache, bytes: &[u8]) -> Blob {
    let blob = blob(bytes);
    let mut partial = mine(cache.claim(&blob).unwrap());
    partial.write(bytes).unwrap();
    assert_eq!(partial.digest(), blob.digest);
    partial.finish().unwrap();
    blob
}

#[test]
fn a_claim_goes_on_where_a_killed_process_stopped() {
    let (folder, cache) = cache(1 << 20);
    let blob = blob(b"0123456789");
    let mut partial = mine(cache.claim(&blob).unwrap());
    partial.write(b"0123").unwrap();
    // As after SIGKILL: the lock is free, the file stays.
    drop(partial);
    cache.sweep();
    let mut partial = mine(cache.claim(&blob).unwrap());
    assert_eq!(partial.have, 4);
    partial.write(b"456789").unwrap();
    assert_eq!(partial.digest(), blob.digest);
    partial.finish().unwrap();
    assert!(matches!(cache.claim(&blob).unwrap(), Claim::There));
    let target = folder.path().join("x");
    assert!(cache.link(&blob.digest, &target).unwrap());
    cache.forget(&blob.digest);
    assert_eq!(fs::read(&target).unwrap(), b"0123456789");
    assert!(!cache.link(&blob.digest, &folder.path().join("y")).unwrap());
}

#[test]
fn a_second_process_waits_and_then_has_the_blob() {
    let (_folder, cache) = cache(1 << 20);
    let wanted = blob(b"content");
    let mut partial = mine(cache.claim(&wanted).unwrap());
    std::thread::scope(|scope| {
        let second = scope.spawn(|| cache.claim(&wanted).unwrap());
        partial.write(b"content").unwrap();
        partial.finish().unwrap();
        assert!(matches!(second.join().unwrap(), Claim::There));
    });
    let wanted = blob(b"wrong");
    let partial = mine(cache.claim(&wanted).unwrap());
    std::thread::scope(|scope| {
        let second = scope.spawn(|| cache.claim(&wanted).unwrap());
        partial.discard();
        assert_eq!(mine(second.join().unwrap()).have, 0);
    });
}

#[test]
fn a_sweep_keeps_the_bound_and_what_was_used_last() {
    let (_folder, cache) = cache(25);
    let old = stored(&cache, &[1; 10]);
    let used = stored(&cache, &[2; 10]);
    let hours_ago = SystemTime::now() - Duration::from_secs(7200);
    for blob in [&old, &used] {
        File::open(cache.blob(&blob.digest)).unwrap().set_modified(hours_ago).unwrap();
    }
    assert!(matches!(cache.claim(&used).unwrap(), Claim::There));
    let new = stored(&cache, &[3; 10]);
    cache.sweep();
    let there = |blob: &Blob| cache.blob(&blob.digest).exists();
    assert!(!there(&old) && there(&used) && there(&new));
}

#[test]
fn a_partial_file_is_swept_after_a_day_or_if_there_is_no_room_unless_it_is_written() {
    let (_folder, cache) = cache(100);
    let path = |blob: &Blob| cache.partial(blob);
    let days_ago = SystemTime::now() - 2 * STALE;
    let (stale, locked, large) = (blob(&[1; 50]), blob(&[2; 50]), blob(&[3; 500]));
    for blob in [&stale, &locked] {
        mine(cache.claim(blob).unwrap()).write(b"x").unwrap();
        File::open(path(blob)).unwrap().set_modified(days_ago).unwrap();
    }
    let held = mine(cache.claim(&locked).unwrap());
    cache.sweep();
    assert!(!path(&stale).exists() && path(&locked).exists());
    drop(held);
    mine(cache.claim(&large).unwrap()).write(&[0; 200]).unwrap();
    cache.sweep();
    assert!(!path(&large).exists());
}

#[test]
fn a_damaged_blob_of_another_size_is_fetched_again() {
    let (_folder, cache) = cache(1 << 20);
    let blob = stored(&cache, b"content");
    fs::remove_file(cache.blob(&blob.digest)).unwrap();
    fs::write(cache.blob(&blob.digest), "cont").unwrap();
    assert_eq!(mine(cache.claim(&blob).unwrap()).have, 0);
}

#[test]
fn a_wrong_size_in_a_descriptor_is_refused_and_the_verified_blob_stays() {
    let (_folder, cache) = cache(1 << 20);
    let blob = stored(&cache, b"content");
    for size in [0, 3, 8, u64::MAX] {
        let wrong = Blob { digest: blob.digest.clone(), size };
        let error = cache.claim(&wrong).err().unwrap().to_string();
        assert!(error.contains(&format!("expected 7 bytes, as the verified blob has, got {size}")));
    }
    assert!(matches!(cache.claim(&blob).unwrap(), Claim::There));
}

#[test]
fn a_wrong_size_in_a_descriptor_leaves_the_partial_file_of_the_right_one() {
    let (_folder, cache) = cache(1 << 20);
    let blob = blob(b"0123456789");
    mine(cache.claim(&blob).unwrap()).write(b"0123").unwrap();
    for size in [0, 3, 11] {
        let wrong = Blob { digest: blob.digest.clone(), size };
        let partial = mine(cache.claim(&wrong).unwrap());
        assert_eq!(partial.have, 0);
        partial.discard();
    }
    assert_eq!(mine(cache.claim(&blob).unwrap()).have, 4);
}

#[test]
fn a_sweep_does_not_remove_a_new_file_in_the_place_of_the_one_that_it_locked() {
    let folder = tempfile::tempdir().unwrap();
    let (path, fresh) = (folder.path().join("partial"), folder.path().join("fresh"));
    fs::write(&path, "old").unwrap();
    let old = File::open(&path).unwrap();
    fs::write(&fresh, "new").unwrap();
    fs::rename(&fresh, &path).unwrap();
    assert!(!removed_if_locked(&old, &path));
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert!(removed_if_free(&path) && !path.exists());
}

#[test]
fn a_pull_leaves_a_gib_of_a_disk_or_a_32nd_of_a_small_one() {
    let gib = 1 << 30;
    assert_eq!(without_reserve(100 * gib, 200 * gib), 99 * gib);
    assert_eq!(without_reserve(4 * gib, 16 * gib), 4 * gib - gib / 2);
    assert_eq!(without_reserve(gib / 4, 16 * gib), 0);
}
