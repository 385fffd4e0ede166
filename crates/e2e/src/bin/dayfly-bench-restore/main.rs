//! `restore` and `prefetch`: what clones wait for whose memory has not arrived, with what stock Linux guests touch.
//!
//! Two parts. Snapshots of real guests are made and runs of their clones are *recorded* (in the machine, where KVM cannot run Linux), and then the runs are
//! *replayed* on this host: the pager serves a thread that touches the same frames in the same order, at the times at which a guest at this
//! host's own speed would, from the same packs and disks, through a source that is as slow as the papers' disk, as a network, or as this host.
//! Replays need no KVM and take the pager's own costs with them; what a vCPU's exits cost is not in them.
//!
//! | file | concern |
//! |---|---|
//! | `catalogue` | the snapshots and what their clones do |
//! | `record` | recording |
//! | `replay`, `device` | replaying; how fast pages come |
//! | `response`, `figures` | time to responsiveness; what is printed and written |

mod catalogue;
mod device;
mod figures;
mod record;
mod replay;
mod response;

use anyhow::{Context, Result, ensure};
use catalogue::{SUBJECTS, Subject};
use clap::Parser;
use dayfly_cli::progress::Steps;
use dayfly_e2e::bench;
use dayfly_e2e::bench::guests::Guests;
use dayfly_e2e::bench::images::Images;
use dayfly_e2e::bench::place::Place;
use dayfly_e2e::setup;
use dayfly_pager::learn::{Learned, learn};
use dayfly_pager::policy::Policy;
use dayfly_pager::stored::Shape;
use dayfly_units::{Bytes, Name};
use device::{DISK, HOST, NETWORK};
use figures::{Fetched, Restored};
use record::Recorder;
use replay::{Image, Trace};
use serde_json::json;
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// So many runs of each subject are not learned from, but replayed.
const TESTS: usize = 2;
/// The policy that `prefetch` is about.
const BEST: &str = "colour, working set";
/// So many guests in all may be lost to the emulation; natively, none.
const MAX_LOST: usize = 12;

/// What clones wait for whose memory has not arrived, by policy and by the speed of what it comes from
#[derive(Debug, Clone, Parser)]
#[command(name = "dayfly-bench-restore", version)]
struct Options {
    /// The guests' kernel
    #[arg(long, default_value = "6.12")]
    kernel: Name,
    /// What is restored [default: all]
    #[arg(long, value_delimiter = ',')]
    subjects: Vec<String>,
    /// RAM of the guests
    #[arg(long, default_value = "1G")]
    memory: Bytes,
    /// Runs that are recorded of each; the last two are not learned from
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(3..=20))]
    runs: u8,
    /// Which benchmarks [default: both]
    #[arg(long, value_delimiter = ',')]
    benches: Vec<Bench>,
    /// Record what is not recorded yet, and do nothing else
    #[arg(long)]
    record: bool,
    /// What was recorded is kept here
    #[arg(long, default_value = "target/bench/restore-traces")]
    traces: PathBuf,
    /// What images are made of is kept here [default: bench-store in the cache of images]
    #[arg(long)]
    cache: Option<PathBuf>,
    /// A machine of its own is made here, where KVM cannot run Linux
    #[arg(long, default_value = "target/bench/restore-machine")]
    home: PathBuf,
    /// Where figures go
    #[arg(long, default_value = "target/bench")]
    out: PathBuf,
    /// RAM of that
    #[arg(long, default_value = "6G")]
    machine_memory: Bytes,
}

/// A benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Bench {
    /// Against an eager restore: time to responsiveness, first answer, faults
    Restore,
    /// Policies against each other: what is there before it is touched, what is fetched in vain
    Prefetch,
}

impl Options {
    fn subjects(&self) -> Result<Vec<&'static Subject>> {
        let known = |name: &String| {
            SUBJECTS.iter().find(|subject| subject.name == name).with_context(|| {
                let names: Vec<&str> = SUBJECTS.iter().map(|subject| subject.name).collect();
                format!("subject {name:?}: expected one of {}", names.join(", "))
            })
        };
        let chosen = self.subjects.iter().map(known).collect::<Result<Vec<_>>>()?;
        Ok(if chosen.is_empty() { SUBJECTS.iter().collect() } else { chosen })
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let options = Options::parse();
    bench::end(
        "dayfly-bench-restore",
        run(&options),
        std::slice::from_ref(&options.home),
        "what was recorded stays",
    )
    .await
}

async fn run(options: &Options) -> Result<()> {
    let subjects = options.subjects()?;
    record(options, &subjects).await?;
    if options.record {
        return Ok(());
    }
    let options = options.clone();
    tokio::task::spawn_blocking(move || replay_all(&options, &subjects)).await?
}

/// A subject with its runs.
struct Recorded {
    image: Image,
    learned: Learned,
    tests: Vec<Trace>,
    /// What recorded times were divided by.
    slower: f64,
}

impl Recorded {
    fn open(options: &Options, subject: &'static Subject) -> Result<Self> {
        let facts = record::facts(&options.traces, subject)?;
        let facts = facts.with_context(|| format!("{}: not recorded", subject.name))?;
        let folder = record::folder(&options.traces, subject);
        let image = Image::open(&folder.join("store"), &facts.snapshot)?;
        let runs = (1..=facts.spins_us.len()).map(|number| record::run(&options.traces, subject, number));
        let runs = runs.collect::<Result<Vec<_>>>()?;
        ensure!(runs.len() > TESTS, "{}: expected more than {TESTS} runs, got {}", subject.name, runs.len());
        let mut spins = facts.spins_us.clone();
        spins.sort_unstable();
        #[expect(clippy::cast_precision_loss, reason = "a ratio")]
        let slower = (spins[spins.len() / 2] as f64 / facts.host_spin_us as f64).max(1.0);
        let (learned_from, tested) = runs.split_at(runs.len() - TESTS);
        let frames = |run: &record::Run| run.iter().map(|[frame, _]| *frame).collect();
        let learned_from: Vec<Vec<u32>> = learned_from.iter().map(frames).collect();
        let learned = learn(&Shape::of(&image.reader()?), &learned_from);
        let trace = |run: &record::Run| Trace {
            touches: at_own_speed(run, slower),
            first_moments: facts.first_moments.len().min(run.len()),
        };
        let tests = tested.iter().map(trace).collect();
        Ok(Self { image, learned, tests, slower })
    }
}

/// The frames of a run, and when a guest would touch them that is as fast as this host and waits for nothing: each first touch waited for the recorder, which
/// took as long as the time between most of them.
fn at_own_speed(run: &record::Run, slower: f64) -> Vec<(u32, u64)> {
    let between = |pair: &[[u32; 2]]| pair[1][1].saturating_sub(pair[0][1]);
    let mut times: Vec<u32> = run.windows(2).map(between).collect();
    times.sort_unstable();
    let recorder = times.get(times.len() / 2).copied().unwrap_or(0);
    let mut at = 0.0;
    let mut before = 0;
    let place = |&[frame, us]: &[u32; 2]| {
        let computed = us.saturating_sub(before).saturating_sub(recorder);
        before = us;
        at += f64::from(computed) / slower;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "microseconds")]
        let at = at as u64;
        (frame, at)
    };
    run.iter().map(place).collect()
}

fn replay_all(options: &Options, subjects: &[&'static Subject]) -> Result<()> {
    let wants = |bench| options.benches.is_empty() || options.benches.contains(&bench);
    let (mut restores, mut policies) = (Vec::new(), Vec::new());
    let (mut facts, mut raw_files) = (Vec::new(), HashMap::new());
    println!("{}\n{}", Restored::HEAD, Fetched::HEAD);
    for subject in subjects {
        let recorded = Recorded::open(options, subject)?;
        let Recorded { image, learned, tests, .. } = &recorded;
        println!(
            "{}: {}; {} frames come first, windows {:?}, guest slower by {:.1}",
            subject.name,
            subject.what,
            learned.expected.first.len(),
            learned.windows,
            recorded.slower
        );
        facts.push(json!({
            "subject": subject.name, "what": subject.what, "memory_bytes": image.bytes, "slower": recorded.slower,
            "first": learned.expected.first.len(), "windows": learned.windows,
        }));
        for trace in tests {
            let warm = image.warm(trace)?;
            if wants(Bench::Restore) {
                for speed in [DISK, NETWORK, HOST] {
                    // A file's contents change nothing.
                    let raw = match raw_files.get(&(image.bytes, speed.name)) {
                        Some(raw) => *raw,
                        None => image.raw_file(speed)?,
                    };
                    raw_files.insert((image.bytes, speed.name), raw);
                    let eager = image.eagerly(speed)?;
                    let lazy = image.lazily(trace, &learned.expected, Policy::default(), speed)?;
                    let restored =
                        Restored::new(subject.name, speed, subject.interactive, raw, eager, &lazy, &warm);
                    println!("{}", restored.line());
                    restores.push(restored);
                }
            }
            if wants(Bench::Prefetch) {
                let colour = Policy::colour(learned.windows);
                let tried = [
                    ("minimal", Policy::MINIMAL),
                    ("blind 4", Policy::blind(4)),
                    ("blind 16", Policy::blind(16)),
                    ("colour", colour),
                    (BEST, colour.with_working_set()),
                ];
                for (name, policy) in tried {
                    let lazy = image.lazily(trace, &learned.expected, policy, NETWORK)?;
                    let fetched = Fetched::new(subject.name, NETWORK, name, &lazy, &warm);
                    println!("{}", fetched.line());
                    policies.push(fetched);
                }
            }
        }
    }
    std::fs::create_dir_all(&options.out).with_context(|| options.out.display().to_string())?;
    let write = |name: &str, mut value: serde_json::Value| {
        value["subjects"] = json!(facts);
        let path = options.out.join(format!("{name}.json"));
        std::fs::write(&path, serde_json::to_vec_pretty(&value)?)
            .with_context(|| path.display().to_string())?;
        println!("  {}", path.display());
        anyhow::Ok(())
    };
    if wants(Bench::Restore) {
        let (text, value) = figures::restores(&restores);
        println!("{text}");
        write("restore", value)?;
    }
    if wants(Bench::Prefetch) {
        let (text, value) = figures::policies(&policies, BEST);
        println!("{text}");
        write("prefetch", value)?;
    }
    Ok(())
}

/// Records what is not recorded yet.
async fn record(options: &Options, subjects: &[&Subject]) -> Result<()> {
    let mut left = Vec::new();
    for subject in subjects {
        if record::facts(&options.traces, subject)?.is_none() {
            left.push(*subject);
        }
    }
    if left.is_empty() {
        return Ok(());
    }
    let cache =
        options.cache.clone().unwrap_or_else(|| dayfly_image::cache::default_folder().join("bench-store"));
    let images = Images::new(&cache)?;
    let steps = Steps::new();
    let place = Place::open(&options.home, options.machine_memory).await?;
    let work = async {
        let kernel = setup::kernel(&place.client, options.kernel.as_str(), &steps).await?;
        let guests =
            Guests { client: place.client.clone(), kernel: kernel.name, emulated: place.home.is_some() };
        let recorder = Recorder {
            place: &place,
            guests: &guests,
            images: &images,
            steps: &steps,
            kernel: &kernel.release,
        };
        let mut lost = 0;
        for subject in left {
            let began = Instant::now();
            while let Err(why) =
                recorder.record(&options.traces, subject, options.memory.0, usize::from(options.runs)).await
            {
                lost += 1;
                ensure!(guests.emulated && lost <= MAX_LOST, "{}: {why:#}", subject.name);
                steps.say(&format!("{}: recording it again: {why:#}", subject.name));
            }
            steps.say(&format!("{}: recorded ({} s)", subject.name, began.elapsed().as_secs()));
        }
        guests.remove_vms().await
    };
    let done = work.await;
    steps.end();
    place.close().await?;
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_recorder_took_is_no_time_of_the_guests() {
        let run = vec![[5, 1000], [6, 1100], [7, 1200], [8, 5300], [9, 5380], [1, 5480]];
        let expected = [(5, 450), (6, 450), (7, 450), (8, 2450), (9, 2450), (1, 2450)];
        assert_eq!(at_own_speed(&run, 2.0), expected);
        assert_eq!(at_own_speed(&Vec::new(), 2.0), []);
    }
}
