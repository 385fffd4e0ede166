//! The cache folder, which keeps artefacts that were built once.

use std::path::PathBuf;

/// The cache folder: `$DAYFLY_CACHE`, or `dayfly` under `$XDG_CACHE_HOME` or `~/.cache`. Root
/// without a home gets `/var/cache/dayfly`.
#[must_use]
pub fn default_folder() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("DAYFLY_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|p| p.join("dayfly")))
        .or_else(|| set("HOME").map(|p| p.join(".cache/dayfly")))
        .unwrap_or_else(|| PathBuf::from("/var/cache/dayfly"))
}
