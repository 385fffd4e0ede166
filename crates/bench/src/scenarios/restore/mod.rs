//! `restore` and `prefetch`: how long clones wait for memory that has not arrived, with what stock
//! Linux guests touch.
//!
//! Snapshots of real guests are made and runs of their clones are *recorded* (in the machine, if
//! KVM cannot run Linux). Then the runs are *replayed* on this host: the pager serves a thread that
//! touches the same frames in the same order, at the times at which a guest at this host's own
//! speed would. The pages come from the same packs and disks, through a source that is as slow as
//! the papers' disk, as a network, or as this host. Replays need no KVM and include the pager's own
//! costs, but not what a vCPU's exits cost.
//!
//! `restore` compares with an eager restore: time to responsiveness, first answer, faults.
//! `prefetch` compares policies: what is there before it is touched, what is fetched in vain.

mod catalogue;
mod device;
mod figures;
mod learn;
mod record;
mod replay;
mod response;

use crate::prelude::*;
use crate::stock::{self, Stock};
use catalogue::Subject;
use dayfly_pager::policy::Policy;
use dayfly_pager::stored::Shape;
use device::{DISK, HOST, NETWORK};
use figures::Eager;
use learn::{Learned, learn};
use replay::{Image, Trace};
use std::collections::HashMap;

/// Runs of each subject that are replayed, and not learned from.
const TESTS: usize = 2;
/// The policy that `prefetch` is about.
const BEST: &str = "colour, working set";
/// The most guests in all that the emulation may lose.
const MAX_LOST: usize = 12;

/// Options of `restore` and `prefetch`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    stock: stock::Options,
    /// What is restored [default: all]
    #[arg(long, value_delimiter = ',')]
    subjects: Vec<String>,
    /// RAM of the guests
    #[arg(long, default_value = "1G")]
    memory: Bytes,
    /// Runs that are recorded of each; the last two are not learned from
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(3..=20))]
    runs: u8,
    /// Record what is not recorded yet, and do nothing else
    #[arg(long)]
    record: bool,
    /// What was recorded is kept here [default: restore-traces beside the results]
    #[arg(long)]
    traces: Option<PathBuf>,
}

impl Options {
    /// The machine's folder.
    pub fn home(&self, places: &Places) -> PathBuf {
        self.stock.home(places, "restore-machine")
    }
}

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Against an eager restore.
    Restore,
    /// Policies against each other.
    Prefetch,
}

/// Runs it.
pub async fn run(kind: Kind, options: &Options, places: &Places) -> Result<()> {
    let subjects = catalogue::chosen(&options.subjects)?;
    let traces = options.traces.clone().unwrap_or_else(|| places.out.join("restore-traces"));
    record(options, &options.home(places), &traces, &subjects).await?;
    if options.record {
        return Ok(());
    }
    let what = format!("{} subjects, {TESTS} runs of each", subjects.len());
    let begin = |name, floor| Report::begin(places, name, floor, &what);
    let report = match kind {
        Kind::Restore => begin("restore", "a restore that reads a file as long as RAM first"),
        Kind::Prefetch => begin("prefetch", "the same run with all of RAM there"),
    };
    tokio::task::spawn_blocking(move || {
        let open = |subject: &&'static Subject| Recorded::open(&traces, subject);
        let recorded = subjects.iter().map(open).collect::<Result<Vec<_>>>()?;
        let mut figures = match kind {
            Kind::Restore => replay_restores(&recorded)?,
            Kind::Prefetch => replay_policies(&recorded)?,
        };
        figures["subjects"] = recorded.iter().map(Recorded::facts).collect();
        report.write(figures)
    })
    .await?
}

/// A subject with its runs.
struct Recorded {
    subject: &'static Subject,
    image: Image,
    learned: Learned,
    tests: Vec<Trace>,
    /// Recorded times were divided by this.
    slower: f64,
}

impl Recorded {
    fn open(traces: &Path, subject: &'static Subject) -> Result<Self> {
        let folder = traces.join(&subject.name);
        let facts = record::facts(&folder)?;
        let facts = facts.with_context(|| format!("{}: not recorded", subject.name))?;
        let image = Image::open(&folder.join("store"), &facts.snapshot)?;
        let runs = (1..=facts.spins_us.len()).map(|number| record::run(&folder, number));
        let runs = runs.collect::<Result<Vec<_>>>()?;
        let count = runs.len();
        ensure!(count > TESTS, "{}: expected over {TESTS} runs, got {count}", subject.name);
        let slower = float(median(&facts.spins_us)) / float(facts.host_spin_us);
        let slower = slower.max(1.0);
        let (learned_from, tested) = runs.split_at(count - TESTS);
        let frames = |run: &record::Run| run.iter().map(|[frame, _]| *frame).collect();
        let learned_from: Vec<Vec<u32>> = learned_from.iter().map(frames).collect();
        let learned = learn(&Shape::of(&image.reader()?), &learned_from);
        let trace = |run: &record::Run| Trace {
            touches: at_own_speed(run, slower),
            first_moments: facts.first_moments.len().min(run.len()),
        };
        let tests = tested.iter().map(trace).collect();
        println!(
            "{}: {}; {} frames come first, guest slower by {slower:.1}",
            subject.name,
            subject.what,
            learned.expected.first.len()
        );
        Ok(Self { subject, image, learned, tests, slower })
    }

    fn facts(&self) -> Value {
        json!({
            "subject": self.subject.name, "what": self.subject.what,
            "memory_bytes": self.image.bytes, "slower": self.slower,
            "first": self.learned.expected.first.len(), "windows": self.learned.windows,
        })
    }
}

/// The frames of a run, and when a guest would touch them that is as fast as this host and waits
/// for nothing: each first touch waited for the recorder, which took as long as the time between
/// most of them.
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

fn replay_restores(all: &[Recorded]) -> Result<Value> {
    let (mut rows, mut raw_files) = (Vec::new(), HashMap::new());
    println!(
        "  seconds: RAM restored from a file, from the store; TTR of both and of a lazy restore"
    );
    let table = Table::new(12, "subject", &figures::TIMES);
    for Recorded { subject, image, learned, tests, .. } in all {
        for trace in tests {
            let warm = image.warm(trace)?;
            for speed in [DISK, NETWORK, HOST] {
                // A file's contents change nothing.
                let raw_us = match raw_files.get(&(image.bytes, speed.name)) {
                    Some(raw_us) => *raw_us,
                    None => image.raw_file(speed)?,
                };
                raw_files.insert((image.bytes, speed.name), raw_us);
                let (store_us, store_bytes) = image.eagerly(speed)?;
                let lazy = image.lazily(trace, &learned.expected, Policy::default(), speed)?;
                let eager = Eager { raw_us, store_us, store_bytes };
                let row = figures::restored(subject, speed, eager, &lazy, &warm);
                table.row(&figures::name(&row, "speed"), &row);
                rows.push(row);
            }
        }
    }
    Ok(figures::restores(rows))
}

fn replay_policies(all: &[Recorded]) -> Result<Value> {
    let mut rows = Vec::new();
    let table = Table::new(24, "from a network", &figures::POLICIES);
    for Recorded { subject, image, learned, tests, .. } in all {
        let colour = Policy::colour(learned.windows);
        let tried = [
            ("minimal", Policy::MINIMAL),
            ("blind 4", Policy::blind(4)),
            ("blind 16", Policy::blind(16)),
            ("colour", colour),
            (BEST, colour.with_working_set()),
        ];
        for trace in tests {
            let warm = image.warm(trace)?;
            for (name, policy) in tried {
                let lazy = image.lazily(trace, &learned.expected, policy, NETWORK)?;
                let row = figures::fetched(subject, name, &lazy, &warm);
                table.row(&figures::name(&row, "policy"), &row);
                rows.push(row);
            }
        }
    }
    Ok(figures::policies(rows, BEST))
}

/// Records what is not recorded yet.
async fn record(
    options: &Options,
    home: &Path,
    traces: &Path,
    subjects: &[&'static Subject],
) -> Result<()> {
    let mut left = Vec::new();
    for subject in subjects {
        if record::facts(&traces.join(&subject.name))?.is_none() {
            left.push(*subject);
        }
    }
    if left.is_empty() {
        return Ok(());
    }
    let (stock, mut losses) = Stock::open(&options.stock, home, MAX_LOST).await?;
    let (memory, runs) = (options.memory.0, usize::from(options.runs));
    let work = async {
        for subject in left {
            let began = Instant::now();
            let folder = traces.join(&subject.name);
            let recorded = async || record::record(&stock, &folder, subject, memory, runs).await;
            losses.kept(&subject.name, recorded).await?;
            let took_s = began.elapsed().as_secs();
            stock.steps.say(&format!("{}: recorded ({took_s} s)", subject.name));
        }
        stock.remove_vms().await
    };
    let done = work.await;
    stock.close(done).await
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
