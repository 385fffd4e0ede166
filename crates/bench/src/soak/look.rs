//! What is there while no VM is.

use super::POOL;
use crate::common;
use crate::room::{Room, parent, processes};
use crate::scale::remove_all;
use anyhow::{Context, Result, bail};
use dayfly_api::types::{CreateManyRequest, NetworkRequest, Source};
use dayfly_units::{Name, PAGE_SIZE};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// By then all has to be as it was.
const WITHIN: Duration = Duration::from_secs(10);

/// A look at daemon and host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Sample {
    pub births: usize,
    /// Processes of VMMs, each with an id.
    pub vmms: usize,
    /// What they are forked from.
    pub zygotes: usize,
    pub zombies: usize,
    /// In the run folder.
    pub folders: usize,
    /// In the store.
    pub layers: usize,
    /// That listen, below the run folder.
    pub sockets: usize,
    /// Of the daemon.
    pub fds: usize,
    pub reserved_bytes: u64,
    pub rss_bytes: u64,
    pub available_bytes: u64,
}

fn count(folder: &Path) -> Result<usize> {
    Ok(std::fs::read_dir(folder).with_context(|| folder.display().to_string())?.count())
}

async fn reserved(room: &Room) -> Result<u64> {
    let metrics = room.client.metrics().await?;
    let line = metrics.lines().find_map(|line| line.strip_prefix("dayfly_memory_reserved_bytes "));
    line.and_then(|n| n.parse().ok()).context("dayfly_memory_reserved_bytes in /metrics")
}

fn resident(pid: u32) -> Result<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).context("statm of the daemon")?;
    let pages: Option<u64> = statm.split(' ').nth(1).and_then(|n| n.parse().ok());
    Ok(pages.context("statm of the daemon")? * PAGE_SIZE)
}

/// Sockets with a name below `run` that listen (`__SO_ACCEPTCON`).
fn listening(run: &Path) -> Result<usize> {
    let table = std::fs::read_to_string("/proc/net/unix").context("/proc/net/unix")?;
    let run = run.to_string_lossy();
    let ours = |line: &&str| line.contains(&*run) && line.split_ascii_whitespace().nth(3) == Some("00010000");
    Ok(table.lines().filter(ours).count())
}

fn zombies(parent_pid: u32) -> Result<usize> {
    let pids = std::fs::read_dir("/proc")?.filter_map(Result::ok);
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(pids.filter_map(parent).filter(|(pid, state)| *pid == parent_pid && *state == 'Z').count())
}

impl Sample {
    async fn now(room: &Room) -> Result<Self> {
        let daemon = room.daemon()?;
        let reserved_bytes = reserved(room).await?;
        let all = processes(&room.vmm_name());
        Ok(Self {
            births: 0,
            vmms: all.iter().filter(|vmm| vmm.vm.is_some()).count(),
            zygotes: all.iter().filter(|vmm| vmm.vm.is_none() && vmm.parent == daemon).count(),
            zombies: zombies(daemon)?,
            folders: count(&room.run().join("vms"))?,
            layers: count(&room.state().join("vms"))?,
            sockets: listening(&room.run())?,
            fds: count(Path::new(&format!("/proc/{daemon}/fd")))?,
            reserved_bytes,
            rss_bytes: resident(daemon)?,
            available_bytes: common::available()?,
        })
    }

    /// What is not as it has to be; with `first`, as it was then.
    fn wrong(&self, first: Option<&Self>) -> Vec<String> {
        let of = |sample: &Self| {
            let Self { vmms, zygotes, zombies, folders, layers, sockets, fds, .. } = *sample;
            [vmms, zygotes, zombies, folders, layers, sockets, fds]
        };
        let names = ["VMMs", "zygotes", "zombies", "folders", "layers", "sockets", "descriptors"];
        // One shell waits, which has no layer yet; each has two sockets and the daemon one.
        let expected = Self {
            vmms: POOL,
            zygotes: 1,
            zombies: 0,
            folders: POOL,
            layers: POOL - 1,
            sockets: 2 * POOL + 1,
            fds: first.map_or(self.fds, |first| first.fds),
            ..Self::default()
        };
        let pairs = names.into_iter().zip(of(&expected).into_iter().zip(of(self)));
        let mut wrong: Vec<String> = pairs
            .filter(|(_, (expected, got))| expected != got)
            .map(|(what, (expected, got))| format!("{what}: expected {expected}, got {got}"))
            .collect();
        if self.reserved_bytes > 0 {
            wrong.push(format!("memory reserved: expected 0, got {}", self.reserved_bytes));
        }
        wrong
    }

    pub fn print(&self) {
        let Self {
            births, vmms, zygotes, zombies, folders, sockets, fds, rss_bytes, available_bytes, ..
        } = self;
        println!(
            "  {births:>8}{vmms:>8}{zygotes:>9}{zombies:>9}{folders:>9}{sockets:>9}{fds:>8}{:>12}{:>14}",
            format!("{} KiB", rss_bytes >> 10),
            format!("{} MiB", available_bytes >> 20)
        );
    }
}

/// The head of the table that [`Sample::print`] prints.
pub fn head() {
    println!(
        "  {:>8}{:>8}{:>9}{:>9}{:>9}{:>9}{:>8}{:>12}{:>14}",
        "births", "VMMs", "zygotes", "zombies", "folders", "sockets", "fds", "daemon RSS", "available"
    );
}

/// Has the daemon fill its pool, by a burst of births that are ended at once, and looks once everything is as it has to be.
pub async fn settled(room: &Room, name: &Name, first: Option<&Sample>) -> Result<Sample> {
    let count = u32::try_from(2 * POOL)?;
    let request = CreateManyRequest {
        source: Source::Snapshot(name.clone()),
        count,
        labels: BTreeMap::new(),
        network: NetworkRequest::default(),
    };
    let vms = room.client.create_many(&request).await.context("a burst while nothing is killed")?;
    remove_all(room, &vms.iter().map(|vm| vm.id).collect::<Vec<_>>()).await?;
    let begun = Instant::now();
    // Twice the same: descriptors of what is under way are not there for long.
    let mut before = None;
    loop {
        let sample = Sample::now(room).await?;
        let wrong = sample.wrong(first);
        let still = before.replace(sample.fds) == Some(sample.fds);
        if wrong.is_empty() && still {
            let leaks = room.client.leaks().await?;
            if leaks.is_empty() {
                return Ok(sample);
            }
            if begun.elapsed() > WITHIN {
                bail!("leaks: {leaks:?}");
            }
        } else if begun.elapsed() > WITHIN {
            bail!("while there was no VM: {}", wrong.join("; "));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
