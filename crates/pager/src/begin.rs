//! Receives the daemon's plan: table, places, order, settings, and the files.

use crate::error::{ServeError, invalid, step};
use crate::stored::{Expected, Stored};
use crate::wire::{Settings, ToPager, receive};
use dayfly_store::{DiskFile, FileTree, PageReader};
use rustix::fd::OwnedFd;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// The most bytes of a sheet: the largest table, and twice that for places and order.
const MAX_SHEET_BYTES: u64 = 12 << 30;

/// The content of the daemon's first message and its files.
pub(crate) struct Beginning {
    pub(crate) source: Stored,
    pub(crate) memory: File,
    pub(crate) first: Vec<u32>,
    pub(crate) settings: Settings,
}

/// Receives the first message and the files. `None`: the daemon closed the connection before,
/// because it needs no further pager.
pub(crate) fn begin(socket: &OwnedFd) -> Result<Option<Beginning>, ServeError> {
    let next = || receive::<ToPager>(socket).map_err(step("receiving the plan from the daemon"));
    let ended = || {
        step("receiving the plan from the daemon")(io::Error::from(io::ErrorKind::UnexpectedEof))
    };
    let Some((first, fds)) = next()? else { return Ok(None) };
    let ToPager::Begin {
        table_bytes,
        places_bytes,
        order_bytes,
        elsewhere_bytes,
        packs,
        disks,
        roots,
        settings,
    } = first
    else {
        return Err(invalid("first message", "Begin", format!("{first:?}")));
    };
    let [memory, sheet] = <[OwnedFd; 2]>::try_from(fds)
        .map_err(|fds| invalid("descriptors of Begin", "RAM and the sheet", fds.len()))?;
    let sheet = File::from(sheet);
    let length = sheet.metadata().map_err(step("the sheet"))?.len();
    let parts = [table_bytes, places_bytes, order_bytes, elsewhere_bytes];
    let announced = parts.into_iter().fold(0, u64::saturating_add);
    if announced != length || length > MAX_SHEET_BYTES {
        return Err(invalid(
            "bytes of the sheet",
            format!("{announced}, at most {MAX_SHEET_BYTES}"),
            length,
        ));
    }
    let part = |at: u64, bytes: u64| {
        let mut part = vec![0; usize::try_from(bytes).unwrap_or(0)];
        sheet.read_exact_at(&mut part, at).map(|()| part).map_err(step("the sheet"))
    };
    let (table, places) = (part(0, table_bytes)?, part(table_bytes, places_bytes)?);
    let order = part(table_bytes + places_bytes, order_bytes)?;
    let first: Vec<u32> =
        order.as_chunks().0.iter().map(|frame| u32::from_le_bytes(*frame)).collect();
    let elsewhere = part(table_bytes + places_bytes + order_bytes, elsewhere_bytes)?;
    let elsewhere = rows(&elsewhere)?;
    let of_disks = disks.iter().fold(0, |sum: u64, files| sum.saturating_add(u64::from(*files)));
    if of_disks != roots.len() as u64 {
        return Err(invalid("roots of hash trees", of_disks, roots.len()));
    }
    let trees = roots.iter().flatten().count();
    let wanted = u64::from(packs) + of_disks + trees as u64;
    let mut files: Vec<File> = Vec::new();
    while (files.len() as u64) < wanted {
        match next()?.ok_or_else(ended)? {
            (ToPager::Files, fds) if !fds.is_empty() => {
                files.extend(fds.into_iter().map(File::from))
            }
            (other, fds) => {
                return Err(invalid(
                    "message",
                    "Files",
                    format!("{other:?}, {} descriptors", fds.len()),
                ));
            }
        }
    }
    if files.len() as u64 != wanted {
        return Err(invalid("packs, files of disks and hash trees", wanted, files.len()));
    }
    let mut trees = files.split_off(files.len() - trees).into_iter();
    let mut files = files.into_iter();
    let packs = files.by_ref().take(packs as usize).collect();
    let mut files = files.zip(roots).map(|(file, root)| DiskFile {
        file,
        tree: root.and_then(|root| Some(FileTree { file: trees.next()?, root })),
    });
    let disks = disks.iter().map(|n| files.by_ref().take(*n as usize).collect()).collect();
    let reader = PageReader::open(&table, &places, packs, disks)?;
    let expected = Expected { first: first.clone(), elsewhere, ..Expected::default() };
    let source = Stored::new(reader, &expected, &settings.policy);
    Ok(Some(Beginning { source, memory: memory.into(), first, settings }))
}

/// Decodes ranges of frames: for each the first frame and the frame behind the last, u32
/// little-endian.
fn rows(bytes: &[u8]) -> Result<Vec<Range<u32>>, ServeError> {
    let number = |bytes: &[u8]| u32::from_le_bytes(std::array::from_fn(|n| bytes[n]));
    let (chunks, rest) = bytes.as_chunks::<8>();
    let rows: Vec<Range<u32>> = chunks.iter().map(|c| number(&c[..4])..number(&c[4..])).collect();
    let apart = rows.iter().all(|row| row.start < row.end)
        && rows.windows(2).all(|two| two[0].end <= two[1].start);
    if rest.is_empty() && apart {
        return Ok(rows);
    }
    Err(invalid(
        "frames elsewhere",
        "rows that ascend and do not overlap",
        format!("{} bytes", bytes.len()),
    ))
}
