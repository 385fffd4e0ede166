//! One run of libFuzzer on one target.

use super::output::Progress;
use super::{PLANTED, TARGET, dictionary};
use crate::corpus;
use crate::target::Target;
use anyhow::{Context, Result};
use dayfly_units::sync::lock;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How many times the least CPU time a run takes at most.
const LONGEST: u32 = 4;
/// How many times the longest CPU time a run takes at most by the clock: other programs may take
/// the CPUs, and a target that waits for something uses none.
const LONGEST_BY_CLOCK: u64 = 10;
/// How often the CPU time of a run is read.
const LOOK: Duration = Duration::from_millis(500);

/// Where runs keep their files.
#[derive(Debug, Clone)]
pub struct Folders {
    /// The program `dayfly-fuzz`.
    pub program: PathBuf,
    /// `target/fuzz`: logs, corpora that grow, crashes.
    pub out: PathBuf,
}

/// How to run.
#[derive(Debug, Clone, Copy)]
pub struct Order {
    /// The least CPU time. A run goes on while new edges come, to at most [`LONGEST`] times this.
    pub cpu: Duration,
    /// Whether faults are planted; the run then begins with the seeds alone.
    pub planted: bool,
}

/// A run that has ended.
#[derive(Debug)]
pub struct Ran {
    /// What libFuzzer printed.
    pub progress: Progress,
    /// Duration.
    pub took: Duration,
    /// CPU time.
    pub cpu: Duration,
    /// Inputs that broke a property, ran out of time or of memory.
    pub crashes: Vec<PathBuf>,
}

impl Folders {
    /// The log of a target's run.
    #[must_use]
    pub fn log(&self, target: &Target, planted: bool) -> PathBuf {
        let kind = if planted { ".planted" } else { "" };
        self.out.join(format!("{}{kind}.log", target.name))
    }

    /// The corpus of a target that grows from run to run.
    #[must_use]
    pub fn grown(&self, target: &Target) -> PathBuf {
        self.out.join("corpus").join(target.name)
    }

    /// A command for `target` with the arguments that all uses have.
    #[must_use]
    pub fn command(&self, target: &Target) -> Command {
        let mut command = Command::new(&self.program);
        command.env(TARGET, target.name).stdin(Stdio::null()).stdout(Stdio::null());
        // By the clock: beside other programs an input that takes 20 ms took more than 20 s.
        command.args(["-timeout=300", "-report_slow_units=100"]);
        command.args(["-rss_limit_mb=2048", "-detect_leaks=0", "-verbosity=1"]);
        command.arg(format!("-max_len={}", target.most_bytes));
        command
    }
}

/// Writes a target's seeds into `folder`, and their words into `dictionary`.
fn write_seeds(target: &Target, folder: &Path, dictionary: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let seeds = (target.seeds)();
    for (number, seed) in seeds.iter().enumerate() {
        std::fs::write(folder.join(format!("seed-{number}")), seed)?;
    }
    std::fs::write(dictionary, dictionary::of(&seeds))
        .with_context(|| format!("writing {}", dictionary.display()))
}

/// The CPU time that a process has used, and the programs it waited for (proc(5), fields 14 to 17
/// of `stat`, in hundredths of a second). A process has them until it is reaped.
fn cpu_time(pid: Pid) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    let stat = stat.unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let fields = after_name.split_ascii_whitespace().skip(11).take(4);
    let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}

/// Whether a run that used `cpu` has run enough.
fn is_enough(order: Order, progress: &Progress, cpu: Duration) -> bool {
    let settled = !progress.still_grows(cpu) || order.planted;
    cpu >= order.cpu && settled || cpu >= order.cpu * LONGEST
}

/// Ends libFuzzer when it has run enough. Returns when it has exited.
fn end_in_time(pid: Pid, order: Order, progress: &Mutex<Progress>) -> Result<()> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    while waitid(WaitId::Pid(pid), options).context("waiting for libFuzzer")?.is_none() {
        if is_enough(order, &lock(progress), cpu_time(pid)) {
            // libFuzzer then prints its figures and exits with 0.
            kill_process(pid, Signal::USR1).context("ending libFuzzer")?;
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Runs a target.
///
/// # Errors
/// Folders cannot be made, or the program cannot be started.
pub fn run(folders: &Folders, target: &Target, order: Order) -> Result<Ran> {
    let crashes = folders.out.join(if order.planted { "planted" } else { "crashes" });
    let crashes = crashes.join(target.name);
    let grown = if order.planted {
        let folder = folders.out.join("planted-corpus").join(target.name);
        let _absent = std::fs::remove_dir_all(&folder);
        let _absent = std::fs::remove_dir_all(&crashes);
        folder
    } else {
        folders.grown(target)
    };
    std::fs::create_dir_all(&crashes)?;
    let words = folders.out.join(format!("{}.dict", target.name));
    write_seeds(target, &grown, &words)?;
    let log_path = folders.log(target, order.planted);
    let mut log = File::create(&log_path).with_context(|| format!("{}", log_path.display()))?;
    let mut command = folders.command(target);
    let longest = order.cpu.as_secs() * u64::from(LONGEST) * LONGEST_BY_CLOCK;
    command.arg(format!("-max_total_time={longest}"));
    command.arg(format!("-artifact_prefix={}/", crashes.display()));
    command.arg(format!("-dict={}", words.display()));
    command.args(["-print_final_stats=1", "-reload=0"]);
    if order.planted {
        command.env(PLANTED, "1").arg("-use_value_profile=1").arg(&grown);
    } else {
        command.arg(&grown).arg(corpus::folder(target)).env_remove(PLANTED);
        std::fs::create_dir_all(corpus::folder(target))?;
    }
    let start = Instant::now();
    let mut child = command
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {}", folders.program.display()))?;
    let pid = Pid::from_child(&child);
    let progress = Mutex::new(Progress::default());
    let stderr = child.stderr.take();
    std::thread::scope(|scope| -> Result<()> {
        let end = scope.spawn(|| end_in_time(pid, order, &progress));
        for line in stderr.into_iter().flat_map(|stderr| BufReader::new(stderr).split(b'\n')) {
            let line = line?;
            log.write_all(&line)?;
            log.write_all(b"\n")?;
            lock(&progress).line(&String::from_utf8_lossy(&line), cpu_time(pid));
        }
        end.join().expect("no panic")
    })?;
    let cpu = cpu_time(pid);
    child.wait()?;
    let took = start.elapsed();
    let progress = std::mem::take(&mut *lock(&progress));
    let crashes = corpus::files(&crashes)?.into_iter().map(|(path, _)| path).collect();
    Ok(Ran { progress, took, cpu, crashes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_goes_on_while_new_edges_come() {
        let s = Duration::from_secs;
        let order = Order { cpu: s(300), planted: false };
        let last = |at| Progress { last_new_edge: s(at), ..Progress::default() };
        for (at, cpu, enough) in [
            (10, 299, false),
            (10, 300, true),
            (201, 300, false),
            (201, 302, true),
            (801, 1199, false),
            (801, 1200, true),
        ] {
            assert_eq!(is_enough(order, &last(at), s(cpu)), enough, "last at {at}, {cpu} used");
        }
        let planted = Order { planted: true, ..order };
        assert!(is_enough(planted, &last(299), s(300)));
    }

    #[test]
    fn the_cpu_time_of_this_process_grows() {
        let pid = rustix::process::getpid();
        let begun = cpu_time(pid);
        while cpu_time(pid) < begun + Duration::from_millis(30) {
            std::hint::black_box([0u8; 4096]);
        }
    }
}
