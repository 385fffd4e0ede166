use super::*;
use crate::base::caller::Caller;
use crate::base::config::Config;
use crate::fixture;
use crate::model::deadline::Deadline;
use crate::model::disk::Disk;
use crate::model::facts::GuestIdentity;
use crate::model::request_key::RequestKey;
use crate::model::state::Phase;
use crate::model::volumes::{VolumeFacts, VolumeState};
use crate::vm::registry::Registry;
use dayfly_api::types::VolumeSource;
use dayfly_host::process::ProcessId;
use dayfly_store::{ChainLayer, Digest, ImageRef, KernelRef, VmLayer};

fn vm(run: &Path) -> std::sync::Arc<Vm> {
    let config = Config { run: run.into(), ..fixture::config(run) };
    let facts = Facts {
        snapshot: Some("s".parse().unwrap()),
        ancestors: Vec::new(),
        fork: crate::model::facts::ForkFacts::default(),
        image: "i".parse().unwrap(),
        kernel: KernelRef {
            name: "k".parse().unwrap(),
            release: "6.12".into(),
            digest: Digest::of(b"k"),
        },
        config: Default::default(),
        vcpus: 4,
        max_vcpus: 0,
        cpu_model: dayfly_units::CpuModel::V2,
        memory_bytes: 1 << 30,
        nets: 0,
        network: Default::default(),
        created_unix_ms: 7,
        init: None,
        ephemeral: true,
        auto_remove: true,
        labels: [("a".to_owned(), "b".to_owned())].into(),
        volumes: vec![VolumeFacts {
            source: VolumeSource::Path("/src".into()),
            target: "/work".into(),
            read_only: true,
            owner: Caller { uid: 5, gid: 6, groups: vec![7] },
        }],
        limits: dayfly_api::types::VmLimits { cpu_weight: Some(5), ..Default::default() },
        request: Some(RequestKey { key: "k".into(), request: Digest::of(b"r") }),
    };
    let vm = Registry::default().reserve(&config, None, facts, fixture::memory(), None).unwrap();
    let id = vm.id;
    vm.update(|live| {
        live.phase = Phase::Paused;
        let machine_id = "0".repeat(32);
        live.identity = Some(GuestIdentity { hostname: "h".into(), machine_id });
        let layer = |number| VmLayer { vm: id, disk: 0, number };
        live.disks = vec![Disk {
            image: ImageRef { name: "i".parse().unwrap(), digest: Digest::of(b"i") },
            size_bytes: 1 << 30,
            layers: vec![ChainLayer::Frozen(layer(0))],
            writable: Some(layer(1)),
        }];
        live.no_snapshot = Some("x".into());
        live.deadline = Some(Deadline { boot_us: 5, unix_ms: 6, ttl_ms: Some(7) });
        (live.expired, live.program) = (true, Some("7".into()));
        let server = Some(ProcessId { pid: 8, start_ticks: 9 });
        live.volumes = vec![VolumeState { server, problem: Some("p".into()) }];
    });
    std::fs::create_dir_all(vm.dir.path()).unwrap();
    vm
}

#[test]
fn a_record_reads_back_whole() {
    let run = tempfile::tempdir().unwrap();
    let vm = vm(run.path());
    let record = Record::of(&vm);
    record.write(&vm.dir).unwrap();
    let back = Record::read(&vm.dir, vm.id).unwrap();
    assert_eq!(back, record);
    let again = back.into_vm(vm.dir.clone());
    assert_eq!((again.live(), again.shown()), (vm.live(), vm.shown()));
    assert_eq!(std::fs::read_dir(vm.dir.path()).unwrap().count(), 1, "nothing beside it stays");
}

#[test]
fn a_vmm_of_an_older_daemon_gets_no_read_only_layers_and_wrote_no_zeroes() {
    let run = tempfile::tempdir().unwrap();
    let vm = vm(run.path());
    assert!(vm.live().read_only_layers && vm.live().zeroes_written);
    let mut old = serde_json::to_value(Record::of(&vm)).unwrap();
    for field in ["read_only_layers", "zeroes_written"] {
        old["live"].as_object_mut().unwrap().remove(field).unwrap();
    }
    std::fs::write(vm.dir.record(), old.to_string()).unwrap();
    let adopted = Record::read(&vm.dir, vm.id).unwrap().into_vm(vm.dir.clone());
    assert!(!adopted.live().read_only_layers && !adopted.live().zeroes_written);
}

#[test]
fn a_vm_that_an_older_daemon_named_as_a_host_of_the_internet_lives_on() {
    let run = tempfile::tempdir().unwrap();
    let vm = vm(run.path());
    let mut record = Record::of(&vm);
    record.name = "pypi.org".parse().unwrap();
    record.write(&vm.dir).unwrap();
    let old = Record::read(&vm.dir, vm.id).unwrap().into_vm(vm.dir.clone());
    let registry = Registry::default();
    let adopted = registry.adopt(old).unwrap();
    assert_eq!((adopted.name.as_str(), registry.find("pypi.org").unwrap().id), ("pypi.org", vm.id));
    // `ps` and programs parse it too.
    let shown = serde_json::to_value(adopted.shown()).unwrap();
    assert!(serde_json::from_value::<dayfly_api::types::Vm>(shown).is_ok());
}

#[test]
fn an_adopted_vm_keeps_the_user_of_its_vmm() {
    let run = tempfile::tempdir().unwrap();
    let vm = vm(run.path());
    let mut record = Record::of(&vm);
    assert_eq!(record.uid, Some(vm.uid));
    record.uid = Some(77);
    assert_eq!(record.clone().into_vm(vm.dir.clone()).uid, 77);
    // As an older daemon wrote it.
    let mut json = serde_json::to_value(&record).unwrap();
    json.as_object_mut().unwrap().remove("uid");
    let old: Record = serde_json::from_value(json).unwrap();
    assert_eq!(old.into_vm(vm.dir.clone()).uid, 200_000 + vm.slot);
}

#[test]
fn every_truncation_another_version_and_another_vm_are_refused() {
    let run = tempfile::tempdir().unwrap();
    let vm = vm(run.path());
    let mut record = Record::of(&vm);
    let bytes = serde_json::to_vec(&record).unwrap();
    for length in 0..bytes.len() {
        std::fs::write(vm.dir.record(), &bytes[..length]).unwrap();
        assert!(matches!(Record::read(&vm.dir, vm.id), Err(RecordError::Json { .. })), "{length}");
    }
    record.write(&vm.dir).unwrap();
    assert!(matches!(Record::read(&vm.dir, VmId::random()), Err(RecordError::Id { .. })));
    for got in [0, 3] {
        record.version = got;
        record.write(&vm.dir).unwrap();
        let read = Record::read(&vm.dir, vm.id);
        assert!(matches!(read, Err(RecordError::Version { got: other, .. }) if other == got));
    }
    let long = vec![b' '; usize::try_from(MAX_BYTES).unwrap() + 1];
    std::fs::write(vm.dir.record(), long).unwrap();
    assert!(matches!(Record::read(&vm.dir, vm.id), Err(RecordError::TooLong { .. })));
}

/// A record in `fixtures/records`, written to a run folder.
fn fixture(run: &Path, name: &str) -> (serde_json::Value, VmDir, VmId) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/records").join(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let id = "0123456789ab".parse().unwrap();
    let dir = fixture::config(run).vm(id);
    std::fs::create_dir_all(dir.path()).unwrap();
    std::fs::write(dir.record(), &bytes).unwrap();
    (serde_json::from_slice(&bytes).unwrap(), dir, id)
}

#[test]
fn records_of_every_format_are_read() {
    let names = ["1-afcc4ef.json", "1-9c7fd64.json", "2.json", "next.json"];
    for (n, name) in names.into_iter().enumerate() {
        let run = tempfile::tempdir().unwrap();
        let (_, dir, id) = fixture(run.path(), name);
        let record = Record::read(&dir, id).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(
            (record.format, record.uid),
            ([1, 1, 2, 9][n], (n > 0).then_some(1_895_825_411))
        );
        assert_eq!(record.is_of_this_boot(), n < 2, "{name}: a host reboots with another id");
        let vm = record.into_vm(dir);
        let live = vm.live();
        let identity = live.identity.unwrap();
        assert_eq!((identity.hostname.as_str(), live.phase), ("web-1", Phase::Running));
        assert_eq!(live.network.unwrap().address.to_string(), "10.88.0.5");
        assert_eq!(live.disks[0].shared_layers().count(), 1);
        assert_eq!((live.disks[0].own().count(), live.read_only_layers), (2, n > 0));
        assert_eq!((vm.facts.fork.max_clones, vm.facts.memory_bytes), (4, 256 << 20));
    }
}

#[test]
fn what_a_later_daemon_wrote_survives_a_rewrite() {
    let run = tempfile::tempdir().unwrap();
    let (before, dir, id) = fixture(run.path(), "next.json");
    let vm = Record::read(&dir, id).unwrap().into_vm(dir.clone());
    vm.update(|live| live.phase = Phase::Paused);
    Record::of(&vm).write(&dir).unwrap();
    let after: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.record()).unwrap()).unwrap();
    for field in [
        "/version",
        "/zone",
        "/facts/gpu",
        "/facts/fork/deadline",
        "/facts/network/ipv6",
        "/live/migration",
        "/live/network/address6",
        "/live/who/uuid",
        "/live/process/pidfd_inode",
    ] {
        assert!(before.pointer(field).is_some(), "{field}: the fixture has it");
        assert_eq!(after.pointer(field), before.pointer(field), "{field}");
    }
    assert_eq!((&after["live"]["phase"], &after["format"]), (&"paused".into(), &FORMAT.into()));
    // A field of an object that is gone is lost.
    vm.update(|live| live.process = None);
    Record::of(&vm).write(&dir).unwrap();
    let after: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.record()).unwrap()).unwrap();
    assert_eq!(
        (&after["live"]["process"], &after["zone"]),
        (&serde_json::Value::Null, &"a".into())
    );
}

#[test]
fn daemons_of_format_1_read_what_this_one_writes() {
    let run = tempfile::tempdir().unwrap();
    let (_, dir, id) = fixture(run.path(), "1-9c7fd64.json");
    Record::of(&Record::read(&dir, id).unwrap().into_vm(dir.clone())).write(&dir).unwrap();
    let written: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.record()).unwrap()).unwrap();
    assert_eq!(written["version"], 1, "they require it, and ignore unknown fields");
}

#[test]
fn a_record_that_is_too_long_or_cannot_be_written_leaves_the_one_before() {
    let run = tempfile::tempdir().unwrap();
    let vm = vm(run.path());
    let record = Record::of(&vm);
    record.write(&vm.dir).unwrap();
    let mut long = record.clone();
    let length = usize::try_from(MAX_BYTES).unwrap();
    long.facts.labels = [("a".to_owned(), "x".repeat(length))].into();
    let refused = long.write(&vm.dir).unwrap_err().to_string();
    assert!(refused.contains("vm.json") && refused.contains("1048576"), "{refused}");
    assert_eq!(Record::read(&vm.dir, vm.id).unwrap(), record);
    let mut other = record.clone();
    other.live.ready_us = Some(1);
    std::fs::create_dir(vm.dir.path().join("vm.json.new")).unwrap();
    assert!(other.write(&vm.dir).is_err());
    assert_eq!(Record::read(&vm.dir, vm.id).unwrap(), record);
}
