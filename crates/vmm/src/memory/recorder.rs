//! The recorder: serves a clone's memory page by page, and notes each page that is touched.
//!
//! RAM of a recorded clone stays anonymous. Every first touch of a page, by the guest, a device or
//! KVM, waits in a userfaultfd (userfaultfd(2), mode MISSING). The recorder's thread then copies
//! the page from the snapshot's file. The record is therefore exact and in order. A mapping of the
//! file would show less, because the kernel maps sixteen pages at a time.

use super::backing::Backing;
use super::dump::PAGE;
use super::working_set::{self, Record, Touch};
use crate::arch::layout;
use crate::seccomp::{Stage, ThreadFilter};
use dayfly_sys::uffd::{MESSAGE_BYTES, Uffd, faults};
use dayfly_units::{PAGE_SIZE, sync::lock};
use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

struct Job {
    memory: GuestMemoryMmap,
    memory_bytes: u64,
    backing: Backing,
    ready: Sender<io::Result<()>>,
}

/// The recorder's thread and the touches that it has noted.
#[derive(Debug)]
pub struct Recorder {
    jobs: Sender<Job>,
    /// Pages of the memory file, in the order of their first touch.
    touched: Arc<Mutex<Vec<Touch>>>,
}

impl Recorder {
    /// Starts the thread, which waits for [`Self::serve`]. In tests there is no `filter`.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn start(uffd: Uffd, filter: Option<ThreadFilter>) -> io::Result<Self> {
        let (jobs, waiting) = channel();
        let touched = Arc::<Mutex<Vec<Touch>>>::default();
        let notes = Arc::clone(&touched);
        std::thread::Builder::new().name("recorder".to_owned()).spawn(move || {
            if let Some(filter) = &filter {
                filter.enter(Stage::SetUp);
            }
            if let Err(error) = run(&uffd, filter.as_ref(), &waiting, &notes) {
                // Threads that wait for a page would wait for ever.
                crate::exit::end(
                    crate::control::ExitReason::Failed,
                    &format!("serving the pages of a recording: {error}"),
                );
            }
        })?;
        Ok(Self { jobs, touched })
    }

    /// Starts to serve `memory`, which is untouched, with the pages of `backing`.
    ///
    /// # Errors
    /// The error of userfaultfd(2).
    pub fn serve(
        &self,
        memory: &GuestMemoryMmap,
        memory_bytes: u64,
        backing: Backing,
    ) -> io::Result<()> {
        let (ready, answer) = channel();
        let job = Job { memory: memory.clone(), memory_bytes, backing, ready };
        self.jobs.send(job).map_err(|_| io::ErrorKind::BrokenPipe)?;
        answer.recv().map_err(|_| io::ErrorKind::BrokenPipe)?
    }

    /// The pages touched so far, and their order. Pages whose content differs from `backing` count
    /// as written.
    ///
    /// # Errors
    /// When guest memory or a file cannot be read.
    pub fn record(
        &self,
        memory: &GuestMemoryMmap,
        memory_bytes: u64,
        backing: &Backing,
    ) -> io::Result<Record> {
        let order = lock(&self.touched).clone();
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

/// A region's address in this process, its length, and its offset in the memory file, in bytes.
struct Place {
    host: u64,
    len: u64,
    offset: u64,
}

fn run(
    uffd: &Uffd,
    filter: Option<&ThreadFilter>,
    jobs: &Receiver<Job>,
    notes: &Mutex<Vec<Touch>>,
) -> io::Result<()> {
    let Ok(Job { memory, memory_bytes, backing, ready }) = jobs.recv() else {
        return Ok(()); // the VM ended before it had a guest
    };
    let mut places = Vec::new();
    let registered = (|| {
        for (guest, offset, len) in layout::ram(memory_bytes) {
            let host = memory.get_host_address(guest).map_err(io::Error::other)?.addr() as u64;
            uffd.register(host, len)?;
            places.push(Place { host, len, offset });
        }
        Ok(())
    })();
    let failed = registered.is_err();
    // A page whose fault was read twice, because two threads waited for it, is noted once.
    let mut seen = vec![0u64; usize::try_from(memory_bytes / PAGE_SIZE / 64).unwrap_or(0) + 1];
    if let Some(filter) = filter {
        // RAM is registered; the guest runs after the answer.
        filter.enter(Stage::Guest);
    }
    let _ = ready.send(registered);
    if failed {
        return Ok(());
    }
    let began = Instant::now();
    let mut page = vec![0; PAGE];
    let mut messages = [0; 16 * MESSAGE_BYTES];
    loop {
        for address in faults(uffd.read(&mut messages)?) {
            let at = address & !(PAGE_SIZE - 1);
            let Some(place) = places.iter().find(|p| (p.host..p.host + p.len).contains(&at)) else {
                continue;
            };
            let offset = place.offset + (at - place.host);
            let Ok(number) = u32::try_from(offset / PAGE_SIZE) else { continue };
            backing.read_page(number, &mut page)?;
            // Noted first: the thread that touched the page runs after the copy and may ask for the
            // record.
            let (word, bit) = (&mut seen[number as usize / 64], 1 << (number % 64));
            if *word & bit == 0 {
                *word |= bit;
                let us = u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX);
                lock(notes).push(Touch { page: number, us });
            }
            // SAFETY: the page is in guest memory, to which nothing has a reference.
            unsafe { uffd.give(at, &page)? };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::working_set::Run;
    use super::*;
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::FileExt;

    const RAM: u64 = 64 << 20;

    #[test]
    fn a_page_that_two_threads_wait_for_is_noted_once() {
        if !dayfly_units::needs::root() {
            return;
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(RAM).unwrap();
        let memory = crate::memory::anonymous(RAM).unwrap();
        let recorder = Recorder::start(Uffd::with_kernel_faults().unwrap(), None).unwrap();
        let backing = Backing::of(file);
        recorder.serve(&memory, RAM, backing.try_clone().unwrap()).unwrap();
        let both = std::sync::Barrier::new(2);
        let touch_all = || {
            for page in 0..2000 {
                both.wait();
                memory.read_obj::<u8>(GuestAddress(page * PAGE_SIZE)).unwrap();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(touch_all);
            touch_all();
        });
        let pages: Vec<u32> = lock(&recorder.touched).iter().map(|touch| touch.page).collect();
        assert_eq!(pages, (0..2000).collect::<Vec<_>>());
    }

    #[test]
    fn touched_pages_are_noted_one_by_one_and_writes_differ_from_reads() {
        if !dayfly_units::needs::root() {
            return;
        }
        let uffd = Uffd::with_kernel_faults().unwrap();
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
        // A write by the kernel, as of a disk's data.
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
