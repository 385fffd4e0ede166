//! A machine in a folder of its own, and what the cases do with it.

use dayfly_machine::{ExecSpec, InitOptions, Leak, Machine, Output, Reexec, Started, leaks};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// This test program, which is static and plays every part.
pub(crate) fn this() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// An unpacked kernel package.
fn kernel_tree() -> &'static Path {
    static TREE: OnceLock<PathBuf> = OnceLock::new();
    TREE.get_or_init(|| {
        if let Some(tree) = std::env::var_os("DAYFLY_TEST_KERNEL") {
            return tree.into();
        }
        let tree = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("machine-kernel");
        if !tree.join("boot").exists() {
            let script = "set -e; mkdir -p \"$1\"; cd \"$1\"; \
                p=$(apt-cache depends linux-image-6.12-cloud-amd64 | sed -n 's/.*Depends: //p' | head -1); \
                apt-get download -qq \"$p\"; mkdir staged; dpkg -x *.deb staged; rm *.deb; mv staged/* .";
            eprintln!("fetching linux-image-6.12-cloud-amd64 (once)");
            let status = Command::new("sh").args(["-c", script, "sh"]).arg(&tree).status().unwrap();
            assert!(status.success(), "no kernel: set DAYFLY_TEST_KERNEL to an unpacked linux-image package");
        }
        tree
    })
}

/// One machine; gone with its scene.
pub(crate) struct Scene {
    folder: tempfile::TempDir,
    pub(crate) options: InitOptions,
}

impl Scene {
    /// Made, not started; the stand-in is its daemon.
    pub(crate) fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("dfm").tempdir().unwrap();
        let init = PathBuf::from(env!("CARGO_BIN_EXE_dayfly-machine-init"));
        let mut options = InitOptions::new(kernel_tree().to_owned(), init);
        options.memory_mib = 1024;
        options.disk_bytes = 1 << 30;
        let daemon = folder.path().join("dayflyd");
        std::fs::copy(this(), &daemon).unwrap();
        options.daemon = Some(daemon);
        options.daemon_arguments = vec!["standin".to_owned(), "one".to_owned()];
        let scene = Self { folder, options };
        scene.init();
        scene
    }

    pub(crate) fn home(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn init(&self) -> Machine {
        Machine::init(self.home(), &self.options, &mut |_| {}).unwrap()
    }

    pub(crate) fn machine(&self) -> Machine {
        Machine::open(self.home()).unwrap()
    }

    pub(crate) fn start(&self) -> Started {
        self.machine().start(&reexec(), &mut |_| {}).unwrap()
    }

    /// `start` in a process of its own.
    pub(crate) fn spawn_start(&self) -> Child {
        Command::new(this()).arg("start").arg(self.home()).stdout(Stdio::piped()).spawn().unwrap()
    }

    pub(crate) fn stop(&self) -> dayfly_machine::Stopped {
        self.machine().stop(Duration::from_secs(20), &mut |_| {}).unwrap()
    }

    pub(crate) fn exec(&self, argv: &[&str], input: &[u8]) -> Output {
        self.machine().exec_output(&spec(argv), input).unwrap()
    }

    /// Standard output of a shell script that must succeed.
    pub(crate) fn shell(&self, script: &str) -> String {
        let out = self.exec(&["sh", "-c", script], b"");
        assert_eq!(out.exit.shell_code(), 0, "{script}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap().trim().to_owned()
    }

    /// A process of the machine on the host: `supervisor`, or the start of a child's name.
    pub(crate) fn pid(&self, name: &str) -> Option<i32> {
        let status = self.machine().status().unwrap();
        if name == "supervisor" {
            return status.supervisor_pid;
        }
        status.processes.iter().find(|(_, n)| n.starts_with(name)).map(|(pid, _)| *pid)
    }

    /// No process, mount or socket is left.
    pub(crate) fn assert_nothing_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let left: Vec<Leak> = leaks(self.home());
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left over: {left:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Ok(machine) = Machine::open(self.home()) {
            drop(machine.stop(Duration::ZERO, &mut |_| {}));
        }
    }
}

pub(crate) fn spec(argv: &[&str]) -> ExecSpec {
    ExecSpec { argv: argv.iter().map(|w| (*w).to_owned()).collect(), ..ExecSpec::default() }
}

pub(crate) fn reexec() -> Reexec {
    Reexec { program: this(), words: vec!["supervise".into()] }
}

pub(crate) fn kill(pid: i32) {
    // SAFETY: kill(2) takes no pointers; the pid is of a process that this scene started.
    let result = unsafe { libc::kill(pid, libc::SIGKILL) };
    assert_eq!(result, 0, "kill {pid}: {}", std::io::Error::last_os_error());
    // Until it has dropped its memory, no longer: what it leaves behind may still be on its way.
    while std::fs::read(format!("/proc/{pid}/statm"))
        .is_ok_and(|text| !text.is_empty() && !text.starts_with(b"0 "))
    {
        std::thread::yield_now();
    }
}

/// The part of `spawn_start`.
pub(crate) fn start_and_report(home: &str) -> ExitCode {
    let machine = Machine::open(Path::new(home)).unwrap();
    match machine.start(&reexec(), &mut |_| {}) {
        Ok(started) => println!("{started:?}"),
        Err(e) => println!("error: {e}"),
    }
    ExitCode::SUCCESS
}
