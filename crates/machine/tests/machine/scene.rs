//! A machine in a temporary folder, and the operations that the cases use.

use dayfly_machine::{
    Consent, ExecSpec, InitOptions, Leak, Machine, Note, Output, Purpose, Reexec, StartError,
    StartOrder, Started, leaks,
};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// A case and its name.
pub(crate) type Case = (&'static str, fn());

/// This test program, which is static and plays every part: init, daemon, supervisor.
pub(crate) fn this() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// The machine's init, which is built beside this program's folder.
fn init_program() -> PathBuf {
    let this = this();
    let program = this.ancestors().nth(2).unwrap().join("dayfly-machine-init");
    let build = "build it first, with the same profile: cargo build -p dayfly-machine-init";
    assert!(program.is_file(), "{}: missing; {build}", program.display());
    let changed = |path: &Path| std::fs::metadata(path).and_then(|m| m.modified()).unwrap();
    let mut sources = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../machine-init/src")];
    while let Some(path) = sources.pop() {
        if path.is_dir() {
            sources.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            assert!(changed(&path) <= changed(&program), "{} is newer; {build}", path.display());
        }
    }
    program
}

/// Folder of an unpacked kernel package.
fn kernel_tree() -> &'static Path {
    static TREE: OnceLock<PathBuf> = OnceLock::new();
    TREE.get_or_init(|| {
        if let Some(tree) = std::env::var_os("DAYFLY_TEST_KERNEL") {
            return tree.into();
        }
        let tree = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("machine-kernel");
        if !tree.join("boot").exists() {
            let script = "set -e; mkdir -p \"$1\"; cd \"$1\"; \
                p=$(apt-cache depends linux-image-6.12-cloud-amd64 | \
                    sed -n 's/.*Depends: //p' | head -1); \
                apt-get download -qq \"$p\"; mkdir staged; dpkg -x *.deb staged; rm *.deb; \
                mv staged/* .";
            eprintln!("fetching linux-image-6.12-cloud-amd64 (once)");
            let status = Command::new("sh").args(["-c", script, "sh"]).arg(&tree).status().unwrap();
            assert!(
                status.success(),
                "no kernel: set DAYFLY_TEST_KERNEL to an unpacked linux-image package"
            );
        }
        tree
    })
}

/// One machine; dropping the scene removes it.
pub(crate) struct Scene {
    folder: tempfile::TempDir,
    pub(crate) options: InitOptions,
    said: Mutex<Vec<String>>,
}

impl Scene {
    /// Makes a machine without starting it. Its daemon is the stand-in, and it has no shares.
    pub(crate) fn new() -> Self {
        Self::sharing(&[])
    }

    /// Like [`Scene::new`], with shares (`NAME=PATH[:rw]`).
    pub(crate) fn sharing(shares: &[&str]) -> Self {
        Self::at(tempfile::Builder::new().prefix("dfm").tempdir().unwrap(), shares)
    }

    /// Like [`Scene::sharing`], in this folder.
    pub(crate) fn at(folder: tempfile::TempDir, shares: &[&str]) -> Self {
        let mut options = InitOptions::new(kernel_tree().to_owned(), init_program());
        options.memory_mib = 1024;
        options.disk_bytes = 1 << 30;
        // The cases of `uplink` turn it on.
        options.network = false;
        options.shares = shares.iter().map(|share| share.parse().unwrap()).collect();
        let daemon = folder.path().join("dayflyd");
        std::fs::copy(this(), &daemon).unwrap();
        options.daemon = Some(daemon);
        options.daemon_arguments = vec!["standin".to_owned(), "one".to_owned()];
        let scene = Self { folder, options, said: Mutex::default() };
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

    /// Starts the machine for use; its daemon says that no VM lives.
    pub(crate) fn start(&self) -> Started {
        self.try_start(Purpose::Use, Consent::None, Some(0)).unwrap()
    }

    /// Starts the machine, whose daemon says that `vms` VMs live. A question is answered with no.
    pub(crate) fn try_start(
        &self,
        purpose: Purpose,
        consent: Consent,
        vms: Option<u64>,
    ) -> Result<Started, StartError> {
        let reexec = reexec();
        let confirm = |question: &str| {
            self.said.lock().unwrap().push(question.to_owned());
            false
        };
        let order =
            StartOrder { reexec: &reexec, purpose, consent, count_vms: &|| vms, confirm: &confirm };
        self.machine().start(&order, &mut |note| {
            if let Note::Line(text) = note {
                self.said.lock().unwrap().push(text.to_owned());
            }
        })
    }

    /// The lines that starts have said and asked since the last call.
    pub(crate) fn said(&self) -> Vec<String> {
        std::mem::take(&mut self.said.lock().unwrap())
    }

    /// Runs `start` in a separate process.
    pub(crate) fn spawn_start(&self) -> Child {
        Command::new(this()).arg("start").arg(self.home()).stdout(Stdio::piped()).spawn().unwrap()
    }

    pub(crate) fn stop(&self) -> dayfly_machine::Stopped {
        self.machine().stop(Duration::from_secs(240), &mut |_| {}).unwrap()
    }

    pub(crate) fn exec(&self, argv: &[&str], input: &[u8]) -> Output {
        self.machine().exec_output(&spec(argv), input).unwrap()
    }

    /// The standard output of a shell script that must succeed.
    pub(crate) fn shell(&self, script: &str) -> String {
        let out = self.exec(&["sh", "-c", script], b"");
        assert_eq!(out.exit.shell_code(), 0, "{script}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap().trim().to_owned()
    }

    /// Process id on the host of a process of the machine: `supervisor`, or a child by the start of
    /// its name.
    pub(crate) fn pid(&self, name: &str) -> Option<i32> {
        let status = self.machine().status().unwrap();
        if name == "supervisor" {
            return status.supervisor_pid;
        }
        status.processes.iter().find(|(_, n)| n.starts_with(name)).map(|(pid, _)| *pid)
    }

    /// Asserts that no process, mount or socket is left.
    pub(crate) fn assert_nothing_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(240);
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

pub(crate) fn signal(pid: i32, number: i32) {
    // SAFETY: kill(2) takes no pointers; the pid is of a process that this scene started.
    let result = unsafe { libc::kill(pid, number) };
    assert_eq!(result, 0, "kill {pid}: {}", std::io::Error::last_os_error());
}

pub(crate) fn kill(pid: i32) {
    signal(pid, libc::SIGKILL);
    // Waits only until the process has freed its memory: what it leaves behind may still be ending.
    while std::fs::read(format!("/proc/{pid}/statm"))
        .is_ok_and(|text| !text.is_empty() && !text.starts_with(b"0 "))
    {
        std::thread::yield_now();
    }
}

/// The program that `spawn_start` runs.
pub(crate) fn start_and_report(home: &str) -> ExitCode {
    let machine = Machine::open(Path::new(home)).unwrap();
    match machine.start(&StartOrder::to_use(&reexec(), &|| Some(0)), &mut |_| {}) {
        Ok(started) => println!("{started:?}"),
        Err(e) => println!("error: {e}"),
    }
    ExitCode::SUCCESS
}

pub(crate) fn wait_until(what: &str, mut test: impl FnMut() -> bool) {
    // Ends only a hang: a busy host lets a machine stand still.
    let deadline = Instant::now() + Duration::from_secs(240);
    while !test() {
        assert!(Instant::now() < deadline, "not in four minutes: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
