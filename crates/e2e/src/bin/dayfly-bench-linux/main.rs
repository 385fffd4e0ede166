//! `birth-linux`: what a cold boot and a clone of a stock Linux cost to the first answer of a program, and what 64 clones at once cost.
//!
//! A program is run by `POST /v1/run`, in a guest that is booted for it and in one that is cloned for it: the very same program, asked
//! for in the same way. The clock runs in the client from before the request is sent until it has read the program's exit.
//!
//! Who asks is where the VMs are: natively this process, else a copy of this program in the machine ([`inside`]), because the
//! machine's forwarded socket would cost more than some of what is measured. The copy only measures; what it leaves is removed from
//! here, also when it fails or is interrupted.
//!
//! | file | concern |
//! |---|---|
//! | `measure` | the series, in their order |
//! | `guests` | one VM and its answer; losses to the emulation |
//! | `cpu` | CPU time of the host that has the VMs, and its quiet |
//! | `times` | times, their ranks and stages |
//! | `figures` | what is written, and the table |
//! | `inside` | this program in the machine |

mod cpu;
mod figures;
mod guests;
mod inside;
mod measure;
mod times;

use anyhow::{Context, Result, bail};
use clap::Parser;
use dayfly_cli::progress::Steps;
use dayfly_e2e::setup::{self, Host};
use dayfly_units::{Bytes, Name};
use figures::Figures;
use guests::Guests;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Cold boot against clone, both to the first answer of a program, with a stock Linux.
#[derive(Debug, Clone, Parser)]
#[command(name = "dayfly-bench-linux", version)]
struct Options {
    /// The guest's kernel
    #[arg(long, default_value = "6.12")]
    kernel: Name,
    /// vCPUs of every guest
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    cpus: u8,
    /// RAM of every guest
    #[arg(long, default_value = "256M")]
    memory: Bytes,
    /// Cold boots
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    boots: u16,
    /// Clones at once
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=500))]
    clones: u16,
    /// Series of 16 clones one at a time
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=20))]
    series: u16,
    /// Times that all clones are asked for at once
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=20))]
    bursts: u16,
    /// Bake without rehearsing the program: its pages are not laid ready in the clones
    #[arg(long)]
    unrehearsed: bool,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/birth-linux.json")]
    out: PathBuf,
    /// Measure with the daemon at this socket and print the figures as JSON; kernel and image are there
    #[arg(long, hide = true)]
    inside: Option<PathBuf>,
    /// The image, for `--inside`
    #[arg(long, hide = true)]
    image: Option<Name>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let result = runtime.context("threads").and_then(|runtime| {
        runtime.block_on(async {
            match &options.inside {
                Some(socket) => inside::measure(&options, socket).await,
                None => until_a_signal(&options).await,
            }
        })
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("dayfly-bench-linux: {e:#}");
            ExitCode::FAILURE
        }
    }
}

async fn until_a_signal(options: &Options) -> Result<()> {
    let before = load();
    let steps = Arc::new(Steps::new());
    let host = setup::host().await?;
    let kernel = setup::kernel(&host.client, options.kernel.as_str(), &steps).await?;
    let image = setup::image(&host.client, &steps).await?;
    steps.end();
    println!(
        "birth-linux: {} boots, {} x {} clones one at a time, {} x {} at once; Linux {}, {}, {} vCPU; load {}",
        options.boots,
        options.series,
        measure::SERIES,
        options.bursts,
        options.clones,
        kernel.release,
        options.memory,
        options.cpus,
        before
    );
    guests::remove_all(&host.client).await?;
    let measured = tokio::select! {
        measured = measured(&host, options, &image, &steps) => measured,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted; what was started is gone")),
    };
    steps.end();
    // What was made goes again, whether it went well or not.
    let removed = guests::remove_all(&host.client).await;
    let mut figures = measured?;
    removed?;
    let leaks = host.leaks().await?;
    leaks.iter().for_each(|leak| eprintln!("left over: {leak}"));
    figures.leaked = leaks.len();
    figures.kvm = host.kvm().into();
    figures.kernel = kernel.release;
    figures.load = before;
    println!("{figures}");
    write(&options.out, &figures)?;
    if figures.leaked > 0 {
        bail!("{} things were left over", figures.leaked);
    }
    Ok(())
}

async fn measured(host: &Host, options: &Options, image: &Name, steps: &Arc<Steps>) -> Result<Figures> {
    match &host.machine {
        Some(home) => inside::run(home, options, image).await,
        None => {
            let guests = Guests::new(host.client.clone(), steps.clone(), false);
            measure::run(guests, options, image).await
        }
    }
}

/// How busy this host was: figures taken beside a compiler are worth little.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

fn write(path: &Path, figures: &Figures) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let text = serde_json::to_string_pretty(figures)? + "\n";
    std::fs::write(path, text).with_context(|| path.display().to_string())?;
    println!("  {}", path.display());
    Ok(())
}
