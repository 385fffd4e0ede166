//! What checking reads against a hash tree costs: the first read of each leaf, and reads after it,
//! with the tree and without, in turns. The files are in memory.

#![expect(clippy::unwrap_used, reason = "a measurement ends at the first error")]

use dayfly_units::Digest;
use dayfly_units::tree::{LEAF_BYTES, TreeBuilder};
use dayfly_vmm::disk::{Disk, DiskSpec, IoList, TreeSpec};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

const BYTES: u64 = 256 << 20;

fn memfd() -> File {
    File::from(rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
}

/// Nanoseconds for each read of `length` bytes, at places `step` apart.
fn reads(disk: &Disk, length: usize, step: u64) -> u64 {
    let mut buffer = vec![0; length];
    let begun = Instant::now();
    let mut count = 0;
    for at in (0..BYTES).step_by(usize::try_from(step).unwrap()) {
        disk.read(at, &IoList::of(&mut buffer)).unwrap();
        count += 1;
    }
    u64::try_from(begun.elapsed().as_nanos()).unwrap() / count
}

fn main() {
    let (base, mut tree) = (memfd(), TreeBuilder::new(memfd(), BYTES).unwrap());
    let begun = Instant::now();
    for at in (0..BYTES).step_by(1 << 20) {
        let piece: Vec<u8> = (0..1_u32 << 18).flat_map(|n| (n ^ 0x5bd1).to_le_bytes()).collect();
        base.write_all_at(&piece, at).unwrap();
        tree.update(at, &piece).unwrap();
    }
    let (file, root) = tree.finish(Digest([0; 32])).unwrap();
    println!("a file of 256 MiB and its tree: {} ms", begun.elapsed().as_millis());
    let open = |with: bool| {
        let tree = || TreeSpec { file: file.try_clone().unwrap().into(), root };
        Disk::open(DiskSpec {
            size_bytes: BYTES,
            base: base.try_clone().unwrap().into(),
            layers: Vec::new(),
            writable: None,
            trees: vec![with.then(tree)],
        })
        .unwrap()
    };
    println!("ns for each read: without a tree, with it for the first time, with it again");
    for (length, step) in [(4096, LEAF_BYTES), (65536, LEAF_BYTES), (1 << 20, 1 << 20)] {
        for _ in 0..3 {
            let (without, with) = (open(false), open(true));
            let figures = [
                reads(&without, length, step),
                reads(&with, length, step),
                reads(&with, length, step),
            ];
            println!("{length} bytes: {figures:?}");
        }
    }
}
