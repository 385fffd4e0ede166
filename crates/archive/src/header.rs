//! The 512-byte header block: fields, numbers, checksum.

use crate::block::BLOCK;
use crate::error::Refusal;
use crate::sparse::Run;

const NAME: std::ops::Range<usize> = 0..100;
const MODE: std::ops::Range<usize> = 100..108;
const UID: std::ops::Range<usize> = 108..116;
const GID: std::ops::Range<usize> = 116..124;
const SIZE: std::ops::Range<usize> = 124..136;
const MTIME: std::ops::Range<usize> = 136..148;
const CHECKSUM: std::ops::Range<usize> = 148..156;
const TYPE: usize = 156;
const LINK: std::ops::Range<usize> = 157..257;
const MAGIC: std::ops::Range<usize> = 257..263;
const MAJOR: std::ops::Range<usize> = 329..337;
const MINOR: std::ops::Range<usize> = 337..345;
const PREFIX: std::ops::Range<usize> = 345..500;
/// GNU: four runs of a sparse file, a flag for further runs, and the file's length.
const GNU_RUNS: std::ops::Range<usize> = 386..482;
const GNU_MORE: usize = 482;
const GNU_SIZE: std::ops::Range<usize> = 483..495;
/// GNU: 21 runs of a continuation block, and a flag for another block.
const MORE_RUNS: std::ops::Range<usize> = 0..504;
const MORE_MORE: usize = 504;

/// The kind of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file (types `0`, NUL, `7`, and GNU's `S`).
    File,
    /// Another name of a file that came earlier in the archive.
    HardLink,
    /// A symbolic link.
    Symlink,
    /// A character device.
    Char,
    /// A block device.
    Block,
    /// A folder.
    Folder,
    /// A named pipe.
    Fifo,
    /// An unsupported kind, with its type byte.
    Other(u8),
}

impl Kind {
    /// The kind in words, for errors.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::File => "a file".to_owned(),
            Self::HardLink => "a hard link".to_owned(),
            Self::Symlink => "a symbolic link".to_owned(),
            Self::Char => "a character device".to_owned(),
            Self::Block => "a block device".to_owned(),
            Self::Folder => "a folder".to_owned(),
            Self::Fifo => "a named pipe".to_owned(),
            Self::Other(byte) => format!("an entry of type {:?}", char::from(byte)),
        }
    }

    /// The type byte to write.
    pub(crate) const fn byte(self) -> u8 {
        match self {
            Self::File => b'0',
            Self::HardLink => b'1',
            Self::Symlink => b'2',
            Self::Char => b'3',
            Self::Block => b'4',
            Self::Folder => b'5',
            Self::Fifo => b'6',
            Self::Other(byte) => byte,
        }
    }
}

/// A header block with a correct checksum.
pub struct Header([u8; BLOCK]);

impl Header {
    /// Verifies the checksum of a block.
    pub fn checked(block: [u8; BLOCK]) -> Result<Self, (Vec<u8>, Refusal)> {
        let header = Self(block);
        let stated = match number(&header.0[CHECKSUM]) {
            Ok(stated) => stated,
            Err(got) => return Err((header.name(), bad("a tar header", got))),
        };
        // POSIX sums unsigned bytes; some old writers summed signed ones. The checksum field itself
        // counts as spaces.
        let bytes = || {
            header.0.iter().enumerate().map(|(i, b)| if CHECKSUM.contains(&i) { b' ' } else { *b })
        };
        let sum: i64 = bytes().map(i64::from).sum();
        let signed: i64 = bytes().map(|b| i64::from(b.cast_signed())).sum();
        if stated != sum && stated != signed {
            let why = bad(format!("a tar header with checksum {stated}"), sum.to_string());
            return Err((header.name(), why));
        }
        Ok(header)
    }

    pub fn type_byte(&self) -> u8 {
        self.0[TYPE]
    }

    fn is_ustar(&self) -> bool {
        self.0[MAGIC] == *b"ustar\0"
    }

    /// The name, with ustar's prefix before it.
    pub fn name(&self) -> Vec<u8> {
        let name = text(&self.0[NAME]);
        let prefix = if self.is_ustar() { text(&self.0[PREFIX]) } else { &[] };
        if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
    }

    pub fn link(&self) -> Vec<u8> {
        text(&self.0[LINK]).to_vec()
    }

    fn field(&self, range: std::ops::Range<usize>, what: &str) -> Result<i64, Refusal> {
        number(&self.0[range]).map_err(|got| bad(format!("a number as {what}"), got))
    }

    fn unsigned(&self, range: std::ops::Range<usize>, what: &str) -> Result<u64, Refusal> {
        let value = self.field(range, what)?;
        u64::try_from(value).map_err(|_| bad(format!("a {what} of at least 0"), value.to_string()))
    }

    pub fn size(&self) -> Result<u64, Refusal> {
        self.unsigned(SIZE, "size")
    }

    /// The lower twelve bits of the mode.
    pub fn mode(&self) -> Result<u32, Refusal> {
        Ok(u32::try_from(self.field(MODE, "mode")? & 0o7777).unwrap_or(0))
    }

    pub fn owner(&self) -> Result<(u64, u64), Refusal> {
        Ok((self.unsigned(UID, "owner")?, self.unsigned(GID, "group")?))
    }

    pub fn mtime(&self) -> Result<i64, Refusal> {
        self.field(MTIME, "time")
    }

    /// Major and minor number, of at most 12 and 20 bits: Linux has no larger ones, and the octal
    /// digits of a header hold no larger minor number than 2^21 - 1.
    pub fn device(&self) -> Result<(u32, u32), Refusal> {
        let part = |range, what, bits: u32| {
            let value = self.unsigned(range, what)?;
            let part = u32::try_from(value).ok().filter(|part| part >> bits == 0);
            part.ok_or_else(|| bad(format!("a {what} of at most {bits} bits"), value.to_string()))
        };
        Ok((part(MAJOR, "device major", 12)?, part(MINOR, "device minor", 20)?))
    }

    /// GNU sparse: the runs of this block, a flag for further runs, and the file's length.
    pub fn gnu_sparse(&self) -> Result<(Vec<Run>, bool, u64), Refusal> {
        let runs = gnu_runs(&self.0[GNU_RUNS])?;
        Ok((runs, self.0[GNU_MORE] != 0, self.unsigned(GNU_SIZE, "length of a sparse file")?))
    }
}

/// GNU sparse: the runs of a continuation block, and a flag for another block.
pub fn gnu_continuation(block: &[u8; BLOCK]) -> Result<(Vec<Run>, bool), Refusal> {
    Ok((gnu_runs(&block[MORE_RUNS])?, block[MORE_MORE] != 0))
}

fn gnu_runs(field: &[u8]) -> Result<Vec<Run>, Refusal> {
    let value = |part: &[u8]| {
        let value = number(part).map_err(|got| bad("a sparse map of numbers", got))?;
        u64::try_from(value).map_err(|_| bad("a sparse map of numbers from 0", value.to_string()))
    };
    let parts = field.as_chunks::<24>().0.iter();
    // An unused run has no digits in either field.
    let used = parts.filter(|part| part[0] != 0 || part[12] != 0);
    used.map(|part| Ok((value(&part[..12])?, value(&part[12..])?))).collect()
}

fn bad(expected: impl Into<String>, got: String) -> Refusal {
    Refusal { expected: expected.into(), got }
}

/// A field up to its first NUL.
fn text(field: &[u8]) -> &[u8] {
    &field[..field.iter().position(|b| *b == 0).unwrap_or(field.len())]
}

/// Decodes a number in octal, or in base 256 if the first bit is set (GNU). A blank field is 0.
fn number(field: &[u8]) -> Result<i64, String> {
    if let [first, rest @ ..] = field
        && first & 0x80 != 0
    {
        // Two's complement; a copy of the sign replaces the marker bit.
        let mut value = i128::from(first & 0x7f) - if first & 0x40 == 0 { 0 } else { 0x80 };
        for byte in rest {
            value = value << 8 | i128::from(*byte);
        }
        return i64::try_from(value).map_err(|_| format!("{value}"));
    }
    let digits = text(field).trim_ascii();
    if digits.is_empty() {
        return Ok(0);
    }
    let value = digits.iter().try_fold(0_i64, |value, byte| match byte {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(byte - b'0')),
        _ => None,
    });
    value.ok_or_else(|| format!("\"{}\"", crate::error::show(digits)))
}

/// The fields of a header to write. A value beyond a field's width is written as 0, because the pax
/// record before the header carries it.
pub struct Fields<'a> {
    pub name: &'a [u8],
    pub link: &'a [u8],
    pub kind: u8,
    pub mode: u32,
    pub owner: (u64, u64),
    pub size: u64,
    pub mtime_s: i64,
    pub device: (u32, u32),
}

/// Largest value of an octal field with `digits` digits.
pub const fn octal_limit(digits: u32) -> u64 {
    8_u64.pow(digits) - 1
}

impl Fields<'_> {
    /// Encodes the header block.
    pub fn block(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        let put = |block: &mut [u8; BLOCK], range: std::ops::Range<usize>, bytes: &[u8]| {
            let bytes = &bytes[..bytes.len().min(range.len())];
            block[range.start..range.start + bytes.len()].copy_from_slice(bytes);
        };
        let octal = |block: &mut [u8; BLOCK], range: std::ops::Range<usize>, value: u64| {
            let digits = range.len() - 1;
            let limit = octal_limit(u32::try_from(digits).unwrap_or(7));
            let value = if value > limit { 0 } else { value };
            put(block, range, format!("{value:0digits$o}\0").as_bytes());
        };
        put(&mut block, NAME, self.name);
        put(&mut block, LINK, self.link);
        octal(&mut block, MODE, u64::from(self.mode & 0o7777));
        octal(&mut block, UID, self.owner.0);
        octal(&mut block, GID, self.owner.1);
        octal(&mut block, SIZE, self.size);
        octal(&mut block, MTIME, u64::try_from(self.mtime_s).unwrap_or(0));
        octal(&mut block, MAJOR, u64::from(self.device.0));
        octal(&mut block, MINOR, u64::from(self.device.1));
        block[TYPE] = self.kind;
        put(&mut block, MAGIC.start..MAGIC.end + 2, b"ustar\x0000");
        put(&mut block, CHECKSUM, b"        ");
        let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
        put(&mut block, CHECKSUM, format!("{sum:06o}\0 ").as_bytes());
        block
    }
}
