//! What a VMM writes and reads: state, maps, records, messages, kernels.

use crate::events::Events;
use crate::sealing::{file, unsealed};
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_vmm::control::wire::{Received, Receiver};
use dayfly_vmm::control::{Answer, Command, ExitRecord};
use dayfly_vmm::disk::layer::LayerMap;
use dayfly_vmm::disk::page_map::record;
use dayfly_vmm::disk::room::Limits;
use dayfly_vmm::memory::{backing, working_set};
use dayfly_vmm::{arch, config, meter, state, zygote};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use vm_memory::{GuestAddress, GuestMemoryMmap};

macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../vmm/fixtures/", $name))
    };
}

const SMALL: Heap = Heap { fixed: 256 << 10, per_byte: 64 };
/// RAM of the VM whose files are decoded.
const RAM: u64 = 256 << 20;

/// The targets of this file.
pub const TARGETS: &[Target] = &[
    Target {
        name: "vm-state",
        what: "the state of a saved VM",
        stateful: false,
        most_bytes: 32 << 10,
        heap: Heap { fixed: 1 << 20, per_byte: 256 },
        run: vm_state,
        seeds: || vec![unsealed(fixture!("state-1"))],
    },
    Target {
        name: "layer-map",
        what: "which blocks a disk layer has",
        stateful: false,
        most_bytes: 4096,
        // A bit for each block of the largest disk, 1 TiB, in the map and in its copy.
        heap: Heap { fixed: 80 << 20, per_byte: 8 },
        run: layer_map,
        seeds: || vec![unsealed(fixture!("layer-map-1")), unsealed(fixture!("layer-map-2"))],
    },
    Target {
        name: "page-map",
        what: "which frames of RAM held which disk blocks",
        stateful: false,
        most_bytes: 4096,
        heap: SMALL,
        run: page_map,
        seeds: || vec![unsealed(fixture!("page-map-1"))],
    },
    Target {
        name: "working-set",
        what: "which pages a clone touched first",
        stateful: false,
        most_bytes: 4096,
        // `merge` and `in_order` have an entry for each page of RAM.
        heap: Heap { fixed: 16 << 20, per_byte: 64 },
        run: working_sets,
        seeds: || vec![unsealed(fixture!("working-set-1")), unsealed(fixture!("working-set-2"))],
    },
    Target {
        name: "shared-pages",
        what: "rows of RAM that lie in other files",
        stateful: false,
        most_bytes: 4096,
        heap: SMALL,
        run: shared_pages,
        seeds: || vec![unsealed(fixture!("shared-1"))],
    },
    Target {
        name: "disk-limits",
        what: "limits on the growth of disks, and decisions by them",
        stateful: false,
        most_bytes: 256,
        heap: Heap { fixed: 4096, per_byte: 16 },
        run: disk_limits,
        seeds: limit_seeds,
    },
    Target {
        name: "exit-file",
        what: "what a VMM counts for the bill, and its exit record",
        stateful: false,
        most_bytes: 1024,
        heap: SMALL,
        run: exit_file,
        seeds: exit_seeds,
    },
    Target {
        name: "vmm-messages",
        what: "JSON between daemon, zygote and VMM",
        stateful: false,
        most_bytes: 8192,
        heap: SMALL,
        run: messages,
        seeds: message_seeds,
    },
    Target {
        name: "vmm-wire",
        what: "framing of these messages",
        stateful: false,
        most_bytes: 4096,
        heap: Heap { fixed: 1 << 20, per_byte: 64 },
        run: wire,
        seeds: || {
            let frame =
                |text: &[u8]| [&u32::try_from(text.len()).unwrap().to_le_bytes(), text].concat();
            vec![frame(b"{}"), [frame(b"[1]"), frame(b""), frame(&[b'x'; 300])].concat()]
        },
    },
    Target {
        name: "boot-kernel",
        what: "a kernel that is loaded into guest memory",
        stateful: false,
        most_bytes: 4096,
        heap: Heap { fixed: 1 << 20, per_byte: 64 },
        run: kernel,
        seeds: || vec![elf()],
    },
];

fn vm_state(input: &[u8]) -> Outcome {
    let Some(bytes) = file(&state::MAGIC, input) else { return Outcome::Refused };
    let Ok(decoded) = state::decode(&bytes) else { return Outcome::Refused };
    let once = state::encode(&decoded).unwrap();
    let again = state::encode(&state::decode(&once).unwrap()).unwrap();
    assert!(once == again, "encoded and decoded again");
    planted(|| decoded.serial.received.len() == 5);
    super::devices::load(&decoded.devices);
    Outcome::Accepted
}

fn layer_map(input: &[u8]) -> Outcome {
    let Some(bytes) = file(b"DFlayer\n", input) else { return Outcome::Refused };
    let Ok(map) = LayerMap::decode(&bytes) else { return Outcome::Refused };
    // A map of the largest disk takes 30 ms to be looked at.
    if map.blocks() < 1 << 20 {
        assert_eq!(LayerMap::decode(&map.encode()).as_ref().ok(), Some(&map), "encoded again");
        let runs: u64 = map.runs().map(|run| run.end - run.start).sum();
        assert_eq!(runs, map.present(), "blocks of all runs");
        planted(|| map.present() == 77);
    }
    assert!(!map.has(map.blocks()), "a block past the end");
    Outcome::Accepted
}

fn page_map(input: &[u8]) -> Outcome {
    let Some(bytes) = file(&record::MAGIC, input) else { return Outcome::Refused };
    let Ok(runs) = record::decode(&bytes, RAM) else { return Outcome::Refused };
    assert_eq!(record::encode(&runs), bytes, "encoded again");
    planted(|| runs.len() == 1 && runs[0].count == 9);
    Outcome::Accepted
}

fn working_sets(input: &[u8]) -> Outcome {
    let Some(bytes) = file(b"DFwset\r\n", input) else { return Outcome::Refused };
    let Ok(record) = working_set::decode(&bytes, RAM) else { return Outcome::Refused };
    let again = working_set::decode(&working_set::encode(&record), RAM);
    assert_eq!(again.as_ref().ok(), Some(&record), "encoded again");
    let order = record.in_order();
    assert!(order.iter().all(|page| u64::from(*page) < RAM / 4096), "a page outside RAM");
    let merged = working_set::merge(&record, &record, RAM);
    assert!(working_set::decode(&working_set::encode(&merged), RAM).is_ok(), "merged with itself");
    assert_eq!(merged.in_order().len(), order.len(), "pages after a merge with itself");
    planted(|| record.runs.len() == 1 && record.order.len() == 2);
    Outcome::Accepted
}

fn shared_pages(input: &[u8]) -> Outcome {
    let Some(bytes) = file(b"DFshare\n", input) else { return Outcome::Refused };
    let list = dayfly_pager::guest::memory(0).unwrap();
    list.write_all_at(&bytes, 0).unwrap();
    let Ok(rows) = backing::decode(&list) else { return Outcome::Refused };
    let (pages, files) = (RAM / 4096, [1 << 16, 8]);
    if backing::check(&rows, pages, &files).is_err() {
        return Outcome::Refused;
    }
    for all in [backing::overlay(&rows, &rows), backing::overlay(&[], &rows)] {
        assert!(backing::check(&all, pages, &files).is_ok(), "over itself: {all:?}");
    }
    let (below, above) = rows.split_at(rows.len() / 2);
    let both = backing::overlay(below, above);
    assert!(backing::check(&both, pages, &files).is_ok(), "two halves: {both:?}");
    planted(|| rows.len() == 1 && rows[0].pages == 9);
    Outcome::Accepted
}

/// Limits as an input, and the used, new and free bytes of a decision.
fn limit_seeds() -> Vec<Vec<u8>> {
    let limits = [
        Limits { share_bytes: 5 << 30, quota_bytes: u64::MAX, floor_bytes: 2 << 30 },
        Limits { share_bytes: 0, quota_bytes: 1 << 20, floor_bytes: 0 },
    ];
    let decision = [6_u64 << 30, 4096, 1 << 40].map(u64::to_le_bytes);
    let input = |limits: &Limits| [decision.as_flattened(), &unsealed(&limits.encode())].concat();
    limits.iter().map(input).collect()
}

fn disk_limits(input: &[u8]) -> Outcome {
    let mut events = Events::new(input);
    let (Some(used), Some(new), Some(free)) = (events.quad(), events.quad(), events.quad()) else {
        return Outcome::Refused;
    };
    let Some(bytes) = file(b"DFSpace\n", events.rest()) else { return Outcome::Refused };
    let Some(limits) = Limits::decode(&bytes) else { return Outcome::Refused };
    assert_eq!(limits.encode(), bytes, "encoded again");
    if let Ok(unchecked) = limits.allow(used, new, free) {
        let after = used.saturating_add(new);
        let most = limits.quota_bytes.checked_sub(after).expect("at most the quota");
        assert!(unchecked <= most, "{unchecked} unchecked, {limits:?}");
        if after > limits.share_bytes {
            assert!(new + unchecked <= free, "{new} and {unchecked} of {free} free bytes");
            assert!(free - new >= limits.floor_bytes, "the floor of {limits:?}");
        }
        for (used, new, free) in [(used / 2, new, free), (used, new / 2, free), (used, new, !0)] {
            assert!(limits.allow(used, new, free).is_ok(), "less is refused: {limits:?}");
        }
        planted(|| after > limits.share_bytes && limits.quota_bytes < 1 << 40);
    }
    Outcome::Accepted
}

/// The bytes of a page of [`meter`] that have a meaning.
const COUNTED: usize = 384;

fn exit_seeds() -> Vec<Vec<u8>> {
    let record = br#"{"reason":"panic","message":"it panicked"}"#;
    let counted = |version: u64, figure: u64| {
        let words = [version].into_iter().chain([figure; COUNTED / 8 - 2]);
        let words: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        [b"\x01".as_slice(), &meter::MAGIC, &words].concat()
    };
    vec![
        [b"\x00", record.as_slice()].concat(),
        [counted(meter::VERSION, 1 << 40).as_slice(), record].concat(),
        counted(meter::VERSION, u64::MAX),
        counted(2, 7),
        vec![1],
    ]
}

/// The first byte says whether a page comes first.
fn exit_file(input: &[u8]) -> Outcome {
    let Some((paged, rest)) = input.split_first() else { return Outcome::Refused };
    let paged = paged % 2 == 1;
    let (page, record) = rest.split_at(if paged { rest.len().min(COUNTED) } else { 0 });
    let mut file = page.to_vec();
    file.resize(if paged { meter::METER_BYTES } else { 0 }, 0);
    file.extend_from_slice(record);
    let (metered, found) = meter::split(&file);
    assert!(file.ends_with(found), "a part of the file");
    if let Some(metered) = metered {
        assert_eq!(found.len(), record.len(), "the record is behind the page");
        assert_eq!(meter::Metered::decode(&file), Some(metered));
        planted(|| metered.net.sent_bytes > 1 << 60 && metered.disks[7].reads > 0);
    }
    Outcome::of(metered.is_some() | json::<ExitRecord>(found))
}

/// Whether `bytes` are JSON of `T`, which is the same after it is written and read.
pub(crate) fn json<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<T>(bytes) else { return false };
    let once = serde_json::to_vec(&value).unwrap();
    let again: T = serde_json::from_slice(&once)
        .unwrap_or_else(|e| panic!("{}: {e}", String::from_utf8_lossy(&once)));
    assert_eq!(serde_json::to_vec(&again).unwrap(), once, "written and read again");
    true
}

fn message_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for fixture in
        [&fixture!("control-1.json")[..], fixture!("control-2.json"), fixture!("control-3.json")]
    {
        let value: serde_json::Value = serde_json::from_slice(fixture).unwrap();
        leaves(&value, &mut seeds);
    }
    seeds.push(br#"{"command":"fork","likely":null}"#.to_vec());
    seeds.push(serde_json::to_vec(&zygote::Report::Forked { pid: 7, cpu_us: 9 }).unwrap());
    seeds
}

/// All objects in a fixture that are messages.
fn leaves(value: &serde_json::Value, seeds: &mut Vec<Vec<u8>>) {
    let is_message = ["command", "answer", "reason"].iter().any(|key| value.get(key).is_some());
    match value {
        serde_json::Value::Object(_) if is_message => {
            seeds.push(serde_json::to_vec(value).unwrap());
        }
        serde_json::Value::Object(map) => map.values().for_each(|value| leaves(value, seeds)),
        serde_json::Value::Array(all) => all.iter().for_each(|value| leaves(value, seeds)),
        _ => {}
    }
}

fn messages(input: &[u8]) -> Outcome {
    let all = [
        json::<Command>(input),
        json::<Answer>(input),
        json::<ExitRecord>(input),
        json::<zygote::Command>(input),
        json::<zygote::Report>(input),
        json::<config::VmmConfig>(input),
    ];
    planted(|| all[0] && input.windows(12).any(|text| text == b"\"disk\":200}\n"));
    planted(|| all[1] && input.windows(4).any(|text| text == b"null") && input.ends_with(b" "));
    Outcome::of(all.contains(&true))
}

/// The messages in `bytes`, and the number of bytes of all whole ones.
fn frames(bytes: &[u8]) -> (Vec<&[u8]>, bool) {
    let (mut rest, mut all) = (bytes, Vec::new());
    while let Some((length, after)) = rest.split_first_chunk() {
        let Some(body) = after.get(..u32::from_le_bytes(*length) as usize) else { break };
        all.push(body);
        rest = &after[body.len()..];
    }
    (all, rest.is_empty())
}

fn wire(input: &[u8]) -> Outcome {
    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(input).unwrap();
    drop(here);
    let (expected, whole) = frames(input);
    let mut receiver = Receiver::default();
    let mut got = Vec::new();
    let ended = loop {
        match receiver.receive(&there) {
            Ok(Received::Message(json, fds)) => {
                assert!(fds.is_empty(), "descriptors from nowhere");
                got.push(json);
            }
            Ok(Received::Part) => {}
            Ok(Received::End) => break true,
            Err(_) => break false,
        }
    };
    assert_eq!(got, expected, "messages");
    assert!(!ended || whole, "the end within a message");
    planted(|| got.len() == 4 && got[3].len() == 2);
    Outcome::of(!got.is_empty())
}

/// A kernel that is loaded: one segment, and the entry in it.
fn elf() -> Vec<u8> {
    let mut elf = vec![0; 64 + 56];
    elf[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
    (elf[16], elf[18], elf[20], elf[52], elf[54], elf[56]) = (2, 62, 1, 64, 56, 1);
    let mut put = |at: usize, value: u64| elf[at..at + 8].copy_from_slice(&value.to_le_bytes());
    put(24, 0x10_0000);
    put(32, 64);
    for (at, value) in
        [(72, 120), (80, 0x10_0000), (88, 0x10_0000), (96, 16), (104, 4096), (112, 4096)]
    {
        put(at, value);
    }
    (elf[64], elf[68]) = (1, 5);
    elf.extend_from_slice(&[0x90; 16]);
    elf
}

fn kernel(input: &[u8]) -> Outcome {
    const BYTES: u64 = 64 << 20;
    thread_local! {
        static MEMORY: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 64 << 20)]).unwrap();
    }
    let file = dayfly_pager::guest::memory(0).unwrap();
    file.write_all_at(input, 0).unwrap();
    let loaded = MEMORY.with(|memory| arch::boot::load(memory, BYTES, file, None, "quiet"));
    let Ok(entry) = loaded else { return Outcome::Refused };
    assert!((0x10_0000..BYTES).contains(&entry.0), "the entry point {:#x}", entry.0);
    planted(|| entry.0 == 0x10_0fff);
    Outcome::Accepted
}
