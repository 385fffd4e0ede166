use super::*;
use crate::wire::Buffers;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

const FOLLOWED: Excerpt = Excerpt { follow: true, tail: None, since_unix_ms: None };

fn program(logs: &Logs, pid: u32) -> File {
    let (write, reader) = pipe().unwrap();
    let spec = ExecSpec { argv: vec![format!("p{pid}")], ..ExecSpec::default() };
    logs.add_with(pid, None, &spec, reader);
    write.into()
}

/// The frames of an answer: the reply, and the data if there is any.
fn asked(logs: &Logs, pid: u32, follow: bool) -> (Reply, Vec<u8>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut conn = Conn::new(Arc::new(ours.into()), Buffers::default());
            let excerpt = Excerpt { follow, ..Excerpt::default() };
            logs.send(&mut conn, &pid.to_string(), excerpt).unwrap();
        });
        answered(theirs)
    })
}

fn answered(mut stream: UnixStream) -> (Reply, Vec<u8>) {
    let (mut reply, mut data) = (None, Vec::new());
    loop {
        let mut header = [0; dayfly_api::agent::HEADER_BYTES];
        stream.read_exact(&mut header).unwrap();
        let (kind, length) = dayfly_api::agent::decode_header(header).unwrap();
        let mut body = vec![0; length];
        stream.read_exact(&mut body).unwrap();
        match kind {
            FrameKind::Reply => {
                let got: Reply = serde_json::from_slice(&body).unwrap();
                if got != Reply::Ok {
                    return (got, data);
                }
                reply = Some(got);
            }
            FrameKind::Data => data.extend(body),
            FrameKind::End => return (reply.unwrap(), data),
            other => panic!("{other:?}"),
        }
    }
}

fn until_ended(logs: &Logs, pid: u32) {
    asked(logs, pid, true);
}

#[test]
fn the_newest_output_is_kept_within_the_bound() {
    let logs = Logs::default();
    let mut out = program(&logs, 7);
    out.write_all(&vec![b'x'; 5 << 20]).unwrap();
    out.write_all(b"\nthe newest line\n").unwrap();
    drop(out);
    until_ended(&logs, 7);
    let (reply, data) = asked(&logs, 7, false);
    let text = String::from_utf8(data).unwrap();
    assert_eq!(reply, Reply::Ok);
    assert!(text.ends_with("x\nthe newest line\n"), "{}", &text[text.len() - 40..]);
    let dropped = (5 << 20) + 17 - LOG_BYTES;
    assert!(text.starts_with(&format!("[dayfly: {dropped} bytes of older output are dropped]\nx")));
    assert!(text.len() < LOG_BYTES + 100, "{}", text.len());
}

#[test]
fn a_client_that_follows_gets_all_of_it_until_the_last_writer_is_gone() {
    let logs = Logs::default();
    let mut out = program(&logs, 7);
    let mut service = out.try_clone().unwrap();
    out.write_all(b"one\n").unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let logs = &logs;
        scope.spawn(move || {
            let mut conn = Conn::new(Arc::new(ours.into()), Buffers::default());
            logs.send(&mut conn, "7", FOLLOWED).unwrap();
        });
        // A read in between: the program ends and leaves a service behind.
        drop(out);
        service.write_all(b"two\n").unwrap();
        service.write_all(b"three\n").unwrap();
        drop(service);
        assert_eq!(answered(theirs).1, b"one\ntwo\nthree\n");
    });
    // A client that disconnects also ends the request, although the program continues.
    let _out = program(&logs, 8);
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let mut conn = Conn::new(Arc::new(ours.into()), Buffers::default());
    let _ = logs.send(&mut conn, "8", FOLLOWED);
}

#[test]
fn the_number_of_kept_programs_is_limited_and_ended_ones_go_first() {
    let logs = Logs::default();
    let mut first = program(&logs, 1);
    drop(program(&logs, 2));
    until_ended(&logs, 2);
    let mut others: Vec<File> = Vec::new();
    for pid in 3..=u32::try_from(MOST_LOGS).unwrap() + 1 {
        others.push(program(&logs, pid));
    }
    let (reply, _) = asked(&logs, 2, false);
    let Reply::Err(Failure { code: FailureCode::NotFound, message }) = reply else {
        panic!("{reply:?}")
    };
    assert!(message.contains("detached program 2: ") && message.contains(" (p1)"), "{message}");
    first.write_all(b"still kept").unwrap();
    // The next program replaces the oldest log although that program runs, and the program does
    // not notice.
    others.push(program(&logs, 1000));
    assert!(matches!(asked(&logs, 1, false).0, Reply::Err(_)));
    first.write_all(&vec![b'x'; 1 << 20]).unwrap();
    assert_eq!(lock(&logs.0).len(), MOST_LOGS);
    assert!(matches!(asked(&Logs::default(), 1, true).0, Reply::Err(_)));
}

/// The output so far that `excerpt` selects.
fn excerpt(logs: &Logs, excerpt: Excerpt) -> String {
    let log = logs.find("7").unwrap();
    let kept = lock(&log.kept);
    let from =
        usize::try_from(kept.start_of(excerpt) - kept.dropped.min(kept.start_of(excerpt))).unwrap();
    String::from_utf8(kept.bytes.iter().skip(from).copied().collect()).unwrap()
}

#[test]
fn the_last_lines_and_the_lines_since_a_time_are_found() {
    let logs = Logs::default();
    let _out = program(&logs, 7);
    let log = logs.find("7").unwrap();
    log.add(b"one\ntwo\nthree\n");
    let tail = |lines| excerpt(&logs, Excerpt { tail: Some(lines), ..Excerpt::default() });
    assert_eq!(
        (tail(0).as_str(), tail(1).as_str(), tail(2).as_str()),
        ("", "three\n", "two\nthree\n")
    );
    assert_eq!(
        (tail(3), tail(u64::MAX)),
        (excerpt(&logs, Excerpt::default()), excerpt(&logs, Excerpt::default()))
    );
    log.add(b"fo");
    assert_eq!((tail(1).as_str(), tail(2).as_str()), ("fo", "three\nfo"));
    // As if the second piece had come ten seconds after the first.
    log.change(|kept| kept.times = [(0, 100_000), (14, 110_000)].into());
    let since = |ms| excerpt(&logs, Excerpt { since_unix_ms: Some(ms), ..Excerpt::default() });
    assert_eq!(since(0), "one\ntwo\nthree\nfo");
    assert_eq!(since(105_000), "one\ntwo\nthree\nfo", "the first piece may go on until then");
    assert_eq!((since(110_000).as_str(), since(111_000).as_str()), ("fo", "fo"));
    assert_eq!(since(111_001), "");
    let both = Excerpt { tail: Some(2), since_unix_ms: Some(110_000), follow: false };
    assert_eq!(excerpt(&logs, both), "fo");
}

#[test]
fn what_is_kept_of_a_command_is_bounded() {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    assert_eq!(cut(&words(&["sh", "-c", "x"])), words(&["sh", "-c", "x"]));
    let long = cut(&words(&["sh", &"\u{e4}".repeat(COMMAND_BYTES), "more"]));
    assert_eq!(long.len(), 2);
    assert_eq!(long[1], "\u{e4}".repeat(COMMAND_BYTES / 2 - 1));
    assert_eq!(cut(&vec![String::new(); 10_000]).len(), COMMAND_BYTES);
}

#[test]
fn an_end_is_noted_and_a_program_that_has_ended_is_forgotten_on_request() {
    let logs = Logs::default();
    let _out = program(&logs, 7);
    let Reply::Programs { programs } = logs.list() else { panic!() };
    let id = programs[0].id.clone();
    assert_eq!((programs.len(), programs[0].pid, programs[0].exit), (1, 7, None));
    let refused = |reply, code| match reply {
        Reply::Err(failure) => assert_eq!(failure.code, code, "{failure:?}"),
        other => panic!("{other:?}"),
    };
    refused(logs.forget(&id), FailureCode::Invalid);
    refused(logs.signal(&id, 33), FailureCode::Invalid);
    let exit = Exit { code: Some(3), signal: None, timed_out: false };
    logs.find(&id).unwrap().exited(exit);
    let Reply::Programs { programs } = logs.list() else { panic!() };
    assert_eq!(programs[0].exit, Some(exit));
    assert!(programs[0].ended_unix_ms.unwrap() >= programs[0].started_unix_ms);
    refused(logs.signal(&id, 15), FailureCode::NotFound);
    assert_eq!(logs.forget("7"), Reply::Ok);
    refused(logs.forget("7"), FailureCode::NotFound);
}
