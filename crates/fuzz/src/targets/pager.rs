//! The pager: its messages and plan, and a template while clones touch pages in any order.

use super::vmm::json;
use crate::events::Events;
use crate::sealing::file;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_pager::clones::{Clone as PagedClone, Handle};
use dayfly_pager::source::{Batch, ELSEWHERE, Layout, Put, Source, SourceError, ZERO};
use dayfly_pager::template::{Brought, Template};
use dayfly_pager::wire::{FromPager, Settings, ToPager, pair, send};
use dayfly_pager::{fuzzing, guest};
use dayfly_sys::uffd::Uffd;
use dayfly_units::regions::Region;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The targets of this file.
pub const TARGETS: &[Target] = &[
    Target {
        name: "pager-plan",
        what: "messages to the pager, and the plan of a template",
        stateful: false,
        most_bytes: 4096,
        heap: Heap { fixed: 4 << 20, per_byte: 256 },
        run: plan,
        seeds: plan_seeds,
    },
    Target {
        name: "pager-template",
        what: "page faults, batches, damage and ends of clones",
        stateful: true,
        most_bytes: 256,
        heap: Heap { fixed: 1 << 20, per_byte: 64 << 10 },
        run: template,
        seeds: || {
            vec![
                vec![FAULT, 0, 0, AHEAD, 1, FAULT, 1, 4, COMES, FAULT, 2, 7, CHECK],
                vec![BREAK, 2, 1, FAULT, 0, 6, BREAK, 2, 0, AHEAD, 2, FAULT, 0, 6],
                vec![BREAK, 1, 2, FAULT, 0, 3, ENDS, 0, FAULT, 0, 9, OVERDUE],
                vec![FAULT, 0, 20, FAULT, 1, 30, FAULT, 0, 60, WITH, 0, 0],
            ]
        },
    },
];

fn plan_seeds() -> Vec<Vec<u8>> {
    let table = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../store/golden/table-1"));
    let table = crate::sealing::unsealed(table);
    let length = u16::try_from(table.len()).unwrap().to_le_bytes();
    let rows = [3_u32.to_le_bytes(), 9_u32.to_le_bytes()].concat();
    let json = br#"{"do":"clone","vm":"0123456789ab"}"#;
    vec![
        [&[0][..], &length, &table, &[0, 4, 8], &[1, 0, 0, 0], &rows].concat(),
        [&[1][..], json].concat(),
        [&[1][..], &serde_json::to_vec(&FromPager::Begun).unwrap()].concat(),
    ]
}

/// A plan: the table's bytes, then how many bytes of places, order and elsewhere follow.
fn plan(input: &[u8]) -> Outcome {
    let Some((kind, input)) = input.split_first() else { return Outcome::Refused };
    if kind & 1 == 1 {
        planted(|| json::<ToPager>(input) && input.ends_with(b"\t"));
        return Outcome::of(json::<ToPager>(input) || json::<FromPager>(input));
    }
    let mut events = Events::new(input);
    let Some(length) = events.word() else { return Outcome::Refused };
    let (raw, rest) = events.rest().split_at(usize::from(length).min(events.rest().len()));
    let Some(table) = file(b"DFtable\n", raw) else { return Outcome::Refused };
    let mut events = Events::new(rest);
    let mut count = || u64::from(events.byte().unwrap_or(0));
    let (places, order, elsewhere) = (count(), count(), count());
    let sheet = guest::memory(0).unwrap();
    sheet.write_all_at(&[&table[..], events.rest()].concat(), 0).unwrap();
    let (ours, theirs) = pair().unwrap();
    let first = ToPager::Begin {
        table_bytes: table.len() as u64,
        places_bytes: places,
        order_bytes: order,
        elsewhere_bytes: elsewhere,
        packs: 0,
        disks: Vec::new(),
        roots: Vec::new(),
        settings: Settings::default(),
    };
    let memory = guest::memory(4096).unwrap();
    send(&ours, &first, &[memory.as_fd(), sheet.as_fd()]).unwrap();
    drop(ours);
    match fuzzing::begin(&theirs) {
        None => Outcome::Refused,
        Some(first) => {
            assert_eq!(first as u64, order / 4, "frames that come first");
            planted(|| first == 3);
            Outcome::Accepted
        }
    }
}

const PAGE: usize = 4096;
const FRAMES: u32 = 32;
const EACH: u32 = 3;
const BATCHES: u32 = 6;
/// These frames lie in another template.
const FOREIGN: u32 = FRAMES - 2;

const FAULT: u8 = 0;
const AHEAD: u8 = 1;
const BREAK: u8 = 2;
const COMES: u8 = 3;
const ENDS: u8 = 4;
const OVERDUE: u8 = 5;
const WITH: u8 = 6;
const CHECK: u8 = 7;
const EVENTS: u8 = 8;

fn content(frame: u32) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    for (n, chunk) in (1_u32..).zip(bytes.as_chunks_mut::<4>().0) {
        *chunk = frame.wrapping_mul(0x9e37_79b9).wrapping_add(n).to_le_bytes();
    }
    bytes
}

/// Pages from nowhere, and for each batch how it fails: 0 not at all, 1 damaged, 2 unreadable, 3
/// outside RAM, 4 after its first page.
struct Made {
    layout: Layout,
    fails: [AtomicU8; BATCHES as usize],
}

impl Source for Made {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read_bytes(&self) -> u64 {
        0
    }

    fn fetch(&self, batch: u32, put: &mut Put<'_>) -> Result<(), SourceError> {
        let fails = self.fails[batch as usize].load(Ordering::Relaxed);
        match fails {
            1 => return Err(SourceError::Damaged("a flipped bit".to_owned())),
            2 => return Err(SourceError::Unreadable("EIO".to_owned())),
            3 => put(FRAMES, &[1; PAGE]).map_err(SourceError::Install)?,
            _ => {}
        }
        for frame in batch * EACH..(batch + 1) * EACH {
            put(frame, &content(frame)).map_err(SourceError::Install)?;
            if fails == 4 {
                return Err(SourceError::Unreadable("EIO".to_owned()));
            }
        }
        Ok(())
    }
}

/// A process that stands for a VMM and is killed in its place. One that has been killed is
/// replaced; the others are used again, because a process takes a millisecond to start.
static IDLE: Mutex<Vec<Child>> = Mutex::new(Vec::new());

fn process() -> Child {
    let idle = IDLE.lock().unwrap().pop();
    idle.unwrap_or_else(|| {
        let mut sleep = Command::new("/bin/sleep");
        sleep.arg("1000000");
        let with_parent = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
        // SAFETY: the closure makes one system call, and allocates nothing.
        unsafe { sleep.pre_exec(with_parent) }.spawn().unwrap()
    })
}

/// A clone: a private mapping of the template, with its userfaultfd.
struct Standin {
    clone: Arc<PagedClone>,
    at: usize,
    process: Option<Child>,
    exit: File,
}

impl Standin {
    fn new(memory: &File) -> Self {
        let bytes = FRAMES as usize * PAGE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let at =
            unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE, memory, 0) };
        let at = at.unwrap().expose_provenance();
        let uffd = Uffd::own().unwrap();
        uffd.register(at as u64, bytes as u64).unwrap();
        let (child, exit) = (process(), guest::memory(0).unwrap());
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let vm = "0123456789ab".to_owned();
        let handle = Handle { vm, process: pidfd, exit: exit.try_clone().unwrap() };
        let region = Region { host: at as u64, bytes: bytes as u64, offset: 0 };
        let clone = Arc::new(PagedClone::new(handle, uffd, vec![region]));
        Self { clone, at, process: Some(child), exit }
    }

    fn has_cause(&self) -> bool {
        self.exit.metadata().unwrap().len() > 0
    }
}

impl Drop for Standin {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping, and nothing refers to it.
        let _ = unsafe {
            munmap(std::ptr::with_exposed_provenance_mut(self.at), FRAMES as usize * PAGE)
        };
        let Some(mut child) = self.process.take() else { return };
        if self.clone.is_killed() {
            let _reaped = child.wait();
        } else {
            IDLE.lock().unwrap().push(child);
        }
    }
}

struct World {
    template: Template<Made>,
    memory: File,
    clones: Vec<Standin>,
    /// For each batch whether it may be present.
    brought: [bool; BATCHES as usize],
}

impl World {
    fn new() -> Self {
        let memory = guest::memory(u64::from(FRAMES) * PAGE as u64).unwrap();
        let mut layout = Layout { batch_of: vec![ZERO; FRAMES as usize], ..Layout::default() };
        for number in 0..BATCHES {
            let first = number * EACH;
            layout.batch_of[first as usize..(first + EACH) as usize].fill(number);
            layout.batches.push(Batch { first, frames: EACH, colour: 0, group: 0 });
        }
        layout.batch_of[FOREIGN as usize..].fill(ELSEWHERE);
        let source = Made { layout, fails: [const { AtomicU8::new(0) }; BATCHES as usize] };
        let template = Template::new(memory.try_clone().unwrap(), source).unwrap();
        let clones = vec![Standin::new(&memory)];
        Self { template, memory, clones, brought: [false; BATCHES as usize] }
    }

    fn fault(&mut self, which: u8, frame: u8, with: &[u32]) {
        let standin = &self.clones[usize::from(which) % self.clones.len()];
        let was_killed = standin.clone.is_killed();
        let address = standin.at as u64 + u64::from(frame) * PAGE as u64;
        let fetched = self.template.fault(&standin.clone, address, |_| false, |_| with.to_vec());
        let frame = u32::from(frame);
        let batch = frame / EACH;
        if was_killed {
            assert_eq!(fetched, None, "a fetch for a clone that was killed");
        } else if frame >= FOREIGN {
            assert!(standin.clone.is_killed(), "frame {frame} is no memory of the clone's");
        } else if batch >= BATCHES {
            assert!(!standin.clone.is_killed(), "frame {frame} is all zero");
        } else {
            let here = self.template.has(batch);
            assert!(here != standin.clone.is_killed(), "batch {batch}: present {here}, and killed");
        }
        let has_cause = standin.has_cause() || standin.clone.has_ended();
        assert!(has_cause || !standin.clone.is_killed(), "killed without a cause");
    }

    fn event(&mut self, events: &mut Events<'_>) -> Option<()> {
        match events.byte()? % EVENTS {
            FAULT => self.fault(events.byte()?, events.byte()? % 64, &[]),
            AHEAD => {
                let batch = u32::from(events.byte()?) % (BATCHES + 1);
                let brought = self.template.ahead(batch);
                let here = batch >= BATCHES || self.template.has(batch);
                assert_eq!(brought == Brought::Done, here, "{brought:?}, batch {batch}");
            }
            BREAK => {
                let (batch, how) = (events.byte()? % 6, events.byte()? % 5);
                self.template_fails(batch, how);
            }
            COMES if self.clones.len() < 4 => self.clones.push(Standin::new(&self.memory)),
            ENDS => {
                let which = usize::from(events.byte()?) % self.clones.len();
                self.clones[which].clone.end();
            }
            OVERDUE => self.template.kill_overdue(Duration::ZERO),
            WITH => {
                let (which, frame) = (events.byte()?, events.byte()? % 64);
                self.fault(which, frame, &[1, 3, 3, BATCHES + 5]);
            }
            _ => self.check(),
        }
        Some(())
    }

    fn template_fails(&self, batch: u8, how: u8) {
        self.template.source().fails[usize::from(batch)].store(how, Ordering::Relaxed);
    }

    fn check(&mut self) {
        let present = (0..BATCHES).filter(|batch| self.template.has(*batch)).count();
        let missing = self.template.missing() as usize;
        assert_eq!(present + missing, BATCHES as usize, "batches present and missing");
        for batch in 0..BATCHES {
            let here = self.template.has(batch);
            let before = std::mem::replace(&mut self.brought[batch as usize], here);
            assert!(here || !before, "batch {batch} has gone");
            if here {
                for frame in batch * EACH..(batch + 1) * EACH {
                    let mut page = [0; PAGE];
                    let at = u64::from(frame) * PAGE as u64;
                    self.memory.read_exact_at(&mut page, at).unwrap();
                    assert!(page == content(frame), "frame {frame} has wrong bytes");
                }
            }
        }
    }
}

fn template(input: &[u8]) -> Outcome {
    let (mut world, mut events, mut count) = (World::new(), Events::new(input), 0);
    while count < 64 && world.event(&mut events).is_some() {
        count += 1;
    }
    world.check();
    let killed = world.clones.iter().filter(|standin| standin.clone.is_killed()).count();
    planted(|| killed == 2 && world.template.missing() == 2);
    Outcome::of(count > 0)
}
