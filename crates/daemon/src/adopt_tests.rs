use super::*;
use crate::config::{Config, Deadlines};
use crate::depot::Depot;
use crate::fixture;
use crate::pagers::Pagers;
use crate::vm::Facts;
use crate::vm::registry::Registry;
use dayfly_host::process::ProcessId;
use dayfly_store::{ChainLayer, Digest, KernelRef, Store, VmLayer};
use dayfly_vmm::config::Shape;
use dayfly_vmm::control::Status;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::process::{Child, Stdio};

const PHASES: [Phase; 6] =
    [Phase::Starting, Phase::Running, Phase::Paused, Phase::Freezing, Phase::Forking, Phase::Exited];
const SEEN: [Seen; 4] =
    [Seen::Gone, Seen::Mute, Seen::Answers { paused: false }, Seen::Answers { paused: true }];

#[test]
fn every_case_is_decided_as_promised() {
    for phase in PHASES {
        for seen in SEEN {
            assert_eq!(decide(phase, true, seen), Verdict::Discard, "its client is gone: {phase:?} {seen:?}");
            let verdict = decide(phase, false, seen);
            match verdict {
                Verdict::Adopt(now) => {
                    assert!(matches!(phase, Phase::Running | Phase::Paused));
                    assert_eq!(seen, Seen::Answers { paused: now == Phase::Paused });
                }
                Verdict::Thaw => {
                    assert!(matches!(
                        (phase, seen),
                        (Phase::Freezing | Phase::Forking, Seen::Answers { .. })
                    ));
                }
                Verdict::Bury => assert!(phase != Phase::Exited && matches!(seen, Seen::Gone | Seen::Mute)),
                Verdict::Keep => assert_eq!(phase, Phase::Exited),
                Verdict::Discard => {
                    assert_eq!(phase, Phase::Starting, "a client was answered: it must find its VM");
                }
            }
        }
    }
}

/// A process that looks like a VMM from outside: its command line names the VM. It ends with the test.
struct Standin(Child, ProcessId);

impl Standin {
    fn start(config: &Config, id: VmId) -> Self {
        // `sleep` would refuse the option; a shell that reads from a pipe nobody writes to does not.
        let child = std::process::Command::new("bash")
            .args(["-c", "exec -a \"$1\" bash -c 'read line' x --id \"$0\"", &id.to_string()])
            .arg(config.vmm_name())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let id = ProcessId::of(child.id()).unwrap().unwrap();
        // It is one only when the second program runs.
        let cmdline = format!("/proc/{}/cmdline", child.id());
        let named = || std::fs::read(&cmdline).unwrap().starts_with(config.vmm_name().as_os_str().as_bytes());
        let began = std::time::Instant::now();
        while !named() {
            assert!(began.elapsed() < Duration::from_secs(10), "{cmdline}: the stand-in has not started");
            std::thread::sleep(Duration::from_millis(1));
        }
        Self(child, id)
    }

    /// Whoever adopts it reaps it too, as it is a child of the same process here.
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
    let listener = UnixListener::bind(config.vm(id).control()).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut json = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut json).unwrap();
        let shape = Shape { memory_bytes: 64 << 20, vcpus: 1, disks: 1, nets: 0 };
        let status = Status { paused, whole: true, shape, phases: Vec::new() };
        let json = serde_json::to_vec(&Answer::Status(status)).unwrap();
        let length = u32::try_from(json.len()).unwrap().to_le_bytes();
        stream.write_all(&[length.to_vec(), json].concat()).unwrap();
    });
}

/// Writes the record of a VM that a daemon before knew.
fn recorded(config: &Config, name: &str, phase: Phase, ephemeral: bool, process: Option<ProcessId>) -> VmId {
    let facts = Facts {
        snapshot: None,
        fork: crate::vm::ForkFacts::default(),
        image: "i".parse().unwrap(),
        kernel: KernelRef { name: "k".parse().unwrap(), release: "6.12".into(), digest: Digest::of(b"k") },
        vcpus: 1,
        memory_bytes: 64 << 20,
        nets: 0,
        network: Default::default(),
        created_unix_ms: 0,
        config: Default::default(),
        ephemeral,
        labels: Default::default(),
    };
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

/// The same of one whose VMM runs, with what `change` makes of it. Records name their process, whose command line names their VM: they are written twice.
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
    let with_standin = |name: &str, phase, ephemeral| recorded_with(&config, name, phase, ephemeral, |_| ());
    let (lives, mut lives_process) = with_standin("lives", Phase::Running, false);
    answer(&config, lives, true);
    let (mute, mute_process) = with_standin("mute", Phase::Running, false);
    let (fleeting, fleeting_process) = with_standin("fleeting", Phase::Running, true);
    let dead =
        recorded(&config, "dead", Phase::Running, false, Some(ProcessId { pid: 1, start_ticks: u64::MAX }));
    std::fs::write(config.vm(dead).exit(), r#"{"reason":"panic","message":"it panicked"}"#).unwrap();
    let lost =
        recorded(&config, "lost", Phase::Paused, false, Some(ProcessId { pid: 1, start_ticks: u64::MAX }));
    let exited = recorded(&config, "exited", Phase::Exited, false, None);
    let damaged = VmId::random();
    std::fs::create_dir_all(config.vm(damaged).root()).unwrap();
    std::fs::write(config.vm(damaged).record(), "{").unwrap();

    let depot = Depot::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = Arc::new(Daemon::new(config.clone(), depot, fixture::nodes()).unwrap());
    adopt(&daemon).await;

    let state = |id: VmId| {
        daemon.registry.find(&id.to_string()).map(|vm| (vm.phase(), vm.live().exit.map(|e| e.reason))).ok()
    };
    assert_eq!(state(lives), Some((Phase::Paused, None)), "the VMM said that it is paused");
    assert!(lives_process.alive());
    assert_eq!(state(mute), Some((Phase::Exited, Some(ExitKind::Failed))));
    assert!(!mute_process.alive());
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
    let mut expected: Vec<String> = [lives, mute, dead, lost, exited].map(|id| id.to_string()).into();
    expected.sort();
    assert_eq!(left, expected, "the folders of nobody are swept");

    // An adopted VM's end is noticed as that of any other, and written down.
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
async fn layers_that_clones_stand_on_stay_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let deadlines = Deadlines { control: Duration::from_millis(500), ..Deadlines::default() };
    let config = Config { deadlines, ..fixture::config(folder.path()) };
    std::fs::create_dir_all(config.vms()).unwrap();
    let store = Store::open(&config.state).unwrap();
    fixture::snapshot(&store, "default", "s", 0..1);
    let image = store.image(&"debian".parse().unwrap()).unwrap().reference();
    // A VM's layers: frozen ones, the lowest first, and the one that it writes.
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
    // That others stand on its layers keeps nothing else of it.
    std::fs::create_dir_all(config.vm(gone).path()).unwrap();
    // Its lowest was let go when a daemon ended, as a clone stood on it.
    let mut of_parent = Vec::new();
    let (parent, _parent_process) = recorded_with(&config, "parent", Phase::Running, false, |record| {
        of_parent = layers(record.id, 2);
        record.live.disks = disk(vec![ChainLayer::Frozen(of_parent[1])], of_parent[2]);
    });
    let (child, _child_process) = recorded_with(&config, "child", Phase::Running, false, |record| {
        record.slot += 1;
        let borrowed = [of_gone[1], of_parent[0]].map(ChainLayer::Borrowed);
        record.live.disks = disk(borrowed.into(), layers(record.id, 0)[0]);
    });
    answer(&config, parent, false);
    answer(&config, child, false);
    drop(store);

    let depot = Depot::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = Arc::new(Daemon::new(config.clone(), depot, fixture::nodes()).unwrap());
    adopt(&daemon).await;
    let there = |vm: VmId| -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(daemon.depot.vms_folder().join(vm.to_string())) else {
            return Vec::new();
        };
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let vm = daemon.registry.find("child").unwrap();
    assert_eq!((vm.live().no_snapshot, vm.phase()), (None, Phase::Running));
    let (lowest, own) = (["disk0.0.data", "disk0.0.map"], ["disk0.1.data", "disk0.1.map", "disk0.2.data"]);
    assert_eq!(there(gone), ["disk0.1.data", "disk0.1.map"]);
    assert!(!config.vm(gone).path().exists());
    assert_eq!(there(parent), [&lowest[..], &own].concat());
    assert_eq!(sweep::find(&daemon).await.unwrap(), []);
    death::remove(&daemon, &vm).await.unwrap();
    assert_eq!((there(gone), there(child)), (Vec::<String>::new(), Vec::new()));
    assert_eq!(there(parent), own);
    assert!(!daemon.depot.vms_folder().join(gone.to_string()).exists());
}
