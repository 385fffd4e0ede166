//! A template whose pages come from a source through the pager, in threads of this process.

use crate::prelude::*;
use dayfly_pager::guest::Guest;
use dayfly_pager::serve;
use dayfly_pager::source::Source;
use dayfly_pager::template::Template;
use dayfly_pager::wire::{FromPager, Settings, pair, receive};
use rustix::fd::{BorrowedFd, OwnedFd};
use std::fs::File;
use std::thread::JoinHandle;

/// The pager, and the end of its socket that a daemon has.
#[derive(Debug)]
pub struct Served {
    memory: File,
    ours: OwnedFd,
    pager: JoinHandle<Result<()>>,
}

impl Served {
    /// Has the pager fill `memory`, the frames `first` first.
    pub fn new<S: Source + 'static>(
        memory: File,
        source: S,
        first: Vec<u32>,
        settings: Settings,
    ) -> Result<Self> {
        let template = Template::new(memory.try_clone()?, source)?;
        let (ours, theirs) = pair()?;
        let pager =
            std::thread::spawn(move || Ok(serve::fill(template, &first, settings, theirs)?));
        Ok(Self { memory, ours, pager })
    }

    /// A clone, which the pager serves until `process` ends. The pager writes into `exit` if it has
    /// to kill the clone.
    pub fn clone(&self, process: BorrowedFd<'_>, exit: &File) -> Result<Guest> {
        let guest = Guest::new(&self.ours, &self.memory, process, exit)?;
        let served = guest.register(&guest.regions(), guest.uffd())?;
        ensure!(served.is_some(), "the pager does not serve the clone");
        Ok(guest)
    }

    /// Waits until all pages are there.
    pub fn whole(&self) -> Result<()> {
        loop {
            match receive::<FromPager>(&self.ours)?.context("the pager ended")?.0 {
                FromPager::Whole(_) => return Ok(()),
                FromPager::Begun | FromPager::First => {}
                FromPager::Failed { cause } => bail!("the pager: {cause}"),
            }
        }
    }

    /// Ends the pager as the end of its daemon does.
    pub fn end(self) -> Result<()> {
        drop(self.ours);
        self.pager.join().map_err(|_| anyhow!("the pager panicked"))?.context("the pager")
    }
}
