//! A pager over a real store: what clones of one template read, and what they read if a pack or a
//! disk is damaged.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

use dayfly_pager::client::Client;
use dayfly_pager::guest::{self, Guest};
use dayfly_pager::jail;
use dayfly_pager::policy::Policy;
use dayfly_pager::serve;
use dayfly_pager::source::{Layout, Put, Source, SourceError};
use dayfly_pager::stored::{Expected, Stored};
use dayfly_pager::template::Template;
use dayfly_pager::wire::{FromPager, Settings, pair};
use dayfly_store::{
    Digest, DiskFile, DiskSpec, ImageConfig, ImageSpec, KernelRef, PageReader, PagedSpec, Plan,
    SnapshotSpec, Store, sparse,
};
use dayfly_units::{CpuModel, Name, VmId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const FRAMES: u32 = 2048;
const BLOCKS: u32 = 512;

/// The content of a frame: every seventh is zero, half of the upper half equals disk blocks, and
/// some pages are duplicates.
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

/// A snapshot's plan, and the folder of its store.
fn planned() -> (tempfile::TempDir, Plan) {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let disk: Vec<u8> = (0..BLOCKS).flat_map(block).collect();
    let (scratch, size_bytes) = (tempfile::tempfile().unwrap(), disk.len() as u64);
    let digest = sparse::copy(&mut &disk[..], &scratch, size_bytes).unwrap().digest;
    let spec =
        ImageSpec { size_bytes, digest, source: String::new(), config: ImageConfig::default() };
    store.put_image_raw(&name("debian"), &spec, &mut disk.as_slice()).unwrap();
    let vm = VmId::random();
    let (layer, data) = store.create_vm_layer(vm, 0).unwrap();
    data.set_len(size_bytes).unwrap();
    let memory_bytes = u64::from(FRAMES) * PAGE as u64;
    let mut writer = store.snapshot_writer_in_memory(&name("s"), memory_bytes).unwrap();
    let freeze = writer.freeze(&layer).unwrap();
    freeze.map.write_all_at(&[1; 100], 0).unwrap();
    drop((data, freeze.map));
    writer.state().write_all_at(&[2; 300], 0).unwrap();
    for frame in 0..FRAMES {
        writer.memory().write_all_at(&content(frame), u64::from(frame) * PAGE as u64).unwrap();
    }
    let image = store.image(&name("debian")).unwrap().reference();
    let spec = SnapshotSpec {
        parent: None,
        ancestors: Vec::new(),
        kernel: KernelRef { name: name("6.12"), release: "6.12".into(), digest: Digest([7; 32]) },
        vcpus: 1,
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
        nets: 0,
        memory_bytes,
        agent_version: "0".into(),
        config: ImageConfig::default(),
        labels: [].into(),
        egress: None,
        disks: vec![DiskSpec { image, size_bytes, writable: true, layers: vec![freeze.frozen] }],
    };
    writer.saved().commit_paged(&spec, &PagedSpec::of(&name("one"))).unwrap();
    store.remove_vm(vm).unwrap();
    (root, store.open_lazily(&name("s")).unwrap().1.unwrap())
}

fn reader(plan: &Plan, packs: Vec<File>, disks: Vec<Vec<DiskFile>>) -> PageReader {
    PageReader::open(&plan.table, &plan.places, packs, disks).unwrap()
}

fn again(files: &[File]) -> Vec<File> {
    files.iter().map(|file| file.try_clone().unwrap()).collect()
}

fn disks(plan: &Plan) -> Vec<Vec<DiskFile>> {
    let again = |disk: &DiskFile| DiskFile {
        file: disk.file.try_clone().unwrap(),
        tree: disk.tree.as_ref().map(|tree| tree.try_clone().unwrap()),
    };
    plan.disks.iter().map(|files| files.iter().map(again).collect()).collect()
}

/// A source that counts fetches, shared with the test.
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

/// A pager in this process.
struct Room {
    daemon: OwnedFd,
    memory: File,
    stored: Arc<Stored>,
    fetched: Arc<Vec<AtomicU32>>,
    pager: thread::JoinHandle<Result<(), dayfly_pager::error::ServeError>>,
}

impl Room {
    fn new(reader: PageReader, policy: Policy, first: &[u32]) -> Self {
        let memory = guest::memory(u64::from(FRAMES) * PAGE as u64).unwrap();
        let stored = Arc::new(Stored::new(
            reader,
            &Expected { first: first.to_vec(), ..Expected::default() },
            &policy,
        ));
        let fetched =
            Arc::new(stored.layout().batches.iter().map(|_| AtomicU32::new(0)).collect::<Vec<_>>());
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
        assert!(guest.register(&guest.regions(), guest.uffd()).unwrap().is_some());
        guest
    }

    fn end(self) {
        drop(self.daemon);
        self.pager.join().unwrap().unwrap();
    }
}

/// A process in the role of a VMM, and its exit record.
struct Vmm {
    process: Child,
    pidfd: OwnedFd,
    exit: File,
}

impl Vmm {
    fn new() -> Self {
        // Another user, as VMMs have.
        let process = Command::new("sleep").arg("1000").uid(200_000).spawn().unwrap();
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

/// The frames below [`FRAMES`], shuffled.
fn shuffled(seed: u32) -> impl Iterator<Item = u32> {
    (0..FRAMES).map(move |k| (k.wrapping_mul(0x9e37_79b1).wrapping_add(seed * 7919)) % FRAMES)
}

#[test]
fn sixty_four_clones_read_what_one_would() {
    let (_root, plan) = planned();
    let policy = Policy { background: false, beside: 0, ..Policy::default() };
    // The working set is in another part of RAM than the touched frames.
    let first: Vec<u32> = (0..300).map(|n| n * 3 % (FRAMES / 4)).collect();
    let touched = |frame: &u32| *frame >= FRAMES / 4 && (frame / 64).is_multiple_of(2);
    let read = |clones: u32| {
        let room = Room::new(reader(&plan, again(&plan.packs), disks(&plan)), policy, &first);
        let vmms: Vec<Vmm> = (0..clones).map(|_| Vmm::new()).collect();
        let guests: Vec<Guest> = vmms.iter().map(|vmm| room.clone(vmm)).collect();
        thread::scope(|scope| {
            for (seed, guest) in (0..).zip(&guests) {
                // Each clone touches two thirds of the frames; a single clone touches all.
                let mine = move |frame: &u32| {
                    touched(frame) && (clones == 1 || !(frame + seed).is_multiple_of(3))
                };
                scope.spawn(move || {
                    for frame in shuffled(seed).filter(mine) {
                        assert!(guest.read(frame)[..] == content(frame), "frame {frame}");
                    }
                });
            }
        });
        // The working set is fetched even if no clone waits for it.
        let last = |frame: &u32| room.stored.layout().batch_of.get(*frame as usize).copied();
        let until = Instant::now() + Duration::from_secs(120);
        let there = |batch: u32| {
            room.fetched.get(batch as usize).is_none_or(|n| n.load(Ordering::SeqCst) > 0)
        };
        while !first.iter().filter_map(last).all(there) {
            assert!(Instant::now() < until, "the working set does not come");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(vmms.iter().all(|vmm| vmm.cause().is_none()));
        assert!(
            room.fetched.iter().all(|n| n.load(Ordering::SeqCst) <= 1),
            "a batch was fetched twice"
        );
        let wanted = (0..FRAMES).filter(|frame| touched(frame) || first.contains(frame));
        let wanted: std::collections::BTreeSet<u32> =
            wanted.filter_map(|frame| last(&frame)).collect();
        let fetched = room.fetched.iter().filter(|n| n.load(Ordering::SeqCst) > 0).count();
        let wanted =
            wanted.into_iter().filter(|batch| (*batch as usize) < room.fetched.len()).count();
        assert_eq!(fetched, wanted, "unwanted frames were fetched");
        let stored = room.stored.clone();
        // A pager without a daemon ends with its last clone.
        drop((guests, vmms));
        room.end();
        stored.read_bytes()
    };
    let (one, many) = (read(1), read(64));
    assert!(many * 100 <= one * 102, "one clone read {one} bytes, 64 clones {many}");
}

/// A copy of a file in memory, to be damaged.
fn copied(file: &File) -> File {
    let length = file.metadata().unwrap().len();
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let copy =
        File::from(rustix::fs::memfd_create("copy", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    copy.write_all_at(&bytes, 0).unwrap();
    copy
}

/// A write-only descriptor of the file: every read fails.
fn unreadable(file: &File) -> File {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().write(true).open(path).unwrap()
}

/// A clone that touches every frame, with pages from these files. Returns the number of right
/// frames before it was killed, and the cause.
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
        assert!(vmm.cause().is_some(), "wrong bytes in frame {frame}, and no clone was killed");
        break;
    }
    // Before the memory is unmapped: the pager may still release it, and reports it missing.
    let cause = vmm.cause();
    drop(guest);
    drop(vmm);
    room.end();
    (right, cause)
}

/// The plan's files, one of them damaged: a byte of a pack at `at`, or the image or its hash tree.
fn hurt(plan: &Plan, n: u32, at: u64) -> (Vec<File>, Vec<Vec<DiskFile>>) {
    let (mut packs, mut disks) = (again(&plan.packs), disks(plan));
    let image = &mut disks[0][0];
    let (damaged, at) = match n % 80 {
        7 | 27 | 47 => (&mut image.file, u64::from(n)),
        67 => (&mut image.tree.as_mut().unwrap().file, 4096 + u64::from(n)),
        _ => (&mut packs[0], at),
    };
    let copy = copied(damaged);
    let mut byte = [0];
    copy.read_exact_at(&mut byte, at).unwrap();
    match n % 80 {
        47 => copy.set_len(u64::from(n) * PAGE as u64).unwrap(),
        _ => copy.write_all_at(&[byte[0] ^ (1 << (n % 8))], at).unwrap(),
    }
    *damaged = if n % 80 == 7 { unreadable(&copy) } else { copy };
    (packs, disks)
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
                    let (packs, disks) = hurt(&plan, n, u64::from(n * (length / 240)));
                    let Ok(reader) = PageReader::open(&plan.table, &plan.places, packs, disks)
                    else {
                        continue;
                    };
                    let (right, cause) = walked(reader, policies[n as usize % policies.len()], n);
                    let of_image = cause.as_ref().is_some_and(|c| c.contains("layer 0 of disk 0"));
                    assert!(of_image || !matches!(n % 80, 7 | 27 | 47 | 67), "{n}: {cause:?}");
                    counted.fetch_add(1, Ordering::SeqCst);
                    if let Some(cause) = cause {
                        killed.fetch_add(1, Ordering::SeqCst);
                        assert!(
                            right < FRAMES
                                && ["group", "page", "disk"]
                                    .iter()
                                    .any(|what| cause.contains(what)),
                            "{cause}"
                        );
                    } else {
                        // The damaged byte is read by no group.
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

/// The program, with `theirs` as its connection. Nothing reads its messages.
fn program(theirs: OwnedFd) -> Child {
    const NUMBER: i32 = 900;
    let number = theirs.as_raw_fd();
    assert_ne!(number, NUMBER);
    let mut command = Command::new(env!("CARGO_BIN_EXE_dayfly-pager"));
    command.arg(NUMBER.to_string()).stderr(Stdio::piped());
    // SAFETY: the child makes one system call.
    unsafe {
        command.pre_exec(move || {
            let copied = libc::dup2(number, NUMBER);
            if copied == NUMBER { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    let mut child = command.spawn().unwrap();
    // stderr is now a closed pipe.
    drop(child.stderr.take());
    child
}

/// A line of a process's status, without its name.
fn status(process: &Child, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_program_serves_and_kills_from_its_jail() {
    let (_root, mut plan) = planned();
    let memory = plan.memory.try_clone().unwrap();
    // One block of the disk cannot be read.
    plan.disks[0][0].file = unreadable(&plan.disks[0][0].file);
    let (ours, theirs) = pair().unwrap();
    let mut pager = program(theirs);
    let policy = Policy { background: false, beside: 0, ..Policy::default() };
    let settings = Settings { policy, retry_ms: 0, ..Settings::default() };
    // The connection stays open for announcing clones.
    // SAFETY: `ours` is open until the end of this function.
    let daemon = unsafe { BorrowedFd::borrow_raw(ours.as_raw_fd()) }.try_clone_to_owned().unwrap();
    let client = Client::begin(ours, &plan, &[], &[], settings).unwrap();
    let user = jail::USER;
    assert_eq!(status(&pager, "Uid:"), format!("{user} {user} {user} {user}"));
    assert_eq!(status(&pager, "Gid:"), format!("{user} {user} {user} {user}"));
    assert_eq!(status(&pager, "Groups:"), "");
    // CAP_KILL is capability 5.
    for set in ["CapPrm:", "CapEff:"] {
        assert_eq!(status(&pager, set), format!("{:016x}", 1 << 5));
    }
    for set in ["CapInh:", "CapAmb:"] {
        assert_eq!(status(&pager, set), format!("{:016x}", 0));
    }
    assert_eq!((&*status(&pager, "Seccomp:"), &*status(&pager, "NoNewPrivs:")), ("2", "1"));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", pager.id())).unwrap();
    for name in ["Max core file size", "Max file size", "Max address space", "Max open files"] {
        let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(!line.contains("unlimited"), "{line}");
    }
    let clone = |vmm: &Vmm| {
        let guest = Guest::new(&daemon, &memory, vmm.pidfd.as_fd(), &vmm.exit).unwrap();
        assert!(guest.register(&guest.regions(), guest.uffd()).unwrap().is_some());
        guest
    };
    let (lives, dies) = (Vmm::new(), Vmm::new());
    let (guest, stuck) = (clone(&lives), clone(&dies));
    let on_disk = |frame: &u32| {
        let (zero, disk) = (frame.is_multiple_of(7), (frame / 32).is_multiple_of(2));
        *frame >= FRAMES / 2 && disk && !zero
    };
    for frame in shuffled(1).filter(|frame| !on_disk(frame)) {
        assert!(guest.read(frame)[..] == content(frame), "frame {frame}");
    }
    assert!(lives.cause().is_none());
    // The pager writes a message about the batch, the exit record, and kills.
    let missing = (0..FRAMES).find(on_disk).unwrap();
    let stuck = thread::spawn(move || (stuck.touch(missing), stuck));
    let mut ended = [PollFd::new(&dies.pidfd, PollFlags::IN)];
    let killed = poll(&mut ended, Some(&Timespec { tv_sec: 120, tv_nsec: 0 })).unwrap();
    assert_eq!(killed, 1, "it was not killed");
    let stuck = stuck.join().unwrap();
    assert!(dies.cause().unwrap().contains("disk"), "{:?}", dies.cause());
    assert!(pager.try_wait().unwrap().is_none(), "the pager ended");
    assert!(guest.read(1)[..] == content(1));
    drop((guest, stuck, lives, dies, daemon));
    client.leave();
    assert!(pager.wait().unwrap().success());
}

#[test]
fn the_program_seals_a_whole_template_from_its_jail() {
    let (_root, plan) = planned();
    let (ours, theirs) = pair().unwrap();
    let mut pager = program(theirs);
    let client = Client::begin(ours, &plan, &[3], &[], Settings::default()).unwrap();
    loop {
        match client.next().unwrap() {
            Some(FromPager::First) => {}
            Some(FromPager::Whole(report)) => break assert_eq!(report.replaced, 0),
            other => panic!("{other:?}"),
        }
    }
    drop(client);
    assert!(pager.wait().unwrap().success());
    let seals = rustix::fs::fcntl_get_seals(&plan.memory).unwrap();
    assert!(seals.contains(rustix::fs::SealFlags::FUTURE_WRITE));
    for frame in 0..FRAMES {
        let mut page = [0; PAGE];
        plan.memory.read_exact_at(&mut page, u64::from(frame) * PAGE as u64).unwrap();
        assert!(page[..] == content(frame), "frame {frame}");
    }
}
