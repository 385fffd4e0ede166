//! Headers before an entry's own header: long names and pax records.

use crate::error::{Refusal, refuse};
use crate::pax::Records;

/// Upper limit for the bytes of all extension headers before one entry. Go's archive/tar has the
/// same limit for each header.
pub const MAX_EXTENSION_BYTES: u64 = 1 << 20;
/// Upper limit for the extension headers before one entry.
const MAX_EXTENSION_HEADERS: u32 = 64;
/// The extension headers that were read before their entry.
#[derive(Default)]
pub struct Extensions {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub records: Records,
    bytes: u64,
    headers: u32,
    /// Whether at least one of the headers is not global.
    pub of_entry: bool,
}

impl Extensions {
    /// Counts a header of `stored` bytes against the limits.
    pub fn check(&mut self, stored: u64) -> Result<(), Refusal> {
        self.headers += 1;
        if self.headers > MAX_EXTENSION_HEADERS {
            return refuse(
                format!("at most {MAX_EXTENSION_HEADERS} extended headers before an entry"),
                "more",
            );
        }
        self.bytes = self.bytes.saturating_add(stored);
        if self.bytes > MAX_EXTENSION_BYTES {
            let expected = format!("at most {MAX_EXTENSION_BYTES} bytes of extended header");
            return refuse(expected, self.bytes.to_string());
        }
        Ok(())
    }

    pub fn take(&mut self, kind: u8, mut data: Vec<u8>) -> Result<(), Refusal> {
        self.of_entry = true;
        if kind == b'x' {
            return self.records.read(&data);
        }
        data.truncate(data.iter().position(|b| *b == 0).unwrap_or(data.len()));
        let place = if kind == b'L' { &mut self.path } else { &mut self.link };
        *place = Some(data);
        Ok(())
    }
}
