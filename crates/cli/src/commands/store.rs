//! `dayfly store`: shows, verifies and cleans what the daemon keeps on disk.

use crate::output::{self, Format, FormatArgs};
use crate::progress::Steps;
use crate::{artefacts, connect};
use anyhow::Result;
use clap::Subcommand;
use dayfly_api::types::{
    CollectRequest, Collected, Counted, Damaged, MemoryKinds, Repaired, SnapshotUse, StoreStats,
    StoreUsage, Verified, VerifyRequest,
};
use dayfly_units::text::{LONG, escaped};
use dayfly_units::{Bytes, Name};
use std::fmt::Write as _;

/// Subcommands of `dayfly store`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show how much is stored, and how well it compresses and deduplicates
    Stats(FormatArgs),
    /// Show what each snapshot takes, and what its removal would free
    Du(FormatArgs),
    /// Read and hash everything in the store; exit code 1 if anything is damaged
    Verify(Verify),
    /// Remove unused data; exit code 1 if anything was kept because of damage
    Gc(Gc),
    /// Verify the store and repair what can be repaired; exit code 1 if anything is lost
    Repair(FormatArgs),
}

/// Arguments of `dayfly store gc`.
#[derive(Debug, clap::Args)]
pub struct Gc {
    /// Go on although this damaged snapshot cannot be read: what it needs may be removed
    #[arg(long, value_name = "NAME")]
    without: Vec<Name>,
    #[command(flatten)]
    format: FormatArgs,
}

/// Arguments of `dayfly store verify`.
#[derive(Debug, clap::Args)]
pub struct Verify {
    /// Verify only these snapshots and what they depend on
    snapshots: Vec<Name>,
    #[command(flatten)]
    format: FormatArgs,
}

impl Command {
    pub async fn run(self) -> Result<u8> {
        let client = connect::client().await?;
        match self {
            Self::Stats(args) => {
                let stats = client.store_stats().await?;
                show(args, &stats, || stats_text(&stats)).map(|()| 0)
            }
            Self::Du(FormatArgs { format: Format::Json }) => {
                let usage = client.store_usage().await?;
                warn(&usage);
                let lines = usage.snapshots.iter().map(output::json_line);
                output::emit(&lines.collect::<Result<String>>()?).map(|()| 0)
            }
            Self::Du(_) => {
                let usage = client.store_usage().await?;
                warn(&usage);
                output::emit(&usage_text(&usage)).map(|()| 0)
            }
            Self::Verify(Verify { snapshots, format }) => {
                let steps = Steps::new();
                let stream = client.verify_store(&VerifyRequest { snapshots }).await?;
                let verified = artefacts::watch_verify(stream, &steps).await?;
                drop(steps);
                show(format, &verified, || verified_text(&verified))?;
                Ok(u8::from(!verified.damaged.is_empty()))
            }
            Self::Gc(Gc { without, format }) => {
                let steps = Steps::new();
                let stream = client.collect_store(&CollectRequest { without }).await?;
                let collected = artefacts::watch_collect(stream, &steps).await?;
                drop(steps);
                show(format, &collected, || collected_text(&collected))?;
                Ok(u8::from(!collected.left_alone.is_empty()))
            }
            Self::Repair(args) => {
                let steps = Steps::new();
                let repaired =
                    artefacts::watch_repair(client.repair_store().await?, &steps).await?;
                drop(steps);
                show(args, &repaired, || repaired_text(&repaired))?;
                Ok(u8::from(!repaired.lost.is_empty() || !repaired.damaged.is_empty()))
            }
        }
    }
}

fn show(
    args: FormatArgs,
    value: &impl serde::Serialize,
    text: impl FnOnce() -> String,
) -> Result<()> {
    match args.format {
        Format::Json => output::json(value),
        Format::Table => output::emit(&text()),
    }
}

fn bytes(n: u64) -> String {
    Bytes(n).to_string()
}

/// `part` of `whole` in per cent; 0 if `whole` is 0.
fn share(part: u64, whole: u64) -> String {
    let tenths = (u128::from(part) * 1000).checked_div(u128::from(whole)).unwrap_or(0);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

fn stats_text(stats: &StoreStats) -> String {
    let row = |what: &str, of: Counted| {
        [what.to_owned(), of.count.to_string(), bytes(of.apparent_bytes), bytes(of.disk_bytes)]
    };
    let pages = stats.pages;
    let packs = Counted {
        count: pages.packs,
        apparent_bytes: pages.raw_bytes,
        disk_bytes: pages.stored_bytes.saturating_add(pages.index_disk_bytes),
    };
    let rows = [
        row("images", stats.images),
        row("kernels", stats.kernels),
        row("disk layers", stats.layers),
        row("snapshots", stats.snapshots),
        row("packs of pages", packs),
        row("block indexes", stats.block_indexes),
    ];
    let mut text = output::table(["WHAT", "COUNT", "SIZE", "ON DISK"], rows);
    let facts = [
        ["unique pages".into(), format!("{} ({})", pages.unique, bytes(pages.raw_bytes))],
        [
            "compressed".into(),
            format!("{}, {:.2} to 1", bytes(pages.stored_bytes), stats.compression_ratio),
        ],
        [
            "deduplicated".into(),
            format!("{} pages of RAM, {:.2} to 1", pages.referring_frames, stats.dedup_ratio),
        ],
        [
            "index".into(),
            format!(
                "{} on disk, {} in memory",
                bytes(pages.index_disk_bytes),
                bytes(pages.index_memory_bytes)
            ),
        ],
    ];
    text += "\n";
    text += &output::table(["PAGES", ""], facts);
    let MemoryKinds { zero_bytes, free_bytes, disk_bytes, shared_bytes, own_bytes } = stats.memory;
    let all = stats.memory.total_bytes();
    let kinds = [
        ("zero", zero_bytes),
        ("free", free_bytes),
        ("disk", disk_bytes),
        ("shared pages", shared_bytes),
        ("own pages", own_bytes),
    ];
    let kinds = kinds.map(|(kind, part)| [kind.into(), bytes(part), share(part, all)]);
    text += "\n";
    text += &output::table(["RAM OF SNAPSHOTS", "SIZE", "SHARE"], kinds);
    let damaged = [
        (pages.damaged_packs, "packs could not be opened"),
        (stats.unreadable, "snapshots cannot be read, and are in no figure"),
    ];
    for (count, what) in damaged.iter().filter(|(count, _)| *count > 0) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "\n{count} {what}: see dayfly store verify");
    }
    text
}

fn warn(usage: &StoreUsage) {
    for unreadable in &usage.unreadable {
        let why = escaped(&unreadable.message, LONG);
        eprintln!("dayfly: snapshot {} cannot be read: {why}", unreadable.name);
        eprintln!(
            "dayfly: see dayfly store verify; what it shares with others counts as theirs alone"
        );
    }
}

fn usage_text(usage: &StoreUsage) -> String {
    let row = |name: String, memory: u64, kinds: MemoryKinds, layers: u64, own: u64| {
        let MemoryKinds { zero_bytes, free_bytes, disk_bytes, shared_bytes, own_bytes } = kinds;
        let [memory, zero, free, disk, shared, pages, own] =
            [memory, zero_bytes, free_bytes, disk_bytes, shared_bytes, own_bytes, own].map(bytes);
        [name, memory, zero, free, disk, shared, pages, layers.to_string(), own]
    };
    let of = |s: &SnapshotUse| {
        row(s.name.to_string(), s.memory_bytes, s.memory, s.layers.count, s.own_stored_bytes)
    };
    let sum =
        |of: fn(&SnapshotUse) -> u64| usage.snapshots.iter().map(of).fold(0, u64::saturating_add);
    let kinds = MemoryKinds {
        zero_bytes: sum(|s| s.memory.zero_bytes),
        free_bytes: sum(|s| s.memory.free_bytes),
        disk_bytes: sum(|s| s.memory.disk_bytes),
        shared_bytes: sum(|s| s.memory.shared_bytes),
        own_bytes: sum(|s| s.memory.own_bytes),
    };
    let layers = sum(|s| s.layers.count);
    let total =
        row("total".into(), sum(|s| s.memory_bytes), kinds, layers, sum(|s| s.own_stored_bytes));
    let rows = usage.snapshots.iter().map(of).chain((usage.snapshots.len() > 1).then_some(total));
    let header = [
        "SNAPSHOT",
        "RAM",
        "ZERO",
        "FREE",
        "DISK",
        "SHARED PAGES",
        "OWN PAGES",
        "LAYERS",
        "OWN STORED",
    ];
    output::table(header, rows)
}

fn damaged_text(all: &[Damaged]) -> String {
    let mut text = String::new();
    for damaged in all {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{} {}: {}", damaged.kind, damaged.name, damaged.message);
        if !damaged.snapshots.is_empty() {
            let _ = writeln!(text, "  needed by: {}", damaged.snapshots.join(", "));
        }
        let _ = writeln!(text, "  next: {}", damaged.next);
    }
    text
}

fn verified_text(verified: &Verified) -> String {
    let mut text = damaged_text(&verified.damaged);
    if verified.more_damaged > 0 {
        let _ = writeln!(text, "and {} more", verified.more_damaged);
    }
    let counts = [
        (verified.images, "images"),
        (verified.kernels, "kernels"),
        (verified.layers, "disk layers"),
        (verified.snapshots, "snapshots"),
        (verified.packs, "packs"),
        (verified.pages, "pages"),
        (verified.block_indexes, "block indexes"),
    ];
    let counts = counts.map(|(count, what)| format!("{count} {what}")).join(", ");
    let damaged = (verified.damaged.len() as u64).saturating_add(verified.more_damaged);
    let verdict =
        if damaged == 0 { "nothing is damaged".to_owned() } else { format!("{damaged} damaged") };
    let _ = writeln!(text, "read {counts}: {verdict}");
    text
}

/// Bytes that were freed; negative if more was written.
fn freed(n: i64) -> String {
    match u64::try_from(n) {
        Ok(freed) => bytes(freed),
        Err(_) => format!("-{}", bytes(n.unsigned_abs())),
    }
}

fn repaired_text(repaired: &Repaired) -> String {
    let mut text = String::new();
    for lost in &repaired.lost {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "snapshot {}: {} pages are lost", lost.name, lost.lost_pages);
        for cause in &lost.causes {
            let _ = writeln!(text, "  {}", escaped(cause, LONG));
        }
        let _ = writeln!(text, "  next: {}", lost.next);
    }
    text += &damaged_text(&repaired.damaged);
    let verdict = match repaired.lost.len() {
        0 => "no snapshot is lost".to_owned(),
        1 => "1 snapshot is lost".to_owned(),
        n => format!("{n} snapshots are lost"),
    };
    let _ = writeln!(
        text,
        "wrote {} pages and {} hash trees anew, removed {} packs ({}) and {} block indexes: \
         {verdict}",
        repaired.healed_pages,
        repaired.hash_trees,
        repaired.packs,
        freed(repaired.pack_bytes),
        repaired.block_indexes
    );
    text
}

fn collected_text(collected: &Collected) -> String {
    let packs = freed(collected.pack_bytes);
    let rows = [
        ["disk layers".into(), collected.layers.to_string(), bytes(collected.layer_bytes)],
        ["pages".into(), collected.pages.to_string(), packs],
        [
            "block indexes".into(),
            collected.block_indexes.to_string(),
            bytes(collected.block_index_bytes),
        ],
        ["staging".into(), collected.staged.to_string(), bytes(collected.staged_bytes)],
    ];
    let mut text = output::table(["REMOVED", "COUNT", "FREED"], rows);
    for left in &collected.left_alone {
        // Writing to a String cannot fail.
        let _ =
            write!(text, "left alone: {}\n  {}\n  next: {}\n", left.what, left.message, left.next);
    }
    text
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
