//! Paths of the user's files and of other programs.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// The user's folder, which holds the machine and the sources of images and kernels. It is
/// `DAYFLY_HOME`, or `dayfly` in `XDG_DATA_HOME`, or `~/.local/share/dayfly`.
///
/// # Errors
/// If none of these variables is set.
pub fn home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("DAYFLY_HOME").filter(|h| !h.is_empty()) {
        let home = PathBuf::from(home);
        return std::path::absolute(&home)
            .with_context(|| format!("DAYFLY_HOME={}", home.display()));
    }
    let data = match std::env::var_os("XDG_DATA_HOME").filter(|d| !d.is_empty()) {
        Some(data) => PathBuf::from(data),
        None => {
            std::env::home_dir().context("no home folder: set DAYFLY_HOME")?.join(".local/share")
        }
    };
    Ok(data.join("dayfly"))
}

/// Finds a program of dayfly: beside this one (or beside the `deps` folder in which cargo places
/// tests), or in a `PATH` folder.
///
/// # Errors
/// If the program is in none of these places.
pub fn program(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("the path of this program")?;
    let folder = own.parent().unwrap_or(Path::new("/"));
    let above = folder.ends_with("deps").then(|| folder.with_file_name(name));
    let candidates = [folder.join(name)].into_iter().chain(above).chain(on_path(name));
    if let Some(found) = candidates.into_iter().find(|path| path.is_file()) {
        return Ok(found);
    }
    bail!("{name}: not beside {} and not on PATH; `make build` builds all of them", own.display())
}

/// Finds a program on `PATH`, and in administrators' folders, which a user's `PATH` often lacks.
#[must_use]
pub fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/lib/qemu", "/usr/libexec"]
        .map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(more)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}
