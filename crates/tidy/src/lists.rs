//! `lists.toml`: what the rules exempt, each with its reason.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// Path of the list in the tree.
pub const PATH: &str = "crates/tidy/lists.toml";

/// Paths with the reasons why a rule exempts them.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lists {
    /// Files that may have more than 500 lines.
    #[serde(default)]
    pub long_files: BTreeMap<String, String>,
    /// Files that programs write. No rule on lines or words reads them.
    #[serde(default)]
    pub generated: BTreeMap<String, String>,
    /// Documents whose code blocks may be wider than 100 columns.
    #[serde(default)]
    pub wide_blocks: BTreeMap<String, String>,
}

impl Lists {
    /// Reads the list.
    ///
    /// # Errors
    /// The text is no such list, or a path has no reason.
    pub fn parse(text: &str) -> Result<Self> {
        let lists: Self = toml::from_str(text).with_context(|| PATH.to_owned())?;
        for (path, reason) in
            lists.long_files.iter().chain(&lists.generated).chain(&lists.wide_blocks)
        {
            ensure!(
                !reason.trim().is_empty(),
                "{PATH}: {path}: has no reason; write one line of it"
            );
        }
        Ok(lists)
    }

    /// Whether programs write the file at `path`. An entry that ends with `/` covers a folder.
    #[must_use]
    pub fn is_generated(&self, path: &str) -> bool {
        let covers = |entry: &String| {
            if entry.ends_with('/') { path.starts_with(entry.as_str()) } else { path == entry }
        };
        self.generated.keys().any(covers)
    }
}
