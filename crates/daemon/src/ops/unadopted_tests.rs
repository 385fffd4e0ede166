use super::*;
use crate::base::config::Config;
use crate::base::progress::ProgressSender;
use crate::fixture;
use crate::ops::adopt::adopt;
use crate::ops::standin::{Standin, recorded};
use crate::ops::{power, snapshot, sweep};
use crate::templates::cache::TemplateCache;
use crate::templates::pagers::Pagers;
use crate::vm::record::{self, MAX_BYTES, Record};
use dayfly_api::types::{ErrorCode, SnapshotRequest, VmState};
use dayfly_store::Store;
use std::path::Path;
use std::process::Stdio;

/// What is wrong with a record, and what the reason must mention.
const WRONG: [(&str, &str); 5] = [
    ("not-json", "EOF"),
    ("too-long", "1048576"),
    ("newer", "version: expected 1 to 2, got 77"),
    ("other-id", "id: expected"),
    ("no-file", "directory"),
];

/// Writes a VM's record, and then what is wrong with it.
fn damaged(config: &Config, wrong: &str) -> VmId {
    let id = recorded(config, wrong, Phase::Running, false, None);
    let path = config.vm(id).record();
    let text = std::fs::read_to_string(&path).unwrap();
    match wrong {
        "not-json" => std::fs::write(&path, "{"),
        "too-long" => {
            std::fs::write(&path, text + &" ".repeat(usize::try_from(MAX_BYTES).unwrap()))
        }
        "newer" => std::fs::write(&path, text.replace("\"version\":1", "\"version\":77")),
        "other-id" => std::fs::write(&path, text.replace(&id.to_string(), "000000000000")),
        _ => std::fs::remove_file(&path).and_then(|()| std::fs::create_dir(&path)),
    }
    .unwrap();
    id
}

fn daemon(config: &Config) -> Arc<Daemon> {
    let templates = TemplateCache::new(Store::open(&config.state).unwrap(), Pagers::new(config));
    fixture::daemon(config.clone(), templates, fixture::nodes())
}

fn entries(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_living_vm_with_an_unreadable_record_is_kept_until_it_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture::config(folder.path());
    std::fs::create_dir_all(config.vms()).unwrap();
    let store = Store::open(&config.state).unwrap();
    fixture::snapshot(&store, "default", "s", 0..1);
    store.remove_snapshot(&"s".parse().unwrap()).unwrap();
    // A layer of a VM that is gone, which one of the VMs may use.
    let gone = VmId::random();
    store.create_vm_layer(gone, 0).unwrap();
    let vms: Vec<_> = (1..)
        .zip(WRONG)
        .map(|(n, (wrong, why))| {
            let id = damaged(&config, wrong);
            store.create_vm_layer(id, 0).unwrap();
            let uid = config.first_uid + n;
            (id, wrong, why, Standin::start_as(&config, id, uid, Stdio::null()))
        })
        .collect();
    drop(store);
    let layers = config.state.join("layers");
    assert_eq!(entries(&layers).len(), 1);

    let daemon = daemon(&config);
    assert!(adopt(&daemon).await.unwrap().is_empty(), "no VMM is asked");
    assert_eq!(sweep::find(&daemon).await.unwrap(), []);
    for (id, wrong, why, process) in &vms {
        let vm = daemon.registry.find(&id.to_string()).unwrap();
        let shown = vm.shown();
        let problem = shown.problem.unwrap();
        assert_eq!((shown.state, process.alive()), (VmState::Unknown, true), "{wrong}");
        assert!(problem.contains(why) && problem.contains("vm.json"), "{wrong}: {problem}");
        let named = matches!(*wrong, "too-long" | "newer");
        assert_eq!(vm.name.as_str(), if named { *wrong } else { vm.name.as_str() });
        assert_eq!(named, vm.name.as_str() != id.to_string(), "{}", vm.name);
        let before = std::fs::read(vm.dir.record()).ok();
        record::note(&daemon.registry, &vm).await;
        assert_eq!(std::fs::read(vm.dir.record()).ok(), before, "for a daemon that can read it");
        let refused = power::pause(&daemon, &vm).await.unwrap_err();
        assert_eq!(refused.0.code, ErrorCode::State, "{refused}");
        let request = SnapshotRequest { name: "t".parse().unwrap() };
        let progress = ProgressSender::without_receiver();
        let refused = snapshot::snapshot(daemon.clone(), vm, request, progress).await.unwrap_err();
        assert!(refused.0.message.contains("record"), "{refused}");
    }
    // Their users are not given to others: slot 0 and those above are free.
    let reserved = || {
        let memory = fixture::memory();
        daemon.registry.reserve(&daemon.config, None, fixture::facts(), memory, None).unwrap().slot
    };
    assert_eq!([reserved(), reserved()], [0, 6]);
    // Their layers are not known, so all stay.
    daemon.templates.collect();
    assert_eq!((entries(&layers).len(), entries(&daemon.templates.vms_folder()).len()), (1, 6));
    for (id, wrong, _, process) in &vms {
        let vm = daemon.registry.find(&id.to_string()).unwrap();
        remove::remove(&daemon, &vm).await.unwrap();
        vm.wait_gone().await;
        assert!(!process.alive() && !vm.dir.path().exists(), "{wrong}");
    }
    // Each may have used the layers of the others, so those were deleted with the last of them.
    assert_eq!(entries(&daemon.templates.vms_folder()), [gone.to_string()]);
    sweep::sweep(&daemon).await.unwrap();
    assert_eq!(entries(&daemon.templates.vms_folder()), [""; 0]);
    daemon.templates.collect();
    assert_eq!(entries(&layers), [""; 0], "after the last of them, gc works again");
}

#[tokio::test]
async fn a_dead_vm_with_an_unreadable_record_is_listed_as_lost_and_keeps_its_disk() {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture::config(folder.path());
    std::fs::create_dir_all(config.vms()).unwrap();
    let store = Store::open(&config.state).unwrap();
    let vms = WRONG.map(|(wrong, why)| {
        let id = damaged(&config, wrong);
        store.create_vm_layer(id, 0).unwrap();
        (id, why)
    });
    drop(store);
    let daemon = daemon(&config);
    assert!(adopt(&daemon).await.unwrap().is_empty());
    assert_eq!(sweep::find(&daemon).await.unwrap(), []);
    for (id, why) in vms {
        assert!(daemon.templates.store().every_layer_is_pinned(), "its layers are not known");
        let vm = daemon.registry.find(&id.to_string()).unwrap();
        let exit = vm.live().exit.unwrap();
        assert_eq!((vm.phase(), exit.reason), (Phase::Exited, ExitKind::Lost));
        assert!(exit.message.contains(why), "{}", exit.message);
        let layers = daemon.templates.vms_folder().join(id.to_string());
        assert!(layers.exists() && vm.dir.path().exists());
        remove::remove(&daemon, &vm).await.unwrap();
        assert!(!vm.dir.path().exists());
    }
    // Each may have used the layers of the others, so those were deleted with the last of them.
    assert_eq!(entries(&daemon.templates.vms_folder()), [""; 0]);
    assert!(!daemon.templates.store().every_layer_is_pinned());
}

#[tokio::test]
async fn two_records_with_one_name_or_slot_end_no_vm() {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture::config(folder.path());
    std::fs::create_dir_all(config.vms()).unwrap();
    let vms: Vec<_> = (0..2)
        .map(|_| {
            let id = recorded(&config, "same", Phase::Running, false, None);
            let process = Standin::start(&config, id);
            let mut record = Record::read(&config.vm(id), id).unwrap();
            record.live.process = Some(process.1);
            record.write(&config.vm(id)).unwrap();
            (id, process)
        })
        .collect();
    let daemon = daemon(&config);
    assert_eq!(adopt(&daemon).await.unwrap().len(), 1);
    let states: Vec<_> = vms
        .iter()
        .map(|(id, process)| {
            assert!(process.alive());
            daemon.registry.find(&id.to_string()).unwrap().phase()
        })
        .collect();
    assert!(states.contains(&Phase::Unknown) && states.contains(&Phase::Running), "{states:?}");
}

#[tokio::test]
async fn a_run_folder_that_cannot_be_listed_ends_the_start_and_no_vm() {
    let folder = tempfile::tempdir().unwrap();
    let config = fixture::config(folder.path());
    std::fs::create_dir_all(config.vms()).unwrap();
    let daemon = daemon(&config);
    let process = Standin::start(&config, VmId::random());
    std::fs::remove_dir(config.vms()).unwrap();
    std::fs::write(config.vms(), "").unwrap();
    assert!(adopt(&daemon).await.unwrap_err().to_string().contains("vms"));
    assert!(process.alive());
}
