//! Decodes an upload: one zstd frame whose content has an announced length.

use std::io::{self, BufReader, Read};

/// The largest window that a frame may ask for, as a power of two: 128 MiB, the most that `zstd -d`
/// accepts without `--long` or `--memory`.
const WINDOW_LOG_MAX: u32 = 27;

/// The content of one zstd frame, as a reader.
pub(crate) struct Frame<'a> {
    decoder: zstd::stream::read::Decoder<'static, BufReader<&'a mut dyn Read>>,
}

impl<'a> Frame<'a> {
    pub(crate) fn new(from: &'a mut dyn Read) -> io::Result<Self> {
        let buffered = BufReader::with_capacity(256 << 10, from);
        let mut decoder = zstd::stream::read::Decoder::with_buffer(buffered)?.single_frame();
        decoder.window_log_max(WINDOW_LOG_MAX)?;
        Ok(Self { decoder })
    }

    /// Whether both the frame's content and the upload end here.
    ///
    /// Reading past the content also verifies the frame's checksum, which comes last.
    pub(crate) fn ends_here(mut self) -> io::Result<bool> {
        let mut byte = [0];
        if self.decoder.read(&mut byte)? != 0 {
            return Ok(false);
        }
        Ok(self.decoder.finish().read(&mut byte)? == 0)
    }
}

impl Read for Frame<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.decoder.read(buffer)
    }
}
