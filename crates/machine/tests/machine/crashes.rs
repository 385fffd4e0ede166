//! Every process of a machine (and its kernel) is killed, at several moments. The next start works,
//! and nothing is left behind.

use crate::scene::{Case, Scene, kill, signal, spec, wait_until};
use dayfly_machine::{Consent, Purpose, Started, State, Stopped, kernel_crashed};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) const CASES: &[Case] = &[
    ("each_process_killed_while_running", killed_while_running),
    ("each_process_killed_while_starting", killed_while_starting),
    ("a_silent_machine_is_never_ended_unasked", silent),
    ("a_full_disk_of_the_host_pauses_the_machine_until_there_is_space", full_disk),
    ("two_starts_at_once_make_one_machine", two_starts),
    ("a_killed_starter_leaves_a_machine_that_the_next_start_finds", killed_starter),
];

/// Process id of the program that connects the machine with the host's network.
fn uplink(scene: &Scene) -> Option<i32> {
    let others = ["dayfly-machine", "virtiofsd"];
    let processes = scene.machine().status().unwrap().processes;
    let is_other = |name: &str| others.iter().any(|other| name.starts_with(other));
    processes.into_iter().find(|(_, name)| !is_other(name)).map(|(pid, _)| pid)
}

fn killed_while_running() {
    let mut scene = Scene::sharing(&["usr=/usr"]);
    scene.options.network = true;
    scene.init();
    scene.start();
    // A program that ends is started again, and the machine goes on.
    wait_until("the uplink's program runs", || uplink(&scene).is_some());
    let first = uplink(&scene).unwrap();
    kill(first);
    wait_until("another one runs", || uplink(&scene).is_some_and(|pid| pid != first));
    for (victim, cause) in [
        ("supervisor", "killed, or the host went down"),
        ("dayfly-machine", "QEMU ended unexpectedly: signal 9"),
        ("virtiofsd", "virtiofsd of share usr ended unexpectedly: signal 9"),
        ("kernel", "QEMU ended unexpectedly: code 0; the console's last line:"),
    ] {
        // Synced data must be on disk after a crash.
        scene.shell(&format!("echo {victim} > /var/lib/dayfly/{victim} && sync"));
        scene.shell(&format!("echo 3 > {}", crate::standin::VMS));
        wait_until("the uplink's program runs", || uplink(&scene).is_some());
        let program = uplink(&scene).unwrap();
        wait_long("the VMs are counted", || scene.machine().status().unwrap().vms == Some(3));
        if victim == "kernel" {
            // The answer never comes.
            drop(
                scene
                    .machine()
                    .exec_output(&spec(&["sh", "-c", "echo c > /proc/sysrq-trigger"]), b""),
            );
        } else {
            kill(scene.pid(victim).unwrap());
        }
        wait_until("seen as crashed", || scene.machine().status().unwrap().state == State::Crashed);
        let status = scene.machine().status().unwrap();
        let end = status.last_end.unwrap();
        assert!(end.starts_with(cause), "{victim}: {end}");
        assert_eq!(status.last_end_vms, Some(3));
        // No process was left to note the time at which a supervisor ended.
        assert_eq!(status.last_end_unix_ms.is_some(), victim != "supervisor");
        scene.assert_nothing_left();
        assert!(!Path::new(&format!("/proc/{program}")).exists(), "{victim}: the uplink's program");
        assert!(matches!(scene.start(), Started::Fresh { replaced: None, .. }), "{victim}");
        assert_eq!(scene.shell(&format!("cat /var/lib/dayfly/{victim}")), victim);
        let said = scene.said().join("\n");
        assert!(said.starts_with("the machine ended unasked "), "{victim}: {said}");
        assert!(said.contains(cause) && said.contains("its 3 VMs ended with it"), "{said}");
        // The kernel is quiet unless it crashes.
        let console = said.contains("--- last lines of its console") && said.contains("sysrq");
        assert_eq!(console, victim == "kernel", "{victim}: {said}");
    }
    scene.stop();
    scene.start();
    let said = scene.said();
    assert!(said.iter().all(|line| !line.contains("ended unasked")), "said once: {said:?}");
}

/// A machine that does not answer may hold VMs. It stays until the user has agreed to its end.
fn silent() {
    let scene = Scene::new();
    scene.start();
    let [supervisor, qemu] = ["supervisor", "dayfly-machine"].map(|name| scene.pid(name).unwrap());
    signal(qemu, libc::SIGSTOP);
    // The count would be 0, but a machine that does not answer is not asked for it.
    for (purpose, next) in
        [(Purpose::Use, "`dayfly machine restart`"), (Purpose::Restart, "restart --force`")]
    {
        let text = scene.try_start(purpose, Consent::None, Some(0)).unwrap_err().to_string();
        assert!(text.starts_with("the machine does not answer, and its VMs may live"), "{text}");
        assert!(text.contains(next), "{text}");
    }
    assert_eq!(scene.pid("supervisor"), Some(supervisor));
    signal(qemu, libc::SIGCONT);
    assert_eq!(scene.start(), Started::WasRunning { differs: None, vms: Some(0) });
    signal(qemu, libc::SIGSTOP);
    let restarted = scene.try_start(Purpose::Restart, Consent::Given, None).unwrap();
    let Started::Fresh { replaced: Some(why), .. } = restarted else { panic!("{restarted:?}") };
    assert_eq!(why, "on request");
    assert_ne!(scene.pid("supervisor"), Some(supervisor));
    assert_eq!(scene.said(), Vec::<String>::new(), "an end on request is no news");
}

/// A separate file system for a machine's home, which is detached at the end.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(mib: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(format!("size={mib}m")).unwrap();
        mount("tmpfs", folder.path(), "tmpfs", MountFlags::empty(), options.as_c_str()).unwrap();
        Self(folder)
    }

    /// Limits the file system to `mib` MiB beyond what is used.
    fn leave(&self, mib: u64) {
        let stat = rustix::fs::statvfs(self.0.path()).unwrap();
        let used_mib = ((stat.f_blocks - stat.f_bfree) * stat.f_frsize) >> 20;
        let options = std::ffi::CString::new(format!("size={}m", used_mib + mib)).unwrap();
        mount_remount(self.0.path(), MountFlags::empty(), options.as_c_str()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

fn full_disk() {
    let disk = SmallDisk::new(2048);
    let home = tempfile::Builder::new().prefix("dfm").tempdir_in(disk.0.path()).unwrap();
    let scene = Scene::at(home, &[]);
    scene.start();
    disk.leave(24);
    let machine = scene.machine();
    let writer = std::thread::spawn(move || {
        let script = "dd if=/dev/urandom of=/var/lib/dayfly/big bs=1M count=60 && sync && \
            wc -c < /var/lib/dayfly/big";
        machine.exec_output(&spec(&["sh", "-c", script]), b"").unwrap()
    });
    wait_long("the machine is paused", || scene.machine().status().unwrap().paused.is_some());
    let text = scene.try_start(Purpose::Use, Consent::None, Some(0)).unwrap_err().to_string();
    assert!(text.contains("is full") && text.contains("free space"), "{text}");
    assert!(!writer.is_finished());
    disk.leave(256);
    let out = writer.join().unwrap();
    assert_eq!(out.stdout, b"62914560\n", "{out:?}");
    assert_eq!(scene.machine().status().unwrap().paused, None);
    assert_eq!(scene.stop(), Stopped::Clean);
}

/// Waits for an event that an emulated CPU or a slow disk may delay.
fn wait_long(what: &str, mut test: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(240);
    while !test() {
        assert!(Instant::now() < deadline, "not in four minutes: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn killed_while_starting() {
    let scene = Scene::sharing(&["usr=/usr"]);
    for (victim, after_ms) in
        [("supervisor", 0), ("supervisor", 300), ("dayfly-machine", 1000), ("virtiofsd", 1500)]
    {
        let mut starter = scene.spawn_start();
        let mut pid = None;
        wait_until(victim, || {
            pid = scene.pid(victim);
            pid.is_some()
        });
        std::thread::sleep(Duration::from_millis(after_ms));
        kill(pid.unwrap());
        let mut text = String::new();
        starter.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        starter.wait().unwrap();
        assert!(
            text.starts_with("error: the machine did not start"),
            "{victim} after {after_ms} ms: {text}"
        );
        scene.assert_nothing_left();
    }
    assert!(matches!(scene.start(), Started::Fresh { .. }));
    assert_eq!(scene.shell("echo alive"), "alive");
}

fn two_starts() {
    let scene = Scene::new();
    let starters = [scene.spawn_start(), scene.spawn_start()];
    let mut texts: Vec<String> = starters
        .into_iter()
        .map(|mut starter| {
            let mut text = String::new();
            starter.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            starter.wait().unwrap();
            text.trim().to_owned()
        })
        .collect();
    texts.sort();
    assert!(texts[0].starts_with("Fresh") && texts[1].starts_with("WasRunning"), "{texts:?}");
}

/// If a start is killed after QEMU runs, the machine still boots to its end, and the next start
/// uses that machine. A kernel may crash during an emulated boot, and only the killed start would
/// boot it again. Such an attempt shows nothing and is repeated.
fn killed_starter() {
    let mut scene = Scene::new();
    scene.options.cpus = 1;
    scene.init();
    for attempt in 1.. {
        let mut starter = scene.spawn_start();
        wait_until("QEMU runs", || scene.pid("dayfly-machine").is_some());
        starter.kill().unwrap();
        starter.wait().unwrap();
        let started = scene.start();
        if matches!(started, Started::WasRunning { .. }) {
            break;
        }
        let console =
            std::fs::read_to_string(scene.home().join("machine/console.log.1")).unwrap_or_default();
        assert!(
            attempt < 4 && kernel_crashed(&console),
            "attempt {attempt}: {started:?}; the machine before said:\n{console}"
        );
        eprintln!("attempt {attempt}: the kernel crashed under emulation while it booted");
        scene.stop();
    }
    assert_eq!(scene.shell("echo alive"), "alive");
}
