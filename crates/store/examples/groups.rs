//! Measures the cost of group sizes and zstd levels: `cargo run --release -p dayfly-store --example
//! groups [RAM]`.
//!
//! For each pair it prints three values, measured on one core over the unique pages that are not
//! zero:
//!
//! - the ratio of raw to stored bytes;
//! - microseconds from stored bytes in memory to one verified page (digest of the stored group,
//!   decompression, digest of the page);
//! - MB/s of compression.

mod common;

use common::{PAGE, percentile, ram, unique};
use std::hint::black_box;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (file, what) = ram()?;
    let all = unique(&file)?;
    // Ranges of 64 pages, spread over all of RAM: enough for the ratio, and all measurements take
    // two minutes.
    let step = all.len().div_ceil(16_384);
    let pages: Vec<[u8; PAGE]> = all.chunks(64).step_by(step).flatten().copied().collect();
    println!("{what}: {} unique pages", pages.len());
    println!("| pages | level | ratio | fetch p50 us | fetch p99 us | compress MB/s |");
    println!("|---|---|---|---|---|---|");
    for group in [1, 2, 4, 8, 16, 32, 64] {
        for level in [1, 3, 6, 9] {
            let mut zstd = zstd::bulk::Compressor::new(level)?;
            let started = Instant::now();
            let groups = pages
                .chunks(group)
                .map(|pages| zstd.compress(pages.as_flattened()))
                .collect::<Result<Vec<_>, _>>()?;
            let seconds = started.elapsed().as_secs_f64();
            let stored: usize = groups.iter().map(Vec::len).sum();
            let mut unzstd = zstd::bulk::Decompressor::new()?;
            let mut raw = Vec::with_capacity(group * PAGE);
            let mut fetches = Vec::new();
            for n in 0..2000 {
                let at = n * 7919 % groups.len();
                let started = Instant::now();
                black_box(blake3::hash(&groups[at]));
                raw.clear();
                unzstd.decompress_to_buffer(&groups[at], &mut raw)?;
                black_box(blake3::hash(&raw[..PAGE]));
                fetches.push(started.elapsed().as_secs_f64() * 1e6);
            }
            #[expect(clippy::cast_precision_loss, reason = "for people")]
            let (raw, stored) = ((pages.len() * PAGE) as f64, stored as f64);
            println!(
                "| {group} | {level} | {:.2} | {:.0} | {:.0} | {:.0} |",
                raw / stored,
                percentile(&mut fetches, 50),
                percentile(&mut fetches, 99),
                raw / 1e6 / seconds
            );
        }
    }
    Ok(())
}
