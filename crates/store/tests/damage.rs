//! Damage to every file that a snapshot in pages depends on: truncated at every offset, 10,000 bits
//! flipped, wrong counts. Every read is refused or right, and nothing panics. Allocations are
//! counted, so that no wrong count makes the process allocate.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

use dayfly_store::{
    ChainLayer, Digest, DiskSpec, ImageConfig, ImageSpec, KernelRef, PagedSpec, SnapshotSpec,
    Store, sparse,
};
use dayfly_units::{CpuModel, Name, VmId};
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The largest single allocation in bytes since the last reset to 0.
static LARGEST: AtomicUsize = AtomicUsize::new(0);
const MOST: usize = 64 << 20;

struct Counting;

// SAFETY: every call is passed unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps `GlobalAlloc`'s contract, which is `System`'s.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The tests share one counter.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

const FRAMES: usize = 25;

/// RAM with zeroes, noise, text, and two blocks of the disk.
fn ram(disk: &[u8]) -> Vec<u8> {
    let mut ram = vec![0; FRAMES * 4096];
    let mut noise = blake3::Hasher::new().finalize_xof();
    for frame in 0..FRAMES {
        let page = &mut ram[frame * 4096..][..4096];
        match frame % 5 {
            0 => {}
            1 => noise.fill(page),
            4 if frame > 10 => page.copy_from_slice(&disk[4096..8192]),
            _ => {
                noise.fill(&mut page[..200]);
                page[200..].fill(b'x');
            }
        }
    }
    ram
}

/// A store with the snapshot `base` of tenant `one`, and the snapshot's RAM.
fn sample(root: &Path) -> (Store, Vec<u8>) {
    let store = Store::open(root).unwrap();
    let disk: Vec<u8> = (0..8_u8).flat_map(|n| [n; 4096]).collect();
    let scratch = tempfile::tempfile().unwrap();
    let digest = sparse::copy(&mut &disk[..], &scratch, disk.len() as u64).unwrap().digest;
    let config = ImageConfig::default();
    let spec = ImageSpec {
        size_bytes: disk.len() as u64,
        digest,
        source: String::new(),
        config: config.clone(),
    };
    store.put_image_raw(&name("debian"), &spec, &mut disk.as_slice()).unwrap();
    let ram = ram(&disk);
    let vm = VmId::random();
    let (layer, data) = store.create_vm_layer(vm, 0).unwrap();
    data.write_all_at(&[77; 4096], 0).unwrap();
    let mut writer = store.snapshot_writer(&name("base")).unwrap();
    let freeze = writer.freeze(&layer).unwrap();
    freeze.map.write_all_at(&[1; 100], 0).unwrap();
    drop((data, freeze.map));
    writer.state().write_all_at(&[2; 300], 0).unwrap();
    writer.memory().write_all_at(&ram, 0).unwrap();
    let image = store.image(&name("debian")).unwrap().reference();
    let layers: Vec<ChainLayer> = vec![freeze.frozen];
    let disks = vec![DiskSpec { image, size_bytes: disk.len() as u64, writable: true, layers }];
    let spec = SnapshotSpec {
        parent: None,
        ancestors: Vec::new(),
        kernel: KernelRef {
            name: name("6.12"),
            release: "6.12".to_owned(),
            digest: Digest([7; 32]),
        },
        vcpus: 1,
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
        nets: 0,
        memory_bytes: ram.len() as u64,
        agent_version: "0".to_owned(),
        config,
        labels: [].into(),
        egress: None,
        disks,
    };
    writer.saved().commit_paged(&spec, &PagedSpec::of(&name("one"))).unwrap();
    store.remove_vm(vm).unwrap();
    (store, ram)
}

/// The manifest, the state, the table, the pack and the block indexes.
fn files(root: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = ["manifest", "state", "table"]
        .iter()
        .map(|f| root.join("snapshots/base").join(f))
        .collect();
    for folder in ["pages/one", "blocks"] {
        files.extend(fs::read_dir(root.join(folder)).unwrap().map(|e| e.unwrap().path()));
    }
    for file in &files {
        fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
    }
    files
}

/// Whether an error text names the expected value or the missing file.
fn names_damage(text: &str) -> bool {
    ["expected", "missing", "header says"].iter().any(|word| text.contains(word))
}

/// Opens the store anew and restores the snapshot: `true` if RAM came back, `false` if it was
/// refused. Everything else fails the test.
fn served(root: &Path, ram: &[u8], at: &str) -> bool {
    LARGEST.store(0, Ordering::Relaxed);
    let store = Store::open(root).unwrap();
    let to = File::from(rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let whole = match store.open_snapshot_pages(&name("one"), &name("base")) {
        Err(error) => {
            assert!(names_damage(&error.to_string()), "{at}: {error}");
            false
        }
        Ok(open) => match open.materialise(&to) {
            Ok(_) => true,
            Err(error) => {
                let text = error.to_string();
                assert!(names_damage(&text), "{at}: {text}");
                false
            }
        },
    };
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest <= MOST, "{at}: an allocation of {largest} bytes");
    // Every page that was written is right; the others are holes.
    let mut got = vec![0; ram.len()];
    let length = usize::try_from(to.metadata().unwrap().len()).unwrap().min(got.len());
    to.read_exact_at(&mut got[..length], 0).unwrap();
    for (frame, (got, right)) in got.chunks(4096).zip(ram.chunks(4096)).enumerate() {
        assert!(got == right || got.iter().all(|b| *b == 0), "{at}: frame {frame} is wrong");
        assert!(!whole || got == right, "{at}: frame {frame} is missing");
    }
    whole
}

/// A damaged cache is made again; any other damage refuses the snapshot.
fn judge(root: &Path, file: &Path, ram: &[u8], at: &str) -> bool {
    let served = served(root, ram, at);
    assert_eq!(
        served,
        file.starts_with(root.join("blocks")),
        "{at}: {}",
        if served { "served" } else { "refused" }
    );
    served
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

#[test]
fn every_truncation_and_ten_thousand_flipped_bits_are_refused_before_a_byte_is_served() {
    let _alone = ONE_AT_A_TIME.lock();
    let root = folder();
    let (store, ram) = sample(root.path());
    drop(store);
    let files = files(root.path());
    assert_eq!(files.len(), 6);
    assert!(served(root.path(), &ram, "untouched"));
    let (mut cuts, mut flips, mut refused) = (0, 0, 0);
    for file in &files {
        let whole = fs::read(file).unwrap();
        for length in 0..whole.len() {
            File::options().write(true).open(file).unwrap().set_len(length as u64).unwrap();
            refused += usize::from(!judge(
                root.path(),
                file,
                &ram,
                &format!("{} cut to {length}", file.display()),
            ));
            cuts += 1;
            fs::write(file, &whole).unwrap();
        }
    }
    let mut random = blake3::Hasher::new().update(b"flips").finalize_xof();
    let mut next = move || {
        let mut bytes = [0; 8];
        random.fill(&mut bytes);
        usize::try_from(u64::from_le_bytes(bytes) >> 1).unwrap()
    };
    let contents: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    for _ in 0..10_000 {
        let n = next() % files.len();
        let bit = next() % (contents[n].len() * 8);
        let file = File::options().write(true).open(&files[n]).unwrap();
        file.write_all_at(&[contents[n][bit / 8] ^ (1 << (bit % 8))], (bit / 8) as u64).unwrap();
        let at = format!("{} with bit {bit} flipped", files[n].display());
        refused += usize::from(!judge(root.path(), &files[n], &ram, &at));
        file.write_all_at(&contents[n][bit / 8..=bit / 8], (bit / 8) as u64).unwrap();
        flips += 1;
    }
    assert!(served(root.path(), &ram, "mended"));
    println!(
        "{cuts} truncations and {flips} flips: {refused} refused, \
         the others in a cache that is not read here"
    );
}

/// Block indexes are read when a snapshot is put.
#[test]
fn a_damaged_index_of_blocks_is_made_again_when_it_is_used() {
    let _alone = ONE_AT_A_TIME.lock();
    let root = folder();
    let (store, _) = sample(root.path());
    for file in files(root.path()).iter().filter(|f| f.starts_with(root.path().join("blocks"))) {
        let whole = fs::read(file).unwrap();
        for bit in (0..whole.len() * 8).step_by(97) {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            fs::write(file, flipped).unwrap();
            LARGEST.store(0, Ordering::Relaxed);
            let disk = store.open_snapshot_pages(&name("one"), &name("base")).unwrap();
            let layers = vec![vec![
                dayfly_store::DiskLayer {
                    file: &disk.disks[0].base,
                    digest: disk.disks[0].image.digest,
                },
                dayfly_store::DiskLayer {
                    file: &disk.disks[0].layers[0].data,
                    digest: disk.disks[0].layers[0].layer.data.digest,
                },
            ]];
            let memory = tempfile::tempfile().unwrap();
            memory.write_all_at(&[3; 4096], 0).unwrap();
            memory.write_all_at(&[77; 4096], 4096).unwrap();
            let spec = dayfly_store::MemorySpec {
                memory: &memory,
                known: dayfly_store::Known::default(),
                disks: &layers,
            };
            let put = store.tenant(&name("one")).unwrap().put_memory(&spec).unwrap();
            assert_eq!(put.stats.pages, 0, "bit {bit}: both pages are on disk");
            assert_eq!(fs::read(file).unwrap(), whole, "bit {bit}");
            assert!(LARGEST.load(Ordering::Relaxed) <= MOST, "bit {bit}");
            fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
        }
    }
}

/// Wrong counts behind valid seals.
#[test]
fn lying_counts_do_not_make_it_allocate() {
    let _alone = ONE_AT_A_TIME.lock();
    let root = folder();
    let (store, ram) = sample(root.path());
    drop(store);
    let files = files(root.path());
    let (table, pack) = (&files[2], &files[3]);
    let mut forged = 0;
    for (file, magic, fields) in
        [(table, b"DFtable\n", &[0, 4, 8, 12, 152][..]), (pack, b"DFpack\r\n", &[0, 4, 72][..])]
    {
        let whole = fs::read(file).unwrap();
        let end = if file == pack { whole.len() - 48 } else { whole.len() };
        let at = if file == pack {
            usize::try_from(u64::from_le_bytes(std::array::from_fn(|n| whole[end + 8 + n])))
                .unwrap()
        } else {
            0
        };
        for &field in fields {
            for lie in [0, 1 << 14, 1 << 20, 1 << 26, 1 << 28, u32::MAX] {
                let mut payload = whole[at + 96..end].to_vec();
                payload[field..field + 4].copy_from_slice(&u32::to_le_bytes(lie));
                let sealed = dayfly_units::sealed::seal(magic, 1, &payload);
                fs::write(file, [&whole[..at], &sealed, &whole[end..]].concat()).unwrap();
                let at = format!("{} with {lie} at byte {field} of its payload", file.display());
                assert!(!served(root.path(), &ram, &at), "{at}: served");
                forged += 1;
            }
        }
        fs::write(file, &whole).unwrap();
    }
    assert!(served(root.path(), &ram, "mended"));
    println!("{forged} lies were refused, with no allocation above {MOST} bytes");
}
