//! Folders and files prepared for the next VM layers.

use crate::blob::Stage;
use std::fs::File;
use std::sync::Arc;

/// Folders and files prepared in one stage for the next VMs and freezes.
#[derive(Debug, Default)]
pub(crate) struct PreparedFiles {
    pub(super) stage: Option<Arc<Stage>>,
    pub(super) made: u64,
    /// Folders with the first layer of a VM each; a folder is renamed once its VM's id is known.
    pub(super) ready: Vec<PreparedFile>,
    /// Empty files for the next freeze: maps and data of layers.
    pub(super) files: Vec<PreparedFile>,
    /// How many empty files to prepare: 0 until the first freeze.
    pub(super) files_wanted: usize,
}

/// A prepared folder or file.
#[derive(Debug)]
pub(super) struct PreparedFile {
    pub(super) name: String,
    pub(super) data: File,
}
