//! Everything that can go wrong with a page, at every moment of a fetch, with clones that touch
//! pages in every order. No clone ever reads a wrong byte, and a clone that cannot have its page is
//! killed with the cause. (Efficiently Restoring VMs does not treat these failures.)

use super::tests::{PAGE, Room, Standin, content};
use super::*;
use crate::policy::Policy;
use crate::source::{Batch, Layout, Put, SourceError, ZERO};
use crate::wire::Settings;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::sync::atomic::AtomicU32;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

/// Frames per batch, and number of batches; the remaining frames are zeroes.
const EACH: u32 = 3;
const BATCHES: u32 = 6;
const FRAMES: u32 = 24;
const LONG: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The batch cannot be read, this many times.
    Unreadable(u32),
    /// The batch can never be read.
    Never,
    /// The batch is damaged.
    Damaged,
    /// The source puts a page beyond the end of RAM.
    Outside,
    /// The fetch takes a while.
    Slow,
    /// Another holder of the memfd puts the same page first.
    Same,
    /// Another clone touches the batch.
    Touched,
    /// A clone that does not wait for the batch ends.
    Goes,
    /// Another clone arrives.
    Comes,
    /// The daemon ends.
    Alone,
    /// The batch is fetched for a fault and ahead of faults at the same time.
    Ahead,
}

const FAULTS: [Fault; 12] = [
    Fault::Unreadable(1),
    Fault::Unreadable(2),
    Fault::Never,
    Fault::Damaged,
    Fault::Outside,
    Fault::Slow,
    Fault::Same,
    Fault::Touched,
    Fault::Goes,
    Fault::Comes,
    Fault::Alone,
    Fault::Ahead,
];

impl Fault {
    /// Whether a clone that touches the page must be killed.
    fn kills(self) -> bool {
        matches!(self, Self::Never | Self::Damaged | Self::Outside)
    }

    /// Whether the test acts during the fetch.
    fn acts(self) -> bool {
        matches!(self, Self::Touched | Self::Goes | Self::Comes | Self::Alone)
    }
}

/// The order in which a clone touches frames.
#[derive(Debug, Clone, Copy)]
enum Walk {
    Up,
    Down,
    /// The case's batch first, or last.
    First,
    Last,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    fault: Fault,
    batch: u32,
    /// Before which of the batch's pages the fault happens; [`EACH`] means after all of them.
    moment: u32,
    clones: u32,
    walk: Walk,
    background: bool,
    /// Whether the batch is in the working set.
    early: bool,
}

/// A source of generated pages, with a fault in one batch.
struct Faulty {
    layout: Layout,
    case: Case,
    times: AtomicU32,
    memory: File,
    at: SyncSender<()>,
    go: Mutex<Receiver<()>>,
}

impl Faulty {
    fn happens(&self, time: u32) -> Result<(), SourceError> {
        let unreadable = || Err(SourceError::Unreadable("EIO".to_owned()));
        match self.case.fault {
            Fault::Unreadable(times) if time < times => unreadable(),
            Fault::Never => unreadable(),
            Fault::Damaged => Err(SourceError::Damaged("a flipped bit".to_owned())),
            Fault::Slow => {
                thread::sleep(Duration::from_micros(300));
                Ok(())
            }
            Fault::Same if time == 0 => {
                let frame = self.case.batch * EACH + self.case.moment.min(EACH - 1);
                put_directly(&self.memory, frame);
                Ok(())
            }
            fault if fault.acts() && time == 0 => {
                let _ = self.at.send(());
                let _ = self.go.lock().unwrap().recv_timeout(LONG);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Puts a frame's content as another holder of the memfd would. Atomically, because plain stores
/// would show zeroes first.
fn put_directly(memory: &File, frame: u32) {
    let bytes = FRAMES as usize * PAGE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let uffd = Uffd::own().unwrap();
    // SAFETY: a new mapping, at an address of the kernel's choice, unmapped before this function
    // returns; nothing has a reference to it.
    unsafe {
        let at =
            mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, memory, 0).unwrap();
        let start = at.expose_provenance();
        uffd.register(start as u64, bytes as u64).unwrap();
        uffd.copy((start + frame as usize * PAGE) as u64, &content(frame), PAGE).unwrap();
        munmap(at, bytes).unwrap();
    }
}

impl Source for Faulty {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read_bytes(&self) -> u64 {
        0
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        let ours = batch == self.case.batch;
        let time = if ours { self.times.fetch_add(1, Ordering::SeqCst) } else { 0 };
        for n in 0..EACH {
            if ours && n == self.case.moment {
                self.happens(time)?;
            }
            let frame = batch * EACH + n;
            let at = if ours && self.case.fault == Fault::Outside && n == self.case.moment {
                FRAMES
            } else {
                frame
            };
            put(at, &content(frame)).map_err(SourceError::Install)?;
        }
        if ours && self.case.moment >= EACH {
            self.happens(time)?;
        }
        Ok(())
    }
}

/// The result of a clone's walk.
enum Walked {
    All,
    /// The clone was killed, this long after the touch.
    Killed(Duration),
}

fn walk(clone: &Standin, case: &Case) -> Walked {
    let ours = |frame: &u32| frame / EACH == case.batch;
    let all = 0..FRAMES;
    let frames: Vec<u32> = match case.walk {
        Walk::Up => all.collect(),
        Walk::Down => all.rev().collect(),
        Walk::First => all.clone().filter(ours).chain(all.filter(|frame| !ours(frame))).collect(),
        Walk::Last => all.clone().filter(|frame| !ours(frame)).chain(all.filter(ours)).collect(),
    };
    for frame in frames {
        let began = Instant::now();
        let got = clone.read(frame);
        let expected = if frame < BATCHES * EACH { content(frame) } else { [0; PAGE] };
        if got != expected {
            // A real VMM would not run any more.
            assert!(clone.was_killed(), "{case:?}: wrong bytes in frame {frame}");
            return Walked::Killed(began.elapsed());
        }
    }
    Walked::All
}

fn play(case: Case) -> Duration {
    let memory = crate::guest::memory(u64::from(FRAMES) * PAGE as u64).unwrap();
    let batch_of =
        (0..FRAMES).map(|frame| if frame < BATCHES * EACH { frame / EACH } else { ZERO });
    let batches =
        (0..BATCHES).map(|n| Batch { first: n * EACH, frames: EACH, colour: 0, group: 0 });
    let layout = Layout { batch_of: batch_of.collect(), batches: batches.collect() };
    let (at, hit) = sync_channel(1);
    let (go, gone) = sync_channel(1);
    let source = Faulty {
        layout,
        case,
        times: AtomicU32::new(0),
        memory: memory.try_clone().unwrap(),
        at,
        go: Mutex::new(gone),
    };
    let policy = Policy { background: case.background, beside: 0, ..Policy::default() };
    let (fault_threads, retry_ms, deadline_s) = (2, 0, 600);
    let settings = Settings { policy, fault_threads, retry_ms, deadline_s, ..Settings::default() };
    let early = [case.batch * EACH];
    let ahead = case.early || case.fault == Fault::Ahead;
    let mut room = Room::over(memory, source, settings, if ahead { &early } else { &[] });
    let clones: Vec<Standin> = (0..case.clones).map(|_| room.clone()).collect();
    let mut idle = Some(room.clone());
    let mut worst = Duration::ZERO;
    let late = thread::scope(|scope| {
        let walks: Vec<_> = clones.iter().map(|clone| scope.spawn(|| walk(clone, &case))).collect();
        let mut late = None;
        let touched = if case.fault == Fault::Touched { idle.take() } else { None };
        if case.fault.acts() {
            hit.recv_timeout(LONG).unwrap_or_else(|e| panic!("{case:?}: it was not fetched: {e}"));
            match case.fault {
                Fault::Goes => drop(idle.take()),
                Fault::Comes => late = Some(room.clone()),
                Fault::Alone => drop(room.daemon.take()),
                _ => {}
            }
        }
        let touched =
            touched.map(|clone| scope.spawn(move || matches!(walk(&clone, &case), Walked::All)));
        if case.fault.acts() {
            go.send(()).unwrap();
        }
        for walked in walks {
            match walked.join().unwrap() {
                // Pages that came before the fault are right and present.
                Walked::All => {
                    assert!(
                        !case.fault.kills() || case.moment == EACH,
                        "{case:?}: it was not killed"
                    );
                }
                Walked::Killed(after) => {
                    assert!(case.fault.kills(), "{case:?}: it was killed");
                    worst = worst.max(after);
                }
            }
        }
        assert!(touched.is_none_or(|touched| touched.join().unwrap()), "{case:?}");
        late
    });
    if let Some(late) = late {
        assert!(matches!(walk(&late, &case), Walked::All), "{case:?}");
    }
    drop((clones, idle));
    room.end();
    worst
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for fault in FAULTS {
        for batch in [0, 1, 2, 3, BATCHES - 1] {
            for moment in 0..=EACH {
                if fault == Fault::Outside && moment == EACH {
                    continue;
                }
                for clones in 1..=3 {
                    for walk in [Walk::Up, Walk::Down, Walk::First, Walk::Last] {
                        for (background, early) in
                            [(false, false), (false, true), (true, false), (true, true)]
                        {
                            cases.push(Case {
                                fault,
                                batch,
                                moment,
                                clones,
                                walk,
                                background,
                                early,
                            });
                        }
                    }
                }
            }
        }
    }
    cases
}

#[test]
fn whatever_goes_wrong_when_no_clone_reads_a_wrong_byte() {
    let cases = cases();
    assert!(cases.len() >= 10_000, "{}", cases.len());
    let next = AtomicU32::new(0);
    let (began, worst) = (Instant::now(), Mutex::new(Duration::ZERO));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::SeqCst) as usize) {
                    let took = play(*case);
                    let mut worst = worst.lock().unwrap();
                    *worst = took.max(*worst);
                }
            });
        }
    });
    println!(
        "{} combinations of fault, moment and source, no wrong byte, {:?}; \
         longest from fault to kill: {:?}",
        cases.len(),
        began.elapsed(),
        worst.into_inner().unwrap()
    );
}
