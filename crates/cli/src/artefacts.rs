//! Images and kernels on their way to the daemon, and the watching of long operations.

mod images;
mod kernels;
mod upload;

pub use images::{build_debian, build_image};
pub use kernels::{add_kernel, ensure_kernel, fetch_kernel, machine_kernel, refresh_kernel};

use crate::progress::Steps;
use anyhow::{Result, bail};
use dayfly_api::client::{ClientError, ProgressStream};
use dayfly_api::types::{Collected, Progress, Rehearsal, Snapshot, Verified};

/// Shows what a long operation reports; gives the snapshot at its end.
///
/// # Errors
/// When it failed, or its connection broke.
pub async fn watch(stream: ProgressStream, steps: &Steps) -> Result<Snapshot> {
    snapshot(follow(stream, steps, |text| steps.say(text.trim_end_matches('\n'))).await?)
}

/// As [`watch`], without what a warm-up program writes.
///
/// # Errors
/// When it failed, or its connection broke.
pub async fn watch_quietly(stream: ProgressStream, steps: &Steps) -> Result<Snapshot> {
    snapshot(follow(stream, steps, |_| ()).await?)
}

/// Shows how far a verification is; gives what it found.
///
/// # Errors
/// When it failed, or its connection broke.
pub async fn watch_verify(stream: ProgressStream, steps: &Steps) -> Result<Verified> {
    match follow(stream, steps, |_| ()).await? {
        Progress::Verified(verified) => Ok(*verified),
        other => Err(foreign("verified", &other)),
    }
}

/// Shows how far a collection is; gives what it removed.
///
/// # Errors
/// When it failed, or its connection broke.
pub async fn watch_collect(stream: ProgressStream, steps: &Steps) -> Result<Collected> {
    match follow(stream, steps, |_| ()).await? {
        Progress::Collected(collected) => Ok(*collected),
        other => Err(foreign("collected", &other)),
    }
}

/// Shows how far a recorded run is; gives what it touched, and each touch: a frame, and microseconds.
///
/// # Errors
/// When it failed, or its connection broke.
pub async fn watch_rehearsal(
    mut stream: ProgressStream,
    steps: &Steps,
) -> Result<(Rehearsal, Vec<[u32; 2]>)> {
    let mut all = Vec::new();
    while let Some(progress) = stream.next().await? {
        match progress {
            Progress::Touched { touches } => all.extend(touches),
            Progress::Rehearsed(rehearsal) => {
                steps.end();
                return Ok((*rehearsal, all));
            }
            Progress::Phase { label } => steps.begin(label),
            Progress::Output { text } => steps.say(text.trim_end_matches('\n')),
            Progress::Failed(error) => return Err(ClientError::Refused(error).into()),
            other => return Err(foreign("touches, or rehearsed", &other)),
        }
    }
    bail!("the daemon ended before the run did")
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

/// Shows what is reported on the way; gives the last line.
async fn follow(mut stream: ProgressStream, steps: &Steps, output: impl Fn(&str)) -> Result<Progress> {
    while let Some(progress) = stream.next().await? {
        match progress {
            Progress::Phase { label } => steps.begin(label),
            Progress::Step { done, total } => steps.bytes(done, total),
            Progress::Output { text } => output(&text),
            Progress::Failed(error) => return Err(ClientError::Refused(error).into()),
            Progress::Touched { .. } => {}
            last @ (Progress::Snapshot(_)
            | Progress::Verified(_)
            | Progress::Collected(_)
            | Progress::Rehearsed(_)) => {
                steps.end();
                return Ok(last);
            }
        }
    }
    bail!("the daemon ended before it was done; nothing stays of it")
}
