//! # bench
//!
//! The room for benchmarks: what dayfly costs, measured from outside, against the least that it could cost (the *floor*, a C
//! program in `floor/`, compiled and run in the same minute). Each writes `target/bench/NAME.json` and a plot, and prints a table.
//!
//! Everything runs on the bare `/dev/kvm` with the microguest, because that runs on any: a daemon of its own in a temporary folder,
//! asked over its unix socket by the typed client, as users ask it. Births end at the restored guest's first write to a port, as
//! the VMM saw it; that clock and the client's are one (CLOCK_MONOTONIC).
//!
//! `soak` measures nothing that could be fast: it makes and ends thousands of VMs, kills their processes meanwhile, and fails where
//! anything is left of them.
//!
//! What may not enter: anything that makes a figure look better than what a user gets; switches in other rooms that exist for a
//! benchmark alone; retries.

mod bake;
mod birth;
mod chain;
mod common;
mod death;
mod faults;
mod floor;
mod fork;
mod jobs;
mod numa;
mod random;
mod room;
mod scale;
mod soak;
mod trace;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// Which benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// Request to first port write, one at a time.
    Birth,
    /// Clones of deep chains of snapshots.
    Chain,
    /// Many at once, and many beside many.
    Scale,
    /// How fast memory comes back.
    Death,
    /// What a page costs that a pager brings.
    Faults,
    /// Clones of a VM that runs.
    Fork,
    /// Short jobs per minute, beside idle VMs.
    Jobs,
    /// Births of a trace, in bursts.
    Trace,
    /// Births and deaths with kills from outside, and what is left after them; only where it is asked for.
    Soak,
    /// Which node's CPUs free a VM's memory; only where it is named, on a host with several nodes.
    Numa,
}

/// Benchmarks of dayfly against a C program with nothing to spare.
#[derive(Debug, Parser)]
#[command(name = "dayfly-bench", version)]
struct Options {
    /// Which; where none is given all but `soak` and `numa`.
    benches: Vec<Bench>,
    /// Larger: 2,000 VMs, 8 GiB.
    #[arg(long)]
    full: bool,
    /// Births of `soak`.
    #[arg(long, value_name = "N", default_value_t = soak::BIRTHS)]
    births: usize,
    /// Where results go.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Replay this trace (CSV: `arrival_ms,memory_mib,lifetime_ms`) instead of one that is made.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write the trace that is replayed otherwise, and do nothing else.
    #[arg(long, value_name = "FILE")]
    make_trace: Option<PathBuf>,
}

/// The folder of our programs, and the one for results: `target/bench`, wherever target is.
fn places(out: Option<PathBuf>) -> Result<(PathBuf, PathBuf)> {
    let own = std::env::current_exe().context("finding dayfly-bench's own program")?;
    let programs = own.parent().context("a program lies in a folder")?.to_owned();
    // target/<triple>/release
    let target = programs.ancestors().nth(2).unwrap_or(Path::new("target"));
    let out = out.unwrap_or_else(|| target.join("bench"));
    std::fs::create_dir_all(&out).with_context(|| format!("making {}", out.display()))?;
    Ok((programs, out))
}

async fn run(options: &Options, programs: &Path, out: &Path) -> Result<()> {
    let wanted = |bench| options.benches.is_empty() || options.benches.contains(&bench);
    if options.benches.contains(&Bench::Numa) {
        numa::run(programs, out).await?;
    }
    // The machine has no compiler.
    if options.benches == [Bench::Numa] {
        return Ok(());
    }
    if wanted(Bench::Faults) {
        faults::run(out)?;
    }
    let floor = floor::compile(out)?;
    if wanted(Bench::Birth) {
        birth::run(programs, &floor, out).await?;
    }
    if wanted(Bench::Chain) {
        chain::run(programs, &floor, out).await?;
    }
    if wanted(Bench::Scale) {
        scale::run(programs, &floor.fast, out, options.full).await?;
    }
    if wanted(Bench::Death) {
        death::run(programs, &floor.fast, out, options.full).await?;
    }
    if wanted(Bench::Fork) {
        fork::run(programs, &floor.fast, out, options.full).await?;
    }
    if wanted(Bench::Jobs) {
        jobs::run(programs, out).await?;
    }
    if wanted(Bench::Trace) {
        trace::run(programs, out, options.trace.as_deref()).await?;
    }
    if options.benches.contains(&Bench::Soak) {
        soak::run(programs, out, options.births).await?;
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match until_a_signal(Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dayfly-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn until_a_signal(options: Options) -> Result<()> {
    if let Some(path) = &options.make_trace {
        return trace::make(path);
    }
    let (programs, out) = places(options.out.clone())?;
    if !Path::new("/dev/kvm").exists() {
        bail!("/dev/kvm: there is none; the benchmarks need a host with KVM (any: their guest is tiny)");
    }
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    // What is dropped here removes its processes and its folder.
    tokio::select! {
        result = run(&options, &programs, &out) => result,
        _ = tokio::signal::ctrl_c() => bail!("interrupted; what was started is gone"),
        _ = terminate.recv() => bail!("terminated; what was started is gone"),
    }
}
