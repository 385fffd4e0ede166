use super::*;
use crate::config::Shape;
use crate::control::message::Busy;
use dayfly_units::CpuModel;
use std::os::fd::{AsFd, BorrowedFd};

/// A server without a guest, and a folder with its socket.
fn server() -> (Server, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    (Server::new(listener, None, crate::meter::Meter::default()).unwrap(), folder)
}

fn connect(folder: &tempfile::TempDir) -> UnixStream {
    let stream = UnixStream::connect(folder.path().join("socket")).unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

fn send(stream: &UnixStream, command: &Command, fds: &[BorrowedFd<'_>]) {
    super::super::wire::send(stream, &serde_json::to_vec(command).unwrap(), fds).unwrap();
}

/// The answers that wait in a client's socket.
fn answers(stream: &UnixStream) -> Vec<Answer> {
    let mut receiver = Receiver::without_descriptors();
    let mut answers = Vec::new();
    loop {
        match receiver.receive(stream) {
            Ok(Received::Message(json, _)) => answers.push(serde_json::from_slice(&json).unwrap()),
            Ok(Received::Part) => {}
            Err(WireError::Io(_, e)) if e.kind() == io::ErrorKind::WouldBlock => return answers,
            other => panic!("{other:?}"),
        }
    }
}

fn busy() -> Status {
    let shape = Shape {
        memory_bytes: 64 << 20,
        vcpus: 1,
        max_vcpus: 0,
        disks: 0,
        nets: 0,
        cpu_model: CpuModel::Host,
    };
    Status { busy: Some(Busy::Precopy), ..Status::of(shape) }
}

#[test]
fn during_a_long_command_only_status_is_answered_and_the_rest_waits_in_order() {
    let (mut server, folder) = server();
    let (asks, pauses, resumes) = (connect(&folder), connect(&folder), connect(&folder));
    let file = tempfile::tempfile().unwrap();
    send(&pauses, &Command::Precopy { own: false }, &[file.as_fd()]);
    send(&pauses, &Command::Status, &[]);
    send(&asks, &Command::Status, &[]);
    send(&resumes, &Command::Resume, &[]);
    let status = busy();
    // Accepts the connections at the first point, reads them at the second.
    (0..4).for_each(|_| server.serve_status(&status));
    assert_eq!(answers(&asks), [Answer::Status(status.clone())]);
    send(&asks, &Command::Status, &[]);
    server.serve_status(&status);
    assert_eq!(answers(&asks), [Answer::Status(status.clone())]);
    assert!(answers(&pauses).is_empty() && answers(&resumes).is_empty());
    // The commands that wait, in the order of the connections, with their descriptors.
    let waiting = server.connections.iter().filter(|c| c.ready).map(|c| {
        let (json, fds) = c.waiting.as_ref().unwrap();
        (serde_json::from_slice::<Command>(json).unwrap(), fds.len())
    });
    let expected = [(Command::Precopy { own: false }, 1), (Command::Resume, 0)];
    assert_eq!(waiting.collect::<Vec<_>>(), expected);
    // They are done in that order, and then what came after them. There is no guest.
    let mut hosted = Hosted::Nothing;
    for connection in &mut server.connections {
        connection.turn(&mut hosted, &mut |_| ());
    }
    let refused = |answers: &[Answer]| matches!(answers, [Answer::Err { .. }]);
    assert!(refused(&answers(&pauses)) && refused(&answers(&resumes)));
    server.serve_status(&status);
    assert_eq!(answers(&pauses), [Answer::Status(status)], "sent after a command that waited");
}

#[test]
fn connections_that_end_during_a_long_command_are_closed_and_make_room() {
    let (mut server, folder) = server();
    let status = busy();
    for _ in 0..3 * MAX_CONNECTIONS {
        let asks = connect(&folder);
        send(&asks, &Command::Status, &[]);
        (0..2).for_each(|_| server.serve_status(&status));
        assert_eq!(answers(&asks), [Answer::Status(status.clone())]);
        // A close would be too late if a child that another test forks has the descriptor too.
        asks.shutdown(std::net::Shutdown::Both).unwrap();
    }
    // The first point reads the end of the last connection.
    server.serve_status(&status);
    assert!(server.connections.is_empty());
}
