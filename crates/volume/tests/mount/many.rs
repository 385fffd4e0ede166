//! More files than the server has descriptors for.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

use crate::common::{As, Mounted, USER, eventually};
use crate::mounts::can;
use dayfly_volume::Options;
use std::fs::{self, File};
use std::path::Path;

/// Makes `folders` folders with `files` files each, whose content is their path.
fn fill(host: &Path, folders: usize, files: usize) {
    for folder in 0..folders {
        let path = host.join(format!("d{folder}"));
        fs::create_dir(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(USER), Some(USER)).unwrap();
        for file in 0..files {
            fs::write(path.join(file.to_string()), format!("{folder}/{file}")).unwrap();
        }
    }
}

/// Uses all files of [`fill`] as a large repository is used.
fn use_all(m: &Mounted, folders: usize, files: usize) {
    let path = |n: usize| m.at(&format!("d{}/{}", n / files, n % files));
    let all = folders * files;
    assert_eq!(m.sh("find . -type f -size -99 | wc -l").trim(), all.to_string());
    // Far from each other, so that what is used was not used for long.
    for n in (0..all).map(|n| n * 7919 % all).step_by(37) {
        let text = fs::read_to_string(path(n)).unwrap();
        assert_eq!(text, format!("{}/{}", n / files, n % files));
    }
    // A program that stays in its folder.
    assert_eq!(m.sh("cd d1; find .. -type f > /dev/null; cat 5; cat 6; ls | wc -l"), {
        format!("1/51/6{files}\n")
    });
    // Files whose names change while they are closed.
    fs::rename(m.at("d2"), m.at("moved")).unwrap();
    fs::rename(m.at("d3/1"), m.at("d3/one")).unwrap();
    m.sh("find . -type f > /dev/null");
    assert_eq!(fs::read_to_string(m.at("moved/3")).unwrap(), "2/3");
    assert_eq!(fs::read_to_string(m.at("d3/one")).unwrap(), "3/1");
    fs::rename(m.on_host("d4"), m.on_host("elsewhere")).unwrap();
    eventually("the host's names", || !m.at("d4").exists());
    assert_eq!(fs::read_to_string(m.at("elsewhere/1")).unwrap(), "4/1");
    let open = File::open(m.at("d1/1")).unwrap();
    fs::remove_file(m.at("d1/1")).unwrap();
    m.sh("find . -type f > /dev/null; rm -r moved elsewhere");
    assert_eq!(std::io::read_to_string(open).unwrap(), "1/1", "an open file");
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn a_hundred_thousand_files_need_few_descriptors() {
    if !can() {
        return;
    }
    let host = crate::common::folder_in_memory();
    let (folders, files) = (100, 1000);
    fill(host.path(), folders, files);
    let m = Mounted::of(host, As::Confined, &[]);
    use_all(&m, folders, files);
    let server = m.server.as_ref().unwrap();
    let descriptors = fs::read_dir(format!("/proc/{}/fd", server.id())).unwrap().count();
    assert!(descriptors as u64 <= crate::common::FEW, "{descriptors}");
}

#[test]
#[ignore = "long: a mount whose process is killed would block others of this host"]
fn a_guest_that_knows_more_files_than_the_server_sees_no_error() {
    if !can() {
        return;
    }
    let host = crate::common::folder();
    let (folders, files) = (30, 300);
    fill(host.path(), folders, files);
    let few = Options { max_nodes: 900, max_open_nodes: 100, max_handles: 60, ..Options::own() };
    use_all(&Mounted::with(host, few), folders, files);
}
