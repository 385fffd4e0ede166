//! Layers of a snapshot that are staged but not stored yet.

use crate::objects::layers::StagedLayer;
use crate::objects::types::VmLayer;

/// Layers of a snapshot that are staged but not stored yet.
#[derive(Debug, Default)]
pub(super) struct Staged {
    pub(super) frozen: Vec<VmLayer>,
    pub(super) layers: Vec<StagedLayer>,
    folders: usize,
}

impl Staged {
    /// A folder name that is unused in the stage.
    pub(super) fn folder(&mut self) -> String {
        let folder = format!("layer{}", self.folders);
        self.folders += 1;
        folder
    }
}
