//! Recording: snapshots of the subjects, and which frames runs of their clones touch first, by
//! `dayfly record`, with a stock Linux.
//!
//! What comes of it lies in one folder for each subject: `store` (a store with the snapshot alone),
//! `run-N.json` (frames and microseconds), and at the end `facts.json`; what has that is not
//! recorded again.

use super::catalogue::Subject;
use crate::prelude::*;
use crate::stock::Stock;
use dayfly_api::types::RecordRequest;
use dayfly_cli::{artefacts, home::program};
use dayfly_e2e::guest::script;
use tokio::process::Command;

/// No run takes longer, unless its guest was lost.
const TIMEOUT: Duration = Duration::from_secs(300);

/// What is known of a recording.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Facts {
    /// The snapshot in `store`.
    pub snapshot: Name,
    /// The guests' kernel.
    pub kernel: String,
    /// RAM.
    pub memory_bytes: u64,
    /// Microseconds that a fixed computation takes in the guest, before each run, and on the host:
    /// what a recorded time is divided by.
    pub spins_us: Vec<u64>,
    /// See `spins_us`.
    pub host_spin_us: u64,
    /// Frames that a clone touches before anything is run in it, in the order of first touches.
    pub first_moments: Vec<u32>,
}

/// A run: frames, and the microseconds after the restore at which they were first touched.
pub type Run = Vec<[u32; 2]>;

/// What was recorded in a folder, if it was.
pub fn facts(folder: &Path) -> Result<Option<Facts>> {
    load(&folder.join("facts.json"))
}

/// A recorded run.
pub fn run(folder: &Path, number: usize) -> Result<Run> {
    load(&run_file(folder, number))?
        .with_context(|| format!("{}: no run {number}", folder.display()))
}

fn run_file(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("run-{number}.json"))
}

/// Bakes `subject` and records `runs` runs in `folder`.
///
/// # Errors
/// Anything fails; nothing counts then.
pub async fn record(
    stock: &Stock,
    folder: &Path,
    subject: &Subject,
    memory_bytes: u64,
    runs: usize,
) -> Result<()> {
    let step = |doing: &str| stock.steps.begin(format!("{}: {doing}", subject.name));
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let snapshot: Name = format!("restore-{}", subject.name).parse()?;
    stock.remove_vms().await?;
    stock.remove_snapshot(&snapshot).await?;
    let image = stock.image(subject.set(), subject.disk()).await?.name;
    step("baking and recording");
    let (text, words) = subject.begin();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (warmup, recording) = (script(text, &words), script(subject.run(), &["0"]));
    stock.bake(&image, &snapshot, memory_bytes, warmup, Some(recording)).await?;

    step("recording");
    let first = play(stock, &snapshot, None).await?;
    let host_spin_us = host_spin().await?;
    let mut spins_us = Vec::new();
    for number in 1..=runs {
        let clone = stock.clone_of(&snapshot).await?;
        spins_us.push(stock.witness(clone, "spin").await?);
        stock.remove_vms().await?;
        step(&format!("recording run {number}"));
        let touches = play(stock, &snapshot, Some((subject.run(), number))).await?;
        ensure!(!touches.is_empty(), "{}: run {number} touched nothing", subject.name);
        std::fs::write(run_file(folder, number), serde_json::to_vec(&touches)?)?;
    }
    step("copying the snapshot out");
    stock.export(&snapshot, &folder.join("store")).await?;
    stock.remove_snapshot(&snapshot).await?;
    let kernel = stock.release.clone();
    let first_moments = first.into_iter().map(|[frame, _]| frame).collect();
    let facts = Facts { snapshot, kernel, memory_bytes, spins_us, host_spin_us, first_moments };
    std::fs::write(folder.join("facts.json"), serde_json::to_vec_pretty(&facts)?)?;
    stock.steps.end();
    Ok(())
}

async fn play(stock: &Stock, snapshot: &Name, run: Option<(&str, usize)>) -> Result<Run> {
    let program = run.map(|(text, number)| script(text, &[&number.to_string()]));
    let request = RecordRequest { program, touches: true };
    let played = async {
        let stream = stock.client.record(snapshot, &request).await?;
        Ok(artefacts::watch_recording(stream, &stock.steps).await?.1)
    };
    tokio::time::timeout(TIMEOUT, played).await.context("waiting for a recorded run")?
}

/// The same computation on this host.
async fn host_spin() -> Result<u64> {
    let output = Command::new(program("dayfly-witness")?).arg("spin").output().await?;
    ensure!(output.status.success(), "dayfly-witness spin: {}", output.status);
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}
