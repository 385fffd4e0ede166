//! Bytes pass as they are, wherever the hand-over cut them, and however slowly an end reads.

use crate::common::{EXIT, Handover, OUT, RULES, asked, frame, plain, running};
use dayfly_relay::streams::message::{Event, Handed, Heard, Order};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// Bytes that differ at each place.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect()
}

fn read(mut from: &UnixStream, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes).unwrap();
    bytes
}

/// Ends a stream as its daemon does, and returns what the client still gets.
fn ended(Handover { mut client, mut agent, line }: Handover) -> Vec<u8> {
    let exit = frame(EXIT, b"{}");
    agent.write_all(&exit).unwrap();
    assert_eq!(line.next(), Some(Event::Ended(exit.clone())));
    line.order(&Order::Finish(exit));
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert_eq!((line.next(), line.next()), (Some(Event::Done), None));
    rest
}

#[test]
fn both_directions_pass_at_once_in_any_size() {
    let process = running();
    let mut stream = process.take(&plain());
    let frames: Vec<u8> = [0, 1, 4, 4096, 65_536, 65_537, 256 << 10, 3]
        .into_iter()
        .flat_map(|length| frame(OUT, &pattern(length)))
        .collect();
    let input = pattern(3 << 20);
    let (agent, client) = (stream.agent.try_clone().unwrap(), stream.client.try_clone().unwrap());
    std::thread::scope(|scope| {
        // No end reads before it has written all, but in its other thread.
        let (sent, typed) = (&frames, &input);
        scope.spawn(move || (0..4).for_each(|_| (&agent).write_all(sent).unwrap()));
        scope.spawn(move || (&client).write_all(typed).unwrap());
        let got = scope.spawn(|| read(&stream.agent, input.len()));
        assert!(read(&stream.client, 4 * frames.len()) == frames.repeat(4));
        assert!(got.join().unwrap() == input);
    });
    // Byte by byte.
    for byte in frame(OUT, b"ab") {
        stream.agent.write_all(&[byte]).unwrap();
    }
    assert_eq!(read(&stream.client, 7), frame(OUT, b"ab"));
    let bytes = (4 * frames.len() + 7) as u64;
    assert_eq!(asked(&stream.line, 1), Heard { bytes, waits: true });
    assert_eq!(ended(stream), frame(EXIT, b"{}"));
}

#[test]
fn a_stream_is_handed_over_at_any_byte() {
    let process = running();
    let frames = [frame(OUT, b"first"), frame(OUT, b"second")].concat();
    // Up to here the daemon has passed it on or has read it, and up to there it has sent it.
    for read_by_daemon in 0..=frames.len() {
        for sent in 0..=read_by_daemon {
            let first = frame(OUT, b"first").len();
            let into = if read_by_daemon < first { read_by_daemon } else { read_by_daemon - first };
            let length = if read_by_daemon < first { 10 } else { 11 };
            // The daemon sends no header before it has all of it.
            let (begun, left) = match into {
                0 | 11 => (0, 0),
                1..=4 => (into, 0),
                _ => (0, length - into),
            };
            let checked = read_by_daemon - begun;
            if sent > checked {
                continue;
            }
            let stream = process.take(&Handed {
                body_left: u32::try_from(left).unwrap(),
                to_client: frames[sent..checked].to_vec(),
                header: frames[checked..read_by_daemon].to_vec(),
                to_agent: b"typed ".to_vec(),
                ..plain()
            });
            (&stream.client).write_all(b"more").unwrap();
            (&stream.agent).write_all(&frames[read_by_daemon..]).unwrap();
            let at = format!("{read_by_daemon} {sent}");
            assert_eq!(read(&stream.client, frames.len() - sent), &frames[sent..], "{at}");
            assert_eq!(read(&stream.agent, 10), b"typed more", "{at}");
            assert_eq!(ended(stream), frame(EXIT, b"{}"), "{at}");
        }
    }
}

#[test]
fn an_end_that_stalls_stops_its_sender_and_no_other_stream() {
    let process = running();
    let stalled = process.take(&plain());
    let sender = stalled.agent.try_clone().unwrap();
    sender.set_nonblocking(true).unwrap();
    let block = frame(OUT, &pattern(4096));
    let mut sent = 0_usize;
    let mut full = 0;
    // Until nothing was taken many times, while another stream passed bytes.
    while full < 50 {
        match (&sender).write(&block[sent % block.len()..]) {
            Ok(count) => (sent, full) = (sent + count, 0),
            Err(e) => {
                assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
                full += 1;
                let other = process.take(&plain());
                (&other.agent).write_all(&frame(OUT, b"x")).unwrap();
                assert_eq!(read(&other.client, 6), frame(OUT, b"x"));
                assert_eq!(ended(other), frame(EXIT, b"{}"));
            }
        }
    }
    assert!(sent < 4 << 20, "{sent} bytes are held for a client that reads nothing");
    assert!(!asked(&stalled.line, 1).waits, "the next byte is due to the client");
    // The client goes on.
    let all = read(&stalled.client, sent);
    assert!(all.iter().zip(block.iter().cycle()).all(|(got, due)| got == due));
}

#[test]
fn frames_that_an_agent_may_not_send_are_not_passed_on() {
    let process = running();
    for (wrong, kept) in [
        (frame(4, b""), true),
        (frame(32 + OUT, b""), true),
        (frame(OUT, &vec![0; (256 << 10) + 1])[..5].to_vec(), true),
        (frame(EXIT, &[b' '; 1025])[..5].to_vec(), true),
        (frame(OUT, b"")[..4].to_vec(), false),
        (frame(OUT, b"cut")[..6].to_vec(), false),
        (frame(EXIT, b"cut")[..6].to_vec(), false),
    ] {
        let Handover { mut client, mut agent, line } = process.take(&plain());
        agent.write_all(&[frame(OUT, b"good"), wrong.clone()].concat()).unwrap();
        agent.shutdown(std::net::Shutdown::Write).unwrap();
        let event = match kept {
            true => Event::Wrong(wrong[..5].try_into().unwrap()),
            false => Event::Closed,
        };
        assert_eq!(line.next(), Some(event));
        line.order(&Order::Finish(b"why".to_vec()));
        let mut all = Vec::new();
        client.read_to_end(&mut all).unwrap();
        // A client that waits for the rest of a body takes everything for it.
        let is_cut = wrong.len() == 6 && wrong[4] == OUT;
        let end = if is_cut { &wrong[..] } else { b"why" };
        assert_eq!(all, [&frame(OUT, b"good"), end].concat());
    }
}

#[test]
fn what_is_not_a_hand_over_is_not_taken() {
    let process = running();
    let control = process.control.as_ref().unwrap();
    let good = plain().encode();
    let fds = |count: usize| -> Vec<_> {
        (0..count).map(|_| UnixStream::pair().unwrap().0.into()).collect()
    };
    for (message, count) in [(&good[..], 2), (&good, 4), (&good[..43], 3), (b"x", 3)] {
        let (line, of_line) = crate::common::pair();
        let mut fds = fds(count - 1);
        fds.push(of_line);
        crate::common::hand(control, message, &fds);
        drop(fds);
        assert_eq!(crate::common::Line(line).next(), None);
    }
    let long = Handed { to_agent: vec![0; 200 << 10], ..plain() };
    assert_eq!(crate::common::hand_over(control, &long).line.next(), None);
    let both = Handed {
        rules: dayfly_relay::streams::message::Rules { passed: 1 << 9, ..RULES },
        ..plain()
    };
    assert_eq!(crate::common::hand_over(control, &both).line.next(), None);
    assert_eq!(ended(process.take(&plain())), frame(EXIT, b"{}"));
}
