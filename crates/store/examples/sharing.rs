//! What templates in memory at once could have from each other: `cargo run --release -p dayfly-store --example sharing STORE...`.
//!
//! Every snapshot of the stores, one after the other, against all before it: of its pages that are not zero the part that one of those has
//! too, by colour, and how much of that mappings of so many pages in a row cover, the longest first.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;

const PAGE: usize = 4096;

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn percent(part: usize, of: usize) -> f64 {
    part as f64 * 100.0 / of.max(1) as f64
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Of each content, where it was first.
    let mut known: HashMap<blake3::Hash, Vec<(usize, usize)>> = HashMap::new();
    let mut before: Vec<Vec<Option<blake3::Hash>>> = Vec::new();
    for root in std::env::args_os().skip(1) {
        let store = dayfly_store::Store::open(Path::new(&root))?;
        for manifest in store.snapshots()?.items {
            let open = store.open_snapshot(&manifest.name)?;
            let mut pages = Vec::new();
            let mut page = [0; PAGE];
            for frame in 0..open.memory.metadata()?.len() / PAGE as u64 {
                open.memory.read_exact_at(&mut page, frame * PAGE as u64)?;
                pages.push((page != [0; PAGE]).then(|| blake3::hash(&page)));
            }
            let used = pages.iter().flatten().count();
            let same = pages.iter().flatten().filter(|hash| known.contains_key(hash)).count();
            println!("{}: {used} pages, {:.1} % also in one before", manifest.name, percent(same, used));
            let (_, table) = store.snapshot_table(&"default".parse()?, &manifest.name)?;
            let mut colours: HashMap<u8, (usize, usize)> = HashMap::new();
            for run in table.runs() {
                for frame in run.first..run.first + run.frames {
                    let Some(hash) = pages[frame as usize] else { continue };
                    let of = colours.entry(run.colour).or_default();
                    of.0 += usize::from(known.contains_key(&hash));
                    of.1 += 1;
                }
            }
            let mut colours: Vec<_> = colours.into_iter().collect();
            colours.sort_unstable();
            for (colour, (same, used)) in colours {
                println!("  colour {colour}: {used} pages, {:.1} %", percent(same, used));
            }
            let mut runs = Vec::new();
            let mut frame = 0;
            while frame < pages.len() {
                let places = pages[frame].and_then(|hash| known.get(&hash)).map_or(&[][..], Vec::as_slice);
                let long = |&(at, from): &(usize, usize)| {
                    let alike = pages[frame..].iter().zip(&before[at][from..]);
                    alike.take_while(|(a, b)| a.is_some() && a == b).count()
                };
                let longest = places.iter().map(long).max().unwrap_or(0);
                if longest > 0 {
                    runs.push(longest);
                }
                frame += longest.max(1);
            }
            runs.sort_unstable_by(|a, b| b.cmp(a));
            for most in [16, 64, 256, 1024, 4096] {
                let covered: usize = runs.iter().take(most).sum();
                let shortest = runs.iter().take(most).last().copied().unwrap_or(0);
                println!("  {most} mappings: {:.1} % (down to {shortest} pages)", percent(covered, used));
            }
            for (frame, hash) in pages.iter().enumerate() {
                let Some(hash) = hash else { continue };
                let places = known.entry(*hash).or_default();
                if places.len() < 8 {
                    places.push((before.len(), frame));
                }
            }
            before.push(pages);
        }
    }
    Ok(())
}
