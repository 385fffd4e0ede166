//! Fetches pages. Every page is hashed before it is returned. An error about a damaged page names
//! its pack, group and number, and the page is not returned.
//!
//! A gc may move a page after the index lookup and before the file is opened. The pack is then
//! gone, and the lookup is repeated.

use super::error::PagesError;
use super::index::Place;
use super::pack::{PAGE, Pack};
use super::space::{Found, Space};
use super::tenant::Tenant;
use crate::blob::fault;
use crate::errors::{IoError, IoResult};
use crate::workers;
use dayfly_units::Digest;
use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// How often a page is looked up again because its pack was removed.
const TRIES: u32 = 16;
/// Most compressed bytes of adjacent groups in one read.
const SPAN_BYTES: u64 = 512 << 10;

/// All pages of a group; fetching one of them decompresses all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Id of the pack: BLAKE3 of its footer.
    pub pack: Digest,
    /// Number of the group in the pack.
    pub number: u32,
    /// The pages' hashes, in stored order.
    pub hashes: Vec<Digest>,
    /// The pages' bytes, concatenated in that order.
    pub bytes: Vec<u8>,
}

impl Tenant {
    /// Whether this namespace has the page.
    ///
    /// # Errors
    /// The host cannot read the pack.
    pub fn has(&self, hash: &Digest) -> Result<bool, IoError> {
        Ok(self.space.find(hash)?.is_some())
    }

    /// The 4096 bytes of a page.
    ///
    /// # Errors
    /// `Damage`: the namespace has no such page, or its pack is damaged.
    pub fn fetch(&self, hash: &Digest) -> Result<Vec<u8>, PagesError> {
        self.space.fetch(hash)
    }

    /// The group of a page, with every page verified.
    ///
    /// # Errors
    /// As [`Self::fetch`]; also if another page of the group is damaged.
    pub fn group(&self, hash: &Digest) -> Result<Group, PagesError> {
        self.space.with_group(hash, |found, file, bytes| {
            let number = found.page / found.pack.group_pages;
            let pages = found.pack.pages_of(number as usize);
            let hashes = found.pack.hashes(file, pages.clone())?;
            for ((page, hash), bytes) in pages.zip(&hashes).zip(bytes.chunks_exact(PAGE)) {
                found.pack.check(page, hash, bytes)?;
            }
            Ok(Group { pack: found.pack.id, number, hashes, bytes: bytes.to_vec() })
        })
    }

    /// Fetches many pages on all cores, in stored order: adjacent groups in one read, and every
    /// group decompressed once. `give` gets the index in `hashes` and the page; the order of calls
    /// is unspecified.
    ///
    /// # Errors
    /// As [`Self::fetch`], for the first page that fails; `give` may have received other pages
    /// before.
    pub fn fetch_many(
        &self,
        hashes: &[Digest],
        give: &(dyn Fn(usize, &[u8]) + Sync),
    ) -> Result<(), PagesError> {
        let wanted: Vec<u32> = (0..).take(hashes.len()).collect();
        self.space.scatter(&wanted, &|n| hashes[n as usize], &|bytes, pages| {
            for page in pages {
                give(page.tag as usize, &bytes[page.at..page.at + PAGE]);
            }
            Ok(())
        })
    }
}

/// A verified page in a group's bytes: its offset, and the tag of the request.
pub(crate) struct Given {
    pub(crate) at: usize,
    pub(crate) tag: u32,
}

/// A requested page and its likely place.
struct Wanted {
    place: Place,
    tag: u32,
}

/// The callback of [`Space::scatter`]: the bytes of a group, and the requested pages in it.
pub(crate) type Give<'a> = dyn Fn(&[u8], &[Given]) -> Result<(), PagesError> + Sync + 'a;

impl Space {
    pub(crate) fn fetch(&self, hash: &Digest) -> Result<Vec<u8>, PagesError> {
        self.with_group(hash, |found, _, bytes| {
            let at = (found.page % found.pack.group_pages) as usize * PAGE;
            let page = &bytes[at..at + PAGE];
            found.pack.check(found.page, hash, page)?;
            Ok(page.to_vec())
        })
    }

    /// Calls `use_it` with the page's place, the file of its pack, and the bytes of its group. If
    /// they are damaged, the group goes into quarantine and another copy of the page is tried. The
    /// last to be tried are the copies that were in quarantine before.
    fn with_group<T>(
        &self,
        hash: &Digest,
        use_it: impl Fn(&Found, &File, &[u8]) -> Result<T, PagesError>,
    ) -> Result<T, PagesError> {
        let mut tries = 0;
        while tries < TRIES {
            let Some(found) = self.find(hash)? else {
                match self.with_bad_group(hash, &use_it) {
                    Err(PagesError::Io(e)) if e.is_not_found() => tries += 1,
                    other => return other,
                }
                continue;
            };
            let group = found.page / found.pack.group_pages;
            match self.read_group(&found, group as usize, &use_it) {
                Err(PagesError::Io(e)) if e.is_not_found() => tries += 1,
                Err(e) if e.is_damage() => {
                    // There are as many other copies as packs, and each is tried once.
                    if !self.quarantine(&[(found.number, group)]) {
                        tries += 1;
                    }
                }
                other => return other,
            }
        }
        Err(self.missing(hash, "who asks").into())
    }

    /// As [`Self::with_group`], for the copies in quarantine: one of them may have been put there
    /// by an error of the disk that has passed. The error is that of the first copy.
    fn with_bad_group<T>(
        &self,
        hash: &Digest,
        use_it: impl Fn(&Found, &File, &[u8]) -> Result<T, PagesError>,
    ) -> Result<T, PagesError> {
        let mut first = None;
        for found in self.find_all_bad(hash)? {
            let group = found.page / found.pack.group_pages;
            match self.read_group(&found, group as usize, &use_it) {
                Ok(got) => return Ok(got),
                Err(e) => first = first.or(Some(e)),
            }
        }
        Err(first.unwrap_or_else(|| self.missing(hash, "who asks").into()))
    }

    fn read_group<T>(
        &self,
        found: &Found,
        group: usize,
        use_it: impl Fn(&Found, &File, &[u8]) -> Result<T, PagesError>,
    ) -> Result<T, PagesError> {
        // A buffer per thread: page faults on fresh memory would cost more than the fetch itself.
        thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
        let file = self.file(found.number, &found.pack)?;
        SCRATCH.with_borrow_mut(|Scratch { stored, raw }| {
            let stored = read_span(&found.pack, &file, group, group, stored)?;
            found.pack.decode(group, found.page, stored, raw)?;
            use_it(found, &file, raw)
        })
    }

    /// Calls `give` with the page of each tag; the page's hash is `hash(tag)`.
    pub(crate) fn scatter(
        &self,
        tags: &[u32],
        hash: &(dyn Fn(u32) -> Digest + Sync),
        give: &Give,
    ) -> Result<(), PagesError> {
        let mut wanted = Vec::with_capacity(tags.len());
        for &tag in tags {
            let hash = hash(tag);
            let (place, _) = self.guess(&hash).ok_or_else(|| self.missing(&hash, "who asks"))?;
            wanted.push(Wanted { place, tag });
        }
        wanted.sort_unstable_by_key(|w| (w.place, w.tag));
        let pieces = self.spans(&wanted);
        workers::each(pieces.len(), Scratch::default, |scratch, n| {
            self.give_span(pieces[n], hash, give, scratch)
        })
    }

    /// Splits the requests into spans of adjacent groups in one pack.
    fn spans<'a>(&self, wanted: &'a [Wanted]) -> Vec<&'a [Wanted]> {
        let state = self.read();
        let mut spans = Vec::new();
        for of_pack in wanted.chunk_by(|a, b| a.place.pack == b.place.pack) {
            let Some(pack) = state.packs.get(&of_pack[0].place.pack) else {
                spans.push(of_pack);
                continue;
            };
            let group = |w: &Wanted| (w.place.page / pack.group_pages) as usize;
            let mut rest = of_pack;
            while let Some(first) = rest.first() {
                let start = pack.span(group(first), group(first)).start;
                let joins = |pair: &[Wanted]| {
                    let (before, after) = (group(&pair[0]), group(&pair[1]));
                    after <= before + 1 && pack.span(after, after).end - start <= SPAN_BYTES
                };
                let length = 1 + rest.windows(2).take_while(|pair| joins(pair)).count();
                let (span, after) = rest.split_at(length);
                spans.push(span);
                rest = after;
            }
        }
        spans
    }

    fn give_span(
        &self,
        span: &[Wanted],
        hash: &(dyn Fn(u32) -> Digest + Sync),
        give: &Give,
        Scratch { stored, raw }: &mut Scratch,
    ) -> Result<(), PagesError> {
        // Finds out which pages are damaged, and whether another copy has them.
        let one_by_one = |pages: &[Wanted]| {
            let one = |w: &Wanted| give(&self.fetch(&hash(w.tag))?, &[Given { at: 0, tag: w.tag }]);
            pages.iter().try_for_each(one)
        };
        let (first, last) = match span {
            [] => return Ok(()),
            [only] => (only, only),
            [first, .., last] => (first, last),
        };
        let pack = self.read().packs.get(&first.place.pack).cloned();
        let Some(pack) = pack else { return one_by_one(span) };
        let group = |w: &Wanted| (w.place.page / pack.group_pages) as usize;
        let file = self.file(first.place.pack, &pack);
        let read = file.and_then(|file| read_span(&pack, &file, group(first), group(last), stored));
        let stored = match read {
            Err(e) if e.is_not_found() || e.is_damage() => return one_by_one(span),
            other => other?,
        };
        let start = pack.span(group(first), group(first)).start;
        for of_group in span.chunk_by(|a, b| group(a) == group(b)) {
            let number = group(&of_group[0]);
            let within = pack.span(number, number);
            let slice = |at: u64| usize::try_from(at - start).unwrap_or(0);
            let stored = &stored[slice(within.start)..slice(within.end)];
            if pack.decode(number, of_group[0].place.page, stored, raw).is_err() {
                one_by_one(of_group)?;
                continue;
            }
            let mut given = Vec::with_capacity(of_group.len());
            let mut checked = None;
            for w in of_group {
                let at = (w.place.page % pack.group_pages) as usize * PAGE;
                let hash = hash(w.tag);
                if checked != Some((w.place.page, hash))
                    && pack.check(w.place.page, &hash, &raw[at..at + PAGE]).is_err()
                {
                    // Damaged, or another page with the same prefix: `fetch` finds out which.
                    give(&self.fetch(&hash)?, &[Given { at: 0, tag: w.tag }])?;
                    continue;
                }
                checked = Some((w.place.page, hash));
                given.push(Given { at, tag: w.tag });
            }
            give(raw, &given)?;
        }
        Ok(())
    }
}

/// Buffers for reuse.
#[derive(Default)]
struct Scratch {
    stored: Vec<u8>,
    raw: Vec<u8>,
}

/// Reads the stored bytes of the groups `first` to `last` into `buffer`, which never shrinks.
pub(crate) fn read_span<'a>(
    pack: &Pack,
    file: &File,
    first: usize,
    last: usize,
    buffer: &'a mut Vec<u8>,
) -> IoResult<&'a [u8]> {
    let span = pack.span(first, last);
    let length = usize::try_from(span.end - span.start).unwrap_or(0);
    if buffer.len() < length {
        buffer.resize(length, 0);
    }
    let stored = &mut buffer[..length];
    fault::read(&pack.path).map_err(IoError::new("reading", &pack.path))?;
    file.read_exact_at(stored, span.start).map_err(IoError::new("reading", &pack.path))?;
    Ok(stored)
}
