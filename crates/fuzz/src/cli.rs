//! The commands of `dayfly-fuzz`: runs libFuzzer on the targets, and replays single inputs.

#![allow(clippy::print_stdout, reason = "a program that prints figures")]

use crate::run::minimise::minimise;
use crate::run::process::{Folders, Order, run};
use crate::run::summary::{Row, head, write};
use crate::{Target, targets};
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand};
use dayfly_units::sync::lock;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

#[derive(Parser)]
#[command(about = "Fuzzes every decoder")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists the targets.
    List,
    /// Runs libFuzzer on each target.
    Run(Runs),
    /// Runs libFuzzer on each target with its planted faults, from the seeds alone.
    Planted(Runs),
    /// Writes small corpora into the repository, from the corpora of all runs.
    Minimise(Runs),
    /// Runs one input without libFuzzer.
    Replay {
        /// The target's name.
        target: String,
        /// The input.
        file: PathBuf,
    },
}

#[derive(Args)]
struct Runs {
    /// The folder for logs, corpora and crashes.
    #[arg(long, default_value = "target/fuzz")]
    out: PathBuf,
    /// Seconds of CPU time for each target; up to four times as long while it reaches new edges.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Targets that run at once.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Only these targets.
    #[arg(long = "target")]
    targets: Vec<String>,
}

fn chosen(names: &[String]) -> Result<Vec<&'static Target>> {
    if names.is_empty() {
        return Ok(targets::all().collect());
    }
    let named = |name: &String| {
        targets::named(name)
            .with_context(|| format!("no target {name:?}; `dayfly-fuzz list` shows all"))
    };
    names.iter().map(named).collect()
}

/// This program also runs libFuzzer.
fn folders(runs: &Runs) -> Result<Folders> {
    std::fs::create_dir_all(&runs.out)?;
    let program = std::env::current_exe().context("finding this program")?;
    Ok(Folders { program, out: runs.out.clone() })
}

fn fuzz(runs: &Runs, planted: bool) -> Result<()> {
    let folders = folders(runs)?;
    let name = if planted { "planted.json" } else { "summary.json" };
    let path = runs.out.join(name);
    println!("{}", head());
    let todo = Mutex::new(chosen(&runs.targets)?.into_iter());
    let rows: Mutex<Vec<Row>> = Mutex::default();
    let work = || -> Result<()> {
        loop {
            let Some(target) = lock(&todo).next() else { return Ok(()) };
            let cpu = Duration::from_secs(runs.seconds);
            let ran = run(&folders, target, Order { cpu, planted })?;
            let row = Row::of(target, ran, planted);
            println!("{}", row.line());
            let mut rows = lock(&rows);
            rows.push(row);
            write(&path, &rows)?;
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..runs.jobs.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("no panic"))
    })?;
    let rows = std::mem::take(&mut *lock(&rows));
    let executions: u64 = rows.iter().map(|row| row.executions).sum();
    println!("{executions} executions; figures in {}, logs beside it", path.display());
    for finding in rows.iter().flat_map(|row| &row.findings) {
        println!("finding: {}", finding.display());
    }
    let failed = rows.iter().filter(|row| row.failed()).count();
    ensure!(failed == 0, "{failed} of {} targets failed", rows.len());
    Ok(())
}

/// Runs the command that the program was started with.
///
/// # Errors
/// A finding, or what kept the command from running.
pub fn run_command() -> Result<()> {
    match Cli::parse().command {
        Command::List => {
            for target in targets::all() {
                let kind = if target.stateful { "stateful" } else { "" };
                println!("{:<16} {:<9} {}", target.name, kind, target.what);
            }
        }
        Command::Run(runs) => fuzz(&runs, false)?,
        Command::Planted(runs) => fuzz(&runs, true)?,
        Command::Minimise(runs) => {
            let folders = folders(&runs)?;
            for target in chosen(&runs.targets)? {
                let (files, bytes) = minimise(&folders, target)?;
                println!("{:<16} {files:>5} files {bytes:>7} bytes", target.name);
            }
        }
        Command::Replay { target, file } => {
            let Some(found) = targets::named(&target) else {
                bail!("no target {target:?}; `dayfly-fuzz list` shows all");
            };
            let input = std::fs::read(&file).with_context(|| format!("{}", file.display()))?;
            println!("{:?}", found.check(&input));
        }
    }
    Ok(())
}
