//! `dayflyd`: see the library.

use anyhow::Context;
use clap::Parser;
use dayfly_daemon::config::{self, Config, Deadlines};
use dayfly_daemon::net::Prefix;
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};

/// The daemon of dayfly: virtual machines that are born fast, live a day, and are gone.
#[derive(Debug, Parser)]
#[command(name = "dayflyd", version)]
struct Options {
    /// Folder of images, kernels, layers and snapshots.
    #[arg(long, env = "DAYFLY_STATE", default_value = "/var/lib/dayfly")]
    state: PathBuf,
    /// Folder of the socket and of the folders of VMs.
    #[arg(long, env = "DAYFLY_RUN", default_value = "/run/dayfly")]
    run: PathBuf,
    /// The dayfly-vmm program; the one beside dayflyd where none is given.
    #[arg(long, env = "DAYFLY_VMM")]
    vmm: Option<PathBuf>,
    /// How much memory VMs may have in all, in percent of the host's: clones share what they do not write.
    #[arg(long, env = "DAYFLY_OVERCOMMIT", value_name = "PERCENT", default_value_t = dayfly_daemon::config::OVERCOMMIT)]
    overcommit: u32,
    /// How many VMMs and clones may be made ahead of demand and wait, 0 for none; without it, as many as fit a twentieth of the memory.
    #[arg(long, env = "DAYFLY_POOL", value_name = "N")]
    pool: Option<usize>,
    /// The addresses of VMs, such as 10.88.0.0/16, or none: then they have no network.
    #[arg(long, env = "DAYFLY_NETWORK", value_name = "ADDRESS/BITS", default_value = dayfly_daemon::config::NETWORK, value_parser = network)]
    network: Network,
    /// How many times as long as usual guests, VMMs and pages may take, 1 to 100: more than once on a host that is emulated, or far too small.
    #[arg(long, env = "DAYFLY_PATIENCE", value_name = "TIMES", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    patience: u32,
}

/// Of [`Options::network`].
#[derive(Debug, Clone, Copy)]
struct Network(Option<Prefix>);

fn network(text: &str) -> Result<Network, String> {
    if text == "none" { Ok(Network(None)) } else { text.parse().map(|prefix| Network(Some(prefix))) }
}

fn beside() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("finding dayflyd's own program")?;
    Ok(own.with_file_name("dayfly-vmm"))
}

fn main() -> anyhow::Result<()> {
    dayfly_daemon::heap::keep_less();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.context("starting threads")?.block_on(run())
}

async fn run() -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let options = Options::parse();
    let absolute = |path: PathBuf| std::path::absolute(&path).with_context(|| format!("{}", path.display()));
    let vmm = absolute(options.vmm.map_or_else(beside, Ok)?)?;
    anyhow::ensure!(vmm.is_file(), "{}: no such program; DAYFLY_VMM names another", vmm.display());
    let nodes = dayfly_host::numa::nodes().context("looking at the host's memory")?;
    let memory_bytes = nodes.iter().map(|node| node.memory_bytes).sum();
    let config = Config {
        state: absolute(options.state)?,
        run: absolute(options.run)?,
        vmm,
        overcommit: options.overcommit,
        pool: options.pool.unwrap_or_else(|| config::pool(memory_bytes)),
        network: options.network.0,
        deadlines: Deadlines::default().times(options.patience),
    };
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    dayfly_daemon::serve::serve(config, async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
    .await
}
