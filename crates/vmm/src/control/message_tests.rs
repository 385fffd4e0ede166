//! Each version of the protocol as it is on the wire (`fixtures/control-<version>.json`): a daemon
//! and a VMM of two versions understand each other. A fixture never changes; a change of a message
//! needs a new version with its own fixture.

use super::*;
use crate::config::{DiskConfig, LayerConfig, Rate, SharedConfig};
use crate::virtio::GuestMemory;
use dayfly_units::CpuModel;
use serde_json::{Value, json};

/// The messages of one version.
#[derive(Deserialize)]
struct Fixture {
    commands: Vec<Value>,
    answers: Vec<Value>,
    exit_records: Vec<Value>,
}

fn fixture(version: u32) -> Fixture {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let path = folder.join(format!("control-{version}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The messages as a version decodes them.
fn decoded<T: serde::de::DeserializeOwned>(messages: &[Value]) -> Vec<T> {
    messages.iter().map(|message| serde_json::from_value(message.clone()).unwrap()).collect()
}

/// The messages as a version encodes them.
fn encoded<T: Serialize>(messages: &[T]) -> Vec<Value> {
    messages.iter().map(|message| serde_json::to_value(message).unwrap()).collect()
}

/// Every command; the compiler names one that is missing in the fixtures.
const fn place(command: &Command) -> usize {
    match command {
        Command::Status => 0,
        Command::Restore(_) => 1,
        Command::Pause => 2,
        Command::Resume => 3,
        Command::Save => 4,
        Command::Precopy { .. } => 5,
        Command::Freeze => 6,
        Command::Fork => 7,
        Command::WorkingSet => 8,
        Command::Rebase { .. } => 9,
        Command::Connect(_) => 10,
        Command::Quit => 11,
        Command::Balloon { .. } => 12,
    }
}

fn restore() -> RestoreConfig {
    let layers = vec![LayerConfig { data_fd: 6, map_fd: 7 }];
    let (size_bytes, trees) = (1 << 20, Vec::new());
    let writable = DiskConfig { size_bytes, base_fd: 5, layers, writable_fd: Some(8), trees };
    let (size_bytes, layers, trees) = (4096, Vec::new(), Vec::new());
    let read_only = DiskConfig { size_bytes, base_fd: 9, layers, writable_fd: None, trees };
    RestoreConfig {
        state_fd: 0,
        memory_fd: 1,
        shared: Some(SharedConfig { list_fd: 2, file_fds: vec![3, 4] }),
        disks: vec![writable, read_only],
        generation: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        working_set_fd: Some(10),
        pager_fd: Some(11),
        paused: true,
    }
}

fn commands() -> Vec<Command> {
    let connect = LinkConfig {
        mac: [2, 0, 0, 0, 0, 1],
        address: "10.88.0.2".parse().unwrap(),
        sends: Some(Rate { bytes_per_second: 1000, burst_bytes: 2000 }),
        receives: None,
    };
    vec![
        Command::Status,
        Command::Restore(restore()),
        Command::Pause,
        Command::Resume,
        Command::Save,
        Command::Precopy { own: true },
        Command::Freeze,
        Command::Fork,
        Command::WorkingSet,
        Command::Rebase { disk: 7 },
        Command::Connect(connect),
        Command::Quit,
        Command::Balloon { target_bytes: Some(1 << 20) },
    ]
}

fn shape() -> Shape {
    Shape {
        memory_bytes: 256 << 20,
        vcpus: 2,
        max_vcpus: 16,
        disks: 2,
        nets: 1,
        cpu_model: CpuModel::Host,
    }
}

/// As versions before 6 report it.
fn shape_before() -> Shape {
    Shape { max_vcpus: 0, ..shape() }
}

fn phases() -> Vec<(String, u64)> {
    vec![("started".into(), 1000), ("running".into(), 2000)]
}

/// The answers of a VMM of today, with this status.
fn answers(status: Status) -> Vec<Answer> {
    vec![
        Answer::Ok,
        Answer::Status(status),
        Answer::Precopied(Precopied { rounds: 3, pages: 400, took_us: 5000 }),
        Answer::Frozen(Frozen { paused_us: 1100, pages: 70 }),
        Answer::Err { message: "save: the VM runs; pause it first".into() },
        Answer::Balloon(balloon()),
    ]
}

/// The answers of a VMM before version 6, with this status.
fn answers_before_6(status: Status) -> Vec<Answer> {
    let mut answers = answers(status);
    answers.truncate(5);
    answers
}

fn balloon() -> BalloonStatus {
    BalloonStatus {
        driver: true,
        reports: false,
        broken: Some("descriptor chain 3: longer than the queue".into()),
        target_bytes: 1 << 20,
        actual_bytes: 8192,
        discarded_bytes: u64::MAX,
        refused: 4,
        guest: GuestMemory {
            total_bytes: Some(u64::MAX),
            free_bytes: None,
            ..GuestMemory::default()
        },
    }
}

fn status() -> Status {
    let first = vec![FileId { dev: u64::MAX, ino: 1 }, FileId { dev: 2, ino: u64::MAX }];
    Status {
        whole: false,
        paused: true,
        phases: phases(),
        layers: vec![first, Vec::new()],
        busy: Some(Busy::Precopy),
        no_space: Some(NoSpace::Shares),
        traffic: vec![
            DiskTraffic { reads: 1, read_bytes: 4096, writes: 2, written_bytes: u64::MAX },
            DiskTraffic::default(),
        ],
        disk_reads: Some(DiskReads { io_uring: false, errno: Some(1) }),
        ..Status::of(shape())
    }
}

#[test]
fn a_vmm_of_today_understands_a_daemon_of_version_1() {
    let sent = fixture(1).commands;
    assert_eq!(decoded::<Command>(&sent), commands()[..12]);
    // Fields that came within version 1 may be missing.
    let old = json!({"command": "precopy"});
    assert_eq!(decoded::<Command>(&[old]), [Command::Precopy { own: false }]);
}

#[test]
fn a_vmm_of_version_1_understands_a_daemon_of_today() {
    let all = commands();
    assert!(all.iter().enumerate().all(|(n, command)| place(command) == n) && all.len() == 13);
    let sent = encoded(&all);
    assert_eq!(sent, fixture(PROTOCOL).commands, "a new version needs a new fixture");
    // Versions 2 to 5 change no command, version 6 adds one.
    for version in 1..PROTOCOL {
        assert_eq!(sent[..12], fixture(version).commands);
    }
}

#[test]
fn a_daemon_of_today_understands_a_vmm_of_version_1() {
    let before = Status {
        protocol: 1,
        shape: shape_before(),
        layers: Vec::new(),
        busy: None,
        no_space: None,
        traffic: Vec::new(),
        disk_reads: None,
        ..status()
    };
    let got = fixture(1).answers;
    assert_eq!(decoded::<Answer>(&got), answers_before_6(before.clone()));
    let mut oldest = got[1].clone();
    oldest.as_object_mut().unwrap().remove("whole");
    let whole = Answer::Status(Status { whole: true, ..before });
    assert_eq!(decoded::<Answer>(&[oldest]), [whole]);
}

#[test]
fn a_daemon_of_today_understands_a_vmm_of_version_2() {
    let (no_space, traffic) = (None, Vec::new());
    let (shape, disk_reads) = (shape_before(), None);
    let before = Status { protocol: 2, shape, no_space, traffic, disk_reads, ..status() };
    assert_eq!(decoded::<Answer>(&fixture(2).answers), answers_before_6(before));
}

#[test]
fn a_daemon_of_today_understands_a_vmm_of_version_3() {
    let (shape, traffic) = (shape_before(), Vec::new());
    let before = Status { protocol: 3, shape, traffic, disk_reads: None, ..status() };
    assert_eq!(decoded::<Answer>(&fixture(3).answers), answers_before_6(before));
}

#[test]
fn a_daemon_of_today_understands_a_vmm_of_version_4() {
    let before = Status { protocol: 4, shape: shape_before(), disk_reads: None, ..status() };
    assert_eq!(decoded::<Answer>(&fixture(4).answers), answers_before_6(before));
}

#[test]
fn a_daemon_of_today_understands_a_vmm_of_version_5() {
    let before = Status { protocol: 5, shape: shape_before(), ..status() };
    assert_eq!(decoded::<Answer>(&fixture(5).answers), answers_before_6(before));
}

/// The answers as version 1 has them.
mod version_1 {
    use super::{Deserialize, Frozen, Precopied, Shape};

    #[derive(Debug, PartialEq, Deserialize)]
    pub struct Status {
        pub whole: bool,
        pub paused: bool,
        pub shape: Shape,
        pub phases: Vec<(String, u64)>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(tag = "answer", rename_all = "snake_case")]
    pub enum Answer {
        Ok,
        Status(Status),
        Precopied(Precopied),
        Frozen(Frozen),
        Err { message: String },
    }
}

#[test]
fn a_daemon_of_version_1_understands_a_vmm_of_today() {
    let sent = encoded(&answers(status()));
    assert_eq!(sent, fixture(PROTOCOL).answers, "a new version needs a new fixture");
    // It does not ask for the status of the balloon.
    let got: Vec<version_1::Answer> = decoded(&sent[..5]);
    let fields = (false, true, shape(), phases());
    let (whole, paused, shape, phases) = fields;
    assert_eq!(
        got,
        [
            version_1::Answer::Ok,
            version_1::Answer::Status(version_1::Status { whole, paused, shape, phases }),
            version_1::Answer::Precopied(Precopied { rounds: 3, pages: 400, took_us: 5000 }),
            version_1::Answer::Frozen(Frozen { paused_us: 1100, pages: 70 }),
            version_1::Answer::Err { message: "save: the VM runs; pause it first".into() },
        ]
    );
}

#[test]
fn exit_records_of_each_version_are_understood() {
    use ExitReason::{Failed, Panic, PowerOff, Quit, Reboot};
    let all = [PowerOff, Reboot, Panic, Quit, Failed];
    let all = all.map(|reason| ExitRecord { reason, message: "why".into() });
    for version in 1..=PROTOCOL {
        assert_eq!(decoded::<ExitRecord>(&fixture(version).exit_records), all);
        assert_eq!(encoded(&all), fixture(version).exit_records);
    }
}

#[test]
fn what_a_later_version_adds_is_ignored_and_its_commands_are_refused() {
    let later = json!({"command": "precopy", "own": true, "later": [1]});
    assert_eq!(decoded::<Command>(&[later]), [Command::Precopy { own: true }]);
    let refused = serde_json::from_value::<Command>(json!({"command": "later"}));
    assert!(refused.unwrap_err().to_string().contains("unknown variant `later`"));
    let mut answer = fixture(PROTOCOL).answers[1].clone();
    let fields = answer.as_object_mut().unwrap();
    fields.extend([("later".into(), json!(1)), ("busy".into(), json!("later"))]);
    fields.insert("no_space".into(), json!("later"));
    fields.insert("protocol".into(), json!(PROTOCOL + 1));
    let (busy, no_space) = (Some(Busy::Other), Some(NoSpace::Other));
    let expected = Status { protocol: PROTOCOL + 1, busy, no_space, ..status() };
    assert_eq!(decoded::<Answer>(&[answer]), [Answer::Status(expected)]);
}

#[test]
fn the_longest_status_fits_a_message() {
    let (dev, ino) = (u64::MAX, u64::MAX);
    let layers =
        vec![vec![FileId { dev, ino }; crate::config::MAX_LAYERS + 1]; crate::config::MAX_DISKS];
    // Phases and the rest take less than 4 KiB.
    let most = u64::MAX;
    let each = DiskTraffic { reads: most, read_bytes: most, writes: most, written_bytes: most };
    let traffic = vec![each; crate::config::MAX_DISKS];
    let json = serde_json::to_vec(&Answer::Status(Status { layers, traffic, ..status() })).unwrap();
    assert!(json.len() + 4096 < MAX_MESSAGE_BYTES, "{} bytes", json.len());
}
