#![expect(clippy::cast_possible_truncation, reason = "tests: patterns of bytes, small numbers")]

use super::layer::{LayerMap, LayerMapError, MAGIC, VERSION};
use super::{Disk, DiskSpec, FreezeError, IoList, LayerSpec, OpenDiskError};
use crate::config::{DISK_BLOCK_BYTES, MAX_LAYERS};
use dayfly_units::sealed;
use proptest::prelude::*;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;

const BLOCKS: u64 = 40;
const SIZE: u64 = BLOCKS * DISK_BLOCK_BYTES;

fn file() -> File {
    tempfile::tempfile().unwrap()
}

/// A disk's files, kept by the test, so that it can open the disk again and freeze layers.
struct Files {
    base: File,
    layers: Vec<(File, File)>,
    writable: File,
}

impl Files {
    fn new(base_bytes: u64) -> Self {
        let mut base = file();
        let content: Vec<u8> = (0..base_bytes).map(|at| (at / 512 % 251) as u8 | 1).collect();
        base.write_all(&content).unwrap();
        Self { base, layers: Vec::new(), writable: file() }
    }

    fn open(&self) -> Result<Disk, OpenDiskError> {
        Disk::open(self.spec())
    }

    fn spec(&self) -> DiskSpec {
        let copy = |f: &File| f.try_clone().unwrap().into();
        let layers = self.layers.iter().map(|(data, map)| LayerSpec { data: copy(data), map: copy(map) });
        DiskSpec {
            size_bytes: SIZE,
            base: copy(&self.base),
            layers: layers.collect(),
            writable: Some(copy(&self.writable)),
        }
    }

    fn freeze(&mut self, disk: &mut Disk) -> Result<(), FreezeError> {
        let (map, next) = (file(), file());
        disk.prepare_freeze(map.as_fd(), next.as_fd())?;
        disk.freeze(next.try_clone().unwrap().into());
        self.layers.push((std::mem::replace(&mut self.writable, next), map));
        Ok(())
    }

    fn content(&self) -> Vec<u8> {
        let mut content = Vec::new();
        let mut base = &self.base;
        base.seek(SeekFrom::Start(0)).unwrap();
        base.read_to_end(&mut content).unwrap();
        content.resize(usize::try_from(SIZE).unwrap(), 0);
        content
    }
}

fn read(disk: &Disk, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let mut out = vec![0xaa; len];
    // Uneven pieces, so that runs and pieces end at different places.
    let mut list = IoList::new();
    for piece in out.chunks_mut(1536 * 3) {
        list.append(&IoList::of(piece));
    }
    disk.read(offset, &list)?;
    Ok(out)
}

fn write(disk: &mut Disk, offset: u64, mut bytes: Vec<u8>) -> std::io::Result<()> {
    disk.write(offset, &IoList::of(&mut bytes))
}

#[derive(Debug, Clone)]
enum Step {
    Write { sector: u64, sectors: u64, fill: u8 },
    Zero { sector: u64, sectors: u64 },
    Discard { sector: u64, sectors: u64 },
    Read { sector: u64, sectors: u64 },
    Freeze,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..SIZE / 512, 0_u64..60).prop_map(|(s, n)| (s, n.min(SIZE / 512 - s)));
    prop_oneof![
        6 => (range(), 1..=255_u8).prop_map(|((sector, sectors), fill)| Step::Write { sector, sectors, fill }),
        2 => range().prop_map(|(sector, sectors)| Step::Zero { sector, sectors }),
        2 => range().prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        4 => range().prop_map(|(sector, sectors)| Step::Read { sector, sectors }),
        1 => Just(Step::Freeze),
        1 => Just(Step::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// The disk is a `Vec<u8>`, whatever is frozen in between and however often it is opened from its layers.
    #[test]
    fn a_disk_is_its_bytes(
        base_sectors in 0..=SIZE / 512,
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        let mut files = Files::new(base_sectors * 512);
        let mut model = files.content();
        let mut disk = files.open().unwrap();
        for step in steps {
            let bytes = |sector: u64, sectors: u64| {
                usize::try_from(sector * 512).unwrap()..usize::try_from((sector + sectors) * 512).unwrap()
            };
            match step {
                Step::Write { sector, sectors, fill } => {
                    let part = &mut model[bytes(sector, sectors)];
                    for (at, byte) in part.iter_mut().enumerate() {
                        *byte = fill ^ (at / 512) as u8;
                    }
                    write(&mut disk, sector * 512, part.to_vec()).unwrap();
                }
                Step::Zero { sector, sectors } => {
                    model[bytes(sector, sectors)].fill(0);
                    disk.zero(sector * 512, sectors * 512).unwrap();
                }
                Step::Discard { sector, sectors } => {
                    let (first, end) = (sector.div_ceil(8), (sector + sectors) / 8);
                    if first < end {
                        model[bytes(first * 8, (end - first) * 8)].fill(0);
                    }
                    disk.discard(sector * 512, sectors * 512).unwrap();
                }
                Step::Read { sector, sectors } => {
                    let range = bytes(sector, sectors);
                    prop_assert_eq!(&read(&disk, sector * 512, range.len()).unwrap(), &model[range]);
                }
                Step::Freeze if files.layers.len() < MAX_LAYERS => files.freeze(&mut disk).unwrap(),
                Step::Freeze => {}
                // What is not frozen is lost with its VM: a clone starts from frozen layers only.
                Step::Reopen => {
                    files.freeze(&mut disk).unwrap();
                    disk = files.open_fresh();
                }
            }
        }
        prop_assert_eq!(read(&disk, 0, model.len()).unwrap(), model);
    }

    #[test]
    fn a_map_reads_back(blocks in 0..3000_u64, picks in proptest::collection::btree_set(0..3000_u64, 0..200)) {
        let mut map = LayerMap::empty(blocks).unwrap();
        for pick in &picks {
            map.insert(*pick);
        }
        let expected: Vec<u64> = picks.into_iter().filter(|b| *b < blocks).collect();
        let again = LayerMap::decode(&map.encode()).unwrap();
        prop_assert_eq!(&again, &map);
        prop_assert_eq!(again.present(), expected.len() as u64);
        prop_assert_eq!(again.runs().flatten().collect::<Vec<_>>(), expected.clone());
        for block in 0..blocks {
            prop_assert_eq!(again.has(block), expected.binary_search(&block).is_ok());
        }
        let runs: Vec<_> = again.runs().collect();
        prop_assert!(runs.windows(2).all(|w| w[0].end < w[1].start));
    }
}

impl Files {
    /// Opens the disk as a clone does: with a fresh writable layer.
    fn open_fresh(&mut self) -> Disk {
        self.writable = file();
        self.open().unwrap()
    }
}

fn sample_map() -> Vec<u8> {
    let mut map = LayerMap::empty(BLOCKS).unwrap();
    for block in [0, 7, 8, 39] {
        map.insert(block);
    }
    map.encode()
}

#[test]
fn every_truncation_and_every_flipped_bit_of_a_map_is_refused() {
    let whole = sample_map();
    assert_eq!(LayerMap::decode(&whole).unwrap().present(), 4);
    for len in 0..whole.len() {
        assert!(LayerMap::decode(&whole[..len]).is_err(), "truncated to {len}");
    }
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(LayerMap::decode(&flipped).is_err(), "flipped bit {bit}");
    }
}

#[test]
fn a_sealed_payload_that_lies_is_refused() {
    let with = |size: u32, blocks: u64, bits: &[u8]| {
        let payload = [&size.to_le_bytes()[..], &blocks.to_le_bytes(), bits].concat();
        LayerMap::decode(&sealed::seal(&MAGIC, VERSION, &payload))
    };
    assert!(with(4096, 12, &[0xff, 0x0f]).is_ok());
    assert!(matches!(with(512, 12, &[0, 0]), Err(LayerMapError::BlockBytes(512))));
    assert!(matches!(with(4096, u64::MAX, &[0, 0]), Err(LayerMapError::Blocks(u64::MAX))));
    assert!(matches!(with(4096, 17, &[0, 0]), Err(LayerMapError::Bitmap { expected: 3, got: 2, .. })));
    assert!(matches!(with(4096, 8, &[0, 0]), Err(LayerMapError::Bitmap { expected: 1, got: 2, .. })));
    assert!(matches!(with(4096, 12, &[0, 0x10]), Err(LayerMapError::Stray(12))));
    let short = LayerMap::decode(&sealed::seal(&MAGIC, VERSION, &[0; 11]));
    assert!(matches!(short, Err(LayerMapError::Short(11))));
    assert!(matches!(LayerMap::decode(&sealed::seal(&MAGIC, 2, b"")), Err(LayerMapError::Seal(_))));
}

#[test]
fn a_map_file_larger_than_any_map_is_not_read() {
    let huge = file();
    huge.set_len(1 << 40).unwrap();
    assert!(matches!(LayerMap::read(huge.as_fd()), Err(LayerMapError::TooLarge { .. })));
}

#[test]
fn a_truncated_or_foreign_layer_is_refused() {
    let mut files = Files::new(SIZE);
    let mut disk = files.open().unwrap();
    write(&mut disk, 0, vec![1; 4096]).unwrap();
    files.freeze(&mut disk).unwrap();
    files.writable = file();

    files.layers[0].0.set_len(SIZE - 1).unwrap();
    let error = files.open().unwrap_err().to_string();
    assert!(error.contains("data of layer 1") && error.contains(&SIZE.to_string()), "{error}");
    files.layers[0].0.set_len(SIZE).unwrap();

    let foreign = file();
    (&foreign).write_all(&LayerMap::empty(BLOCKS + 1).unwrap().encode()).unwrap();
    let map = std::mem::replace(&mut files.layers[0].1, foreign);
    assert!(matches!(files.open(), Err(OpenDiskError::Blocks { number: 1, .. })));
    files.layers[0].1 = map;
    assert!(files.open().is_ok());
}

#[test]
fn a_used_writable_layer_or_a_pipe_is_refused() {
    let files = Files::new(SIZE);
    files.writable.set_len(1).unwrap();
    assert!(matches!(files.open(), Err(OpenDiskError::File { .. })));
    let mut spec = files.spec();
    spec.writable = Some(std::os::unix::net::UnixStream::pair().unwrap().0.into());
    assert!(matches!(Disk::open(spec), Err(OpenDiskError::File { .. })));
    for size_bytes in [0, 4095, SIZE + 512, super::MAX_DISK_BYTES + DISK_BLOCK_BYTES] {
        let spec = DiskSpec { size_bytes, ..files.spec() };
        assert!(matches!(Disk::open(spec), Err(OpenDiskError::Size(_))), "{size_bytes}");
    }
    let spec = DiskSpec { size_bytes: SIZE - DISK_BLOCK_BYTES, ..files.spec() };
    assert!(matches!(Disk::open(spec), Err(OpenDiskError::File { .. })), "a base longer than the disk");
}

#[test]
fn a_frozen_layer_is_not_written_again() {
    let mut files = Files::new(SIZE);
    let mut disk = files.open().unwrap();
    write(&mut disk, 4096, vec![1; 8192]).unwrap();
    files.freeze(&mut disk).unwrap();
    let digest = |f: &File| {
        let mut bytes = Vec::new();
        (&mut &*f).seek(SeekFrom::Start(0)).unwrap();
        (&mut &*f).read_to_end(&mut bytes).unwrap();
        bytes
    };
    let before = digest(&files.layers[0].0);
    write(&mut disk, 4096 + 512, vec![2; 512]).unwrap();
    disk.zero(8192, 512).unwrap();
    disk.discard(0, SIZE).unwrap();
    assert_eq!(digest(&files.layers[0].0), before);
    assert_eq!(
        read(&disk, 0, usize::try_from(SIZE).unwrap()).unwrap(),
        vec![0; usize::try_from(SIZE).unwrap()]
    );
}

#[test]
fn a_failed_freeze_changes_nothing() {
    let mut files = Files::new(SIZE);
    let mut disk = files.open().unwrap();
    write(&mut disk, 0, vec![7; 512]).unwrap();
    let (map, used) = (file(), file());
    used.set_len(1).unwrap();
    assert!(matches!(disk.prepare_freeze(map.as_fd(), used.as_fd()), Err(FreezeError::File(_))));
    assert!(matches!(disk.prepare_freeze(used.as_fd(), map.as_fd()), Err(FreezeError::File(_))));
    assert_eq!(disk.frozen_layers(), 0);
    write(&mut disk, 512, vec![8; 512]).unwrap();
    assert_eq!(read(&disk, 0, 1024).unwrap(), [[7; 512], [8; 512]].concat());

    for _ in 0..MAX_LAYERS {
        files.freeze(&mut disk).unwrap();
    }
    assert!(matches!(files.freeze(&mut disk), Err(FreezeError::Layers(65))));
    assert_eq!(files.open_fresh().frozen_layers(), MAX_LAYERS);

    let spec = DiskSpec { writable: None, ..files.spec() };
    let read_only = Disk::open(spec).unwrap();
    assert!(matches!(read_only.writable_map(), Err(FreezeError::ReadOnly)));
}

#[test]
fn what_lies_past_the_end_is_refused() {
    let files = Files::new(SIZE);
    let mut disk = files.open().unwrap();
    assert!(read(&disk, SIZE - 512, 1024).is_err());
    assert!(read(&disk, u64::MAX - 100, 512).is_err());
    assert!(write(&mut disk, SIZE, vec![0; 512]).is_err());
    assert!(disk.zero(SIZE - 512, 1024).is_err());
    assert!(disk.zero(u64::MAX - 511, 512).is_err());
    assert!(disk.discard(512, u64::MAX).is_err());
    let mut read_only = Disk::open(DiskSpec { writable: None, ..files.spec() }).unwrap();
    for error in [
        write(&mut read_only, 0, vec![0; 512]).unwrap_err(),
        read_only.zero(0, 4096).unwrap_err(),
        read_only.discard(0, 4096).unwrap_err(),
    ] {
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    }
}

#[test]
fn a_file_that_became_shorter_is_an_error_and_not_zeroes() {
    let files = Files::new(SIZE);
    let disk = files.open().unwrap();
    files.base.set_len(100).unwrap();
    assert_eq!(read(&disk, 0, 512).unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_discard_gives_space_back() {
    let files = Files::new(SIZE);
    let mut disk = files.open().unwrap();
    write(&mut disk, 0, vec![9; usize::try_from(SIZE).unwrap()]).unwrap();
    let before = files.writable.metadata().unwrap().blocks();
    disk.discard(0, SIZE).unwrap();
    let after = files.writable.metadata().unwrap().blocks();
    assert!(after * 4 < before, "{before} blocks before, {after} after");
}

#[test]
fn a_full_host_is_an_error_and_the_old_bytes_stay() {
    // RLIMIT_FSIZE would signal the whole test process; a sealed memfd refuses to grow past its size instead.
    let files = Files::new(SIZE);
    let sealed = rustix::fs::memfd_create("full", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    let spec = DiskSpec { writable: Some(sealed.try_clone().unwrap()), ..files.spec() };
    let mut disk = Disk::open(spec).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
    let before = read(&disk, 0, 16384).unwrap();
    assert!(write(&mut disk, 512, vec![3; 8192]).is_err());
    assert_eq!(read(&disk, 0, 16384).unwrap(), before);
    assert_eq!(disk.writable_map().unwrap().present(), 0);
}
