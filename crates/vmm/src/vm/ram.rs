//! Where a VM's RAM comes from, and the files that stay open because of it.

use crate::memory::backing::{Backing, Row};
use crate::memory::{Unwritten, lazy};
use std::fs::File;

/// The source of a VM's RAM.
#[derive(Debug)]
pub(super) enum Ram {
    /// A boot: all of RAM is anonymous.
    Booted,
    /// A clone: RAM is a mapping of memory files, which are closed before the guest runs. A VMM
    /// that its guest took over can map no file, so it sees only pages that its guest sees anyway.
    Mapped {
        /// The large holes of the memory file, which are anonymous, in rising order.
        holes: Vec<(u64, u64)>,
        /// The pages that other files than the snapshot's own are mapped to.
        rows: Vec<Row>,
        /// The snapshot's own memory file, while a pager fills it: its seals show whether all pages
        /// have arrived. It holds no page that the guest cannot read.
        filling: Option<File>,
    },
    /// A clone whose touches are recorded: RAM is anonymous, and this process gives it the pages of
    /// these files.
    Recorded(Backing),
}

impl Ram {
    /// What RAM holds where the guest has not written. `own` is the snapshot's own memory file, if
    /// the daemon has sent it.
    pub(super) fn unwritten<'a>(&'a self, own: Option<&'a File>) -> Unwritten<'a> {
        match self {
            Self::Booted => Unwritten::Zero,
            Self::Mapped { holes, rows, .. } => {
                Unwritten::Mapped { anonymous: holes, own: own.map(|file| (file, rows.as_slice())) }
            }
            // A page that was never touched does not read as zero.
            Self::Recorded(_) => Unwritten::Mapped { anonymous: &[], own: None },
        }
    }

    /// The anonymous parts of a clone's RAM, as offsets and lengths in a memory file; `None` after
    /// a boot.
    pub(super) fn anonymous(&self) -> Option<&[(u64, u64)]> {
        match self.unwritten(None) {
            Unwritten::Zero => None,
            Unwritten::Mapped { anonymous, .. } => Some(anonymous),
        }
    }

    /// Whether all pages have arrived. Closes the memory file when they have.
    pub(super) fn is_whole(&mut self) -> bool {
        if let Self::Mapped { filling, .. } = self {
            filling.take_if(|file| lazy::is_whole(file));
            filling.is_none()
        } else {
            true
        }
    }
}
