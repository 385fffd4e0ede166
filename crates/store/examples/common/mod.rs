//! RAM for measurements: a file given as the first argument (raw, such as a snapshot's `memory`),
//! or RAM made of this host's programs.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub const PAGE: usize = 4096;
/// Frames of RAM if no file is given: 256 MiB, of which 2/5 are zero.
const FRAMES: usize = 65_536;

/// The RAM to measure, and its description.
pub fn ram() -> io::Result<(File, String)> {
    if let Some(path) = std::env::args_os().nth(1) {
        return Ok((File::open(&path)?, PathBuf::from(path).display().to_string()));
    }
    let to = File::from(rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC)?);
    to.set_len((FRAMES * PAGE) as u64)?;
    let mut files = Vec::new();
    walk(Path::new("/usr/lib"), &mut files)?;
    files.sort();
    let (mut frame, mut page, mut noise) = (0, [0; PAGE], blake3::Hasher::new().finalize_xof());
    'files: for path in files {
        let Ok(mut file) = File::open(&path) else { continue };
        for _ in 0..64 {
            page.fill(0);
            if file.read(&mut page)? == 0 {
                break;
            }
            // In each run of 64 frames, 26 stay zero and 3 are noise, like keys and compressed
            // files.
            if frame % 64 == 0 {
                for n in 26..29 {
                    let mut random = [0; PAGE];
                    noise.fill(&mut random);
                    to.write_all_at(&random, ((frame + n) * PAGE) as u64)?;
                }
                frame += 29;
            }
            if frame >= FRAMES {
                break 'files;
            }
            to.write_all_at(&page, (frame * PAGE) as u64)?;
            frame += 1;
        }
    }
    Ok((to, "256 MiB: pages of /usr/lib, 40 % zero, 5 % noise".to_owned()))
}

fn walk(folder: &Path, into: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() && into.len() < 8000 {
            // Unreadable folders are skipped.
            let _skipped = walk(&entry.path(), into);
        } else if kind.is_file() {
            into.push(entry.path());
        }
    }
    Ok(())
}

/// The pages of `file` that are not all zero, each content once, in order.
#[allow(dead_code, reason = "not every example needs it")]
pub fn unique(file: &File) -> io::Result<Vec<[u8; PAGE]>> {
    let frames = file.metadata()?.len() / PAGE as u64;
    let (mut pages, mut seen) = (Vec::new(), std::collections::HashSet::new());
    for frame in 0..frames {
        let mut page = [0; PAGE];
        file.read_exact_at(&mut page, frame * PAGE as u64)?;
        if page != [0; PAGE] && seen.insert(blake3::hash(&page)) {
            pages.push(page);
        }
    }
    Ok(pages)
}

/// The value below which `part` percent of the values are.
#[allow(dead_code, reason = "not every example needs it")]
pub fn percentile(values: &mut [f64], part: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() * part / 100).min(values.len() - 1)]
}
