//! Long arguments and environments of programs.
//!
//! A request is JSON in one `Request` frame. If it does not fit, the program's arguments and
//! environment are left out of the JSON and follow in `Strings` frames:
//!
//! ```text
//! Request  {"op":"exec", …, "strings":{"arguments":2,"bytes":19}}
//! Strings  /bin/echo NUL hello NUL A=1 NUL            19 bytes, in frames of any length from 1 on
//! ```
//!
//! The first `arguments` strings are arguments, all others are variables `NAME=VALUE`. Unlike JSON,
//! this form has the length that the strings have, so it can be bounded as the kernel bounds them.

use super::frame::{FrameKind, MAX_FRAME_BYTES, encode};
use super::spec::{ExecSpec, Strings};
use serde::Serialize;
use std::collections::BTreeMap;

/// The version of the protocol ([`super::PROTOCOL`]) from which agents read `Strings` frames.
pub const STRINGS_PROTOCOL: u32 = 3;
/// Upper limit for arguments and environment together, in bytes as Linux counts them: each string
/// with its NUL, and 8 bytes for its address. Linux's own limit is a fourth of the limit of the
/// stack, which is 8 MiB (execve(2)).
pub const MAX_STRINGS_BYTES: usize = 2 << 20;
/// Bytes of a string's address.
const ADDRESS_BYTES: usize = 8;

/// Why arguments or environment cannot be sent, or are not what was announced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StringsError {
    /// They are longer than a program can have.
    #[error(
        "E2BIG: arguments and environment: expected at most {MAX_STRINGS_BYTES} bytes, 8 for each \
         string included, got {0}"
    )]
    TooLong(usize),
    /// They do not fit into a frame, and the guest's agent is of an earlier version.
    #[error(
        "E2BIG: arguments and environment of {0} bytes: the guest's agent is of an earlier \
         version and takes requests of at most 256 KiB; bake the image's snapshot again"
    )]
    EarlierAgent(usize),
    /// A string that the kernel does not take.
    #[error("{place}: expected {expected}, got {got:?}")]
    Invalid {
        /// The argument or variable.
        place: &'static str,
        /// What is accepted.
        expected: &'static str,
        /// The beginning of the string.
        got: String,
    },
    /// What came is not what was announced.
    #[error("strings: expected {expected}, got {got}")]
    Announced {
        /// What was announced.
        expected: String,
        /// What came.
        got: String,
    },
    /// The request is not JSON.
    #[error("request: {0}")]
    Json(String),
}

impl StringsError {
    /// Whether the kernel's error would be E2BIG: docker's exit code 126.
    #[must_use]
    pub const fn is_too_long(&self) -> bool {
        matches!(self, Self::TooLong(_) | Self::EarlierAgent(_))
    }
}

impl ExecSpec {
    /// Checks that no `Strings` frames are announced, for requests that none can follow.
    ///
    /// # Errors
    /// [`StringsError::Announced`].
    pub fn has_its_strings(&self) -> Result<(), StringsError> {
        let Some(Strings { arguments, bytes }) = self.strings else { return Ok(()) };
        Err(StringsError::Announced {
            expected: "no such field, because argv and env are in this request".to_owned(),
            got: format!("{arguments} arguments, {bytes} bytes"),
        })
    }
}

/// A request that may run a program.
pub trait Runs: Serialize {
    /// The program.
    fn program(&mut self) -> Option<&mut ExecSpec>;
}

impl Runs for ExecSpec {
    fn program(&mut self) -> Option<&mut ExecSpec> {
        Some(self)
    }
}

/// The JSON of a request if it fits into a frame; `None` if it needs `Strings` frames too.
fn alone(request: &mut impl Runs, protocol: u32) -> Result<Option<Vec<u8>>, StringsError> {
    let bytes = request.program().map_or(0, |spec| kernel_bytes(spec));
    if bytes > MAX_STRINGS_BYTES {
        return Err(StringsError::TooLong(bytes));
    }
    // The kernel counts 9 bytes more than a string's length, JSON at least 3 more.
    if bytes <= 3 * MAX_FRAME_BYTES {
        let json = json(request)?;
        if json.len() <= MAX_FRAME_BYTES {
            return Ok(Some(json));
        }
    }
    if protocol < STRINGS_PROTOCOL {
        return Err(StringsError::EarlierAgent(bytes));
    }
    Ok(None)
}

fn json(request: &impl Runs) -> Result<Vec<u8>, StringsError> {
    serde_json::to_vec(request).map_err(|e| StringsError::Json(e.to_string()))
}

/// Checks that [`request_frames`] has a form for a peer of this version of the protocol.
///
/// # Errors
/// [`StringsError::TooLong`], [`StringsError::EarlierAgent`].
pub fn check_strings(request: &mut impl Runs, protocol: u32) -> Result<(), StringsError> {
    alone(request, protocol).map(drop)
}

/// The frames of a request for a peer of this version of the protocol: one, if it fits.
///
/// # Errors
/// [`StringsError`]; the strings are then still in the request, unless it does not become JSON.
pub fn request_frames(request: &mut impl Runs, protocol: u32) -> Result<Vec<u8>, StringsError> {
    if let Some(json) = alone(request, protocol)? {
        return Ok(encode(FrameKind::Request, &json));
    }
    let strings = match request.program() {
        Some(spec) => take(spec)?,
        None => Vec::new(),
    };
    let json = json(request)?;
    if json.len() > MAX_FRAME_BYTES {
        return Err(StringsError::Announced {
            expected: format!("{MAX_FRAME_BYTES} bytes besides arguments and environment"),
            got: format!("{} bytes", json.len()),
        });
    }
    let mut frames = encode(FrameKind::Request, &json);
    frames.reserve_exact(strings.len() + strings.len() / MAX_FRAME_BYTES * 8 + 8);
    for piece in strings.chunks(MAX_FRAME_BYTES) {
        frames.extend_from_slice(&encode(FrameKind::Strings, piece));
    }
    Ok(frames)
}

/// The length of arguments and environment as Linux counts them.
#[must_use]
pub fn kernel_bytes(spec: &ExecSpec) -> usize {
    let arguments = spec.argv.iter().map(|text| text.len() + 1 + ADDRESS_BYTES);
    let variable = |(name, value): (&String, &String)| name.len() + value.len() + 2 + ADDRESS_BYTES;
    arguments.chain(spec.env.iter().map(variable)).sum()
}

/// Moves arguments and environment out of a program, which then announces them.
fn take(spec: &mut ExecSpec) -> Result<Vec<u8>, StringsError> {
    let invalid = |place, expected, got: &str| {
        let got = got.chars().take(64).collect();
        Err(StringsError::Invalid { place, expected, got })
    };
    for text in spec.argv.iter().chain(spec.env.keys()).chain(spec.env.values()) {
        if text.contains('\0') {
            return invalid("argv, env", "no zero byte", text);
        }
    }
    if let Some(name) = spec.env.keys().find(|name| name.is_empty() || name.contains('=')) {
        return invalid("env", "a name without '='", name);
    }
    let mut all = Vec::with_capacity(kernel_bytes(spec));
    for text in &spec.argv {
        all.extend_from_slice(text.as_bytes());
        all.push(0);
    }
    for (name, value) in &spec.env {
        for part in [name.as_bytes(), b"=", value.as_bytes(), b"\0"] {
            all.extend_from_slice(part);
        }
    }
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    spec.strings = Some(Strings { arguments: count(spec.argv.len()), bytes: count(all.len()) });
    (spec.argv, spec.env) = (Vec::new(), BTreeMap::new());
    Ok(all)
}

/// Collects the `Strings` frames behind a request.
#[derive(Debug)]
pub struct Collector {
    announced: Strings,
    bytes: Vec<u8>,
}

impl Collector {
    /// A collector of what a program announces; `None` if nothing follows the request.
    ///
    /// # Errors
    /// More is announced than a program can have.
    pub fn of(spec: &mut ExecSpec) -> Result<Option<Self>, StringsError> {
        let Some(announced) = spec.strings.take() else { return Ok(None) };
        let bytes = announced.bytes as usize;
        if bytes > MAX_STRINGS_BYTES {
            return Err(StringsError::TooLong(bytes));
        }
        // Grows with what comes, so that an announcement alone takes no memory.
        Ok(Some(Self { announced, bytes: Vec::new() }))
    }

    /// Whether all bytes are there.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.bytes.len() == self.announced.bytes as usize
    }

    /// Takes the body of the next `Strings` frame.
    ///
    /// # Errors
    /// It is empty, or longer than what is missing.
    pub fn add(&mut self, body: &[u8]) -> Result<(), StringsError> {
        let missing = (self.announced.bytes as usize).saturating_sub(self.bytes.len());
        if body.is_empty() || body.len() > missing {
            return Err(StringsError::Announced {
                expected: format!("1 to {missing} bytes"),
                got: format!("{} bytes", body.len()),
            });
        }
        self.bytes.extend_from_slice(body);
        Ok(())
    }

    /// Gives a program its arguments and environment.
    ///
    /// # Errors
    /// They are not what was announced, or no text.
    pub fn finish(self, spec: &mut ExecSpec) -> Result<(), StringsError> {
        let Self { announced, bytes } = self;
        let wrong = |expected: String, got: String| StringsError::Announced { expected, got };
        // Before anything is allocated for single strings.
        let count = bytes.iter().filter(|byte| **byte == 0).count();
        let counted = bytes.len() + count * ADDRESS_BYTES;
        if counted > MAX_STRINGS_BYTES {
            return Err(StringsError::TooLong(counted));
        }
        let arguments = announced.arguments as usize;
        let cut = bytes.last().is_some_and(|last| *last != 0);
        if cut || count < arguments {
            return Err(wrong(format!("{arguments} strings or more"), format!("{count}")));
        }
        let text = std::str::from_utf8(&bytes).map_err(|e| {
            wrong("UTF-8".to_owned(), format!("another byte at {}", e.valid_up_to()))
        })?;
        let mut strings = text.split_terminator('\0');
        spec.argv = strings.by_ref().take(arguments).map(str::to_owned).collect();
        spec.env = BTreeMap::new();
        for variable in strings {
            let Some((name, value)) = variable.split_once('=').filter(|(name, _)| !name.is_empty())
            else {
                let got = variable.chars().take(64).collect::<String>();
                return Err(wrong("a variable NAME=VALUE".to_owned(), format!("{got:?}")));
            };
            spec.env.insert(name.to_owned(), value.to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "strings_tests.rs"]
mod tests;
