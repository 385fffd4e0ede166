//! The roots of the hash trees that a snapshot's manifest names.

use crate::inner::Inner;
use crate::objects::layers::StagedLayer;
use crate::objects::manifest::{self, DiskRef, ImageManifest};
use dayfly_units::Digest;
use std::collections::BTreeMap;

impl Inner {
    /// The roots of the trees of these disks' files, by the file's digest. A file without a sound
    /// tree is left out.
    pub(crate) fn roots(
        &self,
        disks: &[DiskRef],
        staged: &[StagedLayer],
    ) -> BTreeMap<Digest, Digest> {
        let mut roots = BTreeMap::new();
        for disk in disks {
            roots.extend(self.root_of_image(disk));
            for layer in &disk.layers {
                let staged = staged.iter().find(|staged| staged.layer.id == layer.id);
                let root =
                    match staged {
                        Some(staged) => Some(staged.tree().root),
                        None => self.layers.sub(&layer.id.to_string()).ok().and_then(|dir| {
                            self.tree(&dir, &layer.data, None).map(|tree| tree.root)
                        }),
                    };
                roots.extend(root.map(|root| (layer.data.digest, root)));
            }
        }
        roots
    }

    fn root_of_image(&self, disk: &DiskRef) -> Option<(Digest, Digest)> {
        let dir = self.images.sub(disk.image.name.as_str()).ok()?;
        let image: ImageManifest = manifest::read(&dir).ok()?;
        let tree = self.tree(&dir, &image.disk, None)?;
        (image.disk.digest == disk.image.digest).then_some((image.disk.digest, tree.root))
    }
}
