use super::*;
use proptest::prelude::*;
use std::io::{Seek as _, Write as _};

const MIB: u64 = 1 << 20;

fn limits(floor_bytes: u64) -> Limits {
    Limits { share_bytes: 16 * MIB, quota_bytes: u64::MAX, floor_bytes }
}

#[test]
fn a_vm_within_its_share_grows_whatever_is_free_and_another_only_above_the_floor() {
    let limits = limits(100 * MIB);
    assert!(limits.allow(0, 16 * MIB, 0).is_ok());
    assert_eq!(limits.allow(0, 16 * MIB + 1, 0), Err(NoSpace::Shares));
    // 8 MiB over its share: needs the floor and 1 MiB.
    assert_eq!(limits.allow(23 * MIB, MIB, 102 * MIB - 1), Err(NoSpace::Shares));
    assert_eq!(limits.allow(23 * MIB, MIB, 102 * MIB), Ok(0));
    assert_eq!(limits.needs_free(24 * MIB), 101 * MIB);
    assert_eq!((limits.needs_free(16 * MIB), limits.needs_free(0)), (0, 0));
}

#[test]
fn no_vm_has_more_than_its_quota() {
    let limits = Limits { quota_bytes: 20 * MIB, ..limits(0) };
    assert_eq!(limits.allow(19 * MIB, MIB, u64::MAX), Ok(0));
    assert_eq!(limits.allow(19 * MIB, MIB + 1, u64::MAX), Err(NoSpace::Quota));
    let small = Limits { quota_bytes: MIB, ..limits };
    assert_eq!(small.allow(MIB, 1, u64::MAX), Err(NoSpace::Quota), "within its share");
}

proptest! {
    /// VMs that write in any order, with credit that they have not used yet: one within its share
    /// always grows, and the first one that waits is furthest over its share.
    #[test]
    fn shares_are_kept_and_the_one_furthest_over_waits_first(
        writes in proptest::collection::vec((0_usize..6, 1_u64..(2 * MIB)), 1..400),
        size in (150 * MIB)..(400 * MIB),
    ) {
        let mut used = [0_u64; 6];
        let mut waiting = [false; 6];
        let share = 16 * MIB;
        for (vm, new) in writes {
            if waiting[vm] {
                continue;
            }
            let free = size.saturating_sub(used.iter().sum());
            let unused: u64 = used.iter().map(|used| share.saturating_sub(*used)).sum();
            let limits = limits(unused + MIB);
            match limits.allow(used[vm], new, free) {
                Ok(_) => {
                    used[vm] += new;
                    let unused: u64 = used.iter().map(|used| share.saturating_sub(*used)).sum();
                    prop_assert!(size >= used.iter().sum::<u64>() + unused, "a share is lost");
                }
                Err(why) => {
                    prop_assert_eq!(why, NoSpace::Shares);
                    prop_assert!(used[vm] + new > share);
                    let further = used.iter().zip(&waiting).any(|(other, waits)| {
                        !waits && *other > used[vm] + new
                            && limits.allow(*other, new, free).is_ok()
                    });
                    prop_assert!(!further, "one that is further over may go on");
                    waiting[vm] = true;
                }
            }
        }
    }
}

#[test]
fn limits_are_read_anew_and_a_damaged_file_changes_nothing() {
    let mut file = tempfile::tempfile().unwrap();
    let layer = tempfile::tempfile().unwrap();
    let mut write = |bytes: &[u8]| {
        file.rewind().unwrap();
        file.write_all(bytes).unwrap();
        file.try_clone().unwrap()
    };
    let none = Limits { share_bytes: 0, quota_bytes: 0, floor_bytes: 0 };
    let mut room = Room::limited(write(&none.encode()));
    let check = |room: &mut Room, grows| room.check(0, layer.as_fd(), 4096, || grows);
    assert_eq!(check(&mut room, true), Err(NoSpace::Quota));
    assert_eq!(check(&mut room, false), Ok(()), "a write into blocks that it has");
    write(&[0; LIMITS_BYTES]);
    assert_eq!(check(&mut room, true), Err(NoSpace::Quota), "as before");
    write(&Limits { quota_bytes: 8192, share_bytes: 8192, ..none }.encode());
    assert_eq!(check(&mut room, true), Ok(()));
    // The first check allowed one further write. The file of the layer has nothing yet.
    write(&none.encode());
    assert_eq!(check(&mut room, true), Ok(()));
    assert_eq!(check(&mut room, true), Err(NoSpace::Quota));
    assert_eq!(Room::default().check(0, layer.as_fd(), u64::MAX, || true), Ok(()));
}

#[test]
fn what_a_file_has_and_what_is_free_are_bytes() {
    let file = tempfile::tempfile().unwrap();
    assert_eq!(allocated(file.as_fd()).unwrap(), 0);
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, MIB).unwrap();
    assert!((MIB..2 * MIB).contains(&allocated(file.as_fd()).unwrap()));
    let total = rustix::fs::fstatfs(&file).unwrap();
    let total = total.f_blocks * u64::try_from(total.f_bsize).unwrap();
    let free = free(file.as_fd()).unwrap();
    assert!(free > MIB && (total == 0 || free <= total), "{free} of {total}");
}
