use super::*;
use crate::base::config::{Config, Deadlines};
use crate::fixture;
use crate::model::facts::Facts;
use crate::templates::cache::TemplateCache;
use crate::templates::pagers::Pagers;
use crate::vm::registry::Registry;
use dayfly_host::process::ProcessId;
use dayfly_store::{ChainLayer, Store, VmLayer};
use dayfly_vmm::config::Shape;
use dayfly_vmm::control::Status;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::process::{Child, Stdio};

const PHASES: [Phase; 6] = [
    Phase::Starting,
    Phase::Running,
    Phase::Paused,
    Phase::Freezing,
    Phase::Forking,
    Phase::Exited,
];
const SEEN: [Seen; 5] = [
    Seen::Gone,
    Seen::Lives,
    Seen::Unresponsive,
    Seen::Answers { paused: false },
    Seen::Answers { paused: true },
];

#[test]
fn every_case_is_decided_as_promised() {
    for phase in PHASES {
        for seen in SEEN {
            assert_eq!(
                decide(phase, true, seen),
                Verdict::Discard,
                "its client is gone: {phase:?} {seen:?}"
            );
            let verdict = decide(phase, false, seen);
            match verdict {
                Verdict::Ask => {
                    assert_eq!(seen, Seen::Lives);
                    assert!(!matches!(phase, Phase::Starting | Phase::Exited));
                }
                Verdict::Adopt(now) => {
                    assert!(matches!(phase, Phase::Running | Phase::Paused));
                    assert_eq!(seen, Seen::Answers { paused: now == Phase::Paused });
                }
                Verdict::Resume => {
                    assert!(matches!(
                        (phase, seen),
                        (Phase::Freezing | Phase::Forking, Seen::Answers { .. })
                    ));
                }
                Verdict::MarkExited => {
                    assert!(
                        phase != Phase::Exited && matches!(seen, Seen::Gone | Seen::Unresponsive)
                    )
                }
                Verdict::Keep => assert_eq!(phase, Phase::Exited),
                Verdict::Discard => {
                    assert_eq!(
                        phase,
                        Phase::Starting,
                        "a client was answered: it must find its VM"
                    );
                }
            }
        }
    }
}

/// A process that looks like a VMM from outside, because its command line names the VM. It ends
/// with the test.
struct Standin(Child, ProcessId);

impl Standin {
    fn start(config: &Config, id: VmId) -> Self {
        // `sleep` would refuse the option `--id`, which bash accepts. It waits for the idle pipe.
        let child = std::process::Command::new("bash")
            .args(["-c", "exec -a \"$1\" bash -c 'read line' x --id \"$0\"", &id.to_string()])
            .arg(config.vmm_name())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let id = ProcessId::of(child.id()).unwrap().unwrap();
        // The command line is right only once the second program runs.
        let cmdline = format!("/proc/{}/cmdline", child.id());
        let named = || {
            std::fs::read(&cmdline).unwrap().starts_with(config.vmm_name().as_os_str().as_bytes())
        };
        let began = std::time::Instant::now();
        while !named() {
            assert!(
                began.elapsed() < Duration::from_secs(10),
                "{cmdline}: the stand-in has not started"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        Self(child, id)
    }

    /// The adopting daemon also reaps this process, because it is a child of the test's process.
    fn alive(&self) -> bool {
        Process::open(self.1).unwrap().is_some_and(|process| process.is_alive().unwrap())
    }
}

impl Drop for Standin {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Answers `Status` on the control socket of a VM, once.
fn answer(config: &Config, id: VmId, paused: bool) {
    answer_commands(config, id, paused, &[Command::Status]);
}

/// Answers these commands on the control socket of a VM, each on a connection.
fn answer_commands(config: &Config, id: VmId, paused: bool, commands: &[Command]) {
    let listener = UnixListener::bind(config.vm(id).control()).unwrap();
    let commands: Vec<_> = commands.iter().map(|c| serde_json::to_value(c).unwrap()).collect();
    std::thread::spawn(move || {
        let status = serde_json::to_value(Command::Status).unwrap();
        for expected in commands {
            let (mut stream, _) = listener.accept().unwrap();
            let mut length = [0; 4];
            stream.read_exact(&mut length).unwrap();
            let mut json = vec![0; u32::from_le_bytes(length) as usize];
            stream.read_exact(&mut json).unwrap();
            let got: serde_json::Value = serde_json::from_slice(&json).unwrap();
            assert_eq!(got, expected);
            let shape = Shape { memory_bytes: 64 << 20, vcpus: 1, disks: 1, nets: 0 };
            let answer = if got == status {
                Answer::Status(Status { paused, ..Status::of(shape) })
            } else {
                Answer::Ok
            };
            let json = serde_json::to_vec(&answer).unwrap();
            let length = u32::try_from(json.len()).unwrap().to_le_bytes();
            stream.write_all(&[length.to_vec(), json].concat()).unwrap();
        }
    });
}

/// Writes the record of a VM of an earlier daemon.
fn recorded(
    config: &Config,
    name: &str,
    phase: Phase,
    ephemeral: bool,
    process: Option<ProcessId>,
) -> VmId {
    let facts = Facts { ephemeral, ..fixture::facts() };
    let vm = Registry::default()
        .reserve(config, Some(name.parse().unwrap()), facts, fixture::memory(), None)
        .unwrap();
    vm.update(|live| {
        live.phase = phase;
        live.process = process;
    });
    std::fs::create_dir_all(vm.dir.root()).unwrap();
    Record::of(&vm).write(&vm.dir).unwrap();
    vm.id
}

/// As [`recorded`], with a running VMM and changes by `change`. The record is written twice,
/// because it names the process and the process's command line names the VM.
fn recorded_with(
    config: &Config,
    name: &str,
    phase: Phase,
    ephemeral: bool,
    change: impl FnOnce(&mut Record),
) -> (VmId, Standin) {
    let id = recorded(config, name, phase, ephemeral, None);
    let standin = Standin::start(config, id);
    let dir = config.vm(id);
    let mut record = Record::read(&dir, id).unwrap();
    record.live.process = Some(standin.1);
    change(&mut record);
    record.write(&dir).unwrap();
    (id, standin)
}

#[tokio::test]
async fn a_new_daemon_finds_what_lives_and_sweeps_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let deadlines = Deadlines { control: Duration::from_millis(500), ..Deadlines::default() };
    let config = Config { deadlines, ..fixture::config(folder.path()) };
    std::fs::create_dir_all(config.vms()).unwrap();
    let mut slot = 0;
    let mut with_standin = |name: &str, phase, ephemeral| {
        slot += 1;
        recorded_with(&config, name, phase, ephemeral, |record| record.slot = slot)
    };
    let (lives, mut lives_process) = with_standin("lives", Phase::Running, false);
    answer(&config, lives, true);
    let (silent, silent_process) = with_standin("silent", Phase::Running, false);
    let (fleeting, fleeting_process) = with_standin("fleeting", Phase::Running, true);
    let gone = Some(ProcessId { pid: 1, start_ticks: u64::MAX });
    let dead = recorded(&config, "dead", Phase::Running, false, gone);
    std::fs::write(config.vm(dead).exit(), r#"{"reason":"panic","message":"it panicked"}"#)
        .unwrap();
    let lost = recorded(&config, "lost", Phase::Paused, false, gone);
    let exited = recorded(&config, "exited", Phase::Exited, false, None);
    let damaged = VmId::random();
    std::fs::create_dir_all(config.vm(damaged).root()).unwrap();
    std::fs::write(config.vm(damaged).record(), "{").unwrap();

    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = fixture::daemon(config.clone(), templates, fixture::nodes());
    let asked = adopt(&daemon).await.join_all().await;
    assert_eq!(asked.len(), 2);
    daemon.registry.find("silent").unwrap().wait_gone().await;

    let state = |id: VmId| {
        daemon
            .registry
            .find(&id.to_string())
            .map(|vm| (vm.phase(), vm.live().exit.map(|e| e.reason)))
            .ok()
    };
    assert_eq!(state(lives), Some((Phase::Paused, None)), "the VMM said that it is paused");
    assert!(lives_process.alive());
    assert_eq!(state(silent), Some((Phase::Exited, Some(ExitKind::Failed))));
    assert!(!silent_process.alive());
    assert_eq!(state(fleeting), None);
    assert!(!fleeting_process.alive());
    assert_eq!(state(dead), Some((Phase::Exited, Some(ExitKind::Panic))));
    assert_eq!(state(lost), Some((Phase::Exited, Some(ExitKind::Lost))));
    assert_eq!(state(exited), Some((Phase::Exited, None)));
    assert_eq!(state(damaged), None);
    let mut left: Vec<String> = std::fs::read_dir(config.vms())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    let mut expected: Vec<String> =
        [lives, silent, dead, lost, exited].map(|id| id.to_string()).into();
    expected.sort();
    assert_eq!(left, expected, "the folders without a VM are swept");

    // The end of an adopted VM is noticed and recorded, as that of any other.
    lives_process.0.kill().unwrap();
    let vm = daemon.registry.find("lives").unwrap();
    tokio::time::timeout(Duration::from_secs(5), vm.wait_gone()).await.unwrap();
    assert_eq!(state(lives), Some((Phase::Exited, Some(ExitKind::Lost))));
    for _ in 0..100 {
        if Record::read(&config.vm(lives), lives).unwrap().live.phase == Phase::Exited {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the end of an adopted VM was not written down");
}

#[tokio::test]
async fn a_vm_without_an_agent_goes_on_after_an_interrupted_fork() {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture::config(folder.path());
    std::fs::create_dir_all(config.vms()).unwrap();
    let (id, standin) = recorded_with(&config, "forked", Phase::Forking, false, |_| ());
    answer_commands(&config, id, true, &[Command::Status, Command::Resume]);
    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = fixture::daemon(config, templates, fixture::nodes());
    adopt(&daemon).await.join_all().await;
    let vm = daemon.registry.find("forked").unwrap();
    assert!(!vm.has_agent());
    assert_eq!((vm.phase(), vm.live().exit), (Phase::Running, None));
    assert!(standin.alive());
    assert!(vm.live().no_snapshot.is_some(), "its layers are not known");
}

/// A VMM that was taken over answers a command in this way.
#[derive(Debug, Clone, Copy)]
enum Hostile {
    Silent,
    /// One byte at a time of a message that never ends.
    Trickling,
    /// Another message than an answer.
    Babbling,
    Closing,
}

/// Serves the control socket of a VM in the test's runtime, whose time stands still while anything
/// else can happen.
fn hostile(config: &Config, id: VmId, how: Hostile) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::UnixListener::bind(config.vm(id).control()).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_u8().await.unwrap();
        match how {
            Hostile::Silent => std::future::pending().await,
            Hostile::Closing => {}
            Hostile::Babbling => stream.write_all(b"\x04\0\0\0nullnullnull").await.unwrap(),
            Hostile::Trickling => {
                stream.write_all(&60_000_u32.to_le_bytes()).await.unwrap();
                while stream.write_u8(b' ').await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    });
}

#[tokio::test(start_paused = true)]
async fn vmms_that_do_not_answer_delay_neither_the_daemon_nor_other_vms() {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture::config(folder.path());
    let Deadlines { control, save, .. } = config.deadlines;
    std::fs::create_dir_all(config.vms()).unwrap();
    let mut slot = 0;
    let mut left = |name: String, phase| {
        slot += 1;
        recorded_with(&config, &name, phase, false, |record| record.slot = slot)
    };
    let silent = |n: usize| if n.is_multiple_of(2) { Hostile::Silent } else { Hostile::Trickling };
    let slow: Vec<_> = (0..10).map(|n| left(format!("slow-{n}"), Phase::Running)).collect();
    slow.iter().zip(0..).for_each(|((id, _), n)| hostile(&config, *id, silent(n)));
    let saving = left("saving".into(), Phase::Freezing);
    hostile(&config, saving.0, Hostile::Silent);
    let bad: Vec<_> = (0..2).map(|n| left(format!("bad-{n}"), Phase::Paused)).collect();
    hostile(&config, bad[0].0, Hostile::Babbling);
    hostile(&config, bad[1].0, Hostile::Closing);
    let good: Vec<_> = (0..10).map(|n| left(format!("good-{n}"), Phase::Paused)).collect();
    good.iter().for_each(|(id, _)| answer(&config, *id, false));

    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = fixture::daemon(config.clone(), templates, fixture::nodes());
    let begun = tokio::time::Instant::now();
    let mut asking = adopt(&daemon).await;
    assert!(begun.elapsed() < control, "it waits for a VMM");
    let phase = |id: VmId| daemon.registry.find(&id.to_string()).unwrap().phase();
    assert!(slow.iter().all(|(id, _)| phase(*id) == Phase::Running), "listed as recorded");
    assert_eq!(phase(saving.0), Phase::Freezing);
    let mut ended = Vec::new();
    while let Some(id) = asking.join_next().await {
        ended.push((id.unwrap(), begun.elapsed()));
    }
    let place = |id: VmId| ended.iter().position(|(ended, _)| *ended == id).unwrap();
    let first_slow = slow.iter().map(|(id, _)| place(*id)).min().unwrap();
    for (id, process) in &good {
        assert!(place(*id) < first_slow, "it waits for another VM's VMM: {ended:?}");
        assert_eq!((phase(*id), process.alive()), (Phase::Running, true));
    }
    for (id, process) in slow.iter().chain(&bad).chain([&saving]) {
        let vm = daemon.registry.find(&id.to_string()).unwrap();
        vm.wait_gone().await;
        let exit = vm.live().exit.unwrap();
        assert_eq!((vm.phase(), exit.reason), (Phase::Exited, ExitKind::Failed));
        assert!(exit.message.contains("did not answer"), "{exit:?}");
        assert!(!process.alive());
    }
    // The deadlines are those of the whole answer. The clock goes on by itself when nothing else
    // can happen, so these are no times of this host.
    let after = |id: VmId| ended[place(id)].1;
    let second = Duration::from_secs(1);
    assert!(slow.iter().all(|(id, _)| (control..control + second).contains(&after(*id))));
    assert!(bad.iter().all(|(id, _)| after(*id) < control), "{ended:?}");
    assert!(after(saving.0) >= save && *ended.last().unwrap() == (saving.0, after(saving.0)));
}

#[tokio::test]
async fn a_request_waits_until_the_vmm_has_said_in_which_state_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture::config(folder.path());
    std::fs::create_dir_all(config.vms()).unwrap();
    // The daemon died between a pause and its record.
    let (id, _process) = recorded_with(&config, "paused", Phase::Running, false, |_| ());
    answer_commands(&config, id, true, &[Command::Status, Command::Resume]);
    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = fixture::daemon(config, templates, fixture::nodes());
    let mut asking = adopt(&daemon).await;
    let vm = daemon.registry.find("paused").unwrap();
    // The VM may be asked already, but no task has read an answer: this test has one thread.
    crate::ops::power::unpause(&daemon, &vm).await.unwrap();
    assert_eq!(vm.phase(), Phase::Running);
    asking.join_next().await.unwrap().unwrap();
    assert_eq!(vm.phase(), Phase::Running);
}

#[tokio::test]
async fn layers_that_clones_depend_on_stay_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let deadlines = Deadlines { control: Duration::from_millis(500), ..Deadlines::default() };
    let config = Config { deadlines, ..fixture::config(folder.path()) };
    std::fs::create_dir_all(config.vms()).unwrap();
    let store = Store::open(&config.state).unwrap();
    fixture::snapshot(&store, "default", "s", 0..1);
    let image = store.image(&"debian".parse().unwrap()).unwrap().reference();
    // A VM's layers: frozen ones, the lowest first, and the writable one.
    let layers = |vm: VmId, frozen: usize| -> Vec<VmLayer> {
        let mut layers = vec![store.create_vm_layer(vm, 0).unwrap().0];
        for _ in 0..frozen {
            let mut freezing = store.freezing();
            layers.push(freezing.freeze(layers.last().unwrap()).unwrap().next);
            freezing.keep();
        }
        layers
    };
    let disk = |layers: Vec<ChainLayer>, writable| {
        vec![Disk { image: image.clone(), size_bytes: 8 * 4096, layers, writable: Some(writable) }]
    };
    let gone = VmId::random();
    let of_gone = layers(gone, 2);
    // A clone uses its layers; nothing else of it is kept.
    std::fs::create_dir_all(config.vm(gone).path()).unwrap();
    // Its lowest layer was released before the daemon ended; a clone uses it.
    let mut of_parent = Vec::new();
    let (parent, _parent_process) =
        recorded_with(&config, "parent", Phase::Running, false, |record| {
            of_parent = layers(record.id, 2);
            record.live.disks = disk(vec![ChainLayer::Frozen(of_parent[1])], of_parent[2]);
        });
    let (child, _child_process) =
        recorded_with(&config, "child", Phase::Running, false, |record| {
            record.slot += 1;
            let shared = [of_gone[1], of_parent[0]].map(ChainLayer::Shared);
            record.live.disks = disk(shared.into(), layers(record.id, 0)[0]);
        });
    answer(&config, parent, false);
    answer(&config, child, false);
    drop(store);

    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = fixture::daemon(config.clone(), templates, fixture::nodes());
    adopt(&daemon).await.join_all().await;
    let there = |vm: VmId| -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(daemon.templates.vms_folder().join(vm.to_string()))
        else {
            return Vec::new();
        };
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let vm = daemon.registry.find("child").unwrap();
    assert_eq!((vm.live().no_snapshot, vm.phase()), (None, Phase::Running));
    let (lowest, own) =
        (["disk0.0.data", "disk0.0.map"], ["disk0.1.data", "disk0.1.map", "disk0.2.data"]);
    assert_eq!(there(gone), ["disk0.1.data", "disk0.1.map"]);
    assert!(!config.vm(gone).path().exists());
    assert_eq!(there(parent), [&lowest[..], &own].concat());
    assert_eq!(sweep::find(&daemon).await.unwrap(), []);
    remove::remove(&daemon, &vm).await.unwrap();
    assert_eq!((there(gone), there(child)), (Vec::<String>::new(), Vec::new()));
    assert_eq!(there(parent), own);
    assert!(!daemon.templates.vms_folder().join(gone.to_string()).exists());
}
