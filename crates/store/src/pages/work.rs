//! Packs that another process writes: one that may have been taken over by the guest whose pages it
//! stores ([`crate::RamWork`]).
//!
//! The other process reads the pages, compresses them, and writes each pack to a file that has a
//! name in this process's stage only. This process looks pages up. Once the other process has ended
//! and no description of a pack is writable, it decodes the pack's footer, compares the hashes with
//! those that were asked for, syncs the pack and publishes it. It does not hash the pages, because
//! that would cost a good part of what the other process saves.
//!
//! So a pack may have wrong bytes under a hash. That harms only the snapshot that the pack was
//! written for, because
//!
//! - each reader hashes each page that it reads;
//! - a put hashes a page that it finds before its table refers to it, and before that page hides
//!   another copy ([`super::sound`], [`super::put`]);
//! - a pack of which another one hides a page is hashed whole before it is published;
//! - packs that were found when the folder was opened hide no copy in another one
//!   ([`super::space`]);
//! - a gc gives a copy up only for one that it has hashed ([`super::copies`]);
//! - no pack replaces another one before it is compared with its sums.
//!
//! The hashes themselves may be made up too. Their prefixes place them in the index, so
//! [`check_prefixes`] limits how many are alike.

use super::error::{PagesError, WorkError};
use super::index::{mixed, prefix};
use super::pack::{GROUP_PAGES, PAGE, Pack, PackError};
use super::read::read_span;
use super::space::Space;
use super::writer::{self, Staged};
use crate::blob::Stage;
use crate::errors::{Damage, IoError};
use crate::meter::Meter;
use dayfly_sys::writers::{Writers, writers};
use dayfly_units::{Digest, PAGE_SIZE};
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a child that the daemon starts may take to execute its program.
const STARTING: Duration = Duration::from_secs(5);

/// The most hashes in one of four times as many buckets by their prefixes of 8 bytes. By chance a
/// bucket has more once in 10²³.
const MAX_ALIKE: u8 = 16;

/// A process that writes packs. Packs are begun and completed in any order; at most twice
/// [`Self::threads`] are begun and not completed at a time.
pub trait PackWork {
    /// The number of packs that it writes at a time, at least 1.
    fn threads(&self) -> usize;

    /// Begins a pack of these frames of RAM, at most [`super::pack::MAX_PACK_PAGES`], in this
    /// order.
    ///
    /// # Errors
    /// The process has ended.
    fn begin(&mut self, number: u32, frames: &[u32], into: File) -> Result<(), WorkError>;

    /// Waits for the next pack that is written and synced, and returns its number.
    ///
    /// # Errors
    /// The process has ended, or takes too long.
    fn written(&mut self) -> Result<u32, WorkError>;

    /// Ends the process, and waits until it is gone, with its descriptors.
    ///
    /// # Errors
    /// It does not end.
    fn end(&mut self) -> Result<(), WorkError>;
}

/// Refuses different hashes of which too many have the same prefix: the index would find each of
/// them slowly.
pub(super) fn check_prefixes(hashes: &[(u32, Digest)]) -> Result<(), WorkError> {
    let buckets = (4 * hashes.len()).next_power_of_two();
    let mut counts = vec![0_u8; buckets];
    for (_, hash) in hashes {
        let bucket = usize::try_from(mixed(prefix(hash)) % buckets as u64).unwrap_or(0);
        let Some(count) = counts.get_mut(bucket).filter(|count| **count < MAX_ALIKE) else {
            return Err(WorkError::new(format!(
                "hashes of pages: expected at most {MAX_ALIKE} with the same first 8 bytes, got \
                 more; take the snapshot again"
            )));
        };
        *count += 1;
    }
    Ok(())
}

/// Has `work` write these pages to packs in `stage`, and ends it. The pages are in this order,
/// within a pack and from pack to pack.
pub(super) fn stage(
    stage: &Stage,
    space: &Space,
    pages: &[(u32, Digest)],
    work: &mut dyn PackWork,
    meter: &Meter,
) -> Result<Vec<Staged>, PagesError> {
    let threads = work.threads().max(1);
    let chunks: Vec<_> = pages.chunks(writer::pages_of_packs(pages.len(), threads)).collect();
    let mut files: Vec<Option<File>> = Vec::with_capacity(chunks.len());
    let mut written: Vec<Option<File>> = chunks.iter().map(|_| None).collect();
    let mut done = 0;
    while done < chunks.len() {
        while let Some(chunk) = chunks.get(files.len())
            && files.len() < done + 2 * threads
        {
            let name = name(files.len());
            let theirs = stage.create(&name)?;
            // Opened before anything is written, so that this description reports a failed write
            // whatever the other process has seen of it.
            let ours = stage.open(&name)?;
            let frames: Vec<u32> = chunk.iter().map(|(frame, _)| *frame).collect();
            work.begin(count(files.len()), &frames, theirs)?;
            files.push(Some(ours));
        }
        let number = work.written()? as usize;
        let file = files.get_mut(number).and_then(Option::take).ok_or_else(|| {
            WorkError::new(format!(
                "packs: expected one that is being written, got number {number}"
            ))
        })?;
        let chunk = chunks[number];
        // Only to fail early: the other process can still write.
        check(stage, space, number, &file, chunk)?;
        written[number] = Some(file);
        meter.add(chunk.len() as u64 * PAGE_SIZE);
        done += 1;
    }
    work.end()?;
    let written = written.into_iter().flatten().zip(chunks).enumerate();
    written.map(|(number, (file, chunk))| finish(stage, space, number, file, chunk)).collect()
}

fn name(number: usize) -> String {
    format!("pack{number}")
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The id and the hashes of the pack `number`, if its footer is sound and names the pages of
/// `chunk`.
fn check(
    stage: &Stage,
    space: &Space,
    number: usize,
    file: &File,
    chunk: &[(u32, Digest)],
) -> Result<(Digest, Vec<Digest>), PagesError> {
    let path = stage.path().join(name(number));
    // The other process has caused damage too.
    let wrong = |e: PackError| match e {
        PackError::Io(e) if !e.is_damage() => PagesError::Io(e),
        e => WorkError::new(format!("pack {number}: {}", e.into_damage())).into(),
    };
    let pack = Pack::open(&path, file, &space.tenant).map_err(wrong)?;
    let hashes = pack.hashes(file, 0..pack.pages).map_err(|e| wrong(e.into()))?;
    let differs = hashes.iter().zip(chunk).position(|(got, (_, hash))| got != hash);
    if pack.group_pages != GROUP_PAGES {
        let got = pack.group_pages;
        return Err(WorkError::new(format!(
            "pack {number}: expected groups of {GROUP_PAGES} pages, got {got}"
        ))
        .into());
    }
    if hashes.len() != chunk.len() || differs.is_some() {
        let (expected, got) = (chunk.len(), hashes.len());
        let place = differs.map_or_else(String::new, |at| format!("; page {at} has another hash"));
        return Err(WorkError::new(format!(
            "pack {number}: expected the {expected} pages that were asked for, got {got}{place}"
        ))
        .into());
    }
    Ok((pack.id, hashes))
}

/// The pack `number`, whose process has ended: syncs it, and checks it as it is from now on.
fn finish(
    stage: &Stage,
    space: &Space,
    number: usize,
    file: File,
    chunk: &[(u32, Digest)],
) -> Result<Staged, PagesError> {
    let name = name(number);
    let path = stage.path().join(&name);
    let ask = || writers(&file).map_err(IoError::new("asking for a lease on", &path));
    let (mut asked, until) = (ask()?, Instant::now() + STARTING);
    // A child that the daemon starts has copies of its descriptors until it executes its program.
    while asked == Writers::Some && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
        asked = ask()?;
    }
    // Without leases on this file system, the end of the process has to do.
    if asked == Writers::Some {
        let why = "a pack can still be written to, although its process has ended";
        return Err(WorkError::new(why.to_owned()).into());
    }
    let (id, hashes) = check(stage, space, number, &file, chunk)?;
    stage.finish(&name, &file)?;
    Ok(Staged { id, name, hashes, file })
}

impl Space {
    /// Hashes all pages of a pack whose footer was checked.
    pub(super) fn check_whole(&self, staged: &Staged) -> Result<(), PagesError> {
        let path = Path::new("a pack");
        let wrong = |e: PackError| match e {
            PackError::Io(e) if !e.is_damage() => PagesError::Io(e),
            e => WorkError::new(e.into_damage().to_string()).into(),
        };
        let (mut stored, mut raw) = (Vec::new(), Vec::new());
        let pack = Pack::open(path, &staged.file, &self.tenant).map_err(wrong)?;
        for group in 0..pack.groups() {
            let pages = pack.pages_of(group);
            let hashes = staged.hashes.get(pages.start as usize..pages.end as usize);
            let hashes = hashes.ok_or_else(|| {
                WorkError::new(format!("a pack: expected {} pages, got more", staged.hashes.len()))
            })?;
            let stored = read_span(&pack, &staged.file, group, group, &mut stored);
            let stored = stored.map_err(|e| wrong(e.into()))?;
            pack.check_group(group, hashes, stored, &mut raw).map_err(|e| wrong(e.into()))?;
        }
        Ok(())
    }
}

impl Pack {
    /// Decodes a group and compares each of its pages with its hash.
    pub(super) fn check_group(
        &self,
        group: usize,
        hashes: &[Digest],
        stored: &[u8],
        raw: &mut Vec<u8>,
    ) -> Result<(), Damage> {
        let pages = self.pages_of(group);
        self.decode(group, pages.start, stored, raw)?;
        let mut pairs = pages.zip(hashes).zip(raw.chunks_exact(PAGE));
        pairs.try_for_each(|((page, hash), bytes)| self.check(page, hash, bytes))
    }
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "work_props.rs"]
mod props;
