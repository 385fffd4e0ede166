//! `dayfly colours`: shows what a snapshot's memory is used for, as a table and a picture.

use crate::connect;
use crate::output::{self, Format, FormatArgs};
use anyhow::{Context, Result};
use clap::builder::RangedU64ValueParser;
use dayfly_api::types::{ColourUse, Colours, MAX_PICTURE_WIDTH};
use dayfly_units::{Bytes, Name};
use std::path::PathBuf;

/// Arguments of `dayfly colours`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the snapshot
    snapshot: Name,
    /// File for the picture [default: SNAPSHOT-colours.png]
    #[arg(short, long, value_name = "FILE", conflicts_with = "no_picture")]
    output: Option<PathBuf>,
    /// Pages of 4 KiB in a row of the picture
    #[arg(long, value_name = "PAGES", default_value_t = 512, conflicts_with = "no_picture",
        value_parser = RangedU64ValueParser::<u32>::new().range(1..=u64::from(MAX_PICTURE_WIDTH)))]
    width: u32,
    /// Print only the table
    #[arg(long)]
    no_picture: bool,
    #[command(flatten)]
    format: FormatArgs,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let client = connect::client().await?;
        let colours = client.snapshot_colours(&self.snapshot).await?;
        match self.format.format {
            Format::Json => output::json(&colours)?,
            Format::Table => output::emit(&text(&colours))?,
        }
        if self.no_picture {
            return Ok(());
        }
        let path = self.output.unwrap_or_else(|| format!("{}-colours.png", self.snapshot).into());
        let png = client.snapshot_picture(&self.snapshot, self.width).await?;
        std::fs::write(&path, &png)
            .with_context(|| format!("writing the picture to {}", path.display()))?;
        eprintln!("picture: {}", path.display());
        Ok(())
    }
}

fn text(colours: &Colours) -> String {
    let bytes = |n: u64| if n == 0 { "-".to_owned() } else { Bytes(n).to_string() };
    let row = |name: &str, used: &ColourUse| {
        let all = used.total_bytes();
        let tenths =
            (u128::from(all) * 1000).checked_div(u128::from(colours.memory_bytes)).unwrap_or(0);
        [
            name.to_owned(),
            bytes(all),
            format!("{}.{} %", tenths / 10, tenths % 10),
            bytes(used.page_bytes),
            bytes(used.disk_bytes),
            bytes(used.zero_bytes.saturating_add(used.free_bytes)),
        ]
    };
    let mut rows: Vec<_> = colours
        .colours
        .iter()
        .filter(|used| used.total_bytes() > 0)
        .map(|used| row(&used.colour, used))
        .collect();
    rows.push(row("all", &colours.total()));
    output::table(
        ["COLOUR", "SIZE", "SHARE", "STORED AS PAGES", "ON ITS DISKS", "ZERO OR FREE"],
        rows,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_that_are_used_have_a_row_and_all_have_one() {
        let used = |colour: &str, page_bytes, disk_bytes, free_bytes| ColourUse {
            colour: colour.into(),
            rgb: "#000000".into(),
            zero_bytes: 0,
            free_bytes,
            disk_bytes,
            page_bytes,
        };
        let colours = vec![
            used("free", 0, 0, 3 << 20),
            used("slab", 0, 0, 0),
            used("page cache", 4096, 8192, 0),
        ];
        let text = text(&Colours { memory_bytes: 4 << 20, colours });
        assert!(!text.contains("slab"), "{text}");
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["free", "3.0", "MiB", "75.0", "%", "-", "-", "3.0", "MiB"]);
        assert_eq!(
            lines[2],
            ["page", "cache", "12.0", "KiB", "0.2", "%", "4.0", "KiB", "8.0", "KiB", "-"]
        );
        assert_eq!(lines[3][..3], ["all", "3.0", "MiB"]);
    }
}
