//! The two directions of a program's connection, between a client and a guest's agent.
//!
//! Bytes to the agent are copied unchecked, because the agent checks them. In bytes to the client
//! only frame headers are decoded, to find the end: the last frame is [`Exit`], or the connection
//! breaks.

use bytes::{Buf, BytesMut};
use dayfly_api::agent::{Exit, FrameError, FrameKind, HEADER_BYTES, decode_header};
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes of one read in either direction.
const CHUNK_BYTES: usize = 64 << 10;
/// Bytes of the longest body of an `Exit` frame.
const EXIT_MAX_BYTES: usize = 1 << 10;

/// How the agent's direction ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    /// The program ended. The complete `Exit` frame has not been sent to the client yet.
    Exit(Exit, Vec<u8>),
    /// The connection ended before the program: the guest or its agent is gone.
    Closed,
}

/// Why a relay failed.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The client is gone.
    #[error("the client's connection ended: {0}")]
    Client(#[source] io::Error),
    /// The guest sent bytes that are not a frame.
    #[error("frames of the guest's agent: {0}")]
    Frame(#[from] FrameError),
    /// The guest sent a frame of another kind.
    #[error("frames of the guest's agent: expected Stdout, Stderr or Exit, got {0:?}")]
    Kind(FrameKind),
    /// The guest sent a damaged `Exit` frame.
    #[error("the Exit frame of the guest's agent: {0}")]
    Exit(String),
}

/// Copies the agent's frames to the client up to the `Exit` frame.
///
/// # Errors
/// [`RelayError`].
pub async fn outwards<R, W>(agent: &mut R, client: &mut W) -> Result<Ended, RelayError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut buffer = BytesMut::with_capacity(CHUNK_BYTES);
    // Bytes of the current frame's body that have not been sent.
    let mut body_left = 0;
    loop {
        let mut ready = 0;
        let mut exit = None;
        while ready < buffer.len() {
            if body_left > 0 {
                let step = body_left.min(buffer.len() - ready);
                (ready, body_left) = (ready + step, body_left - step);
                continue;
            }
            let Some(header) = buffer[ready..].first_chunk::<HEADER_BYTES>() else { break };
            match decode_header(*header)? {
                (FrameKind::Stdout | FrameKind::Stderr, length) => {
                    ready += HEADER_BYTES;
                    body_left = length;
                }
                (FrameKind::Exit, length) => {
                    exit = Some(length);
                    break;
                }
                (kind, _) => return Err(RelayError::Kind(kind)),
            }
        }
        if ready > 0 {
            client.write_all(&buffer[..ready]).await.map_err(RelayError::Client)?;
            buffer.advance(ready);
            client.flush().await.map_err(RelayError::Client)?;
        }
        if let Some(length) = exit {
            return read_exit(agent, buffer, length).await;
        }
        buffer.reserve(CHUNK_BYTES);
        // A broken connection counts as ended: the VM's exit reason explains it, the socket's error
        // does not.
        if !matches!(agent.read_buf(&mut buffer).await, Ok(1..)) {
            return Ok(Ended::Closed);
        }
    }
}

/// Completes the `Exit` frame that begins in `buffer`.
async fn read_exit<R: AsyncRead + Unpin>(
    agent: &mut R,
    buffer: BytesMut,
    length: usize,
) -> Result<Ended, RelayError> {
    if length > EXIT_MAX_BYTES {
        return Err(RelayError::Exit(format!(
            "expected at most {EXIT_MAX_BYTES} bytes, got {length}"
        )));
    }
    let whole = HEADER_BYTES + length;
    let mut frame = buffer.to_vec();
    let have = frame.len();
    if have > whole {
        return Err(RelayError::Exit(format!(
            "expected nothing behind it, got {} bytes",
            have - whole
        )));
    }
    frame.resize(whole, 0);
    if agent.read_exact(&mut frame[have..]).await.is_err() {
        return Ok(Ended::Closed);
    }
    let exit = serde_json::from_slice(&frame[HEADER_BYTES..])
        .map_err(|e| RelayError::Exit(e.to_string()))?;
    Ok(Ended::Exit(exit, frame))
}

/// Copies the client's bytes to the agent until the client is gone. Goes on if the agent is gone,
/// because [`outwards`] returns the agent's last frames.
pub async fn inwards<R, W>(client: &mut R, agent: &mut W)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut buffer = BytesMut::with_capacity(CHUNK_BYTES);
    let mut agent_there = true;
    loop {
        buffer.clear();
        if !matches!(client.read_buf(&mut buffer).await, Ok(1..)) {
            return;
        }
        agent_there = agent_there && agent.write_all(&buffer).await.is_ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::agent::{MAX_FRAME_BYTES, encode};
    use proptest::collection::vec;
    use proptest::prelude::*;

    const EXIT: Exit = Exit { code: Some(3), signal: None, timed_out: false };

    fn exit_frame() -> Vec<u8> {
        encode(FrameKind::Exit, &serde_json::to_vec(&EXIT).unwrap())
    }

    /// Relays `bytes`, which arrive in pieces of `piece` bytes.
    fn relayed(bytes: &[u8], piece: usize) -> (Result<Ended, RelayError>, Vec<u8>) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (mut near, mut far) = tokio::io::duplex(piece);
            let mut out = Vec::new();
            let feed = async move {
                // The relay may stop before it has read everything.
                let _ = far.write_all(bytes).await;
            };
            let (result, ()) = tokio::join!(
                async {
                    let result = outwards(&mut near, &mut out).await;
                    drop(near);
                    result
                },
                feed
            );
            (result, out)
        })
    }

    proptest! {
        #[test]
        fn output_goes_out_as_it_came_however_it_is_cut(
            bodies in vec(vec(any::<u8>(), 0..300), 0..8),
            piece in 1usize..400,
            cut in 0usize..40,
        ) {
            let frames = bodies.iter().flat_map(|body| encode(FrameKind::Stdout, body));
            let output: Vec<u8> = frames.collect();
            let whole = [output.clone(), exit_frame()].concat();
            let (ended, out) = relayed(&whole, piece);
            prop_assert_eq!(ended.unwrap(), Ended::Exit(EXIT, exit_frame()));
            prop_assert_eq!(&out, &output);
            let cut = cut.clamp(1, whole.len());
            let (ended, out) = relayed(&whole[..whole.len() - cut], piece);
            prop_assert_eq!(ended.unwrap(), Ended::Closed);
            prop_assert!(output.starts_with(&out));
        }

        #[test]
        fn any_bytes_end_the_relay_without_a_panic(bytes in vec(any::<u8>(), 0..200)) {
            let (_, out) = relayed(&bytes, 64);
            prop_assert!(bytes.starts_with(&out));
        }
    }

    #[test]
    fn what_an_agent_may_not_send_is_refused() {
        let request = encode(FrameKind::Request, b"{}");
        assert!(matches!(relayed(&request, 64).0, Err(RelayError::Kind(FrameKind::Request))));
        let behind = [exit_frame(), vec![0]].concat();
        assert!(matches!(relayed(&behind, 64).0, Err(RelayError::Exit(_))));
        let long = encode(FrameKind::Exit, &[b' '; EXIT_MAX_BYTES + 1]);
        assert!(matches!(relayed(&long, 64).0, Err(RelayError::Exit(_))));
        let longer =
            [u32::try_from(MAX_FRAME_BYTES + 1).unwrap().to_le_bytes().as_slice(), &[5]].concat();
        assert!(matches!(relayed(&longer, 64).0, Err(RelayError::Frame(_))));
    }
}
