//! What the store reads: tables, packs, indices, manifests, features, uploads.

use crate::sealing::{file, unsealed};
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_store::{Digest, Kind, Table, fuzzing};
use dayfly_units::sealed::Magic;
use dayfly_units::{Name, sealed};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

macro_rules! golden {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../store/golden/", $name))
    };
}

const SMALL: Heap = Heap { fixed: 64 << 10, per_byte: 64 };

/// The targets of this file.
pub const TARGETS: &[Target] = &[
    Target {
        name: "store-table",
        what: "the table of a snapshot's RAM",
        stateful: false,
        most_bytes: 8192,
        heap: SMALL,
        run: table,
        seeds: || vec![unsealed(golden!("table-1"))],
    },
    Target {
        name: "store-pack",
        what: "packs of pages: footer and groups",
        stateful: false,
        most_bytes: 8192,
        heap: Heap { fixed: 4 << 20, per_byte: 64 },
        run: pack,
        seeds: pack_seeds,
    },
    Target {
        name: "store-blocks",
        what: "the index of a disk file's blocks",
        stateful: false,
        most_bytes: 4096,
        heap: SMALL,
        run: blocks,
        seeds: || vec![unsealed(golden!("blocks-1"))],
    },
    Target {
        name: "store-manifests",
        what: "manifests of images, kernels and snapshots",
        stateful: false,
        most_bytes: 8192,
        heap: SMALL,
        run: manifests,
        seeds: manifest_seeds,
    },
    Target {
        name: "store-format",
        what: "the features of a store",
        stateful: false,
        most_bytes: 2048,
        heap: SMALL,
        run: format,
        seeds: || vec![unsealed(golden!("format-1"))],
    },
    Target {
        name: "store-notes",
        what: "the quarantine of pages, and layers whose fsync failed",
        stateful: false,
        most_bytes: 2048,
        heap: SMALL,
        run: notes,
        seeds: note_seeds,
    },
    Target {
        name: "store-upload",
        what: "the zstd frame of an upload",
        stateful: false,
        most_bytes: 8192,
        // A frame may ask for a window of 128 MiB; libzstd allocates it outside this count.
        heap: Heap { fixed: 1 << 20, per_byte: 64 },
        run: upload,
        seeds: || {
            let page = [vec![7; 5000], vec![0; 9000], (0..=255).collect()].concat();
            vec![zstd::encode_all(&page[..], 3).unwrap(), zstd::encode_all(&b"x"[..], 19).unwrap()]
        },
    },
];

fn table(input: &[u8]) -> Outcome {
    let Some(bytes) = file(b"DFtable\n", input) else { return Outcome::Refused };
    let Ok(table) = Table::decode(Path::new("fuzz"), &bytes) else { return Outcome::Refused };
    assert_eq!(table.encode(), bytes, "encoded again");
    let mut next = 0;
    for run in table.runs() {
        assert_eq!(run.first, next, "runs without a gap");
        next = run.first + run.frames;
    }
    assert_eq!(table.frames(), next, "frames of all runs");
    planted(|| table.runs().iter().any(|run| run.kind == Kind::Free && run.frames == 5));
    Outcome::Accepted
}

/// A pack as an input: its groups with their length before them, and the footer's payload.
fn pack_seeds() -> Vec<Vec<u8>> {
    let pack = golden!("pack-1");
    let end = pack.len() - 48;
    let at = usize::try_from(u64::from_le_bytes(pack[end + 8..end + 16].try_into().unwrap()));
    let (groups, footer) = pack[..end].split_at(at.unwrap());
    let length = u16::try_from(groups.len()).unwrap().to_le_bytes();
    vec![[&length, groups, &unsealed(footer)].concat()]
}

/// Makes the file of [`pack_seeds`]' input. The sums of all groups are set right, because no fuzzer
/// finds them.
fn pack_file(input: &[u8]) -> Option<Vec<u8>> {
    let (length, rest) = input.split_first_chunk::<2>()?;
    let (groups, footer) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
    let mut footer = footer.to_vec();
    let fixed = 1 + 72;
    let number = |bytes: &[u8]| bytes.first_chunk().map(|b| u32::from_le_bytes(*b));
    if let (Some(pages), Some(each @ 1..)) =
        (footer.get(1..).and_then(number), footer.get(5..).and_then(number))
    {
        let count = (pages.div_ceil(each) as usize).min(4096);
        let mut at = 0_usize;
        let entries = footer.get_mut(fixed..).unwrap_or_default();
        for entry in entries.as_chunks_mut::<20>().0.iter_mut().take(count) {
            let bytes = number(entry).unwrap_or(0) as usize;
            let Some(stored) = groups.get(at..at.saturating_add(bytes)) else { break };
            entry[4..].copy_from_slice(&blake3::hash(stored).as_bytes()[..16]);
            at += bytes;
        }
    }
    let footer = file(b"DFpack\r\n", &footer)?;
    let mut end = b"DFpkend\n".to_vec();
    end.extend_from_slice(&(groups.len() as u64).to_le_bytes());
    end.extend_from_slice(&Digest::of(&end).0);
    Some([groups, &footer, &end].concat())
}

fn pack(input: &[u8]) -> Outcome {
    let memory = dayfly_pager::guest::memory(0).unwrap();
    let open = |bytes: &[u8]| {
        memory.set_len(0).unwrap();
        memory.write_all_at(bytes, 0).unwrap();
        fuzzing::pack(&memory, &tenant())
    };
    let raw = open(input);
    let Some(packed) = pack_file(input).and_then(|bytes| open(&bytes)).or(raw) else {
        return Outcome::Refused;
    };
    planted(|| packed.groups == 2 && packed.pages == 7);
    Outcome::of(packed.good_groups > 0)
}

/// The tenant of the golden pack.
fn tenant() -> Name {
    let pack = golden!("pack-1");
    let end = pack.len() - 48;
    let at = u64::from_le_bytes(pack[end + 8..end + 16].try_into().unwrap());
    let field = &pack[usize::try_from(at).unwrap() + sealed::HEADER_BYTES + 8..][..64];
    let text = std::str::from_utf8(&field[1..=usize::from(field[0])]).unwrap();
    text.parse().unwrap()
}

fn blocks(input: &[u8]) -> Outcome {
    // The digest of the file, which the payload must repeat.
    let of = Digest(std::array::from_fn(|n| input.get(1 + n).copied().unwrap_or(0)));
    let Some(bytes) = file(b"DFblkix\n", input) else { return Outcome::Refused };
    let Some(again) = fuzzing::blocks(&of, &bytes) else { return Outcome::Refused };
    assert_eq!(again, bytes, "encoded again");
    planted(|| bytes.len() == sealed::HEADER_BYTES + 40 + 12);
    Outcome::Accepted
}

/// Decodes a manifest and encodes it again.
type Decode = fn(&[u8]) -> Option<Vec<u8>>;

const KINDS: [(&Magic, Decode); 3] = [
    (b"DFimage\n", fuzzing::image),
    (b"DFkernl\n", fuzzing::kernel),
    (b"DFsnaps\n", fuzzing::snapshot),
];

fn manifest_seeds() -> Vec<Vec<u8>> {
    let files: [(u8, &[u8]); 5] = [
        (0, golden!("image-1")),
        (1, golden!("kernel-1")),
        (2, golden!("snapshot-1")),
        (2, golden!("snapshot-2")),
        (2, golden!("snapshot-3")),
    ];
    files.iter().map(|(kind, file)| [&[*kind], &unsealed(file)[..]].concat()).collect()
}

fn manifests(input: &[u8]) -> Outcome {
    let Some((kind, input)) = input.split_first() else { return Outcome::Refused };
    let (magic, decode) = KINDS[usize::from(*kind) % KINDS.len()];
    let Some(bytes) = file(magic, input) else { return Outcome::Refused };
    let Some(once) = decode(&bytes) else { return Outcome::Refused };
    assert_eq!(decode(&once).as_ref(), Some(&once), "encoded and decoded again");
    planted(|| input.windows(14).any(|text| text == b"\"disks\":[],\"a\""));
    planted(|| *kind == 7);
    Outcome::Accepted
}

fn format(input: &[u8]) -> Outcome {
    let Some(bytes) = file(b"DFstore\n", input) else { return Outcome::Refused };
    let Some(once) = fuzzing::format(&bytes) else { return Outcome::Refused };
    assert_eq!(fuzzing::format(&once).as_ref(), Some(&once), "encoded and decoded again");
    planted(|| input.windows(3).any(|text| text == b"\"7\""));
    Outcome::Accepted
}

fn note_seeds() -> Vec<Vec<u8>> {
    let digest = "0f".repeat(32);
    let note =
        format!(r#"{{"data":{{"digest":"{digest}","bytes":4096,"data_bytes":0}},"map":null}}"#);
    vec![
        [&[0, 1][..], &[7; 32], &[3, 0, 0, 0], &[9; 32], &[0xff; 4]].concat(),
        [&[1, 1][..], note.as_bytes()].concat(),
        [&[1, 1][..], br#"{"data":null,"map":null}"#].concat(),
    ]
}

fn notes(input: &[u8]) -> Outcome {
    let Some((kind, input)) = input.split_first() else { return Outcome::Refused };
    let quarantine = kind & 1 == 0;
    let magic: &Magic = if quarantine { b"DFquarn\n" } else { b"DFunsyn\n" };
    let Some(bytes) = file(magic, input) else { return Outcome::Refused };
    if !quarantine {
        let Some(once) = fuzzing::unsynced(&bytes) else { return Outcome::Refused };
        let again = fuzzing::unsynced(&sealed::seal(magic, 1, &once));
        assert_eq!(again, Some(once), "encoded and decoded again");
        return Outcome::Accepted;
    }
    let Some(once) = fuzzing::quarantine(&bytes) else { return Outcome::Refused };
    assert!(once.len() <= bytes.len(), "entries multiply");
    planted(|| once.len() == sealed::HEADER_BYTES + 3 * 36);
    assert_eq!(fuzzing::quarantine(&once), Some(once), "encoded and decoded again");
    Outcome::Accepted
}

/// Takes at most this many bytes, and counts them.
struct Sink(u64);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn upload(mut input: &[u8]) -> Outcome {
    const MOST: u64 = 64 << 10;
    let whole = input;
    let mut sink = Sink(0);
    let Ok((copied, ends)) = fuzzing::upload(&mut input, &mut sink, MOST) else {
        return Outcome::Refused;
    };
    assert!(copied == sink.0 && copied <= MOST, "{copied} bytes copied, {} written", sink.0);
    planted(|| ends && whole.len() > 11 && copied == 0);
    Outcome::of(ends)
}
