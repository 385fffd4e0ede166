//! The seal, archives over the wire, hostile frames, and that the agent always answers.

mod common;

use common::{Client, Guest, alive, argv, eventually, identity, sh};
use dayfly_api::agent::{
    ExecSpec, FailureCode, FrameKind, HEADER_BYTES, Identity, MAX_FRAME_BYTES, Reply, Request,
    encode,
};
use proptest::prelude::*;
use std::io::Write;
use std::sync::OnceLock;

fn sealed(guest: &Guest) -> bool {
    match guest.ask(&Request::Ping) {
        Reply::Ready(ready) => ready.sealed,
        other => panic!("{other:?}"),
    }
}

fn code(reply: &Reply) -> FailureCode {
    match reply {
        Reply::Err(failure) => failure.code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_sealed_agent_serves_nothing_until_it_has_an_identity() {
    let guest = Guest::start();
    assert!(!sealed(&guest));
    assert_eq!(guest.ask(&Request::Seal), Reply::Ok);
    assert!(sealed(&guest));
    let path = guest.root().to_str().unwrap().to_owned();
    for request in [
        Request::Exec(Box::new(sh("true"))),
        Request::ReadArchive { path: path.clone() },
        Request::WriteArchive { path },
        Request::Stat,
        Request::Mount { path: "/nowhere".into(), name: "v".into(), read_only: true },
        Request::Seal,
        Request::Shutdown { reboot: false },
    ] {
        assert_eq!(code(&guest.ask(&request)), FailureCode::Sealed, "{request:?}");
    }
    assert_eq!(code(&guest.ask(&Request::Identity(identity("-", 'a')))), FailureCode::Invalid);
    assert!(sealed(&guest));
    *guest.kernel.fails.lock().unwrap() = true;
    let reply = guest.ask(&Request::Identity(identity("fly", 'a')));
    assert!(matches!(&reply, Reply::Err(f) if f.message.contains("entropy")), "{reply:?}");
    assert!(sealed(&guest), "an identity that failed leaves the agent sealed");
    *guest.kernel.fails.lock().unwrap() = false;
    assert_eq!(guest.ask(&Request::Identity(identity("fly", 'a'))), Reply::Ok);
    assert!(!sealed(&guest));
    assert_eq!(guest.sh("echo served").text(), "served\n");
    assert_eq!(std::fs::read_to_string(guest.root().join("etc/hostname")).unwrap(), "fly\n");
    let calls = guest.kernel.calls.lock().unwrap().join(",");
    assert!(calls.ends_with("reseed 64,clock 1800000000000000000,hostname fly"), "{calls}");
    assert!(!calls.contains("end"), "a refused shutdown was carried out");
}

#[test]
fn a_larger_machine_starts_its_cpus_with_its_identity_and_serves_the_next_request() {
    let guest = Guest::start();
    let cpus = guest.root().join("sys/devices/system/cpu");
    for cpu in 1..4 {
        std::fs::create_dir_all(cpus.join(format!("cpu{cpu}"))).unwrap();
        std::fs::write(cpus.join(format!("cpu{cpu}/online")), "0").unwrap();
    }
    std::fs::write(cpus.join("online"), "0-2\n").unwrap();
    assert_eq!(guest.ask(&Request::Seal), Reply::Ok);
    let larger = Identity { cpus: Some(4), ..identity("fly", 'a') };
    let mut client = guest.connect();
    client.requests(&[&Request::Identity(larger), &Request::Stat]);
    assert_eq!(client.reply(), Reply::Cpus { online: 3, why: None });
    assert!(matches!(client.reply(), Reply::Stat(_)));
    let online = |cpu| std::fs::read_to_string(cpus.join(format!("cpu{cpu}/online"))).unwrap();
    assert_eq!([1, 2, 3].map(online), ["0", "0", "1"], "what ran was left alone");
    // An identity that fails starts none.
    assert_eq!(guest.ask(&Request::Seal), Reply::Ok);
    std::fs::write(cpus.join("online"), "0\n").unwrap();
    let invalid = Identity { cpus: Some(4), ..identity("-", 'a') };
    assert_eq!(code(&guest.ask(&Request::Identity(invalid))), FailureCode::Invalid);
    assert_eq!(online(1), "0");
}

#[test]
fn connections_from_before_a_seal_do_not_hang_in_a_clone() {
    let guest = Guest::start();
    assert_eq!(guest.ask(&Request::Identity(identity("template", '1'))), Reply::Ok);
    let mut idle = guest.connect();
    let mut half = guest.connect();
    half.stream.write_all(&encode(FrameKind::Request, &[b' '; 100])[..50]).unwrap();
    let mut running = guest.connect();
    running.request(&Request::Exec(Box::new(ExecSpec { stdin: true, ..argv(&["cat"]) })));
    let Reply::Started { pid, .. } = running.reply() else { panic!() };
    let mut receiving = guest.connect();
    receiving.request(&Request::WriteArchive { path: guest.root().to_str().unwrap().into() });
    assert_eq!(receiving.reply(), Reply::Ok);
    assert_eq!(guest.ask(&Request::Seal), Reply::Ok);
    // The machine continues after its snapshot, and none of its connections ends.
    assert_eq!(guest.ask(&Request::Identity(identity("template", '1'))), Reply::Ok);
    running.send(FrameKind::Stdin, b"still here");
    assert_eq!(running.frame(), Some((FrameKind::Stdout, b"still here".to_vec())));
    // In a clone, these connections end.
    assert_eq!(guest.ask(&Request::Seal), Reply::Ok);
    assert_eq!(guest.ask(&Request::Identity(identity("clone", '2'))), Reply::Ok);
    for client in [&mut idle, &mut half, &mut running, &mut receiving] {
        while client.frame().is_some() {}
    }
    eventually("the program of a client that is gone", || !alive(pid));
}

#[test]
fn after_an_identity_the_connection_takes_one_thing_more() {
    let guest = Guest::start();
    let program = Request::Exec(Box::new(sh("echo hello")));
    for (n, sealed) in [(1, false), (2, true)] {
        if sealed {
            assert_eq!(guest.ask(&Request::Seal), Reply::Ok);
        }
        let mut client = guest.connect();
        client.requests(&[&Request::Identity(identity(&format!("clone{n}"), '3')), &program]);
        assert_eq!(client.reply(), Reply::Ok);
        assert!(matches!(client.reply(), Reply::Started { .. }));
        assert_eq!(client.frame(), Some((FrameKind::Stdout, b"hello\n".to_vec())));
        assert!(matches!(client.frame(), Some((FrameKind::Exit, _))));
        assert_eq!(client.frame(), None);
    }
    // After any other request the connection ends, and a request after a refused identity is not
    // served.
    let mut client = guest.connect();
    client.requests(&[&Request::Ping, &Request::Ping]);
    assert!(matches!(client.reply(), Reply::Ready(_)));
    assert!(client.frame().is_none());
    let mut client = guest.connect();
    client.requests(&[&Request::Identity(identity("no/hostname", '4')), &program]);
    assert!(matches!(client.reply(), Reply::Err(_)));
    assert!(client.frame().is_none());
}

#[test]
fn archives_over_the_wire() {
    let guest = Guest::start();
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::create_dir(from.path().join("tree")).unwrap();
    std::fs::write(from.path().join("tree/big"), vec![3; 5_000_001]).unwrap();
    let mut client = guest.connect();
    client
        .request(&Request::ReadArchive { path: from.path().join("tree").to_str().unwrap().into() });
    assert_eq!(client.reply(), Reply::Ok);
    let mut archive = Vec::new();
    loop {
        match client.frame() {
            Some((FrameKind::Data, body)) => archive.extend(body),
            Some((FrameKind::End, _)) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(client.frame(), None);
    let write = |bytes: &[u8], end: bool| {
        let mut client = guest.connect();
        client.request(&Request::WriteArchive { path: to.path().to_str().unwrap().into() });
        assert_eq!(client.reply(), Reply::Ok);
        for piece in bytes.chunks(MAX_FRAME_BYTES) {
            client.send(FrameKind::Data, piece);
        }
        if end {
            client.send(FrameKind::End, &[]);
        }
        client
    };
    assert_eq!(write(&archive, true).reply(), Reply::Ok);
    assert_eq!(std::fs::read(to.path().join("tree/big")).unwrap(), vec![3; 5_000_001]);
    // An archive that is refused at its first entry, from a client that sends everything before it
    // reads.
    let mut header = tar::Header::new_ustar();
    header.as_old_mut().name[..8].copy_from_slice(b"../tree/");
    header.set_entry_type(tar::EntryType::Directory);
    header.set_size(0);
    header.set_cksum();
    let hostile = [header.as_bytes(), archive.as_slice()].concat();
    let reply = write(&hostile, true).reply();
    assert!(matches!(&reply, Reply::Err(f) if f.message.contains("../tree/")), "{reply:?}");
    // A truncated archive.
    assert_eq!(code(&write(&archive[..100_000], true).reply()), FailureCode::Invalid);
    // A client that disconnects midway or before `End` leaves nothing.
    std::fs::remove_dir_all(to.path().join("tree")).unwrap();
    for bytes in [&archive[..100_000], &archive[..]] {
        drop(write(bytes, false));
        eventually("nothing is left", || std::fs::read_dir(to.path()).unwrap().next().is_none());
    }
    for request in [
        Request::ReadArchive { path: "/no/such".into() },
        Request::WriteArchive { path: "/no/such".into() },
    ] {
        assert_eq!(code(&guest.ask(&request)), FailureCode::NotFound);
    }
    assert_eq!(
        code(&guest.ask(&Request::WriteArchive { path: "relative".into() })),
        FailureCode::Invalid
    );
}

#[test]
fn stat_and_shutdown() {
    let guest = Guest::start();
    assert!(matches!(
        guest.ask(&Request::Stat),
        Reply::Stat(s) if s.disk_total_bytes > 0 && s.memory_total_bytes > 0
    ));
    assert_eq!(guest.ask(&Request::Shutdown { reboot: true }), Reply::Ok);
    eventually("the machine ends", || {
        guest.kernel.calls.lock().unwrap().contains(&"end true".to_owned())
    });
}

#[test]
fn an_agent_with_all_its_threads_in_use_still_answers() {
    let guest = Guest::start();
    let mut running = Vec::new();
    let refused = loop {
        let mut client = guest.connect();
        client.request(&Request::Exec(Box::new(ExecSpec { stdin: true, ..argv(&["cat"]) })));
        match client.reply() {
            Reply::Started { .. } => running.push(client),
            Reply::Err(failure) => break failure,
            other => panic!("{other:?}"),
        }
        assert!(running.len() < 1000, "there is no bound");
    };
    assert!(refused.message.contains("connections are open"), "{refused:?}");
    assert!(running.len() >= 100, "{}", running.len());
    assert!(!sealed(&guest));
    // Idle connections do not occupy the last thread either.
    let idle: Vec<Client> = (0..3).map(|_| guest.connect()).collect();
    assert!(!sealed(&guest));
    drop((running, idle));
    eventually("threads are free again", || {
        matches!(guest.ask(&Request::Exec(Box::new(sh("true")))), Reply::Started { .. })
    });
}

#[test]
fn frames_that_are_none_are_named_and_end_the_connection() {
    let guest = Guest::start();
    let long = u32::try_from(MAX_FRAME_BYTES + 1).unwrap().to_le_bytes();
    let cases: [(Vec<u8>, &str); 6] = [
        ([&long[..], &[1]].concat(), "frame length"),
        ([&[255, 255, 255, 255][..], &[1]].concat(), "frame length"),
        (vec![0, 0, 0, 0, 99], "frame kind"),
        (encode(FrameKind::Stdin, b"x"), "expected a request"),
        (encode(FrameKind::Request, b"{\"op\":\"fly\"}"), "request:"),
        (encode(FrameKind::Request, &vec![b'['; MAX_FRAME_BYTES]), "request:"),
    ];
    for (bytes, wanted) in cases {
        let mut client = guest.connect();
        client.stream.write_all(&bytes).unwrap();
        let reply = client.reply();
        assert!(
            matches!(
                &reply,
                Reply::Err(f) if f.message.contains(wanted) && f.code == FailureCode::Invalid
            ),
            "{reply:?}"
        );
        assert_eq!(client.frame(), None);
    }
    // A frame may arrive in pieces.
    let mut client = guest.connect();
    for byte in encode(FrameKind::Request, b"{\"op\":\"ping\"}") {
        client.stream.write_all(&[byte]).unwrap();
    }
    assert!(matches!(client.reply(), Reply::Ready(_)));
}

fn shared() -> &'static Guest {
    static GUEST: OnceLock<Guest> = OnceLock::new();
    GUEST.get_or_init(Guest::start)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn any_bytes_get_an_answer_or_an_end(
        kind in 0..14_u8,
        claimed in 0..400_u32,
        body in proptest::collection::vec(any::<u8>(), 0..400),
        raw in any::<bool>(),
    ) {
        let guest = shared();
        let mut client = guest.connect();
        let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
        if !raw {
            bytes.extend_from_slice(&claimed.to_le_bytes());
            bytes.push(kind);
        }
        bytes.extend_from_slice(&body);
        let _ = client.stream.write_all(&bytes);
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        while let Some((kind, _)) = client.frame() {
            prop_assert_eq!(kind, FrameKind::Reply);
        }
        prop_assert!(matches!(guest.ask(&Request::Ping), Reply::Ready(_)));
    }

    /// JSON that is almost a request.
    #[test]
    fn any_request_gets_an_answer(
        path in ".{0,40}",
        user in ".{0,12}",
        argv0 in "[a-z/.]{0,12}",
        cwd in ".{0,12}",
        timeout in proptest::option::of(any::<u64>()),
        which in 0..3,
    ) {
        let guest = shared();
        let request = match which {
            0 => Request::ReadArchive { path: format!("/no-such-folder/{path}") },
            1 => Request::WriteArchive { path: format!("/no-such-folder/{path}") },
            _ => Request::Exec(Box::new(ExecSpec {
                argv: vec![format!("/no-such-folder/{argv0}")],
                user,
                cwd,
                timeout_ms: timeout,
                ..ExecSpec::default()
            })),
        };
        prop_assert!(matches!(guest.ask(&request), Reply::Err(_)));
    }
}
