//! # bench
//!
//! What dayfly costs, measured from outside: `dayfly-bench SCENARIO`. Each scenario prints a table,
//! and writes `target/bench/SCENARIO.json` and plots. Most scenarios compare with the *floor*, the
//! least that a VM could cost: a C program in `floor/`, compiled and run in the same minute.
//!
//! | folder | concern |
//! |---|---|
//! | `figures` | samples, tables, plots, the report |
//! | `testbed` | a daemon of the benchmark's own with the microguest, and the floor |
//! | `stock` | stock Linux guests, natively or in a machine |
//! | `scenarios` | what is measured |
//!
//! Most scenarios run on any `/dev/kvm` with the microguest and a daemon in a temporary folder. The
//! typed client asks that daemon over its unix socket, as users do. A birth ends at the restored
//! guest's first write to a port, as the VMM saw it; the VMM and the client read the same clock
//! (CLOCK_MONOTONIC). `dns` needs no VM. `linux`, `io`, `store`, `restore` and `prefetch` need
//! stock Linux guests; where KVM cannot run Linux, they use a machine, as `numa` does.
//!
//! What may not enter: anything that makes a figure look better than what a user gets; switches in
//! other crates that exist for a benchmark alone; retries.

mod counts;
mod figures;
mod places;
mod prelude;
mod proc;
mod requests;
mod scenarios;
mod stock;
mod testbed;

use clap::{Parser, Subcommand};
use prelude::*;
use scenarios::restore::Kind;
use scenarios::{
    birth, chain, closer, death, dns, faults, first, fork, io, jobs, linux, numa, restore,
};
use scenarios::{scale, soak, store, trace};
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// What dayfly costs, one scenario at a time
#[derive(Debug, Parser)]
#[command(name = "dayfly-bench", version, args_override_self = true)]
struct Options {
    /// The folder for results [default: target/bench]
    #[arg(long, global = true, value_name = "FOLDER")]
    out: Option<PathBuf>,
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Debug, Subcommand)]
enum Scenario {
    /// Request to first port write, one at a time
    Birth(birth::Options),
    /// Many births at once, and many beside many
    Scale(scale::Options),
    /// Clones of deep chains of snapshots
    Chain(chain::Options),
    /// Who pays for the work of VMs: bills against a tracer, fairness, attacks
    Closer(closer::Options),
    /// The first birth of a daemon, against one that finds a clone ready
    First(first::Options),
    /// A page that comes from a pager
    Faults(faults::Options),
    /// How fast memory is free again
    Death(death::Options),
    /// Clones of a running VM
    Fork(fork::Options),
    /// Short jobs a minute, beside idle VMs
    Jobs(jobs::Options),
    /// Births of a trace, in bursts
    Trace(trace::Options),
    /// Names of VMs while one VM floods their service
    Dns,
    /// Births and deaths with kills from outside; fails if anything is left
    Soak(soak::Options),
    /// Which memory node's CPUs free a VM's memory, on this host and in machines
    Numa(numa::Options),
    /// Boot against clone of a stock Linux, to the first answer of a program
    #[command(alias = "birth-linux")]
    Linux(linux::Options),
    /// Disk and network of a stock Linux, against QEMU's virtio devices
    Io(io::Options),
    /// What snapshots of stock guests take in the store, and whether they come back bit for bit
    Store(store::Options),
    /// How long clones wait whose memory has not arrived, against an eager restore
    Restore(restore::Options),
    /// Which pages to fetch first: policies against each other
    Prefetch(restore::Options),
}

impl Scenario {
    async fn run(&self, places: &Places) -> Result<()> {
        match self {
            Self::Birth(options) => birth::run(options, places).await,
            Self::Scale(options) => scale::run(options, places).await,
            Self::Chain(options) => chain::run(options, places).await,
            Self::Closer(options) => closer::run(options, places).await,
            Self::First(options) => first::run(options, places).await,
            Self::Faults(options) => faults::run(options, places),
            Self::Death(options) => death::run(options, places).await,
            Self::Fork(options) => fork::run(options, places).await,
            Self::Jobs(options) => jobs::run(options, places).await,
            Self::Trace(options) => trace::run(options, places).await,
            Self::Dns => dns::run(places).await,
            Self::Soak(options) => soak::run(options, places).await,
            Self::Numa(options) => numa::run(options, places).await,
            Self::Linux(options) => linux::run(options, places).await,
            Self::Io(options) => io::run(options, places).await,
            Self::Store(options) => store::run(options, places).await,
            Self::Restore(options) => restore::run(Kind::Restore, options, places).await,
            Self::Prefetch(options) => restore::run(Kind::Prefetch, options, places).await,
        }
    }

    /// Whether the client has several threads: many requests to stock guests are under way at once.
    /// The other scenarios have one, so that a birth is not measured with switches between threads.
    const fn is_threaded(&self) -> bool {
        matches!(self, Self::Linux(_) | Self::Store(_) | Self::Restore(_) | Self::Prefetch(_))
    }

    /// After a signal: stops machines and removes VMs. What belongs to this process a drop has
    /// removed already.
    async fn clean_up(&self, places: &Places) -> Result<()> {
        let (homes, what_stays) = match self {
            Self::Linux(_) => return linux::clean_up().await,
            Self::Numa(options) => (vec![options.home(places)], ""),
            Self::Io(options) => {
                io::clean_up().await?;
                (vec![options.home(places)], "")
            }
            Self::Store(options) => (options.homes(places), "--resume goes on; "),
            Self::Restore(options) | Self::Prefetch(options) => {
                (vec![options.home(places)], "what was recorded stays; ")
            }
            _ => return Ok(()),
        };
        eprint!("{what_stays}");
        homes.iter().try_for_each(|home| stock::machine::stop(home))
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    if options.scenario.is_threaded() {
        runtime = tokio::runtime::Builder::new_multi_thread();
        runtime.worker_threads(2);
    }
    let runtime = runtime.enable_all().build().context("threads");
    match runtime.and_then(|runtime| runtime.block_on(until_a_signal(&options))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dayfly-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn until_a_signal(options: &Options) -> Result<()> {
    let places = Places::new(options.out.as_deref())?;
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let name = tokio::select! {
        result = options.scenario.run(&places) => return result,
        _ = tokio::signal::ctrl_c() => "interrupted",
        _ = terminate.recv() => "terminated",
    };
    options.scenario.clean_up(&places).await?;
    bail!("{name}; what was started is gone")
}
