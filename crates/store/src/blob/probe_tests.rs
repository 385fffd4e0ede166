use super::*;
use crate::blob::fault;
use crate::fixture::{IMAGE, name, reopen, store};
use crate::{Store, StoreError};

#[test]
fn a_file_system_of_many_hosts_is_refused_by_its_name() {
    for (number, name) in [(0x6969, "NFS"), (0xfe53_4d42, "SMB"), (0xff53_4d42, "CIFS")] {
        assert_eq!(named(number), (name.to_owned(), true));
    }
    for number in [0xef53, 0x0102_1994, 0x5846_5342, 1] {
        assert!(!named(number).1, "{number:#x}");
    }
    let root = tempfile::tempdir().unwrap();
    let of_the_test = number(&Dir::root(root.path()).unwrap()).unwrap();
    assert!(KNOWN.iter().any(|(of, ..)| *of == of_the_test), "{of_the_test:#x}");
}

/// The steps of an open in order, with the errors of each.
fn open_failing_at(
    step: u32,
    errno: Errno,
) -> (Result<Store, StoreError>, bool, tempfile::TempDir) {
    let root = tempfile::tempdir().unwrap();
    drop(store(root.path()));
    let (opened, hit) =
        fault::with_errno_at(step, errno.raw_os_error(), || Store::open(root.path()));
    (opened, hit, root)
}

#[test]
fn what_a_file_system_lacks_is_named_when_the_store_opens() {
    let mut lacks = Vec::new();
    for step in 0.. {
        let (opened, hit, root) = open_failing_at(step, Errno::OPNOTSUPP);
        match opened {
            Err(StoreError::Unfit(error)) => {
                let text = error.to_string();
                assert!(text.contains("; choose a folder on ext4, xfs or btrfs"), "{text}");
                assert!(text.contains(", got ") && error.root == root.path(), "{text}");
                lacks.push(error.expected);
            }
            Err(StoreError::Io(_)) | Ok(_) => {}
            Err(other) => panic!("{other}"),
        }
        if !hit {
            break;
        }
    }
    lacks.dedup();
    let expected = [
        "has RENAME_NOREPLACE",
        "has RENAME_EXCHANGE",
        "has hard links",
        "reports holes (SEEK_HOLE)",
    ];
    assert_eq!(lacks, expected);
}

#[test]
fn a_full_disk_or_a_bad_entry_in_staging_keeps_no_store_closed() {
    let mut steps = 0;
    for errno in [Errno::NOSPC, Errno::IO] {
        for step in 0.. {
            let (opened, hit, _root) = open_failing_at(step, errno);
            match opened {
                Ok(store) => drop(store.image(&name(IMAGE)).unwrap()),
                // The folders and their names are needed.
                Err(StoreError::Io(e)) => {
                    assert!(["making folder", "syncing folder"].contains(&e.doing), "{e}");
                }
                Err(other) => panic!("{other}"),
            }
            steps += u32::from(hit);
            if !hit {
                break;
            }
        }
    }
    assert!(steps > 30, "only {steps} steps");
}

#[test]
fn a_staging_entry_that_cannot_be_removed_stays_until_it_can() {
    let root = tempfile::tempdir().unwrap();
    drop(store(root.path()));
    let staging = root.path().join("staging");
    std::fs::create_dir(staging.join("1-1")).unwrap();
    std::fs::create_dir(staging.join("2-2")).unwrap();
    let (opened, trace) = fault::with_trace(|| Store::open(root.path()).unwrap());
    drop(opened);
    assert!(!staging.join("1-1").exists() && !staging.join("2-2").exists());
    let removing = |(doing, path): &(&str, std::path::PathBuf)| {
        *doing == "removing" && path.parent() == Some(staging.as_path())
    };
    let step = u32::try_from(trace.iter().position(removing).unwrap()).unwrap();
    std::fs::create_dir(staging.join("1-1")).unwrap();
    std::fs::create_dir(staging.join("2-2")).unwrap();
    let (opened, _) =
        fault::with_errno_at(step, Errno::IO.raw_os_error(), || Store::open(root.path()));
    assert_eq!(opened.unwrap().staged().unwrap().len(), 1, "one could not be removed");
    assert!(reopen(root.path()).staged().unwrap().is_empty());
}
