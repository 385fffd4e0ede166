//! Reading folders.

use super::Call;
use crate::attr::entry_type;
use crate::handles::{Entry, Listing};
use crate::nodes::{Node, find};
use crate::wire::{Dirent, EntryOut, ROOT, ReadIn};
use dayfly_units::sync::lock;
use rustix::io::Errno;

/// The most bytes of one answer, whatever the guest asks for.
const MAX_LIST_BYTES: usize = 128 << 10;
/// Zeroes that fill an entry up to a multiple of 8 bytes.
const PADDING: [u8; 8] = [0; 8];

/// Bytes of an entry in an answer.
const fn entry_bytes(name: usize, plus: bool) -> usize {
    let fixed = size_of::<Dirent>() + if plus { size_of::<EntryOut>() } else { 0 };
    (fixed + name).next_multiple_of(8)
}

impl Call<'_> {
    /// READDIR, or with `plus` READDIRPLUS, which also finds each entry.
    pub(super) fn readdir(&mut self, plus: bool) -> Result<(), Errno> {
        let asked: ReadIn = self.message.body().take()?;
        let most = usize::try_from(asked.size).map_or(MAX_LIST_BYTES, |n| n.min(MAX_LIST_BYTES));
        let handle = self.volume.handles.get(asked.fh, self.message.header.nodeid)?;
        let mut listing = lock(handle.folder()?);
        listing.go_to(asked.offset)?;
        loop {
            match self.next(&handle.node, &mut listing, most, plus) {
                Ok(true) => {}
                // The guest asks again, and gets the error then.
                Ok(false) => break,
                Err(_) if self.reply.body_bytes() > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Appends an entry, if there is one and it fits.
    fn next(
        &mut self,
        folder: &Node,
        listing: &mut Listing,
        most: usize,
        plus: bool,
    ) -> Result<bool, Errno> {
        let Some(entry) = listing.peek()? else { return Ok(false) };
        let bytes = entry_bytes(entry.name.to_bytes().len(), plus);
        if self.reply.body_bytes() + bytes > most {
            // Not even one entry fits: an empty answer would be the end of the folder.
            let fits = self.reply.body_bytes() > 0;
            return if fits { Ok(false) } else { Err(Errno::INVAL) };
        }
        self.append(folder, entry, plus);
        listing.advance();
        Ok(true)
    }

    fn append(&mut self, folder: &Node, entry: &Entry, plus: bool) {
        let name = entry.name.to_bytes();
        let dots = name == b"." || name == b"..";
        let above = folder.id == ROOT && name == b"..";
        if plus {
            // An entry that is gone, or of another file system, has no node: the guest looks it up
            // if a program asks for it.
            let found = (!dots)
                .then(|| {
                    let file = find(&folder.fd, &entry.name).ok()?;
                    let (entry, _) = self.enter(file, folder.id, &entry.name).ok()?;
                    Some(entry)
                })
                .flatten();
            self.reply.push(&found.unwrap_or_default());
        }
        self.reply.push(&Dirent {
            // What is above the volume is not the guest's concern.
            ino: if above { ROOT } else { entry.ino },
            off: entry.next,
            namelen: u32::try_from(name.len()).unwrap_or(0),
            kind: entry_type(entry.kind),
        });
        self.reply.extend(name);
        let padding = name.len().next_multiple_of(8) - name.len();
        self.reply.extend(&PADDING[..padding]);
    }
}
