//! Functions for the crate `fuzz`: what a registry sends.

pub use crate::challenge::{Challenge, parse as challenges};
use crate::url::Url;

/// The URL of a redirect, without its query; `None` if it is refused.
#[must_use]
pub fn redirect(url: &str, location: &str) -> Option<(String, String)> {
    let url = Url::parse(url).ok()?;
    let next = url.redirect(location).ok()?;
    Some((next.to_string(), format!("{}{}", next.origin(), next.target)))
}

/// The first error that a registry explains.
#[must_use]
pub fn explained(body: &[u8]) -> Option<String> {
    crate::requests::explained(body)
}
