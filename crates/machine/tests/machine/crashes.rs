//! Every process of a machine (and its kernel) is killed, at several moments. The next start works,
//! and nothing is left behind.

use crate::scene::{Case, Scene, kill, spec, wait_until};
use dayfly_machine::{Started, State, kernel_crashed};
use std::io::Read;
use std::time::Duration;

pub(crate) const CASES: &[Case] = &[
    ("each_process_killed_while_running", killed_while_running),
    ("each_process_killed_while_starting", killed_while_starting),
    ("two_starts_at_once_make_one_machine", two_starts),
    ("a_killed_starter_leaves_a_machine_that_the_next_start_finds", killed_starter),
];

fn killed_while_running() {
    let scene = Scene::sharing(&["usr=/usr"]);
    scene.start();
    for (victim, cause) in [
        ("supervisor", "killed, or the host went down"),
        ("dayfly-machine", "QEMU ended unexpectedly: signal 9"),
        ("virtiofsd", "virtiofsd of share usr ended unexpectedly: signal 9"),
        ("kernel", "QEMU ended unexpectedly: code 0; the console's last line:"),
    ] {
        // Synced data must be on disk after a crash.
        scene.shell(&format!("echo {victim} > /var/lib/dayfly/{victim} && sync"));
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
        let end = scene.machine().status().unwrap().last_end.unwrap();
        assert!(end.starts_with(cause), "{victim}: {end}");
        scene.assert_nothing_left();
        assert!(matches!(scene.start(), Started::Fresh { replaced: None, .. }), "{victim}");
        assert_eq!(scene.shell(&format!("cat /var/lib/dayfly/{victim}")), victim);
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
    assert!(texts[0].starts_with("Fresh") && texts[1] == "WasRunning", "{texts:?}");
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
        if started == Started::WasRunning {
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
