//! Colours a raw memory file: `colours RAM-FILE [--cr3 HEX --cr4 HEX] [--png FILE]`. The RAM has
//! dayfly's layout: the first 3 GiB from address 0, the rest from 4 GiB.

use dayfly_introspect::{Extent, Layout, RamFile, RootHint, introspect, picture};
use std::error::Error;
use std::fs::File;
use std::num::NonZeroU32;
use std::time::Instant;

const HOLE_START: u64 = 3 << 30;
const HOLE_END: u64 = 4 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path =
        arguments.next().ok_or("usage: colours RAM-FILE [--cr3 HEX --cr4 HEX] [--png FILE]")?;
    let (mut cr3, mut cr4, mut png) = (None, 0, None);
    while let Some(option) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{option}: expected a value"))?;
        let hex = || u64::from_str_radix(value.trim_start_matches("0x"), 16);
        match option.as_str() {
            "--cr3" => cr3 = Some(hex()?),
            "--cr4" => cr4 = hex()?,
            "--png" => png = Some(value),
            _ => return Err(format!("{option}: expected --cr3, --cr4 or --png").into()),
        }
    }

    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    let low = bytes.min(HOLE_START);
    let mut extents = vec![Extent { guest: 0, offset: 0, bytes: low }];
    if bytes > low {
        extents.push(Extent { guest: HOLE_END, offset: low, bytes: bytes - low });
    }
    let start = Instant::now();
    let memory = RamFile::open(&file, Layout::new(&extents)?)?;
    let opened = start.elapsed();
    let hints: Vec<RootHint> =
        cr3.map(|cr3| RootHint::from_registers(cr3, cr4)).into_iter().collect();
    let report = introspect(&memory, &hints);
    let all = start.elapsed();

    match (&report.kernel, &report.degraded) {
        (Some(kernel), _) => println!(
            "Linux {}, {} levels, {} processes, {} files",
            kernel.release,
            kernel.levels.count(),
            report.processes,
            report.groups.len()
        ),
        (None, Some(degraded)) => println!("{degraded}"),
        (None, None) => {}
    }
    println!("{}", report.census());
    println!(
        "{:.1} ms, of which opening {:.1} ms",
        all.as_secs_f64() * 1e3,
        opened.as_secs_f64() * 1e3
    );
    if let Some(png) = png {
        picture::write_png(
            &report.colours,
            NonZeroU32::new(512).unwrap_or(NonZeroU32::MIN),
            File::create(png)?,
        )?;
    }
    Ok(())
}
