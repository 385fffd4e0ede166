//! Frames between host and agent, read by both sides; what PID 1 reads of its guest.

use super::vmm::json;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_agent::exec::cage::Cages;
use dayfly_agent::exec::users::resolve;
use dayfly_agent::exec::{self, Programs};
use dayfly_agent::fuzzing;
use dayfly_agent::init::cmdline;
use dayfly_agent::wire::{Buffers, Conn};
use dayfly_api::agent::{
    Collector, ExecSpec, Exit, FrameKind, HEADER_BYTES, HostReply, HostRequest, Identity,
    MAX_FRAME_BYTES, MAX_STRINGS_BYTES, Reply, Request, STRINGS_PROTOCOL, Strings, WindowSize,
    decode_header, encode, kernel_bytes, request_frames,
};
use dayfly_daemon::vmm::agent_link::{parse_reply, read_frame};
use futures::FutureExt;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, LazyLock};

const SMALL: Heap = Heap { fixed: 1 << 20, per_byte: 128 };

/// The targets of this file.
pub const TARGETS: &[Target] = &[
    Target {
        name: "agent-frames",
        what: "frames and their JSON, as agent and daemon read them",
        stateful: false,
        most_bytes: 4096,
        heap: SMALL,
        run: frames,
        seeds: frame_seeds,
    },
    Target {
        name: "agent-strings",
        what: "Strings frames behind the request of a program",
        stateful: false,
        most_bytes: 2048,
        heap: SMALL,
        run: collected,
        seeds: || {
            let seeds = [
                &b"\x02\x03/bin/x\0-c\0A=b\0"[..],
                b"\x01\x40a\0A=1\0B==\0C=\0",
                b"\0\x01",
                b"\x02\x01\0\0",
            ];
            seeds.map(<[u8]>::to_vec).into()
        },
    },
    Target {
        name: "guest-files",
        what: "accounts, /etc/hosts and the kernel's command line",
        stateful: false,
        most_bytes: 2048,
        heap: SMALL,
        run: files,
        seeds: file_seeds,
    },
    Target {
        name: "guest-lines",
        what: "requests of programs in the guest",
        stateful: false,
        most_bytes: 256,
        heap: SMALL,
        run: local,
        seeds: || {
            let lines = ["fork\n", "fork 3\n", "watch barrier 40\n", "watch\n", "fork 0\n", "x"];
            lines.iter().map(|line| line.as_bytes().to_vec()).collect()
        },
    },
    Target {
        name: "agent-exec",
        what: "a client's frames while a program runs",
        stateful: true,
        most_bytes: 1024,
        heap: SMALL,
        run: session,
        seeds: session_seeds,
    },
];

fn frame_seeds() -> Vec<Vec<u8>> {
    let request = |text: &str| encode(FrameKind::Request, text.as_bytes());
    let reply = |text: &str| encode(FrameKind::Reply, text.as_bytes());
    vec![
        request(r#"{"op":"ping"}"#),
        request(
            r#"{"op":"exec","argv":["/bin/sh","-c","x"],"env":{"A":"b"},"pty":{"rows":2,
                "cols":3}}"#,
        ),
        [
            request(r#"{"op":"exec","strings":{"arguments":2,"bytes":14}}"#),
            encode(FrameKind::Strings, b"/bin/x\0"),
            encode(FrameKind::Strings, b"-c\0A=b\0"),
        ]
        .concat(),
        request(r#"{"op":"write_archive","path":"/tmp"}"#),
        request(
            r#"{"op":"identity","hostname":"web-1",
                "machine_id":"0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f","wall_clock_ns":1,
                "entropy":"00","network":{"mac":"02:df:0a:58:00:02","address":"10.88.0.2",
                "gateway":"10.88.0.1","nameservers":["10.88.0.1"]}}"#,
        ),
        request(r#"{"op":"fork","count":3}"#),
        [reply(r#"{"reply":"started","pid":7}"#), encode(FrameKind::Stdout, b"out")].concat(),
        reply(r#"{"reply":"err","code":"not_found","message":"no"}"#),
        reply(r#"{"reply":"forked","ids":["0123456789ab"]}"#),
        reply(r#"{"reply":"ready","version":"0.1.0","kernel":"6.12","uptime_us":1,"sealed":true}"#),
        encode(FrameKind::Exit, br#"{"code":0,"signal":null,"timed_out":false}"#),
        encode(FrameKind::Resize, br#"{"rows":24,"cols":80}"#),
        encode(FrameKind::End, b""),
    ]
}

/// The frames in `bytes`, as the agent's side of a connection reads them.
fn agent_reads(bytes: &[u8]) -> Vec<(FrameKind, Vec<u8>)> {
    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(bytes).unwrap();
    drop(here);
    let mut conn = Conn::new(Arc::new(OwnedFd::from(there)), Buffers::default());
    let mut all = Vec::new();
    while let Ok(true) = conn.wait_frame(std::time::Duration::from_secs(60)) {
        let (kind, body) = conn.frame().unwrap().expect("a frame that has come");
        all.push((kind, body.to_vec()));
        conn.consume();
    }
    all
}

fn frames(input: &[u8]) -> Outcome {
    let mut rest = input;
    let mut all = Vec::new();
    // Bytes in memory are always ready, so the future never waits.
    while let Ok(Some(frame)) = read_frame(&mut rest, "fuzz").now_or_never().unwrap() {
        assert!(frame.body.len() <= MAX_FRAME_BYTES, "a body of {} bytes", frame.body.len());
        all.push((frame.kind, frame.body));
    }
    assert_eq!(agent_reads(input), all, "agent and daemon read the same frames");
    let mut at = 0;
    for (kind, body) in &all {
        let bytes = encode(*kind, body);
        assert_eq!(input[at..at + bytes.len()], bytes, "encoded again");
        at += bytes.len();
    }
    let mut known = strings(&all);
    for (kind, body) in all {
        known |= match kind {
            FrameKind::Request => request(&body),
            FrameKind::Strings => false,
            FrameKind::Reply => {
                let host = json::<HostReply>(&body);
                let reply = json::<Reply>(&body);
                let frame = dayfly_api::agent::Frame { kind, body };
                let _parsed = parse_reply(Some(frame), "fuzz").map_err(|e| e.to_string());
                host || reply
            }
            FrameKind::Exit => json::<Exit>(&body),
            FrameKind::Resize => json::<WindowSize>(&body),
            _ => true,
        };
    }
    Outcome::of(known)
}

/// Strings frames: a number of arguments, the length of a frame, the strings.
fn collected(input: &[u8]) -> Outcome {
    let [arguments, piece, strings @ ..] = input else { return Outcome::Refused };
    let bytes = u32::try_from(strings.len()).unwrap();
    let announced = Strings { arguments: u32::from(*arguments), bytes };
    let mut spec = ExecSpec { strings: Some(announced), ..ExecSpec::default() };
    let mut collector = Collector::of(&mut spec).unwrap().expect("strings are announced");
    for piece in strings.chunks(usize::from(*piece).max(1)) {
        collector.add(piece).expect("no more than announced");
    }
    assert!(collector.is_complete() && collector.add(b"x").is_err(), "more than announced");
    if collector.finish(&mut spec).is_err() {
        return Outcome::Refused;
    }
    assert_eq!(spec.argv.len(), usize::from(*arguments));
    let argv: String = spec.argv.iter().flat_map(|word| [word.as_str(), "\0"]).collect();
    assert!(strings.starts_with(argv.as_bytes()), "arguments as they were sent");
    for (name, value) in &spec.env {
        let variable = format!("{name}={value}\0");
        let rest = &strings[argv.len()..];
        assert!(rest.windows(variable.len()).any(|part| part == variable.as_bytes()), "{name}");
    }
    planted(|| spec.argv.len() == 3 && spec.env.len() == 2);
    Outcome::Accepted
}

/// A program whose strings follow its request. Sent again, it has the same strings.
fn strings(frames: &[(FrameKind, Vec<u8>)]) -> bool {
    let mut frames = frames.iter();
    let Some((FrameKind::Request, body)) = frames.next() else { return false };
    let Ok(Request::Exec(mut spec)) = serde_json::from_slice(body) else { return false };
    let Ok(Some(mut collector)) = Collector::of(&mut spec) else { return false };
    for (_, body) in frames.take_while(|(kind, _)| *kind == FrameKind::Strings) {
        if collector.add(body).is_err() {
            return false;
        }
    }
    if !collector.is_complete() || collector.finish(&mut spec).is_err() {
        return false;
    }
    assert!(kernel_bytes(&spec) <= MAX_STRINGS_BYTES, "more than a program can have");
    let mut again = Request::Exec(spec.clone());
    let sent = request_frames(&mut again, STRINGS_PROTOCOL).expect("a program to send");
    assert!(sent.len() > HEADER_BYTES);
    planted(|| spec.argv.len() == 3 && spec.env.len() == 2);
    true
}

fn request(body: &[u8]) -> bool {
    if let Ok(Request::Identity(identity)) = serde_json::from_slice(body) {
        let _valid = fuzzing::is_valid(&identity);
        planted(|| identity.network.is_none() && identity.number == 5);
    }
    let _identity = json::<Identity>(body);
    json::<Request>(body) || json::<HostRequest>(body)
}

fn file_seeds() -> Vec<Vec<u8>> {
    let passwd =
        "root:x:0:0:root:/root:/bin/sh\nann:x:1000:100:Ann:/home/ann:/bin/sh\n7:x:7:7::/:\n";
    let group = "root:x:0:\nusers:x:100:\nwheel:x:10:bob,ann\n";
    let line = "console=ttyS0 quiet root=/dev/vda ro rootflags=\"a b\" dayfly.init=/sbin/init -- x";
    let hosts = "127.0.0.1 localhost\n127.0.1.1 old old.lan # old\n::1 localhost\n10.0.0.1 old\n";
    vec![
        ["ann", passwd, group, line, hosts].join("\0").into_bytes(),
        ["ann:users", passwd, group, "root=/dev/vdb", ""].join("\0").into_bytes(),
        ["1000:7", passwd, group, "", "127.0.1.1 new\n"].join("\0").into_bytes(),
        ["", "", "", "dayfly.x=1", "# nothing"].join("\0").into_bytes(),
    ]
}

fn files(input: &[u8]) -> Outcome {
    let text = String::from_utf8_lossy(input);
    let mut parts = text.split('\0');
    let mut next = || parts.next().unwrap_or_default();
    let (spec, passwd, group, line, hosts) = (next(), next(), next(), next(), next());
    let account = resolve(spec, passwd, group);
    if let Ok(account) = &account {
        assert!(account.groups.contains(&account.gid), "{account:?}");
        assert!(account.groups.is_sorted() && account.groups.len() <= 1025, "{account:?}");
        assert!(!account.home.is_empty(), "{account:?}");
        planted(|| account.groups.len() == 3);
    }
    let options = cmdline::parse(line);
    if let Ok(options) = &options {
        assert!(options.root.starts_with("/dev/"), "{options:?}");
    }
    let once = fuzzing::hosts(hosts, Some("old"), "new");
    let entries = once.lines().filter_map(|line| line.split('#').next());
    let mut words = entries.flat_map(str::split_ascii_whitespace);
    assert!(words.any(|name| name == "new"), "{once}");
    assert_eq!(fuzzing::hosts(&once, Some("old"), "new"), once, "twice");
    Outcome::of(account.is_ok() || options.is_ok())
}

static PROGRAMS: LazyLock<Arc<Programs>> = LazyLock::new(|| {
    let cages = Cages::open(Path::new("/nonexistent"));
    Arc::new(Programs::new("/".into(), cages, false))
});

fn local(input: &[u8]) -> Outcome {
    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(input).unwrap();
    here.shutdown(Shutdown::Write).unwrap();
    let answer = fuzzing::local(&there, &PROGRAMS);
    planted(|| input.starts_with(b"watch 41 "));
    match answer {
        Ok(Some(answer)) => panic!("{answer:?}, although the host does not listen"),
        Ok(None) => Outcome::Accepted,
        Err(why) => {
            assert!(why.len() < 1000, "an error of {} bytes", why.len());
            Outcome::of(why.starts_with("the host did not listen"))
        }
    }
}

fn session_seeds() -> Vec<Vec<u8>> {
    let stdin = |bytes: &[u8]| encode(FrameKind::Stdin, bytes);
    let resize = encode(FrameKind::Resize, br#"{"rows":24,"cols":80}"#);
    let signal = |n: u32| encode(FrameKind::Signal, &n.to_le_bytes());
    let end = encode(FrameKind::StdinEnd, b"");
    vec![
        [stdin(b"hello"), resize.clone(), stdin(b""), stdin(b"more"), end.clone()].concat(),
        [stdin(b"x"), signal(15)].concat(),
        [stdin(b"x"), signal(0), signal(200), end.clone()].concat(),
        [resize, encode(FrameKind::Request, b"{}")].concat(),
        [end.clone(), end, stdin(b"late")].concat(),
        vec![0xff; 5],
    ]
}

/// The standard input in `bytes`, and whether it ends and nothing but it, window sizes, and ends
/// behind it is in them.
fn stdin_of(bytes: &[u8]) -> (Vec<u8>, bool) {
    let (mut rest, mut stdin) = (bytes, Vec::new());
    while let Some((header, after)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok((kind, length)) = decode_header(*header) else { return (stdin, false) };
        let Some((body, after)) = after.split_at_checked(length) else { return (stdin, false) };
        match kind {
            FrameKind::Stdin => stdin.extend_from_slice(body),
            FrameKind::StdinEnd => {
                let end = encode(FrameKind::StdinEnd, b"");
                return (stdin, after.is_empty() || after == end);
            }
            FrameKind::Resize if json::<WindowSize>(body) => {}
            _ => return (stdin, false),
        }
        rest = after;
    }
    // The end was the last bytes of a frame.
    (stdin, false)
}

/// Runs `cat`, whose client sends `input` and then the end of standard input. Each byte that comes
/// back is one that was sent, and all come back unless a signal or an error ends the program.
fn session(input: &[u8]) -> Outcome {
    let (mut client, agent) = UnixStream::pair().unwrap();
    // The end may be the last bytes of a frame that the input begins.
    let sent = [input, &encode(FrameKind::StdinEnd, b"")].concat();
    client.write_all(&sent).unwrap();
    let (sent, plain) = stdin_of(&sent);
    let mut conn = Conn::new(Arc::new(OwnedFd::from(agent)), Buffers::default());
    let spec = ExecSpec {
        argv: vec!["/bin/cat".into()],
        stdin: true,
        // A program that a signal has stopped ends nevertheless, and one whose client owes the rest
        // of a frame. Any other one ends by itself.
        timeout_ms: Some(if plain { 60_000 } else { 100 }),
        ..ExecSpec::default()
    };
    let served = exec::run(&PROGRAMS, &mut conn, spec);
    drop(conn);
    let mut bytes = Vec::new();
    // Unread input of the client resets the connection after what was sent.
    let _end = client.read_to_end(&mut bytes);
    let frames = agent_reads(&bytes);
    let got: Vec<u8> = frames
        .iter()
        .filter(|(kind, _)| *kind == FrameKind::Stdout)
        .flat_map(|(_, body)| body.clone())
        .collect();
    assert!(sent.starts_with(&got), "{got:?} came back of {sent:?}");
    let exit: Option<Exit> = frames
        .iter()
        .find(|(kind, _)| *kind == FrameKind::Exit)
        .map(|(_, body)| serde_json::from_slice(body).unwrap());
    if plain && served.is_ok() {
        assert_eq!(got, sent, "what came back");
        assert_eq!(exit.and_then(|exit| exit.code), Some(0), "how the program ended");
    }
    planted(|| exit.is_some_and(|exit| exit.signal == Some(10)));
    Outcome::of(served.is_ok())
}
