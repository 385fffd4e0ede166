//! One run, replayed: a thread touches what the guest touched, when a guest of this host's speed
//! would, and the pager serves it.

use super::device::{HOST, Slow, Speed, sleep_until};
use super::response::Stall;
use crate::prelude::*;
use crate::testbed::Served;
use dayfly_pager::guest::{self, Guest};
use dayfly_pager::policy::Policy;
use dayfly_pager::source::{Source, ZERO};
use dayfly_pager::stored::{Expected, Stored};
use dayfly_pager::wire::Settings;
use dayfly_store::{PageReader, Store};
use rustix::fd::AsFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;

/// A run: frames, when they are touched (microseconds of a guest of this host's speed that waits
/// for nothing), and how many of them belong to a clone's first moments.
#[derive(Debug, Clone)]
pub struct Trace {
    pub touches: Vec<(u32, u64)>,
    pub first_moments: usize,
}

/// What a replay came to.
#[derive(Debug, Clone, Default)]
pub struct Replayed {
    /// Frames that were touched and are not zero, and those of them that were there before.
    pub needed: usize,
    pub present: usize,
    /// Frames that were fetched by the end of the run, and those of them that were not touched.
    pub fetched: usize,
    pub unneeded: usize,
    /// Bytes read for that, as they are stored.
    pub read_bytes: u64,
    pub stalls: Vec<Stall>,
    /// When the first moments were over, and the run.
    pub first_us: u64,
    pub took_us: u64,
}

impl Replayed {
    /// What the guest saw.
    pub fn faults(&self) -> usize {
        self.needed - self.present
    }
}

/// A snapshot as it was copied out.
#[derive(Debug)]
pub struct Image {
    store: Store,
    name: Name,
    /// Bytes of RAM.
    pub bytes: u64,
}

/// A process that stands for the clone's VMM: the pager serves it until it ends.
struct Stand(Child);

impl Stand {
    fn new() -> Result<Self> {
        let mut sleep = Command::new("sleep");
        sleep.arg("100000").stdin(Stdio::null()).stdout(Stdio::null());
        Ok(Self(sleep.spawn().context("sleep")?))
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Image {
    pub fn open(folder: &Path, name: &Name) -> Result<Self> {
        let store = Store::open(folder).with_context(|| folder.display().to_string())?;
        let bytes = store.open_lazily(name)?.0.manifest.memory_bytes;
        Ok(Self { store, name: name.clone(), bytes })
    }

    /// Where its pages are.
    pub fn reader(&self) -> Result<PageReader> {
        let (_, plan) = self.store.open_lazily(&self.name)?;
        let plan = plan.context("expected a snapshot with pages, got one with a file")?;
        Ok(PageReader::open(&plan.table, &plan.places, plan.packs, plan.disks)?)
    }

    /// Its pages, from a device.
    fn behind(&self, speed: Speed, expected: &Expected, policy: &Policy) -> Result<Slow> {
        Ok(Slow::new(Stored::new(self.reader()?, expected, policy), speed))
    }

    /// Microseconds until all of RAM is there, and bytes read: everything is read as it lies, and
    /// the guest starts then.
    pub fn eagerly(&self, speed: Speed) -> Result<(u64, u64)> {
        let memory = guest::memory(self.bytes)?;
        let source = self.behind(speed, &Expected::default(), &Policy::default())?;
        let began = Instant::now();
        for batch in 0..u32::try_from(source.there.len())? {
            source.read(&[batch], true, &mut |frame, bytes| {
                memory.write_all_at(bytes, u64::from(frame) * PAGE_SIZE)
            })?;
        }
        sleep_until(source.done());
        Ok((micros(began.elapsed()), source.read_bytes()))
    }

    /// Microseconds until a file as long as RAM, read as it lies, is copied: how a VM is restored
    /// whose memory was saved as a file.
    pub fn raw_file(&self, speed: Speed) -> Result<u64> {
        const PIECE: usize = 1 << 20;
        let file = tempfile::tempfile().context("a file as long as RAM")?;
        let piece: Vec<u8> = (0_u32..).map(|n| n.to_le_bytes()[0] | 1).take(PIECE).collect();
        for at in (0..self.bytes).step_by(PIECE) {
            file.write_all_at(&piece, at)?;
        }
        let memory = guest::memory(self.bytes)?;
        let device = self.behind(speed, &Expected::default(), &Policy::default())?;
        let began = Instant::now();
        let mut buffer = vec![0; PIECE];
        for at in (0..self.bytes).step_by(PIECE) {
            let due = device.stream(PIECE as u64);
            file.read_exact_at(&mut buffer, at)?;
            sleep_until(due);
            memory.write_all_at(&buffer, at)?;
        }
        Ok(micros(began.elapsed()))
    }

    /// Replays `trace`, with what is expected.
    pub fn lazily(
        &self,
        trace: &Trace,
        expected: &Expected,
        policy: Policy,
        speed: Speed,
    ) -> Result<Replayed> {
        self.replayed(trace, expected, policy, speed, false)
    }

    /// As [`Self::lazily`], when all is there already.
    pub fn warm(&self, trace: &Trace) -> Result<Replayed> {
        self.replayed(trace, &Expected::default(), Policy::default(), HOST, true)
    }

    fn replayed(
        &self,
        trace: &Trace,
        expected: &Expected,
        policy: Policy,
        speed: Speed,
        warm: bool,
    ) -> Result<Replayed> {
        let source = self.behind(speed, expected, &policy)?;
        let (there, began, read) = (source.there.clone(), source.began, source.read.clone());
        let layout = source.layout().clone();
        let settings = Settings { policy, ..Settings::default() };
        let memory = guest::memory(self.bytes)?;
        let served = Served::new(memory, source, expected.first.clone(), settings)?;
        let stand = Stand::new()?;
        let process = pidfd_open(Pid::from_child(&stand.0), PidfdFlags::empty())?;
        let exit = tempfile::tempfile()?;
        let guest = served.clone(process.as_fd(), &exit)?;
        if warm {
            served.whole()?;
        }
        let began = if warm { Instant::now() } else { began };
        let is_there = |batch: u32| batch != ZERO && there[batch as usize].load(Ordering::Acquire);
        let is_there = |frame: u32| is_there(layout.batch_of[frame as usize]);
        let needs = |frame: u32| layout.batch_of[frame as usize] != ZERO;
        let mut replayed = trace.touch(&guest, began, needs, is_there);
        replayed.took_us = micros(began.elapsed());
        let touched: HashSet<u32> = trace.touches.iter().map(|(frame, _)| *frame).collect();
        let frames = (0_u32..).take(layout.batch_of.len());
        let fetched: Vec<u32> = frames.filter(|frame| is_there(*frame)).collect();
        replayed.fetched = fetched.len();
        replayed.unneeded = fetched.iter().filter(|frame| !touched.contains(frame)).count();
        replayed.read_bytes = read.load(Ordering::Relaxed);
        // The clone ends, and with it the pager.
        drop(stand);
        served.end()?;
        ensure!(exit.metadata()?.len() == 0, "the pager killed the clone");
        drop(guest);
        Ok(replayed)
    }
}

impl Trace {
    /// Touches the frames when the guest would.
    fn touch(
        &self,
        guest: &Guest,
        began: Instant,
        needs: impl Fn(u32) -> bool,
        is_there: impl Fn(u32) -> bool,
    ) -> Replayed {
        let mut replayed = Replayed::default();
        let mut behind = Duration::ZERO;
        for (number, &(frame, at_us)) in self.touches.iter().enumerate() {
            // So much has the guest computed by now; it waited the rest of the time.
            let due = began + Duration::from_micros(at_us) + behind;
            if Instant::now() < due {
                sleep_until(due);
            }
            if needs(frame) {
                replayed.needed += 1;
                replayed.present += usize::from(is_there(frame));
            }
            let from = Instant::now();
            let _ = std::hint::black_box(guest.touch(frame));
            let to = Instant::now();
            behind += to - from;
            let stall = (micros(from - began), micros(to - began));
            match replayed.stalls.last_mut() {
                // Two that the clock cannot distinguish.
                Some(last) if last.1 >= stall.0 => last.1 = last.1.max(stall.1),
                _ => replayed.stalls.push(stall),
            }
            if number + 1 == self.first_moments {
                replayed.first_us = micros(began.elapsed());
            }
        }
        replayed
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
