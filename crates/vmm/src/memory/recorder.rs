//! The recorder: serves a clone's memory page by page, and notes which it touched.
//!
//! For the rehearsal only: RAM stays anonymous, and every first touch of a page, by the guest, a device or KVM, waits in a
//! userfaultfd (userfaultfd(2), mode MISSING) until the recorder's thread has copied the page from the snapshot's file. So the
//! record is exact and in order. A mapping of the file would tell less: the kernel maps sixteen pages at a time.

use super::backing::Backing;
use super::dump::PAGE;
use super::uffd::{
    MESSAGE_BYTES, UFFD_EVENT_PAGEFAULT, UFFDIO_COPY, UFFDIO_WAKE, UffdioCopy, UffdioRange, check, register,
};
use super::working_set::{self, Record, Touch};
use crate::arch::layout;
use crate::seccomp::{self, Program};
use dayfly_units::PAGE_SIZE;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

struct Job {
    memory: GuestMemoryMmap,
    memory_bytes: u64,
    backing: Backing,
    ready: Sender<io::Result<()>>,
}

/// The thread, and what it has noted.
#[derive(Debug)]
pub struct Recorder {
    jobs: Sender<Job>,
    /// Pages of the memory file in the order of their first touch.
    touched: Arc<Mutex<Vec<Touch>>>,
}

impl Recorder {
    /// Starts the thread, which waits for its memory.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn start(uffd: OwnedFd, filter: Option<Arc<Program>>) -> io::Result<Self> {
        let (jobs, waiting) = channel();
        let touched = Arc::<Mutex<Vec<Touch>>>::default();
        let notes = Arc::clone(&touched);
        std::thread::Builder::new().name("recorder".to_owned()).spawn(move || {
            seccomp::apply(filter.as_deref());
            if let Err(error) = run(File::from(uffd), &waiting, &notes) {
                // Whoever waits for a page would wait for ever.
                crate::exit::end(
                    crate::control::ExitReason::Failed,
                    &format!("serving the pages of a rehearsal: {error}"),
                );
            }
        })?;
        Ok(Self { jobs, touched })
    }

    /// From now on the untouched `memory` gets its pages from `backing`, and each is noted.
    ///
    /// # Errors
    /// What userfaultfd says.
    pub fn serve(&self, memory: &GuestMemoryMmap, memory_bytes: u64, backing: Backing) -> io::Result<()> {
        let (ready, answer) = channel();
        let job = Job { memory: memory.clone(), memory_bytes, backing, ready };
        self.jobs.send(job).map_err(|_| io::ErrorKind::BrokenPipe)?;
        answer.recv().map_err(|_| io::ErrorKind::BrokenPipe)?
    }

    /// What was touched so far, and in which order; written is what differs from `backing` now.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn record(
        &self,
        memory: &GuestMemoryMmap,
        memory_bytes: u64,
        backing: &Backing,
    ) -> io::Result<Record> {
        let order = self.touched.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut pages: Vec<u32> = order.iter().map(|touch| touch.page).collect();
        pages.sort_unstable();
        pages.dedup();
        let mut found = BTreeMap::new();
        let ram = layout::ram(memory_bytes);
        let (mut now, mut then) = (vec![0; PAGE], vec![0; PAGE]);
        for page in pages {
            let offset = u64::from(page) * PAGE_SIZE;
            let Some((guest, start, _)) = ram.iter().rfind(|(_, start, _)| offset >= *start) else {
                continue;
            };
            let at = GuestAddress(guest.0 + (offset - start));
            memory.read_slice(&mut now, at).map_err(io::Error::other)?;
            backing.read_page(page, &mut then)?;
            found.insert(page, now != then);
        }
        Ok(Record { runs: working_set::runs(&found, memory_bytes), order })
    }
}

/// Where a region lies in this process, and in the file.
struct Place {
    host: u64,
    len: u64,
    offset: u64,
}

fn run(mut uffd: File, jobs: &Receiver<Job>, notes: &Mutex<Vec<Touch>>) -> io::Result<()> {
    let Ok(Job { memory, memory_bytes, backing, ready }) = jobs.recv() else {
        return Ok(()); // the VM ended before it had a guest
    };
    let mut places = Vec::new();
    let registered = (|| {
        for (guest, offset, len) in layout::ram(memory_bytes) {
            let host = memory.get_host_address(guest).map_err(io::Error::other)?.addr() as u64;
            register(&uffd, host, len)?;
            places.push(Place { host, len, offset });
        }
        Ok(())
    })();
    let failed = registered.is_err();
    let _ = ready.send(registered);
    if failed {
        return Ok(());
    }
    let began = Instant::now();
    let mut page = vec![0; PAGE];
    let mut messages = [0; 16 * MESSAGE_BYTES];
    loop {
        let got = match uffd.read(&mut messages) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            got => got?,
        };
        for message in messages[..got].chunks_exact(MESSAGE_BYTES) {
            let Some(address) = message[16..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes)) else {
                continue;
            };
            if message[0] != UFFD_EVENT_PAGEFAULT {
                continue;
            }
            let at = address & !(PAGE_SIZE - 1);
            let Some(place) = places.iter().find(|p| (p.host..p.host + p.len).contains(&at)) else {
                continue;
            };
            let offset = place.offset + (at - place.host);
            let Ok(number) = u32::try_from(offset / PAGE_SIZE) else { continue };
            backing.read_page(number, &mut page)?;
            // Noted first: who touched it goes on with the next line, and may ask for the record.
            let us = u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX);
            notes.lock().unwrap_or_else(PoisonError::into_inner).push(Touch { page: number, us });
            give(&uffd, at, &page)?;
        }
    }
}

/// Makes `page` the content at `at`, and lets whoever waits for it go on.
fn give(uffd: &File, at: u64, page: &[u8]) -> io::Result<()> {
    loop {
        let src = page.as_ptr().addr() as u64;
        let mut copy = UffdioCopy { dst: at, src, len: PAGE_SIZE, mode: 0, copy: 0 };
        // SAFETY: the ioctl reads and writes one struct uffdio_copy; it reads `page`, which is one page long, and fills a
        // page of guest memory that is missing.
        let result = check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_COPY, &raw mut copy) }.into());
        match result.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) => return Ok(()),
            // The mapping was just changing.
            Err((Some(libc::EAGAIN), _)) => {}
            // Somebody else waited for it too, and it is there.
            Err((Some(libc::EEXIST), _)) => {
                let mut range = UffdioRange { start: at, len: PAGE_SIZE };
                // SAFETY: the ioctl reads one struct uffdio_range.
                check(unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WAKE, &raw mut range) }.into())?;
                return Ok(());
            }
            Err((_, error)) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::working_set::Run;
    use super::*;
    use std::os::unix::fs::FileExt;

    const RAM: u64 = 64 << 20;

    #[test]
    fn what_is_touched_is_noted_page_by_page_and_what_is_written_is_told_from_what_is_read() {
        let Ok(uffd) = super::super::uffd::open() else {
            println!("recorder: no userfaultfd here (not root): nothing was tested");
            return;
        };
        let file = tempfile::tempfile().unwrap();
        file.set_len(RAM).unwrap();
        file.write_all_at(&[7; 3 * PAGE], 100 * PAGE_SIZE).unwrap();
        let memory = crate::memory::anonymous(RAM).unwrap();
        let recorder = Recorder::start(uffd, None).unwrap();
        let backing = Backing::of(file);
        recorder.serve(&memory, RAM, backing.try_clone().unwrap()).unwrap();
        let at = |page: u64| GuestAddress(page * PAGE_SIZE);
        assert_eq!(memory.read_obj::<u8>(at(101)).unwrap(), 7);
        memory.write_obj(1u8, at(300)).unwrap();
        memory.write_obj(1u8, at(301)).unwrap();
        memory.write_obj(9u8, at(102)).unwrap();
        // By the kernel, on the way of a disk's data.
        let (from, to) = io::pipe().unwrap();
        rustix::io::write(&to, &[5; 10]).unwrap();
        let mut from = File::from(OwnedFd::from(from));
        let mut slice = memory.get_slice(at(500), 10).unwrap();
        assert_eq!(vm_memory::ReadVolatile::read_volatile(&mut from, &mut slice).unwrap(), 10);
        let Record { runs, order } = recorder.record(&memory, RAM, &backing).unwrap();
        let expected = [
            Run { first: 101, pages: 1, written: false },
            Run { first: 102, pages: 1, written: true },
            Run { first: 300, pages: 2, written: true },
            Run { first: 500, pages: 1, written: true },
        ];
        assert_eq!(runs, expected);
        let pages: Vec<u32> = order.iter().map(|touch| touch.page).collect();
        assert_eq!(pages, [101, 300, 301, 102, 500]);
        assert!(order.is_sorted_by_key(|touch| touch.us));
    }
}
