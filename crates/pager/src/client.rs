//! The daemon's end.

use crate::wire::{FromPager, MAX_FDS, Settings, ToPager, pair, receive, send};
use dayfly_store::Plan;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;

/// A pager that was told what it is for.
#[derive(Debug)]
pub struct Client(OwnedFd);

impl Client {
    /// Tells the process at the other end of `socket` to follow `plan`, to fetch the frames in `first` first, in that order, and none of those that clones
    /// have `elsewhere`, ascending and apart. Waits until it is ready.
    ///
    /// # Errors
    /// It is gone, or says why it cannot.
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
        let begin = ToPager::Begin {
            table_bytes: plan.table.len() as u64,
            places_bytes: plan.places.len() as u64,
            order_bytes: order.len() as u64,
            elsewhere_bytes: elsewhere.len() as u64,
            packs: number(plan.packs.len())?,
            disks: plan.disks.iter().map(|files| number(files.len())).collect::<io::Result<_>>()?,
            settings,
        };
        send(&socket, &begin, &[plan.memory.as_fd(), sheet.as_fd()])?;
        let files: Vec<BorrowedFd<'_>> =
            plan.packs.iter().chain(plan.disks.iter().flatten()).map(AsFd::as_fd).collect();
        for some in files.chunks(MAX_FDS) {
            send(&socket, &ToPager::Files, some)?;
        }
        match receive(&socket)? {
            Some((FromPager::Begun, _)) => Ok(Self(socket)),
            Some((FromPager::Failed { cause }, _)) => Err(io::Error::other(cause)),
            Some((other, _)) => Err(io::Error::other(format!("expected Begun, got {other:?}"))),
            None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ended before it had begun")),
        }
    }

    /// Tells of a clone, whose cause of death is written to `exit` if it cannot have its memory; gives the socket for its VMM.
    ///
    /// # Errors
    /// The pager is gone.
    pub fn clone_comes(&self, vm: &str, vmm: BorrowedFd<'_>, exit: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let (ours, theirs) = pair()?;
        send(&self.0, &ToPager::Clone { vm: vm.to_owned() }, &[ours.as_fd(), vmm, exit])?;
        Ok(theirs)
    }

    /// Nobody will tell it anything any more: it ends with its last clone, or when all is there.
    pub fn leave(&self) {
        // One that is gone needs not be told.
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Write);
    }

    /// What it tells next; `None` when it has ended. Blocks.
    ///
    /// # Errors
    /// It says what cannot be understood.
    pub fn next(&self) -> io::Result<Option<FromPager>> {
        Ok(receive(&self.0)?.map(|(told, _)| told))
    }
}
