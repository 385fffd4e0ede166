use super::*;
use crate::fixture;

const MIB: u64 = 1 << 20;

/// The space of folders below `folder`, and its file of limits.
fn space(folder: &Path, disk: DiskSpace) -> (Arc<Space>, PathBuf) {
    let config = Config { disk, ..fixture::config(folder) };
    for path in [&config.state, &config.run] {
        std::fs::create_dir_all(path).unwrap();
    }
    let space = Arc::new(Space::new(&config));
    space.publish(&config.limits()).unwrap();
    (space, config.limits())
}

fn disk(share: u64, reserve: u64) -> DiskSpace {
    DiskSpace {
        share_bytes: Some(share),
        quota_bytes: None,
        reserve_bytes: Some(reserve),
        run_reserve_bytes: 0,
    }
}

#[test]
fn each_share_raises_the_floor_that_vmms_read_and_a_survey_lowers_it() {
    let folder = tempfile::tempdir().unwrap();
    let (space, file) = space(folder.path(), disk(16 * MIB, 4 * MIB));
    let floor = |expected: u64| {
        assert_eq!(space.limits().floor_bytes, expected);
        assert_eq!(std::fs::read(&file).unwrap(), space.limits().encode());
    };
    floor(2 * MIB);
    let shares = [space.share().unwrap(), space.adopt()];
    floor(34 * MIB);
    // One VM is over its share, one has used a quarter of it.
    space.begin_survey();
    space.end_survey(&[20 * MIB, 4 * MIB]);
    floor(14 * MIB);
    // A VM that comes during a survey has its share, seen or not.
    space.begin_survey();
    let third = space.share().unwrap();
    space.end_survey(&[20 * MIB, 4 * MIB]);
    floor(30 * MIB);
    drop((shares, third));
    space.begin_survey();
    space.end_survey(&[]);
    floor(2 * MIB);
    // A next daemon writes the same file, which VMMs have open.
    std::fs::write(&file, "other").unwrap();
    space.publish(&file).unwrap();
}

#[test]
fn a_request_that_would_take_the_shares_or_the_reserve_is_refused_with_figures() {
    let folder = tempfile::tempdir().unwrap();
    // Other tests write to this file system and remove files meanwhile, so nothing is exact.
    let free = FileSystem::of(folder.path()).unwrap().free_bytes;
    let of_one = free / 4 * 3;
    let (space, _) = self::space(folder.path(), disk(of_one, MIB));
    space.check("a bake", free / 4).unwrap();
    space.check_shares(1).unwrap();
    let share = space.share().unwrap();
    let refused = space.share().unwrap_err();
    assert_eq!((refused.vms, refused.needs, refused.kept), (1, of_one, of_one));
    let text = refused.to_string();
    for piece in ["a VM's guaranteed share", "store gc", "dayfly rm", "--disk-share", "of 1 VMs"] {
        assert!(text.contains(piece), "{piece}: {text}");
    }
    assert!(text.contains(&*folder.path().to_string_lossy()), "{text}");
    let error = ApiError::from(refused);
    assert_eq!(error.0.code, ErrorCode::Exhausted);
    assert!(space.check("a bake", free).is_err() && space.check_shares(2).is_err());
    drop(share);
    space.begin_survey();
    space.end_survey(&[]);
    space.check_shares(1).unwrap();

    let (space, _) = self::space(folder.path(), disk(0, u64::MAX));
    assert!(space.check("an upload", 0).is_err() && space.check_running("an upload").is_err());
    let run = DiskSpace { run_reserve_bytes: u64::MAX, ..disk(0, 0) };
    let refused = self::space(folder.path(), run).0.share().unwrap_err();
    assert_eq!(refused.path, fixture::config(folder.path()).run);
}

#[test]
fn a_vm_that_waits_tries_again_when_it_would_not_wait_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (space, _) =
        space(folder.path(), DiskSpace { quota_bytes: Some(64 * MIB), ..disk(MIB, 0) });
    let of = |free_bytes| FileSystem { size_bytes: 256 * MIB, free_bytes };
    // The margin is 1 MiB. A VM of 17 MiB is 16 over its share, and needs 2 free.
    assert!(!space.may_retry(NoSpace::Shares, 17 * MIB, of(3 * MIB - 1)));
    assert!(space.may_retry(NoSpace::Shares, 17 * MIB, of(3 * MIB)));
    assert!(!space.may_retry(NoSpace::Full, MIB, of(MIB - 1)));
    assert!(space.may_retry(NoSpace::Full, MIB, of(MIB)));
    assert!(!space.may_retry(NoSpace::Quota, 64 * MIB, of(u64::MAX)));
    assert!(space.may_retry(NoSpace::Quota, 63 * MIB, of(0)));
    assert!(space.explain(NoSpace::Quota).contains("--disk-quota"));
    assert!(!space.is_ample(of(256 * MIB), MIB), "a quota is not seen in the free space");
}

#[test]
fn vms_are_looked_at_one_by_one_only_when_one_may_come_near_its_limit() {
    let folder = tempfile::tempdir().unwrap();
    let (space, _) = space(folder.path(), disk(MIB, 2 * MIB));
    let of = |free_bytes| FileSystem { size_bytes: 801 * MIB, free_bytes };
    let _share = space.share().unwrap();
    // Reserve, share, an eighth of the rest of the file system, the largest request.
    let enough = (2 + 1 + 100 + 10) * MIB;
    assert!(space.is_ample(of(enough), 10 * MIB) && !space.is_ample(of(enough - 1), 10 * MIB));
}
