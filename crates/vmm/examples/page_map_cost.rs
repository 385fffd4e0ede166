//! `page_map_cost`: the cost of noting a transfer in the page map, beside the cost of the transfer.
//! Reads from a file in the page cache into guest memory, without a queue, and writes back. The
//! best of many rounds each.
#![allow(clippy::unwrap_used, reason = "a tool for developers; it stops at the first surprise")]

use dayfly_vmm::disk::page_map::{PageMap, record};
use dayfly_vmm::disk::{Disk, DiskSpec, IoList};
use dayfly_vmm::memory;
use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const BYTES: u64 = 64 << 20;
const PAGE: u64 = 4096;

/// The shortest time of a pass over the disk.
fn best(mut pass: impl FnMut()) -> Duration {
    let mut once = || {
        let start = Instant::now();
        pass();
        start.elapsed()
    };
    (0..25).map(|_| once()).min().unwrap()
}

/// Requests over the whole disk, each of `pages` pages in `buffers` buffers.
fn requests(memory: &GuestMemoryMmap, pages: u64, buffers: u64) -> Vec<(u64, IoList<'_>)> {
    let len = pages * PAGE / buffers;
    let request = |at: u64| {
        let mut list = IoList::new();
        for n in 0..buffers {
            // From last to first, so that no two are merged.
            let address = GuestAddress((1 << 20) + at + (buffers - 1 - n) * len);
            list.push(memory.get_slice(address, usize::try_from(len).unwrap()).unwrap());
        }
        (at, list)
    };
    (0..BYTES).step_by(usize::try_from(pages * PAGE).unwrap()).map(request).collect()
}

fn main() {
    let memory = memory::anonymous(256 << 20).unwrap();
    let file =
        || File::from(rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let base = file();
    std::io::copy(&mut std::io::Read::take(std::io::repeat(7), BYTES), &mut &base).unwrap();
    let spec = DiskSpec {
        size_bytes: BYTES,
        base: base.into(),
        layers: vec![],
        writable: Some(file().into()),
        trees: vec![],
    };
    let mut disk = Disk::open(spec).unwrap();
    let mut map = PageMap::new(&memory);
    println!("ns per 4 KiB: what, pages of a request, its buffers, transfer, page map, in percent");
    for (pages, buffers) in [(1, 1), (8, 1), (32, 1), (32, 32), (128, 1), (128, 128)] {
        let requests = requests(&memory, pages, buffers);
        let row = |what: &str, transfer: Duration, noted: Duration| {
            let each = |time: Duration| time.as_secs_f64() * 1e9 / (BYTES / PAGE) as f64;
            let percent = 100.0 * noted.as_secs_f64() / transfer.as_secs_f64();
            println!(
                "{what:6}{pages:6}{buffers:6}{:10.1}{:8.2}{percent:7.2}",
                each(transfer),
                each(noted)
            );
        };
        let read = best(|| requests.iter().for_each(|(at, list)| disk.read(*at, list).unwrap()));
        let noted = best(|| {
            requests.iter().for_each(|(at, list)| black_box(&mut map).filled(0, *at, list))
        });
        row("read", read, noted);
        let wrote = best(|| requests.iter().for_each(|(at, list)| disk.write(*at, list).unwrap()));
        let noted = best(|| {
            requests.iter().for_each(|(at, list)| black_box(&mut map).written(0, *at, list))
        });
        row("write", wrote, noted);
    }
    let (layer_map, next) = (file(), file());
    disk.prepare_freeze(layer_map.as_fd(), next.as_fd()).unwrap();
    disk.freeze(next.into());
    for (what, step) in [("in order", 1), ("every second frame", 2)] {
        map = PageMap::new(&memory);
        for (at, list) in requests(&memory, 1, 1).iter().step_by(step) {
            map.filled(0, *at, list);
        }
        let start = Instant::now();
        let (stretches, mut runs) = (map.stretches(), Vec::new());
        disk.held(&stretches, &mut runs);
        let bytes = record::encode(&runs).len();
        let took = start.elapsed().as_micros();
        println!(
            "saving {} runs, {what}: {took} us, {bytes} bytes; map {} bytes",
            runs.len(),
            map.heap_bytes()
        );
    }
}
