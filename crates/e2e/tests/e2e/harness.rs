//! The worlds that tests share, and the words they are written in.

use dayfly_e2e::guest;
use std::cell::Cell;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

/// The snapshot that most tests clone: Debian with the warmed-up Python server of the demo, one vCPU.
pub const BASE: &str = "e2e-base";
/// The image behind it.
pub const IMAGE: &str = "e2e-image";
/// What the image has beyond Debian's minimum: Python, and the two programs that check disk and memory.
const INCLUDE: &str = "python3-minimal,fio,stress-ng";
/// Whatever takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(240);

/// A daemon (in a machine) of its own. Tests that use the same take turns.
struct Lane {
    turn: Mutex<()>,
    ready: OnceLock<Result<(), String>>,
}

/// A machine emulates on one CPU, and tests wait for it most of their time: two keep both CPUs of a small host busy. Natively there is one, as tests
/// kill what has the daemon's name.
static LANES: [Lane; 2] = [const { Lane { turn: Mutex::new(()), ready: OnceLock::new() } }; 2];

thread_local! {
    /// Which lane this thread's test has.
    static LANE: Cell<usize> = const { Cell::new(0) };
}

/// The only one who uses its lane now.
pub struct World {
    _turn: MutexGuard<'static, ()>,
    begun: Instant,
}

/// Waits for the first lane that comes free, and sets it up if this is its first test.
pub fn world() -> World {
    let (lane, turn, failed) = free_lane();
    LANE.set(lane);
    let ready = LANES[lane]
        .ready
        .get_or_init(|| std::panic::catch_unwind(set_up).map_err(|_| "set-up failed, see above".into()));
    if let Err(why) = ready {
        panic!("{why}");
    }
    let world = World { _turn: turn, begun: Instant::now() };
    world.remove_all();
    if failed {
        for snapshot in ok(&["snapshots", "-q"]).lines().filter(|name| *name != BASE) {
            ok(&["snapshots", "rm", snapshot]);
        }
    }
    world
}

/// Its number, and whether a test before failed there, which may have left snapshots.
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
    /// Where the time of a run goes.
    fn drop(&mut self) {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        eprintln!("e2e: {name}: {} s in lane {}", self.begun.elapsed().as_secs(), LANE.get());
    }
}

fn set_up() {
    std::fs::create_dir_all(home()).unwrap();
    let begun = Instant::now();
    if machine() {
        // One CPU: QEMU 7.2's emulation of several crashes kernels that patch their own code (ARCHITECTURE.md), and twenty
        // tests in a row meet that. Today's programs on yesterday's disk, if there is one.
        ok(&["machine", "init", "--cpus", "1"]);
        ok(&["machine", "start"]);
    }
    let remove = |list: &[&str], rm: &[&str]| {
        for name in ok(list).lines() {
            let mut words = rm.to_vec();
            words.push(name);
            dayfly(&words);
        }
    };
    remove(&["ps", "-aq"], &["rm", "-f"]);
    remove(&["snapshots", "-q"], &["snapshots", "rm"]);
    remove(&["kernel", "ls", "-q"], &["kernel", "rm"]);
    if dayfly(&["image", "inspect", IMAGE]).code != 0 {
        ok(&["image", "build", "--debian", "bookworm", "--include", INCLUDE, IMAGE]);
    }
    bake(IMAGE, BASE, &[]);
    eprintln!("e2e: lane {} set up in {} s", LANE.get(), begun.elapsed().as_secs());
}

/// Bakes the demo's server.
///
/// Under QEMU 7.2's emulation a guest with several vCPUs may crash while it boots and patches its own code
/// (ARCHITECTURE.md; seen once in a dozen boots): in the machine, and only for a guest that crashed, it is tried again.
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
        eprintln!("e2e: the guest crashed while it booted under emulation, trying again: {}", got.err);
    }
}

/// A test whose clones wait for their memory. Under QEMU 7.2's emulation the machine's only CPU may stand still in such a guest, for minutes (seen once in a
/// dozen runs, on a busy host): then its kernel says "soft lockup", and then only it is tried again.
pub fn unless_the_machine_stands_still(test: impl Fn()) {
    let lockups = || -> usize {
        let log = |lane| std::fs::read(home_of(lane).join("home/machine/console.log")).unwrap_or_default();
        let said = |lane| String::from_utf8_lossy(&log(lane)).matches("soft lockup").count();
        (0..LANES.len()).map(said).sum()
    };
    for tries_left in (0..3).rev() {
        let before = lockups();
        let watched = Watched::begin();
        let Err(failed) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&test)) else { return };
        if tries_left == 0 || !machine() || lockups() <= before {
            eprintln!("{}", how_it_was());
            drop(watched);
            std::panic::resume_unwind(failed);
        }
        let where_it_was = on_host("dmesg | grep -A 45 'soft lockup' | tail -n 50").out;
        eprintln!("e2e: the machine stood still under emulation, trying again:\n{where_it_was}");
    }
}

/// Notes in the machine, every other second, who has its CPU.
struct Watched(Option<Child>);

/// The file in the machine that they are noted in.
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

/// How much host and machine have to do, and what was said there last: for who reads of a failure that nobody can repeat.
fn how_it_was() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let who = format!(
        "date; cat /proc/uptime /proc/loadavg; dmesg | tail -n 15; grep -A 7 '^Load' {BUSIEST} | tail -n 360"
    );
    let machine = on_host(&who).out;
    let log = std::fs::read(home().join("home/machine/daemon.log")).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let lines: Vec<&str> = log.lines().collect();
    let said = lines[lines.len().saturating_sub(30)..].join("\n");
    format!(
        "e2e: load of the host {load}the machine's time, uptime, load, kernel and busiest processes:\n{machine}its daemon:\n{said}"
    )
}

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// Where the programs are.
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

/// Whether stock kernels need the machine here.
pub fn machine() -> bool {
    !dayfly_machine::probe().is_native()
}

/// `dayfly` in the tests' world.
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

/// Starts `dayfly` and does not wait; its streams are pipes.
pub fn start(words: &[&str]) -> Child {
    piped(command(words))
}

fn piped(mut command: Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// One that fails where it takes too long, with code 124: an image, and a bake on a busy host, take minutes.
fn started_in_time(words: &[&str]) -> Child {
    let mut command = Command::new("timeout");
    command.args(["--foreground", "--kill-after=5", "900"]).arg(bin().join("dayfly"));
    piped(in_world(command, words))
}

/// Waits for what [`start`] began.
pub fn wait(child: Child) -> Ended {
    ended(child.wait_with_output().unwrap())
}

/// Runs `dayfly`.
pub fn dayfly(words: &[&str]) -> Ended {
    wait(started_in_time(words))
}

/// Runs `dayfly` with this on its standard input.
pub fn fed(words: &[&str], input: &[u8]) -> Ended {
    let mut child = started_in_time(words);
    let mut pipe = child.stdin.take().unwrap();
    let input = input.to_vec();
    let feeder = std::thread::spawn(move || {
        let _ = pipe.write_all(&input); // A program that reads no further is no failure.
    });
    let got = wait(child);
    feeder.join().unwrap();
    got
}

/// Runs `dayfly`, which must do it; gives its standard output without the last line's end.
pub fn ok(words: &[&str]) -> String {
    let got = dayfly(words);
    assert_eq!(got.code, 0, "dayfly {words:?}: {}{}", got.out, got.err);
    got.out.trim_end_matches('\n').to_owned()
}

/// Runs `dayfly`, which must refuse, with code 125 and a message that has all of these in it.
pub fn refused(words: &[&str], says: &[&str]) {
    let got = dayfly(words);
    assert_eq!(got.code, 125, "dayfly {words:?}: {}{}", got.out, got.err);
    for word in says {
        assert!(got.err.contains(word), "dayfly {words:?}: expected {word:?} in {:?}", got.err);
    }
}

/// A shell text in a VM.
pub fn sh(vm: &str, text: &str) -> String {
    ok(&["exec", vm, "--", "/bin/sh", "-c", text])
}

/// A shell text on the host that runs the VMs.
pub fn on_host(text: &str) -> Ended {
    if machine() {
        return dayfly(&["machine", "exec", "--", "sh", "-c", text]);
    }
    ended(Command::new("sh").args(["-c", text]).output().unwrap())
}

/// Begins a shell text there.
pub fn start_on_host(text: &str) -> Child {
    if machine() {
        return start(&["machine", "exec", "--", "sh", "-c", text]);
    }
    let mut command = Command::new("sh");
    command.args(["-c", text]);
    piped(command)
}

/// The daemon's folders there.
pub fn state_dir() -> String {
    if machine() { "/var/lib/dayfly".into() } else { home().join("state").display().to_string() }
}

/// A field of a VM's description.
pub fn inspect(vm: &str) -> serde_json::Value {
    serde_json::from_str(&ok(&["inspect", vm])).unwrap()
}

/// Waits until `what` holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "waited {PATIENCE:?} for: {what}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Waits until a VM has ended by itself; gives reason and message.
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

    /// Nothing runs, and nothing was left over.
    pub fn clean(&self) {
        self.remove_all();
        let got = dayfly(&["doctor", "--leaks"]);
        assert_eq!(got.code, 0, "left over: {}{}", got.out, got.err);
    }
}
