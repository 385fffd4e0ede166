use super::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

fn memory(bytes: u64) -> File {
    let memory = File::from(rustix::fs::memfd_create("memory", MemfdFlags::CLOEXEC).unwrap());
    memory.set_len(bytes).unwrap();
    memory
}

/// A registered mapping of two pages, which stays until this process ends.
fn mapped(memory: &File, flags: MapFlags, uffd: &Uffd) -> u64 {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let at = unsafe { mmap(std::ptr::null_mut(), 2 * PAGE, protection, flags, memory, 0) };
    let at = at.unwrap().expose_provenance() as u64;
    uffd.register(at, 2 * PAGE as u64).unwrap();
    at
}

#[test]
fn a_page_that_is_present_with_other_content_is_reported() {
    let memory = memory(2 * PAGE as u64);
    let uffd = Uffd::own().unwrap();
    let at = mapped(&memory, MapFlags::SHARED, &uffd);
    // Another holder of the memfd creates its second page.
    memory.write_all_at(&[7; PAGE], PAGE as u64).unwrap();
    let bytes = |second: u8| [[1; PAGE], [second; PAGE]].concat();
    // SAFETY: pages of the mapping above, to which nothing has a reference.
    let copy = |bytes: &[u8]| unsafe { uffd.copy(at, bytes, PAGE) };
    assert_eq!(copy(&bytes(0)).unwrap(), [PAGE]);
    assert!(copy(&bytes(7)).unwrap().is_empty());
    let mut now = [0; PAGE];
    memory.read_exact_at(&mut now, 0).unwrap();
    assert_eq!(now, [1; PAGE]);
}

#[test]
fn a_private_page_is_put_unless_the_process_has_one() {
    let memory = memory(2 * PAGE as u64);
    let uffd = Uffd::own().unwrap();
    let at = mapped(&memory, MapFlags::PRIVATE, &uffd);
    memory.write_all_at(&[7; 2 * PAGE], 0).unwrap();
    let byte = |at: u64| {
        let at = std::ptr::with_exposed_provenance::<u8>(usize::try_from(at).unwrap());
        // SAFETY: a byte of the mapping above.
        unsafe { at.read_volatile() }
    };
    assert!(uffd.put(at, &[1; PAGE]).unwrap());
    assert!(!uffd.put(at, &[2; PAGE]).unwrap());
    assert_eq!((byte(at), byte(at + PAGE as u64)), (1, 7), "the file's page is not changed");
    let (gone, other) = (uffd.put(4 << 20, &[1; PAGE]).unwrap_err(), Some(libc::ENOENT));
    assert_eq!(gone.raw_os_error(), other);
}

#[test]
fn a_read_never_waits_whatever_another_holder_makes_of_the_flags() {
    let ours = Uffd::own().unwrap();
    let sent = Uffd::sent(ours.0.try_clone().unwrap(), &Descriptors::open().unwrap()).unwrap();
    sent.check_nowait().unwrap();
    let events = || {
        let mut polled = [PollFd::new(&sent.0, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        polled[0].revents()
    };
    assert_eq!(events(), PollFlags::empty());
    rustix::io::ioctl_fionbio(&ours.0, false).unwrap();
    // The read is on a thread, so that a read that waits fails the test.
    let (done, read) = std::sync::mpsc::channel();
    let reader = Uffd(sent.0.try_clone().unwrap());
    thread::spawn(move || done.send(reader.next()));
    let read = read.recv_timeout(Duration::from_secs(120)).expect("the read waits");
    assert_eq!((read.unwrap(), events()), (None, PollFlags::ERR));
    sent.make_nonblocking().unwrap();
    assert_eq!(events(), PollFlags::empty());
}

#[test]
fn memory_is_gone_once_its_process_has_ended() {
    let own = Uffd::own().unwrap();
    assert!(!own.is_memory_gone());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let pid = {
        // SAFETY: the child only makes the calls below, none of which takes a lock that another
        // thread of ours may hold.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let sent = Uffd::own().map(|uffd| crate::fdwire::send(&theirs, b"it", &[uffd.as_fd()]));
            // SAFETY: waits for a signal, and exits without running our exit handlers.
            unsafe {
                if sent.is_ok_and(|result| result.is_ok()) {
                    libc::pause();
                }
                libc::_exit(1)
            }
        }
        pid
    };
    drop(theirs);
    let mut fds = Vec::new();
    crate::fdwire::receive(&ours, &mut [0; 8], &mut fds).unwrap();
    let childs = Uffd(fds.pop().unwrap());
    assert!(!childs.is_memory_gone());
    // SAFETY: our child, which no other code waits for.
    let ended =
        unsafe { (libc::kill(pid, libc::SIGKILL), libc::waitpid(pid, std::ptr::null_mut(), 0)) };
    assert_eq!(ended, (0, pid));
    assert!(childs.is_memory_gone() && !own.is_memory_gone());
}

#[test]
fn a_thread_that_faults_during_unregister_continues() {
    const PAGES: usize = 64;
    let memory = memory((PAGES * PAGE) as u64);
    let until = Instant::now() + Duration::from_secs(3);
    let mut rounds = 0;
    while Instant::now() < until {
        rounds += 1;
        // SAFETY: a new mapping, at an address of the kernel's choice; it is unmapped at the
        // end of this round, after all its readers have ended.
        let at = unsafe {
            mmap(std::ptr::null_mut(), PAGES * PAGE, ProtFlags::READ, MapFlags::SHARED, &memory, 0)
        };
        let at = at.unwrap().expose_provenance();
        let uffd = Uffd::own().unwrap();
        uffd.register(at as u64, (PAGES * PAGE) as u64).unwrap();
        let (begun, read) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                begun.store(true, Ordering::SeqCst);
                // SAFETY: a page of the mapping above.
                let byte = unsafe { std::ptr::with_exposed_provenance::<u8>(at).read_volatile() };
                assert_eq!(byte, 0);
                read.store(true, Ordering::SeqCst);
            });
            while !begun.load(Ordering::SeqCst) {
                std::hint::spin_loop();
            }
            let moment = Instant::now() + Duration::from_nanos(rounds * 37 % 20_000);
            while Instant::now() < moment {
                std::hint::spin_loop();
            }
            uffd.unregister(at as u64, (PAGES * PAGE) as u64).unwrap();
            // The thread may stand still on a busy host; the limit only ends a hang.
            let late = Instant::now() + Duration::from_secs(120);
            while !read.load(Ordering::SeqCst) && Instant::now() < late {
                thread::yield_now();
            }
            let waits = !read.load(Ordering::SeqCst);
            uffd.wake(at as u64, (PAGES * PAGE) as u64).unwrap();
            assert!(!waits, "the thread still waits, in round {rounds}");
        });
        // SAFETY: no thread reads it any more.
        unsafe { munmap(std::ptr::with_exposed_provenance_mut(at), PAGES * PAGE).unwrap() };
        memory.set_len(0).unwrap();
        memory.set_len((PAGES * PAGE) as u64).unwrap();
    }
}
