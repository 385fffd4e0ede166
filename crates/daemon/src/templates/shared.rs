//! Pages that clones of a snapshot map from the memory of other templates.

use dayfly_units::PAGE_SIZE;
use dayfly_vmm::memory::backing::{self, Row};
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;

/// The pages that clones of a snapshot map from other templates.
#[derive(Debug)]
pub struct Shared {
    /// The sealed list of rows, for VMMs. A row is one mapping.
    pub list: File,
    /// The memory files to which the rows refer.
    pub files: Vec<File>,
    pub(super) rows: Vec<Row>,
}

impl Shared {
    pub(super) fn new(rows: Vec<Row>, files: Vec<File>) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut list = File::from(rustix::fs::memfd_create("shared-pages", flags)?);
        list.write_all(&backing::encode(&rows))?;
        // VMMs read the list, and must not change what the next VMM reads.
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&list, seals)?;
        Ok(Self { list, files, rows })
    }

    /// Lays `rows`, which map `file`, over the rows of `backing`. `None` if the result has more
    /// rows or files than a VMM accepts.
    ///
    /// # Errors
    /// The host cannot make the list, or has too few descriptors.
    pub fn over(backing: Option<&Self>, rows: &[Row], file: &File) -> io::Result<Option<Self>> {
        let (below, others) =
            backing.map_or((&[][..], &[][..]), |shared| (&shared.rows, &shared.files));
        let number = u32::try_from(others.len()).unwrap_or(u32::MAX);
        let above: Vec<Row> = rows.iter().map(|row| Row { file: number, ..*row }).collect();
        let mut rows = backing::overlay(below, &above);
        // Files to which no row refers any more are left out.
        let (mut files, mut number_of) = (Vec::new(), vec![None; others.len() + 1]);
        for row in &mut rows {
            let was = row.file as usize;
            row.file = match number_of[was] {
                Some(number) => number,
                None => {
                    files.push(others.get(was).unwrap_or(file).try_clone()?);
                    *number_of[was].insert(u32::try_from(files.len() - 1).unwrap_or(u32::MAX))
                }
            };
        }
        if rows.len() > backing::MAX_ROWS || files.len() > backing::MAX_FILES {
            return Ok(None);
        }
        Self::new(rows, files).map(Some)
    }

    /// The number of rows, each of which is one mapping.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The frames that are not in the snapshot's own memory file.
    #[must_use]
    pub fn frames(&self) -> Vec<Range<u32>> {
        self.rows.iter().map(|row| row.first..row.first + row.pages).collect()
    }

    /// The bytes that all rows map.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rows.iter().map(|row| u64::from(row.pages) * PAGE_SIZE).sum()
    }
}
