use super::*;
use crate::fixture::relay_place;
use dayfly_relay::streams::message::Rules;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

const WITHIN: Duration = Duration::from_secs(120);

/// A stream's four ends: the client's, the process's to it, and the same of the agent.
fn ends() -> [UnixStream; 4] {
    let ((client, to_client), (agent, to_agent)) =
        (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    for end in [&to_client, &to_agent] {
        end.set_nonblocking(true).unwrap();
    }
    // A break shows as an error, and not as a test that hangs.
    for end in [&client, &agent] {
        end.set_read_timeout(Some(WITHIN)).unwrap();
    }
    [client, to_client, agent, to_agent]
}

fn plain() -> Handed {
    let rules = Rules { passed: 1 << 5, ending: 1 << 9, passed_max: 9, ending_max: 9 };
    Handed { rules, ..Handed::default() }
}

fn processes(place: &Place) -> Vec<ProcessId> {
    let vms = place.dir.path().parent().unwrap();
    scan_below(vms, STREAMS_NAME).unwrap().iter().map(|found| found.process).collect()
}

async fn handed(streams: &Streams, place: &Place) -> ([UnixStream; 2], Line) {
    let [client, to_client, agent, to_agent] = ends();
    let fds = [to_client.as_fd(), to_agent.as_fd()];
    let line = streams.hand_over(place, &plain(), fds, WITHIN).await.unwrap();
    ([client, agent], line)
}

/// A frame of the agent gets to the client.
fn passes([client, agent]: &[UnixStream; 2]) {
    let frame = [2, 0, 0, 0, 5, b'h', b'i'];
    (&*agent).write_all(&frame).unwrap();
    let mut got = [0; 7];
    (&*client).read_exact(&mut got).unwrap();
    assert_eq!(got, frame);
}

/// Waits until `done` is true, while tasks go on.
async fn until(mut done: impl FnMut() -> bool) {
    let wait = async {
        while !done() {
            tokio::task::spawn_blocking(std::thread::yield_now).await.unwrap();
        }
    };
    timeout(WITHIN, wait).await.expect("this does not come");
}

#[tokio::test]
async fn one_process_has_all_streams_and_ends_when_there_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let times = Times { idle: Duration::from_millis(20), rest: REST };
    let streams = Streams(Arc::new(OfVm { times, ..OfVm::default() }));
    let place = relay_place(folder.path());
    let (one, first) = handed(&streams, &place).await;
    let (two, second) = handed(&streams, &place).await;
    passes(&one);
    passes(&two);
    let [process] = *processes(&place) else { panic!("{:?}", processes(&place)) };
    assert_eq!(uid_of(process.pid).unwrap(), place.uid);
    assert!(is_running(process));
    let [client, _agent] = one;
    drop(client);
    assert_eq!(first.next().await, Some(Event::Gone));
    drop(first);
    passes(&two);
    let [client, _agent] = two;
    drop(client);
    assert_eq!(second.next().await, Some(Event::Gone));
    drop(second);
    until(|| processes(&place).is_empty()).await;
    until(|| !is_running(process)).await;
    assert!(place.spent.ended_us() > 0, "the VM is not billed for its streams");
    // The next stream has another process.
    let (three, _line) = handed(&streams, &place).await;
    passes(&three);
    assert_eq!(processes(&place).len(), 1);
}

#[tokio::test]
async fn an_idle_process_that_does_not_end_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let times = Times { idle: Duration::from_millis(20), rest: REST };
    let streams = Streams(Arc::new(OfVm { times, ..OfVm::default() }));
    let place = relay_place(folder.path());
    let (ends, line) = handed(&streams, &place).await;
    passes(&ends);
    let [process] = *processes(&place) else { panic!("{:?}", processes(&place)) };
    Process::open(process).unwrap().unwrap().signal(rustix::process::Signal::STOP).unwrap();
    drop(line);
    until(|| processes(&place).is_empty()).await;
    until(|| !is_running(process)).await;
}

#[tokio::test]
async fn a_process_that_is_killed_loses_its_streams_and_the_next_stream_has_another() {
    let folder = tempfile::tempdir().unwrap();
    let (place, streams) = (relay_place(folder.path()), Streams::default());
    let (one, line) = handed(&streams, &place).await;
    let [process] = *processes(&place) else { panic!("{:?}", processes(&place)) };
    Process::open(process).unwrap().unwrap().kill().unwrap();
    assert_eq!(line.next().await, None);
    let [mut client, mut agent] = one;
    assert_eq!((client.read(&mut [0]).unwrap(), agent.read(&mut [0]).unwrap()), (0, 0));
    // Whether the daemon has noticed or not.
    let (two, _line) = handed(&streams, &place).await;
    passes(&two);
    assert!(processes(&place).iter().all(|other| *other != process));
}

/// Asks until the hand-over is refused for this reason.
async fn refused(streams: &Streams, place: &Place, handed: &Handed, within: Duration) -> NotHanded {
    let [_client, to_client, _agent, to_agent] = ends();
    let fds = [to_client.as_fd(), to_agent.as_fd()];
    streams.hand_over(place, handed, fds, within).await.unwrap_err()
}

/// With other times than the daemon's.
fn resting(rest: Duration) -> Streams {
    Streams(Arc::new(OfVm { times: Times { idle: IDLE, rest }, ..OfVm::default() }))
}

#[tokio::test]
async fn a_stream_that_is_not_taken_is_still_the_daemon_s_and_the_next_ones_rest() {
    let folder = tempfile::tempdir().unwrap();
    let place = relay_place(folder.path());
    let nowhere = Place { program: "/nonexistent/dayfly-relay".into(), ..place.clone() };
    let streams = Streams::default();
    let why = refused(&streams, &nowhere, &plain(), WITHIN).await;
    assert!(matches!(why, NotHanded::Start(_)), "{why}");
    let why = refused(&streams, &place, &plain(), WITHIN).await;
    assert!(matches!(why, NotHanded::Rests), "{why}");
    assert!(processes(&place).is_empty());
    // A program of another version, which refuses its arguments.
    let other = Place { program: "/bin/false".into(), ..place.clone() };
    let why = refused(&Streams::default(), &other, &plain(), WITHIN).await;
    assert!(matches!(why, NotHanded::Refused | NotHanded::Send(_)), "{why}");
}

#[tokio::test]
async fn a_refused_stream_costs_the_process_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (place, streams) = (relay_place(folder.path()), resting(Duration::ZERO));
    let (one, _line) = handed(&streams, &place).await;
    let [process] = *processes(&place) else { panic!("{:?}", processes(&place)) };
    let wrong = Handed { header: vec![0; 9], ..plain() };
    let why = refused(&streams, &place, &wrong, WITHIN).await;
    assert!(matches!(why, NotHanded::Refused), "{why}");
    // The process lives, so it has the next one too.
    let (two, _other) = handed(&streams, &place).await;
    passes(&one);
    passes(&two);
    assert_eq!(processes(&place), [process]);
}

#[tokio::test]
async fn a_process_that_stands_still_loses_no_stream_and_ends_none() {
    let folder = tempfile::tempdir().unwrap();
    let (place, streams) = (relay_place(folder.path()), resting(Duration::ZERO));
    let (one, _line) = handed(&streams, &place).await;
    let [id] = *processes(&place) else { panic!("{:?}", processes(&place)) };
    let process = Process::open(id).unwrap().unwrap();
    process.signal(rustix::process::Signal::STOP).unwrap();
    let [client, to_client, agent, to_agent] = ends();
    let fds = [to_client.as_fd(), to_agent.as_fd()];
    let short = Duration::from_millis(50);
    let why = streams.hand_over(&place, &plain(), fds, short).await.unwrap_err();
    assert!(matches!(why, NotHanded::Silent(_)), "{why}");
    process.signal(rustix::process::Signal::CONT).unwrap();
    // It takes hand-overs in turn, so it has dealt with the one that was taken back.
    let (two, _other) = handed(&streams, &place).await;
    passes(&two);
    passes(&one);
    assert_eq!(processes(&place), [id]);
    // The daemon goes on with its own.
    for (from, to) in [(&client, &to_client), (&agent, &to_agent)] {
        to.set_nonblocking(false).unwrap();
        to.set_read_timeout(Some(WITHIN)).unwrap();
        from.set_read_timeout(Some(WITHIN)).unwrap();
        for (mut from, mut to) in [(from, to), (to, from)] {
            from.write_all(b"typed").unwrap();
            let mut typed = [0; 5];
            to.read_exact(&mut typed).unwrap();
            assert_eq!(&typed, b"typed");
        }
    }
    // Nothing else has them.
    drop((to_client, to_agent));
    assert_eq!(((&client).read(&mut [0]).unwrap(), (&agent).read(&mut [0]).unwrap()), (0, 0));
}

#[tokio::test]
async fn a_vm_with_little_memory_has_few_streams() {
    let folder = tempfile::tempdir().unwrap();
    let place = relay_place(folder.path());
    let place = Place { memory_max_bytes: Some(4 << 20), ..place };
    let streams = Streams::default();
    let (one, line) = handed(&streams, &place).await;
    let (_two, _other) = handed(&streams, &place).await;
    let why = refused(&streams, &place, &plain(), WITHIN).await;
    assert!(matches!(why, NotHanded::Full(2)), "{why}");
    drop(one);
    assert_eq!(line.next().await, Some(Event::Gone));
    drop(line);
    handed(&streams, &place).await;
}

#[tokio::test]
async fn a_vm_that_has_ended_has_no_process_before_its_user_is_another_vm_s() {
    let folder = tempfile::tempdir().unwrap();
    let (place, streams) = (relay_place(folder.path()), Streams::default());
    let (stream, line) = handed(&streams, &place).await;
    let [process] = *processes(&place) else { panic!("{:?}", processes(&place)) };
    assert!(!streams.close(), "a process still has the VM's user");
    // A client that does not leave gets its time, and no more. One of an earlier daemon's too.
    let mut sleep = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let of_before = ProcessId::of(sleep.id()).unwrap().unwrap();
    streams.adopt(Process::open(of_before).unwrap().unwrap(), Arc::default(), ());
    assert!(is_running(of_before));
    let end = streams.end(Duration::from_millis(1));
    timeout(WITHIN, end).await.expect("its processes are not ended");
    assert!(streams.close() && !is_running(process) && !is_running(of_before));
    assert!(processes(&place).is_empty());
    assert_eq!(line.next().await, None);
    drop(stream);
    assert!(!sleep.wait().unwrap().success());
    // No other process is started.
    let why = refused(&streams, &place, &plain(), WITHIN).await;
    assert!(matches!(why, NotHanded::Start(_)), "{why}");
    assert!(processes(&place).is_empty());
}

#[tokio::test]
async fn streams_outlive_the_daemon_s_end_of_everything() {
    let folder = tempfile::tempdir().unwrap();
    let (place, streams) = (relay_place(folder.path()), Streams::default());
    let (stream, line) = handed(&streams, &place).await;
    // As a daemon that is killed closes its descriptors, and the next one starts anew.
    *streams.0.running.lock().await = None;
    drop(line);
    passes(&stream);
    let next = Streams::default();
    let (other, _line) = handed(&next, &place).await;
    passes(&other);
    passes(&stream);
    assert_eq!(processes(&place).len(), 2);
    let [client, mut agent] = stream;
    agent.write_all(&[0, 0, 0, 0, 9]).unwrap();
    let mut last = Vec::new();
    (&client).read_to_end(&mut last).unwrap();
    assert_eq!(last, [0, 0, 0, 0, 9]);
    until(|| processes(&place).len() == 1).await;
}
