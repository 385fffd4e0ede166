//! Small corpora for the repository: the smallest inputs that reach all edges that a grown corpus
//! reaches.

use super::process::Folders;
use crate::corpus;
use crate::target::Target;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::process::Stdio;

/// The most bytes of one target's corpus, so that all stay below [`corpus::MOST_BYTES`].
const EACH_BYTES: usize = 40 << 10;
/// The most files of one target's corpus, so that listings and commits stay short.
const EACH_FILES: usize = 100;

/// Replaces the corpus of `target` in the repository. Returns its number of files and of bytes.
///
/// # Errors
/// libFuzzer fails, or a folder cannot be written.
pub fn minimise(folders: &Folders, target: &Target) -> Result<(usize, usize)> {
    let merged = folders.out.join("merged").join(target.name);
    let _absent = std::fs::remove_dir_all(&merged);
    std::fs::create_dir_all(&merged)?;
    let kept = corpus::folder(target);
    std::fs::create_dir_all(&kept)?;
    let log = File::create(folders.out.join(format!("{}.merge.log", target.name)))?;
    let mut command = folders.command(target);
    // Without counters, so that a file is kept for an edge, not for how often it is passed.
    command.args(["-set_cover_merge=1", "-use_counters=0"]).args([
        &merged,
        &kept,
        &folders.grown(target),
    ]);
    let status = command.stderr(Stdio::from(log)).status().context("starting libFuzzer")?;
    ensure!(status.success(), "target {}: libFuzzer's merge ended with {status}", target.name);
    let mut files = corpus::files(&merged)?;
    files.sort_by_key(|(_, bytes)| bytes.len());
    for (path, _) in corpus::files(&kept)? {
        std::fs::remove_file(path)?;
    }
    // Of too many, every nth by length, so that long ones stay.
    let fits = |step: &usize| {
        let some = files.iter().step_by(*step);
        let bytes: usize = some.clone().map(|(_, bytes)| bytes.len()).sum();
        some.count() <= EACH_FILES && bytes <= EACH_BYTES
    };
    let step = (1..=files.len()).find(fits).unwrap_or(usize::MAX);
    let (mut count, mut total) = (0, 0);
    for (path, bytes) in files.iter().step_by(step) {
        let name = path.file_name().context("a file without a name")?;
        // 16 digits of SHA-1 name a file well enough, and keep listings readable.
        let name: String = name.to_string_lossy().chars().take(16).collect();
        std::fs::write(kept.join(name), bytes)?;
        (count, total) = (count + 1, total + bytes.len());
    }
    Ok((count, total))
}
