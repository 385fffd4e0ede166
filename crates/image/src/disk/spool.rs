//! The spool: numbered files in a staging folder that hold the contents of an image's files. The
//! spool also enforces the limits on entries and bytes.

use super::types::{Limits, Progress};
use dayfly_archive::{Refusal, refuse};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Files per folder of the spool, so that no folder becomes slow.
const FAN_OUT: u64 = 4096;

/// The spool's folder, and the used part of the limits.
pub struct Spool<'a> {
    folder: PathBuf,
    count: u64,
    entries: u64,
    content_bytes: u64,
    limits: Limits,
    progress: &'a mut dyn FnMut(Progress<'_>),
    step: String,
    reported: u64,
}

impl<'a> Spool<'a> {
    /// Makes a spool in `folder`, which must exist and be empty.
    pub fn new(folder: &Path, limits: Limits, progress: &'a mut dyn FnMut(Progress<'_>)) -> Self {
        Self {
            folder: folder.to_owned(),
            count: 0,
            entries: 0,
            content_bytes: 0,
            limits,
            progress,
            step: String::new(),
            reported: 0,
        }
    }

    /// Creates the next empty file.
    pub fn create(&mut self) -> Result<(PathBuf, File), (PathBuf, io::Error)> {
        let folder = self.folder.join((self.count / FAN_OUT).to_string());
        let path = folder.join(self.count.to_string());
        if self.count.is_multiple_of(FAN_OUT) {
            std::fs::create_dir(&folder).map_err(|e| (folder, e))?;
        }
        self.count += 1;
        let file = File::create_new(&path).map_err(|e| (path.clone(), e))?;
        Ok((path, file))
    }

    /// Counts an entry against the limit. Whiteouts and entries that replace others count too.
    pub fn count_entry(&mut self) -> Result<(), Refusal> {
        self.entries += 1;
        if self.entries > self.limits.max_entries {
            return refuse(
                format!("at most {} entries in an image", self.limits.max_entries),
                "more",
            );
        }
        Ok(())
    }

    /// Bytes of content that the limit still allows.
    pub fn room(&self) -> u64 {
        self.limits.max_content_bytes.saturating_sub(self.content_bytes)
    }

    /// Counts `bytes` of content against the limit.
    pub fn used(&mut self, bytes: u64) {
        self.content_bytes = self.content_bytes.saturating_add(bytes);
    }

    /// Starts a step of the progress report.
    pub fn begin(&mut self, step: String) {
        (self.step, self.reported) = (step, 0);
        (self.progress)(Progress { step: &self.step, done_bytes: 0 });
    }

    /// Reports progress once per 8 MiB.
    pub fn report(&mut self, done_bytes: u64) {
        if done_bytes - self.reported.min(done_bytes) >= 8 << 20 {
            self.reported = done_bytes;
            (self.progress)(Progress { step: &self.step, done_bytes });
        }
    }
}
