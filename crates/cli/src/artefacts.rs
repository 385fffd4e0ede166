//! Uploads images and kernels to the daemon, and shows the progress of long operations.

mod download;
mod images;
mod kernels;
mod upload;

pub use download::download_disk;
pub use images::{build_debian, build_image};
pub use kernels::{add_kernel, ensure_kernel, fetch_kernel, machine_kernel, refresh_kernel};

use crate::progress::Steps;
use anyhow::{Result, bail};
use dayfly_api::client::{ClientError, ProgressStream};
use dayfly_api::types::{Collected, Progress, Recording, Repaired, Snapshot, Verified};

/// Shows the progress of a long operation. Returns the snapshot at its end.
///
/// # Errors
/// If the operation failed, or its connection broke.
pub async fn watch(stream: ProgressStream, steps: &Steps) -> Result<Snapshot> {
    let output = |news| {
        if let News::Output(text) = news {
            steps.say(text.trim_end_matches('\n'));
        }
    };
    snapshot(follow(stream, steps, output).await?)
}

/// Like [`watch`], without the output of a warm-up program.
///
/// # Errors
/// If the operation failed, or its connection broke.
pub async fn watch_quietly(stream: ProgressStream, steps: &Steps) -> Result<Snapshot> {
    snapshot(follow(stream, steps, |_| ()).await?)
}

/// Shows the progress of a verification. Returns what it found.
///
/// # Errors
/// If the operation failed, or its connection broke.
pub async fn watch_verify(stream: ProgressStream, steps: &Steps) -> Result<Verified> {
    match follow(stream, steps, |_| ()).await? {
        Progress::Verified(verified) => Ok(*verified),
        other => Err(foreign("verified", &other)),
    }
}

/// Shows the progress of a collection. Returns what it removed.
///
/// # Errors
/// If the operation failed, or its connection broke.
pub async fn watch_collect(stream: ProgressStream, steps: &Steps) -> Result<Collected> {
    match follow(stream, steps, |_| ()).await? {
        Progress::Collected(collected) => Ok(*collected),
        other => Err(foreign("collected", &other)),
    }
}

/// Shows the progress of a repair. Returns what it did.
///
/// # Errors
/// If the operation failed, or its connection broke.
pub async fn watch_repair(stream: ProgressStream, steps: &Steps) -> Result<Repaired> {
    match follow(stream, steps, |_| ()).await? {
        Progress::Repaired(repaired) => Ok(*repaired),
        other => Err(foreign("repaired", &other)),
    }
}

/// Shows the progress of a recorded run. Returns the recording, and each touch as a frame number
/// and microseconds.
///
/// # Errors
/// If the operation failed, or its connection broke.
pub async fn watch_recording(
    stream: ProgressStream,
    steps: &Steps,
) -> Result<(Recording, Vec<[u32; 2]>)> {
    let mut all = Vec::new();
    let last = follow(stream, steps, |news| match news {
        News::Output(text) => steps.say(text.trim_end_matches('\n')),
        News::Touches(touches) => all.extend(touches),
    });
    match last.await? {
        Progress::Recorded(recording) => Ok((*recording, all)),
        other => Err(foreign("recorded", &other)),
    }
}

fn snapshot(last: Progress) -> Result<Snapshot> {
    match last {
        Progress::Snapshot(snapshot) => Ok(*snapshot),
        other => Err(foreign("snapshot", &other)),
    }
}

fn foreign(expected: &'static str, got: &Progress) -> anyhow::Error {
    let (call, got) = ("a long operation's last line".to_owned(), format!("{got:?}"));
    ClientError::Foreign { call, expected, got }.into()
}

/// Reports of a long operation that [`Steps`] does not show.
enum News {
    /// Output of a program in a guest.
    Output(String),
    /// Touched frames, each with the microseconds from the run's start to the first touch.
    Touches(Vec<[u32; 2]>),
}

/// Shows the progress until the stream's last line, and returns that line.
async fn follow(
    mut stream: ProgressStream,
    steps: &Steps,
    mut hear: impl FnMut(News),
) -> Result<Progress> {
    while let Some(progress) = stream.next().await? {
        match progress {
            Progress::Phase { label } => steps.begin(label),
            Progress::Step { done, total } => steps.bytes(done, total),
            Progress::Output { text } => hear(News::Output(text)),
            Progress::Touched { touches } => hear(News::Touches(touches)),
            Progress::Failed(error) => return Err(ClientError::Refused(error).into()),
            last @ (Progress::Snapshot(_)
            | Progress::Verified(_)
            | Progress::Collected(_)
            | Progress::Repaired(_)
            | Progress::Recorded(_)) => {
                steps.end();
                return Ok(last);
            }
        }
    }
    bail!("the daemon ended before it was done; nothing stays of it")
}
