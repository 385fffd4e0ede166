//! One run, replayed: a thread touches what the guest touched, when a guest of this host's speed would, and the pager serves it.

use crate::device::{Slow, Speed, sleep_until};
use crate::response::Stall;
use anyhow::{Context, Result, ensure};
use dayfly_pager::guest::{self, Guest};
use dayfly_pager::policy::Policy;
use dayfly_pager::serve;
use dayfly_pager::source::ZERO;
use dayfly_pager::stored::{Expected, Stored};
use dayfly_pager::template::Template;
use dayfly_pager::wire::{FromPager, Settings, pair, receive};
use dayfly_store::{PageReader, Store};
use dayfly_units::Name;
use rustix::fd::AsFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;

/// A run: frames, when they are touched (microseconds of a guest of this host's speed that waits for nothing), and how many of them belong to a clone's first moments.
#[derive(Debug, Clone)]
pub struct Trace {
    pub touches: Vec<(u32, u64)>,
    pub first_moments: usize,
}

/// What a replay came to.
#[derive(Debug, Clone)]
pub struct Replayed {
    /// Frames that were touched and are not zero, and those of them that were there before.
    pub needed: usize,
    pub present: usize,
    /// Frames that were fetched by the end of the run, and those that nobody touched.
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
        let child = Command::new("sleep").arg("100000").stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        Ok(Self(child.context("sleep")?))
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

    /// Microseconds until all of RAM is there, and bytes read: everything is read as it lies, and the guest starts then.
    pub fn eagerly(&self, speed: Speed) -> Result<(u64, u64)> {
        let memory = guest::memory(self.bytes)?;
        let source = Slow::new(Stored::new(self.reader()?, &Expected::default(), &Policy::default()), speed);
        let began = Instant::now();
        for batch in 0..u32::try_from(source.there.len())? {
            source.read(&[batch], true, &mut |frame, bytes| {
                memory.write_all_at(bytes, u64::from(frame) * PAGE)
            })?;
        }
        sleep_until(source.done());
        let read = dayfly_pager::source::Source::read_bytes(&source);
        Ok((micros(began.elapsed()), read))
    }

    /// Microseconds until a file as long as RAM, read as it lies, is copied: how a VM is restored whose memory was saved as a file.
    pub fn raw_file(&self, speed: Speed) -> Result<u64> {
        const PIECE: usize = 1 << 20;
        let file = tempfile::tempfile().context("a file as long as RAM")?;
        let piece: Vec<u8> = (0_u32..).map(|n| n.to_le_bytes()[0] | 1).take(PIECE).collect();
        for at in (0..self.bytes).step_by(PIECE) {
            file.write_all_at(&piece, at)?;
        }
        let memory = guest::memory(self.bytes)?;
        let device = Slow::new(Stored::new(self.reader()?, &Expected::default(), &Policy::default()), speed);
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
        self.replayed(trace, &Expected::default(), Policy::default(), crate::device::HOST, true)
    }

    fn replayed(
        &self,
        trace: &Trace,
        expected: &Expected,
        policy: Policy,
        speed: Speed,
        warm: bool,
    ) -> Result<Replayed> {
        let memory = guest::memory(self.bytes)?;
        let source = Slow::new(Stored::new(self.reader()?, expected, &policy), speed);
        let (there, began, read) = (source.there.clone(), source.began, source.read.clone());
        let layout = dayfly_pager::source::Source::layout(&source).clone();
        let template = Template::new(memory.try_clone()?, source)?;
        let (ours, theirs) = pair()?;
        let order = expected.first.clone();
        let settings = Settings { policy, ..Settings::default() };
        let pager = std::thread::spawn(move || serve::fill(template, &order, settings, theirs));
        let stand = Stand::new()?;
        let process = pidfd_open(Pid::from_child(&stand.0), PidfdFlags::empty())?;
        let exit = tempfile::tempfile()?;
        let guest = Guest::new(&ours, &memory, process.as_fd(), &exit)?;
        ensure!(guest.tell(&guest.regions(), guest.uffd())?.is_some(), "the pager does not serve the clone");
        if warm {
            while !matches!(receive::<FromPager>(&ours)?.context("the pager ended")?.0, FromPager::Whole(_)) {
            }
        }
        let began = if warm { Instant::now() } else { began };
        let batch_of = |frame: u32| layout.batch_of[frame as usize];
        let is_there = |batch: u32| there[batch as usize].load(Ordering::Acquire);

        let (mut needed, mut present, mut first_us) = (0, 0, 0);
        let mut stalls: Vec<Stall> = Vec::new();
        let mut behind = Duration::ZERO;
        for (number, &(frame, at_us)) in trace.touches.iter().enumerate() {
            // So much has the guest computed by now; it was held up the rest of the time.
            let due = began + Duration::from_micros(at_us) + behind;
            if Instant::now() < due {
                sleep_until(due);
            }
            let batch = batch_of(frame);
            if batch != ZERO {
                needed += 1;
                present += usize::from(is_there(batch));
            }
            let from = Instant::now();
            let _ = std::hint::black_box(guest.touch(frame));
            let to = Instant::now();
            behind += to - from;
            let stall = (micros(from - began), micros(to - began));
            match stalls.last_mut() {
                // Two that the clock cannot tell apart.
                Some(last) if last.1 >= stall.0 => last.1 = last.1.max(stall.1),
                _ => stalls.push(stall),
            }
            if number + 1 == trace.first_moments {
                first_us = micros(began.elapsed());
            }
        }
        let took_us = micros(began.elapsed());
        let touched: std::collections::HashSet<u32> = trace.touches.iter().map(|(frame, _)| *frame).collect();
        let fetched =
            (0_u32..).zip(&layout.batch_of).filter(|(_, batch)| **batch != ZERO && is_there(**batch));
        let fetched: Vec<u32> = fetched.map(|(frame, _)| frame).collect();
        let unneeded = fetched.iter().filter(|frame| !touched.contains(frame)).count();
        let read_bytes = read.load(Ordering::Relaxed);
        // The clone ends, and with it the last who wants the pager.
        drop(stand);
        drop(ours);
        pager.join().map_err(|_| anyhow::anyhow!("the pager panicked"))?.context("the pager")?;
        ensure!(written(&exit)? == 0, "the pager killed the clone");
        drop(guest);
        Ok(Replayed {
            needed,
            present,
            fetched: fetched.len(),
            unneeded,
            read_bytes,
            stalls,
            first_us,
            took_us,
        })
    }
}

fn written(file: &File) -> Result<u64> {
    Ok(file.metadata()?.len())
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
