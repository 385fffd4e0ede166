//! The demo: boots a Debian guest, bakes it, starts twenty copies of it, and prints how long each
//! took. `target/demo.json` has the figures.
//!
//! The demo uses the typed client, as any other program would.
//!
//! The booted guest and the copies get the same request, over a connection to the vsock port of a
//! Python server. In the booted guest the server has to start first; in a copy the process that was
//! running when the snapshot was taken answers. The demo verifies that: every answer has the random
//! number that the server drew when it started.

mod chain;
mod clones;
mod report;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use clones::{Clone, Demo};
use dayfly_api::types::{
    BakeRequest, BootSource, CreateRequest, Kernel, Lifetime, NetworkRequest, RunRequest, Source,
};
use dayfly_cli::artefacts;
use dayfly_cli::progress::{Steps, seconds};
use dayfly_e2e::{guest, setup};
use dayfly_units::{Bytes, CpuModel, Name};
use report::Report;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Boots a real Debian, bakes it, and starts copies of it.
#[derive(Debug, Parser)]
#[command(name = "dayfly-demo", version)]
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
    /// Copies, first one at a time, then all at once
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=500))]
    clones: u16,
    /// Also ten generations: a snapshot of a clone, a clone of that, and so on
    #[arg(long)]
    chain: bool,
    /// Where the figures go
    #[arg(long, default_value = "target/demo.json")]
    out: PathBuf,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let result = runtime.context("threads").and_then(|runtime| runtime.block_on(run(&options)));
    match result {
        Ok(report) if report.is_well() => ExitCode::SUCCESS,
        Ok(_) => {
            eprintln!("dayfly-demo: not every copy was as it should be; see above");
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("dayfly-demo: {e:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options) -> Result<Report> {
    let begun = Instant::now();
    let steps = Arc::new(Steps::new());
    let host = setup::host().await?;
    let kernel = setup::kernel(&host.client, options.kernel.as_str(), &steps).await?;
    let image = setup::image(&host.client, &steps).await?;
    let ready = begun.elapsed();

    let mut demo = Demo::new(host, steps)?;
    let result = measure(&mut demo, options, &image, &kernel).await;
    // Also after an error.
    let removed = demo.remove_everything().await;
    let mut report = result?;
    removed?;
    let leaks = demo.host.leaks().await?;
    leaks.iter().for_each(|leak| eprintln!("left over: {leak}"));
    report.figures.leaked = leaks.len();
    drop(demo);
    println!("{report}");
    println!("set-up took {}, all of it {}", seconds(ready), seconds(begun.elapsed()));
    report.write(&options.out)?;
    println!("figures: {}", options.out.display());
    Ok(report)
}

async fn measure(
    demo: &mut Demo,
    options: &Options,
    image: &Name,
    kernel: &Kernel,
) -> Result<Report> {
    let boot = loop {
        match boot(demo, options, image, &kernel.name).await {
            Ok(took) => break took,
            Err(why) => demo.lost("the cold boot", why)?,
        }
    };
    let snapshot = loop {
        match bake(demo, options, image, &kernel.name).await {
            Ok(name) => break name,
            Err(why) => demo.lost("the bake", why)?,
        }
    };
    let stored = demo.host.client.snapshot(&snapshot).await?;

    let count = usize::from(options.clones);
    demo.steps.begin(format!("{count} clones, one at a time"));
    let mut serial = Vec::new();
    for index in 1..=count {
        let mut clone = demo.clone_and_ask(&snapshot, index).await?;
        clone.running = None;
        demo.remove_vms().await?;
        serial.push(clone);
    }
    demo.steps.begin(format!("{count} clones at once"));
    let (burst, burst_took) = demo.burst(&snapshot, count).await?;
    demo.steps.begin("removing them");
    demo.remove_vms().await?;
    if options.chain {
        chain::run(demo, &snapshot).await?;
    }
    demo.steps.end();
    let all: Vec<&Clone> = serial.iter().chain(&burst).collect();
    let server = &serial.first().context("no clone")?.sum.started;
    ensure!(
        all.iter().all(|c| c.sum.started == *server),
        "a copy answered from another Python than the baked one"
    );
    let latencies: Vec<Duration> = serial.iter().map(|c| c.took).collect();
    let mut report = Report::new(
        demo.host.kvm(),
        &kernel.release,
        boot,
        &latencies,
        burst_took,
        [&serial, &burst],
        &stored,
    );
    report.figures.lost = demo.lost;
    Ok(report)
}

/// A cold boot, up to the answer to the request that the clones get too.
async fn boot(demo: &mut Demo, options: &Options, image: &Name, kernel: &Name) -> Result<Duration> {
    demo.steps.begin(format!("cold boot of {image} on {kernel}, and its first answer"));
    let source = BootSource {
        image: image.clone(),
        kernel: Some(kernel.clone()),
        memory_bytes: options.memory.0,
        vcpus: options.cpus,
        cpu_model: CpuModel::Host,
        init: None,
    };
    let begun = Instant::now();
    let name = demo.name(&format!("boot-{}", demo.lost))?;
    demo.vms.push(name.to_string());
    let request = RunRequest {
        create: CreateRequest {
            source: Source::Boot(source),
            name: Some(name),
            labels: BTreeMap::new(),
            forks: 0,
            lifetime: Lifetime::UNLIMITED,
            volumes: Vec::new(),
            limits: Default::default(),
            vcpus: None,
            network: NetworkRequest::default(),
        },
        // Python starts, imports its modules and listens.
        exec: guest::start_and_stay(),
        entrypoint: None,
        keep: false,
    };
    let mut exec = demo.host.client.run(&request).await?;
    setup::first_line(&mut exec).await?;
    let mut connection = demo.host.client.connect(&exec.vm.id.to_string(), guest::PORT).await?;
    let line = setup::ask(&mut connection, &["sum", "0"]).await?;
    let took = begun.elapsed();
    let sum: guest::Sum =
        serde_json::from_str(&line).with_context(|| format!("the answer {line:?}"))?;
    ensure!(sum.checksum == guest::checksum(0), "the booted guest computed {}", sum.checksum);
    drop(exec);
    demo.remove_vms().await?;
    Ok(took)
}

async fn bake(demo: &mut Demo, options: &Options, image: &Name, kernel: &Name) -> Result<Name> {
    demo.steps.begin(format!("baking {image}"));
    let name = Name::from(demo.name("baked")?);
    let request = BakeRequest {
        image: image.clone(),
        name: name.clone(),
        kernel: Some(kernel.clone()),
        memory_bytes: options.memory.0,
        vcpus: options.cpus,
        cpu_model: CpuModel::Host,
        warmup: Some(guest::warmup_exec()),
        // By pipe, because a guest cannot connect to itself by vsock; the server's code is the
        // same.
        recording: Some(guest::ask(&["sum", "0"])),
        init: None,
        egress: None,
    };
    let stream = demo.host.client.bake(&request).await?;
    demo.snapshots.push(name.clone());
    artefacts::watch_quietly(stream, &demo.steps).await?;
    Ok(name)
}
