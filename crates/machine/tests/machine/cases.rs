//! Ordinary uses of a machine.

use crate::bench;
use crate::bounds;
use crate::scene::{Case, Scene, spec, this, wait_until};
use crate::standin::request;
use dayfly_machine::{
    Consent, ExecError, Exit, InitOptions, Machine, Purpose, Root, StartError, Started, State,
    Stopped, Uplink, WindowSize, copy_in, leaks, probe,
};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) const CASES: &[Case] = &[
    ("a_machine_is_made_started_used_and_stopped", whole_life),
    ("a_daemon_that_never_answers_is_reported_with_its_words", broken_daemon),
    ("what_cannot_be_is_refused", refusals),
];

/// A machine that runs the programs of this build, and no VM.
const SAME: Started = Started::WasRunning { differs: None, vms: Some(0) };

/// One machine for all uses that do not harm it.
fn whole_life() {
    let shared = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut scene = Scene::sharing(&["usr=/usr", &format!("in={}:rw", shared.path().display())]);
    assert_eq!(scene.machine().status().unwrap().state, State::Stopped);
    let Started::Fresh { boot_ms, replaced: None, .. } = scene.start() else {
        panic!("expected a fresh start")
    };
    println!("  start until the daemon answers: {boot_ms} ms");
    assert_eq!(scene.start(), SAME);
    assert!(
        leaks(scene.home()).is_empty(),
        "a running machine is no leak: {:?}",
        leaks(scene.home())
    );

    status(&scene);
    api(&scene);
    exec(&scene);
    terminal(&scene);
    clock(&scene);
    nested_kvm(&scene);
    bounds::shares(&scene, shared.path());
    bounds::control(&scene);
    bounds::strangers(&scene);
    bounds::confined(&scene);
    hanging_daemon(&scene);
    daemon_is_kept(&scene);
    second_machine(&scene);

    scene.shell("echo kept > /var/lib/dayfly/file");
    assert_eq!(scene.stop(), Stopped::Clean);
    scene.assert_nothing_left();
    assert_eq!(scene.machine().status().unwrap().state, State::Stopped);
    assert_eq!(scene.stop(), Stopped::WasStopped);
    assert!(matches!(
        scene.machine().exec_output(&spec(&["true"]), b""),
        Err(ExecError::Connect { .. })
    ));

    scene.start();
    assert_eq!(scene.shell("cat /var/lib/dayfly/file"), "kept");
    changed_daemon(&mut scene);

    let folder = scene.machine().folder().to_owned();
    scene.machine().rm(&mut |_| {}).unwrap();
    assert!(!folder.exists());
    assert!(leaks(scene.home()).is_empty());
}

fn status(scene: &Scene) {
    let status = scene.machine().status().unwrap();
    assert_eq!(status.state, State::Running);
    assert!(status.supervisor_pid.is_some() && status.host_memory_bytes.is_some_and(|b| b > 0));
    assert_eq!(status.processes.len(), 3, "QEMU and two virtiofsd: {:?}", status.processes);
    assert_eq!(status.uplink, Some(Uplink::Off));
    assert_eq!(scene.shell("ls /sys/class/net | xargs"), "lo", "no card in the first namespace");
    println!("  memory on the host: {} MiB", status.host_memory_bytes.unwrap() >> 20);
    let machine = status.machine.unwrap();
    assert!(machine.kvm && machine.svm && machine.npt, "{machine:?}");
    assert_eq!(machine.shares, ["usr", "in"]);
    assert_eq!(machine.cpus, 1, "emulation of more is not reliable");
    assert!(
        machine.memory_total_bytes > 800 << 20 && machine.memory_total_bytes <= 1024 << 20,
        "{machine:?}"
    );
    let daemon = machine.daemon.unwrap();
    assert!(daemon.answering && daemon.pid.is_some() && daemon.restarts == 0, "{daemon:?}");
}

fn api(scene: &Scene) {
    let socket = scene.machine().api_socket();
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&socket).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let times = (0..30).map(|_| {
        let at = Instant::now();
        assert!(request(&socket, "GET", "/name", b"").unwrap().starts_with(b"one "));
        at.elapsed()
    });
    bench::print("one request at a time", times.collect());

    let times: Vec<Duration> = std::thread::scope(|scope| {
        let socket = &socket;
        let all: Vec<_> = (0..50)
            .map(|index: usize| {
                scope.spawn(move || {
                    let at = Instant::now();
                    let length = 1000 * index + 1;
                    let answer = request(socket, "PUT", "/sink", &vec![7; length]).unwrap();
                    assert_eq!(String::from_utf8(answer).unwrap(), length.to_string());
                    at.elapsed()
                })
            })
            .collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    bench::print("fifty at once", times);

    let length = 64 << 20;
    let at = Instant::now();
    assert_eq!(
        request(&socket, "PUT", "/sink", &vec![7; length]).unwrap(),
        length.to_string().into_bytes()
    );
    bench::print_rate("into the machine", length, at);
    let at = Instant::now();
    let answer = request(&socket, "GET", &format!("/source/{length}"), b"").unwrap();
    assert!(answer.len() == length && answer.iter().all(|b| *b == b'x'));
    bench::print_rate("out of the machine", length, at);

    // A client that disconnects in the middle of a large answer disturbs no other client.
    for _ in 0..5 {
        let mut stream = UnixStream::connect(&socket).unwrap();
        std::io::Write::write_all(&mut stream, b"GET /source/100000000 HTTP/1.1\r\n\r\n").unwrap();
        stream.read_exact(&mut [0; 1000]).unwrap();
    }
    assert!(request(&socket, "GET", "/name", b"").unwrap().starts_with(b"one "));
}

fn exec(scene: &Scene) {
    let out = scene.exec(&["sh", "-c", "cat; echo error >&2; exit 7"], b"input");
    assert_eq!(
        (out.exit, &out.stdout[..], &out.stderr[..]),
        (Exit::Code(7), &b"input"[..], &b"error\n"[..])
    );
    assert_eq!(scene.exec(&["sh", "-c", "kill -9 $$"], b"").exit, Exit::Signal(9));
    let missing = scene.machine().exec_output(&spec(&["no-such-program"]), b"");
    assert!(
        matches!(&missing, Err(ExecError::Refused(text)) if text.contains("no-such-program")),
        "{missing:?}"
    );
    let mut with = spec(&["sh", "-c", "echo $A; pwd"]);
    with.env = vec![("A".to_owned(), "b c".to_owned())];
    with.cwd = Some("/proc".to_owned());
    assert_eq!(scene.machine().exec_output(&with, b"").unwrap().stdout, b"b c\n/proc\n");

    let body: Vec<u8> = (0..8_000_000_u32)
        .flat_map(|n| (n.wrapping_mul(2_654_435_761) >> 24).to_le_bytes()[..1].to_vec())
        .collect();
    assert!(scene.exec(&["cat"], &body).stdout == body, "eight megabytes both ways at once");
    // A program that does not read its input still ends, and a program whose client disconnects is
    // killed.
    assert_eq!(scene.exec(&["true"], &body).exit, Exit::Code(0));
    let machine = scene.machine();
    copy_in(&machine, &mut &body[..], "/root/a folder/file", 0o640).unwrap();
    assert_eq!(scene.shell("stat -c '%a %s' '/root/a folder/file'"), format!("640 {}", body.len()));

    let mut stream = UnixStream::connect(machine.exec_socket()).unwrap();
    let request =
        br#"{"exec":{"argv":["sleep","4321"],"env":[],"cwd":null,"root":"machine","tty":null}}"#;
    let header = [&[1][..], &u32::try_from(request.len()).unwrap().to_le_bytes()].concat();
    std::io::Write::write_all(&mut stream, &[&header[..], request].concat()).unwrap();
    wait_until("sleep runs", || scene.exec(&["pidof", "sleep"], b"").exit == Exit::Code(0));
    drop(stream);
    wait_until("sleep is killed", || scene.exec(&["pidof", "sleep"], b"").exit == Exit::Code(1));

    // An invalid request gets an error and has no effect.
    for nonsense in
        [&b"GET / HTTP/1.0\r\n\r\n"[..], &[1, 255, 255, 255, 255], &[1, 2, 0, 0, 0, b'{', b'}']]
    {
        let mut stream = UnixStream::connect(machine.exec_socket()).unwrap();
        std::io::Write::write_all(&mut stream, nonsense).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // A reset is as good an end as an empty answer.
        drop(stream.read_to_end(&mut Vec::new()));
    }
    assert_eq!(scene.shell("echo alive"), "alive");
}

fn terminal(scene: &Scene) {
    let mut with = spec(&["sh", "-c", "cat; tty; stty size"]);
    with.tty = Some(WindowSize { rows: 33, columns: 101 });
    // Byte 4 is a terminal's end of input. A program that writes during the echo of its input would
    // mix with it, so cat reads all first.
    let out = scene.machine().exec_output(&with, b"typed\n\x04").unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(
        text.contains("/dev/pts/") && text.contains("33 101") && text.matches("typed").count() == 2,
        "{text:?}"
    );
    assert_eq!(out.exit, Exit::Code(0));
}

fn clock(scene: &Scene) {
    let now = || {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64()
    };
    let before = now();
    let said: f64 = String::from_utf8(bounds::on_host_tree(scene, &["date", "+%s.%N"]).stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let after = now();
    assert!(
        said > before - 0.5 && said < after + 0.5,
        "the machine's clock: {before} <= {said} <= {after}"
    );
}

fn nested_kvm(scene: &Scene) {
    let machine = scene.machine();
    copy_in(&machine, &mut std::fs::File::open(this()).unwrap(), "/root/tiny", 0o755).unwrap();
    let out = scene.exec(&["/root/tiny", "kvm"], b"");
    assert_eq!(
        (out.exit, &out.stdout[..]),
        (Exit::Code(0), &b"42\n"[..]),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    // Creating and destroying VMs must not make the machine's kernel patch its own code (see the
    // init's `steady`). QEMU's threads sometimes lose that race, which ends the machine.
    scene.shell(
        "cd /sys/kernel/tracing && echo text_poke_queue text_poke_bp_batch > set_ftrace_filter && \
         echo function > current_tracer",
    );
    for _ in 0..3 {
        assert_eq!(scene.exec(&["/root/tiny", "kvm"], b"").exit, Exit::Code(0));
    }
    let patched = scene
        .shell("cd /sys/kernel/tracing && grep -v '^#' trace | tail -3; echo nop > current_tracer");
    assert_eq!(patched, "", "the kernel patched its code");
    // The VMM's jail pivots its root, which an initramfs refuses.
    scene.shell(
        "unshare -m sh -c 'mkdir -p /run/jail && mount -t tmpfs none /run/jail && \
         mkdir /run/jail/old && pivot_root /run/jail /run/jail/old'",
    );
}

/// A daemon whose threads hang does not count as answering, although its socket accepts
/// connections.
fn hanging_daemon(scene: &Scene) {
    let answering = || scene.machine().status().unwrap().machine.unwrap().daemon.unwrap().answering;
    // On a busy host an answer may come too late.
    wait_until("the daemon answers", answering);
    scene.shell(&format!("touch {}", crate::standin::HANG));
    assert!(!answering());
    scene.shell(&format!("rm {}", crate::standin::HANG));
    wait_until("the daemon answers again", answering);
}

fn daemon_is_kept(scene: &Scene) {
    let socket = scene.machine().api_socket();
    let first = request(&socket, "GET", "/name", b"").unwrap();
    let pid = String::from_utf8(first.clone()).unwrap().split_once(' ').unwrap().1.to_owned();
    // An orphan of the daemon (such as a VM) outlives it.
    let orphan = scene.shell("setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $!");
    // Until the daemon is gone it may still accept a connection, which then ends with it.
    scene.shell(&format!("kill -9 {pid}; while kill -0 {pid} 2>/dev/null; do sleep 0.01; done"));
    let at = Instant::now();
    let second = request(&socket, "GET", "/name", b"").unwrap();
    println!("  first answer after the daemon was killed: {:.0} ms", bench::ms(at.elapsed()));
    assert!(second.starts_with(b"one ") && second != first);
    scene.shell(&format!("kill -0 {orphan} && kill {orphan}"));
    wait_until("the keeper has seen the new daemon answer", || {
        let daemon = scene.machine().status().unwrap().machine.unwrap().daemon.unwrap();
        daemon.restarts == 1
            && daemon.answering
            && daemon.last_end.as_deref() == Some("ended by signal 9")
    });
    let log = std::fs::read_to_string(scene.machine().folder().join("daemon.log")).unwrap();
    assert_eq!(log.matches("stand-in one listens").count(), 2, "{log}");
}

/// Two machines with different homes do not interfere.
fn second_machine(first: &Scene) {
    let mut scene = Scene::new();
    scene.options.daemon_arguments = vec!["standin".to_owned(), "two".to_owned()];
    (scene.options.cpus, scene.options.numa_nodes) = (2, 2);
    let config = scene.init().folder().join("machine.json");
    // Fields as an older version wrote them.
    let text = std::fs::read_to_string(&config).unwrap();
    let older = r#"{"host_files": true, "shares": ["/usr"], "#;
    std::fs::write(&config, text.replacen('{', older, 1)).unwrap();
    assert!(scene.machine().notice().is_some_and(|text| text.contains("--share NAME=PATH")));
    scene.start();
    assert_eq!(scene.machine().notice(), None, "said once");
    assert!(
        request(&scene.machine().api_socket(), "GET", "/name", b"").unwrap().starts_with(b"two ")
    );
    assert!(
        request(&first.machine().api_socket(), "GET", "/name", b"").unwrap().starts_with(b"one ")
    );
    assert_eq!(scene.shell("ls -d /sys/devices/system/node/node* | wc -l"), "2");
    let status = scene.machine().status().unwrap();
    assert_eq!(status.machine.unwrap().shares, Vec::<String>::new());
    assert_eq!(status.processes.len(), 1, "only QEMU: {:?}", status.processes);
    let mut with = spec(&["true"]);
    with.root = Root::Host;
    let refused = scene.machine().exec_output(&with, b"").unwrap_err().to_string();
    assert!(refused.contains("--share usr=/usr"), "{refused}");
    assert_eq!(scene.stop(), Stopped::Clean);
    assert!(
        request(&first.machine().api_socket(), "GET", "/name", b"").unwrap().starts_with(b"one ")
    );
}

fn changed_daemon(scene: &mut Scene) {
    let daemon = scene.options.daemon.clone().unwrap();
    // The file is touched, but its content is unchanged: no restart.
    std::fs::copy(this(), daemon.with_extension("new")).unwrap();
    std::fs::rename(daemon.with_extension("new"), &daemon).unwrap();
    assert_eq!(scene.start(), SAME);
    let mut body = std::fs::read(&daemon).unwrap();
    // Padding in the ELF header: a different file with the same behaviour.
    body[9] ^= 1;
    std::fs::write(&daemon, body).unwrap();
    vms_are_kept(scene);
    let Started::Fresh { replaced: Some(why), .. } = scene.start() else {
        panic!("expected a restart")
    };
    // The machine's disk has the new build already, so the name of the program is not known now.
    assert_eq!(why, "changed: the carried programs, kernel or settings");
    assert_eq!(scene.start(), SAME);
    // An included file that has vanished is no reason to stop.
    std::fs::remove_file(&daemon).unwrap();
    assert_eq!(scene.start(), SAME);
    // With another change the machine would run old copies, so that is refused.
    let shared = tempfile::tempdir_in("/var/tmp").unwrap();
    scene.options.shares = vec![format!("t={}", shared.path().display()).parse().unwrap()];
    let error = Machine::init(scene.home(), &scene.options, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("gone, and the machine has changed"), "{error}");
}

/// VMs live in a machine that runs older programs: only a restart with consent ends it.
fn vms_are_kept(scene: &Scene) {
    let supervisor = scene.pid("supervisor");
    let used = scene.try_start(Purpose::Use, Consent::None, Some(3)).unwrap();
    let differs = Some("changed: dayflyd".to_owned());
    assert_eq!(used, Started::WasRunning { differs, vms: Some(3) });
    scene.said();
    for (purpose, consent, vms, why, next) in [
        (
            Purpose::Use,
            Consent::None,
            None,
            "does not say how many VMs",
            "`dayfly machine restart`",
        ),
        (Purpose::Restart, Consent::None, Some(3), "runs 3 VMs", "restart --force`"),
        (Purpose::Restart, Consent::Ask, Some(1), "runs a VM", "restart --force`"),
    ] {
        let text = scene.try_start(purpose, consent, vms).unwrap_err().to_string();
        assert!(text.contains(why) && text.contains(next), "{text}");
    }
    let asked = scene.said();
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert!(asked[0].starts_with("the machine runs a VM. Restart it"), "{asked:?}");
    assert_eq!(scene.pid("supervisor"), supervisor);
}

fn broken_daemon() {
    let mut scene = Scene::new();
    scene.options.daemon_arguments = vec!["standin".to_owned(), "broken".to_owned()];
    scene.init();
    let error = scene.try_start(Purpose::Use, Consent::None, None).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("ended with code 3") && text.contains("broken on purpose"), "{text}");
    scene.assert_nothing_left();
    assert_eq!(scene.machine().status().unwrap().state, State::Stopped);
}

fn refusals() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let text = Machine::open(folder.path()).unwrap_err().to_string();
    assert!(text.contains("no machine there"), "{text}");
    let init = |options: &InitOptions, home: &Path| {
        Machine::init(home, options, &mut |_| {}).unwrap_err().to_string()
    };
    let good = Scene::new();
    let with = |change: fn(&mut InitOptions)| {
        let mut options = good.options.clone();
        change(&mut options);
        options
    };
    let text = init(&with(|o| o.cpus = 0), folder.path());
    assert!(text.contains("CPUs: expected 1 to 64, got 0"), "{text}");
    let text = init(&with(|o| o.numa_nodes = 3), folder.path());
    assert!(text.contains("NUMA nodes: expected 1 to 1, got 3"), "{text}");
    let text = init(&with(|o| o.kernel_tree = "/etc".into()), folder.path());
    assert!(text.contains("/etc/boot"), "{text}");
    let text = init(&with(|o| o.vmm = Some("/bin/ls".into())), folder.path());
    assert!(text.contains("expected a static ELF program"), "{text}");
    let text = init(&with(|o| o.daemon = Some("/no/such".into())), folder.path());
    assert!(text.contains("/no/such"), "{text}");
    for (share, says) in [
        ("all=/", "/ is never shared"),
        ("x=/no/such", "share x: /no/such: No such file"),
        ("x=/etc/passwd", "expected a folder"),
    ] {
        let mut options = good.options.clone();
        options.shares = vec![share.parse().unwrap()];
        let text = init(&options, folder.path());
        assert!(text.contains(says), "{share}: {text}");
    }
    let text = init(&good.options, &folder.path().join("a".repeat(120)));
    assert!(text.contains("at most 107 bytes"), "{text}");

    // A share that has vanished is named, and the machine does not start without it.
    let gone = tempfile::tempdir_in("/var/tmp").unwrap();
    let sharing = Scene::sharing(&[&format!("gone={}", gone.path().display())]);
    let path = gone.path().to_owned();
    drop(gone);
    let error = sharing.try_start(Purpose::Use, Consent::None, None).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with(&format!("share gone: {}: No such file", path.display())), "{text}");

    // A damaged disk after an unclean end is reported and not mounted.
    good.start();
    crate::scene::kill(good.pid("supervisor").unwrap());
    // QEMU may still be ending at this moment; the start must not take it for a running machine.
    let disk = good.machine().folder().join("disk.img");
    let file = std::fs::OpenOptions::new().write(true).open(&disk).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![0xa5; 1 << 20], 0).unwrap();
    let error = good.try_start(Purpose::Use, Consent::None, None).unwrap_err();
    assert!(matches!(error, StartError::Disk { .. }), "{error}");
    assert!(!probe().to_string().is_empty());
}
