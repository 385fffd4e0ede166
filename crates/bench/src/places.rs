//! Where programs are, and where results go.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Folders.
#[derive(Debug, Clone)]
pub struct Places {
    /// The project's programs.
    pub programs: PathBuf,
    /// Results.
    pub out: PathBuf,
}

impl Places {
    /// The folder of this program, and `out` or else `target/bench`, wherever `target` is.
    pub fn new(out: Option<&Path>) -> Result<Self> {
        let programs = own_program()?.parent().context("a program lies in a folder")?.to_owned();
        // target/<triple>/release
        let target = programs.ancestors().nth(2).unwrap_or(Path::new("target"));
        let out = out.map_or_else(|| target.join("bench"), Path::to_owned);
        std::fs::create_dir_all(&out).with_context(|| format!("making {}", out.display()))?;
        Ok(Self { programs, out })
    }
}

/// The file of this program.
pub fn own_program() -> Result<PathBuf> {
    std::env::current_exe().context("the path of this program")
}
