//! The id in a VMM's command line, by which people and later daemons find it: a fork has that of its zygote, where there is
//! [`PLACE`] for it.

use dayfly_units::VmId;
use std::io;

/// What a zygote has after `--id`: as long as an id, and none.
pub const PLACE: &str = "------------";

/// Why the place was not found.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// Of this process.
    #[error("/proc/self/{0}")]
    Read(&'static str, #[source] io::Error),
    /// What is read there is not what is expected.
    #[error("/proc/self/stat: field 48, the address of the arguments, is missing")]
    Stat,
    /// The zygote was started otherwise.
    #[error("expected `--id {PLACE}` in the arguments")]
    Place,
}

/// The place of the id in the memory that `/proc/<pid>/cmdline` shows.
#[derive(Debug)]
pub struct Name(*mut u8);

impl Name {
    pub(super) fn find() -> Result<Self, NameError> {
        let stat = std::fs::read_to_string("/proc/self/stat").map_err(|e| NameError::Read("stat", e))?;
        // Field 48, counted after the program's name, which may hold spaces.
        let fields = stat.rsplit(')').next().unwrap_or("");
        let start: usize = fields
            .split_ascii_whitespace()
            .nth(48 - 3)
            .and_then(|field| field.parse().ok())
            .filter(|start| *start != 0)
            .ok_or(NameError::Stat)?;
        let line = std::fs::read("/proc/self/cmdline").map_err(|e| NameError::Read("cmdline", e))?;
        let wanted = format!("\0--id\0{PLACE}\0");
        let at = line.windows(wanted.len()).position(|part| part == wanted.as_bytes());
        let at = at.ok_or(NameError::Place)? + "\0--id\0".len();
        Ok(Self(std::ptr::with_exposed_provenance_mut(start + at)))
    }

    /// Writes `id` there.
    pub fn write(self, id: VmId) {
        let text = id.to_string();
        if text.len() == PLACE.len() {
            // SAFETY: `find` saw these bytes of the process's arguments, which the kernel put on the stack, writable and
            // for as long as the process lives; nothing in Rust refers to them: std::env::args copies.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), self.0, PLACE.len()) };
        }
    }
}
