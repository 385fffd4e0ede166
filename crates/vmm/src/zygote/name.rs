//! The VM's id in a VMM's command line, by which people and later daemons find the process. A fork
//! overwrites the placeholder [`PLACE`] in the arguments that it has from its zygote.

use dayfly_units::VmId;
use std::io;

/// A zygote's argument after `--id`: as long as an id, and not an id.
pub const PLACE: &str = "------------";

/// Why the placeholder was not found.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// A file in `/proc/self` could not be read.
    #[error("/proc/self/{0}")]
    Read(&'static str, #[source] io::Error),
    /// `/proc/self/stat` lacks a field.
    #[error("/proc/self/stat: field 48, the address of the arguments, is missing")]
    Stat,
    /// The zygote was started without the placeholder.
    #[error("expected `--id {PLACE}` in the arguments")]
    Place,
}

/// The address of the placeholder in the memory that `/proc/<pid>/cmdline` shows.
#[derive(Debug)]
pub struct Name(*mut u8);

impl Name {
    pub(super) fn find() -> Result<Self, NameError> {
        let stat =
            std::fs::read_to_string("/proc/self/stat").map_err(|e| NameError::Read("stat", e))?;
        // Field 48 (arg_start, proc(5)), counted after the program's name, which may hold spaces.
        let fields = stat.rsplit(')').next().unwrap_or("");
        let start: usize = fields
            .split_ascii_whitespace()
            .nth(48 - 3)
            .and_then(|field| field.parse().ok())
            .filter(|start| *start != 0)
            .ok_or(NameError::Stat)?;
        let line =
            std::fs::read("/proc/self/cmdline").map_err(|e| NameError::Read("cmdline", e))?;
        let wanted = format!("\0--id\0{PLACE}\0");
        let at = line.windows(wanted.len()).position(|part| part == wanted.as_bytes());
        let at = at.ok_or(NameError::Place)? + "\0--id\0".len();
        Ok(Self(std::ptr::with_exposed_provenance_mut(start + at)))
    }

    /// Overwrites the placeholder with `id`.
    pub fn write(self, id: VmId) {
        let text = id.to_string();
        if text.len() == PLACE.len() {
            // SAFETY: `find` saw these bytes among the arguments of the process. The kernel put
            // them on the stack, writable for the life of the process. std::env::args copies them,
            // so no Rust reference to them exists.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), self.0, PLACE.len()) };
        }
    }
}
