//! Clones whose VMM is hostile. Each of them harms itself only: the other clones get every page,
//! and the pager goes on.

use super::tests::{PAGE, Room, Standin, content};
use super::*;
use crate::policy::Policy;
use crate::source::{Batch, Layout, Put, Source, SourceError, ZERO};
use crate::threads::QUANTUM;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

const LONG: Duration = Duration::from_secs(120);

/// Batches of one frame; further frames are zeroes. `slow` batches wait until the test goes on.
struct Paged {
    layout: Layout,
    slow: u32,
    /// Gets the number of each slow batch whose fetch begins.
    began: SyncSender<u32>,
    go: Mutex<Receiver<()>>,
    /// Faults that the pager has read of the hostile clone.
    faults: Arc<OnceLock<Box<dyn Fn() -> u64 + Send + Sync>>>,
    /// Batches that are not slow, in the order of their fetches, each with `faults` at that time.
    fetched: Arc<Mutex<Vec<(u32, u64)>>>,
}

impl Source for Paged {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read_bytes(&self) -> u64 {
        0
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        if batch < self.slow {
            let _ = self.began.send(batch);
            // Ends for all once the test drops its end.
            let _ = self.go.lock().unwrap().recv();
        } else {
            let faults = self.faults.get().map_or(0, |faults| faults());
            self.fetched.lock().unwrap().push((batch, faults));
        }
        put(batch, &content(batch)).map_err(SourceError::Install)
    }
}

/// A pager over [`Paged`].
struct Scene {
    room: Room,
    began: Receiver<u32>,
    /// Dropped to let slow fetches go on.
    gate: Option<SyncSender<()>>,
    faults: Arc<OnceLock<Box<dyn Fn() -> u64 + Send + Sync>>>,
    fetched: Arc<Mutex<Vec<(u32, u64)>>>,
}

impl Scene {
    fn new(frames: u32, batches: u32, slow: u32, settings: Settings) -> Self {
        let (began_here, began) = sync_channel(64);
        let (gate, go) = sync_channel(1);
        let batch_of = (0..frames).map(|frame| if frame < batches { frame } else { ZERO });
        let batch = |first| Batch { first, frames: 1, colour: 0, group: 0 };
        let layout =
            Layout { batch_of: batch_of.collect(), batches: (0..batches).map(batch).collect() };
        let (faults, fetched) = (Arc::default(), Arc::<Mutex<Vec<_>>>::default());
        let source = Paged {
            layout,
            slow,
            began: began_here,
            go: Mutex::new(go),
            faults: Arc::clone(&faults),
            fetched: fetched.clone(),
        };
        let memory = crate::guest::memory(u64::from(frames) * PAGE as u64).unwrap();
        let room = Room::over(memory, source, settings, &[]);
        Self { room, began, gate: Some(gate), faults, fetched }
    }
}

fn settings(fault_threads: u32) -> Settings {
    let policy = Policy { background: false, beside: 0, ..Policy::default() };
    // Threads of a busy host may stand still for seconds.
    Settings { policy, fault_threads, deadline_s: 600, ..Settings::default() }
}

/// The lowest address of a clone's memory.
fn start(clone: &Standin) -> usize {
    let lowest = clone.regions().iter().map(|region| region.host).min().unwrap();
    usize::try_from(lowest).unwrap()
}

/// Reads a frame, and compares it.
fn right(clone: &Standin, frame: u32) {
    assert!(clone.read(frame) == content(frame), "frame {frame}");
}

/// Number of faults that the pager has not read.
fn pending(clone: &Standin) -> u32 {
    use rustix::fd::AsRawFd;
    let path = format!("/proc/self/fdinfo/{}", clone.uffd().as_raw_fd());
    let text = std::fs::read_to_string(path).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("pending:")).unwrap();
    line.trim().parse().unwrap()
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        thread::yield_now();
    }
}

/// Touches a frame of zeroes and gives it back, in a circle.
fn circle(clone: &Standin, frame: u32, times: u32, done: &AtomicBool) {
    let at = start(clone) + frame as usize * PAGE;
    for _ in 0..times {
        if done.load(Ordering::SeqCst) || clone.was_killed() {
            return;
        }
        assert_eq!(clone.touch(frame), 0);
        // SAFETY: a page of the clone's private mapping, to which nothing has a reference.
        let result = unsafe {
            libc::madvise(std::ptr::with_exposed_provenance_mut(at), PAGE, libc::MADV_DONTNEED)
        };
        assert_eq!(result, 0);
    }
}

#[test]
fn a_clone_whose_descriptor_blocks_is_killed_and_the_others_get_their_pages() {
    let scene = Scene::new(64, 48, 0, settings(2));
    let (hostile, other) = (scene.room.clone(), scene.room.clone());
    right(&hostile, 3);
    // The description is that of the VMM, which keeps a descriptor.
    rustix::io::ioctl_fionbio(hostile.uffd(), false).unwrap();
    // Its next fault shows it.
    let _zero = hostile.touch(7);
    assert!(hostile.killed().contains("made its userfaultfd blocking"));
    // It goes on toggling the flag, as if another process had the descriptor too.
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                rustix::io::ioctl_fionbio(hostile.uffd(), false).unwrap();
            }
        });
        (0..48).for_each(|frame| right(&other, frame));
        done.store(true, Ordering::SeqCst);
    });
    let late = scene.room.clone();
    (0..48).for_each(|frame| right(&late, frame));
    assert!(!other.was_killed() && !late.was_killed());
    scene.room.whole();
    drop((hostile, other, late));
    scene.room.end();
}

#[test]
fn a_page_that_a_vmm_made_by_reading_is_replaced_and_harms_only_clones_that_have_it() {
    // The prefetcher waits at the first batch.
    let mut all = settings(2);
    all.policy.background = true;
    let mut scene = Scene::new(128, 100, 1, all);
    assert_eq!(scene.began.recv_timeout(LONG), Ok(0));
    let [reads, writes, idle] = [(); 3].map(|()| scene.room.clone());
    // Reads missing pages beside the registration.
    let bytes = 128 * PAGE;
    // SAFETY: a new mapping, at an address of the kernel's choice, unmapped below.
    let shared = unsafe {
        mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &scene.room.memory, 0)
    };
    let shared = shared.unwrap();
    for frame in [5, 6, 90] {
        // SAFETY: a page of that mapping.
        let byte = unsafe { shared.cast::<u8>().add(frame * PAGE).read_volatile() };
        assert_eq!(byte, 0);
    }
    // The zeroes are in the memfd, so the kernel asks for no page.
    assert_eq!(reads.touch(5), 0);
    writes.write(6, 100, 0xee);
    // The kernel maps present pages around a fault, at most 15 on each side.
    (30..50).for_each(|frame| right(&idle, frame));
    assert!(!reads.was_killed() && !writes.was_killed());
    scene.gate.take();
    assert_eq!(scene.room.whole().replaced, 3);
    assert!(reads.killed().contains("in place of frame 5"));
    assert!(writes.killed().contains("in place of frame 6"));
    for clone in [&idle, &scene.room.clone()] {
        (0..100).for_each(|frame| right(clone, frame));
        assert!(!clone.was_killed());
    }
    // SAFETY: the mapping made above; nothing refers to it.
    unsafe { munmap(shared, bytes).unwrap() };
    drop((reads, writes, idle));
    scene.room.end();
}

/// Threads of the clone that faults in a circle, so that faults of it wait all the time.
const CIRCLES: u32 = 256;

/// For each of `clones` clones, the number of turns of clones at which it has all of its pages. All
/// its faults wait before the only fault thread serves; those of a clone that faults in a circle,
/// if there is one, wait first.
fn turns(clones: u32, pages: u32, hostile: bool) -> Vec<u64> {
    // Batch 0 keeps the fault thread until all faults wait.
    let batches = 1 + clones * pages;
    let frames = (batches + CIRCLES).next_multiple_of(2);
    let mut scene = Scene::new(frames, batches, 1, settings(1));
    let holds = scene.room.clone();
    let circles = hostile.then(|| scene.room.clone());
    if hostile {
        let faults = scene.room.faults.clone();
        let _ = scene.faults.set(Box::new(move || faults(1)));
    }
    let others: Vec<Standin> = (0..clones).map(|_| scene.room.clone()).collect();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| right(&holds, 0));
        assert_eq!(scene.began.recv_timeout(LONG), Ok(0));
        if let Some(clone) = &circles {
            for frame in batches..batches + CIRCLES {
                let done = &done;
                scope.spawn(move || circle(clone, frame, 100, done));
            }
            until("the circle begins", || pending(clone) == CIRCLES);
        }
        let mut threads = Vec::new();
        for (number, clone) in (0..).zip(&others) {
            for page in 0..pages {
                let frame = 1 + number * pages + page;
                threads.push(scope.spawn(move || right(clone, frame)));
            }
            until("its faults wait", || pending(clone) == pages);
        }
        scene.gate.take();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        done.store(true, Ordering::SeqCst);
    });
    let fetched = scene.fetched.lock().unwrap();
    assert_eq!(fetched.len(), (clones * pages) as usize);
    // The turn in which each page came: those of the clones before it, and those of the circle.
    let (mut last, mut turn) = (0, 0);
    let mut turns = vec![0; clones as usize];
    for (batch, faults) in fetched.iter() {
        let clone = 1 + (batch - 1) / pages;
        turn += u64::from(clone != last);
        last = clone;
        turns[clone as usize - 1] = turn + faults.div_ceil(u64::from(QUANTUM));
    }
    drop(fetched);
    assert!(others.iter().all(|clone| !clone.was_killed()));
    drop((holds, circles, others));
    scene.room.end();
    turns
}

#[test]
fn a_clone_that_faults_in_a_circle_delays_each_of_64_others_by_less_than_three_times() {
    let (alone, beside) = (turns(64, 4, false), turns(64, 4, true));
    println!("turns without the circle: {alone:?}\nturns beside the circle: {beside:?}");
    for (number, (alone, beside)) in alone.iter().zip(&beside).enumerate() {
        assert!(*beside <= 3 * alone, "clone {number}: {beside} turns instead of {alone}");
    }
}

#[test]
fn a_clone_that_waits_for_slow_pages_on_many_threads_leaves_one_fault_thread() {
    let (slow, threads) = (8, 4);
    let mut scene = Scene::new(256, 200, slow, settings(threads));
    let (hostile, other) = (scene.room.clone(), scene.room.clone());
    thread::scope(|scope| {
        for frame in 0..slow {
            let hostile = &hostile;
            scope.spawn(move || right(hostile, frame));
        }
        for _ in 1..threads {
            assert!(scene.began.recv_timeout(LONG).unwrap() < slow);
        }
        let (done, read) = sync_channel(1);
        let other = &other;
        scope.spawn(move || {
            (slow..200).for_each(|frame| right(other, frame));
            done.send(()).unwrap();
        });
        let served = read.recv_timeout(LONG);
        let more = scene.began.try_recv();
        scene.gate.take();
        served.expect("the other clone waits");
        assert!(more.is_err(), "all threads served one clone");
    });
    drop((hostile, other));
    scene.room.end();
}

#[test]
fn a_clone_with_more_faults_than_its_memory_needs_is_killed() {
    let scene = Scene::new(64, 48, 0, settings(2));
    let (hostile, other) = (scene.room.clone(), scene.room.clone());
    circle(&hostile, 63, 100_000, &AtomicBool::new(false));
    assert!(hostile.killed().contains("more than its memory needs"));
    let faults = (scene.room.faults)(0);
    assert!((65_536..65_600).contains(&faults), "{faults} faults");
    (0..48).for_each(|frame| right(&other, frame));
    drop((hostile, other));
    scene.room.end();
}

/// A new clone that got these frames. With a short deadline, clones may be killed on a busy host
/// although the pager works, so some are tried.
fn served(room: &Room, frames: &Range<u32>) -> Option<Standin> {
    (0..60).find_map(|_| {
        let clone = room.clone();
        let right = frames.clone().all(|frame| clone.read(frame) == content(frame));
        assert!(right || clone.was_killed(), "wrong bytes");
        right.then_some(clone)
    })
}

#[test]
fn faults_are_noted_while_every_fault_thread_waits_for_its_read() {
    let scene = Scene::new(64, 48, 2, Settings { deadline_s: 1, ..settings(2) });
    let Scene { room, began: _began, gate, .. } = scene;
    let [first, second] = [(); 2].map(|()| room.clone());
    let third = thread::scope(|scope| {
        scope.spawn(|| first.touch(0));
        scope.spawn(|| second.touch(1));
        assert!(first.killed().contains("has not come within"));
        assert!(second.killed().contains("has not come within"));
        // No fault thread is free; the prefetcher is.
        let (done, read) = sync_channel(1);
        let room = &room;
        let third = scope.spawn(move || {
            let third = served(room, &(2..8));
            done.send(()).unwrap();
            third
        });
        let answered = read.recv_timeout(LONG);
        drop(gate);
        answered.expect("its faults are not noted");
        third.join().unwrap().expect("its faults are noted too late")
    });
    let last = served(&room, &(0..48)).expect("no clone gets everything");
    assert!(!third.was_killed());
    drop((first, second, third, last));
    room.end();
}
