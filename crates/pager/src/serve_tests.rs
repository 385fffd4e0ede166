use super::*;
use crate::guest::Guest;
use crate::policy::Policy;
use crate::source::{Batch, Layout, Put, SourceError, ZERO};
use crate::wire::{EXIT_PAGE_BYTES, pair};
use rustix::fs::SealFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command};
use std::sync::atomic::AtomicU32;
use std::thread;

pub(super) const PAGE: usize = 4096;
/// Frames per batch.
const EACH: u32 = 4;

/// The content of a frame.
pub(super) fn content(frame: u32) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    for (n, chunk) in (1_u32..).zip(bytes.chunks_exact_mut(4)) {
        chunk.copy_from_slice(&frame.wrapping_mul(0x9e37_79b9).wrapping_add(n).to_le_bytes());
    }
    bytes
}

/// A source of generated pages; every fifth batch is zeroes. `fails` chooses which fetches fail.
struct Made {
    layout: Layout,
    /// For each batch the number of fetches.
    fetched: Arc<Vec<AtomicU32>>,
    fails: fn(batch: u32, time: u32) -> Option<SourceError>,
}

impl Made {
    fn new(frames: u32, fails: fn(u32, u32) -> Option<SourceError>) -> Self {
        let mut layout = Layout { batch_of: vec![ZERO; frames as usize], ..Layout::default() };
        let firsts = (0..frames).step_by(EACH as usize).filter(|first| first / EACH % 5 != 4);
        for (number, first) in (0..).zip(firsts) {
            layout.batch_of[first as usize..(first + EACH) as usize].fill(number);
            layout.batches.push(Batch { first, frames: EACH, colour: 0, group: 0 });
        }
        let fetched = Arc::new(layout.batches.iter().map(|_| AtomicU32::new(0)).collect());
        Self { layout, fetched, fails }
    }
}

impl Source for Made {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read_bytes(&self) -> u64 {
        0
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        let time = self.fetched[batch as usize].fetch_add(1, Ordering::SeqCst);
        if let Some(error) = (self.fails)(batch, time) {
            return Err(error);
        }
        let first = self.layout.batches[batch as usize].first;
        // Two frames at once and two single ones, in descending order.
        for frame in (first + 2..first + EACH).rev() {
            put(frame, &content(frame)).map_err(SourceError::Install)?;
        }
        put(first, &[content(first), content(first + 1)].concat()).map_err(SourceError::Install)
    }
}

/// A pager in this process, and the daemon's end of its socket.
pub(super) struct Room {
    pub(super) daemon: Option<OwnedFd>,
    pub(super) memory: File,
    /// Number of faults that the pager has read of the clone with this number, in their order.
    pub(super) faults: Arc<dyn Fn(u64) -> u64 + Send + Sync>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

impl Room {
    fn new(source: Made, settings: Settings, first: &[u32]) -> Self {
        let memory = crate::guest::memory((source.layout.batch_of.len() * PAGE) as u64).unwrap();
        Self::over(memory, source, settings, first)
    }

    pub(super) fn over(
        memory: File,
        source: impl Source + 'static,
        settings: Settings,
        first: &[u32],
    ) -> Self {
        let template = Template::new(memory.try_clone().unwrap(), source).unwrap();
        let (descriptors, workers) = (Descriptors::open().unwrap(), Workers::default());
        let server = Server::start(template, first, settings, descriptors, workers).unwrap();
        let shared = Arc::downgrade(&server.shared);
        let faults = Arc::new(move |id| {
            let clone = shared.upgrade().and_then(|shared| shared.template.clones.get(id));
            clone.map_or(0, |clone| clone.faults())
        });
        let (ours, theirs) = pair().unwrap();
        let thread = Some(thread::spawn(move || server.talk(theirs)));
        Self { daemon: Some(ours), memory, faults, thread }
    }

    fn report(&self) -> Option<FromPager> {
        receive(self.daemon.as_ref().unwrap()).unwrap().map(|(message, _)| message)
    }

    pub(super) fn whole(&self) -> Report {
        loop {
            match self.report() {
                Some(FromPager::Whole(report)) => return report,
                Some(FromPager::First) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Closes the daemon's end, and waits for the end of the pager.
    pub(super) fn end(mut self) {
        self.daemon.take();
        self.thread.take().unwrap().join().unwrap().unwrap();
    }

    pub(super) fn clone(&self) -> Standin {
        let guest = Standin::new(self);
        assert_eq!(
            guest.register(&guest.regions(), guest.uffd()).unwrap(),
            Some(regions::SERVED.to_vec())
        );
        guest
    }
}

/// A clone, with another process in the role of its VMM.
pub(super) struct Standin {
    guest: Guest,
    vmm: Child,
    exit: File,
}

impl std::ops::Deref for Standin {
    type Target = Guest;

    fn deref(&self) -> &Guest {
        &self.guest
    }
}

impl Standin {
    pub(super) fn new(room: &Room) -> Self {
        let vmm = Command::new("sleep").arg("1000").spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&vmm), PidfdFlags::empty()).unwrap();
        let mut exit = tempfile::Builder::new();
        let exit = exit.append(true).tempfile().unwrap().into_file();
        exit.set_len(EXIT_PAGE_BYTES).unwrap();
        let guest =
            Guest::new(room.daemon.as_ref().unwrap(), &room.memory, pidfd.as_fd(), &exit).unwrap();
        Self { guest, vmm, exit }
    }

    fn check(&self, frame: u32) {
        let expected = if frame / EACH % 5 == 4 { [0; PAGE] } else { content(frame) };
        assert!(self.read(frame) == expected, "frame {frame}");
    }

    /// Whether the pager has killed the VMM.
    pub(super) fn was_killed(&self) -> bool {
        self.exit.metadata().unwrap().len() > EXIT_PAGE_BYTES
    }

    /// Waits until the VMM was killed, and returns the cause. Another thread waits for a page
    /// meanwhile, and the pager releases it.
    pub(super) fn killed(&self) -> String {
        let pidfd = pidfd_open(Pid::from_child(&self.vmm), PidfdFlags::empty()).unwrap();
        let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
        assert_eq!(
            poll(&mut ended, Some(&Timespec { tv_sec: 120, tv_nsec: 0 })).unwrap(),
            1,
            "it was not killed"
        );
        let length = self.exit.metadata().unwrap().len() - EXIT_PAGE_BYTES;
        let mut text = vec![0; usize::try_from(length).unwrap()];
        self.exit.read_exact_at(&mut text, EXIT_PAGE_BYTES).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(record["reason"], "failed");
        record["message"].as_str().unwrap().to_owned()
    }
}

impl Drop for Standin {
    fn drop(&mut self) {
        let _ = self.vmm.kill();
        let _ = self.vmm.wait();
    }
}

fn settings(background: bool) -> Settings {
    let policy = Policy { background, beside: 0, ..Policy::default() };
    // Threads of a busy host may stand still for seconds.
    Settings { policy, deadline_s: 600, ..Settings::default() }
}

/// The numbers below `n`, shuffled.
fn shuffled(n: u32, seed: u32) -> impl Iterator<Item = u32> {
    // A step without a common factor with a power of two visits all numbers.
    assert!(n.is_power_of_two());
    (0..n).map(move |k| (k.wrapping_mul(0x9e37_79b1 | 1).wrapping_add(seed * 7919)) % n)
}

#[test]
fn many_clones_find_every_page_right_and_each_is_fetched_once() {
    let frames = 1024;
    for background in [false, true] {
        let source = Made::new(frames, |_, _| None);
        let fetched = source.fetched.clone();
        // Slow, so that clones fault before everything is present.
        let settings = Settings { ahead_bytes_per_s: 8 << 20, ..settings(background) };
        let room = Room::new(source, settings, &[]);
        let guests: Vec<Standin> = (0..6).map(|_| room.clone()).collect();
        thread::scope(|scope| {
            for (n, guest) in (0..).zip(&guests) {
                scope.spawn(move || {
                    for frame in shuffled(frames, n) {
                        if frame % 7 == n {
                            guest.write(frame, 100, 0xee);
                            let mut now = guest.read(frame);
                            assert_eq!(std::mem::replace(&mut now[100], content(frame)[100]), 0xee);
                            assert!(
                                frame / EACH % 5 == 4 || now == content(frame),
                                "frame {frame}"
                            );
                        } else {
                            guest.check(frame);
                        }
                    }
                });
            }
        });
        let report = room.whole();
        assert_eq!((report.clones, report.asked + report.ahead), (6, fetched.len() as u64));
        assert!(fetched.iter().all(|n| n.load(Ordering::SeqCst) == 1));
        assert!(report.faults >= report.zero_faults + report.late_faults + report.asked);
        let seals = rustix::fs::fcntl_get_seals(&room.memory).unwrap();
        assert!(seals.contains(SealFlags::FUTURE_WRITE), "it is not sealed");
        assert!(room.memory.write_at(&[1], 0).is_err());
        // A clone that arrives when everything is present gets an answer, and the kernel finds its
        // pages.
        let late = room.clone();
        (0..frames).for_each(|frame| late.check(frame));
        room.end();
    }
}

#[test]
fn streams_have_more_come_at_once_and_none_of_it_is_wrong_where_some_cannot_be_read() {
    let frames = 4096;
    let fails: [fn(u32, u32) -> Option<SourceError>; 2] = [
        |_, _| None,
        |batch, time| {
            (batch % 7 == 3 && time == 0).then(|| SourceError::Unreadable("for a test".to_owned()))
        },
    ];
    for fails in fails {
        let source = Made::new(frames, fails);
        let fetched = source.fetched.clone();
        let policy = Policy { streams: true, ..settings(false).policy };
        let room = Room::new(source, Settings { policy, ..settings(false) }, &[]);
        let guests: Vec<Standin> = (0..3).map(|_| room.clone()).collect();
        thread::scope(|scope| {
            scope.spawn(|| (0..frames).for_each(|frame| guests[0].check(frame)));
            scope.spawn(|| (0..frames).rev().for_each(|frame| guests[1].check(frame)));
            scope.spawn(|| (frames / 2..frames).for_each(|frame| guests[2].check(frame)));
        });
        let report = room.whole();
        let batches = fetched.len() as u64;
        assert!(report.asked * 4 < batches, "{report:?}");
        assert!(report.asked + report.ahead >= batches);
        let times: u32 = fetched.iter().map(|n| n.load(Ordering::SeqCst)).sum();
        // Batches that came with a failed one are fetched again.
        assert!(u64::from(times) < batches * 4, "{times} fetches");
        if fails(3, 0).is_none() {
            assert_eq!((u64::from(times), report.asked + report.ahead), (batches, batches));
        }
        drop(guests);
        room.end();
    }
}

#[test]
fn the_end_of_the_first_pages_is_reported() {
    static REPORTED: Mutex<()> = Mutex::new(());
    let unreported = REPORTED.lock();
    // The batches of the frames 3, 500 and 501 come first, and others after the report.
    let others_wait = |batch, _| {
        if ![0, 100].contains(&batch) {
            drop(REPORTED.lock());
        }
        None
    };
    let room = Room::new(Made::new(1024, others_wait), settings(true), &[500, 3, 501]);
    assert_eq!(room.report(), Some(FromPager::First));
    drop(unreported);
    room.whole();
    room.end();
}

#[test]
fn a_clone_that_cannot_have_its_page_is_killed_with_the_cause_and_others_live() {
    let damaged = |batch, _| {
        (batch == 2).then(|| SourceError::Damaged("pack 7: group 3: flipped".to_owned()))
    };
    let room = Room::new(Made::new(64, damaged), settings(false), &[]);
    let (dies, lives) = (room.clone(), room.clone());
    thread::scope(|scope| {
        let _stuck = scope.spawn(|| dies.touch(9));
        assert!(dies.killed().contains("pack 7: group 3: flipped"));
    });
    (0..64).filter(|frame| frame / EACH != 2).for_each(|frame| lives.check(frame));
    drop(lives);
    room.end();
}

#[test]
fn a_source_that_fails_for_a_while_is_asked_again() {
    let unreadable = |_, time| (time < 2).then(|| SourceError::Unreadable("EIO".to_owned()));
    let room = Room::new(Made::new(64, unreadable), settings(false), &[]);
    let guest = room.clone();
    guest.check(1);
    drop(guest);
    room.end();
}

#[test]
fn a_clone_that_waits_too_long_is_killed() {
    static READ: Mutex<()> = Mutex::new(());
    let unread = READ.lock();
    let slow = |batch, _| {
        if batch == 1 {
            drop(READ.lock());
        }
        None
    };
    let room = Room::new(Made::new(64, slow), Settings { deadline_s: 1, ..settings(false) }, &[]);
    let guest = room.clone();
    thread::scope(|scope| {
        scope.spawn(|| guest.touch(4));
        let cause = guest.killed();
        assert!(cause.contains("has not come within") && cause.contains("frame 4"), "{cause}");
    });
    // Other clones are served during the slow read. On a busy host their page may be late, too.
    let served = (0..60).any(|_| {
        let other = room.clone();
        let right = other.read(40) == content(40);
        assert!(right || other.was_killed(), "wrong bytes");
        right
    });
    assert!(served, "no clone is served during the slow read");
    drop(unread);
    room.end();
}

#[test]
fn a_vmm_that_sends_invalid_regions_is_not_served() {
    let room = Room::new(Made::new(64, |_, _| None), settings(false), &[]);
    let outside = |guest: &Standin| {
        let mut regions = guest.regions();
        regions[0].offset += PAGE as u64;
        regions
    };
    let guest = Standin::new(&room);
    assert_eq!(guest.register(&outside(&guest), guest.uffd()).unwrap(), None);
    let guest = Standin::new(&room);
    let (read, _write) = rustix::pipe::pipe().unwrap();
    assert_eq!(guest.register(&guest.regions(), &read).unwrap(), None, "a pipe is no userfaultfd");
    let guest = Standin::new(&room);
    drop(guest); // without sending anything
    room.clone().check(5);
    room.end();
}

#[test]
fn it_goes_on_without_its_daemon_and_ends_with_its_last_clone() {
    let mut room = Room::new(Made::new(64, |_, _| None), settings(false), &[]);
    let guest = room.clone();
    room.daemon.take();
    (0..16).for_each(|frame| guest.check(frame));
    assert!(!room.thread.as_ref().unwrap().is_finished());
    drop(guest);
    room.end();
}

#[test]
fn what_is_touched_in_the_name_of_a_clone_that_has_ended_is_no_zeroes_of_the_templates() {
    let room = Room::new(Made::new(64, |_, _| None), settings(false), &[]);
    let mut guest = room.clone();
    // The process ends but its memory stays, as if a kernel thread of KVM used it.
    guest.vmm.kill().unwrap();
    guest.vmm.wait().unwrap();
    guest.guest.close();
    // The pager has noticed that end before it answers a clone that comes later.
    let other = room.clone();
    (0..32).for_each(|frame| guest.check(frame));
    // The pager does not wait for the end of that memory.
    (0..48).for_each(|frame| other.check(frame));
    drop(other);
    room.end();
}

/// A disk with one head: a read takes many times as long unless it continues the last one, however
/// busy the host is.
struct Disk {
    made: Made,
    /// The batch that continues the last one, and the mean time of recent reads.
    head: Mutex<(u32, Duration)>,
    read: AtomicU64,
}

impl Source for Disk {
    fn layout(&self) -> &Layout {
        &self.made.layout
    }

    fn read_bytes(&self) -> u64 {
        self.read.load(Ordering::SeqCst)
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        let mut head = self.head.lock().unwrap();
        let began = Instant::now();
        // Not a sleep, after which a thread waits for a CPU.
        while began.elapsed() < Duration::from_micros(200) {
            std::hint::spin_loop();
        }
        let mean = (head.1 * 7 + began.elapsed()) / 8;
        if batch != head.0 {
            let [least, most] = [8, 100].map(Duration::from_millis);
            thread::sleep((mean * 40).clamp(least, most));
        }
        *head = (batch + 1, mean);
        self.read.fetch_add(u64::from(EACH) * PAGE as u64, Ordering::SeqCst);
        drop(head);
        self.made.fetch(batch, put)
    }
}

#[test]
fn a_guest_that_faults_all_over_a_disk_does_not_keep_it_from_being_read_in_a_row() {
    let jumps = || {
        let made = Made::new(4096, |_, _| None);
        let batches = made.layout.batches.len() as u64;
        let disk = Disk { made, head: Mutex::default(), read: AtomicU64::new(0) };
        let memory = crate::guest::memory(4096 * PAGE as u64).unwrap();
        let room = Room::over(memory, disk, settings(true), &[]);
        let guest = room.clone();
        shuffled(4096, 1).for_each(|frame| guest.check(frame));
        let report = room.whole();
        drop(guest);
        room.end();
        (report.asked, batches)
    };
    // A jump takes as long as a twentieth of a sweep over everything, or longer. The prefetcher may
    // stand still on a busy host while the pager finds that out, so one of a few runs must do.
    let mut runs: Vec<(u64, u64)> = Vec::new();
    while runs.len() < 5 && runs.last().is_none_or(|(asked, batches)| *asked >= batches / 8) {
        runs.push(jumps());
    }
    let found = runs.last().is_some_and(|(asked, batches)| *asked < batches / 8);
    assert!(found, "the batches that were jumped to, of all: {runs:?}");
}
