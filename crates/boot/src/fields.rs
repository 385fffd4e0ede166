//! Little-endian fields at fixed offsets, with errors that name the field and its offset.

use crate::error::FormatError;

/// The error for a field with an unsupported value.
pub(crate) fn field<T>(
    field: &'static str,
    at: usize,
    expected: impl ToString,
    got: impl ToString,
) -> Result<T, FormatError> {
    let (expected, got) = (expected.to_string(), got.to_string());
    Err(FormatError::Field { field, at: at as u64, expected, got })
}

/// Reads `N` bytes at offset `at`.
pub(crate) fn bytes<const N: usize>(
    file: &[u8],
    at: usize,
    name: &'static str,
) -> Result<[u8; N], FormatError> {
    match file.get(at..).and_then(|rest| rest.first_chunk::<N>()) {
        Some(found) => Ok(*found),
        None => {
            field(name, at, format!("{N} bytes"), format!("the end of the file at {}", file.len()))
        }
    }
}

pub(crate) fn u16_at(file: &[u8], at: usize, name: &'static str) -> Result<u16, FormatError> {
    bytes(file, at, name).map(u16::from_le_bytes)
}

pub(crate) fn u32_at(file: &[u8], at: usize, name: &'static str) -> Result<u32, FormatError> {
    bytes(file, at, name).map(u32::from_le_bytes)
}

pub(crate) fn u64_at(file: &[u8], at: usize, name: &'static str) -> Result<u64, FormatError> {
    bytes(file, at, name).map(u64::from_le_bytes)
}
