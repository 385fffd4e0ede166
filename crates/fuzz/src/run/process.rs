//! One run of libFuzzer on one target.

use super::output::Progress;
use super::{PLANTED, TARGET};
use crate::corpus;
use crate::target::Target;
use anyhow::{Context, Result};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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
    /// Duration in seconds.
    pub seconds: u64,
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
    /// CPU time in seconds.
    pub cpu_s: f64,
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
        command.args(["-timeout=20", "-rss_limit_mb=2048", "-detect_leaks=0", "-verbosity=1"]);
        command.arg(format!("-max_len={}", target.most_bytes));
        command
    }
}

/// Writes a target's seeds into `folder`.
fn write_seeds(target: &Target, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    for (number, seed) in (target.seeds)().iter().enumerate() {
        std::fs::write(folder.join(format!("seed-{number}")), seed)?;
    }
    Ok(())
}

/// Waits for `child`. Returns its CPU time in seconds, and that of the programs it waited for
/// (proc(5), fields 14 to 17 of `stat`, in hundredths, which a process has until it is reaped).
fn wait(child: &mut Child) -> Result<f64> {
    let pid = Pid::from_child(child);
    waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
        .context("waiting for libFuzzer")?;
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    child.wait()?;
    let stat = stat.unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let fields = after_name.split_ascii_whitespace().skip(11).take(4);
    let ticks: f64 = fields.filter_map(|field| field.parse::<u32>().ok()).map(f64::from).sum();
    Ok(ticks / 100.0)
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
    write_seeds(target, &grown)?;
    let log_path = folders.log(target, order.planted);
    let mut log = File::create(&log_path).with_context(|| format!("{}", log_path.display()))?;
    let mut command = folders.command(target);
    command.arg(format!("-max_total_time={}", order.seconds));
    command.arg(format!("-artifact_prefix={}/", crashes.display()));
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
    let mut progress = Progress::default();
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).split(b'\n') {
            let line = line?;
            log.write_all(&line)?;
            log.write_all(b"\n")?;
            progress.line(&String::from_utf8_lossy(&line), start.elapsed());
        }
    }
    let cpu_s = wait(&mut child)?;
    let took = start.elapsed();
    let crashes = corpus::files(&crashes)?.into_iter().map(|(path, _)| path).collect();
    Ok(Ran { progress, took, cpu_s, crashes })
}
