//! Every process of a machine (and its kernel) is killed, at several moments; the next start works and nothing is left.

use crate::cases::wait_until;
use crate::scene::{Scene, kill, spec};
use dayfly_machine::{Started, State};
use std::io::Read;
use std::time::Duration;

pub(crate) const CASES: &[crate::Case] = &[
    ("each_process_killed_while_running", killed_while_running),
    ("each_process_killed_while_starting", killed_while_starting),
    ("two_starts_at_once_make_one_machine", two_starts),
    ("a_killed_starter_leaves_a_machine_that_the_next_start_finds", killed_starter),
];

fn killed_while_running() {
    let scene = Scene::new();
    scene.start();
    for (victim, cause) in [
        ("supervisor", "killed, or the host went down"),
        ("dayfly-machine", "QEMU ended unexpectedly: signal 9"),
        ("virtiofsd", "virtiofsd for / ended unexpectedly: signal 9"),
        ("kernel", "QEMU ended unexpectedly: code 0; the console's last line:"),
    ] {
        // What a program was told is on disk must be there after a crash.
        scene.shell(&format!("echo {victim} > /var/lib/dayfly/{victim} && sync"));
        if victim == "kernel" {
            // The answer never comes.
            drop(scene.machine().exec_output(&spec(&["sh", "-c", "echo c > /proc/sysrq-trigger"]), b""));
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
    let scene = Scene::new();
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
        assert!(text.starts_with("error: the machine did not start"), "{victim} after {after_ms} ms: {text}");
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

/// Nobody boots a machine again whose starter is gone and whose kernel crashes as it boots, which emulation of two CPUs makes it do (`Machine::start`): one CPU.
fn killed_starter() {
    let mut scene = Scene::new();
    scene.options.cpus = 1;
    scene.init();
    let mut starter = scene.spawn_start();
    wait_until("QEMU runs", || scene.pid("dayfly-machine").is_some());
    starter.kill().unwrap();
    starter.wait().unwrap();
    let started = scene.start();
    let before = std::fs::read_to_string(scene.home().join("machine/console.log.1")).unwrap_or_default();
    assert_eq!(started, Started::WasRunning, "the one before said:\n{before}");
    assert_eq!(scene.shell("echo alive"), "alive");
}
