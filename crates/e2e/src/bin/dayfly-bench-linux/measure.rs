//! The series, in their order: cold boots, a bake, clones one at a time, clones at once.
//!
//! **One at a time**: every clone is asked for when the host is quiet, so that the pool has made the next one. The clones of a series live
//! until its end. CPU time of one clone: what the host's CPUs were busy from the first request of a series until the host was quiet
//! after the last, less what they are busy in the same time with nothing asked for (the mean of three seconds before the series and
//! three after it, with all its clones alive), by the number of clones. So it holds all that a clone costs: the client, the daemon, the pool's
//! making of the next one, the VMM, the guest's own instructions. Not in it: its removal, and looking at it.
//!
//! **At once**: asked for when the pool has shrunk to its least (one clone and one shell, beside those of other snapshots), so that hardly
//! anything is made before the clock runs, from the first request to the last exit. Removal is not in it. Held against the CPU time
//! of as many single clones, spread over all CPUs.

use crate::Options;
use crate::cpu;
use crate::figures::{AtOnce, Cpu, Figures};
use crate::guests::{self, Answer, Guests};
use crate::times::Series;
use anyhow::{Context, Result};
use dayfly_api::types::{BakeRequest, BootSource, Source};
use dayfly_cli::artefacts;
use dayfly_units::Name;
use futures::future::join_all;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Barrier;

/// Clones of a series: few enough that those that idle hardly count.
pub const SERIES: usize = 16;
/// Clones before the first series, which make the pool as large as a series needs it.
const EARLIER: usize = 8;
/// How long nothing is asked for, to learn what the host does then.
const BACKGROUND: Duration = Duration::from_secs(3);
/// A pool that remembers a demand gives some of it up every two seconds: what does not shrink for so long is at its least.
const SHRUNK: Duration = Duration::from_secs(5);

/// Runs all of them.
pub async fn run(mut guests: Guests, options: &Options, image: &Name) -> Result<Figures> {
    let steps = guests.steps.clone();
    let boot = BootSource {
        image: image.clone(),
        kernel: Some(options.kernel.clone()),
        memory_bytes: options.memory.0,
        vcpus: options.cpus,
        init: None,
    };
    let mut boots = Series::default();
    for n in 1..=options.boots {
        steps.begin(format!("cold boot {n} of {}", options.boots));
        cpu::quiet(0).await?;
        let answer = guests.answer("a cold boot", &Source::Boot(boot.clone())).await?;
        boots.add(&answer, &guests.timeline(answer.vm).await?);
        guests::remove_vms(&guests.client).await?;
    }
    bake(&mut guests, options, &boot).await?;

    let count = usize::from(options.clones);
    let source = Source::Snapshot(guests::snapshot()?);
    steps.begin("the pool fills");
    for alive in 1..=EARLIER {
        guests.answer("a clone", &source).await?;
        cpu::quiet(alive).await?;
    }
    guests::remove_vms(&guests.client).await?;
    let (mut clones, mut costs) = (Series::default(), Vec::new());
    while costs.len() < usize::from(options.series) {
        steps.begin(format!("{SERIES} clones, one at a time ({} of {})", costs.len() + 1, options.series));
        // A series that lost a guest has its times, but not what it cost.
        costs.extend(one_at_a_time(&mut guests, &source, SERIES, &mut clones).await?);
    }
    let cpu = Cpu::of(&costs).context("no series")?;

    let mut bursts = Vec::new();
    while bursts.len() < usize::from(options.bursts) {
        steps.begin(format!("{count} clones at once ({} of {})", bursts.len() + 1, options.bursts));
        bursts.extend(burst(&mut guests, &source, count).await?);
    }
    steps.end();
    let at_once = AtOnce::of(count, &bursts, &cpu).context("no burst")?;
    Ok(Figures::new(options, boots, clones, cpu, at_once, guests.lost))
}

/// Bakes: boots, runs the program once, snapshots; and rehearses it, unless that is not wanted.
async fn bake(guests: &mut Guests, options: &Options, boot: &BootSource) -> Result<()> {
    loop {
        guests.steps.begin("baking");
        let request = BakeRequest {
            image: boot.image.clone(),
            name: guests::snapshot()?,
            kernel: boot.kernel.clone(),
            memory_bytes: boot.memory_bytes,
            vcpus: boot.vcpus,
            warmup: Some(guests::program()),
            rehearsal: (!options.unrehearsed).then(guests::program),
            init: None,
        };
        let stream = guests.client.bake(&request).await?;
        match artefacts::watch_quietly(stream, &guests.steps).await {
            Ok(_) => return Ok(()),
            Err(why) => guests.lost("the bake", why)?,
        }
    }
}

/// One series; gives the CPU time of a clone and what else was learnt, unless a guest was lost.
async fn one_at_a_time(
    guests: &mut Guests,
    source: &Source,
    count: usize,
    series: &mut Series,
) -> Result<Option<Cpu>> {
    let lost = guests.lost;
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
        series.add(answer, &guests.timeline(answer.vm).await?);
    }
    guests::remove_vms(&guests.client).await?;
    Ok((guests.lost == lost).then(|| Cpu::new(count, spent, before, after)))
}

/// What asking for many at once came to.
#[derive(Debug, Clone, Copy)]
pub struct Burst {
    /// From the first request to the last exit.
    pub wall: Duration,
    /// CPUs busy meanwhile.
    pub cpus: f64,
    /// CPU time of all, until the host was quiet again.
    pub busy: Duration,
    /// VMMs made ahead when it began.
    pub waiting: usize,
}

/// Clones asked for at the same moment; nothing where a guest was lost, whose time would be another's.
async fn burst(guests: &mut Guests, source: &Source, count: usize) -> Result<Option<Burst>> {
    let waiting = shrunk(guests).await?;
    cpu::quiet(0).await?;
    let start = Arc::new(Barrier::new(count + 1));
    let tasks: Vec<_> = (0..count)
        .map(|_| {
            let (client, source, start) = (guests.client.clone(), source.clone(), start.clone());
            tokio::spawn(async move {
                start.wait().await;
                guests::first_answer(&client, source).await
            })
        })
        .collect();
    let reading = cpu::read()?;
    start.wait().await;
    let begun = Instant::now();
    let answers = join_all(tasks).await;
    let wall = begun.elapsed();
    let meanwhile = reading.spent()?;
    cpu::quiet(count).await?;
    let busy = reading.spent()?.busy;
    let answers: Vec<Result<Answer>> = answers.into_iter().collect::<Result<_, _>>().context("a task")?;
    let lost = guests.lost;
    for why in answers.into_iter().filter_map(Result::err) {
        guests.lost("a clone of many at once", why)?;
    }
    guests::remove_vms(&guests.client).await?;
    Ok((guests.lost == lost).then_some(Burst { wall, cpus: meanwhile.cpus(), busy, waiting }))
}

/// Waits until the pool has forgotten the last demand; gives how many wait then, those of other snapshots among them.
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
