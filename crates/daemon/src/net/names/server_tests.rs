//! The service at real sockets. The service identifies guests by address, so each test has a
//! network namespace with the gateway's and the guests' addresses. One test has taps, to which it
//! writes frames as guests do.

use super::*;
use crate::net::names::index::Policy;
use crate::net::names::limits::most_within;
use crate::net::names::message::kind;
use crate::net::names::message_tests::{bomb, labels, question, question_edns, with_head};
use crate::net::names::server_world::*;
use crate::net::names::sockets;
use dayfly_units::VmId;
use simple_dns::rdata::RData;
use simple_dns::{Packet, RCODE};
use std::io::Write;
use std::net::UdpSocket as Blocking;
use std::sync::atomic::Ordering::Relaxed;

/// A name whose question panics.
pub(super) const PANICS: &[u8] = b"\x0aon-purpose\x06panics\0";
#[test]
fn a_vm_finds_its_network_by_name_and_by_address_and_no_other_vm_does() {
    alone(|| {
        let world = world();
        let (web, shut) = (udp(2), udp(4));
        for name in ["db.dayfly.internal", "DB.Dayfly.Internal"] {
            assert_eq!(address(&ask(&web, &question(7, name, kind::A))), Some(ip(3)), "{name}");
        }
        assert_eq!(address(&ask(&web, &question(7, "web.dayfly.internal", kind::A))), Some(ip(2)));
        let ptr = ask(&web, &question_edns(7, "3.0.88.10.in-addr.arpa", kind::PTR, 1232));
        let RData::PTR(name) = &Packet::parse(&ptr).unwrap().answers[0].rdata else { panic!() };
        assert_eq!(name.0.to_string(), "db.dayfly.internal");
        // The name exists, but has no record of this type.
        let empty = ask(&web, &question(7, "db.dayfly.internal", kind::AAAA));
        assert_eq!((code_of(&empty), address(&empty)), (RCODE::NoError, None));
        // Names of VMs in no common network, of no VM, of private addresses, and with one label:
        // nothing is forwarded.
        let (at, asked) = server(|question| Some(with_address(question, [1, 1, 1, 1])));
        world.servers.send(Arc::from([at])).unwrap();
        let unknown = [
            "shut.dayfly.internal",
            "missing.dayfly.internal",
            "web",
            "db",
            "com",
            "localhost",
            "a.localhost",
            "x.web.dayfly.internal",
            "metadata.google.internal",
            "printer.local",
            "4.0.88.10.in-addr.arpa",
            "1.0.88.10.in-addr.arpa",
            "88.10.in-addr.arpa",
            "b._dns-sd._udp.0.0.88.10.in-addr.arpa",
            "x.10.in-addr.arpa",
            "1.1.168.192.in-addr.arpa",
            "254.169.254.169.in-addr.arpa",
            "d.f.ip6.arpa",
            "8.e.f.ip6.arpa",
        ];
        for name in unknown {
            let answer = ask(&web, &question(7, name, kind::A));
            assert_eq!(code_of(&answer), RCODE::NameError, "{name}");
        }
        assert_eq!(asked.lock().unwrap().len(), 0, "asked of a server");
        // A closed VM resolves itself, and nothing is forwarded for it.
        assert_eq!(
            address(&ask(&shut, &question(7, "shut.dayfly.internal", kind::A))),
            Some(ip(4))
        );
        for (name, expected) in
            [("example.org", RCODE::Refused), ("db.dayfly.internal", RCODE::NameError)]
        {
            assert_eq!(code_of(&ask(&shut, &question(7, name, kind::A))), expected, "{name}");
        }
        assert_eq!(asked.lock().unwrap().len(), 0, "asked for a closed VM");
        // Public names are forwarded.
        for name in ["example.org", "1.1.1.1.in-addr.arpa", "168.192.in-addr.arpa.example.org"] {
            assert!(address(&ask(&web, &question(7, name, kind::A))).is_some(), "{name}");
        }
        assert_eq!(asked.lock().unwrap().len(), 3);
    });
}

#[test]
fn a_server_sees_questions_that_we_made_and_a_guest_answers_that_we_made() {
    alone(|| {
        let world = world();
        let (at, asked) = server(|question| {
            let ip = match question[13] {
                b'p' => [192, 168, 1, 1],
                b'r' => [10, 7, 0, 1],
                _ => [1, 1, 1, 1],
            };
            Some(with_address(question, ip))
        });
        world.servers.send(Arc::from([at])).unwrap();
        let (web, mut stream) = (udp(2), tcp(3));
        // With an option, in mixed case, and without recursion.
        let mut odd = question_edns(7, "eXample.org", kind::A, 4096);
        (odd[2], odd[3]) = (0, 0x30);
        let end = odd.len();
        odd[end - 2..].copy_from_slice(&[0, 8]);
        odd.extend([0, 8, 0, 4, 1, 2, 3, 4]);
        let answer = ask(&web, &odd);
        assert_eq!(
            (address(&answer), &answer[..2]),
            (Some(Ipv4Addr::new(1, 1, 1, 1)), &[0, 7][..])
        );
        assert_eq!(
            answer[13..].get(..7),
            Some(&b"eXample"[..]),
            "the question comes back as it was"
        );
        say(&mut stream, &question(8, "example.org", kind::A));
        assert!(address(&hear(&mut stream).unwrap()).is_some());
        let mut asked_before = std::mem::take(&mut *asked.lock().unwrap());
        let mut expected = question_edns(0, "example.org", kind::A, 1232);
        expected[3] = 0x10;
        for (got, mut expected) in
            asked_before.iter_mut().zip([expected, question(0, "example.org", kind::A)])
        {
            expected[..2].copy_from_slice(&got[..2]);
            assert_eq!(*got, expected);
        }
        assert_eq!(asked_before.len(), 2);
        // Ranges that the daemon's owner permits are resolved, and are forwarded in reverse.
        let reached = ask(&web, &question(7, "reached.example.org", kind::A));
        assert_eq!(address(&reached), Some(Ipv4Addr::new(10, 7, 0, 1)));
        ask(&web, &question(7, "1.0.7.10.in-addr.arpa", kind::PTR));
        assert_eq!(asked.lock().unwrap().drain(..).count(), 2);
        // An address that the guest may not reach is withheld.
        let private = ask(&web, &question(7, "private.example.org", kind::A));
        assert_eq!((code_of(&private), address(&private)), (RCODE::NoError, None));
        assert_eq!(asked.lock().unwrap().len(), 1);
    });
}

#[test]
fn only_questions_are_accepted() {
    alone(|| {
        let world = world();
        let (at, asked) = server(|question| Some(with_address(question, [1, 1, 1, 1])));
        world.servers.send(Arc::from([at])).unwrap();
        let web = udp(2);
        // UPDATE, NOTIFY, transfers, other classes, two questions, and
        // meta types are refused.
        let none = [0_u16; 2];
        let of = |head: [u16; 6], kind: u16, class: u16| {
            let rest = [&labels("example.org")[..], &kind.to_be_bytes(), &class.to_be_bytes()];
            with_head(head, &rest)
        };
        let messages = [
            (of([7, 5 << 11, 1, 0, 0, 0], kind::SOA, 1), rcode::NOTIMP),
            (of([7, 4 << 11, 1, 0, 0, 0], kind::SOA, 1), rcode::NOTIMP),
            (of([7, 2 << 11, 1, 0, 0, 0], kind::A, 1), rcode::NOTIMP),
            (of([7, 0, 1, 0, 0, 0], 252, 1), rcode::REFUSED),
            (of([7, 0, 1, 0, 0, 0], 251, 1), rcode::REFUSED),
            (of([7, 0, 1, 0, 0, 0], 249, 1), rcode::REFUSED),
            (of([7, 0, 1, 0, 0, 0], 250, 1), rcode::REFUSED),
            (of([7, 0, 1, 0, 0, 0], kind::OPT, 1), rcode::REFUSED),
            (of([7, 0, 1, 0, 0, 0], kind::A, 3), rcode::REFUSED),
            (of([7, 0, 1, 0, 0, 0], kind::A, 255), rcode::REFUSED),
            (of([7, 0, 2, 0, none[0], none[1]], kind::A, 1), rcode::FORMERR),
            (bomb([7, 0x0100], 500), rcode::FORMERR),
        ];
        for (message, expected) in &messages {
            // Also over TCP, with a new connection each, so that earlier messages do not matter.
            let mut of_tcp = tcp(3);
            say(&mut of_tcp, message);
            for answer in [ask(&web, message), hear(&mut of_tcp).unwrap()] {
                assert_eq!(u16::from(answer[3] & 15), *expected, "{message:x?}");
            }
        }
        // A response is not answered: the next answer belongs to the question after it.
        let response = with_address(&question(7, "example.org", kind::A), [1, 1, 1, 1]);
        web.send(&response).unwrap();
        assert_eq!(&ask(&web, &question(9, "web.dayfly.internal", kind::A))[..2], &[0, 9]);
        let mut of_tcp = tcp(3);
        say(&mut of_tcp, &response);
        assert_eq!(hear(&mut of_tcp), None);
        assert_eq!(*asked.lock().unwrap(), Vec::<Vec<u8>>::new());
    });
}

#[test]
fn the_next_server_is_asked_and_a_wrong_answer_is_waited_over() {
    alone(|| {
        let world = world();
        let failing = server(|question| {
            let mut bytes = question.to_vec();
            (bytes[2], bytes[3]) = (0x81, 5);
            Some(bytes)
        });
        let (bad, _) = server(|question| {
            // Question and id are right, but the record is truncated.
            let mut bytes = with_address(question, [1, 1, 1, 1]);
            bytes.truncate(bytes.len() - 1);
            Some(bytes)
        });
        let (good, _) = server(|question| Some(with_address(question, [1, 1, 1, 1])));
        let web = udp(2);
        world.servers.send(Arc::from([failing.0, bad, good])).unwrap();
        assert!(address(&ask(&web, &question(7, "example.org", kind::A))).is_some());
        world.servers.send(Arc::from([failing.0, bad])).unwrap();
        assert_eq!(code_of(&ask(&web, &question(7, "example.org", kind::A))), RCODE::Refused);
        world.servers.send(Arc::from([bad])).unwrap();
        assert_eq!(code_of(&ask(&web, &question(7, "example.org", kind::A))), RCODE::ServerFailure);
        world.servers.send(Arc::from([])).unwrap();
        assert_eq!(code_of(&ask(&web, &question(7, "example.org", kind::A))), RCODE::ServerFailure);
        // An attacked server: before its answer, packets with guessed ids arrive.
        let socket = Blocking::bind("127.0.0.1:0").unwrap();
        world.servers.send(Arc::from([socket.local_addr().unwrap()])).unwrap();
        web.send(&question(7, "example.org", kind::A)).unwrap();
        let mut bytes = vec![0; 512];
        let (length, from) = socket.recv_from(&mut bytes).unwrap();
        let mut guessed = with_address(&bytes[..length], [6, 6, 6, 6]);
        guessed[0] ^= 1;
        for answer in [guessed, with_address(&bytes[..length], [1, 1, 1, 1])] {
            socket.send_to(&answer, from).unwrap();
        }
        let mut answer = vec![0; 512];
        let length = web.recv(&mut answer).unwrap();
        assert_eq!(address(&answer[..length]), Some(Ipv4Addr::new(1, 1, 1, 1)));
    });
}

#[test]
fn one_guest_s_connections_and_questions_are_its_own_limit() {
    alone(|| {
        let world = world();
        let (at, asked) = server(|question| {
            // No answer for one name, so that its questions stay under way.
            (!question.windows(5).any(|bytes| bytes == b"\x04slow"))
                .then(|| with_address(question, [1, 1, 1, 1]))
        });
        world.servers.send(Arc::from([at])).unwrap();
        let stats = world.serving.stats();
        // 300 idle connections of one guest, of which eight are kept.
        let mut idle: Vec<_> = (0..300).map(|_| tcp(2)).collect();
        let mut first = idle.remove(0);
        say(&mut first, &question(7, "web.dayfly.internal", kind::A));
        assert_eq!(
            address(&hear(&mut first).unwrap()),
            Some(ip(2)),
            "the first is among those that are kept"
        );
        idle[20..].iter_mut().for_each(|stream| assert_eq!(hear(stream), None));
        assert_eq!(stats.closed_connections.load(Relaxed), 292);
        // Unanswered questions of the same guest, up to its maximum; further questions fail.
        let web = udp(2);
        for n in 0..u16::try_from(FORWARDS.1).unwrap() {
            web.send(&question(n, "slow.example.org", kind::A)).unwrap();
        }
        let failed = ask(&web, &question(99, "example.org", kind::A));
        assert_eq!((code_of(&failed), &failed[..2]), (RCODE::ServerFailure, &[0, 99][..]));
        // Another guest still gets answers, over both transports, from the service and from the
        // server.
        let (db, mut stream) = (udp(3), tcp(3));
        for (name, expected) in
            [("web.dayfly.internal", ip(2)), ("example.org", Ipv4Addr::new(1, 1, 1, 1))]
        {
            assert_eq!(address(&ask(&db, &question(7, name, kind::A))), Some(expected));
            say(&mut stream, &question(7, name, kind::A));
            assert_eq!(address(&hear(&mut stream).unwrap()), Some(expected));
        }
        // Questions above a guest's rate are dropped, which only costs that guest its answers. A
        // host that needs half a second for a round drops none.
        let (lone, begun) = (udp(5), std::time::Instant::now());
        let [refused, before] = [&stats.over_limit, &stats.questions].map(|n| n.load(Relaxed));
        for round in 1..=200 {
            for _ in 0..100 {
                lone.send(&question(7, "lone.dayfly.internal", kind::A)).unwrap();
            }
            assert!(address(&ask(&db, &question(7, "db.dayfly.internal", kind::A))).is_some());
            let read = stats.questions.load(Relaxed) - before - round;
            assert!(read <= most_within(begun.elapsed()), "{read} in {round} rounds: {stats:?}");
            if stats.over_limit.load(Relaxed) - refused >= 1000 {
                break;
            }
        }
        // From an address without a VM, questions get no answer and connections are closed.
        let outsider = udp(9);
        outsider.send(&question(7, "web.dayfly.internal", kind::A)).unwrap();
        assert_eq!(hear(&mut tcp(9)), None);
        assert!(address(&ask(&db, &question(7, "db.dayfly.internal", kind::A))).is_some());
        outsider.set_nonblocking(true).unwrap();
        assert!(outsider.recv(&mut [0; 512]).is_err());
        let slow = |question: &&Vec<u8>| question[12..].starts_with(b"\x04slow");
        assert_eq!(asked.lock().unwrap().iter().filter(|question| !slow(question)).count(), 2);
    });
}

#[test]
fn messages_that_no_question_has_are_not_read_over_tcp() {
    alone(|| {
        let _world = world();
        // A question followed by zeroes, which would be answered if only its start were read.
        let mut long = question(7, "web.dayfly.internal", kind::A);
        long.resize(65_535, 0);
        for length in [0_u16, 1, 11, 513, 65_535] {
            let mut stream = tcp(2);
            // The connection may be closed before everything is sent.
            let _ = stream.write_all(&length.to_be_bytes());
            let _ = stream.write_all(&long[..length.into()]);
            assert_eq!(hear(&mut stream), None, "{length}");
        }
        // Several questions in one write, and one question in many writes.
        let mut stream = tcp(2);
        let message = question(7, "web.dayfly.internal", kind::A);
        let length = u16::try_from(message.len()).unwrap().to_be_bytes();
        let whole = [&length[..], &message].concat();
        stream.write_all(&whole.repeat(20)).unwrap();
        whole.iter().for_each(|byte| stream.write_all(&[*byte]).unwrap());
        for _ in 0..21 {
            assert_eq!(address(&hear(&mut stream).unwrap()), Some(ip(2)));
        }
    });
}

/// Waits for a packet or a connection, which the kernel may deliver later on a busy host.
fn readable(socket: &impl std::os::fd::AsFd) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let longest = Timespec::try_from(LONGEST).unwrap();
    let came = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&longest)).unwrap();
    assert_eq!(came, 1, "nothing came to the guest's socket");
}

#[test]
fn the_kernel_gives_each_guest_its_own_socket() {
    alone(|| {
        let all = sockets::bind(gateway()).unwrap();
        let places = usize::from(sockets::SHARDS);
        for last in 2..80_u8 {
            for _ in 0..2 {
                udp(last).send(&[last]).unwrap();
                let connected = tcp(last);
                let place = usize::try_from(u32::from(ip(last))).unwrap() % places;
                let mut bytes = [0; 2];
                readable(&all.udp[place]);
                assert_eq!(all.udp[place].recv(&mut bytes).unwrap(), 1);
                assert_eq!(bytes[0], last);
                readable(&all.tcp[place]);
                let (_, from) = all.tcp[place].accept().unwrap();
                assert_eq!(from, connected.local_addr().unwrap());
            }
        }
    });
}

#[test]
fn a_panic_ends_a_question_and_not_the_service() {
    alone(|| {
        let world = world();
        let (web, mut of_tcp) = (udp(2), tcp(2));
        let panics = question(7, "on-purpose.panics", kind::A);
        assert_eq!(labels("on-purpose.panics"), PANICS);
        for _ in 0..3 {
            web.send(&panics).unwrap();
            assert!(address(&ask(&web, &question(8, "web.dayfly.internal", kind::A))).is_some());
        }
        say(&mut of_tcp, &panics);
        assert_eq!(hear(&mut of_tcp), None);
        let stats = world.serving.stats();
        assert_eq!((stats.questions.load(Relaxed), stats.restarts.load(Relaxed)), (7, 0));
    });
}

#[test]
fn an_answer_for_a_guest_that_has_gone_never_reaches_the_next_one_with_its_address() {
    alone(|| {
        let world = world();
        let socket = Blocking::bind("127.0.0.1:0").unwrap();
        world.servers.send(Arc::from([socket.local_addr().unwrap()])).unwrap();
        let insert = |name: &str| {
            let name = name.parse().unwrap();
            world.index.insert(ip(6), VmId::random(), &name, Policy::default())
        };
        let guest = udp(6);
        for id in (0..1000_u16).step_by(2) {
            let late = insert("late");
            guest.send(&question(id, "example.org", kind::A)).unwrap();
            let mut bytes = vec![0; 512];
            let (length, from) = socket.recv_from(&mut bytes).unwrap();
            let answer = with_address(&bytes[..length], [1, 1, 1, 1]);
            drop(late);
            socket.send_to(&answer, from).unwrap();
            let _next = insert("next");
            let answer = ask(&guest, &question(id + 1, "next.dayfly.internal", kind::A));
            assert_eq!(
                (address(&answer), &answer[..2]),
                (Some(ip(6)), &(id + 1).to_be_bytes()[..])
            );
        }
    });
}

#[test]
fn nothing_goes_on_for_a_guest_that_has_gone() {
    alone(|| {
        let world = world();
        let socket = Blocking::bind("127.0.0.1:0").unwrap();
        world.servers.send(Arc::from([socket.local_addr().unwrap()])).unwrap();
        let late =
            world.index.insert(ip(6), VmId::random(), &"late".parse().unwrap(), Policy::default());
        let (guest, mut stream) = (udp(6), tcp(6));
        say(&mut stream, &question(7, "late.dayfly.internal", kind::A));
        assert!(hear(&mut stream).is_some());
        guest.send(&question(7, "example.org", kind::A)).unwrap();
        let mut bytes = vec![0; 512];
        let (length, from) = socket.recv_from(&mut bytes).unwrap();
        drop(late);
        // The guest's connection ends, and the next VM with its address does not get its answers.
        assert_eq!(hear(&mut stream), None);
        let _next =
            world.index.insert(ip(6), VmId::random(), &"next".parse().unwrap(), Policy::default());
        let _ = socket.send_to(&with_address(&bytes[..length], [1, 1, 1, 1]), from);
        let answer = ask(&guest, &question(8, "next.dayfly.internal", kind::A));
        assert_eq!((address(&answer), &answer[..2]), (Some(ip(6)), &[0, 8][..]));
        // Without the service there are no answers.
        let World { runtime, serving, .. } = world;
        drop(serving);
        drop(runtime);
        // A process that another test starts has copies of the sockets until it executes.
        let begun = std::time::Instant::now();
        while let Err(error) = Blocking::bind(gateway()) {
            assert!(begun.elapsed() < LONGEST, "its sockets are there after its end: {error}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    });
}

#[tokio::test]
async fn a_task_that_ends_or_panics_is_started_again() {
    let (stop, starts) =
        (CancellationToken::new(), Arc::new(std::sync::atomic::AtomicUsize::new(0)));
    let (count, end) = (starts.clone(), stop.clone());
    let start = move || {
        let (n, end) = (count.fetch_add(1, Relaxed), end.clone());
        async move {
            match n {
                0 => panic!("on purpose"),
                1 => Err(io::Error::other("on purpose")),
                2 => Ok(()),
                _ => {
                    end.cancel();
                    std::future::pending().await
                }
            }
        }
    };
    let stats = Arc::new(Stats::default());
    supervise("test", stats.clone(), stop, start).await;
    assert_eq!((starts.load(Relaxed), stats.restarts.load(Relaxed)), (4, 3));
}

#[path = "tap_tests.rs"]
mod at_a_tap;
