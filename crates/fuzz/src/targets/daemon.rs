//! What the daemon reads: bodies of requests, heads of uploads, records of VMs; messages of the
//! machine and of QEMU; what a terminal of the user shows.

use super::vmm::json;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_api::agent::ExecSpec;
use dayfly_api::types::{
    BakeRequest, CollectRequest, ConnectRequest, CreateManyRequest, CreateRequest, ForkRequest,
    ImageUpload, KernelUpload, RecordRequest, RemoveManyRequest, RunRequest, SnapshotRequest,
    VerifyRequest,
};
use dayfly_cli::terminal_text::Filter;
use dayfly_daemon::http::upload::read_head;
use dayfly_daemon::vm::record::Record;
use dayfly_machine::fuzzing;
use dayfly_machine_init::{
    GuestStatus, Kind, MAX_DATAGRAM_BYTES, MAX_FRAME_BYTES, PortAnswer, PortOrder, Request, Token,
    read_datagram, read_frame, write_frame,
};
use dayfly_units::text::is_unsafe;
use std::io::Write;
use std::os::unix::net::UnixStream;

macro_rules! record {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../daemon/fixtures/records/", $name))
    };
}

const SMALL: Heap = Heap { fixed: 1 << 20, per_byte: 256 };

/// The targets of this file.
pub const TARGETS: &[Target] = &[
    Target {
        name: "http-bodies",
        what: "JSON of requests, and heads of uploads",
        stateful: false,
        most_bytes: 4096,
        heap: SMALL,
        run: bodies,
        seeds: body_seeds,
    },
    Target {
        name: "vm-record",
        what: "the record of a VM that a daemon before has written",
        stateful: false,
        most_bytes: 8192,
        heap: SMALL,
        run: record,
        seeds: || {
            vec![
                record!("1-9c7fd64.json").to_vec(),
                record!("1-afcc4ef.json").to_vec(),
                record!("2.json").to_vec(),
                record!("next.json").to_vec(),
            ]
        },
    },
    Target {
        name: "machine-frames",
        what: "frames between host and machine, orders for ports, and datagrams of flows",
        stateful: false,
        most_bytes: 2048,
        heap: SMALL,
        run: machine_frames,
        seeds: machine_seeds,
    },
    Target {
        name: "machine-lines",
        what: "QEMU's monitor, the control line, the daemon's answer",
        stateful: false,
        most_bytes: 2048,
        heap: SMALL,
        run: machine_lines,
        seeds: line_seeds,
    },
    Target {
        name: "machine-uplink",
        what: "frames that the machine sends to other hosts",
        stateful: false,
        most_bytes: 2048,
        // A frame of the largest length is allocated before it is read.
        heap: Heap { fixed: 256 << 10, per_byte: 64 },
        run: machine_uplink,
        seeds: uplink_seeds,
    },
    Target {
        name: "terminal",
        what: "output of a guest on the user's terminal",
        stateful: false,
        most_bytes: 512,
        heap: SMALL,
        run: terminal,
        seeds: || {
            let seeds: [&[u8]; 4] = [
                b"plain \x1b[1;31mred\x1b[0m\n",
                b"\x1b]0;title\x07\x1b[2J\x9b1m",
                "caf\u{e9} \u{202e}\u{85}".as_bytes(),
                b"\xc3\x28\x1b[38;5;999",
            ];
            seeds.map(<[u8]>::to_vec).to_vec()
        },
    },
];

fn body_seeds() -> Vec<Vec<u8>> {
    let create = r#"{"name":"web-1","source":{"snapshot":"debian"},"labels":{"a":"b"},
        "network":{"publish":[{"host":"0.0.0.0","host_port":8080,"guest_port":80}],
        "closed":true}}"#;
    let head = r#"{"release":"6.12","vmlinux_bytes":3,"initrd_bytes":2,"digest":"d"}"#;
    let texts = [
        create.to_owned(),
        r#"{"source":{"boot":{"image":"debian","kernel":null,"vcpus":1,
            "memory_bytes":268435456}},"count":3}"#
            .to_owned(),
        format!(r#"{{"create":{create},"exec":{{"argv":["true"]}},"keep":false}}"#),
        r#"{"names":["a","b"],"force":true}"#.to_owned(),
        r#"{"count":2,"as":"x","names":["f-1"]}"#.to_owned(),
        r#"{"argv":["/bin/sh"],"env":{"A":"b"},"cwd":"/","user":"root","timeout_ms":5}"#.to_owned(),
        r#"{"name":"s","image":"i","warmup":[["true"]]}"#.to_owned(),
        r#"{"without":["s"]}"#.to_owned(),
    ];
    let length = u32::try_from(head.len()).unwrap().to_le_bytes();
    let upload = [&length, head.as_bytes(), b"body"].concat();
    texts.into_iter().map(String::into_bytes).chain([upload]).collect()
}

fn bodies(input: &[u8]) -> Outcome {
    let mut upload = input;
    let head = read_head::<KernelUpload>(&mut upload).is_ok();
    let all = [
        json::<CreateRequest>(input),
        json::<CreateManyRequest>(input),
        json::<RunRequest>(input),
        json::<ConnectRequest>(input),
        json::<ForkRequest>(input),
        json::<RemoveManyRequest>(input),
        json::<BakeRequest>(input),
        json::<SnapshotRequest>(input),
        json::<RecordRequest>(input),
        json::<VerifyRequest>(input),
        json::<CollectRequest>(input),
        json::<ExecSpec>(input),
        json::<ImageUpload>(input),
        json::<KernelUpload>(input),
    ];
    planted(|| head && upload.len() == 9);
    Outcome::of(head || all.contains(&true))
}

fn record(input: &[u8]) -> Outcome {
    let id = "0123456789ab".parse().unwrap();
    let decode = |bytes: &[u8]| Record::decode("fuzz".into(), bytes, id);
    let Ok(record) = decode(input) else { return Outcome::Refused };
    let Ok(once) = record.encode() else { return Outcome::Refused };
    let again = decode(&once).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&once)));
    assert_eq!(again.encode().ok(), Some(once), "written and read again");
    planted(|| input.windows(8).any(|text| text == b"\"slot\":7"));
    Outcome::Accepted
}

fn machine_seeds() -> Vec<Vec<u8>> {
    let frame = |kind, body: &[u8]| {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, kind, body).unwrap();
        bytes
    };
    let exec = br#"{"exec":{"argv":["true"],"env":[],"cwd":"/","root":"machine","pty":null,
        "stdin":false}}"#;
    vec![
        frame(Kind::Request, br#""status""#),
        frame(Kind::Request, exec),
        [frame(Kind::Stdout, b"out"), frame(Kind::Exit, br#"{"code":0}"#)].concat(),
        frame(Kind::Resize, br#"{"rows":2,"cols":3}"#),
        frame(Kind::Failed, b"no"),
        br#"{"bind":{"id":7,"address":"127.0.0.1:0","to":4000,"udp":true}}"#.to_vec(),
        br#"{"id":7,"refused":{"kind":"taken","why":"no"},"port":40000}"#.to_vec(),
        b"\0\x02hi\0\0\0\x01!".to_vec(),
    ]
}

fn machine_frames(input: &[u8]) -> Outcome {
    let (mut rest, mut encoded, mut known) = (input, Vec::new(), false);
    let mut count = 0;
    while let Ok(Some((kind, body))) = read_frame(&mut rest) {
        assert!(body.len() <= MAX_FRAME_BYTES, "a body of {} bytes", body.len());
        write_frame(&mut encoded, kind, &body).unwrap();
        known |= match kind {
            Kind::Request => json::<Request>(&body),
            Kind::Status => json::<GuestStatus>(&body),
            Kind::Exit => json::<dayfly_machine_init::Exit>(&body),
            Kind::Resize => json::<dayfly_machine_init::WindowSize>(&body),
            _ => true,
        };
        count += 1;
    }
    assert!(input.starts_with(&encoded), "encoded again");
    planted(|| count == 3);
    known |= json::<PortOrder>(input) || json::<PortAnswer>(input);
    let (mut rest, mut encoded, mut buffer) = (input, Vec::new(), vec![0; MAX_DATAGRAM_BYTES]);
    while let Ok(Some(length)) = read_datagram(&mut rest, &mut buffer) {
        encoded.extend_from_slice(&u16::try_from(length).unwrap().to_be_bytes());
        encoded.extend_from_slice(&buffer[..length]);
        known = true;
    }
    assert!(input.starts_with(&encoded), "datagrams encoded again");
    if let Ok(text) = std::str::from_utf8(input)
        && let Ok(token) = Token::from_hex(text)
    {
        assert_eq!(token.to_hex(), text.to_ascii_lowercase(), "a token");
    }
    Outcome::of(known)
}

fn line_seeds() -> Vec<Vec<u8>> {
    let monitor = br#"{"QMP":{"version":{"qemu":{"major":7}},"capabilities":["oob"]}}
{"return":{}}
{"event":"BLOCK_IO_ERROR","data":{"device":"","nospace":true}}
{"event":"STOP"}
"#;
    vec![
        monitor.to_vec(),
        b"{\"event\":\"STOP\"}\n{\"event\":\"RESUME\"}\n".to_vec(),
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{\"vms\":12}".to_vec(),
        b"phase boot\nready\nbye\n".to_vec(),
    ]
}

fn machine_lines(input: &[u8]) -> Outcome {
    let (commands, paused) = fuzzing::monitor(input.split(|byte| *byte == b'\n'));
    let vms = fuzzing::vms_in(input);
    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(input).unwrap();
    drop(here);
    let lines = fuzzing::control_lines(there);
    assert!(lines.len() <= input.len(), "{} lines", lines.len());
    assert!(lines.iter().all(|line| !line.contains('\n')), "{lines:?}");
    planted(|| paused && commands.len() == 2);
    Outcome::of(paused || vms.is_some() || !commands.is_empty() || lines.len() > 1)
}

/// A datagram to another host, one to the host's own range, one with a forged source.
fn uplink_seeds() -> Vec<Vec<u8>> {
    let datagram = |from: [u8; 4], to: [u8; 4]| {
        let head = [0x45, 0, 0, 29, 0, 1, 0x40, 0, 64, 17, 0, 0];
        let body = [0x11, 0x5c, 0, 53, 0, 9, 0, 0, b'x'];
        let packet = [&[2; 12][..], &[8, 0], &head, &from, &to, &body].concat();
        [&[0, 0, 0, 43][..], &packet].concat()
    };
    let (own, other) = ([169, 254, 77, 2], [198, 51, 100, 7]);
    let some = [datagram(own, other), datagram(own, [192, 0, 2, 2])];
    vec![datagram(own, other), some.concat(), datagram(other, own)]
}

fn machine_uplink(input: &[u8]) -> Outcome {
    let (all, allowed) = fuzzing::uplink(input);
    assert!(allowed <= all && all <= input.len() / 5, "{all} frames, {allowed} may leave");
    planted(|| all == 4 && allowed == 3);
    Outcome::of(allowed > 0)
}

/// What the terminal gets but for colours: no control character.
fn check_shown(shown: &[u8]) {
    let text = std::str::from_utf8(shown).expect("UTF-8");
    let mut rest = text;
    while let Some(character) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix("\x1b[") {
            let end = after.find(|c: char| !matches!(c, '0'..='9' | ';' | ':'));
            let end = end.filter(|at| after[*at..].starts_with('m'));
            rest = &after[end.unwrap_or_else(|| panic!("{text:?}: more than a colour")) + 1..];
            continue;
        }
        let fine = !is_unsafe(character) || matches!(character, '\n' | '\r' | '\t');
        assert!(fine, "{text:?} controls the terminal");
        rest = &rest[character.len_utf8()..];
    }
}

fn terminal(input: &[u8]) -> Outcome {
    let mut whole = Filter::default();
    let mut shown = whole.piece(input);
    shown.extend(whole.end());
    check_shown(&shown);
    let (mut pieces, mut in_pieces) = (Filter::default(), Vec::new());
    for piece in input.chunks(3) {
        in_pieces.extend(pieces.piece(piece));
    }
    in_pieces.extend(pieces.end());
    assert_eq!(in_pieces, shown, "in pieces");
    planted(|| shown.windows(7).any(|bytes| bytes == b"\x1b[7;9m"));
    Outcome::of(shown == input)
}
