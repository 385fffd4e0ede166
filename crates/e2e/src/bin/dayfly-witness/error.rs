//! The error of every command: a text for the user.

use std::error::Error;
use std::fmt::Display;

/// A result whose error is shown to the user.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Adds the file or process to an I/O error.
pub fn at<T>(result: std::io::Result<T>, place: &dyn Display) -> Result<T> {
    result.map_err(|e| format!("{place}: {e}").into())
}
