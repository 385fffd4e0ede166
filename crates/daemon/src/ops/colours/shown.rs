//! The colours in a snapshot's table: counted, and as a picture (Kaleidoscope, figure 3).

use crate::base::error::{ApiError, Outcome};
use crate::templates::cache::TemplateCache;
use dayfly_api::types::{ColourTouched, ColourUse, Colours, MAX_PICTURE_WIDTH};
use dayfly_introspect::{Colour, picture};
use dayfly_store::{Kind, Run};
use dayfly_units::{Name, PAGE_SIZE};
use dayfly_vmm::memory::working_set::Record;
use std::num::NonZeroU32;

/// Bytes of a snapshot's RAM by colour, and how they are stored.
///
/// # Errors
/// No such snapshot, it is damaged, or its RAM is not in pages.
pub fn colours(templates: &TemplateCache, name: &Name) -> Outcome<Colours> {
    let (manifest, table) = templates.store().snapshot_table(&templates.tenant(), name)?;
    Ok(Colours { memory_bytes: manifest.memory_bytes, colours: counted(table.runs()) })
}

fn counted(runs: &[Run]) -> Vec<ColourUse> {
    let mut all: Vec<ColourUse> = Colour::ALL.iter().map(|colour| of(*colour)).collect();
    for run in runs {
        // An unknown number is from a newer dayfly.
        let number = Colour::from_number(run.colour).unwrap_or(Colour::Unknown).number();
        let Some(of) = all.get_mut(usize::from(number)) else { continue };
        let bytes = u64::from(run.frames) * PAGE_SIZE;
        let kind = match run.kind {
            Kind::Zero => &mut of.zero_bytes,
            Kind::Free => &mut of.free_bytes,
            Kind::Disk { .. } => &mut of.disk_bytes,
            Kind::Page { .. } => &mut of.page_bytes,
        };
        *kind = kind.saturating_add(bytes);
    }
    all
}

fn of(colour: Colour) -> ColourUse {
    let [red, green, blue] = picture::rgb(colour);
    let rgb = format!("#{red:02x}{green:02x}{blue:02x}");
    ColourUse {
        colour: colour.name().to_owned(),
        rgb,
        zero_bytes: 0,
        free_bytes: 0,
        disk_bytes: 0,
        page_bytes: 0,
    }
}

/// The pages of `record` by colour, compared with the expected ones. `runs` are those of the
/// snapshot's table.
pub fn touched(runs: &[Run], record: &Record, expected: &Record) -> Vec<ColourTouched> {
    let frames = runs.last().map_or(0, |run| run.first + run.frames) as usize;
    let flags = |record: &Record| {
        let mut flags = vec![false; frames];
        for page in record.in_order() {
            if let Some(flag) = flags.get_mut(page as usize) {
                *flag = true;
            }
        }
        flags
    };
    let (touched, expected) = (flags(record), flags(expected));
    let none = |colour: &Colour| ColourTouched {
        colour: colour.name().to_owned(),
        touched_bytes: 0,
        expected_bytes: 0,
        unneeded_bytes: 0,
        zero_bytes: 0,
    };
    let mut all: Vec<ColourTouched> = Colour::ALL.iter().map(none).collect();
    for run in runs {
        let number = Colour::from_number(run.colour).unwrap_or(Colour::Unknown).number();
        let Some(of) = all.get_mut(usize::from(number)) else { continue };
        let range = run.first as usize..(run.first + run.frames) as usize;
        for (touched, expected) in touched[range.clone()].iter().zip(&expected[range]) {
            match (run.kind, touched, expected) {
                (Kind::Zero | Kind::Free, true, _) => of.zero_bytes += PAGE_SIZE,
                (Kind::Zero | Kind::Free, false, _) | (_, false, false) => {}
                (_, true, true) => {
                    of.touched_bytes += PAGE_SIZE;
                    of.expected_bytes += PAGE_SIZE;
                }
                (_, true, false) => of.touched_bytes += PAGE_SIZE,
                (_, false, true) => of.unneeded_bytes += PAGE_SIZE,
            }
        }
    }
    all
}

/// A PNG with a pixel for each frame, `width` frames in a row.
///
/// # Errors
/// As [`colours`]; or the width is 0 or above [`MAX_PICTURE_WIDTH`].
pub fn picture(templates: &TemplateCache, name: &Name, width: u32) -> Outcome<Vec<u8>> {
    let fits = NonZeroU32::new(width).filter(|_| width <= MAX_PICTURE_WIDTH);
    let width = fits.ok_or_else(|| {
        ApiError::invalid(format_args!(
            "width: expected 1 to {MAX_PICTURE_WIDTH} frames, got {width}"
        ))
    })?;
    let (_, table) = templates.store().snapshot_table(&templates.tenant(), name)?;
    let frames: Vec<Colour> = table
        .runs()
        .iter()
        .flat_map(|run| {
            let colour = Colour::from_number(run.colour).unwrap_or(Colour::Unknown);
            std::iter::repeat_n(colour, run.frames as usize)
        })
        .collect();
    let mut png = Vec::new();
    picture::write_png(&frames, width, &mut png)
        .map_err(|e| ApiError::internal(format_args!("the picture of {name}: {e}")))?;
    Ok(png)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_counted_by_colour_and_kind() {
        let run = |first, frames, kind, colour: u8| Run { first, frames, kind, colour };
        let disk = Kind::Disk { disk: 0, layer: 0, block: 7 };
        let (cache, unknown) = (Colour::PageCache.number(), Colour::Unknown.number());
        let runs = vec![
            run(0, 3, Kind::Zero, cache),
            run(3, 2, disk, cache),
            run(5, 1, Kind::Page { hash: 0 }, cache),
            run(6, 4, Kind::Free, Colour::Free.number()),
            // A colour of a newer dayfly.
            run(10, 5, Kind::Zero, 200),
            run(15, 1, Kind::Zero, unknown),
        ];
        let used = counted(&runs);
        assert_eq!(used.len(), Colour::ALL.len());
        let find = |colour: Colour| used.iter().find(|used| used.colour == colour.name()).unwrap();
        let of = find(Colour::PageCache);
        assert_eq!(
            (of.zero_bytes, of.disk_bytes, of.page_bytes, of.free_bytes),
            (12288, 8192, 4096, 0)
        );
        assert_eq!(of.rgb, "#ffd700");
        assert_eq!(find(Colour::Free).free_bytes, 16384);
        assert_eq!(find(Colour::Unknown).zero_bytes, 6 * 4096);
    }
}
