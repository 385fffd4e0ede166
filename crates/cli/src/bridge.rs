//! From pieces of an async stream to a blocking reader, and back.

use bytes::Bytes;
use dayfly_api::client::ByteStream;
use std::io::{self, Read, Write};
use tokio::sync::mpsc;

/// Pieces that may be waiting between the two sides.
const WAITING: usize = 8;

/// Reads pieces as one stream.
#[derive(Debug)]
pub struct PieceReader {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl Read for PieceReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            match self.pieces.blocking_recv() {
                None => return Ok(0),
                Some(piece) => self.current = piece?,
            }
        }
        let count = out.len().min(self.current.len());
        out[..count].copy_from_slice(&self.current.split_to(count));
        Ok(count)
    }
}

/// Gives a stream to a blocking reader; when the reader goes, so does the stream.
#[must_use]
pub fn pump(mut stream: ByteStream) -> PieceReader {
    let (sender, pieces) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        loop {
            let piece = match stream.next().await {
                Ok(Some(piece)) => Ok(piece),
                Ok(None) => return,
                Err(e) => Err(io::Error::other(e)),
            };
            if sender.send(piece).await.is_err() {
                return;
            }
        }
    });
    PieceReader { pieces, current: Bytes::new() }
}

/// Writes become pieces of a stream.
#[derive(Debug)]
pub struct PieceWriter {
    pieces: mpsc::Sender<io::Result<Bytes>>,
}

impl PieceWriter {
    /// A writer, and the stream that comes out of it.
    pub fn new() -> (Self, impl futures::Stream<Item = io::Result<Bytes>> + Send + 'static) {
        let (pieces, mut receiver) = mpsc::channel(WAITING);
        (Self { pieces }, futures::stream::poll_fn(move |cx| receiver.poll_recv(cx)))
    }

    /// Breaks the stream off with `error`, so that the other side keeps nothing of it.
    pub fn fail(&self, error: &io::Error) {
        let _ = self.pieces.blocking_send(Err(io::Error::new(error.kind(), error.to_string())));
    }

    /// Another hand on the same stream, to [`PieceWriter::fail`] it once the first was given away.
    #[must_use]
    pub fn handle(&self) -> Self {
        Self { pieces: self.pieces.clone() }
    }
}

impl Write for PieceWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = Ok(Bytes::copy_from_slice(bytes));
        let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        self.pieces.blocking_send(piece).map_err(gone).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
