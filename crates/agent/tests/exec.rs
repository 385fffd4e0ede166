//! Programs over a unix socket, in every variant.

mod common;

use common::{Client, Guest, alive, argv, eventually, sh, started};
use dayfly_api::agent::{ExecSpec, FailureCode, FrameKind, Reply, Request};
use std::time::{Duration, Instant};

/// Pseudo-random bytes, so that a lost or doubled piece shows.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

fn refused(guest: &Guest, spec: ExecSpec) -> (FailureCode, String) {
    match guest.ask(&Request::Exec(Box::new(spec))) {
        Reply::Err(failure) => (failure.code, failure.message),
        other => panic!("{other:?}"),
    }
}

#[test]
fn streams_are_separate_and_the_exit_code_comes_last() {
    let out = Guest::start().sh("echo out; echo err >&2; exit 3");
    assert_eq!((out.text().as_str(), out.stderr.as_slice()), ("out\n", b"err\n".as_slice()));
    assert_eq!((out.exit.code, out.exit.signal, out.exit.timed_out), (Some(3), None, false));
}

#[test]
fn a_signal_is_not_an_exit_code() {
    let out = Guest::start().sh("kill -TERM $$");
    assert_eq!((out.exit.code, out.exit.signal), (None, Some(libc::SIGTERM)));
}

#[test]
fn a_program_starts_clean() {
    let guest = Guest::start();
    // SAFETY: duplicates standard input to 200 or above without close-on-exec; the descriptor stays
    // open until this process ends.
    assert!(unsafe { libc::fcntl(0, libc::F_DUPFD, 200) } >= 200);
    let out = guest.sh(
        "grep -E '^Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd; umask; cat /proc/self/stat",
    );
    let text = out.text();
    assert!(text.contains("SigBlk:\t0000000000000000\n"), "{text}");
    let ignored = text.split("SigIgn:\t").nth(1).unwrap().split('\n').next().unwrap();
    // The parent of the tests may ignore signals too; only SIGPIPE is ignored by the agent.
    assert_eq!(u64::from_str_radix(ignored, 16).unwrap() & (1 << (libc::SIGPIPE - 1)), 0, "{text}");
    // Three streams, and the folder that ls opens.
    assert!(text.contains("\n0\n1\n2\n3\n0022\n"), "{text}");
    let fields: Vec<&str> = text.rsplit(") ").next().unwrap().split(' ').collect();
    let (group, session) = (fields[2], fields[3]);
    assert_eq!((group, session), (out.pid.to_string().as_str(), out.pid.to_string().as_str()));
    // SCHED_OTHER, though the agent's own threads are SCHED_BATCH (3): field 41 of
    // proc_pid_stat(5).
    assert_eq!(fields[41 - 3], "0", "{text}");
}

#[test]
fn the_reply_that_a_program_runs_comes_with_its_first_output_or_soon() {
    let guest = Guest::start();
    let reported = |script: &str| {
        let mut client = guest.connect();
        let begun = Instant::now();
        let pid = started(&mut client, sh(script));
        (begun.elapsed(), client, pid)
    };
    let folder = tempfile::tempdir().unwrap();
    let waits = folder.path().join("waits");
    std::fs::write(&waits, "").unwrap();
    let waiting = format!("while [ -e {} ]; do sleep 0.01; done", waits.display());
    let (after, mut client, pid) = reported(&format!("sleep 0.05; echo here; {waiting}"));
    assert!(after >= Duration::from_millis(50), "reported {after:?} after the start, alone");
    // Its output does not wait for its end.
    assert_eq!(client.frame(), Some((FrameKind::Stdout, b"here\n".to_vec())));
    std::fs::remove_file(&waits).unwrap();
    let out = client.output(pid);
    assert_eq!((out.text().as_str(), out.exit.code), ("", Some(0)));
    let (_, _client, pid) = reported("sleep 1000");
    assert!(alive(pid), "a silent program is reported before its end");
}

#[test]
fn input_ends_and_dev_null_is_the_default() {
    let guest = Guest::start();
    let spec = ExecSpec { stdin: true, ..sh("cat; echo end") };
    assert_eq!(guest.exec(spec, b"a line\n").text(), "a line\nend\n");
    assert_eq!(guest.sh("cat; readlink /proc/$$/fd/0").text(), "/dev/null\n");
}

#[test]
fn sixty_four_mib_both_ways_arrive_whole() {
    let guest = Guest::start();
    let data = noise(64 << 20);
    let out = guest.exec(ExecSpec { stdin: true, ..argv(&["cat"]) }, &data);
    assert!(out.stdout == data, "{} of {} bytes, or others", out.stdout.len(), data.len());
    let out = guest.exec(ExecSpec { stdin: true, ..sh("cat >&2") }, &data);
    assert!(out.stderr == data, "{} of {} bytes, or others", out.stderr.len(), data.len());
}

#[test]
fn output_written_just_before_the_end_is_not_lost_to_a_slow_client() {
    let guest = Guest::start();
    let mut client = guest.connect();
    let pid = started(&mut client, sh("head -c 3000000 /dev/zero; echo last; echo lasterr >&2"));
    std::thread::sleep(Duration::from_millis(500));
    let out = client.output(pid);
    assert_eq!(out.stdout.len(), 3_000_005);
    assert!(out.stdout.ends_with(b"last\n") && out.stderr == b"lasterr\n");
}

#[test]
fn a_background_child_that_holds_the_streams_does_not_hold_the_answer() {
    let guest = Guest::start();
    let out = guest.sh("sleep 1000 & echo $!");
    let child: u32 = out.text().trim().parse().unwrap();
    assert!(alive(child), "a program's end does not end what it left behind");
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(child.try_into().unwrap()).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    // The output of a remaining process that writes endlessly is cut off too.
    let out = guest
        .sh("(trap '' PIPE; while :; do echo x || exit; done) & head -c 200000 /dev/zero; exit 4");
    assert_eq!(out.exit.code, Some(4));
    assert!(out.stdout.iter().filter(|b| **b == 0).count() == 200_000);
}

#[test]
fn what_a_program_left_in_its_streams_is_owed_to_a_slow_client() {
    let guest = Guest::start();
    // Sizes around the combined capacity of socket and agent. In some cases the program has ended
    // long before the client reads, with its last output still in the pipe. The pipe does not reach
    // its end, because `sleep` holds it.
    for size in (200_000..400_000).step_by(25_000) {
        let mut client = guest.connect();
        let spec = sh(&format!("sleep 5 & head -c {size} /dev/zero; echo last"));
        let pid = started(&mut client, spec);
        std::thread::sleep(Duration::from_millis(200));
        let out = client.output(pid);
        assert_eq!((out.stdout.len(), out.stdout.ends_with(b"last\n")), (size + 5, true));
    }
}

#[test]
fn input_that_no_program_reads_is_dropped() {
    let out = Guest::start()
        .exec(ExecSpec { stdin: true, ..sh("exec 0<&-; sleep 0.2; echo done") }, &noise(4 << 20));
    assert_eq!((out.text().as_str(), out.exit.code), ("done\n", Some(0)));
}

#[test]
fn signals_reach_the_group() {
    let guest = Guest::start();
    let mut client = guest.connect();
    // `sh` answers only after its child has ended by the same signal. Nothing is forked
    // meanwhile, because a signal between fork and exec is a different case.
    let pid = started(
        &mut client,
        sh("sleep 1000 & trap 'wait; echo caught; exit 7' TERM; echo up; wait; echo no"),
    );
    assert_eq!(client.frame(), Some((FrameKind::Stdout, b"up\n".to_vec())));
    client.send(FrameKind::Signal, &libc::SIGTERM.to_le_bytes());
    let out = client.output(pid);
    assert_eq!((out.text().as_str(), out.exit.code), ("caught\n", Some(7)));
}

#[test]
fn time_runs_out_for_everything_that_was_started() {
    let guest = Guest::start();
    let script = "sleep 1000 & echo $!; setsid sleep 1000 & echo $!; (sleep 1000 & echo $!; wait) \
                  & sleep 0.1; \
                  sh -c 'trap \"\" TERM; sleep 1000' & wait";
    let (mut children, mut all) = (Vec::new(), false);
    // A busy host may need longer to start them all.
    for ms in [700, 5000, 30_000] {
        let start = Instant::now();
        let out = guest.exec(ExecSpec { timeout_ms: Some(ms), ..sh(script) }, b"");
        assert!(start.elapsed() >= Duration::from_millis(ms));
        assert_eq!((out.exit.signal, out.exit.timed_out), (Some(libc::SIGKILL), true));
        children.extend(out.text().lines().map(|line| line.parse::<u32>().unwrap()));
        all = out.text().lines().count() == 3;
        if all {
            break;
        }
    }
    assert!(all, "{children:?}");
    for child in children {
        eventually("a child of a program out of time is gone", || !alive(child));
    }
}

#[test]
fn time_runs_out_even_when_neither_side_reads() {
    let guest = Guest::start();
    let mut client = guest.connect();
    let spec = ExecSpec {
        stdin: true,
        timeout_ms: Some(500),
        ..sh("head -c 100000000 /dev/zero; sleep 100")
    };
    let pid = started(&mut client, spec);
    let mut writer = Client { stream: client.stream.try_clone().unwrap() };
    let feeder =
        std::thread::spawn(move || while writer.try_send(FrameKind::Stdin, &[0; 65536]).is_ok() {});
    eventually("the program is gone", || !alive(pid));
    let out = client.output(pid);
    assert!(out.exit.timed_out);
    drop(client);
    feeder.join().unwrap();
}

#[test]
fn a_client_that_leaves_takes_everything_along() {
    let guest = Guest::start();
    for script in ["sleep 1000 & echo $!; wait", "yes & echo $!; wait"] {
        let mut client = guest.connect();
        let pid = started(&mut client, ExecSpec { stdin: true, ..sh(script) });
        let mut line = Vec::new();
        while !line.contains(&b'\n') {
            line.extend(client.frame().unwrap().1);
        }
        let text = String::from_utf8_lossy(&line).into_owned();
        let child: u32 =
            text.lines().find_map(|l| l.parse().ok()).unwrap_or_else(|| panic!("{text:.80}"));
        drop(client);
        eventually("the program is gone", || !alive(pid));
        eventually("its child is gone", || !alive(child));
    }
}

#[test]
fn a_detached_program_lives_on_until_its_time_is_up() {
    let guest = Guest::start();
    let mut client = guest.connect();
    let begun = Instant::now();
    let pid = started(
        &mut client,
        ExecSpec { detach: true, timeout_ms: Some(1500), ..sh("sleep 1000 & wait") },
    );
    drop(client);
    std::thread::sleep(Duration::from_millis(500));
    // This thread may have stood still until the time was up.
    assert!(alive(pid) || begun.elapsed() >= Duration::from_millis(1500));
    eventually("its time is up", || !alive(pid));
    // A client that stays gets the exit code.
    let out = guest.exec(ExecSpec { detach: true, ..sh("exit 5") }, b"");
    assert_eq!((out.exit.code, out.stdout.len()), (Some(5), 0));
    let (code, _) = refused(&guest, ExecSpec { detach: true, stdin: true, ..sh("cat") });
    assert_eq!(code, FailureCode::Invalid);
}

#[test]
fn accounts_that_cannot_be_read_refuse_a_program_at_once() {
    for (file, got) in
        [("etc/passwd", "a fifo"), ("etc/group", "a fifo"), ("etc/passwd", "a folder")]
    {
        let guest = Guest::start();
        let path = guest.root().join(file);
        std::fs::remove_file(&path).unwrap();
        if got == "a fifo" {
            let mode = rustix::fs::Mode::from_raw_mode(0o644);
            rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0)
                .unwrap();
        } else {
            std::fs::create_dir(&path).unwrap();
        }
        let (code, message) = refused(&guest, sh("true"));
        assert_eq!(code, FailureCode::Io);
        assert_eq!(
            message,
            format!("exec: {}: expected a regular file, got {got}", path.display())
        );
    }
    let guest = Guest::start();
    std::fs::File::create(guest.root().join("etc/passwd")).unwrap().set_len(1 << 40).unwrap();
    let (_, message) = refused(&guest, sh("true"));
    assert!(message.ends_with("expected at most 4194304 bytes, got more"), "{message}");
}

#[test]
fn users_folders_and_variables() {
    if !dayfly_units::needs::root() {
        return;
    }
    let guest = Guest::start();
    let as_user = |user: &str, cwd: &str| {
        let spec = ExecSpec {
            user: user.into(),
            cwd: cwd.into(),
            ..sh("id -u; id -g; id -G; pwd; echo $HOME $PATH")
        };
        guest.exec(spec, b"").text()
    };
    let path = dayfly_agent::exec::DEFAULT_PATH;
    assert_eq!(as_user("", ""), format!("0\n0\n0\n/root\n/root {path}\n"));
    assert_eq!(
        as_user("nobody", "/tmp"),
        format!("65534\n65534\n65534\n/tmp\n/nonexistent {path}\n")
    );
    assert_eq!(as_user("nobody", ""), format!("65534\n65534\n65534\n/\n/nonexistent {path}\n"));
    assert_eq!(as_user("4321:1234", "/usr"), format!("4321\n1234\n1234\n/usr\n/ {path}\n"));
    let groups =
        format!("{}\nextra:x:777:daemon\n", std::fs::read_to_string("/etc/group").unwrap());
    std::fs::write(guest.root().join("etc/group"), groups).unwrap();
    assert_eq!(as_user("daemon", "/"), format!("1\n1\n1 777\n/\n/usr/sbin {path}\n"));
    // Root changes to the folder, as in containers.
    let closed = tempfile::tempdir().unwrap();
    let closed = closed.path().to_str().unwrap();
    assert!(as_user("nobody", closed).contains(&format!("\n{closed}\n")));
    // Streams can be opened by path.
    let by_path = ExecSpec {
        user: "nobody".into(),
        stdin: true,
        ..sh("cat /dev/stdin; echo out >/dev/stdout; echo err >/dev/stderr")
    };
    let out = guest.exec(by_path, b"in\n");
    assert_eq!((out.text().as_str(), &out.stderr[..]), ("in\nout\n", &b"err\n"[..]));
    // A missing folder is made only on request.
    let missing = format!("{closed}/a/b");
    let asked = |make_cwd| ExecSpec { cwd: missing.clone(), make_cwd, ..sh("pwd") };
    assert_eq!(refused(&guest, asked(false)).0, FailureCode::NotFound);
    assert_eq!(guest.exec(asked(true), b"").text(), format!("{missing}\n"));
    // The agent's own threads are still root.
    assert_eq!(guest.sh("id -u").text(), "0\n");
    let mut spec = sh("echo $A $PATH");
    spec.env = [("A".into(), "b c".into()), ("PATH".into(), "/bin".into())].into();
    assert_eq!(guest.exec(spec, b"").text(), "b c /bin\n");
}

#[test]
fn what_cannot_be_run_is_told_apart_before_it_starts() {
    let guest = Guest::start();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str, mode| {
        use std::os::unix::fs::PermissionsExt;
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let plain = file("plain", "text", 0o644);
    let no_shebang = file("noshebang", "echo hi", 0o755);
    let lost = file("lost", "#!/no/such/interpreter\n", 0o755);
    let not_found = FailureCode::NotFound;
    assert_eq!(refused(&guest, argv(&["no-such-program"])).0, not_found);
    assert_eq!(refused(&guest, argv(&["/no/such/program"])).0, not_found);
    let (code, message) = refused(&guest, argv(&[&lost]));
    assert!(code == not_found && message.contains("interpreter"), "{message}");
    assert_eq!(refused(&guest, ExecSpec { cwd: "/no/such".into(), ..sh("true") }).0, not_found);
    for path in [&plain, &no_shebang, "/etc"] {
        let (code, message) = refused(&guest, argv(&[path]));
        assert!(code == FailureCode::NotPermitted && message.contains(path), "{path}: {message}");
    }
    let mut in_path = argv(&["plain"]);
    in_path.env = [("PATH".into(), format!("/no/such:{}", folder.path().display()))].into();
    assert_eq!(refused(&guest, in_path.clone()).0, FailureCode::NotPermitted);
    // As in execvp(3): a file that cannot be run does not hide a later one.
    in_path.argv = vec!["true".into()];
    file("true", "", 0o644);
    in_path.env = [("PATH".into(), format!("{}:/bin", folder.path().display()))].into();
    assert_eq!(guest.exec(in_path, b"").exit.code, Some(0));
    for bad in [
        argv(&[]),
        argv(&[""]),
        argv(&["a\0b"]),
        ExecSpec { user: "no-such-user".into(), ..sh("true") },
        ExecSpec { env: [("A=B".into(), "c".into())].into(), ..sh("true") },
        ExecSpec { cwd: "a\0".into(), ..sh("true") },
    ] {
        assert_eq!(refused(&guest, bad.clone()).0, FailureCode::Invalid, "{bad:?}");
    }
}

#[test]
fn nothing_is_left_of_a_hundred_programs() {
    let guest = Guest::start();
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    guest.sh("true");
    let zombies = || {
        let own = std::process::id().to_string();
        std::fs::read_dir("/proc")
            .unwrap()
            .filter(|e| {
                let path = e.as_ref().unwrap().path().join("stat");
                std::fs::read_to_string(path).is_ok_and(|s| {
                    let fields: Vec<String> =
                        s.rsplit(") ").next().unwrap_or("").split(' ').map(Into::into).collect();
                    fields.first().is_some_and(|f| f == "Z") && fields.get(1) == Some(&own)
                })
            })
            .count()
    };
    let before = count("fd");
    for _ in 0..100 {
        assert_eq!(guest.sh("exit 1").exit.code, Some(1));
        refused(&guest, argv(&["no-such-program"]));
    }
    // Other tests of this process start and end programs; a leak per program would show.
    eventually("descriptors are closed", || count("fd") < before + 60);
    eventually("programs are reaped", || zombies() < 20);
}

#[test]
fn malformed_frames_end_the_program_and_are_named() {
    let guest = Guest::start();
    for (kind, body, wanted) in [
        (FrameKind::Resize, b"{}".to_vec(), "resize"),
        (FrameKind::Signal, vec![1, 2], "signal: expected 4 bytes"),
        (FrameKind::Signal, 99_i32.to_le_bytes().to_vec(), "a signal from 1 to 64"),
        (FrameKind::Stdin, b"x".to_vec(), "got Stdin"),
        (FrameKind::Data, vec![], "got Data"),
    ] {
        let mut client = guest.connect();
        let pid = started(&mut client, sh("sleep 1000"));
        client.send(kind, &body);
        let reply = client.reply();
        let Reply::Err(failure) = reply else { panic!("{reply:?}") };
        assert!(
            failure.message.contains(wanted) && failure.code == FailureCode::Invalid,
            "{failure:?}"
        );
        assert_eq!(client.frame(), None);
        eventually("the program is gone", || !alive(pid));
    }
}
