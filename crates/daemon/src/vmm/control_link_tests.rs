//! What VMMs that were taken over answer. The clock stands still while anything else can happen.

use super::*;
use dayfly_vmm::control::wire::WireError;
use std::os::fd::AsFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

const WITHIN: Duration = Duration::from_secs(20);

/// Sends a `Status` to a VMM that handles its connection by `vmm`.
async fn status<F: Future<Output = ()> + Send>(
    vmm: impl FnOnce(tokio::net::UnixStream) -> F + Send + 'static,
) -> Result<Answer, ControlError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let length = stream.read_u32_le().await.unwrap();
        stream.read_exact(&mut vec![0; length as usize]).await.unwrap();
        vmm(stream).await;
    });
    let answer = command(&path, Command::Status, WITHIN).await;
    serving.abort();
    answer
}

fn message(json: &str) -> Vec<u8> {
    [&u32::try_from(json.len()).unwrap().to_le_bytes(), json.as_bytes()].concat()
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_byte_by_byte_is_given_up_at_the_deadline() {
    const STEP: Duration = Duration::from_millis(700);
    let begun = tokio::time::Instant::now();
    let given_up = status(async |mut stream| {
        for byte in message(&format!(r#"{{"answer":"ok"{}}}"#, " ".repeat(1000))) {
            // Every single wait is shorter than the deadline.
            tokio::time::sleep(STEP).await;
            stream.write_u8(byte).await.unwrap();
        }
    })
    .await;
    let after = begun.elapsed();
    assert!(
        matches!(given_up, Err(ControlError::Link { source: LinkError::Timeout(WITHIN), .. })),
        "{given_up:?}"
    );
    assert!((WITHIN..WITHIN + STEP).contains(&after), "{after:?}");
    // The same bytes in time are an answer.
    let answer = status(async |mut stream| {
        for byte in message(r#"{"answer":"ok"}"#) {
            tokio::time::sleep(STEP).await;
            stream.write_u8(byte).await.unwrap();
        }
    });
    assert_eq!(answer.await.unwrap(), Answer::Ok);
}

#[tokio::test(start_paused = true)]
async fn nothing_that_a_vmm_sends_is_taken_without_bound() {
    let begun = tokio::time::Instant::now();
    let wire = |answer: Result<Answer, ControlError>| match answer {
        Err(ControlError::Link { source: LinkError::Wire(error), .. }) => error,
        other => panic!("{other:?}"),
    };
    let long = status(async |mut stream| stream.write_all(&[0xff; 4]).await.unwrap()).await;
    assert!(matches!(wire(long), WireError::TooLong { .. }));
    let closed = status(async |mut stream| stream.write_all(&[9, 0, 0, 0, b'{']).await.unwrap());
    assert!(matches!(wire(closed.await), WireError::Closed { got: 5, expected: 13 }));
    // A VMM that has descriptors may not fill the daemon's table with them.
    let fds = status(async |stream| {
        let stream = stream.into_std().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        dayfly_sys::fdwire::send(&stream, &message("null"), &[file.as_fd()]).unwrap();
    });
    assert!(matches!(wire(fds.await), WireError::TooManyFds));
    let gone = status(async |_| ()).await;
    assert!(matches!(gone, Err(ControlError::Link { source: LinkError::Gone, .. })), "{gone:?}");
    // Only the first message is read of a VMM that never stops.
    let babble = status(
        async |mut stream| {
            while stream.write_all(&message(r#"{"answer":"ok"}"#)).await.is_ok() {}
        },
    );
    assert_eq!(babble.await.unwrap(), Answer::Ok);
    let lie = r#"{"answer":"err","message":"\u001b]0;x\u0007\nforged"}"#;
    let refused = status(async |mut stream| stream.write_all(&message(lie)).await.unwrap());
    let refused = refused.await.unwrap_err();
    assert!(refused.was_refused());
    assert!(refused.to_string().ends_with(r"\x1b]0;x\x07\nforged"), "{refused}");
    assert!(begun.elapsed() < WITHIN, "something waited for its deadline");
}

#[tokio::test]
async fn a_vmm_that_accepts_no_connection_is_not_waited_for() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("control.sock");
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, 0).unwrap();
    let _waiting = Link::connect(&path).unwrap();
    let full = command(&path, Command::Status, WITHIN).await.unwrap_err();
    assert!(
        matches!(&full, ControlError::Connect { source, .. }
            if source.kind() == io::ErrorKind::WouldBlock),
        "{full:?}"
    );
    assert!(full.was_refused());
}
