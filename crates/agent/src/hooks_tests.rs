use super::*;
use crate::exec::cage::Cages;
use dayfly_api::agent::NetworkIdentity;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes a program, in another process. A child that another test is about to execute has the
/// descriptors of this process; as long as it can write to the program, execve(2) fails (ETXTBSY).
fn put(path: &Path, text: &str, mode: u32) {
    let mut writer = Command::new("/bin/sh")
        .args(["-c", "cat >\"$0\""])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(writer.wait().unwrap().success());
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// The programs of a machine with these hooks.
fn machine(hooks: &[(&str, u32, &str)]) -> (tempfile::TempDir, Programs) {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join(FOLDER);
    fs::create_dir_all(&folder).unwrap();
    for (name, mode, script) in hooks {
        put(&folder.join(name), &format!("#!/bin/sh\n{script}\n"), *mode);
    }
    let programs =
        Programs::new(root.path().into(), Cages::open(&root.path().join("no-cgroups")), false);
    (root, programs)
}

fn identity(number: u32) -> Identity {
    Identity {
        hostname: "fly".into(),
        machine_id: "a".repeat(32),
        wall_clock_ns: 1,
        entropy: String::new(),
        number,
        network: None,
        answer_ms: None,
        cpus: None,
    }
}

#[test]
fn hooks_may_take_two_thirds_of_the_time_that_the_host_waits() {
    let (_root, programs) = machine(&[("10-slow", 0o755, "sleep 3600")]);
    let error = run(&programs, &Identity { answer_ms: Some(0), ..identity(0) }).unwrap_err();
    assert!(error.ends_with("10-slow: all hooks took longer than 666.7ms"), "{error}");
    for (answer_ms, seconds) in [(None, 20), (Some(120_000), 80)] {
        let identity = Identity { answer_ms, ..identity(0) };
        assert_eq!(limit(&identity), Duration::from_secs(seconds));
    }
}

#[test]
fn hooks_run_by_name_and_know_the_identity() {
    let output = tempfile::NamedTempFile::new().unwrap();
    let script = |name: &str| {
        format!(
            "echo {name} $DAYFLY_CLONE_ID $DAYFLY_CLONE_NUMBER $DAYFLY_HOSTNAME \
             ${{DAYFLY_ADDRESS-none}} $PWD >>{}",
            output.path().display()
        )
    };
    let (second, first, never) = (script("second"), script("first"), script("never"));
    let hooks = [
        ("20-b", 0o755, second.as_str()),
        ("10-a", 0o700, first.as_str()),
        (".hidden", 0o755, never.as_str()),
        ("30-old~", 0o755, never.as_str()),
    ];
    let (root, programs) = machine(&hooks);
    fs::create_dir(root.path().join(FOLDER).join("folder")).unwrap();
    run(&programs, &identity(7)).unwrap();
    let id = "a".repeat(32);
    let expected = format!("first {id} 7 fly none /\nsecond {id} 7 fly none /\n");
    assert_eq!(fs::read_to_string(output.path()).unwrap(), expected);

    fs::write(output.path(), "").unwrap();
    let network = NetworkIdentity {
        mac: "02:df:0a:58:00:02".into(),
        address: "10.88.0.2".parse().unwrap(),
        gateway: "10.88.0.1".parse().unwrap(),
        gateway_mac: None,
        nameservers: Vec::new(),
    };
    run(&programs, &Identity { network: Some(network), ..identity(7) }).unwrap();
    assert_eq!(fs::read_to_string(output.path()).unwrap(), expected.replace("none", "10.88.0.2"));
}

#[test]
fn a_hook_that_fails_is_named_and_ends_them() {
    let never = "exit 9";
    for (script, why) in [
        ("exit 3", "10-a: expected exit code 0, got 3"),
        ("kill -9 $$", "10-a: ended by signal 9"),
        ("exit 3 # 2", "got 3"),
    ] {
        let (_root, programs) = machine(&[("10-a", 0o755, script), ("20-b", 0o755, never)]);
        let error = run(&programs, &identity(0)).unwrap_err();
        assert!(error.ends_with(why), "{error}");
    }
    let (root, programs) = machine(&[]);
    let hook = root.path().join(FOLDER).join("hook");
    put(&hook, "\u{7f}ELF", 0o755);
    let error = run(&programs, &identity(0)).unwrap_err();
    assert!(error.contains("hook"), "{error}");
    let many: Vec<String> = (0..=MOST).map(|n| n.to_string()).collect();
    let many: Vec<_> = many.iter().map(|name| (name.as_str(), 0o755, "exit 0")).collect();
    let (_root, programs) = machine(&many);
    assert!(run(&programs, &identity(0)).unwrap_err().contains("expected at most 64 hooks"));
}

#[test]
fn no_folder_is_no_hooks() {
    let (root, programs) = machine(&[]);
    run(&programs, &identity(0)).unwrap();
    fs::remove_dir_all(root.path().join("etc")).unwrap();
    run(&programs, &identity(0)).unwrap();
}
