//! What a daemon makes before its first request.

use crate::guest::{self, BASE, GUEST, base, clone};
use crate::testbed::{Testbed, until};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;

const NEWER: &str = "newer";

/// Bytes of huge pages in mappings of a process that may be executed (proc(5), smaps).
fn huge_code_bytes(pid: u32) -> Result<u64> {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let (mut is_code, mut kib) = (false, 0);
    for line in smaps.lines() {
        let mut fields = line.split_ascii_whitespace();
        match (fields.next(), fields.next()) {
            (Some("AnonHugePages:"), Some(number)) if is_code => kib += number.parse::<u64>()?,
            (Some(first), Some(rights)) if first.contains('-') => is_code = rights == "r-xp",
            _ => {}
        }
    }
    Ok(kib << 10)
}

/// Waits until this many warm clones wait.
async fn clones_wait(bed: &Testbed, count: usize) -> Result<()> {
    let mut found = String::new();
    let waited = until("the pool has warm clones", async || {
        let metrics = bed.client.metrics().await?;
        let line = metrics.lines().find_map(|line| line.strip_prefix("dayfly_waiting_clones "));
        found = line.context("dayfly_waiting_clones in /metrics")?.trim().to_owned();
        Ok(found == count.to_string())
    });
    waited.await.with_context(|| format!("expected {count} warm clones, got {found}"))
}

/// Clones a snapshot. Whether a warm clone served.
async fn was_warm(bed: &Testbed, snapshot: &str, called: &str) -> Result<bool> {
    let vm = clone(bed, snapshot, called).await?;
    let inspected = bed.client.vm(&vm.id.to_string()).await?;
    Ok(inspected.timeline.iter().any(|(phase, _)| phase.contains("the clone was ready")))
}

fn file(bed: &Testbed) -> PathBuf {
    bed.state().join("requested")
}

/// Waits until the file names these snapshots, in this order.
async fn are_noted(bed: &Testbed, names: &[&str]) -> Result<()> {
    let mut text = String::new();
    let noted = until("the requested snapshots are noted", async || {
        text = std::fs::read_to_string(file(bed)).unwrap_or_default();
        Ok(text.lines().eq(names.iter().copied()))
    });
    noted.await.with_context(|| format!("expected {names:?}, got {text:?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_begins_with_a_warm_clone_of_each_snapshot_that_was_cloned_last() -> Result<()> {
    let mut bed = guest::testbed().await?;
    base(&bed, GUEST, NEWER).await?;
    bed.stop()?;
    // Of an unknown past, the newest.
    let _absent = std::fs::remove_file(file(&bed));
    bed.pool = "8";
    bed.start().await?;
    clones_wait(&bed, 1).await?;
    ensure!(was_warm(&bed, NEWER, "newest").await?, "the newest snapshot had no warm clone");
    bed.kill()?;
    // Nor if none of the named ones is left.
    for named in ["gone\n".to_owned(), format!("gone\n../{NEWER}\n{BASE}\n")] {
        std::fs::write(file(&bed), &named)?;
        bed.start().await?;
        clones_wait(&bed, 1).await?;
        let expected = if named.contains(BASE) { BASE } else { NEWER };
        ensure!(was_warm(&bed, expected, expected).await?, "{expected} had no warm clone");
        are_noted(&bed, &[expected, "gone"]).await?;
        bed.kill()?;
    }
    std::fs::write(file(&bed), format!("{BASE}\n"))?;
    bed.start().await?;
    // Only now are there two, which a daemon notes while it runs.
    clones_wait(&bed, 1).await?;
    was_warm(&bed, NEWER, "second").await?;
    are_noted(&bed, &[NEWER, BASE]).await?;
    bed.kill()?;
    bed.start().await?;
    clones_wait(&bed, 2).await?;
    for (snapshot, called) in [(NEWER, "b"), (BASE, "c")] {
        ensure!(was_warm(&bed, snapshot, called).await?, "{snapshot} had no warm clone");
    }
    // A daemon that stops notes them as well, and one without a pool makes none.
    bed.stop()?;
    are_noted(&bed, &[BASE, NEWER]).await?;
    bed.pool = "0";
    bed.start().await?;
    ensure!(!was_warm(&bed, BASE, "without").await?, "a warm clone although there is no pool");
    bed.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_code_of_the_daemon_is_in_huge_pages_and_that_of_vmms_is_not_theirs() -> Result<()> {
    let bed = guest::testbed().await?;
    let vm = clone(&bed, BASE, "a").await?;
    let vmm = bed.processes().get(&vm.id).copied().context("a VM without a VMM")?;
    let (daemon, vmm) = (huge_code_bytes(bed.pid()?)?, huge_code_bytes(vmm.pid)?);
    ensure!(daemon >= 4 << 20 && vmm == 0, "huge pages: daemon {daemon}, VMM {vmm} bytes");
    Ok(())
}
