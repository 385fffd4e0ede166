//! Whether packs have the pages that they name. A put asks before a table refers to a page that
//! another put has stored, because the disk may have lost the page since, and because the process
//! that wrote the pack may have been taken over by a guest ([`super::work`]).
//!
//! A group is read and its pages are hashed once, and again after its pack's file has changed
//! ([`crate::integrity::verify::Stamp`]). Later damage that leaves the file's times as they are is
//! found by readers and by [`crate::Store::verify`].

use super::pack::{Pack, PackError};
use super::read::read_span;
use super::space::{Found, Space};
use crate::errors::{IoError, IoResult};
use crate::integrity::verify::Stamp;
use dayfly_units::Digest;
use std::fs::File;

/// Buffers of one thread, and the last group that was sound.
#[derive(Default)]
pub(super) struct Asked {
    last: Option<(u32, u32)>,
    stored: Vec<u8>,
    raw: Vec<u8>,
}

impl Space {
    /// Whether the namespace has the page, with the bytes that its pack names. A damaged copy goes
    /// into quarantine.
    pub(super) fn has_sound(&self, hash: &Digest, asked: &mut Asked) -> IoResult<bool> {
        while let Some(found) = self.find(hash)? {
            let group = (found.number, found.page / found.pack.group_pages);
            if asked.last == Some(group) || self.is_sound(&found, asked)? {
                asked.last = Some(group);
                return Ok(true);
            }
            if !self.quarantine(&[group]) {
                // The pack was removed after it was found.
                return Ok(false);
            }
        }
        Ok(false)
    }

    /// Whether each page of the group has the hash that the pack names.
    pub(super) fn is_sound(&self, found: &Found, asked: &mut Asked) -> IoResult<bool> {
        let Found { number, pack, page } = found;
        let Asked { stored, raw, .. } = asked;
        let group = (page / pack.group_pages) as usize;
        let mut read = || -> IoResult<bool> {
            let file = self.file(*number, pack)?;
            let stamp = Stamp::of(&file).map_err(IoError::new("looking at", &pack.path))?;
            if pack.sound.has(&stamp, group) {
                return Ok(true);
            }
            let stored = read_span(pack, &file, group, group, stored)?;
            let pages = pack.pages_of(group);
            let hashes = pack.hashes(&file, pages)?;
            let sound = pack.check_group(group, &hashes, stored, raw).is_ok();
            if sound && stamp.is_settled() {
                pack.sound.add(stamp, group, pack.groups());
            }
            Ok(sound)
        };
        match read() {
            Err(e) if e.is_damage() || e.is_not_found() => Ok(false),
            other => other,
        }
    }
}

/// Whether the file is the pack `id`, and each group has its sum.
pub(super) fn is_whole(
    path: &std::path::Path,
    file: &File,
    tenant: &dayfly_units::Name,
    id: &Digest,
) -> Result<bool, PackError> {
    let mut stored = Vec::new();
    let mut read = || -> Result<bool, PackError> {
        let pack = Pack::open(path, file, tenant)?;
        if pack.id != *id {
            return Ok(false);
        }
        for group in 0..pack.groups() {
            if !pack.has_sum(group, read_span(&pack, file, group, group, &mut stored)?) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    match read() {
        Err(PackError::Damage(_)) => Ok(false),
        Err(PackError::Io(e)) if e.is_damage() => Ok(false),
        other => other,
    }
}
