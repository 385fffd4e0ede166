//! Every step against a folder, and every kernel step failed once.

use super::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Mutex;

#[derive(Default)]
struct Fake {
    calls: Mutex<Vec<String>>,
    fails: Option<&'static str>,
}

impl Fake {
    fn call(&self, name: &'static str, text: String) -> Result<(), Errno> {
        if self.fails == Some(name) {
            return Err(Errno::PERM);
        }
        self.calls.lock().unwrap().push(text);
        Ok(())
    }
}

impl Kernel for Fake {
    fn reseed(&self, bytes: &[u8]) -> Result<(), Errno> {
        self.call("reseed", format!("reseed {}", bytes.len()))
    }
    fn set_clock(&self, ns: u64) -> Result<(), Errno> {
        self.call("set_clock", format!("clock {ns}"))
    }
    fn set_hostname(&self, name: &str) -> Result<(), Errno> {
        self.call("set_hostname", format!("hostname {name}"))
    }
    fn end(&self, _: bool) {
        unreachable!("an identity does not end the machine")
    }
}

fn identity(name: &str, digit: char) -> Identity {
    Identity {
        hostname: name.into(),
        machine_id: digit.to_string().repeat(32),
        wall_clock_ns: 1_800_000_000_123_456_789,
        entropy: "5A".repeat(64),
    }
}

fn root() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for folder in ["etc", "run", "var/lib/dbus", "var/lib/systemd"] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    fs::write(root.path().join("etc/hostname"), "template\n").unwrap();
    fs::write(root.path().join("etc/hosts"), "127.0.0.1 localhost\n127.0.1.1 template\n").unwrap();
    fs::write(root.path().join("etc/machine-id"), format!("{}\n", "0".repeat(32))).unwrap();
    fs::set_permissions(root.path().join("etc/machine-id"), fs::Permissions::from_mode(0o440)).unwrap();
    fs::write(root.path().join("var/lib/dbus/machine-id"), "old").unwrap();
    fs::write(root.path().join("var/lib/systemd/random-seed"), "seed").unwrap();
    root
}

fn text(root: &tempfile::TempDir, name: &str) -> String {
    fs::read_to_string(root.path().join(name)).unwrap()
}

#[test]
fn every_step_is_done_and_can_be_repeated() {
    let (fake, root) = (Fake::default(), root());
    assert!(take_on(&fake, root.path(), &identity("fly-1", 'a')).unwrap());
    let calls = ["reseed 64", "clock 1800000000123456789", "hostname fly-1"];
    assert_eq!(*fake.calls.lock().unwrap(), calls);
    let id = format!("{}\n", "a".repeat(32));
    assert_eq!(text(&root, "etc/hostname"), "fly-1\n");
    assert_eq!(text(&root, "etc/hosts"), "127.0.0.1 localhost\n127.0.1.1 fly-1\n");
    assert_eq!(text(&root, "etc/machine-id"), id);
    assert_eq!(text(&root, "var/lib/dbus/machine-id"), id);
    assert_eq!(text(&root, "run/dayfly/clone-id"), id);
    assert!(!root.path().join("var/lib/systemd/random-seed").exists());
    let mode = fs::metadata(root.path().join("etc/machine-id")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o440, "the mode is kept");

    fs::write(root.path().join("var/lib/systemd/random-seed"), "mine").unwrap();
    assert!(!take_on(&fake, root.path(), &identity("fly-1", 'a')).unwrap(), "the same machine as before");
    assert!(root.path().join("var/lib/systemd/random-seed").exists(), "its own seed is not stale");
    let leftovers: Vec<_> = fs::read_dir(root.path().join("etc"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.starts_with('.'))
        .collect();
    assert!(leftovers.is_empty(), "{leftovers:?}");
}

#[test]
fn a_link_is_replaced_not_followed() {
    let (fake, root) = (Fake::default(), root());
    let outside = root.path().join("outside");
    fs::write(&outside, "untouched").unwrap();
    fs::remove_file(root.path().join("etc/hostname")).unwrap();
    std::os::unix::fs::symlink(&outside, root.path().join("etc/hostname")).unwrap();
    fs::remove_file(root.path().join("var/lib/dbus/machine-id")).unwrap();
    std::os::unix::fs::symlink("/etc/machine-id", root.path().join("var/lib/dbus/machine-id")).unwrap();
    take_on(&fake, root.path(), &identity("fly-2", 'b')).unwrap();
    assert_eq!(fs::read_to_string(&outside).unwrap(), "untouched");
    assert_eq!(text(&root, "etc/hostname"), "fly-2\n");
    assert!(fs::symlink_metadata(root.path().join("var/lib/dbus/machine-id")).unwrap().is_symlink());
}

#[test]
fn each_kernel_step_that_fails_is_named() {
    for (fails, step) in [("reseed", "entropy"), ("set_clock", "clock"), ("set_hostname", "hostname")] {
        let root = root();
        let fake = Fake { fails: Some(fails), ..Fake::default() };
        let error = take_on(&fake, root.path(), &identity("fly-3", 'c')).unwrap_err();
        let failure = Failure::from(&error);
        assert_eq!(failure.code, FailureCode::NotPermitted);
        assert!(failure.message.contains(&format!("identity: {step}: ")), "{}", failure.message);
        assert!(!root.path().join("run/dayfly/clone-id").exists(), "published before all was done");
    }
}

#[test]
fn each_file_step_that_fails_is_named() {
    // A folder in a file's place cannot be replaced by a file, not even by root.
    for (name, step) in [
        ("etc/hostname", "hostname file"),
        ("etc/hosts", "hosts file"),
        ("etc/machine-id", "machine id"),
        ("var/lib/systemd/random-seed", "stale state"),
        ("run/dayfly/clone-id", "publish"),
    ] {
        let (fake, root) = (Fake::default(), root());
        let _ = fs::remove_file(root.path().join(name));
        fs::create_dir_all(root.path().join(name)).unwrap();
        let error = take_on(&fake, root.path(), &identity("fly-4", 'd')).unwrap_err().to_string();
        assert!(error.starts_with(&format!("identity: {step}: ")), "{name}: {error}");
        assert!(error.contains(name.rsplit_once('/').unwrap().0), "{name}: {error}");
    }
}

#[test]
fn what_is_no_identity_changes_nothing() {
    let good = identity("fly-5", 'e');
    let bad = [
        Identity { hostname: String::new(), ..good.clone() },
        Identity { hostname: "a".repeat(65), ..good.clone() },
        Identity { hostname: "a b".into(), ..good.clone() },
        Identity { hostname: "a\nb".into(), ..good.clone() },
        Identity { hostname: "-a".into(), ..good.clone() },
        Identity { hostname: "a..b".into(), ..good.clone() },
        Identity { hostname: "../../etc/x".into(), ..good.clone() },
        Identity { machine_id: "e".repeat(31), ..good.clone() },
        Identity { machine_id: "E".repeat(32), ..good.clone() },
        Identity { machine_id: "0".repeat(32), ..good.clone() },
        Identity { entropy: "00".repeat(63), ..good.clone() },
        Identity { entropy: "00".repeat(4097), ..good.clone() },
        Identity { entropy: "0g".repeat(64), ..good.clone() },
        Identity { entropy: "0".repeat(129), ..good },
    ];
    for identity in bad {
        let (fake, root) = (Fake::default(), root());
        let error = take_on(&fake, root.path(), &identity).unwrap_err();
        assert_eq!(Failure::from(&error).code, FailureCode::Invalid, "{error}");
        assert!(fake.calls.lock().unwrap().is_empty());
        assert_eq!(text(&root, "etc/hostname"), "template\n");
    }
}

#[test]
fn a_spare_takes_the_files_place_and_the_file_the_spares() {
    let (fake, root) = (Fake::default(), root());
    let inode =
        |name: &str| std::os::unix::fs::MetadataExt::ino(&fs::metadata(root.path().join(name)).unwrap());
    prepare(root.path());
    assert!(!root.path().join("var/lib/systemd/random-seed").exists(), "dropped before the snapshot");
    let spare = "var/lib/dayfly/spare/etc-hostname";
    let (file, other) = (inode("etc/hostname"), inode(spare));
    for (name, digit) in [("a-much-longer-name", 'a'), ("b", 'b'), ("c", 'c'), ("name-of-the-next", 'd')] {
        prepare(root.path());
        take_on(&fake, root.path(), &identity(name, digit)).unwrap();
        assert_eq!(text(&root, "etc/hostname"), format!("{name}\n"));
        assert_eq!(text(&root, "etc/hosts"), format!("127.0.0.1 localhost\n127.0.1.1 {name}\n"));
        let id = format!("{}\n", digit.to_string().repeat(32));
        assert_eq!((text(&root, "etc/machine-id"), text(&root, "var/lib/dbus/machine-id")), (id.clone(), id));
        let mut now = [inode("etc/hostname"), inode(spare)];
        now.sort_unstable();
        assert_eq!(now, if file < other { [file, other] } else { [other, file] }, "no file was made");
    }
    let mode = fs::metadata(root.path().join("etc/machine-id")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o440, "the mode is kept");
}

#[test]
fn a_file_that_the_image_left_out_is_there_afterwards() {
    for prepared in [true, false] {
        let (fake, root) = (Fake::default(), root());
        for name in ["etc/hostname", "etc/hosts", "etc/machine-id", "var/lib/dbus/machine-id"] {
            fs::remove_file(root.path().join(name)).unwrap();
        }
        if prepared {
            prepare(root.path());
        }
        take_on(&fake, root.path(), &identity("fly", 'f')).unwrap();
        assert_eq!(text(&root, "etc/hostname"), "fly\n");
        assert_eq!(text(&root, "etc/hosts"), "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 fly\n");
        assert_eq!(text(&root, "etc/machine-id"), format!("{}\n", "f".repeat(32)));
        assert!(!root.path().join("var/lib/dbus/machine-id").exists());
        let mode = |name: &str| fs::metadata(root.path().join(name)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("etc/machine-id"), mode("etc/hosts")), (0o444, 0o644));
        assert!(!root.path().join("var/lib/dayfly/spare/etc-hostname").exists());
    }
}

#[test]
fn a_spare_that_does_not_fit_is_left_alone() {
    let spare = |root: &tempfile::TempDir| root.path().join("var/lib/dayfly/spare/etc-hostname");
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    let hostile: [&dyn Fn(&tempfile::TempDir); 5] = [
        &|root| fs::hard_link(spare(root), root.path().join("linked")).unwrap(),
        &|root| fs::set_permissions(spare(root), fs::Permissions::from_mode(0o666)).unwrap(),
        &|root| {
            fs::remove_file(spare(root)).unwrap();
            std::os::unix::fs::symlink(&victim, spare(root)).unwrap();
        },
        &|root| {
            fs::remove_file(spare(root)).unwrap();
            fs::create_dir(spare(root)).unwrap();
        },
        &|root| fs::remove_dir_all(root.path().join("var/lib/dayfly")).unwrap(),
    ];
    for (n, spoil) in hostile.iter().enumerate() {
        let (fake, root) = (Fake::default(), root());
        fs::write(&victim, "untouched").unwrap();
        prepare(root.path());
        spoil(&root);
        take_on(&fake, root.path(), &identity("fly", 'a')).unwrap();
        assert_eq!(text(&root, "etc/hostname"), "fly\n", "{n}");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        if root.path().join("linked").exists() {
            assert_eq!(text(&root, "linked"), "template\n", "a file with two names was changed");
        }
    }
}
