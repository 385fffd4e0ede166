//! Requests to a daemon, its progress and its metrics.

use anyhow::{Context, Result, bail};
use dayfly_api::client::{ClientError, ProgressStream};
use dayfly_api::types::{
    CreateManyRequest, CreateRequest, ErrorCode, Lifetime, NetworkRequest, Progress, Snapshot,
    Source, VmLimits,
};
use dayfly_units::Name;
use dayfly_vmm::timeline::now_us;
use std::str::FromStr;

/// The most output of a program that is kept.
pub const MAX_OUTPUT: usize = 1 << 20;

/// A VM with labels that have no values.
pub fn create(source: Source, labels: &[&str]) -> CreateRequest {
    let labels = labels.iter().map(|label| ((*label).to_owned(), String::new())).collect();
    let network = NetworkRequest::default();
    let lifetime = Lifetime::UNLIMITED;
    let volumes = Vec::new();
    let (limits, vcpus) = (VmLimits::default(), None);
    CreateRequest {
        source,
        name: None,
        labels,
        forks: 0,
        network,
        lifetime,
        volumes,
        limits,
        vcpus,
    }
}

/// Many clones, as [`create`].
pub fn create_many(snapshot: &Name, count: usize, labels: &[&str]) -> CreateManyRequest {
    let CreateRequest { source, labels, network, .. } =
        create(Source::Snapshot(snapshot.clone()), labels);
    // The daemon refuses more than 4096.
    let (count, lifetime) = (u32::try_from(count).unwrap_or(u32::MAX), Lifetime::UNLIMITED);
    let (volumes, limits, vcpus) = (Vec::new(), VmLimits::default(), None);
    CreateManyRequest { source, count, labels, network, lifetime, volumes, limits, vcpus }
}

/// A snapshot that was made.
#[derive(Debug)]
pub struct Made {
    /// What the daemon reports of it.
    pub snapshot: Snapshot,
    /// What the warm-up wrote.
    pub output: String,
    /// When the last phase began, that of the store, in microseconds of [`now_us`].
    pub stored_from_us: u64,
}

/// Follows the making of a snapshot to its end.
pub async fn made(mut stream: ProgressStream) -> Result<Made> {
    let (mut output, mut stored_from_us) = (String::new(), now_us());
    while let Some(progress) = stream.next().await? {
        match progress {
            Progress::Phase { .. } => stored_from_us = now_us(),
            Progress::Output { text } if output.len() < MAX_OUTPUT => output.push_str(&text),
            Progress::Snapshot(snapshot) => {
                return Ok(Made { snapshot: *snapshot, output, stored_from_us });
            }
            Progress::Failed(error) => bail!("{}: {output}", error.message),
            _ => {}
        }
    }
    bail!("the daemon ended before the snapshot was made")
}

/// Success, also if there was nothing to remove.
pub fn gone(result: Result<(), ClientError>) -> Result<()> {
    match result {
        Err(e) if e.code() == Some(ErrorCode::NotFound) => Ok(()),
        other => Ok(other?),
    }
}

/// The value of the metric `name`, which has no labels, in the text of `GET /metrics`.
pub fn metric<T: FromStr>(text: &str, name: &str) -> Result<T> {
    let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    found.and_then(|n| n.trim().parse().ok()).with_context(|| format!("{name} in /metrics"))
}
