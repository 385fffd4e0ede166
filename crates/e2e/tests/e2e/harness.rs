//! Shared daemons of the tests, and helpers that run `dayfly` and check its result.

use dayfly_e2e::guest;
use std::cell::Cell;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

/// The snapshot that most tests clone: Debian with the warmed-up Python server of the demo, one
/// vCPU.
pub const BASE: &str = "e2e-base";
/// The image of [`BASE`].
pub const IMAGE: &str = "e2e-image";
/// Packages beyond Debian's minimum: Python, and the two programs that check disk and memory.
const INCLUDE: &str = "python3-minimal,fio,stress-ng";
/// A condition that takes longer than this counts as hanging.
const TIMEOUT: Duration = Duration::from_secs(240);

/// One daemon, in a machine unless KVM is native. Tests of one lane run one after the other.
struct Lane {
    turn: Mutex<()>,
    ready: OnceLock<Result<(), String>>,
}

/// Two machines keep both CPUs of a small host busy, because a machine emulates on one CPU and
/// tests mostly wait for it. Natively there is one lane, because tests kill processes by the
/// daemon's name.
static LANES: [Lane; 2] = [const { Lane { turn: Mutex::new(()), ready: OnceLock::new() } }; 2];

thread_local! {
    /// The lane of this thread's test.
    static LANE: Cell<usize> = const { Cell::new(0) };
}

/// Exclusive use of a lane.
pub struct World {
    _turn: MutexGuard<'static, ()>,
    begun: Instant,
}

/// Waits for a free lane, and sets it up if this is its first test.
pub fn world() -> World {
    let (lane, turn, failed) = free_lane();
    LANE.set(lane);
    let ready = LANES[lane].ready.get_or_init(|| {
        std::panic::catch_unwind(set_up).map_err(|_| "set-up failed, see above".into())
    });
    if let Err(why) = ready {
        panic!("{why}");
    }
    let world = World { _turn: turn, begun: Instant::now() };
    world.remove_all();
    if failed {
        for snapshot in ok(&["snapshots", "-q"]).lines().filter(|name| *name != BASE) {
            ok(&["snapshots", "rm", snapshot]);
        }
        remove_images();
    }
    world
}

/// Waits for a free lane. Returns its number, its lock, and whether an earlier test failed in the
/// lane, which may have left snapshots and images.
fn free_lane() -> (usize, MutexGuard<'static, ()>, bool) {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let lanes = if machine() { LANES.len().min(cpus) } else { 1 };
    loop {
        for (n, lane) in LANES[..lanes].iter().enumerate() {
            match lane.turn.try_lock() {
                Ok(turn) => return (n, turn, false),
                Err(TryLockError::Poisoned(failed)) => return (n, failed.into_inner(), true),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Drop for World {
    /// Prints how long the test took, and after a failure what the machine said last.
    fn drop(&mut self) {
        if std::thread::panicking() && machine() {
            for (what, file) in [("console", "console.log"), ("daemon", "daemon.log")] {
                eprintln!("e2e: the last lines of the machine's {what}:\n{}", last_lines(file));
            }
        }
        note("e2e-times.log", &format!("{:5} s  {}", self.begun.elapsed().as_secs(), test_name()));
    }
}

/// Whether the second lane waits for a copy of the first one's disk.
static COPY_WANTED: AtomicBool = AtomicBool::new(false);

/// The copy.
fn copied_disk() -> PathBuf {
    home_of(0).join("disk.copy")
}

fn set_up() {
    std::fs::create_dir_all(home()).unwrap();
    let begun = Instant::now();
    if LANE.get() == 0 {
        let _ = std::fs::remove_file(copied_disk()); // It may be there since an earlier run.
        set_up_alone();
        if COPY_WANTED.load(Ordering::SeqCst) {
            copy_disk();
        }
    } else if !set_up_from_first() {
        set_up_alone();
    }
    let took = begun.elapsed().as_secs();
    note("e2e-times.log", &format!("{took:5} s  set-up of lane {}", LANE.get()));
}

/// Copies the machine's disk with everything that was set up, while the machine is stopped.
fn copy_disk() {
    ok(&["machine", "stop"]);
    copy(&home().join("home/machine/disk.img"), &copied_disk());
    start_machine();
}

/// Copies a file with its holes.
fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").args(["--sparse=always", "--"]).arg(from).arg(to).status();
    assert!(done.unwrap().success(), "copying {}", from.display());
}

/// Starts the second machine with a copy of the first one's disk: building an image and baking it
/// takes a minute of CPU time and more. Returns false if the first lane was ready before this one
/// asked for a copy.
fn set_up_from_first() -> bool {
    COPY_WANTED.store(true, Ordering::SeqCst);
    // A lane is used only if the one before is in use, so the first one's set-up has begun.
    if LANES[0].ready.wait().is_err() || !copied_disk().exists() {
        return false;
    }
    ok(&["machine", "init", "--cpus", "1"]);
    dayfly(&["machine", "stop"]); // It may run since an earlier run of the tests.
    std::fs::rename(copied_disk(), home().join("home/machine/disk.img")).unwrap();
    start_machine();
    true
}

fn set_up_alone() {
    if machine() {
        // One CPU, because QEMU 7.2's emulation of several crashes kernels that patch their own
        // code. The machine's disk of an earlier run is kept, with the programs of this build.
        ok(&["machine", "init", "--cpus", "1"]);
        start_machine();
    }
    let remove = |list: &[&str], rm: &[&str]| {
        for name in ok(list).lines() {
            let mut words = rm.to_vec();
            words.push(name);
            dayfly(&words);
        }
    };
    remove(&["ps", "-aq"], &["rm", "-f"]);
    if machine() {
        // A machine with VMs of a failed run goes on with older programs; now it has none.
        start_machine();
    }
    remove(&["snapshots", "-q"], &["snapshots", "rm"]);
    remove(&["kernel", "ls", "-q"], &["kernel", "rm"]);
    remove_images();
    if dayfly(&["image", "inspect", IMAGE]).code != 0 {
        ok(&["image", "build", "--debian", "bookworm", "--include", INCLUDE, IMAGE]);
    }
    bake(IMAGE, BASE, &[]);
}

/// Removes the images that tests left. Only [`IMAGE`] is kept, because building it takes long.
fn remove_images() {
    for image in ok(&["image", "ls", "-q"]).lines().filter(|name| *name != IMAGE) {
        ok(&["image", "rm", image]);
    }
}

fn start_machine() {
    let got = dayfly(&["machine", "start"]);
    assert_eq!(got.code, 0, "{}{}", got.out, got.err);
    for line in got.err.lines().filter(|line| line.contains("crashed during boot")) {
        retried("machine start", line);
    }
}

/// Bakes the demo's server.
///
/// Under QEMU 7.2's emulation a guest with several vCPUs may crash while it boots and patches its
/// code (seen once in a dozen boots). So in the machine, and only after a crash of the guest, the
/// bake is repeated.
pub fn bake(image: &str, name: &str, more: &[&str]) {
    let warmup = guest::warmup();
    let mut words = vec!["bake", image, "-t", name, "--cmd", &warmup];
    words.extend(more);
    for tries_left in (0..3).rev() {
        let got = dayfly(&words);
        let crashed = ["triple fault", "panic"].iter().any(|word| got.err.contains(word));
        if got.code == 0 {
            return;
        }
        assert!(machine() && crashed && tries_left > 0, "dayfly {words:?}: {}{}", got.out, got.err);
        retried("bake", &format!("the guest crashed while it booted under emulation: {}", got.err));
    }
}

/// Runs a test whose clones wait for their memory. Under QEMU 7.2's emulation such a guest may
/// block the machine's only CPU for minutes (seen once in a dozen runs, on a busy host). The
/// machine's kernel then reports a "soft lockup", and only after that report the test is repeated.
pub fn unless_the_machine_stands_still(test: impl Fn()) {
    let lockups = || -> usize {
        let log = |lane| {
            std::fs::read(home_of(lane).join("home/machine/console.log")).unwrap_or_default()
        };
        let said = |lane| String::from_utf8_lossy(&log(lane)).matches("soft lockup").count();
        (0..LANES.len()).map(said).sum()
    };
    for tries_left in (0..3).rev() {
        let before = lockups();
        let watched = Watched::begin();
        let Err(failed) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&test)) else {
            return;
        };
        if tries_left == 0 || !machine() || lockups() <= before {
            eprintln!("{}", diagnostics());
            drop(watched);
            std::panic::resume_unwind(failed);
        }
        let where_it_was = on_host("dmesg | grep -A 45 'soft lockup' | tail -n 50").out;
        retried("test", &format!("the machine stood still under emulation:\n{where_it_was}"));
    }
}

/// Reports a retry, and notes it in the file whose lines `make test` counts.
fn retried(what: &str, why: &str) {
    let name = test_name();
    eprintln!("e2e: {name}: trying again: {why}");
    let first = why.lines().next().unwrap_or_default();
    note("retries.log", &format!("{name}: {what}: {first}"));
}

fn test_name() -> String {
    std::thread::current().name().unwrap_or_default().to_owned()
}

/// Shows a line, and adds it to a file that `make test` prints at its end.
fn note(file: &str, line: &str) {
    eprintln!("e2e: {line}");
    let folder = bin().join("../../test");
    std::fs::create_dir_all(&folder).unwrap();
    let mut file =
        std::fs::File::options().create(true).append(true).open(folder.join(file)).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// Notes the machine's busiest processes every two seconds, in [`BUSIEST`].
struct Watched(Option<Child>);

/// A file in the machine with the output of top(1).
const BUSIEST: &str = "/tmp/busiest.log";

impl Watched {
    fn begin() -> Self {
        Self(machine().then(|| start_on_host(&format!("top -b -d 2 -n 300 >{BUSIEST}"))))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(top) = &mut self.0 {
            on_host("killall top");
            let _ = top.kill();
            let _ = top.wait();
        }
    }
}

/// Load of host and machine, and the last lines of kernel and daemon, because such a failure can
/// rarely be repeated.
fn diagnostics() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let show = format!(
        "date; cat /proc/uptime /proc/loadavg; dmesg | tail -n 15; \
         grep -A 7 '^Load' {BUSIEST} | tail -n 360"
    );
    let machine = on_host(&show).out;
    let said = last_lines("daemon.log");
    format!(
        "e2e: load of the host {load}\
         the machine's time, uptime, load, kernel and busiest processes:\n{machine}\
         its daemon:\n{said}"
    )
}

/// The last 30 lines of a log of this lane's machine.
fn last_lines(file: &str) -> String {
    let log = std::fs::read(home().join("home/machine").join(file)).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// The folder of the programs.
pub fn bin() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_dayfly-demo")).parent().unwrap()
}

/// The user's folder of this thread's lane.
pub fn home() -> PathBuf {
    home_of(LANE.get())
}

fn home_of(lane: usize) -> PathBuf {
    bin().join("../../e2e").join(["", "second"][lane])
}

/// A port of this host for this lane's test. Published ports are this host's also in the machine,
/// so that two lanes must not use the same.
pub fn port(first: u16) -> u16 {
    first + 1000 * u16::try_from(LANE.get()).unwrap()
}

/// Whether the tests' commands work through the machine: this host's KVM does not run stock
/// kernels, or its daemon cannot be started because this user is not root.
pub fn machine() -> bool {
    !dayfly_machine::probe().is_native() || !rustix::process::geteuid().is_root()
}

/// The command `dayfly`, with the folders of this thread's lane.
pub fn command(words: &[&str]) -> Command {
    in_world(Command::new(bin().join("dayfly")), words)
}

fn in_world(mut command: Command, words: &[&str]) -> Command {
    command.args(words).stdin(Stdio::null()).env_remove("DAYFLY_HOST");
    let home = home();
    command.env("DAYFLY_HOME", home.join("home"));
    command.env("DAYFLY_RUN", home.join("run")).env("DAYFLY_STATE", home.join("state"));
    command
}

fn ended(output: Output) -> Ended {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let code = output.status.code().unwrap_or(-1);
    Ended { code, out: text(output.stdout), err: text(output.stderr) }
}

/// Starts `dayfly` and does not wait. The standard streams are pipes.
pub fn start(words: &[&str]) -> Child {
    piped(command(words))
}

fn piped(mut command: Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Starts `dayfly` with a limit of 900 s, after which the code is 124. The limit is long because
/// building an image, or a bake on a busy host, takes minutes.
fn started_in_time(words: &[&str]) -> Child {
    let mut command = Command::new("timeout");
    command.args(["--foreground", "--kill-after=5", "900"]).arg(bin().join("dayfly"));
    piped(in_world(command, words))
}

/// Waits for the end of a child of [`start`].
pub fn wait(child: Child) -> Ended {
    ended(child.wait_with_output().unwrap())
}

/// Runs `dayfly`.
pub fn dayfly(words: &[&str]) -> Ended {
    wait(started_in_time(words))
}

/// Runs `dayfly` with `input` on standard input.
pub fn fed(words: &[&str], input: &[u8]) -> Ended {
    let mut child = started_in_time(words);
    let mut pipe = child.stdin.take().unwrap();
    let input = input.to_vec();
    let feeder = std::thread::spawn(move || {
        let _ = pipe.write_all(&input); // The program may end without reading all of its input.
    });
    let got = wait(child);
    feeder.join().unwrap();
    got
}

/// Runs `dayfly`, which must succeed. Returns its standard output without the last line's end.
pub fn ok(words: &[&str]) -> String {
    let got = dayfly(words);
    assert_eq!(got.code, 0, "dayfly {words:?}: {}{}", got.out, got.err);
    got.out.trim_end_matches('\n').to_owned()
}

/// Runs `dayfly`, which must end with code 125 and a message that contains all of `says`.
pub fn refused(words: &[&str], says: &[&str]) {
    let got = dayfly(words);
    assert_eq!(got.code, 125, "dayfly {words:?}: {}{}", got.out, got.err);
    for word in says {
        assert!(got.err.contains(word), "dayfly {words:?}: expected {word:?} in {:?}", got.err);
    }
}

/// Runs a text for `/bin/sh` in a VM, which must end with code 0.
pub fn sh(vm: &str, text: &str) -> String {
    ok(&["exec", vm, "--", "/bin/sh", "-c", text])
}

/// Runs a text for `sh` on the host that runs the VMs.
pub fn on_host(text: &str) -> Ended {
    if machine() {
        return dayfly(&["machine", "exec", "--", "sh", "-c", text]);
    }
    ended(Command::new("sh").args(["-c", text]).output().unwrap())
}

/// Starts a text for `sh` on the host that runs the VMs.
pub fn start_on_host(text: &str) -> Child {
    if machine() {
        return start(&["machine", "exec", "--", "sh", "-c", text]);
    }
    let mut command = Command::new("sh");
    command.args(["-c", text]);
    piped(command)
}

/// The daemon's state folder on the host that runs the VMs.
pub fn state_dir() -> String {
    if machine() { "/var/lib/dayfly".into() } else { home().join("state").display().to_string() }
}

/// A VM's description.
pub fn inspect(vm: &str) -> serde_json::Value {
    serde_json::from_str(&ok(&["inspect", vm])).unwrap()
}

/// Waits until `what` holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < TIMEOUT, "waited {TIMEOUT:?} for: {what}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Waits until a VM has ended by itself. Returns reason and message.
pub fn end_of(vm: &str) -> (String, String) {
    let mut last = serde_json::Value::Null;
    until(&format!("the end of {vm}"), || {
        last = inspect(vm);
        last["vm"]["state"] == "exited"
    });
    let text = |v: &serde_json::Value| v.as_str().unwrap_or_default().to_owned();
    (text(&last["vm"]["exit"]["reason"]), text(&last["vm"]["exit"]["message"]))
}

impl World {
    /// Removes every VM.
    pub fn remove_all(&self) {
        let ids = ok(&["ps", "-aq"]);
        if !ids.is_empty() {
            let mut words = vec!["rm", "-f"];
            words.extend(ids.lines());
            ok(&words);
        }
    }

    /// Removes every VM and checks that nothing is left over.
    pub fn clean(&self) {
        self.remove_all();
        let got = dayfly(&["doctor", "--leaks"]);
        assert_eq!(got.code, 0, "left over: {}{}", got.out, got.err);
    }
}
