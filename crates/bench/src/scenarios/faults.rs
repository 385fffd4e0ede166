//! Faults: what a page costs that has to come from a pager, with its source in memory.
//!
//! One thread touches a page of each batch, one after the other, in memory that is served by
//! [`dayfly_pager`] in other threads; then it touches all pages as another clone, for which
//! all is there. Held against 4 KiB that are copied, against a thread that is woken by another
//! which looks out for its answer: what a fault has of the host's own, as who faults sleeps until
//! the page is there; and against a server with nothing to spare, which never sleeps, writes pages
//! into the memory and wakes, and keeps no account of anything.

use crate::figures::Shape::Plain;
use crate::prelude::*;
use crate::testbed::Served;
use dayfly_pager::guest::{self, Guest};
use dayfly_pager::policy::Policy;
use dayfly_pager::source::{Batch, Layout, Put, Source, SourceError};
use dayfly_pager::wire::{Settings, pair};
use dayfly_sys::uffd::{Descriptors, Uffd};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

const PAGE: usize = 4096;
/// 64 MiB.
const FRAMES: u32 = 16_384;
/// Pages that come at once.
const BATCHES: [u32; 4] = [1, 4, 8, 16];

/// What a fault through the pager is compared with.
const FLOOR: &str = "a server that never sleeps, writes pages into the memory, wakes the faulting \
     thread, and keeps no account (bare); a copy of 4 KiB; a thread that another one wakes";

const COLUMNS: [Column; 4] = [
    ("ns a page", "/ns_per_page", Plain),
    ("least", "/least_ns_per_page", Plain),
    ("bare", "/bare_ns_per_page", Plain),
    ("2nd clone", "/second_clone_ns_per_page", Plain),
];

/// Options of `faults`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Runs of each kind
    #[arg(long, default_value_t = 31, value_name = "N", value_parser = at_least(1))]
    runs: usize,
}

/// Pages in memory.
struct Memory {
    layout: Layout,
    bytes: Vec<u8>,
}

impl Memory {
    fn new(each: u32) -> Self {
        let batch = |number| Batch { first: number * each, frames: each, colour: 0, group: 0 };
        let batches: Vec<Batch> = (0..FRAMES / each).map(batch).collect();
        let batch_of = (0..FRAMES).map(|frame| frame / each).collect();
        let bytes = (0..FRAMES).flat_map(|frame| [frame.to_le_bytes()[0] | 1; PAGE]).collect();
        Self { layout: Layout { batch_of, batches }, bytes }
    }
}

impl Source for Memory {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read_bytes(&self) -> u64 {
        0
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        let Batch { first, frames, .. } = self.layout.batches[batch as usize];
        let from = first as usize * PAGE;
        put(first, &self.bytes[from..from + frames as usize * PAGE]).map_err(SourceError::Install)
    }
}

/// Touches a page of each `step`; returns nanoseconds for each page of the memory.
fn touched(guest: &Guest, step: u32) -> Result<u64> {
    let began = Instant::now();
    let frames = (0..FRAMES).step_by(step as usize);
    let sum: u64 = frames.map(|frame| u64::from(guest.touch(frame))).sum();
    let took = per_page(began)?;
    ensure!(sum > 0, "nothing was read");
    Ok(took)
}

fn per_page(began: Instant) -> Result<u64> {
    Ok(u64::try_from(began.elapsed().as_nanos() / u128::from(FRAMES))?)
}

fn own_process() -> Result<OwnedFd> {
    Ok(pidfd_open(getpid(), PidfdFlags::empty())?)
}

/// Nanoseconds a page: of a clone that brings all, and of one that finds all.
fn one(each: u32) -> Result<(u64, u64)> {
    let settings = Settings { policy: Policy::MINIMAL, ..Settings::default() };
    let memory = guest::memory(u64::from(FRAMES) * PAGE as u64)?;
    let served = Served::new(memory, Memory::new(each), Vec::new(), settings)?;
    let (own, exit) = (own_process()?, tempfile::tempfile()?);
    let (first, second) = (served.clone(own.as_fd(), &exit)?, served.clone(own.as_fd(), &exit)?);
    let bringing = touched(&first, each)?;
    // All of it is there, but the pager has not been asked to say so to this one.
    let finding = touched(&second, 1)?;
    // A whole template unmaps its clones' memory, which must still be there, and ends with its
    // daemon.
    served.whole()?;
    drop((first, second));
    served.end()?;
    Ok((bringing, finding))
}

/// Nanoseconds a page, of faults that a server with nothing to spare answers.
fn bare(each: u32) -> Result<u64> {
    let bytes = Memory::new(each).bytes;
    let memory = guest::memory(bytes.len() as u64)?;
    let (ours, _daemon) = pair()?;
    let guest = Guest::new(&ours, &memory, own_process()?.as_fd(), &tempfile::tempfile()?)?;
    let regions = guest.regions();
    let lowest = regions.iter().map(|region| region.host).min().context("a region")?;
    let uffd = Uffd::sent(guest.uffd().try_clone()?, &Descriptors::open()?)?;
    let done = AtomicBool::new(false);
    let serve = || -> std::io::Result<()> {
        while !done.load(Ordering::Relaxed) {
            let Some(address) = uffd.next()? else {
                std::hint::spin_loop();
                continue;
            };
            let at = (address & !(PAGE as u64 - 1)) - lowest;
            let from = usize::try_from(at).map_err(std::io::Error::other)?;
            memory.write_all_at(&bytes[from..from + each as usize * PAGE], at)?;
            uffd.wake(lowest + at, PAGE as u64)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let served = serve();
            if served.is_err() {
                // A thread that waits for a page goes on without it.
                regions.iter().try_for_each(|region| uffd.unregister(region.host, region.bytes))?;
            }
            served
        });
        let took = touched(&guest, each);
        done.store(true, Ordering::Relaxed);
        server.join().map_err(|_| anyhow!("the server panicked"))??;
        took
    })
}

/// Nanoseconds to copy a page.
fn copied() -> Result<u64> {
    let from = Memory::new(1).bytes;
    let mut to = vec![1; from.len()];
    let began = Instant::now();
    to.copy_from_slice(std::hint::black_box(&from));
    std::hint::black_box(&to);
    per_page(began)
}

/// Nanoseconds from a thread's word to another, which sleeps, to that one's answer.
fn woken() -> Result<u64> {
    const ROUNDS: u64 = 2000;
    let event = |flags| eventfd(0, flags | EventfdFlags::CLOEXEC).context("eventfd");
    let (word, answer) = (event(EventfdFlags::empty())?, event(EventfdFlags::NONBLOCK)?);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| -> rustix::io::Result<()> {
            for _ in 0..ROUNDS {
                rustix::io::read(&word, &mut [0_u8; 8])?;
                rustix::io::write(&answer, &1_u64.to_ne_bytes())?;
            }
            Ok(())
        });
        let began = Instant::now();
        for _ in 0..ROUNDS {
            rustix::io::write(&word, &1_u64.to_ne_bytes())?;
            while rustix::io::read(&answer, &mut [0_u8; 8]).is_err() {
                std::hint::spin_loop();
            }
        }
        let took = began.elapsed().as_nanos() / u128::from(ROUNDS);
        sleeper.join().map_err(|_| anyhow!("the sleeper panicked"))??;
        Ok(u64::try_from(took)?)
    })
}

/// Runs it.
pub fn run(options: &Options, places: &Places) -> Result<()> {
    let runs = options.runs;
    let report = Report::begin(places, "faults", FLOOR, &format!("{FRAMES} pages, {runs} times"));
    let spread = |one: fn() -> Result<u64>| -> Result<Spread> {
        let values = (0..runs).map(|_| one()).collect::<Result<Vec<u64>>>()?;
        Ok(Spread::of(&values).unit(Unit::Ns))
    };
    let (copies, wakes) = (spread(copied)?, spread(woken)?);
    let table = Table::new(14, "pages at once", &COLUMNS);
    let mut all = Vec::new();
    for each in BATCHES {
        // In turns: whatever else the host does hits both alike.
        let runs = (0..runs).map(|_| Ok((one(each)?, bare(each)?))).collect::<Result<Vec<_>>>()?;
        let (ours, bares): (Vec<_>, Vec<u64>) = runs.into_iter().unzip();
        let (bringing, finding): (Vec<u64>, Vec<u64>) = ours.into_iter().unzip();
        let (bring, bare) = (median(&bringing), median(&bares));
        let figures = json!({
            "pages_at_once": each, "ns_per_page": bring, "least_ns_per_page": bringing.iter().min(),
            "second_clone_ns_per_page": median(&finding), "bare_ns_per_page": bare,
            "by_bare": ratio(bring, bare), "by_a_copy": ratio(bring, copies.p50()),
            "of_a_fault_by_a_wake": ratio(bring * u64::from(each), wakes.p50()),
        });
        table.row(&each.to_string(), &figures);
        all.push(figures);
    }
    println!(
        "  a copy of a page: {} ns; a thread woken, and its answer: {} ns",
        copies.p50(),
        wakes.p50()
    );
    report.write(json!({
        "frames": FRAMES, "times": runs, "copy_ns": copies, "wake_ns": wakes, "faults": all,
    }))
}
