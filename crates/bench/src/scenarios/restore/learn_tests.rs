//! What is learned of runs over a snapshot with known places.

use super::*;
use dayfly_store::{
    ChainLayer, Digest, DiskSpec, ImageConfig, ImageSpec, KernelRef, Known, PageReader, PagedSpec,
    SnapshotSpec, Store, sparse,
};
use dayfly_units::{CpuModel, Name, VmId};
use std::os::unix::fs::FileExt;

const PAGE: u64 = 4096;
/// All frames from this one on are zero.
const WRITTEN: u32 = 1024;
const FRAMES: u32 = 1100;

/// Groups of 16 frames in a store: the first half of [`WRITTEN`] frames of one colour, the other of
/// another.
fn shape() -> Shape {
    let name = |text: &str| text.parse::<Name>().expect("a name");
    let root = tempfile::tempdir().expect("a folder");
    let store = Store::open(root.path()).expect("a store");
    let disk = tempfile::tempfile().expect("a disk");
    disk.set_len(1 << 20).expect("a disk");
    let digest = sparse::digest(&disk).expect("a digest").digest;
    let (source, config) = (String::new(), ImageConfig::default());
    let spec = ImageSpec { size_bytes: 1 << 20, digest, source, config };
    store.put_image_raw(&name("empty"), &spec, &mut &disk).expect("an image");
    let (layer, data) = store.create_vm_layer(VmId::random(), 0).expect("a layer");
    data.set_len(1 << 20).expect("a layer");
    let mut writer = store.snapshot_writer(&name("s")).expect("a writer");
    let freeze = writer.freeze(&layer).expect("a frozen layer");
    freeze.map.write_all_at(&[1; 100], 0).expect("a map");
    drop((data, freeze.map));
    writer.state().write_all_at(&[2; 300], 0).expect("a state");
    let memory_bytes = u64::from(FRAMES) * PAGE;
    writer.memory().set_len(memory_bytes).expect("RAM");
    for frame in 0..WRITTEN {
        let digest = Digest::of(&frame.to_le_bytes()).0;
        writer.memory().write_all_at(&digest.repeat(128), u64::from(frame) * PAGE).expect("RAM");
    }
    let kernel = KernelRef { name: name("k"), release: "k".into(), digest: Digest([7; 32]) };
    let image = store.image(&name("empty")).expect("the image").reference();
    let layers: Vec<ChainLayer> = vec![freeze.frozen];
    let spec = SnapshotSpec {
        parent: None,
        ancestors: Vec::new(),
        kernel,
        vcpus: 1,
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
        nets: 0,
        memory_bytes,
        agent_version: String::new(),
        config: ImageConfig::default(),
        labels: [].into(),
        egress: None,
        disks: vec![DiskSpec { image, size_bytes: 1 << 20, writable: true, layers }],
    };
    let colours: Vec<u8> = (0..FRAMES).map(|frame| if frame < 512 { 3 } else { 5 }).collect();
    let known = Known { colours: &colours, ..Known::default() };
    let tenant = name("t");
    writer.saved().commit_paged(&spec, &PagedSpec { tenant: &tenant, known }).expect("a snapshot");
    let (_, plan) = store.open_lazily(&name("s")).expect("the snapshot");
    let plan = plan.expect("a snapshot with pages");
    let reader = PageReader::open(&plan.table, &plan.places, plan.packs, plan.disks);
    Shape::of(&reader.expect("a reader"))
}

/// Frames 0 to 99 always, and of colour 3 another group, of colour 5 every fourth frame of a
/// group.
fn run(number: u32) -> Vec<u32> {
    let group = 100 / 16 + 1 + number;
    let whole = group * 16..(group + 1) * 16;
    let sparse = (512 + 64 * number..512 + 64 * (number + 1)).step_by(4);
    (0..100).rev().chain(whole).chain(sparse).chain([1090]).collect()
}

#[test]
fn what_all_runs_touch_comes_first_in_their_order_and_windows_follow_what_lies_together() {
    let runs: Vec<Vec<u32>> = (0..4).map(run).collect();
    let learned = learn(&shape(), &runs);
    assert_eq!(learned.expected.first, (0..100).rev().collect::<Vec<_>>());
    assert_eq!(learned.windows[3], UNIT, "groups of this colour are touched whole");
    assert_eq!(learned.windows[5], 1, "three of four would be in vain");
    let of = |frame| learned.expected.together.get(&frame).copied();
    assert_eq!(
        [7 * 16, 8 * 16 - 1, 512, 513, 512 + 64, 5].map(of),
        [Some(1), Some(1), Some(1), None, Some(2), None]
    );
}

#[test]
fn what_one_run_in_many_leaves_out_is_worth_it_and_what_one_alone_touches_is_not() {
    let runs: Vec<Vec<u32>> = (0..8)
        .map(|number| (0..200).filter(|frame| *frame != number).chain([900 + number]).collect())
        .collect();
    let mut first = learn(&shape(), &runs).expected.first;
    first.sort_unstable();
    assert_eq!(first, (0..200).collect::<Vec<_>>());
}

#[test]
fn one_run_is_believed_and_none_teaches_nothing() {
    let learned = learn(&shape(), &[vec![7, 3, 1090, 5]]);
    assert_eq!((learned.expected.first, learned.windows), (vec![7, 3, 5], [UNIT; COLOURS]));
    let learned = learn(&shape(), &[]);
    assert_eq!((learned.expected.first, learned.windows), (vec![], [UNIT; COLOURS]));
    // Frames that memory does not have are in no run.
    assert!(learn(&shape(), &[vec![u32::MAX], vec![u32::MAX, 1099]]).expected.first.is_empty());
}
