use super::*;
use crate::base::config::{Config, Deadlines};
use crate::base::progress::ProgressSender;
use crate::fixture;
use crate::model::deadline::Deadline;
use crate::ops::standin::{Standin, answer, answer_commands, message, recorded, recorded_with};
use crate::templates::cache::TemplateCache;
use crate::templates::pagers::Pagers;
use dayfly_api::types::{ErrorCode, ExitKind, SnapshotRequest};
use dayfly_host::process::ProcessId;
use dayfly_store::{ChainLayer, Store, VmLayer};

/// Only a hang takes this long.
const WITHIN: Duration = Duration::from_secs(120);

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
                decide(phase, Stays::WithItsClient, seen),
                Verdict::Discard,
                "its client is gone: {phase:?} {seen:?}"
            );
            let verdict = decide(phase, Stays::UntilRemoved, seen);
            let ended = phase == Phase::Exited || seen == Seen::Gone;
            assert_eq!(
                decide(phase, Stays::UntilItsEnd, seen),
                if ended { Verdict::Discard } else { verdict },
                "{phase:?} {seen:?}"
            );
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
                    assert!(phase != Phase::Exited && seen == Seen::Gone)
                }
                Verdict::Wait => assert_eq!(seen, Seen::Unresponsive, "and it is not killed"),
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

#[tokio::test]
async fn a_new_daemon_finds_what_lives_and_sweeps_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture::config(folder.path());
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
    let unstarted = VmId::random();
    let unstarted_process = Standin::start(&config, unstarted);
    std::fs::create_dir_all(config.vm(unstarted).root()).unwrap();

    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = fixture::daemon(config.clone(), templates, fixture::nodes());
    let mut asking = adopt(&daemon).await.unwrap();
    assert_eq!(asking.len(), 2);
    assert_eq!(asking.join_next().await.unwrap().unwrap(), lives);

    let state = |id: VmId| {
        daemon
            .registry
            .find(&id.to_string())
            .map(|vm| (vm.phase(), vm.live().exit.map(|e| e.reason)))
            .ok()
    };
    assert_eq!(state(lives), Some((Phase::Paused, None)), "the VMM said that it is paused");
    assert!(lives_process.alive());
    assert_eq!(state(silent), Some((Phase::Running, None)), "as recorded, until its VMM answers");
    assert!(silent_process.alive());
    assert_eq!(state(fleeting), None);
    assert!(!fleeting_process.alive());
    assert_eq!(state(dead), Some((Phase::Exited, Some(ExitKind::Panic))));
    assert_eq!(state(lost), Some((Phase::Exited, Some(ExitKind::Lost))));
    assert_eq!(state(exited), Some((Phase::Exited, None)));
    assert_eq!(state(damaged), Some((Phase::Exited, Some(ExitKind::Lost))), "it may be evidence");
    assert_eq!(state(unstarted), None);
    let mut left: Vec<String> = std::fs::read_dir(config.vms())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    let mut expected: Vec<String> =
        [lives, silent, dead, lost, exited, damaged].map(|id| id.to_string()).into();
    expected.sort();
    assert_eq!(left, expected, "the folders without a VM are swept");
    assert!(!unstarted_process.alive(), "no client knows it");

    // The end of an adopted VM is noticed and recorded, as that of any other.
    lives_process.0.kill().unwrap();
    let vm = daemon.registry.find("lives").unwrap();
    tokio::time::timeout(WITHIN, vm.wait_gone()).await.unwrap();
    assert_eq!(state(lives), Some((Phase::Exited, Some(ExitKind::Lost))));
    let begun = Instant::now();
    while Record::read(&config.vm(lives), lives).unwrap().live.phase != Phase::Exited {
        assert!(begun.elapsed() < WITHIN, "the end of an adopted VM was not written down");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_deadline_outlives_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture::config(folder.path());
    std::fs::create_dir_all(config.vms()).unwrap();
    let deadline = |boot_us| Some(Deadline { boot_us, unix_ms: 7, ttl_ms: None });
    // It passed while no daemon was there.
    let (late, late_process) =
        recorded_with(&config, "late", Phase::Running, false, |r| r.live.deadline = deadline(1));
    let (early, early_process) = recorded_with(&config, "early", Phase::Running, false, |r| {
        (r.slot, r.live.deadline) = (1, deadline(u64::MAX));
    });
    answer(&config, early, false);
    // The daemon before ended after it had killed the VMM.
    let gone = |r: &mut Record| {
        r.live.process = Some(ProcessId { pid: 1, start_ticks: u64::MAX });
        (r.slot, r.live.expired) = (2, true);
    };
    let (expired, _) = recorded_with(&config, "expired", Phase::Running, false, gone);
    let (removed, _) = recorded_with(&config, "removed", Phase::Running, false, |r| {
        gone(r);
        (r.slot, r.facts.auto_remove) = (3, true);
    });
    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = fixture::daemon(config.clone(), templates, fixture::nodes());
    let _asking = adopt(&daemon).await.unwrap();
    let vm = daemon.registry.find("late").unwrap();
    tokio::time::timeout(WITHIN, vm.wait_gone()).await.unwrap();
    assert_eq!(vm.live().exit.map(|exit| exit.reason), Some(ExitKind::Ttl));
    assert!(!late_process.alive() && early_process.alive());
    assert!(!daemon.registry.find("early").unwrap().live().expired);
    let exit = daemon.registry.find("expired").unwrap().live().exit.unwrap();
    assert_eq!(exit.reason, ExitKind::Ttl);
    assert!(daemon.registry.find("removed").is_err());
    assert!(!config.vm(removed).path().exists() && config.vm(expired).path().exists());
    assert_eq!(vm.id, late);
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
    adopt(&daemon).await.unwrap().join_all().await;
    let vm = daemon.registry.find("forked").unwrap();
    assert!(!vm.has_agent());
    assert_eq!((vm.phase(), vm.live().exit), (Phase::Running, None));
    assert!(standin.alive());
    assert_eq!(vm.live().no_snapshot, None, "it has no disks, so its layers are known");
}

/// A VMM answers a command in this way; all but the first were taken over.
#[derive(Debug, Clone, Copy)]
enum Answering {
    /// By the status of a running VM.
    Honest,
    Silent,
    /// One byte at a time of a message that never ends.
    Trickling,
    /// Another message than an answer.
    Babbling,
    Closing,
}

/// Serves the control socket of a VM in the test's runtime, whose time stands still while anything
/// else can happen.
fn answering(config: &Config, id: VmId, how: Answering) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::UnixListener::bind(config.vm(id).control()).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let length = stream.read_u32_le().await.unwrap();
        stream.read_exact(&mut vec![0; length as usize]).await.unwrap();
        match how {
            Answering::Honest => stream.write_all(&message(&Command::Status, false)).await.unwrap(),
            Answering::Silent => std::future::pending().await,
            Answering::Closing => {}
            Answering::Babbling => stream.write_all(b"\x04\0\0\0nullnullnull").await.unwrap(),
            Answering::Trickling => {
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
    let deadlines = Deadlines::default();
    let config = Config { deadlines, ..fixture::config(folder.path()) };
    std::fs::create_dir_all(config.vms()).unwrap();
    let mut slot = 0;
    let mut left = |name: String, phase| {
        slot += 1;
        recorded_with(&config, &name, phase, false, |record| record.slot = slot)
    };
    let silent =
        |n: usize| if n.is_multiple_of(2) { Answering::Silent } else { Answering::Trickling };
    let slow: Vec<_> = (0..10).map(|n| left(format!("slow-{n}"), Phase::Running)).collect();
    slow.iter().zip(0..).for_each(|((id, _), n)| answering(&config, *id, silent(n)));
    let saving = left("saving".into(), Phase::Freezing);
    answering(&config, saving.0, Answering::Silent);
    let bad: Vec<_> = (0..2).map(|n| left(format!("bad-{n}"), Phase::Paused)).collect();
    answering(&config, bad[0].0, Answering::Babbling);
    answering(&config, bad[1].0, Answering::Closing);
    let good: Vec<_> = (0..10).map(|n| left(format!("good-{n}"), Phase::Paused)).collect();
    good.iter().for_each(|(id, _)| answering(&config, *id, Answering::Honest));

    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(&config));
    let daemon = fixture::daemon(config.clone(), templates, fixture::nodes());
    let begun = tokio::time::Instant::now();
    let mut asking = adopt(&daemon).await.unwrap();
    assert!(begun.elapsed() < deadlines.control, "it waits for a VMM");
    let phase = |id: VmId| daemon.registry.find(&id.to_string()).unwrap().phase();
    assert!(slow.iter().all(|(id, _)| phase(*id) == Phase::Running), "listed as recorded");
    assert_eq!(phase(saving.0), Phase::Freezing);
    let mut adopted = Vec::new();
    while adopted.len() < good.len() {
        adopted.push(asking.join_next().await.unwrap().unwrap());
    }
    for (id, process) in &good {
        assert!(adopted.contains(id), "another VM's VMM delays it");
        assert_eq!((phase(*id), process.alive()), (Phase::Running, true));
    }
    for (id, process) in slow.iter().chain(&bad).chain([&saving]) {
        let vm = daemon.registry.find(&id.to_string()).unwrap();
        let why = vm.waiting().wait_for(Option::is_some).await.unwrap().clone().unwrap();
        let recorded =
            if bad.iter().any(|(bad, _)| bad == id) { Phase::Paused } else { phase(*id) };
        assert_eq!((vm.phase(), vm.live().exit, process.alive()), (recorded, None, true), "{why}");
        assert!(vm.shown().problem.unwrap().contains("waiting for its VMM"));
        // It is asked again while requests for it are refused at once.
        let refused = crate::ops::power::pause(&daemon, &vm).await.unwrap_err();
        assert_eq!(refused.0.code, ErrorCode::State);
        assert!(refused.0.message.contains("try later"), "{refused}");
        let progress = ProgressSender::without_receiver();
        let request = SnapshotRequest { name: "s".parse().unwrap() };
        let refused = crate::ops::snapshot::snapshot(daemon.clone(), vm.clone(), request, progress);
        assert_eq!(refused.await.unwrap_err().0.code, ErrorCode::State);
    }
    // The kernel ends processes in its own time.
    tokio::time::resume();
    for (id, process) in slow.iter().chain(&bad).chain([&saving]) {
        let vm = daemon.registry.find(&id.to_string()).unwrap();
        remove::remove(&daemon, &vm).await.unwrap();
        vm.wait_gone().await;
        assert!(!process.alive());
    }
    while let Some(ended) = asking.join_next().await {
        assert!(!adopted.contains(&ended.unwrap()));
    }
    assert_eq!(daemon.registry.len(), good.len());
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
    let mut asking = adopt(&daemon).await.unwrap();
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
    let config = fixture::config(folder.path());
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
    adopt(&daemon).await.unwrap().join_all().await;
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
