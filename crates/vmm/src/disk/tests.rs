#![expect(clippy::cast_possible_truncation, reason = "tests: patterns of bytes, small numbers")]

use super::layer::LayerMap;
use super::{Disk, DiskSpec, FreezeError, IoList, LayerSpec, Merge, MergeError, OpenDiskError};
use crate::config::{DISK_BLOCK_BYTES, MAX_LAYERS};
use dayfly_sys::writers::{Writers, writers};
use proptest::prelude::*;
use rustix::fs::FallocateFlags;
use std::cell::Cell;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;

const BLOCKS: u64 = 40;
pub(super) const SIZE: u64 = BLOCKS * DISK_BLOCK_BYTES;

thread_local! {
    /// The folder of the files that this thread makes.
    static FOLDER: Cell<&'static str> = const { Cell::new("/var/tmp") };
}

fn file() -> File {
    tempfile::tempfile_in(FOLDER.get()).unwrap()
}

/// A disk's files, which the test keeps to open the disk again and to freeze layers.
pub(super) struct Files {
    pub(super) base: File,
    layers: Vec<(File, File)>,
    pub(super) writable: File,
}

impl Files {
    pub(super) fn new(base_bytes: u64) -> Self {
        let mut base = file();
        let content: Vec<u8> = (0..base_bytes).map(|at| (at / 512 % 251) as u8 | 1).collect();
        base.write_all(&content).unwrap();
        Self { base, layers: Vec::new(), writable: file() }
    }

    /// With a base of which some blocks are holes.
    pub(super) fn with_holes(base_bytes: u64) -> Self {
        let files = Self::new(base_bytes);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for at in (0..base_bytes).step_by(4096 * 5) {
            rustix::fs::fallocate(&files.base, flags, at, 2 * 4096).unwrap();
        }
        files
    }

    pub(super) fn open(&self) -> Result<Disk, OpenDiskError> {
        Disk::open(self.spec())
    }

    pub(super) fn spec(&self) -> DiskSpec {
        let copy = |f: &File| f.try_clone().unwrap().into();
        let layers =
            self.layers.iter().map(|(data, map)| LayerSpec { data: copy(data), map: copy(map) });
        DiskSpec {
            size_bytes: SIZE,
            base: copy(&self.base),
            layers: layers.collect(),
            writable: Some(copy(&self.writable)),
            trees: Vec::new(),
        }
    }

    fn freeze(&mut self, disk: &mut Disk) -> Result<(), FreezeError> {
        let (map, next) = (file(), file());
        disk.prepare_freeze(map.as_fd(), next.as_fd())?;
        disk.freeze(next.try_clone().unwrap().into());
        self.layers.push((std::mem::replace(&mut self.writable, next), map));
        Ok(())
    }

    /// Merges `count` layers as the store does, if there are as many. Rebases the disk on the
    /// result and the `above` layers over it.
    fn merge(&mut self, disk: &mut Disk, first: usize, count: usize, above: usize) {
        let Some(layers) = self.layers.get(first..first + count) else { return };
        let maps: Vec<_> = layers.iter().map(|(_, map)| map.as_fd()).collect();
        let merge = Merge::of(&maps).unwrap();
        let (data, mut map) = (file(), file());
        data.set_len(SIZE).unwrap();
        map.write_all(&merge.map().encode()).unwrap();
        let mut end = 0;
        for (layer, bytes) in merge.into_runs() {
            assert!(bytes.start >= end && bytes.end > bytes.start, "{bytes:?} after {end}");
            end = bytes.end;
            let mut buffer = vec![0; (bytes.end - bytes.start) as usize];
            layers[layer].0.read_exact_at(&mut buffer, bytes.start).unwrap();
            data.write_all_at(&buffer, bytes.start).unwrap();
        }
        let top = (first + count - 1 + above).min(self.layers.len() - 1);
        let old_top = self.layers[top].0.try_clone().unwrap();
        self.layers.splice(first..first + count, [(data, map)]);
        let replacing = self.spec().layers.into_iter().take(top + 2 - count).collect();
        let layers = disk.frozen_layers();
        disk.rebase(old_top.as_fd(), replacing).unwrap();
        assert_eq!(disk.frozen_layers(), layers + 1 - count);
    }

    pub(super) fn content(&self) -> Vec<u8> {
        let mut content = Vec::new();
        let mut base = &self.base;
        base.seek(SeekFrom::Start(0)).unwrap();
        base.read_to_end(&mut content).unwrap();
        content.resize(usize::try_from(SIZE).unwrap(), 0);
        content
    }
}

pub(super) fn read(disk: &Disk, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let mut out = vec![0xaa; len];
    // Uneven pieces, so that runs and pieces end at different places.
    let mut list = IoList::new();
    for piece in out.chunks_mut(1536 * 3) {
        list.append(&IoList::of(piece));
    }
    disk.read(offset, &list)?;
    Ok(out)
}

pub(super) fn write(disk: &mut Disk, offset: u64, mut bytes: Vec<u8>) -> std::io::Result<()> {
    disk.write(offset, &IoList::of(&mut bytes))
}

#[derive(Debug, Clone)]
enum Step {
    Write {
        sector: u64,
        sectors: u64,
        fill: u8,
    },
    Zero {
        sector: u64,
        sectors: u64,
    },
    Discard {
        sector: u64,
        sectors: u64,
    },
    Read {
        sector: u64,
        sectors: u64,
    },
    Freeze,
    /// Merges `count` layers, and rebases the disk on the result and the `top` layers over it.
    Merge {
        first: usize,
        count: usize,
        top: usize,
    },
    Reopen,
    /// The VM ends, and a new one boots from its layers.
    End,
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..SIZE / 512, 0_u64..60).prop_map(|(s, n)| (s, n.min(SIZE / 512 - s)));
    prop_oneof![
        6 => (range(), 1..=255_u8)
            .prop_map(|((sector, sectors), fill)| Step::Write { sector, sectors, fill }),
        2 => range().prop_map(|(sector, sectors)| Step::Zero { sector, sectors }),
        2 => range().prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        4 => range().prop_map(|(sector, sectors)| Step::Read { sector, sectors }),
        2 => Just(Step::Freeze),
        1 => (0..8_usize, 2..5_usize, 0..8_usize)
            .prop_map(|(first, count, top)| Step::Merge { first, count, top }),
        1 => Just(Step::Reopen),
        2 => Just(Step::End),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// The disk behaves as a `Vec<u8>`, with any freezes in between, and any number of reopenings
    /// and ends.
    #[test]
    fn a_disk_is_its_bytes(
        base_sectors in 0..=SIZE / 512,
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        is_its_bytes(base_sectors, steps)?;
    }

    /// Likewise on a tmpfs, which reports data in pages.
    #[test]
    fn a_disk_on_a_tmpfs_is_its_bytes(
        base_sectors in 0..=SIZE / 512,
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        FOLDER.set("/dev/shm");
        is_its_bytes(base_sectors, steps)?;
    }
}

fn is_its_bytes(base_sectors: u64, steps: Vec<Step>) -> Result<(), TestCaseError> {
    let mut files = Files::with_holes(base_sectors * 512);
    let mut model = files.content();
    let mut disk = files.open().unwrap();
    for step in steps {
        let byte = |sector: u64| usize::try_from(sector * 512).unwrap();
        let bytes = |sector: u64, sectors: u64| byte(sector)..byte(sector + sectors);
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
                let got = read(&disk, sector * 512, range.len()).unwrap();
                prop_assert_eq!(&got, &model[range]);
            }
            Step::Freeze if files.layers.len() < MAX_LAYERS => files.freeze(&mut disk).unwrap(),
            Step::Freeze => {}
            Step::Merge { first, count, top } => files.merge(&mut disk, first, count, top),
            // Writes that are not frozen are lost with their VM: a clone starts from frozen
            // layers only.
            Step::Reopen => {
                files.freeze(&mut disk).unwrap();
                disk = files.open_fresh();
            }
            Step::End => {
                drop(disk);
                disk = Disk::open_again(files.spec()).unwrap();
            }
        }
        let writable = disk.frozen_layers() as u8 + 1;
        let in_it = |block: &u64| disk.index()[*block as usize] == writable;
        let written: Vec<u64> = disk.written().runs().flatten().collect();
        prop_assert_eq!(written, (0..BLOCKS).filter(in_it).collect::<Vec<_>>());
    }
    prop_assert_eq!(read(&disk, 0, model.len()).unwrap(), model);
    Ok(())
}

impl Files {
    /// Opens the disk as a clone does: with a fresh writable layer.
    fn open_fresh(&mut self) -> Disk {
        self.writable = file();
        self.open().unwrap()
    }
}

#[test]
fn layers_that_are_not_those_of_the_disk_do_not_get_under_it() {
    let mut files = Files::new(SIZE);
    let mut disk = files.open().unwrap();
    for block in 0..3 {
        write(&mut disk, block * DISK_BLOCK_BYTES, vec![block as u8 + 1; 4096]).unwrap();
        files.freeze(&mut disk).unwrap();
    }
    let layers = |places: &[usize]| -> Vec<LayerSpec> {
        let mut all: Vec<_> = files.spec().layers.into_iter().map(Some).collect();
        places.iter().map(|at| all[*at].take().unwrap()).collect()
    };
    let same = |disk: &Disk| {
        assert_eq!(disk.frozen_layers(), 3);
        assert_eq!(read(disk, 0, 3 * 4096).unwrap(), [[1; 4096], [2; 4096], [3; 4096]].concat());
    };
    let (second, other) = (files.layers[1].0.as_fd(), file());
    let error = disk.rebase(other.as_fd(), layers(&[0, 1])).unwrap_err().to_string();
    assert!(error.contains("a frozen layer of this disk"), "{error}");
    same(&disk);
    let error = disk.rebase(second, layers(&[0])).unwrap_err();
    assert!(matches!(error, OpenDiskError::Differs { block: 1, was: 2, now: 0 }), "{error}");
    same(&disk);
    // Block 2 is in the third layer, which stays above.
    disk.rebase(second, layers(&[0, 1])).unwrap();
    same(&disk);
    disk.rebase(second, layers(&[1, 0])).unwrap();
    same(&disk);
    let foreign = file();
    (&foreign).write_all(&LayerMap::empty(BLOCKS + 1).unwrap().encode()).unwrap();
    let maps = [files.layers[0].1.as_fd(), foreign.as_fd()];
    assert!(matches!(Merge::of(&maps), Err(MergeError::Blocks { number: 2, .. })));
    assert!(matches!(Merge::of(&[]), Err(MergeError::Count(0))));
    assert!(matches!(Merge::of(&[other.as_fd()]), Err(MergeError::Map { number: 1, .. })));
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
    assert!(
        matches!(Disk::open(spec), Err(OpenDiskError::File { .. })),
        "a base longer than the disk"
    );
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
fn a_frozen_layer_is_open_for_reading_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("layer");
    drop(File::create_new(&path).unwrap());
    let open = || File::options().read(true).write(true).open(&path).unwrap();
    let mut files = Files { writable: open(), ..Files::new(SIZE) };
    let mut disk = files.open().unwrap();
    drop(std::mem::replace(&mut files.writable, file()));
    write(&mut disk, 4096, vec![7; 4096]).unwrap();

    let (map, next, read_only) = (file(), file(), File::open(&path).unwrap());
    let (again, other) = (open(), folder.path().join("other"));
    drop(File::create_new(&other).unwrap());
    // The layer itself, open for writing; another file, open for reading only.
    for wrong in [&again, &map, &File::open(&other).unwrap()] {
        let refused = disk.check_read_only(wrong.as_fd());
        assert!(matches!(refused, Err(FreezeError::File(_))), "{refused:?}");
    }
    drop(again);
    disk.check_read_only(read_only.as_fd()).unwrap();
    disk.prepare_freeze(map.as_fd(), next.as_fd()).unwrap();
    disk.freeze(next.into());
    assert_eq!(writers(&read_only).unwrap(), Writers::Some);
    drop(disk.keep_read_only(read_only.try_clone().unwrap().into()));
    assert_eq!(writers(&read_only).unwrap(), Writers::None);
    assert_eq!(read(&disk, 4096, 4096).unwrap(), [7; 4096]);
    write(&mut disk, 4096, vec![8; 4096]).unwrap();
    let mut below = [0; 4096];
    read_only.read_exact_at(&mut below, 4096).unwrap();
    assert_eq!(below, [7; 4096]);
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
    let refused = read_only.prepare_freeze(file().as_fd(), file().as_fd());
    assert!(matches!(refused, Err(FreezeError::ReadOnly)), "{refused:?}");
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
fn a_full_host_is_an_error_and_the_old_bytes_stay() {
    // RLIMIT_FSIZE would signal the whole test process; a sealed memfd refuses to grow past its
    // size instead.
    let files = Files::new(SIZE);
    let sealed = rustix::fs::memfd_create("full", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    let spec = DiskSpec { writable: Some(sealed.try_clone().unwrap()), ..files.spec() };
    let mut disk = Disk::open(spec).unwrap();
    rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
    let before = read(&disk, 0, 16384).unwrap();
    assert!(write(&mut disk, 512, vec![3; 8192]).is_err());
    assert_eq!(read(&disk, 0, 16384).unwrap(), before);
    assert_eq!(disk.written().runs().count(), 0);
}
