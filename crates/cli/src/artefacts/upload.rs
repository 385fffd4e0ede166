//! Uploads files as one zstd frame.

use crate::bridge::PieceWriter;
use crate::progress::Steps;
use anyhow::{Context, Result};
use dayfly_api::client::{Body, ClientError, stream_body};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// zstd level. Speed matters most, because the daemon is on this computer and most of a disk is
/// zero.
const LEVEL: i32 = 1;
const BUFFER_BYTES: usize = 1 << 20;

/// Sends `files` in order, as a single zstd frame in the body that `call` gets.
pub async fn send<T>(
    files: Vec<PathBuf>,
    steps: &Steps,
    call: impl AsyncFnOnce(Body) -> Result<T, ClientError>,
) -> Result<T> {
    let mut total = 0;
    for file in &files {
        total += std::fs::metadata(file).with_context(|| file.display().to_string())?.len();
    }
    let (writer, stream) = PieceWriter::new();
    let handle = writer.handle();
    let done = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&done);
    let writing = tokio::task::spawn_blocking(move || {
        let result = compress(&files, writer, &counted);
        if let Err(e) = &result {
            handle.fail(e);
        }
        result
    });
    let sending = call(stream_body(stream));
    tokio::pin!(sending);
    let sent = loop {
        tokio::select! {
            sent = &mut sending => break sent,
            () = tokio::time::sleep(Duration::from_millis(100)) => {
                steps.bytes(done.load(Ordering::Relaxed), total);
            }
        }
    };
    match (sent, writing.await?) {
        // The local cause is the better error, unless it only says that the peer has closed.
        (Err(e), Err(ours)) if ours.kind() == io::ErrorKind::BrokenPipe => Err(e.into()),
        (_, Err(ours)) => Err(ours).context("reading what is to be uploaded"),
        (Err(e), Ok(())) => Err(e.into()),
        (Ok(done), Ok(())) => Ok(done),
    }
}

fn compress(files: &[PathBuf], out: impl Write, done: &AtomicU64) -> io::Result<()> {
    let out = io::BufWriter::with_capacity(BUFFER_BYTES, out);
    let mut encoder = zstd::Encoder::new(out, LEVEL)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    for path in files {
        let mut file = File::open(path)?;
        loop {
            match file.read(&mut buffer)? {
                0 => break,
                got => {
                    encoder.write_all(&buffer[..got])?;
                    done.fetch_add(got as u64, Ordering::Relaxed);
                }
            }
        }
    }
    encoder.finish()?.flush()
}
