//! Images and kernels on their way to the daemon, and the watching of long operations.

mod images;
mod kernels;
mod upload;

pub use images::{build_debian, build_image};
pub use kernels::{add_kernel, ensure_kernel, fetch_kernel, machine_kernel, refresh_kernel};

use crate::progress::Steps;
use anyhow::{Result, bail};
use dayfly_api::client::{ClientError, ProgressStream};
use dayfly_api::types::{Progress, Snapshot};

/// Shows what a long operation reports; gives the snapshot at its end.
///
/// # Errors
/// When it failed, or its connection broke.
pub async fn watch(stream: ProgressStream, steps: &Steps) -> Result<Snapshot> {
    follow(stream, steps, |text| steps.say(text.trim_end_matches('\n'))).await
}

/// As [`watch`], without what a warm-up program writes.
///
/// # Errors
/// When it failed, or its connection broke.
pub async fn watch_quietly(stream: ProgressStream, steps: &Steps) -> Result<Snapshot> {
    follow(stream, steps, |_| ()).await
}

async fn follow(mut stream: ProgressStream, steps: &Steps, output: impl Fn(&str)) -> Result<Snapshot> {
    while let Some(progress) = stream.next().await? {
        match progress {
            Progress::Phase { label } => steps.begin(label),
            Progress::Step { done, total } => steps.bytes(done, total),
            Progress::Output { text } => output(&text),
            Progress::Snapshot(snapshot) => {
                steps.end();
                return Ok(*snapshot);
            }
            Progress::Failed(error) => return Err(ClientError::Refused(error).into()),
        }
    }
    bail!("the daemon ended before it was done; nothing stays of it")
}
