//! Messages of the guest, checked and taken apart; answers, put together.

use crate::wire::{IN_HEADER_BYTES, InHeader, OUT_HEADER_BYTES, OutHeader};
use rustix::io::Errno;
use std::ffi::CStr;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The longest name of a file.
pub const MAX_NAME_BYTES: usize = 255;

/// A message of the guest.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// Its header.
    pub header: InHeader,
    body: &'a [u8],
}

impl<'a> Message<'a> {
    /// `None` if the bytes are not as many as the header says.
    #[must_use]
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (header, body) = InHeader::read_from_prefix(bytes).ok()?;
        (usize::try_from(header.len) == Ok(bytes.len())).then_some(Self { header, body })
    }

    /// What follows the header.
    #[must_use]
    pub const fn body(&self) -> Body<'a> {
        Body(self.body)
    }
}

/// The part of a message that is not read yet. What is missing is EINVAL. Bytes at the end that the
/// server does not know are ignored: newer kernels may append fields.
#[derive(Debug, Clone, Copy)]
pub struct Body<'a>(&'a [u8]);

impl<'a> Body<'a> {
    /// The next structure.
    ///
    /// # Errors
    /// EINVAL: too short.
    pub fn take<T: FromBytes>(&mut self) -> Result<T, Errno> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| Errno::INVAL)?;
        self.0 = rest;
        Ok(value)
    }

    /// The next text, up to its NUL.
    ///
    /// # Errors
    /// EINVAL: no NUL.
    pub fn text(&mut self) -> Result<&'a CStr, Errno> {
        let text = CStr::from_bytes_until_nul(self.0).map_err(|_| Errno::INVAL)?;
        self.0 = self.0.get(text.to_bytes_with_nul().len()..).unwrap_or_default();
        Ok(text)
    }

    /// The next text, if it can name an entry of a folder.
    ///
    /// # Errors
    /// EINVAL: no NUL, empty, `.`, `..`, or with a slash; ENAMETOOLONG.
    pub fn name(&mut self) -> Result<&'a CStr, Errno> {
        let name = self.text()?;
        let bytes = name.to_bytes();
        if bytes.len() > MAX_NAME_BYTES {
            return Err(Errno::NAMETOOLONG);
        }
        if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
            return Err(Errno::INVAL);
        }
        Ok(name)
    }

    /// The next `count` bytes.
    ///
    /// # Errors
    /// EINVAL: too short.
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Errno> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(bytes)
    }
}

/// An answer that is being put together. Its memory is used again for the next one.
#[derive(Debug, Default)]
pub struct Reply {
    /// At least `len` bytes; those past it are of earlier answers.
    bytes: Vec<u8>,
    len: usize,
}

impl Reply {
    /// Forgets all but the place of the header.
    pub fn clear(&mut self) {
        self.len = OUT_HEADER_BYTES;
        if self.bytes.len() < OUT_HEADER_BYTES {
            self.bytes.resize(OUT_HEADER_BYTES, 0);
        }
    }

    /// Bytes after the header.
    #[must_use]
    pub const fn body_bytes(&self) -> usize {
        self.len - OUT_HEADER_BYTES
    }

    /// Appends a structure.
    pub fn push<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.extend(value.as_bytes());
    }

    /// Appends bytes.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.space(bytes.len()).copy_from_slice(bytes);
        self.grow(bytes.len());
    }

    /// Room for `count` more bytes, which [`Self::grow`] then makes a part of the answer.
    pub fn space(&mut self, count: usize) -> &mut [u8] {
        let end = self.len + count;
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        &mut self.bytes[self.len..end]
    }

    /// Appends the first `count` bytes of [`Self::space`].
    pub fn grow(&mut self, count: usize) {
        self.len = (self.len + count).min(self.bytes.len());
    }

    /// Writes the header, and returns the whole answer. With an error, the answer has no body.
    pub fn finish(&mut self, unique: u64, result: Result<(), Errno>) -> &[u8] {
        if result.is_err() {
            self.clear();
        }
        let error = result.err().map_or(0, |errno| -errno.raw_os_error());
        let len = u32::try_from(self.len).unwrap_or(u32::MAX);
        let header = OutHeader { len, error, unique };
        self.bytes[..OUT_HEADER_BYTES].copy_from_slice(header.as_bytes());
        &self.bytes[..self.len]
    }
}

/// A message as a guest's kernel makes it, for tests.
#[doc(hidden)]
#[must_use]
pub fn encode(mut header: InHeader, body: &[u8]) -> Vec<u8> {
    header.len = u32::try_from(IN_HEADER_BYTES + body.len()).unwrap_or(u32::MAX);
    [header.as_bytes(), body].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_nowhere() {
        let name = |bytes: &[u8]| Body(bytes).name().map(CStr::to_bytes).map(<[u8]>::to_vec);
        assert_eq!(name(b"a\0rest"), Ok(b"a".to_vec()));
        assert_eq!(name(b"...\0"), Ok(b"...".to_vec()));
        for bad in [&b"\0"[..], b".\0", b"..\0", b"a/b\0", b"/\0", b"a", b""] {
            assert_eq!(name(bad), Err(Errno::INVAL), "{bad:?}");
        }
        let mut long = vec![b'x'; MAX_NAME_BYTES + 1];
        long.push(0);
        assert_eq!(name(&long), Err(Errno::NAMETOOLONG));
        assert!(name(&long[1..]).is_ok());
    }

    #[test]
    fn a_message_has_the_length_of_its_header() {
        let message = encode(InHeader { opcode: 1, ..InHeader::default() }, b"a\0");
        assert!(Message::parse(&message).is_some());
        assert!(Message::parse(&message[..message.len() - 1]).is_none());
        assert!(Message::parse(&[message.as_slice(), b"x"].concat()).is_none());
        assert!(Message::parse(&message[..39]).is_none());
    }

    #[test]
    fn an_answer_with_an_error_has_no_body() {
        let mut reply = Reply::default();
        reply.clear();
        reply.extend(b"secret");
        assert_eq!(reply.body_bytes(), 6);
        let bytes = reply.finish(7, Err(Errno::IO)).to_vec();
        assert_eq!(OutHeader::read_from_bytes(&bytes).unwrap().error, -5);
        reply.clear();
        assert_eq!(reply.finish(8, Ok(())).len(), OUT_HEADER_BYTES);
    }
}
