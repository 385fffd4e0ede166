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
    let output = |news| {
        if let News::Output(text) = news {
            steps.say(text.trim_end_matches('\n'));
        }
    };
    snapshot(follow(stream, steps, output).await?)
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
pub async fn watch_rehearsal(stream: ProgressStream, steps: &Steps) -> Result<(Rehearsal, Vec<[u32; 2]>)> {
    let mut all = Vec::new();
    let last = follow(stream, steps, |news| match news {
        News::Output(text) => steps.say(text.trim_end_matches('\n')),
        News::Touches(touches) => all.extend(touches),
    });
    match last.await? {
        Progress::Rehearsed(rehearsal) => Ok((*rehearsal, all)),
        other => Err(foreign("rehearsed", &other)),
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

/// What a long operation tells on the way that is not for [`Steps`].
enum News {
    /// Of a program in a guest.
    Output(String),
    /// Frames, and the microseconds after the run's begin at which they were first touched.
    Touches(Vec<[u32; 2]>),
}

/// Shows what is reported on the way; gives the last line.
async fn follow(mut stream: ProgressStream, steps: &Steps, mut hear: impl FnMut(News)) -> Result<Progress> {
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
            | Progress::Rehearsed(_)) => {
                steps.end();
                return Ok(last);
            }
        }
    }
    bail!("the daemon ended before it was done; nothing stays of it")
}
