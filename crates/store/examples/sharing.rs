//! Measures how much RAM templates in memory have in common: `cargo run --release -p dayfly-store
//! --example sharing STORE...`.
//!
//! Each snapshot of the stores is compared with all snapshots before it. For several minimum
//! lengths of a row, and several numbers of rows (longest first), it prints which part of the
//! nonzero pages the rows cover.

use dayfly_store::{Comparable, Kind, Store, Table, alike};
use std::path::Path;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut before: Vec<Table> = Vec::new();
    println!("| snapshot | pages | least pages of a row | most rows | rows | covered | ms |");
    println!("|---|---|---|---|---|---|---|");
    for root in std::env::args_os().skip(1) {
        let store = Store::open(Path::new(&root))?;
        for manifest in store.snapshots()?.items {
            let (_, table) = store.snapshot_table(&"default".parse()?, &manifest.name)?;
            let full =
                table.runs().iter().filter(|run| !matches!(run.kind, Kind::Zero | Kind::Free));
            let pages: u32 = full.map(|run| run.frames).sum();
            for (least, most) in
                [(64, 4096), (16, 16), (16, 64), (16, 256), (16, 4096), (4, 4096), (1, 65_536)]
            {
                let began = Instant::now();
                let others: Vec<Comparable<'_>> =
                    before.iter().map(|table| Comparable::of(table, &[])).collect();
                let rows = alike(&Comparable::of(&table, &[]), &others, least, most);
                let ms = began.elapsed().as_secs_f64() * 1e3;
                let covered: u32 = rows.iter().map(|row| row.frames).sum();
                let (name, count) = (&manifest.name, rows.len());
                let part = f64::from(covered) * 100.0 / f64::from(pages.max(1));
                println!(
                    "| {name} | {pages} | {least} | {most} | {count} | {part:.1} % | {ms:.1} |"
                );
            }
            before.push(table);
        }
    }
    Ok(())
}
