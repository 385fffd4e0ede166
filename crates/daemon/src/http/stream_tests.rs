use super::*;
use crate::http::relay::rules;
use dayfly_api::agent::{FrameKind, encode};
use tokio::io::AsyncReadExt;

#[tokio::test]
async fn the_last_bytes_follow_what_was_not_read_and_are_never_inside_a_frame() {
    let frame = encode(FrameKind::Stdout, b"output");
    let whole = [frame.as_slice(), b"last"].concat();
    for (sent, due) in [
        (&frame[..], &whole[..]),
        // The client waits for the rest of a body.
        (&frame[..8], &frame[..8]),
        // The client has nothing of a header that is not complete.
        (&frame[..3], &b"last"[..]),
    ] {
        let mut own = Own {
            outwards: Outwards::new(rules(&[FrameKind::Stdout], &[FrameKind::Exit], 9)),
            inwards: Inwards::new(BytesMut::new()),
            progress: Progress::default(),
        };
        // A client that reads nothing yet, and whose pipe takes two bytes.
        let (mut near, mut client) = tokio::io::duplex(2);
        let mut agent = sent;
        let passing = own.outwards.pass(&mut agent, &mut near, &own.progress);
        let _ = timeout(Duration::ZERO, passing).await;
        let finish = own.rest(near).finish(b"last".to_vec());
        let mut got = Vec::new();
        let (read, ()) = tokio::join!(client.read_to_end(&mut got), finish);
        read.unwrap();
        assert_eq!(got, due, "{} bytes were sent", sent.len());
    }
}
