//! The envelope, regions of a VMM, untrusted text, content of sparse files.

use crate::sealing::resealed;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_units::egress::{self, MAX_RULES};
use dayfly_units::sealed::{self, HEADER_BYTES};
use dayfly_units::text::{escaped, is_unsafe};
use dayfly_units::{Egress, Name, VmId, VmName, regions, sparse};
use std::os::unix::fs::FileExt;

/// The targets of this file.
pub const TARGETS: &[Target] = &[
    Target {
        name: "sealed",
        what: "the envelope of every file",
        stateful: false,
        most_bytes: 4096,
        heap: Heap { fixed: 4096, per_byte: 8 },
        run: envelope,
        seeds: || vec![sealed::seal(b"DFtest\r\n", 3, b"a payload"), sealed::seal(&[0; 8], 0, b"")],
    },
    Target {
        name: "regions",
        what: "the regions of RAM that a VMM sends to the pager",
        stateful: false,
        most_bytes: regions::MAX_PACKET_BYTES + 64,
        heap: Heap { fixed: 4096, per_byte: 4 },
        run: packet_of_regions,
        seeds: region_seeds,
    },
    Target {
        name: "text",
        what: "untrusted text for a terminal; names and ids",
        stateful: false,
        most_bytes: 1024,
        heap: Heap { fixed: 128 << 10, per_byte: 64 },
        run: text,
        seeds: || {
            let seeds =
                ["café \x1b[2J\u{202e}", "web-1", "0123456789ab", "a\r\n\tb\u{9b}", "\u{7f}"];
            seeds.iter().map(|text| text.as_bytes().to_vec()).chain([vec![0xff, 0xfe]]).collect()
        },
    },
    Target {
        name: "egress",
        what: "egress policies",
        stateful: false,
        most_bytes: 2048,
        heap: Heap { fixed: 128 << 10, per_byte: 64 },
        run: policy,
        seeds: || {
            let seeds = [
                "none",
                "example.org:443,*.Example.net.:tcp:1-1023,10.0.0.0/8,192.0.2.7:icmp",
                "*,0.0.0.0/0:udp:53,xn--mnchen-3ya.example:tcp",
            ];
            seeds.iter().map(|text| text.as_bytes().to_vec()).collect()
        },
    },
    Target {
        name: "sparse",
        what: "the content of an uploaded disk",
        stateful: false,
        most_bytes: 64 << 10,
        heap: Heap { fixed: 4 << 20, per_byte: 8 },
        run: sparse_content,
        seeds: || {
            let page = |n| vec![n; 4096];
            vec![[page(0), page(1), page(0)].concat(), [page(3), vec![0; 9]].concat(), vec![7]]
        },
    },
];

fn policy(input: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(input);
    let Ok(policy) = text.parse::<Egress>() else { return Outcome::Refused };
    let shown = policy.to_string();
    assert_eq!(shown.parse::<Egress>().as_ref(), Ok(&policy), "{shown}");
    assert!(shown.bytes().all(|byte| byte.is_ascii_graphic()), "{shown}");
    assert!(policy.rules().len() <= MAX_RULES, "{} rules", policy.rules().len());
    let whole = u8::from(policy.is_none()) + u8::from(policy.is_internet());
    assert_eq!(whole == 0, !policy.rules().is_empty(), "{shown}");
    for rule in policy.rules() {
        if let egress::Target::Name(_) = &rule.target {
            assert!(policy.services_of_names().contains(&rule.service), "{shown}");
        }
    }
    planted(|| policy.rules().len() == 3 && policy.services_of_names().len() == 1);
    Outcome::Accepted
}

fn envelope(input: &[u8]) -> Outcome {
    const CAP: u64 = 2048;
    let right = resealed(input);
    for bytes in [Some(input), right.as_deref()].into_iter().flatten() {
        let verified = sealed::verify(CAP, bytes);
        let Some(magic) = bytes.first_chunk() else { continue };
        let opened = sealed::open(magic, 0..=u32::MAX, CAP, bytes);
        assert_eq!(opened.as_ref().map(drop), verified.as_ref().copied(), "open and verify");
        if let Ok((version, payload)) = opened {
            assert_eq!(sealed::seal(magic, version, payload), bytes, "sealed again");
            planted(|| version == 0x0102_0304 && payload.len() > 40);
        }
    }
    let accepted = right.is_some_and(|bytes| {
        bytes.len() - HEADER_BYTES <= 2048 && sealed::verify(CAP, &bytes).is_ok()
    });
    Outcome::of(accepted)
}

fn region_seeds() -> Vec<Vec<u8>> {
    let region = |host, bytes, offset| regions::Region { host, bytes, offset };
    let sets = [
        vec![region(0x7000, 0x2000, 0), region(0x4000, 0x1000, 0x3000)],
        (1..20).map(|n| region(n * 0x2000, 0x1000, n * 0x1000)).collect(),
        vec![region(0x1000, u64::MAX - 0xfff, 0)],
    ];
    sets.iter().map(|set| regions::encode(set)).collect()
}

fn packet_of_regions(input: &[u8]) -> Outcome {
    const FILE: u64 = 1 << 30;
    let Some(decoded) = regions::decode(input, FILE) else { return Outcome::Refused };
    assert!((1..=regions::MAX_REGIONS).contains(&decoded.len()), "{} regions", decoded.len());
    let again = regions::decode(&regions::encode(&decoded), FILE);
    assert_eq!(again.as_ref(), Some(&decoded), "encoded and decoded again");
    let apart = decoded.is_sorted_by(|a, b| a.host.checked_add(a.bytes).unwrap() <= b.host);
    assert!(apart, "regions that overlap: {decoded:?}");
    assert!(decoded.iter().all(|r| r.offset + r.bytes <= FILE), "outside the file: {decoded:?}");
    planted(|| decoded.len() == 3 && decoded[1].bytes == 0x5000);
    Outcome::Accepted
}

fn text(input: &[u8]) -> Outcome {
    for limit in [0, 1, 7, 80, 5000] {
        let once = escaped(input, limit).to_string();
        assert!(once.chars().count() <= limit, "{once:?} has more than {limit} characters");
        let bad = once.chars().find(|c| is_unsafe(*c));
        assert_eq!(bad, None, "{once:?} is not safe");
        assert_eq!(escaped(&once, limit).to_string(), once, "escaped twice");
        let lines = escaped(input, limit).keep_lines().to_string();
        let unsafe_here = |c: &char| !matches!(c, '\n' | '\t') && is_unsafe(*c);
        let bad = lines.chars().find(unsafe_here);
        assert_eq!(bad, None, "{lines:?} is not safe");
    }
    let Ok(text) = std::str::from_utf8(input) else { return Outcome::Refused };
    let name = text.parse::<Name>().inspect(|name| assert_eq!(name.as_str(), text)).is_ok();
    let vm = text.parse::<VmName>().inspect(|name| assert_eq!(name.as_str(), text)).is_ok();
    let id = text.parse::<VmId>().inspect(|id| assert_eq!(id.to_string(), text)).is_ok();
    planted(|| name && text.contains("-_") && text.len() > 12);
    Outcome::of(name || vm || id)
}

fn sparse_content(input: &[u8]) -> Outcome {
    let file = tempfile::tempfile().unwrap();
    let (length, content) = match input.split_first() {
        Some((length, content)) => (content.len() as u64 + u64::from(*length % 3), content),
        None => (1, input),
    };
    let Ok(copied) = sparse::copy(&mut &content[..], &file, length) else {
        assert!(length > content.len() as u64, "{} of {length} bytes refused", content.len());
        return Outcome::Refused;
    };
    assert_eq!(length, content.len() as u64, "content that ends too early was accepted");
    let mut got = vec![0; content.len()];
    file.read_exact_at(&mut got, 0).unwrap();
    assert!(got == content, "the copy differs");
    assert_eq!(sparse::digest(&file).unwrap().digest, copied.digest, "the digest differs");
    planted(|| copied.data_bytes == 8192 && length > 5 * 4096);
    Outcome::Accepted
}
