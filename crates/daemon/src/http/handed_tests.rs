use super::*;
use crate::fixture::relay_place;
use crate::net::streams::Streams;
use dayfly_host::process::{Process, ProcessId};
use dayfly_relay::streams::message::{Handed, Rules};
use rustix::process::Signal;
use std::io::Write;
use std::os::fd::AsFd;

/// Only a hang takes this long.
const HANG: Duration = Duration::from_secs(120);

/// A stream in a process, its client, its agent, and the process.
struct World {
    _folder: tempfile::TempDir,
    watched: Watched,
    client: std::os::unix::net::UnixStream,
    agent: UnixStream,
    process: Process,
}

async fn world(within: Duration) -> World {
    let folder = tempfile::tempdir().unwrap();
    let (place, streams) = (relay_place(folder.path()), Streams::default());
    let (client, to_client) = UnixStream::pair().unwrap();
    let (agent, to_agent) = UnixStream::pair().unwrap();
    let rules = Rules { passed: 1 << 5, ending: 1 << 9, passed_max: 9, ending_max: 9 };
    let handed = Handed { rules, ..Handed::default() };
    let fds = [to_client.as_fd(), to_agent.as_fd()];
    let line = streams.hand_over(&place, &handed, fds, HANG).await.unwrap();
    let vms = place.dir.path().parent().unwrap();
    let found = dayfly_host::process::scan_below(vms, crate::base::config::STREAMS_NAME).unwrap();
    let [id] = *found.iter().map(|found| found.process).collect::<Vec<ProcessId>>() else {
        panic!("{found:?}")
    };
    let client = client.into_std().unwrap();
    client.set_nonblocking(false).unwrap();
    client.set_read_timeout(Some(HANG)).unwrap();
    let watched = Watched::new(line, to_client, within);
    let process = Process::open(id).unwrap().unwrap();
    World { _folder: folder, watched, client, agent, process }
}

const SHORT: Duration = Duration::from_millis(20);

#[tokio::test]
async fn a_client_that_leaves_is_missed_although_its_process_stands_still() {
    let World { _folder, watched, client, agent: _agent, process } = world(SHORT).await;
    process.signal(Signal::STOP).unwrap();
    drop(client);
    // One period after the client's end, and so before the process has missed its questions.
    let next = timeout(HANG, watched.next()).await.expect("it waits for the process");
    assert_eq!(next, Some(Event::Gone));
    process.signal(Signal::CONT).unwrap();
}

#[tokio::test]
async fn a_process_that_answers_nothing_ends_its_stream() {
    for is_over in [false, true] {
        let World { _folder, watched, client, mut agent, process } = world(HANG).await;
        if is_over {
            use tokio::io::AsyncWriteExt as _;
            agent.write_all(&[0, 0, 0, 0, 9]).await.unwrap();
            let next = timeout(HANG, watched.next()).await.expect("no end comes");
            assert_eq!(next, Some(Event::Ended(vec![0, 0, 0, 0, 9])));
        }
        process.signal(Signal::STOP).unwrap();
        let watched = Watched { within: SHORT, ..watched };
        if is_over {
            let finish = watched.finish(b"last".to_vec());
            timeout(HANG, finish).await.expect("it waits for the process");
        } else {
            let next = timeout(HANG, watched.next()).await.expect("it waits for the process");
            assert_eq!(next, None);
            watched.close();
        }
        // The client is disconnected, although the process has its connection.
        let read = tokio::task::spawn_blocking(move || {
            use std::io::Read as _;
            (&client).read(&mut [0]).unwrap()
        });
        assert_eq!(read.await.unwrap(), 0);
        process.signal(Signal::CONT).unwrap();
    }
}

#[tokio::test]
async fn a_process_that_answers_keeps_its_stream_for_as_long_as_it_likes() {
    let World { _folder, watched, client, agent: _agent, process: _process } =
        world(Duration::from_millis(500)).await;
    let mut next = std::pin::pin!(watched.next());
    // Many periods, each with a question and its answer.
    while watched.answered.borrow().0 < 3 {
        assert!(timeout(SHORT, &mut next).await.is_err(), "the stream has ended");
    }
    // A question of another task has the answer to itself, and not the one before.
    let asking = async {
        for question in watched.asked.load(Ordering::Relaxed)..9 {
            let heard = watched.heard().await;
            assert!(heard.waits && watched.answered.borrow().0 > question);
        }
    };
    tokio::select! {
        () = asking => {}
        ended = &mut next => panic!("{ended:?}"),
    }
    drop(client);
    let gone = timeout(HANG, next).await.expect("the client is not missed");
    assert_eq!(gone, Some(Event::Gone));
}

#[tokio::test]
async fn an_answer_that_is_not_due_ends_the_stream() {
    let World { _folder, watched, client, agent: _agent, process: _process } = world(HANG).await;
    let heard = Heard::default();
    assert!(!watched.note(1, heard), "nothing was asked");
    watched.asked.store(2, Ordering::Relaxed);
    assert!(!watched.note(2, heard) && watched.note(1, heard) && !watched.note(1, heard));
    assert!(watched.note(2, heard) && !watched.note(3, heard));
    (&client).write_all(b"still there").unwrap();
}

#[tokio::test]
async fn a_process_that_reports_an_end_again_and_again_does_not_keep_the_daemon() {
    let id = ProcessId::of(std::process::id()).unwrap().unwrap();
    let (line, process) = Line::of_test(Process::open(id).unwrap().unwrap());
    let (_client, to_client) = UnixStream::pair().unwrap();
    let watched = Watched::new(line, to_client, 2 * HANG);
    for _ in 0..2 {
        let closed = Event::Closed.encode();
        rustix::net::send(&process, &closed, rustix::net::SendFlags::empty()).unwrap();
    }
    timeout(HANG, watched.finish(b"last".to_vec())).await.expect("it waits for a third message");
}
