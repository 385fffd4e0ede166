use super::*;
use crate::exec::cage::Cages;
use dayfly_api::agent::{HEADER_BYTES, decode_header, encode};
use dayfly_units::{VmId, sync::lock};
use std::io::BufRead;
use std::sync::{Mutex, MutexGuard};

/// The host's end of the next connection. `Host` is a function pointer without state, so tests take
/// turns.
static HOST: Mutex<Option<UnixStream>> = Mutex::new(None);
static TURN: Mutex<()> = Mutex::new(());
/// How often a request learnt that its connection to the host is broken.
pub(super) static BROKEN: AtomicUsize = AtomicUsize::new(0);

fn host() -> Result<OwnedFd, Errno> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    *HOST.lock().unwrap() = Some(theirs);
    Ok(ours.into())
}

/// An agent's socket and its `Programs`.
fn local(host: Host) -> (MutexGuard<'static, ()>, tempfile::TempDir, Arc<Programs>) {
    let turn = lock(&TURN);
    *lock(&HOST) = None;
    let root = tempfile::tempdir().unwrap();
    let cages = Cages::open(&root.path().join("no-cgroups"));
    let programs = Arc::new(Programs::new(root.path().into(), cages, false));
    serve(root.path(), Arc::clone(&programs), host).unwrap();
    (turn, root, programs)
}

fn ask(root: &tempfile::TempDir, line: &str) -> UnixStream {
    let mut stream = UnixStream::connect(root.path().join(SOCKET)).unwrap();
    stream.write_all(line.as_bytes()).unwrap();
    stream
}

fn answer(stream: UnixStream) -> String {
    let mut line = String::new();
    io::BufReader::new(stream).read_line(&mut line).unwrap();
    line
}

/// The host's end, and the request that arrived.
fn asked() -> (UnixStream, HostRequest) {
    let mut stream = loop {
        match HOST.lock().unwrap().take() {
            Some(stream) => break stream,
            None => std::thread::yield_now(),
        }
    };
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).unwrap();
    let (kind, length) = decode_header(header).unwrap();
    assert_eq!(kind, FrameKind::Request);
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    (stream, serde_json::from_slice(&body).unwrap())
}

fn reply(mut stream: &UnixStream, reply: &HostReply) {
    stream.write_all(&encode(FrameKind::Reply, &serde_json::to_vec(reply).unwrap())).unwrap();
}

#[test]
fn the_original_gets_the_ids_of_its_clones_and_a_clone_its_number() {
    let (_turn, root, programs) = local(host);
    let waits = ask(&root, "fork 2\n");
    let (stream, request) = asked();
    assert_eq!(request, HostRequest::Fork { count: 2 });
    let ids = [(); 2].map(|()| VmId::random());
    programs.fork.begin();
    programs.fork.end(None);
    reply(&stream, &HostReply::Forked { ids: ids.to_vec() });
    assert_eq!(answer(waits), format!("0 {} {}\n", ids[0], ids[1]));

    let waits = ask(&root, "fork\n");
    let (stream, request) = asked();
    assert_eq!(request, HostRequest::Fork { count: 1 });
    programs.fork.begin();
    let before = BROKEN.load(Ordering::SeqCst);
    drop(stream);
    while BROKEN.load(Ordering::SeqCst) == before {
        std::thread::yield_now();
    }
    programs.fork.end(Some(1));
    assert_eq!(answer(waits), "1\n");

    // The clone's identity may be complete before it sees the broken connection, and a clone may be
    // forked again.
    let waits = ask(&root, "fork 9\n");
    let (stream, _) = asked();
    programs.fork.begin();
    programs.fork.end(Some(9));
    drop(stream);
    assert_eq!(answer(waits), "9\n");
    let mode = std::fs::metadata(root.path().join(SOCKET)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn what_was_not_forked_says_why() {
    let (_turn, root, _) = local(host);
    let waits = ask(&root, "fork 3\n");
    let (stream, _) = asked();
    reply(&stream, &HostReply::Err { message: "no\nroom".into() });
    assert_eq!(answer(waits), "error: no room\n");
    let waits = ask(&root, "fork\n");
    drop(asked());
    assert!(answer(waits).starts_with("error: the host did not answer: "));
    let waits = ask(&root, "fork\n");
    let (stream, _) = asked();
    (&stream).write_all(&encode(FrameKind::Reply, b"{")).unwrap();
    assert!(answer(waits).starts_with("error: the host's reply: "));
    for line in
        ["\n", "fork 0\n", "fork x\n", "fork 1 2\n", "spoon\n", "fork -1\n", "fork 99999999999\n"]
    {
        assert!(answer(ask(&root, line)).starts_with("error: expected `fork`"), "{line:?}");
    }
    assert!(
        answer(ask(&root, &"f".repeat(100)))
            .starts_with("error: expected a line of at most 64 bytes")
    );
}

#[test]
fn a_machine_that_may_not_fork_itself_says_so() {
    let (_turn, root, _) = local(|| Err(Errno::CONNRESET));
    assert!(
        answer(ask(&root, "fork\n"))
            .starts_with("error: the host did not listen: this machine may not")
    );
}

#[test]
fn another_user_is_refused_whatever_the_mode_of_the_socket_is() {
    let (_turn, root, _) = local(host);
    assert!(rustix::process::geteuid().is_root(), "this test has to run as root");
    let socket = root.path().join(SOCKET);
    let open = |path: &Path| std::fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    for path in socket.ancestors().take_while(|path| path.starts_with(root.path())) {
        open(path);
    }
    let asked = std::thread::spawn(move || {
        const UNPRIVILEGED: libc::uid_t = 65_534;
        // SAFETY: the bare system call changes only the user of this thread (credentials(7)), which
        // ends at once.
        let changed =
            unsafe { libc::syscall(libc::SYS_setresuid, UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED) };
        assert_eq!(changed, 0, "{}", io::Error::last_os_error());
        let mut stream = UnixStream::connect(socket).unwrap();
        // The agent may have refused the connection already.
        let _ = stream.write_all(b"fork 1\n");
        answer(stream)
    });
    assert_eq!(asked.join().unwrap(), "error: expected a program of user 0, got one of 65534\n");
    assert!(HOST.lock().unwrap().is_none(), "the host was asked");
}
