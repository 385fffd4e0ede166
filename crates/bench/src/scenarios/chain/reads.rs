//! Reading blocks through a chain of layers, without a guest: [`dayfly_vmm::disk::Disk`] as the
//! block device uses it.

use crate::prelude::*;
use crate::testbed::host::now_us;
use crate::testbed::random::Random;
use dayfly_store::{FileTree, OpenSnapshot, Store};
use dayfly_vmm::config::DISK_BLOCK_BYTES;
use dayfly_vmm::disk::{Disk, DiskSpec, IoList, LayerSpec, TreeSpec};

/// Reads in a sample.
const READS: u64 = 2000;
const SAMPLES: usize = 31;
/// Bytes of a large read.
const LARGE: usize = 1 << 20;
/// A slot of the guest's, of which each has one block that may be written
/// ([`dayfly_microguest::Growth`]).
const SLOTS: u64 = 8192;

fn disk(open: &OpenSnapshot) -> Result<Disk> {
    let file = &open.disks[0];
    let layers = file.layers.iter().map(|layer| {
        Ok(LayerSpec { data: layer.data.try_clone()?.into(), map: layer.map.try_clone()?.into() })
    });
    let trees = std::iter::once(&file.tree).chain(file.layers.iter().map(|layer| &layer.tree));
    let trees = trees.map(|of| {
        let spec =
            |tree: &FileTree| Ok(TreeSpec { file: tree.file.try_clone()?.into(), root: tree.root });
        of.as_ref().map(spec).transpose()
    });
    Ok(Disk::open(DiskSpec {
        size_bytes: file.size_bytes,
        base: file.base.try_clone()?.into(),
        layers: layers.collect::<Result<_>>()?,
        writable: Some(tempfile::tempfile()?.into()),
        trees: trees.collect::<Result<_>>()?,
    })?)
}

/// Nanoseconds of one read of 4 KiB at slots in random order, and of 1 MiB anywhere; microseconds
/// of opening the disk.
fn sample(open: &OpenSnapshot, random: &mut Random) -> Result<[u64; 3]> {
    let begun = now_us();
    let disk = disk(open)?;
    let opened = now_us() - begun;
    let stride = disk.size_bytes() / SLOTS / DISK_BLOCK_BYTES * DISK_BLOCK_BYTES;
    let mut buffer = vec![0; LARGE];
    let begun = now_us();
    for _ in 0..READS {
        let at = random.below(SLOTS) * stride;
        disk.read(at, &IoList::of(&mut buffer[..4096]))?;
    }
    let small = (now_us() - begun) * 1000 / READS;
    let large_reads = READS / 50;
    let begun = now_us();
    for _ in 0..large_reads {
        let at = random.below(disk.size_bytes() / LARGE as u64) * LARGE as u64;
        disk.read(at, &IoList::of(&mut buffer))?;
    }
    Ok([small, (now_us() - begun) * 1000 / large_reads, opened])
}

/// Reads through the chain of each snapshot, in turns.
pub fn run(store: &Store, names: &[(&'static str, Name)]) -> Result<Value> {
    let open =
        names.iter().map(|(_, name)| store.open_snapshot(name)).collect::<Result<Vec<_>, _>>()?;
    let mut all = vec![[const { Vec::new() }; 3]; names.len()];
    let mut random = Random(17);
    for _ in 0..SAMPLES {
        for (open, kept) in open.iter().zip(&mut all) {
            let sample = sample(open, &mut random)?;
            kept.iter_mut().zip(sample).for_each(|(kept, value)| kept.push(value));
        }
    }
    let mut figures = json!({});
    for ((what, _), kept) in names.iter().zip(&all) {
        let [small, large, opened] = kept.each_ref().map(|values| median(values));
        println!(
            "  {what}: 4 KiB in {small} ns, 1 MiB in {} us, the disk opened in {opened} us",
            large / 1000
        );
        figures[what] = json!({
            "read_4k_ns_p50": small, "read_1m_ns_p50": large, "open_us_p50": opened,
            "samples": SAMPLES, "reads_of_a_sample": READS,
        });
    }
    Ok(figures)
}
