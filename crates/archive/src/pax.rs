//! Records of pax extended headers: `LENGTH KEY=VALUE\n`, read by their length.

use crate::error::{Refusal, refuse, show};
use crate::sparse::Run;
use std::collections::BTreeMap;

/// Key prefix for extended attributes: star's keyword, which GNU tar, libarchive and container
/// tools share.
pub const XATTR: &[u8] = b"SCHILY.xattr.";
/// Longest name of an attribute in bytes (Linux: `XATTR_NAME_MAX`).
const MAX_XATTR_NAME: usize = 255;
/// Longest value of an attribute in bytes (Linux: `XATTR_SIZE_MAX`).
const MAX_XATTR_VALUE: usize = 64 << 10;

/// The decoded records before an entry.
#[derive(Debug, Default)]
pub struct Records {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u64>,
    pub gid: Option<u64>,
    pub mtime: Option<(i64, u32)>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub sparse: SparseRecords,
}

/// The records of GNU tar's sparse formats.
#[derive(Debug, Default)]
pub struct SparseRecords {
    /// 1.0 and 0.1: the file's name, which replaces `path`.
    pub name: Option<Vec<u8>>,
    /// 1.0: whether the map is at the start of the data.
    pub in_data: bool,
    /// The file's length: `realsize` (1.0), `size` (0.0 and 0.1).
    pub length: Option<u64>,
    /// 0.0 and 0.1: the map.
    pub runs: Option<Vec<Run>>,
    /// 0.0: an offset whose number of bytes has not been read yet.
    offset: Option<u64>,
}

impl Records {
    /// Reads the records of one header. A later record of a key replaces an earlier one.
    pub fn read(&mut self, mut data: &[u8]) -> Result<(), Refusal> {
        while !data.is_empty() {
            let (record, rest) = split(data)?;
            let Some(equals) = record.iter().position(|b| *b == b'=').filter(|at| *at > 0) else {
                return refuse("a pax record KEY=VALUE", format!("\"{}\"", show(record)));
            };
            self.take(&record[..equals], &record[equals + 1..])?;
            data = rest;
        }
        Ok(())
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let int = || integer(key, value);
        // An empty value cancels the key (POSIX): the header's own field counts.
        let text = || (!value.is_empty()).then(|| value.to_vec());
        let optional = || if value.is_empty() { Ok(None) } else { int().map(Some) };
        match key {
            b"path" => self.path = text(),
            b"linkpath" => self.link = text(),
            b"size" => self.size = optional()?,
            b"uid" => self.uid = optional()?,
            b"gid" => self.gid = optional()?,
            b"mtime" => self.mtime = (!value.is_empty()).then(|| time(value)),
            b"GNU.sparse.name" => self.sparse.name = text(),
            b"GNU.sparse.realsize" | b"GNU.sparse.size" => self.sparse.length = Some(int()?),
            b"GNU.sparse.major" => match int()? {
                0 => {}
                1 => self.sparse.in_data = true,
                other => {
                    return refuse("a sparse file in format 0.0, 0.1 or 1.0", format!("{other}"));
                }
            },
            b"GNU.sparse.offset" => self.sparse.offset = Some(int()?),
            b"GNU.sparse.numbytes" => {
                let Some(offset) = self.sparse.offset.take() else {
                    return refuse("GNU.sparse.offset before GNU.sparse.numbytes", "none");
                };
                self.sparse.runs.get_or_insert_default().push((offset, int()?));
            }
            b"GNU.sparse.map" => self.sparse.runs = Some(map(value)?),
            _ => {
                if let Some(name) = key.strip_prefix(XATTR) {
                    check_xattr(name, value)?;
                    self.xattrs.insert(name.to_vec(), value.to_vec());
                }
            }
        }
        Ok(())
    }
}

/// Splits off the record at the start of `data`, without its length and line break. Returns the
/// record and the rest.
fn split(data: &[u8]) -> Result<(&[u8], &[u8]), Refusal> {
    const EXPECTED: &str = "a pax record that begins with its length";
    let digits = data.iter().take(20).position(|b| *b == b' ').unwrap_or(0);
    let length = std::str::from_utf8(&data[..digits]).ok().and_then(|t| t.parse::<usize>().ok());
    let got = || format!("\"{}\"", show(&data[..data.len().min(40)]));
    let Some(length) = length.filter(|_| data[..digits].iter().all(u8::is_ascii_digit)) else {
        return refuse(EXPECTED, got());
    };
    if length > data.len() {
        let have = format!("{} bytes in its header", data.len());
        return refuse(format!("a pax record of {length} bytes"), have);
    }
    let (record, rest) = data.split_at(length);
    match record.get(digits + 1..).and_then(<[u8]>::split_last) {
        Some((b'\n', record)) => Ok((record, rest)),
        _ => refuse("a pax record that ends with a line break", got()),
    }
}

/// Parses `offset,bytes,offset,bytes,…` (sparse format 0.1).
fn map(value: &[u8]) -> Result<Vec<Run>, Refusal> {
    let mut numbers = value.split(|b| *b == b',').filter(|part| !part.is_empty());
    let mut runs = Vec::new();
    while let Some(offset) = numbers.next() {
        let Some(bytes) = numbers.next() else {
            return refuse("pairs of numbers in GNU.sparse.map", "an odd number of them");
        };
        runs.push((integer(b"GNU.sparse.map", offset)?, integer(b"GNU.sparse.map", bytes)?));
    }
    Ok(runs)
}

fn integer(key: &[u8], value: &[u8]) -> Result<u64, Refusal> {
    let digits = std::str::from_utf8(value).ok().filter(|t| t.bytes().all(|b| b.is_ascii_digit()));
    digits.and_then(|t| t.parse().ok()).ok_or_else(|| Refusal {
        expected: format!("a number in the pax record {}", show(key)),
        got: format!("\"{}\"", show(value)),
    })
}

fn check_xattr(name: &[u8], value: &[u8]) -> Result<(), Refusal> {
    if name.is_empty() || name.contains(&0) || name.len() > MAX_XATTR_NAME {
        let expected = format!("an attribute's name of 1 to {MAX_XATTR_NAME} bytes without NUL");
        return refuse(expected, format!("\"{}\"", show(name)));
    }
    if value.len() > MAX_XATTR_VALUE {
        let expected = format!("at most {MAX_XATTR_VALUE} bytes in the attribute {}", show(name));
        return refuse(expected, value.len().to_string());
    }
    Ok(())
}

/// Parses `seconds[.fraction]`; anything else counts as 1970-01-01.
fn time(value: &[u8]) -> (i64, u32) {
    let Ok(text) = std::str::from_utf8(value) else { return (0, 0) };
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let Ok(seconds) = whole.parse::<i64>() else { return (0, 0) };
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    match digits.parse::<u32>().unwrap_or(0) {
        0 => (seconds, 0),
        // In a negative time, the fraction counts towards the past.
        ns if whole.starts_with('-') => (seconds.saturating_sub(1), 1_000_000_000 - ns),
        ns => (seconds, ns),
    }
}

/// Appends a record.
pub fn push(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // The length includes its own digits, the blank, '=' and the line break.
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    out.extend_from_slice(format!("{length} ").as_bytes());
    out.extend_from_slice(key);
    out.push(b'=');
    out.extend_from_slice(value);
    out.push(b'\n');
}

/// Formats a time as a record's value.
pub fn time_value(seconds: i64, ns: u32) -> String {
    if ns == 0 {
        return seconds.to_string();
    }
    if seconds >= 0 {
        return format!("{seconds}.{ns:09}");
    }
    // -1.5 is half a second before -1: the text rounds whole seconds towards zero.
    let whole = seconds + 1;
    let sign = if whole == 0 { "-" } else { "" };
    format!("{sign}{whole}.{:09}", 1_000_000_000 - ns)
}
