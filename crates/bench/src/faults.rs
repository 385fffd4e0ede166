//! Faults: what a page costs that has to come from a pager, with its source in memory.
//!
//! One thread touches a page of each batch, one after the other, in memory that is served by [`dayfly_pager`] with threads of its own; then it touches
//! all pages as another clone, for which all is there. Held against 4 KiB that are copied, against a thread that is woken by another which looks out
//! for its answer: what a fault has of the host's own, as who faults sleeps until the page is there; and against a server with nothing to spare, which
//! never sleeps, writes pages into the memory and wakes, and keeps no account of anything.

use crate::common::{self, Spread, ratio};
use anyhow::{Context, Result, bail, ensure};
use dayfly_pager::guest::{self, Guest};
use dayfly_pager::policy::Policy;
use dayfly_pager::serve;
use dayfly_pager::source::{Batch, Layout, Put, Source, SourceError};
use dayfly_pager::template::Template;
use dayfly_pager::uffd::{Descriptors, Uffd};
use dayfly_pager::wire::{FromPager, Settings, pair, receive};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::AsFd;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use serde_json::{Value, json};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const PAGE: usize = 4096;
/// 64 MiB.
const FRAMES: u32 = 16_384;
const TIMES: usize = 31;
/// Pages that come at once.
const BATCHES: [u32; 4] = [1, 4, 8, 16];

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

/// Nanoseconds a page: of a clone that brings all, and of one that finds all.
fn one(each: u32) -> Result<(u64, u64)> {
    let settings = Settings { policy: Policy::MINIMAL, ..Settings::default() };
    let memory = guest::memory(u64::from(FRAMES) * PAGE as u64)?;
    let template = Template::new(memory.try_clone()?, Memory::new(each))?;
    let (ours, theirs) = pair()?;
    let pager = std::thread::spawn(move || serve::fill(template, &[], settings, theirs));
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    let exit = tempfile::tempfile()?;
    let clone = || -> Result<Guest> {
        let guest = Guest::new(&ours, &memory, own.as_fd(), &exit)?;
        ensure!(guest.tell(&guest.regions(), guest.uffd())?.is_some(), "the pager does not serve it");
        Ok(guest)
    };
    let (first, second) = (clone()?, clone()?);
    let time = |guest: &Guest, step: u32| {
        let began = Instant::now();
        let mut sum = 0_u64;
        for frame in (0..FRAMES).step_by(step as usize) {
            sum += u64::from(guest.touch(frame));
        }
        (began.elapsed().as_nanos() / u128::from(FRAMES), sum)
    };
    let (bringing, sum) = time(&first, each);
    ensure!(sum > 0, "nothing was read");
    // All of it is there, but the pager has not been asked to say so to this one.
    let (finding, sum) = time(&second, 1);
    ensure!(sum > 0, "nothing was read");
    // Whole, it lets go of its clones' memory, which must still be there, and ends with its daemon.
    loop {
        match receive::<FromPager>(&ours)?.context("the pager ended")?.0 {
            FromPager::Whole(_) => break,
            FromPager::Begun | FromPager::First => {}
            FromPager::Failed { cause } => bail!("the pager: {cause}"),
        }
    }
    drop((first, second, ours));
    pager.join().map_err(|_| anyhow::anyhow!("the pager panicked"))?.context("the pager")?;
    Ok((u64::try_from(bringing)?, u64::try_from(finding)?))
}

/// Nanoseconds a page, of faults that a server with nothing to spare answers.
fn bare(each: u32) -> Result<u64> {
    let bytes = Memory::new(each).bytes;
    let memory = guest::memory(bytes.len() as u64)?;
    let (ours, _daemon) = pair()?;
    let guest = Guest::new(
        &ours,
        &memory,
        pidfd_open(getpid(), PidfdFlags::empty())?.as_fd(),
        &tempfile::tempfile()?,
    )?;
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
                // Who waits for a page goes on without it.
                regions.iter().try_for_each(|region| uffd.unregister(region.host, region.bytes))?;
            }
            served
        });
        let began = Instant::now();
        let sum: u64 = (0..FRAMES).step_by(each as usize).map(|frame| u64::from(guest.touch(frame))).sum();
        let took = began.elapsed().as_nanos() / u128::from(FRAMES);
        done.store(true, Ordering::Relaxed);
        server.join().map_err(|_| anyhow::anyhow!("the server panicked"))??;
        ensure!(sum > 0, "nothing was read");
        Ok(u64::try_from(took)?)
    })
}

/// Nanoseconds to copy a page.
fn copied() -> u64 {
    let from = Memory::new(1).bytes;
    let mut to = vec![1; from.len()];
    let began = Instant::now();
    to.copy_from_slice(std::hint::black_box(&from));
    std::hint::black_box(&to);
    u64::try_from(began.elapsed().as_nanos() / u128::from(FRAMES)).unwrap_or(u64::MAX)
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
        sleeper.join().map_err(|_| anyhow::anyhow!("the sleeper panicked"))??;
        Ok(u64::try_from(took)?)
    })
}

/// Measures, prints, writes `faults.json`.
pub fn run(out: &Path) -> Result<()> {
    println!("faults: {} pages, {TIMES} times; load {}", FRAMES, common::load());
    let copies: Vec<u64> = (0..TIMES).map(|_| copied()).collect();
    let floor = Spread::of(&copies, None);
    let wakes = (0..TIMES).map(|_| woken()).collect::<Result<Vec<u64>>>()?;
    let wake = common::median(&wakes);
    println!(
        "  {:>16} {:>12} {:>12} {:>12} {:>12}",
        "pages at once", "ns a page", "least", "bare", "2nd clone"
    );
    let mut figures = Vec::<Value>::new();
    for each in BATCHES {
        // By turns: what the host does besides hits both alike.
        let runs = (0..TIMES).map(|_| Ok((one(each)?, bare(each)?))).collect::<Result<Vec<_>>>()?;
        let (ours, bares): (Vec<_>, Vec<u64>) = runs.into_iter().unzip();
        let (bringing, finding): (Vec<u64>, Vec<u64>) = ours.into_iter().unzip();
        let (bring, find, bare) =
            (common::median(&bringing), common::median(&finding), common::median(&bares));
        let least = bringing.iter().min().copied().unwrap_or(0);
        println!("  {each:>16} {bring:>12} {least:>12} {bare:>12} {find:>12}");
        figures.push(json!({
            "pages_at_once": each, "ns_per_page": bring, "least_ns_per_page": least, "second_clone_ns_per_page": find,
            "bare_ns_per_page": bare, "by_bare": ratio(bring, bare),
            "by_a_copy": ratio(bring, common::median(&copies)), "of_a_fault_by_a_wake": ratio(bring * u64::from(each), wake),
        }));
    }
    println!("  a copy of a page: {} ns; a thread woken, and its answer: {wake} ns", common::median(&copies));
    common::write(
        out,
        "faults.json",
        &json!({ "frames": FRAMES, "times": TIMES, "copy_ns": floor, "wake_ns": Spread::of(&wakes, None), "faults": figures }),
    )
}
