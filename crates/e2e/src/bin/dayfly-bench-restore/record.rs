//! Recording: snapshots of the subjects, and which frames runs of their clones touch first, by `dayfly rehearse`, with a stock Linux.
//!
//! What comes of it lies in one folder for each subject: `store` (the snapshot as a store of its own), `run-N.json` (frames and microseconds), and at the
//! end `facts.json`; what has that is not recorded again.

use crate::catalogue::Subject;
use anyhow::{Context, Result, ensure};
use dayfly_api::types::RehearseRequest;
use dayfly_cli::artefacts;
use dayfly_cli::home::program;
use dayfly_cli::progress::Steps;
use dayfly_e2e::bench::guests::Guests;
use dayfly_e2e::bench::images::Images;
use dayfly_e2e::bench::place::Place;
use dayfly_e2e::guest::shell;
use dayfly_units::Name;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::process::Command;

/// No run takes longer, unless its guest was lost.
const PATIENCE: Duration = Duration::from_secs(300);

/// What is known of a recording.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Facts {
    /// The snapshot in `store`.
    pub snapshot: Name,
    /// The guests' kernel.
    pub kernel: String,
    /// RAM.
    pub memory_bytes: u64,
    /// Microseconds that a fixed computation takes in the guest, before each run, and on the host: what a recorded time is divided by.
    pub spins_us: Vec<u64>,
    /// See `spins_us`.
    pub host_spin_us: u64,
    /// Frames that a clone touches before anything is run in it, in the order of first touches.
    pub first_moments: Vec<u32>,
}

/// A run: frames, and the microseconds after the restore at which they were first touched.
pub type Run = Vec<[u32; 2]>;

/// The folder of a subject.
pub fn folder(traces: &Path, subject: &Subject) -> PathBuf {
    traces.join(subject.name)
}

/// What was recorded, if it was.
pub fn facts(traces: &Path, subject: &Subject) -> Result<Option<Facts>> {
    let path = folder(traces, subject).join("facts.json");
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}

/// A recorded run.
pub fn run(traces: &Path, subject: &Subject, number: usize) -> Result<Run> {
    let path = folder(traces, subject).join(format!("run-{number}.json"));
    let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&bytes).with_context(|| path.display().to_string())
}

/// Where guests are made.
pub struct Recorder<'a> {
    pub place: &'a Place,
    pub guests: &'a Guests,
    pub images: &'a Images,
    pub steps: &'a Steps,
    pub kernel: &'a str,
}

impl Recorder<'_> {
    /// Bakes `subject` and records so many runs.
    ///
    /// # Errors
    /// Anything fails; nothing counts then.
    pub async fn record(
        &self,
        traces: &Path,
        subject: &Subject,
        memory_bytes: u64,
        runs: usize,
    ) -> Result<()> {
        let Self { place, guests, images, steps, kernel } = *self;
        let to = folder(traces, subject);
        let _ = std::fs::remove_dir_all(&to);
        std::fs::create_dir_all(to.join("store")).with_context(|| to.display().to_string())?;
        let snapshot: Name = format!("restore-{}", subject.name).parse()?;
        guests.remove_vms().await?;
        guests.remove_snapshot(&snapshot).await?;
        let image = images.ensure(place, subject.set, subject.disk, steps).await?;
        steps.begin(format!("{}: baking and rehearsing", subject.name));
        let (text, words) = subject.begin.text();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let rehearsal = shell(subject.run, &["0"]);
        guests.bake(&image.name, &snapshot, memory_bytes, shell(text, &words), Some(rehearsal)).await?;

        steps.begin(format!("{}: recording", subject.name));
        let first_moments =
            self.rehearse(&snapshot, None).await?.into_iter().map(|[frame, _]| frame).collect();
        let host_spin_us = host_spin().await?;
        let mut spins_us = Vec::new();
        for number in 1..=runs {
            let clone = guests.clone_of(&snapshot).await?;
            spins_us.push(guests.sh(clone, "dayfly-witness spin", &[]).await?.trim().parse()?);
            guests.remove_vms().await?;
            steps.begin(format!("{}: recording run {number}", subject.name));
            let touches = self.rehearse(&snapshot, Some((subject.run, number))).await?;
            ensure!(!touches.is_empty(), "{}: run {number} touched nothing", subject.name);
            std::fs::write(to.join(format!("run-{number}.json")), serde_json::to_vec(&touches)?)?;
        }
        steps.begin(format!("{}: copying the snapshot out", subject.name));
        place.export(&snapshot, &to.join("store")).await?;
        guests.remove_snapshot(&snapshot).await?;
        let kernel = kernel.to_owned();
        let facts = Facts { snapshot, kernel, memory_bytes, spins_us, host_spin_us, first_moments };
        std::fs::write(to.join("facts.json"), serde_json::to_vec_pretty(&facts)?)?;
        steps.end();
        Ok(())
    }

    async fn rehearse(&self, snapshot: &Name, run: Option<(&str, usize)>) -> Result<Run> {
        let program = run.map(|(text, number)| shell(text, &[&number.to_string()]));
        let request = RehearseRequest { program, touches: true };
        let played = async {
            let stream = self.guests.client.rehearse(snapshot, &request).await?;
            Ok(artefacts::watch_rehearsal(stream, self.steps).await?.1)
        };
        tokio::time::timeout(PATIENCE, played).await.context("waiting for a recorded run")?
    }
}

/// The same computation on this host.
async fn host_spin() -> Result<u64> {
    let output = Command::new(program("dayfly-witness")?).arg("spin").output().await?;
    ensure!(output.status.success(), "dayfly-witness spin: {}", output.status);
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}
