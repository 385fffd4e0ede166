use super::*;
use crate::clones::Handle;
use crate::guest::Guest;
use crate::source::{Batch, Layout, Put, SourceError};
use crate::wire::pair;
use dayfly_sys::uffd::{Descriptors, Uffd};
use rustix::fd::AsFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::process::Command;
use std::thread;

const PAGE: usize = 4096;

/// A layout of two batches, each of one page.
struct Two(Layout);

impl Source for Two {
    fn layout(&self) -> &Layout {
        &self.0
    }

    fn read_bytes(&self) -> u64 {
        0
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        put(batch, &[u8::try_from(batch).unwrap() + 1; PAGE]).map_err(SourceError::Install)
    }
}

#[test]
fn a_fault_that_waits_gets_the_page_that_another_thread_fetches() {
    let memory = crate::guest::memory(2 * PAGE as u64).unwrap();
    let batch = |first| Batch { first, frames: 1, colour: 0, group: 0 };
    let layout = Layout { batch_of: vec![0, 1], batches: vec![batch(0), batch(1)] };
    let template = Template::new(memory.try_clone().unwrap(), Two(layout)).unwrap();
    let (ours, _theirs) = pair().unwrap();
    let mut vmm = Command::new("sleep").arg("1000").spawn().unwrap();
    let process = pidfd_open(Pid::from_child(&vmm), PidfdFlags::empty()).unwrap();
    let exit = tempfile::tempfile().unwrap();
    let guest = Guest::new(&ours, &memory, process.as_fd(), &exit).unwrap();
    let uffd = guest.uffd().try_clone().unwrap();
    let uffd = Uffd::sent(uffd, &Descriptors::open().unwrap()).unwrap();
    let handle = Handle { vm: "waits".to_owned(), process, exit };
    let mut regions = guest.regions();
    regions.sort_by_key(|region| region.host);
    let clone = Arc::new(Clone::new(handle, uffd, regions));
    let fault = || {
        loop {
            match clone.uffd().next().unwrap() {
                Some(address) => return address,
                None => thread::yield_now(),
            }
        }
    };
    thread::scope(|scope| {
        let reader = scope.spawn(|| [guest.touch(0), guest.touch(1)]);
        assert_eq!(template.fault(&clone, fault(), |_| true, |_| Vec::new()), None);
        assert_eq!(
            (template.missing(), template.counters.asked.load(Ordering::SeqCst)),
            (2, 0),
            "it is waited for"
        );
        assert_eq!(template.ahead(0), Brought::Done);
        // The second batch is not coming, so it is fetched for the clone.
        assert_eq!(template.fault(&clone, fault(), |_| false, |_| Vec::new()), Some(1));
        let until = Instant::now() + Duration::from_secs(120);
        while !reader.is_finished() && Instant::now() < until {
            thread::yield_now();
        }
        let waits = !reader.is_finished();
        clone.release();
        assert_eq!((waits, reader.join().unwrap()), (false, [1, 2]));
    });
    assert_eq!((template.missing(), clone.is_killed()), (0, false));
    vmm.kill().unwrap();
    vmm.wait().unwrap();
}
