//! Every step in a folder, and the failure of every kernel step.

use super::*;
use crate::network::NetworkError;
use dayfly_api::agent::{Failure, FailureCode, NetworkIdentity};
use rustix::io::Errno;
use std::fs;
use std::net::Ipv4Addr;
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
    fn set_network(
        &self,
        _: &Path,
        new: Option<&Settings>,
        clone: bool,
    ) -> Result<(), NetworkError> {
        let address = new.map(|new| new.address);
        self.call("set_network", format!("network {address:?} clone {clone}"))
            .map_err(NetworkError::Netlink)
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
        number: 0,
        network: None,
        answer_ms: None,
        cpus: None,
    }
}

fn network() -> NetworkIdentity {
    NetworkIdentity {
        mac: "02:df:0a:58:00:02".into(),
        address: Ipv4Addr::new(10, 88, 0, 2),
        gateway: Ipv4Addr::new(10, 88, 0, 1),
        gateway_mac: None,
        nameservers: vec![Ipv4Addr::new(10, 88, 0, 1), Ipv4Addr::new(9, 9, 9, 9)],
    }
}

const fn no_hooks() -> Result<(), String> {
    Ok(())
}

fn root() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for folder in ["etc", "run", "var/lib/dbus", "var/lib/systemd"] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    fs::write(root.path().join("etc/hostname"), "template\n").unwrap();
    fs::write(root.path().join("etc/hosts"), "127.0.0.1 localhost\n127.0.1.1 template\n").unwrap();
    fs::write(root.path().join("etc/machine-id"), format!("{}\n", "0".repeat(32))).unwrap();
    fs::set_permissions(root.path().join("etc/machine-id"), fs::Permissions::from_mode(0o440))
        .unwrap();
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
    assert!(take_on(&fake, root.path(), &identity("fly-1", 'a'), no_hooks).unwrap());
    let calls =
        ["reseed 64", "clock 1800000000123456789", "hostname fly-1", "network None clone false"];
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
    assert!(
        !take_on(&fake, root.path(), &identity("fly-1", 'a'), no_hooks).unwrap(),
        "the same machine as before"
    );
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
    std::os::unix::fs::symlink("/etc/machine-id", root.path().join("var/lib/dbus/machine-id"))
        .unwrap();
    take_on(&fake, root.path(), &identity("fly-2", 'b'), no_hooks).unwrap();
    assert_eq!(fs::read_to_string(&outside).unwrap(), "untouched");
    assert_eq!(text(&root, "etc/hostname"), "fly-2\n");
    assert!(
        fs::symlink_metadata(root.path().join("var/lib/dbus/machine-id")).unwrap().is_symlink()
    );
}

#[test]
fn what_is_no_regular_file_is_replaced_and_never_waited_for() {
    let (fake, root) = (Fake::default(), root());
    let at = |name: &str| root.path().join(name);
    for name in
        ["etc/hostname", "etc/hosts", "etc/machine-id", "run/dayfly/clone-id", "etc/resolv.conf"]
    {
        let _ = fs::remove_file(at(name));
        fs::create_dir_all(at(name).parent().unwrap()).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, at(name), rustix::fs::FileType::Fifo, mode, 0)
            .unwrap();
    }
    prepare(root.path());
    take_on(&fake, root.path(), &identity("fly-3", 'c'), no_hooks).unwrap();
    let id = format!("{}\n", "c".repeat(32));
    assert_eq!(
        (text(&root, "etc/hostname"), text(&root, "etc/machine-id")),
        ("fly-3\n".into(), id.clone())
    );
    assert_eq!(text(&root, "run/dayfly/clone-id"), id);
    assert!(text(&root, "etc/hosts").contains("fly-3"));
    // An endless device is not read as a list of hosts.
    fs::remove_file(at("etc/hosts")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", at("etc/hosts")).unwrap();
    take_on(&fake, root.path(), &identity("fly-4", 'd'), no_hooks).unwrap();
    assert!(text(&root, "etc/hosts").contains("fly-4"));
}

#[test]
fn each_kernel_step_that_fails_is_named() {
    for (fails, step) in [
        ("reseed", "entropy"),
        ("set_clock", "clock"),
        ("set_hostname", "hostname"),
        ("set_network", "network"),
    ] {
        let root = root();
        let fake = Fake { fails: Some(fails), ..Fake::default() };
        let error = take_on(&fake, root.path(), &identity("fly-3", 'c'), no_hooks).unwrap_err();
        let failure = Failure::from(&error);
        assert_eq!(failure.code, FailureCode::NotPermitted);
        assert!(failure.message.contains(&format!("identity: {step}: ")), "{}", failure.message);
        assert!(!root.path().join("run/dayfly/clone-id").exists(), "published before all was done");
    }
}

#[test]
fn each_file_step_that_fails_is_named() {
    // A file cannot replace a folder, not even as root.
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
        let error =
            take_on(&fake, root.path(), &identity("fly-4", 'd'), no_hooks).unwrap_err().to_string();
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
        Identity { entropy: "0".repeat(129), ..good.clone() },
        Identity { network: Some(NetworkIdentity { mac: "02".into(), ..network() }), ..good },
    ];
    for identity in bad {
        let (fake, root) = (Fake::default(), root());
        let error = take_on(&fake, root.path(), &identity, no_hooks).unwrap_err();
        assert_eq!(Failure::from(&error).code, FailureCode::Invalid, "{error}");
        assert!(fake.calls.lock().unwrap().is_empty());
        assert_eq!(text(&root, "etc/hostname"), "template\n");
    }
}

#[test]
fn a_prepared_file_and_the_file_exchange_places() {
    let (fake, root) = (Fake::default(), root());
    let inode = |name: &str| {
        std::os::unix::fs::MetadataExt::ino(&fs::metadata(root.path().join(name)).unwrap())
    };
    prepare(root.path());
    assert!(
        !root.path().join("var/lib/systemd/random-seed").exists(),
        "dropped before the snapshot"
    );
    let prepared = "var/lib/dayfly/spare/etc-hostname";
    let (file, other) = (inode("etc/hostname"), inode(prepared));
    for (name, digit) in
        [("a-much-longer-name", 'a'), ("b", 'b'), ("c", 'c'), ("name-of-the-next", 'd')]
    {
        prepare(root.path());
        take_on(&fake, root.path(), &identity(name, digit), no_hooks).unwrap();
        assert_eq!(text(&root, "etc/hostname"), format!("{name}\n"));
        assert_eq!(text(&root, "etc/hosts"), format!("127.0.0.1 localhost\n127.0.1.1 {name}\n"));
        let id = format!("{}\n", digit.to_string().repeat(32));
        assert_eq!(
            (text(&root, "etc/machine-id"), text(&root, "var/lib/dbus/machine-id")),
            (id.clone(), id)
        );
        let mut now = [inode("etc/hostname"), inode(prepared)];
        now.sort_unstable();
        assert_eq!(
            now,
            if file < other { [file, other] } else { [other, file] },
            "no file was made"
        );
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
        take_on(&fake, root.path(), &identity("fly", 'f'), no_hooks).unwrap();
        assert_eq!(text(&root, "etc/hostname"), "fly\n");
        assert_eq!(text(&root, "etc/hosts"), "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 fly\n");
        assert_eq!(text(&root, "etc/machine-id"), format!("{}\n", "f".repeat(32)));
        assert!(!root.path().join("var/lib/dbus/machine-id").exists());
        let mode = |name: &str| {
            fs::metadata(root.path().join(name)).unwrap().permissions().mode() & 0o7777
        };
        assert_eq!((mode("etc/machine-id"), mode("etc/hosts")), (0o444, 0o644));
        assert!(!root.path().join("var/lib/dayfly/spare/etc-hostname").exists());
    }
}

#[test]
fn a_prepared_file_that_does_not_fit_is_left_alone() {
    let prepared = |root: &tempfile::TempDir| root.path().join("var/lib/dayfly/spare/etc-hostname");
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    let hostile: [&dyn Fn(&tempfile::TempDir); 5] = [
        &|root| fs::hard_link(prepared(root), root.path().join("linked")).unwrap(),
        &|root| fs::set_permissions(prepared(root), fs::Permissions::from_mode(0o666)).unwrap(),
        &|root| {
            fs::remove_file(prepared(root)).unwrap();
            std::os::unix::fs::symlink(&victim, prepared(root)).unwrap();
        },
        &|root| {
            fs::remove_file(prepared(root)).unwrap();
            fs::create_dir(prepared(root)).unwrap();
        },
        &|root| fs::remove_dir_all(root.path().join("var/lib/dayfly")).unwrap(),
    ];
    for (n, spoil) in hostile.iter().enumerate() {
        let (fake, root) = (Fake::default(), root());
        fs::write(&victim, "untouched").unwrap();
        prepare(root.path());
        spoil(&root);
        take_on(&fake, root.path(), &identity("fly", 'a'), no_hooks).unwrap();
        assert_eq!(text(&root, "etc/hostname"), "fly\n", "{n}");
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        if root.path().join("linked").exists() {
            assert_eq!(text(&root, "linked"), "template\n", "a file with two names was changed");
        }
    }
}

#[test]
fn hooks_are_called_in_a_clone_of_a_machine_with_an_identity_until_they_do_not_fail() {
    let (fake, root) = (Fake::default(), root());
    let mut called = 0;
    let mut become_machine = |name: &str, digit: char, result: Result<(), String>| {
        take_on(&fake, root.path(), &identity(name, digit), || {
            called += 1;
            result
        })
    };
    assert!(become_machine("first", 'a', Err("never".into())).unwrap(), "a boot is no clone");
    assert!(!become_machine("first", 'a', Err("never".into())).unwrap(), "nor is a repetition");
    for _ in 0..2 {
        let error = become_machine("clone", 'b', Err("10-a: no".into())).unwrap_err();
        assert_eq!(error.to_string(), "identity: hooks: 10-a: no");
        assert_eq!(text(&root, "run/dayfly/clone-id"), format!("{}\n", "a".repeat(32)));
    }
    assert!(become_machine("clone", 'b', Ok(())).unwrap(), "it is another machine still");
    assert!(!become_machine("clone", 'b', Err("never".into())).unwrap());
    assert_eq!(called, 3);
    assert_eq!(text(&root, "run/dayfly/clone-id"), format!("{}\n", "b".repeat(32)));
}

#[test]
fn the_network_comes_before_the_hooks_and_knows_of_a_clone_until_all_is_done() {
    let (fake, root) = (Fake::default(), root());
    let last_call = || fake.calls.lock().unwrap().last().unwrap().clone();
    let with = |name: &str, digit| Identity { network: Some(network()), ..identity(name, digit) };
    take_on(&fake, root.path(), &with("first", 'a'), no_hooks).unwrap();
    assert_eq!(last_call(), "network Some(10.88.0.2) clone false");
    for result in [Err("10-a: no".to_owned()), Ok(())] {
        let hooks = || {
            assert_eq!(last_call(), "network Some(10.88.0.2) clone true");
            assert!(
                text(&root, "etc/resolv.conf")
                    .ends_with("nameserver 10.88.0.1\nnameserver 9.9.9.9\n")
            );
            result.clone()
        };
        assert_eq!(take_on(&fake, root.path(), &with("clone", 'b'), hooks).is_ok(), result.is_ok());
    }
    take_on(&fake, root.path(), &with("clone", 'b'), no_hooks).unwrap();
    assert_eq!(last_call(), "network Some(10.88.0.2) clone false");
}

#[test]
fn resolv_conf_is_written_if_no_program_owns_it() {
    let with = Identity { network: Some(network()), ..identity("fly", 'a') };
    let other = Identity {
        network: Some(NetworkIdentity {
            nameservers: vec![Ipv4Addr::new(1, 1, 1, 1)],
            ..network()
        }),
        ..identity("fly", 'a')
    };
    let link = |to: &'static str| move |path: &Path| std::os::unix::fs::symlink(to, path).unwrap();
    type Case<'a> = (&'a str, bool, &'a dyn Fn(&Path));
    let cases: [Case<'_>; 6] = [
        ("missing", true, &|_| {}),
        ("empty", true, &|path| fs::write(path, "").unwrap()),
        ("a link to nothing", true, &link("../run/nothing/resolv.conf")),
        ("a user's", false, &|path| fs::write(path, "nameserver 8.8.8.8\n").unwrap()),
        ("a link to a program's", false, &link("hosts")),
        ("a folder", false, &|path| fs::create_dir(path).unwrap()),
    ];
    for (name, written, make) in cases {
        let (fake, root) = (Fake::default(), root());
        let path = root.path().join("etc/resolv.conf");
        make(&path);
        let before = fs::read(&path).ok();
        take_on(&fake, root.path(), &identity("fly", 'a'), no_hooks).unwrap();
        let still = fs::symlink_metadata(&path).is_ok() == (name != "missing");
        assert!(still, "{name}: no network, no file");
        take_on(&fake, root.path(), &with, no_hooks).unwrap();
        if !written {
            let hosts = name.contains("link").then(|| text(&root, "etc/hosts").into_bytes());
            assert_eq!(fs::read(&path).ok(), hosts.or(before), "{name}");
            continue;
        }
        let ours = text(&root, "etc/resolv.conf");
        let lines = "\nsearch dayfly.internal\nnameserver 10.88.0.1\n";
        assert!(ours.starts_with("# dayfly") && ours.contains(lines), "{name}: {ours}");
        let stat = fs::symlink_metadata(&path).unwrap();
        assert!(stat.is_file() && stat.permissions().mode() & 0o7777 == 0o644, "{name}");
        // The agent owns the file from now on and updates it.
        take_on(&fake, root.path(), &other, no_hooks).unwrap();
        assert_eq!(text(&root, "etc/resolv.conf").matches("nameserver").count(), 1, "{name}");
        take_on(&fake, root.path(), &identity("fly", 'a'), no_hooks).unwrap();
        let ours = text(&root, "etc/resolv.conf");
        assert!(!ours.contains("nameserver") && !ours.contains("search"), "{name}: {ours}");
        fs::write(&path, "nameserver 8.8.8.8\n").unwrap();
        take_on(&fake, root.path(), &with, no_hooks).unwrap();
        assert_eq!(
            text(&root, "etc/resolv.conf"),
            "nameserver 8.8.8.8\n",
            "{name}: it was taken over"
        );
    }
}
