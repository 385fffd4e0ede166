//! Adapters between async streams of pieces and blocking readers and writers.

use bytes::Bytes;
use dayfly_api::client::ByteStream;
use std::io::{self, Read, Write};
use tokio::sync::mpsc;

/// Upper limit for the pieces that wait between the two sides.
const WAITING: usize = 8;

/// A blocking reader of a stream's pieces.
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

/// Reads `stream` through a blocking reader. Dropping the reader drops the stream.
#[must_use]
pub fn pump(stream: ByteStream) -> PieceReader {
    pump_until(stream, std::future::pending())
}

/// Like [`pump`]. When `stop` completes, the reader gets an error in place of the rest.
#[must_use]
pub fn pump_until(
    mut stream: ByteStream,
    stop: impl Future<Output = ()> + Send + 'static,
) -> PieceReader {
    let (sender, pieces) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        let mut stop = std::pin::pin!(stop);
        loop {
            let next = tokio::select! {
                // `stop` is polled first, because it must take effect from the first piece on.
                biased;
                () = &mut stop => Err(io::Error::other("interrupted")),
                next = stream.next() => next.map_err(io::Error::other),
            };
            let Some(piece) = next.transpose() else { return };
            let last = piece.is_err();
            if sender.send(piece).await.is_err() || last {
                return;
            }
        }
    });
    PieceReader { pieces, current: Bytes::new() }
}

/// A blocking writer whose writes become pieces of a stream.
#[derive(Debug)]
pub struct PieceWriter {
    pieces: mpsc::Sender<io::Result<Bytes>>,
}

impl PieceWriter {
    /// Makes a writer and the stream of its pieces.
    pub fn new() -> (Self, impl futures::Stream<Item = io::Result<Bytes>> + Send + 'static) {
        let (pieces, mut receiver) = mpsc::channel(WAITING);
        (Self { pieces }, futures::stream::poll_fn(move |cx| receiver.poll_recv(cx)))
    }

    /// Ends the stream with `error`, so that the peer keeps nothing of it.
    pub fn fail(&self, error: &io::Error) {
        let _ = self.pieces.blocking_send(Err(io::Error::new(error.kind(), error.to_string())));
    }

    /// A second writer to the same stream, which can call [`PieceWriter::fail`] after the first was
    /// given away.
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
