//! The daemon's end of the connection to a pager.

use crate::wire::{FromPager, MAX_FDS, Settings, ToPager, pair, receive, send};
use dayfly_store::Plan;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;

/// A pager that has begun.
#[derive(Debug)]
pub struct Client(OwnedFd);

impl Client {
    /// Sends `plan` to the process at the other end of `socket`, and waits until it has begun. The
    /// pager fetches the frames in `first` first, in that order. It never fetches the frames in
    /// `elsewhere`, which are ascending ranges without overlap.
    ///
    /// # Errors
    /// The pager has ended, or reports why it cannot begin.
    pub fn begin(
        socket: OwnedFd,
        plan: &Plan,
        first: &[u32],
        elsewhere: &[Range<u32>],
        settings: Settings,
    ) -> io::Result<Self> {
        let order: Vec<u8> = first.iter().flat_map(|frame| frame.to_le_bytes()).collect();
        let mut sheet = File::from(rustix::fs::memfd_create("sheet", MemfdFlags::CLOEXEC)?);
        let elsewhere = elsewhere.iter().flat_map(|range| [range.start, range.end]);
        let elsewhere: Vec<u8> = elsewhere.flat_map(u32::to_le_bytes).collect();
        for part in [&plan.table, &plan.places, &order, &elsewhere] {
            sheet.write_all(part)?;
        }
        let number = |n: usize| u32::try_from(n).map_err(io::Error::other);
        let disks = || plan.disks.iter().flatten();
        let begin = ToPager::Begin {
            table_bytes: plan.table.len() as u64,
            places_bytes: plan.places.len() as u64,
            order_bytes: order.len() as u64,
            elsewhere_bytes: elsewhere.len() as u64,
            packs: number(plan.packs.len())?,
            disks: plan.disks.iter().map(|files| number(files.len())).collect::<io::Result<_>>()?,
            roots: disks().map(|disk| disk.tree.as_ref().map(|tree| tree.root)).collect(),
            settings,
        };
        send(&socket, &begin, &[plan.memory.as_fd(), sheet.as_fd()])?;
        let trees = disks().filter_map(|disk| disk.tree.as_ref()).map(|tree| &tree.file);
        let files = plan.packs.iter().chain(disks().map(|disk| &disk.file)).chain(trees);
        let files: Vec<BorrowedFd<'_>> = files.map(AsFd::as_fd).collect();
        for some in files.chunks(MAX_FDS) {
            send(&socket, &ToPager::Files, some)?;
        }
        match receive(&socket)? {
            Some((FromPager::Begun, _)) => Ok(Self(socket)),
            Some((FromPager::Failed { cause }, _)) => Err(io::Error::other(cause)),
            Some((other, _)) => Err(io::Error::other(format!("expected Begun, got {other:?}"))),
            None => {
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ended before it had begun"))
            }
        }
    }

    /// Announces a clone to the pager, and returns the socket for the clone's VMM. If a page of the
    /// clone cannot be fetched, the pager writes the cause to `exit` and kills `vmm`.
    ///
    /// # Errors
    /// The pager has ended.
    pub fn clone_comes(
        &self,
        vm: &str,
        vmm: BorrowedFd<'_>,
        exit: BorrowedFd<'_>,
    ) -> io::Result<OwnedFd> {
        let (ours, theirs) = pair()?;
        send(&self.0, &ToPager::Clone { vm: vm.to_owned() }, &[ours.as_fd(), vmm, exit])?;
        Ok(theirs)
    }

    /// Shuts the connection down. The pager then ends with its last clone, or when all pages are
    /// present.
    pub fn leave(&self) {
        // Fails only if the pager has ended.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Write);
    }

    /// The pager's next message; `None` once it has ended. Blocks.
    ///
    /// # Errors
    /// The message is invalid.
    pub fn next(&self) -> io::Result<Option<FromPager>> {
        Ok(receive(&self.0)?.map(|(message, _)| message))
    }
}
