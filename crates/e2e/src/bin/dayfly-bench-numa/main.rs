//! `numa`: which memory node's CPUs free a VM's memory, in machines with 2 to 4 emulated nodes, one after the other.
//!
//! Each machine is one of its own, made for this and stopped at the end; `dayfly-bench numa` is copied in and does the rest, with the
//! microguest and a daemon of its own. Emulated nodes have no distances: what is worth something is where, not how long.
//!
//! A page that another node's CPU freed, or of which nobody saw that it was freed, makes this fail.

mod figures;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use dayfly_cli::progress::Steps;
use dayfly_cli::{connect, home};
use dayfly_e2e::inside;
use dayfly_machine::{Machine, Stopped};
use figures::{Figures, Machines};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The copy: beside the programs that the machine carries.
const COPY: &str = "/usr/bin/dayfly-bench";
/// Where it writes its figures, in the machine.
const OUT: &str = "/run/dayfly-bench";
/// How long the machine may take to stop by itself.
const STOP: Duration = Duration::from_secs(20);

/// Counts, by memory node, which CPUs free the memory of VMs that die.
#[derive(Debug, Parser)]
#[command(name = "dayfly-bench-numa", version)]
struct Options {
    /// Memory nodes of the machines, one number for each
    #[arg(long, value_delimiter = ',', default_value = "2,3,4", value_parser = clap::value_parser!(u32).range(2..=4))]
    nodes: Vec<u32>,
    /// CPUs of the machine, all nodes together
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=16))]
    cpus: u32,
    /// Where the machine is
    #[arg(long, default_value = "target/bench/numa-machine")]
    home: PathBuf,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/numa.json")]
    out: PathBuf,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(&Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("dayfly-bench-numa: {e:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options) -> Result<()> {
    let folder = std::path::absolute(&options.home).context("the machine's folder")?;
    let mut machines = Machines::default();
    for nodes in &options.nodes {
        let measured = tokio::select! {
            measured = measured(options.cpus, *nodes, &folder) => measured,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted; the machine is stopped")),
        };
        let place = folder.clone();
        let stopped = tokio::task::spawn_blocking(move || stop(&place)).await?;
        let figures = measured.with_context(|| format!("a machine with {nodes} memory nodes"))?;
        stopped?;
        machines.add(*nodes, figures)?;
    }
    if let Some(folder) = options.out.parent() {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let text = serde_json::to_string_pretty(&machines)? + "\n";
    std::fs::write(&options.out, text).with_context(|| options.out.display().to_string())?;
    println!("  {}", options.out.display());
    machines.judge()
}

/// The figures, as the copy wrote them.
async fn measured(cpus: u32, nodes: u32, home: &Path) -> Result<Figures> {
    let place = home.to_owned();
    let machine = tokio::task::spawn_blocking(move || start(&place, cpus, nodes)).await??;
    inside::copy(machine, home::program("dayfly-bench")?, COPY).await?;
    let status = inside::command(home, [COPY, "numa", "--out", OUT])?.status().await?;
    ensure!(status.success(), "measuring in the machine failed; see above");
    let figures = inside::command(home, ["cat", &format!("{OUT}/numa.json")])?.output().await?;
    ensure!(figures.status.success(), "the machine does not give its figures; see above");
    serde_json::from_slice(&figures.stdout).context("the figures from the machine")
}

fn start(home: &Path, cpus: u32, nodes: u32) -> Result<Machine> {
    let steps = Steps::new();
    let mut options = connect::machine_options(&steps)?;
    (options.cpus, options.numa_nodes) = (cpus, nodes);
    // A machine left over by a run that was killed may have others.
    stop(home)?;
    Machine::init(home, &options, &mut |text| steps.begin(text)).context("making the machine")?;
    connect::start_machine(home, &steps)
}

fn stop(home: &Path) -> Result<()> {
    let Ok(machine) = Machine::open(home) else { return Ok(()) };
    let stopped = machine.stop(STOP, &mut |_| {}).context("stopping the machine")?;
    if stopped == Stopped::Killed {
        eprintln!("the machine did not stop by itself and was killed");
    }
    Ok(())
}
