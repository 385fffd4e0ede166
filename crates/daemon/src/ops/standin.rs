//! VMs of an earlier daemon, for tests of adoption: their records, and processes and threads that
//! stand for their VMMs.

use crate::base::config::Config;
use crate::fixture;
use crate::model::facts::Facts;
use crate::model::state::Phase;
use crate::vm::record::Record;
use crate::vm::registry::Registry;
use dayfly_host::process::{Process, ProcessId};
use dayfly_units::{CpuModel, VmId};
use dayfly_vmm::config::Shape;
use dayfly_vmm::control::{Answer, Command, Status};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::Duration;

/// A process that looks like a VMM from outside, because its command line names the VM. It ends
/// with the test.
pub(crate) struct Standin(pub(super) Child, pub(super) ProcessId);

impl Standin {
    pub(crate) fn start(config: &Config, id: VmId) -> Self {
        Self::start_as(config, id, 0, Stdio::piped())
    }

    /// As user `uid`, with this standard input.
    pub(crate) fn start_as(config: &Config, id: VmId, uid: u32, stdin: Stdio) -> Self {
        // `sleep` would refuse the option `--id`, which bash accepts. It stops itself.
        let child = std::process::Command::new("bash")
            .args(["-c", "exec -a \"$1\" bash -c 'kill -STOP $$' x --id \"$0\"", &id.to_string()])
            .arg(config.vmm_name())
            .stdin(stdin)
            .uid(uid)
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
                began.elapsed() < Duration::from_secs(120),
                "{cmdline}: the stand-in has not started"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        Self(child, id)
    }

    /// The adopting daemon also reaps this process, because it is a child of the test's process.
    pub(crate) fn alive(&self) -> bool {
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
pub(crate) fn answer(config: &Config, id: VmId, paused: bool) {
    answer_commands(config, id, paused, &[Command::Status]);
}

/// Answers these commands on the control socket of a VM, each on a connection.
pub(crate) fn answer_commands(config: &Config, id: VmId, paused: bool, commands: &[Command]) {
    let listener = UnixListener::bind(config.vm(id).control()).unwrap();
    let commands = commands.to_vec();
    std::thread::spawn(move || {
        for expected in commands {
            let (mut stream, _) = listener.accept().unwrap();
            let mut length = [0; 4];
            stream.read_exact(&mut length).unwrap();
            let mut json = vec![0; u32::from_le_bytes(length) as usize];
            stream.read_exact(&mut json).unwrap();
            let got: serde_json::Value = serde_json::from_slice(&json).unwrap();
            assert_eq!(got, serde_json::to_value(&expected).unwrap());
            stream.write_all(&message(&expected, paused)).unwrap();
        }
    });
}

/// The answer to a command as it is sent.
pub(crate) fn message(command: &Command, paused: bool) -> Vec<u8> {
    let shape = Shape {
        memory_bytes: 64 << 20,
        vcpus: 1,
        max_vcpus: 0,
        disks: 1,
        nets: 0,
        cpu_model: CpuModel::Host,
    };
    let answer = match command {
        Command::Status => Answer::Status(Status { paused, ..Status::of(shape) }),
        _ => Answer::Ok,
    };
    let json = serde_json::to_vec(&answer).unwrap();
    let length = u32::try_from(json.len()).unwrap().to_le_bytes();
    [length.to_vec(), json].concat()
}

/// Writes the record of a VM of an earlier daemon.
pub(crate) fn recorded(
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
pub(crate) fn recorded_with(
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
