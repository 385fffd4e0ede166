//! A pager over a real store: what clones of one template read, and what they get where a pack or a disk is damaged.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure is told")]

use dayfly_pager::guest::{self, Guest};
use dayfly_pager::policy::Policy;
use dayfly_pager::serve;
use dayfly_pager::source::{Layout, Put, Source, SourceError};
use dayfly_pager::stored::{Expected, Stored};
use dayfly_pager::template::Template;
use dayfly_pager::wire::{Settings, pair};
use dayfly_store::{
    ChainLayer, Digest, DiskSpec, ImageConfig, ImageSpec, KernelRef, PageReader, PagedSpec, Plan,
    SnapshotSpec, Store, sparse,
};
use dayfly_units::{Name, VmId};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const FRAMES: u32 = 2048;
const BLOCKS: u32 = 512;

/// What a frame has: every seventh is zero, half of the upper half is what a disk has, some come twice.
fn content(frame: u32) -> Vec<u8> {
    match frame {
        f if f % 7 == 0 => vec![0; PAGE],
        f if f >= FRAMES / 2 && f / 32 % 2 == 0 => block(f % BLOCKS),
        f => noise(if f % 29 == 0 { 29 } else { f }, if f % 3 == 0 { PAGE } else { 700 }),
    }
}

fn block(number: u32) -> Vec<u8> {
    noise(number | 1 << 31, PAGE)
}

fn noise(seed: u32, bytes: usize) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    for (n, chunk) in (0_u32..).zip(page[..bytes].chunks_mut(32)) {
        let digest = Digest::of(&[seed.to_le_bytes(), n.to_le_bytes()].concat());
        chunk.copy_from_slice(&digest.0[..chunk.len()]);
    }
    page
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// A snapshot's plan, and the folder that it is in.
fn planned() -> (tempfile::TempDir, Plan) {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let disk: Vec<u8> = (0..BLOCKS).flat_map(block).collect();
    let scratch = tempfile::tempfile().unwrap();
    let size_bytes = disk.len() as u64;
    let digest = sparse::copy(&mut &disk[..], &scratch, size_bytes).unwrap().digest;
    let spec = ImageSpec { size_bytes, digest, source: String::new(), config: ImageConfig::default() };
    store.put_image_raw(&name("debian"), &spec, &mut disk.as_slice()).unwrap();
    let vm = VmId::random();
    let (layer, data) = store.create_vm_layer(vm, 0).unwrap();
    data.set_len(size_bytes).unwrap();
    let memory_bytes = u64::from(FRAMES) * PAGE as u64;
    let mut writer = store.snapshot_writer_in_memory(&name("s"), memory_bytes).unwrap();
    let freeze = writer.freeze(&layer).unwrap();
    freeze.map.write_all_at(&[1; 100], 0).unwrap();
    writer.state().write_all_at(&[2; 300], 0).unwrap();
    for frame in 0..FRAMES {
        writer.memory().write_all_at(&content(frame), u64::from(frame) * PAGE as u64).unwrap();
    }
    let image = store.image(&name("debian")).unwrap().reference();
    let layers = vec![ChainLayer::clone(&freeze.frozen)];
    let spec = SnapshotSpec {
        parent: None,
        kernel: KernelRef { name: name("6.12"), release: "6.12".into(), digest: Digest([7; 32]) },
        vcpus: 1,
        nets: 0,
        memory_bytes,
        agent_version: "0".into(),
        config: ImageConfig::default(),
        labels: [].into(),
        disks: vec![DiskSpec { image, size_bytes, writable: true, layers }],
    };
    writer.saved().commit_paged(&spec, &PagedSpec::of(&name("one"))).unwrap();
    store.remove_vm(vm).unwrap();
    let (_, plan) = store.open_lazily(&name("s")).unwrap();
    (root, plan.unwrap())
}

fn reader(plan: &Plan, packs: Vec<File>, disks: Vec<Vec<File>>) -> PageReader {
    PageReader::open(&plan.table, &plan.places, packs, disks).unwrap()
}

fn again(files: &[File]) -> Vec<File> {
    files.iter().map(|file| file.try_clone().unwrap()).collect()
}

fn disks(plan: &Plan) -> Vec<Vec<File>> {
    plan.disks.iter().map(|files| again(files)).collect()
}

/// A source that others look at.
struct Watched {
    stored: Arc<Stored>,
    fetched: Arc<Vec<AtomicU32>>,
}

impl Source for Watched {
    fn layout(&self) -> &Layout {
        self.stored.layout()
    }

    fn read_bytes(&self) -> u64 {
        self.stored.read_bytes()
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        self.fetched[batch as usize].fetch_add(1, Ordering::SeqCst);
        self.stored.fetch(batch, put)
    }
}

/// A pager of this process.
struct Room {
    daemon: OwnedFd,
    memory: File,
    stored: Arc<Stored>,
    fetched: Arc<Vec<AtomicU32>>,
    pager: thread::JoinHandle<Result<(), serve::ServeError>>,
}

impl Room {
    fn new(reader: PageReader, policy: Policy, first: &[u32]) -> Self {
        let memory = guest::memory(u64::from(FRAMES) * PAGE as u64).unwrap();
        let stored = Arc::new(Stored::new(
            reader,
            &Expected { first: first.to_vec(), ..Expected::default() },
            &policy,
        ));
        let fetched = Arc::new(stored.layout().batches.iter().map(|_| AtomicU32::new(0)).collect::<Vec<_>>());
        let watched = Watched { stored: stored.clone(), fetched: fetched.clone() };
        let template = Template::new(memory.try_clone().unwrap(), watched).unwrap();
        let settings = Settings { policy, retry_ms: 0, ..Settings::default() };
        let (daemon, theirs) = pair().unwrap();
        let first = first.to_vec();
        let pager = thread::spawn(move || serve::fill(template, &first, settings, theirs));
        Self { daemon, memory, stored, fetched, pager }
    }

    fn clone(&self, vmm: &Vmm) -> Guest {
        let guest = Guest::new(&self.daemon, &self.memory, vmm.pidfd.as_fd(), &vmm.exit).unwrap();
        assert!(guest.tell(&guest.regions(), guest.uffd()).unwrap().is_some());
        guest
    }

    fn end(self) {
        drop(self.daemon);
        self.pager.join().unwrap().unwrap();
    }
}

/// What stands for a VMM: a process, and its exit record.
struct Vmm {
    process: Child,
    pidfd: OwnedFd,
    exit: File,
}

impl Vmm {
    fn new() -> Self {
        let process = Command::new("sleep").arg("1000").spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&process), PidfdFlags::empty()).unwrap();
        Self { process, pidfd, exit: tempfile::tempfile().unwrap() }
    }

    fn cause(&self) -> Option<String> {
        let mut text = vec![0; usize::try_from(self.exit.metadata().unwrap().len()).unwrap()];
        self.exit.read_exact_at(&mut text, 0).unwrap();
        (!text.is_empty()).then(|| String::from_utf8(text).unwrap())
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Frames below [`FRAMES`] in no order.
fn shuffled(seed: u32) -> impl Iterator<Item = u32> {
    (0..FRAMES).map(move |k| (k.wrapping_mul(0x9e37_79b1).wrapping_add(seed * 7919)) % FRAMES)
}

#[test]
fn sixty_four_clones_read_what_one_would() {
    let (_root, plan) = planned();
    let policy = Policy { background: false, beside: 0, ..Policy::default() };
    // The working set is of another part of RAM than what is touched.
    let first: Vec<u32> = (0..300).map(|n| n * 3 % (FRAMES / 4)).collect();
    let touched = |frame: &u32| *frame >= FRAMES / 4 && (frame / 64).is_multiple_of(2);
    let read = |clones: u32| {
        let room = Room::new(reader(&plan, again(&plan.packs), disks(&plan)), policy, &first);
        let vmms: Vec<Vmm> = (0..clones).map(|_| Vmm::new()).collect();
        let guests: Vec<Guest> = vmms.iter().map(|vmm| room.clone(vmm)).collect();
        thread::scope(|scope| {
            for (seed, guest) in (0..).zip(&guests) {
                // Each two thirds of it; one alone all.
                let mine =
                    move |frame: &u32| touched(frame) && (clones == 1 || !(frame + seed).is_multiple_of(3));
                scope.spawn(move || {
                    for frame in shuffled(seed).filter(mine) {
                        assert!(guest.read(frame)[..] == content(frame), "frame {frame}");
                    }
                });
            }
        });
        // The working set comes whether or not anybody waits for it.
        let last = |frame: &u32| room.stored.layout().batch_of.get(*frame as usize).copied();
        let until = Instant::now() + Duration::from_secs(20);
        let there =
            |batch: u32| room.fetched.get(batch as usize).is_none_or(|n| n.load(Ordering::SeqCst) > 0);
        while !first.iter().filter_map(last).all(there) {
            assert!(Instant::now() < until, "the working set does not come");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(vmms.iter().all(|vmm| vmm.cause().is_none()));
        assert!(room.fetched.iter().all(|n| n.load(Ordering::SeqCst) <= 1), "a batch was fetched twice");
        let wanted = (0..FRAMES).filter(|frame| touched(frame) || first.contains(frame));
        let wanted: std::collections::BTreeSet<u32> = wanted.filter_map(|frame| last(&frame)).collect();
        let fetched = room.fetched.iter().filter(|n| n.load(Ordering::SeqCst) > 0).count();
        let wanted = wanted.into_iter().filter(|batch| (*batch as usize) < room.fetched.len()).count();
        assert_eq!(fetched, wanted, "what nobody wants was fetched");
        let stored = room.stored.clone();
        // A pager without a daemon ends with its last clone.
        drop((guests, vmms));
        room.end();
        stored.read_bytes()
    };
    let (one, many) = (read(1), read(64));
    println!("one clone read {one} bytes, 64 clones {many}");
    assert!(many * 100 <= one * 102, "one clone read {one} bytes, 64 clones {many}");
}

/// A copy of a file in memory, to damage it.
fn copied(file: &File) -> File {
    let length = file.metadata().unwrap().len();
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let copy = File::from(rustix::fs::memfd_create("copy", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    copy.write_all_at(&bytes, 0).unwrap();
    copy
}

/// The same file, only to be written: every read fails.
fn unreadable(file: &File) -> File {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().write(true).open(path).unwrap()
}

/// A clone that touches everything, with pages out of these files: frames it could have before it was killed, and why it was.
fn walked(reader: PageReader, policy: Policy, seed: u32) -> (u32, Option<String>) {
    let room = Room::new(reader, policy, &[]);
    let vmm = Vmm::new();
    let guest = room.clone(&vmm);
    let mut right = 0;
    for frame in shuffled(seed) {
        if guest.read(frame)[..] == content(frame) {
            right += 1;
            continue;
        }
        assert!(vmm.cause().is_some(), "wrong bytes in frame {frame}, and nobody was killed");
        break;
    }
    drop(guest);
    let cause = vmm.cause();
    drop(vmm);
    room.end();
    (right, cause)
}

#[test]
fn a_clone_never_reads_what_is_damaged_in_a_real_pack_or_disk() {
    let (_root, plan) = planned();
    let background = Policy { working_set: false, ..Policy::default() };
    let whole = || reader(&plan, again(&plan.packs), disks(&plan));
    let policies = [background, Policy::MINIMAL, Policy::colour([4; 16])];
    for policy in policies {
        assert_eq!(walked(whole(), policy, 0), (FRAMES, None));
    }
    let (counted, killed) = (AtomicU32::new(0), AtomicU32::new(0));
    let next = Mutex::new(0_u32);
    let pack = &plan.packs[0];
    let length = u32::try_from(pack.metadata().unwrap().len()).unwrap();
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                loop {
                    let n = {
                        let mut next = next.lock().unwrap();
                        *next += 1;
                        *next - 1
                    };
                    if n >= 240 {
                        break;
                    }
                    // A byte anywhere in a pack; one of its index is found out when it is opened, before anybody is served.
                    let at = u64::from(n * (length / 240));
                    let (mut packs, mut disks) = (again(&plan.packs), disks(&plan));
                    let damaged = if n % 40 == 7 { &mut disks[0][0] } else { &mut packs[0] };
                    let copy = copied(damaged);
                    *damaged = match n % 80 {
                        // Disks are verified whole when a snapshot is opened; a block that cannot be read afterwards is another matter.
                        7 => unreadable(&copy),
                        47 => {
                            copy.set_len(u64::from(n) * PAGE as u64).unwrap();
                            copy
                        }
                        _ => {
                            let mut byte = [0];
                            copy.read_exact_at(&mut byte, at).unwrap();
                            copy.write_all_at(&[byte[0] ^ (1 << (n % 8))], at).unwrap();
                            copy
                        }
                    };
                    let Ok(reader) = PageReader::open(&plan.table, &plan.places, packs, disks) else {
                        continue;
                    };
                    let (right, cause) = walked(reader, policies[n as usize % policies.len()], n);
                    counted.fetch_add(1, Ordering::SeqCst);
                    if let Some(cause) = cause {
                        killed.fetch_add(1, Ordering::SeqCst);
                        assert!(
                            right < FRAMES
                                && ["group", "page", "disk"].iter().any(|what| cause.contains(what)),
                            "{cause}"
                        );
                    } else {
                        // A byte between groups that nobody reads.
                        assert_eq!(right, FRAMES);
                    }
                }
            });
        }
    });
    let (counted, killed) = (counted.into_inner(), killed.into_inner());
    println!("{counted} damaged packs and disks, {killed} clones killed, no wrong byte");
    assert!(killed > 150 && counted >= killed, "{killed} of {counted}");
}
