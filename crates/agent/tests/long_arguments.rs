//! Programs whose arguments and environment do not fit into a frame.

mod common;

use common::{Client, Guest, sh};
use dayfly_agent::exec::strings::AT_ONCE;
use dayfly_api::agent::{
    ExecSpec, FailureCode, FrameKind, HEADER_BYTES, MAX_STRINGS_BYTES, PROTOCOL, Reply, Request,
    encode, kernel_bytes, request_frames,
};
use std::io::Write;

/// Asks for a program whose strings may not fit into a frame.
fn ask_long(guest: &Guest, spec: ExecSpec) -> (Client, Reply) {
    let mut client = guest.connect();
    let frames = request_frames(&mut Request::Exec(Box::new(spec)), PROTOCOL).unwrap();
    client.stream.write_all(&frames).unwrap();
    let reply = client.reply();
    (client, reply)
}

#[test]
fn arguments_and_environment_may_be_almost_2_mib() {
    let guest = Guest::start();
    let long = |n: usize| format!("{n}{}", "x".repeat(118_000 - n.to_string().len()));
    let mut spec = sh("echo $# ${#1} ${#LONG}");
    spec.argv.push("sh".into());
    spec.argv.extend((0..15).map(long));
    spec.env.insert("LONG".into(), long(15));
    assert!(kernel_bytes(&spec) > 1_880_000);
    let (mut client, reply) = ask_long(&guest, spec.clone());
    let Reply::Started { pid, .. } = reply else { panic!("{reply:?}") };
    assert_eq!(client.output(pid).stdout, b"15 118000 118000\n");
    // Linux's limits: of one string, and of all.
    let one = ExecSpec { argv: vec!["/bin/true".into(), "x".repeat(128 << 10)], ..spec.clone() };
    spec.argv.extend((16..18).map(long));
    assert!(kernel_bytes(&spec) <= MAX_STRINGS_BYTES + 50_000);
    spec.argv.last_mut().unwrap().truncate(60_000);
    for refused in [one, spec] {
        let (_, reply) = ask_long(&guest, refused);
        let Reply::Err(failure) = reply else { panic!("{reply:?}") };
        assert_eq!(failure.code, FailureCode::NotPermitted);
        assert!(failure.message.contains("E2BIG"), "{}", failure.message);
    }
}

#[test]
fn strings_that_were_not_announced_are_refused() {
    let guest = Guest::start();
    let exec = |bytes: usize| {
        let json = format!(r#"{{"op":"exec","strings":{{"arguments":1,"bytes":{bytes}}}}}"#);
        encode(FrameKind::Request, json.as_bytes())
    };
    for (bytes, wanted) in [
        ([exec(9), encode(FrameKind::Strings, b"")].concat(), "1 to 9 bytes"),
        ([exec(2), encode(FrameKind::Strings, b"abc")].concat(), "1 to 2 bytes"),
        ([exec(2), encode(FrameKind::Stdin, b"ab")].concat(), "expected Strings"),
        ([exec(2), encode(FrameKind::Strings, b"ab")].concat(), "1 strings"),
        (exec(MAX_STRINGS_BYTES + 1), "E2BIG"),
        (encode(FrameKind::Strings, b"x"), "expected a request"),
    ] {
        let mut client = guest.connect();
        client.stream.write_all(&bytes).unwrap();
        let reply = client.reply();
        assert!(matches!(&reply, Reply::Err(f) if f.message.contains(wanted)), "{reply:?}");
    }
}

/// The frames of a program with 1.88 MB of arguments, and where they may be cut: behind each frame,
/// and at 200 other offsets.
fn cuts() -> (Vec<u8>, Vec<usize>) {
    let mut spec = sh("echo $#");
    spec.argv.extend((0..16).map(|n| format!("{n}{}", "x".repeat(117_000))));
    let frames = request_frames(&mut Request::Exec(Box::new(spec)), PROTOCOL).unwrap();
    let (mut cuts, mut at) = (Vec::new(), 0);
    while let Some(length) = frames.get(at..at + 4) {
        let length = u32::from_le_bytes(length.try_into().unwrap());
        at += HEADER_BYTES + usize::try_from(length).unwrap();
        cuts.push(at);
    }
    assert!(cuts.len() > 7 && cuts.pop() == Some(frames.len()));
    // Knuth's MMIX generator: the same offsets in each run.
    let mut number = 1_u64;
    cuts.extend(
        std::iter::repeat_with(|| {
            number = number
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(number >> 33).unwrap() % frames.len()
        })
        .take(200),
    );
    (frames, cuts)
}

#[test]
fn a_client_that_goes_within_long_arguments_leaves_their_memory_to_others() {
    let guest = Guest::start();
    let (frames, cuts) = cuts();
    for cut in cuts {
        let mut client = guest.connect();
        client.stream.write_all(&frames[..cut]).unwrap();
    }
    let mut client = guest.connect();
    client.stream.write_all(&frames).unwrap();
    let Reply::Started { pid, .. } = client.reply() else { panic!() };
    assert_eq!(client.output(pid).stdout, b"15\n");
}

#[test]
fn beside_clients_that_stall_within_long_arguments_short_programs_run_and_long_ones_wait() {
    let guest = Guest::start();
    let (frames, cuts) = cuts();
    // All places for long arguments are taken once the agent has read more than a socket has.
    let mut stalled: Vec<Client> = cuts[3..3 + AT_ONCE]
        .iter()
        .map(|cut| {
            let mut client = guest.connect();
            client.stream.write_all(&frames[..*cut]).unwrap();
            client
        })
        .collect();
    assert_eq!(guest.sh("echo short").stdout, b"short\n");
    let mut client = guest.connect();
    let mut writer = client.stream.try_clone().unwrap();
    let rest = frames.clone();
    let writes = std::thread::spawn(move || writer.write_all(&rest).unwrap());
    assert_eq!(guest.sh("echo short").stdout, b"short\n");
    assert!(!writes.is_finished(), "more is in memory than there are places");
    drop(stalled.pop());
    let Reply::Started { pid, .. } = client.reply() else { panic!() };
    writes.join().unwrap();
    assert_eq!(client.output(pid).stdout, b"15\n");
}
