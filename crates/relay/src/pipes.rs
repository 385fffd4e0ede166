//! Pipes through which bytes go from one socket to another (splice(2)), without a copy in this
//! process.

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

/// Empty pipes that are kept for the next connection that has bytes.
const KEPT: usize = 32;

/// A pipe: the end that is read, and the end that is written.
#[derive(Debug)]
pub struct Pipe {
    pub(crate) from: OwnedFd,
    pub(crate) into: OwnedFd,
}

/// Empty pipes.
#[derive(Debug)]
pub struct Pipes(Vec<Pipe>);

impl Default for Pipes {
    fn default() -> Self {
        Self(Vec::with_capacity(KEPT))
    }
}

impl Pipes {
    /// An empty pipe.
    ///
    /// # Errors
    /// The kernel gives none.
    pub fn take(&mut self) -> Result<Pipe, Errno> {
        if let Some(pipe) = self.0.pop() {
            return Ok(pipe);
        }
        let (from, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        Ok(Pipe { from, into })
    }

    /// Takes back a pipe, which must be empty.
    pub fn give(&mut self, pipe: Pipe) {
        if self.0.len() < KEPT {
            self.0.push(pipe);
        }
    }
}
