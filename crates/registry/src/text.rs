//! Text of a registry or a user inside an error.

use dayfly_units::text::{SHORT, escaped};

/// `text` without control characters, cut to a sentence's length.
pub(crate) fn shown(text: &str) -> String {
    escaped(text, SHORT).to_string()
}
