//! How streams end, and that nothing of them is left.

use crate::common::{
    EXIT, HANG, Handover, OUT, asked, frame, hand, hand_over, pair, plain, running, running_with,
};
use dayfly_relay::streams::message::{Event, Handed, Order};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Instant;

fn rest(mut from: UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    from.read_to_end(&mut rest).unwrap();
    rest
}

#[test]
fn a_client_that_goes_at_any_byte_ends_its_program_and_leaves_nothing() {
    let process = running();
    let output = [frame(OUT, b"one"), frame(OUT, b"two"), frame(EXIT, b"{}")].concat();
    for half_closed in [false, true] {
        for sent in 0..=output.len() {
            let Handover { client, mut agent, line } = process.take(&plain());
            agent.write_all(&output[..sent]).unwrap();
            if sent == output.len() {
                assert!(matches!(line.next(), Some(Event::Ended(_))));
            }
            if half_closed && sent < output.len() {
                client.shutdown(Shutdown::Write).unwrap();
            } else {
                drop(client);
            }
            assert_eq!((line.next(), line.next()), (Some(Event::Gone), None), "{sent}");
            // The agent sees the end, and kills the program. What it wrote is unread, or not.
            let _ = agent.read(&mut [0]);
            assert_eq!(agent.write(b"x").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
        }
    }
}

#[test]
fn a_client_that_neither_reads_nor_is_read_from_is_missed_when_it_goes() {
    let process = running();
    let Handover { client, agent, line } = process.take(&plain());
    // Both directions are full.
    let mut questions = 0;
    for (end, block) in [(&client, vec![0; 4096]), (&agent, frame(OUT, &[0; 4091]))] {
        end.set_nonblocking(true).unwrap();
        let (mut sent, mut full) = (0, 0_u64);
        while full < 20 {
            match (&*end).write(&block[sent % 4096..]) {
                Ok(count) => (sent, full) = (sent + count, 0),
                Err(_) => {
                    full += 1;
                    // The process has its turn: it answers when it has passed on what it could.
                    questions += 1;
                    asked(&line, questions);
                }
            }
        }
    }
    drop(client);
    assert_eq!((line.next(), line.next()), (Some(Event::Gone), None));
    let mut end = &agent;
    while matches!(end.read(&mut [0; 4096]), Ok(1..)) {}
    assert_eq!(end.write(b"x").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
}

#[test]
fn an_agent_that_takes_nothing_any_more_is_heard_to_its_end() {
    let process = running();
    let Handover { mut client, mut agent, line } = process.take(&plain());
    agent.shutdown(Shutdown::Read).unwrap();
    // More than all buffers take: nothing waits for the agent.
    let input = vec![7; 4 << 20];
    let mut writer = client.try_clone().unwrap();
    let written = std::thread::spawn(move || writer.write_all(&input).unwrap());
    agent.write_all(&frame(OUT, b"refused: ")).unwrap();
    let mut got = [0; 14];
    client.read_exact(&mut got).unwrap();
    assert_eq!(got[..], frame(OUT, b"refused: "));
    written.join().unwrap();
    agent.write_all(&frame(EXIT, b"why")).unwrap();
    assert_eq!(line.next(), Some(Event::Ended(frame(EXIT, b"why"))));
    line.order(&Order::Finish(b"end".to_vec()));
    assert_eq!(rest(client), b"end");
}

#[test]
fn streams_go_on_without_their_daemon_to_their_end() {
    let mut process = running();
    // The daemon ends before the end of the stream, between the end and its answer, and before a
    // connection that breaks.
    let mut before = process.take(&plain());
    let mut between = process.take(&plain());
    let mut broken = process.take(&plain());
    between.agent.write_all(&frame(EXIT, b"{1}")).unwrap();
    assert!(matches!(between.line.next(), Some(Event::Ended(_))));
    process.without_daemon();
    drop((before.line, between.line, broken.line));
    assert_eq!(rest(between.client), frame(EXIT, b"{1}"));
    for _ in 0..3 {
        before.agent.write_all(&frame(OUT, b"more")).unwrap();
        let mut got = [0; 9];
        before.client.read_exact(&mut got).unwrap();
        assert_eq!(got[..], frame(OUT, b"more"));
        before.client.write_all(b"typed").unwrap();
        let mut got = [0; 5];
        before.agent.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"typed");
    }
    broken.agent.write_all(&frame(OUT, b"half")).unwrap();
    drop(broken.agent);
    assert_eq!(rest(broken.client), [frame(OUT, b"half"), b"no daemon".to_vec()].concat());
    before.agent.write_all(&frame(EXIT, b"{2}")).unwrap();
    assert_eq!(rest(before.client), frame(EXIT, b"{2}"));
    // The last stream was the last work.
    process.join();
}

#[test]
fn the_daemon_can_end_a_stream_but_never_inside_a_frame() {
    let process = running();
    for (sent, sent_too) in [(&frame(OUT, b"whole")[..], true), (&frame(OUT, b"half")[..7], false)]
    {
        let Handover { mut client, mut agent, line } = process.take(&plain());
        agent.write_all(sent).unwrap();
        let mut got = vec![0; sent.len()];
        client.read_exact(&mut got).unwrap();
        assert_eq!(got, sent);
        line.order(&Order::Finish(b"silent".to_vec()));
        assert_eq!(rest(client), if sent_too { &b"silent"[..] } else { b"" });
        assert_eq!((line.next(), line.next()), (Some(Event::Done), None));
        assert_eq!(agent.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn a_line_with_other_words_is_no_daemon() {
    let process = running();
    let Handover { client, mut agent, line } = process.take(&plain());
    rustix::net::send(&line.0, b"?", rustix::net::SendFlags::empty()).unwrap();
    agent.write_all(&frame(EXIT, b"{}")).unwrap();
    assert_eq!(rest(client), frame(EXIT, b"{}"));
}

#[test]
fn more_streams_than_the_bound_are_not_taken() {
    let process = running_with(3);
    let all: Vec<_> = (0..3).map(|_| process.take(&plain())).collect();
    let control = process.control.as_ref().unwrap();
    assert_eq!(hand_over(control, &plain()).line.next(), None);
    let Handover { client, line, agent: _agent } = all.into_iter().next_back().unwrap();
    drop(client);
    assert_eq!((line.next(), line.next()), (Some(Event::Gone), None));
    process.take(&plain());
}

#[test]
fn a_vm_that_ends_ends_its_streams_and_the_process() {
    let mut process = running();
    let Handover { client, mut agent, line } = process.take(&plain());
    agent.write_all(&frame(OUT, b"last words")).unwrap();
    // The VMM's sockets end with it.
    drop((agent, process.vmm.take()));
    assert_eq!(line.next(), Some(Event::Closed));
    line.order(&Order::Finish(b"ended".to_vec()));
    assert_eq!(rest(client), [frame(OUT, b"last words"), b"ended".to_vec()].concat());
    // With its daemon, which may not hand over any more.
    process.join();
}

#[test]
fn a_connection_that_breaks_inside_a_frame_is_only_closed() {
    let mut process = running();
    for has_daemon in [true, false] {
        let Handover { client, mut agent, line } = process.take(&plain());
        agent.write_all(&frame(OUT, b"half")[..7]).unwrap();
        if has_daemon {
            drop(agent);
            assert_eq!(line.next(), Some(Event::Closed));
            line.order(&Order::Finish(b"why".to_vec()));
            assert_eq!((line.next(), line.next()), (Some(Event::Done), None));
        } else {
            process.without_daemon();
            drop((line, agent));
        }
        assert_eq!(rest(client), frame(OUT, b"half")[..7], "{has_daemon}");
    }
}

#[test]
fn a_client_that_reads_late_gets_all_that_came_before_the_last_bytes() {
    let process = running();
    let Handover { client, mut agent, line } = process.take(&plain());
    let block = frame(OUT, &[7; 4091]);
    let (mut blocks, mut questions, begun) = (0, 0, Instant::now());
    // Until the client's kernel takes no more, and the process has a part of the last block.
    loop {
        agent.write_all(&block).unwrap();
        blocks += 1;
        let heard = loop {
            questions += 1;
            let heard = asked(&line, questions);
            if heard.bytes == 4096 * blocks {
                break heard;
            }
            assert!(begun.elapsed() < HANG, "{heard:?} of {blocks} blocks");
        };
        if !heard.waits {
            break;
        }
    }
    line.order(&Order::Finish(frame(EXIT, b"late")));
    // The process has dealt with it.
    questions += 1;
    assert!(!asked(&line, questions).waits);
    let all = rest(client);
    let end = frame(EXIT, b"late");
    assert_eq!(all.len() as u64, 4096 * blocks + end.len() as u64);
    assert!(all.ends_with(&end) && all[..all.len() - end.len()].chunks(4096).all(|b| b == block));
    assert_eq!((line.next(), line.next()), (Some(Event::Done), None));
}

#[test]
fn what_a_client_sends_before_it_goes_gets_to_the_agent() {
    let process = running();
    for length in [0, 5, 100_000] {
        for is_late in [false, true] {
            let handed = Handed { to_agent: b"queued ".to_vec(), ..plain() };
            let Handover { mut client, agent, line } = process.offer(&handed);
            if is_late {
                line.order(&Order::Go);
            }
            client.write_all(&vec![b'x'; length]).unwrap();
            drop(client);
            if !is_late {
                line.order(&Order::Go);
            }
            assert_eq!((line.next(), line.next()), (Some(Event::Gone), None));
            let all = rest(agent);
            assert_eq!(all, [b"queued ".to_vec(), vec![b'x'; length]].concat(), "{is_late}");
        }
    }
}

/// A stream that is offered, with the daemon's own descriptors of its connections.
struct Offered {
    client: UnixStream,
    agent: UnixStream,
    own: [UnixStream; 2],
    line: crate::common::Line,
}

fn offered(process: &crate::common::Running) -> Offered {
    let (client, to_client) = UnixStream::pair().unwrap();
    let (agent, to_agent) = UnixStream::pair().unwrap();
    for end in [&to_client, &to_agent] {
        end.set_nonblocking(true).unwrap();
    }
    let own = [to_client.try_clone().unwrap(), to_agent.try_clone().unwrap()];
    let (line, of_process) = pair();
    let fds = [to_client.into(), to_agent.into(), of_process];
    hand(process.control.as_ref().unwrap(), &plain().encode(), &fds);
    Offered { client, agent, own, line: crate::common::Line(line) }
}

/// The daemon goes on with its stream, of which nothing is missing.
fn is_the_daemon_s(Offered { mut client, mut agent, own: [to_client, to_agent], .. }: Offered) {
    for end in [&to_client, &to_agent] {
        end.set_nonblocking(false).unwrap();
        end.set_read_timeout(Some(HANG)).unwrap();
    }
    for (from, mut to) in [(&mut client, &to_client), (&mut agent, &to_agent)] {
        from.write_all(b"there").unwrap();
        let mut got = [0; 5];
        to.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"there");
        to.write_all(b"back!").unwrap();
        from.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"back!");
    }
}

#[test]
fn a_stream_is_the_daemon_s_until_it_says_otherwise() {
    let mut process = running();
    // One that is taken, and one that the daemon takes back before it knows of that.
    for is_late in [false, true] {
        let stream = offered(&process);
        if !is_late {
            assert_eq!(stream.line.next(), Some(Event::Taken));
        }
        (&stream.agent).write_all(&frame(OUT, b"x")).unwrap();
        stream.line.order(&Order::No);
        if !is_late {
            assert_eq!(stream.line.next(), None);
        }
        let Offered { client, agent, own, line } = stream;
        drop(line);
        // The process has dealt with it, because it takes what is handed over in turn.
        let other = process.take(&plain());
        asked(&other.line, 1);
        let [to_client, to_agent] = own;
        let mut got = [0; 6];
        to_agent.set_nonblocking(false).unwrap();
        to_agent.set_read_timeout(Some(HANG)).unwrap();
        (&to_agent).read_exact(&mut got).unwrap();
        assert_eq!(got[..], frame(OUT, b"x"), "{is_late}");
        let line = crate::common::Line(pair().0);
        is_the_daemon_s(Offered { client, agent, own: [to_client, to_agent], line });
    }
    // A daemon that ends says neither.
    let Offered { mut client, mut agent, own, line } = offered(&process);
    assert_eq!(line.next(), Some(Event::Taken));
    process.without_daemon();
    drop((own, line));
    agent.write_all(&frame(EXIT, b"{}")).unwrap();
    let mut all = Vec::new();
    client.set_read_timeout(Some(HANG)).unwrap();
    client.read_to_end(&mut all).unwrap();
    assert_eq!(all, frame(EXIT, b"{}"));
}
