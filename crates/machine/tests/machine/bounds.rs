//! What the machine sees of the host, and what cannot reach the machine.

use crate::scene::{Scene, spec, wait_until};
use dayfly_machine::guest::{API_PORT, EXEC_PORT, GUEST_ADDRESS, MAX_EXEC_CONNECTIONS};
use dayfly_machine::{Exit, Root};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

pub(crate) fn on_host_tree(scene: &Scene, argv: &[&str]) -> dayfly_machine::Output {
    let mut with = spec(argv);
    with.root = Root::Host;
    scene.machine().exec_output(&with, b"").unwrap()
}

pub(crate) fn shares(scene: &Scene, shared: &Path) {
    // Programs of the host find their libraries. Nothing of the host is visible except the shares.
    let out = on_host_tree(scene, &["/usr/bin/python3", "-c", "print(6*7)"]);
    assert_eq!(out.stdout, b"42\n", "{}", String::from_utf8_lossy(&out.stderr));
    let out = on_host_tree(scene, &["sh", "-c", "ls / && ls /var/lib/dayfly"]);
    let text = String::from_utf8(out.stdout).unwrap();
    let names: Vec<&str> = text.lines().collect();
    assert!(names.contains(&"usr") && names.contains(&"lost+found"), "{text}");
    for not_shared in ["etc", "home", "root", "boot", "srv"] {
        assert!(!names.contains(&not_shared), "{text}");
    }
    assert_eq!(scene.shell("ls /shares | sort | xargs"), "in usr");
    let version = std::fs::read("/usr/lib/os-release").unwrap();
    assert!(scene.exec(&["cat", "/shares/usr/lib/os-release"], b"").stdout == version);

    // Read-only also holds for a mount that the machine makes itself.
    let script = "touch /shares/usr/written; mount -o remount,rw /shares/usr; \
        touch /shares/usr/written; \
        mkdir /m && mount -t virtiofs host-usr /m && touch /m/written";
    let out = scene.exec(&["sh", "-c", script], b"");
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.matches("Read-only file system").count() >= 2, "{text}");
    assert!(!Path::new("/usr/written").exists(), "the host's own files are never written");

    // Read-write holds within the folder only, and excludes devices.
    scene.shell("echo two > /shares/in/file; ln -s /etc/hostname /shares/in/link");
    assert_eq!(std::fs::read_to_string(shared.join("file")).unwrap(), "two\n");
    // A symbolic link of the host is followed in the machine, which has no such file.
    assert_eq!(scene.exec(&["cat", "/shares/in/link"], b"").stdout, b"");
    let out = scene.exec(&["mknod", "/shares/in/disk", "b", "8", "0"], b"");
    assert!(out.exit != Exit::Code(0) && !shared.join("disk").exists(), "{out:?}");
    // A file that is replaced on the host is new in the machine too.
    let file = shared.join("changing");
    for text in ["one", "two"] {
        std::fs::write(file.with_extension("new"), text).unwrap();
        std::fs::rename(file.with_extension("new"), &file).unwrap();
        wait_until(text, || {
            scene.exec(&["cat", "/shares/in/changing"], b"").stdout == text.as_bytes()
        });
    }
}

/// The control ports are not in the namespace in which the VMs' packets arrive. That namespace has
/// no packet filter here, because the daemon is a stand-in.
pub(crate) fn control(scene: &Scene) {
    assert_eq!(scene.shell("ls /sys/class/net"), "lo", "no interface leads to the host");
    let listening =
        "cat /proc/net/tcp /proc/net/tcp6 /proc/net/udp /proc/net/udp6 | grep -v local_address; :";
    assert_eq!(scene.shell(listening), "", "nothing listens");
    assert_eq!(scene.shell("ip route"), "");
    // The program runs like a VM: at the end of a link whose other end is in the machine's first
    // namespace.
    let out = scene.exec(&["/root/tiny", "reach", "10.0.2.15", "10.0.2.2", "10.88.255.254"], b"");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert_eq!(out.exit, Exit::Code(0), "{text}{}", String::from_utf8_lossy(&out.stderr));
}

/// Runs a closure in the supervisor's network namespace, from which the control ports are
/// reachable.
fn in_supervisors_network<T: Send>(scene: &Scene, run: impl FnOnce() -> T + Send) -> T {
    let namespace = format!("/proc/{}/ns/net", scene.pid("supervisor").unwrap());
    let namespace = std::fs::File::open(namespace).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).unwrap();
            run()
        });
        thread.join().unwrap()
    })
}

/// A connection without the token gets no answer, even from the supervisor's namespace. Many silent
/// connections keep the supervisor out only briefly.
pub(crate) fn strangers(scene: &Scene) {
    let connect = |port| TcpStream::connect((GUEST_ADDRESS, port)).unwrap();
    let body = concat!(
        r#"{"exec":{"argv":["touch","/tmp/owned"],"env":[],"cwd":null,"#,
        r#""root":"machine","tty":null}}"#
    );
    let body = body.as_bytes();
    let request = [&[1][..], &u32::try_from(body.len()).unwrap().to_le_bytes(), body].concat();
    in_supervisors_network(scene, || {
        for begin in [&b""[..], &[0; 32], &[0xff; 32]] {
            let mut stream = connect(EXEC_PORT);
            stream.write_all(&[begin, &request].concat()).unwrap();
            let mut answer = Vec::new();
            // A reset is as good an end as no answer.
            drop(stream.read_to_end(&mut answer));
            assert_eq!(answer, b"");
            let mut stream = connect(API_PORT);
            stream.write_all(&[begin, b"GET /name HTTP/1.1\r\n\r\n"].concat()).unwrap();
            drop(stream.read_to_end(&mut answer));
            assert_eq!(answer, b"");
        }
    });
    assert_eq!(scene.shell("ls /tmp"), "");
    // Twice as many connections as are served at a time: without the limit, each would have a
    // thread now.
    let count = 2 * MAX_EXEC_CONNECTIONS;
    let silent = in_supervisors_network(scene, || {
        (0..count).map(|_| connect(EXEC_PORT)).collect::<Vec<_>>()
    });
    let at = Instant::now();
    let threads = "grep Threads /proc/$(pidof dayfly-machine-serve)/status | tr -dc 0-9";
    let threads: usize = scene.shell(threads).parse().unwrap();
    println!(
        "  behind {count} silent connections: {:.1} s, {threads} threads",
        at.elapsed().as_secs_f32()
    );
    assert!(threads < MAX_EXEC_CONNECTIONS + 20, "{threads}");
    drop(silent);
}

/// QEMU runs as a user that owns no file, sees nothing of the host, and has few system calls.
pub(crate) fn confined(scene: &Scene) {
    let pid = scene.pid("dayfly-machine").unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let user: u32 = field("Uid:").split(' ').next().unwrap().parse().unwrap();
    assert!(user >= 0x7d00_0000, "{status}");
    assert_eq!(field("Uid:"), format!("{user} {user} {user} {user}"));
    assert_eq!(field("Gid:"), format!("{user} {user} {user} {user}"));
    assert_eq!(field("Groups:"), "");
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".to_owned(), "2".to_owned()));
    let mut names: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/root"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in &names {
        let known = ["bin", "etc", "initramfs", "sbin", "usr", "vmlinux"];
        assert!(known.contains(&name.as_str()) || name.starts_with("lib"), "{names:?}");
    }
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    assert_eq!(environment, b"PATH=/usr/sbin:/usr/bin:/sbin:/bin\0");
    // No descriptor leads to a file of the host, except the machine's own files.
    let folder = scene.machine().folder().to_owned();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let target = std::fs::read_link(entry.unwrap().path()).unwrap();
        let own = target.starts_with(&folder) || !target.is_absolute();
        let harmless = ["/dev/null", "/dev/net/tun"].map(Path::new).contains(&target.as_path());
        assert!(own || harmless || target.to_string_lossy().starts_with("/memfd:"), "{target:?}");
    }
}
