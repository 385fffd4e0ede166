//! The series, in their order: cold boots, a bake, clones one at a time, clones at once.
//!
//! **One at a time**: every clone is asked for when the host is quiet, so that the pool has made
//! the next one. The clones of a series live until its end. CPU time of one clone: what the host's
//! CPUs were busy from the first request of a series until the host was quiet after the last, less
//! what they are busy in the same time with nothing asked for (the mean of three seconds before the
//! series and three after it, with all its clones alive), by the number of clones. So it holds all
//! that a clone costs: the client, the daemon, the pool's making of the next one, the VMM, the
//! guest's own instructions. Not in it: its removal, and looking at it.
//!
//! **At once**: asked for when the pool has shrunk to its least (one warm clone and one warm VMM,
//! beside those of other snapshots), so that hardly anything is made before the clock runs. The
//! clock runs from the first request to the last exit; removal is not measured. Compared with the
//! CPU time of as many single clones, divided by the number of CPUs.

use super::answer::{Answer, Guests, first_answer, program, snapshot};
use super::cpu::{self, Cpu};
use crate::prelude::*;
use crate::stock::remove_vms;
use dayfly_api::types::{BakeRequest, BootSource, Source};
use dayfly_cli::artefacts;
use dayfly_units::CpuModel;
use futures::future::try_join_all;
use std::sync::Arc;
use tokio::sync::Barrier;

/// Options of `linux`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// The guest's kernel
    #[arg(long, default_value = "6.12")]
    pub kernel: Name,
    /// vCPUs of every guest
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub cpus: u8,
    /// RAM of every guest
    #[arg(long, default_value = "256M")]
    pub memory: Bytes,
    /// Cold boots
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub boots: u16,
    /// Clones at once
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=500))]
    pub clones: u16,
    /// Series of 16 clones one at a time
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=20))]
    pub series: u16,
    /// Rounds of clones at once
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=20))]
    pub bursts: u16,
    /// Bake without recording the program: its pages are not mapped ahead in the clones
    #[arg(long)]
    pub unrecorded: bool,
    /// Measure with the daemon at this socket and print the samples as JSON; the daemon has kernel
    /// and image
    #[arg(long, hide = true)]
    pub inside: Option<PathBuf>,
    /// The image, for `--inside`
    #[arg(long, hide = true)]
    pub image: Option<Name>,
}

/// What was measured where the VMs are.
#[derive(Debug, Serialize, Deserialize)]
pub struct Measured {
    /// Cold boots to the first answer.
    pub boots: Series,
    /// Clones to the first answer, one at a time.
    pub clones: Series,
    /// CPU time of each series.
    pub costs: Vec<Cpu>,
    /// Clones at once.
    pub bursts: Vec<Burst>,
    /// Guests that the emulation crashed, and that were made again.
    pub lost: usize,
    /// CPUs of the host that has the VMs.
    pub cpus: usize,
}

/// Times to the first answer.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Series {
    /// Microseconds since the request was sent.
    pub took_us: Vec<u64>,
    /// Stages on the way: those of the timeline since the daemon had the request, the client's
    /// since the request was sent.
    pub stages: Phases,
}

impl Series {
    async fn add(&mut self, guests: &Guests, answer: &Answer) -> Result<()> {
        let timeline = guests.client.vm(&answer.vm.to_string()).await?.timeline;
        for (stage, at_us) in &timeline {
            self.stages.add(stage, *at_us);
        }
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.stages.add("client: program started", us(answer.started));
        self.stages.add("client: program's output", us(answer.said));
        self.stages.add("client: program's exit", us(answer.took));
        self.took_us.push(us(answer.took));
        Ok(())
    }
}

/// Clones of a series: few enough that those that idle hardly count.
pub const SERIES: usize = 16;
/// Clones before the first series, which make the pool as large as a series needs it.
const EARLIER: usize = 8;
/// How long nothing is asked for, to learn what the host does then.
const BACKGROUND: Duration = Duration::from_secs(3);
/// A pool that remembers a demand gives some of it up every two seconds: what does not shrink for
/// so long is at its least.
const SHRUNK: Duration = Duration::from_secs(5);

/// Runs all of them.
pub async fn run(mut guests: Guests, options: &Options, image: &Name) -> Result<Measured> {
    let steps = guests.losses.steps.clone();
    let boot = BootSource {
        image: image.clone(),
        kernel: Some(options.kernel.clone()),
        memory_bytes: options.memory.0,
        vcpus: options.cpus,
        cpu_model: CpuModel::Host,
        init: None,
    };
    let mut boots = Series::default();
    for n in 1..=options.boots {
        steps.begin(format!("cold boot {n} of {}", options.boots));
        cpu::quiet(0).await?;
        let answer = guests.answer("a cold boot", &Source::Boot(boot.clone())).await?;
        boots.add(&guests, &answer).await?;
        remove_vms(&guests.client).await?;
    }
    bake(&mut guests, options, &boot).await?;

    let count = usize::from(options.clones);
    let source = Source::Snapshot(snapshot()?);
    steps.begin("the pool fills");
    for alive in 1..=EARLIER {
        guests.answer("a clone", &source).await?;
        cpu::quiet(alive).await?;
    }
    remove_vms(&guests.client).await?;
    let (mut clones, mut costs) = (Series::default(), Vec::new());
    while costs.len() < usize::from(options.series) {
        let number = costs.len() + 1;
        steps.begin(format!("{SERIES} clones, one at a time ({number} of {})", options.series));
        // A series that lost a guest has its times, but not what it cost.
        costs.extend(one_at_a_time(&mut guests, &source, SERIES, &mut clones).await?);
    }

    let mut bursts = Vec::new();
    while bursts.len() < usize::from(options.bursts) {
        steps.begin(format!("{count} clones at once ({} of {})", bursts.len() + 1, options.bursts));
        bursts.extend(burst(&mut guests, &source, count).await?);
    }
    steps.end();
    let (lost, cpus) = (guests.losses.count, std::thread::available_parallelism()?.get());
    Ok(Measured { boots, clones, costs, bursts, lost, cpus })
}

/// Bakes: boots, runs the program once, snapshots; and records it, unless that is not wanted.
async fn bake(guests: &mut Guests, options: &Options, boot: &BootSource) -> Result<()> {
    let request = BakeRequest {
        image: boot.image.clone(),
        name: snapshot()?,
        kernel: boot.kernel.clone(),
        memory_bytes: boot.memory_bytes,
        vcpus: boot.vcpus,
        cpu_model: CpuModel::Host,
        warmup: Some(program()),
        recording: (!options.unrecorded).then(program),
        init: None,
        egress: None,
    };
    let (client, steps) = (&guests.client, guests.losses.steps.clone());
    let baked = async || {
        steps.begin("baking");
        artefacts::watch_quietly(client.bake(&request).await?, &steps).await
    };
    guests.losses.kept("the bake", baked).await.map(drop)
}

/// One series; gives the CPU time of a clone and what else was learnt, unless a guest was lost.
async fn one_at_a_time(
    guests: &mut Guests,
    source: &Source,
    count: usize,
    series: &mut Series,
) -> Result<Option<Cpu>> {
    let lost = guests.losses.count;
    cpu::quiet(0).await?;
    let before = cpu::background(BACKGROUND).await?;
    let begun = cpu::read()?;
    let mut answers = Vec::with_capacity(count);
    for alive in 1..=count {
        answers.push(guests.answer("a clone", source).await?);
        cpu::quiet(alive).await?;
    }
    let spent = begun.spent()?;
    let after = cpu::background(BACKGROUND).await?;
    for answer in &answers {
        series.add(guests, answer).await?;
    }
    remove_vms(&guests.client).await?;
    Ok((guests.losses.count == lost).then(|| Cpu::new(count, spent, before, after)))
}

/// A round of clones that were asked for at once.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Burst {
    /// From the first request to the last exit.
    pub wall_ms: f64,
    /// CPUs busy meanwhile.
    pub cpus: f64,
    /// CPU time of all, until the host was quiet again.
    pub busy_ms: f64,
    /// VMMs made ahead when it began.
    pub waiting: usize,
}

/// Clones asked for at the same moment; nothing where a guest was lost, whose time would be
/// another's.
async fn burst(guests: &mut Guests, source: &Source, count: usize) -> Result<Option<Burst>> {
    let waiting = shrunk(guests).await?;
    cpu::quiet(0).await?;
    let start = Arc::new(Barrier::new(count + 1));
    let tasks: Vec<_> = std::iter::repeat_with(|| {
        let (client, source, start) = (guests.client.clone(), source.clone(), start.clone());
        tokio::spawn(async move {
            start.wait().await;
            first_answer(&client, source).await
        })
    })
    .take(count)
    .collect();
    let reading = cpu::read()?;
    start.wait().await;
    let begun = Instant::now();
    let answers = try_join_all(tasks).await.context("a task")?;
    let wall = begun.elapsed();
    let meanwhile = reading.spent()?;
    cpu::quiet(count).await?;
    let busy = reading.spent()?.busy;
    let lost = guests.losses.count;
    for why in answers.into_iter().filter_map(Result::err) {
        guests.losses.again("a clone of many at once", why)?;
    }
    remove_vms(&guests.client).await?;
    let [wall_ms, busy_ms] = [wall, busy].map(|time| rounded(time.as_secs_f64() * 1e3));
    let cpus = meanwhile.cpus();
    Ok((guests.losses.count == lost).then_some(Burst { wall_ms, cpus, busy_ms, waiting }))
}

/// Waits until the pool has forgotten the last demand; gives how many wait then, those of other
/// snapshots among them.
async fn shrunk(guests: &Guests) -> Result<usize> {
    let mut before = (guests.waiting().await?, Instant::now());
    while before.1.elapsed() < SHRUNK {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = guests.waiting().await?;
        if now != before.0 {
            before = (now, Instant::now());
        }
    }
    Ok(before.0)
}
