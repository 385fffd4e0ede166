//! Layers of a disk: stored layers in `layers/`, named by content, and the layers of one VM in
//! `vms/`.

use crate::blob::{Dir, IfTaken, Stage};
use crate::errors::{Damage, IoError, IoResult};
use crate::inner::{Inner, Store};
use crate::integrity::verify::{Hashed, Kind};
use crate::objects::tree::{self, FileTree};
use crate::objects::types::{DATA, FileRef, LayerId, LayerRef, MAP, Unsynced, VmLayer};
use crate::publish::{OpenError, needed};
use crate::sparse::Piece;
use dayfly_units::Digest;
use std::fs::File;

/// A stored layer of an open snapshot.
#[derive(Debug)]
pub struct OpenLayer {
    /// Its id and the digests of its files.
    pub layer: LayerRef,
    /// Its blocks, sparse.
    pub data: File,
    /// Its sealed map.
    pub map: File,
    /// The hash tree of its blocks; `None`: they were verified whole.
    pub tree: Option<FileTree>,
}

/// A layer made ready in a staging folder.
#[derive(Debug)]
pub(crate) struct StagedLayer {
    pub(crate) layer: LayerRef,
    /// Its folder's name in the stage.
    folder: String,
    data: Hashed,
    map: Hashed,
    tree: FileTree,
    published: Published,
}

/// How an operation put a layer into `layers/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Published {
    /// It did not, or a layer with the same content was there.
    No,
    /// Under a name that was free.
    New,
    /// In the place of a damaged layer.
    Replaced,
}

impl StagedLayer {
    /// A layer that was written into `folder` of a stage, open as `dir`, with this data, this tree
    /// and this map.
    pub(crate) fn made(
        dir: &Dir,
        folder: String,
        data: crate::sparse::Sparse,
        tree: FileTree,
        map: &[u8],
    ) -> IoResult<Self> {
        let data = FileRef { digest: data.digest, bytes: data.bytes, data_bytes: data.data_bytes };
        let bytes = map.len() as u64;
        let map = FileRef { digest: Digest::of(map), bytes, data_bytes: bytes };
        let written = |name, content| Ok::<_, IoError>(Hashed { file: dir.open(name)?, content });
        Ok(Self::of(folder, written(DATA, data)?, tree, written(MAP, map)?))
    }

    fn of(folder: String, data: Hashed, tree: FileTree, map: Hashed) -> Self {
        let id = LayerId::of(&data.content, &map.content);
        let layer = LayerRef { id, data: data.content, map: map.content };
        Self { layer, folder, data, map, tree, published: Published::No }
    }

    /// The hash tree of its data.
    pub(crate) const fn tree(&self) -> &FileTree {
        &self.tree
    }

    /// Duplicates its descriptors.
    pub(crate) fn open(&self) -> IoResult<OpenLayer> {
        let path = std::path::Path::new(&self.folder);
        let tree = self.tree.try_clone();
        let tree = tree.map_err(IoError::new("duplicating the descriptor of", path))?;
        let (data, map) = (self.data()?, self.map()?);
        Ok(OpenLayer { layer: self.layer, data, map, tree: Some(tree) })
    }

    /// Duplicates the descriptor of its data.
    pub(crate) fn data(&self) -> IoResult<File> {
        self.duplicate(&self.data)
    }

    /// Duplicates the descriptor of its map.
    pub(crate) fn map(&self) -> IoResult<File> {
        self.duplicate(&self.map)
    }

    fn duplicate(&self, hashed: &Hashed) -> IoResult<File> {
        let path = std::path::Path::new(&self.folder);
        hashed.file.try_clone().map_err(IoError::new("duplicating the descriptor of", path))
    }
}

impl Store {
    /// Opens and verifies stored layers; `by` is the object that depends on them, named in errors.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_layers(&self, layers: &[LayerRef], by: &str) -> Result<Vec<OpenLayer>, OpenError> {
        layers.iter().map(|layer| self.0.open_layer(layer, by)).collect()
    }
}

impl Inner {
    /// Hashes a VM's frozen layer, to which no process can write from now on, and hard-links its
    /// files into the stage.
    pub(crate) fn stage_layer(
        &self,
        stage: &Stage,
        folder: String,
        from: VmLayer,
    ) -> IoResult<StagedLayer> {
        if self.open_frozen_layer(&from)?.replaced.is_some() {
            tracing::warn!(vm = %from.vm, "stored a copy of a layer");
        }
        let vm = self.vms.sub(&from.vm.to_string())?;
        let staged = stage.make(&folder)?;
        vm.link(&from.data_name(), &staged, DATA)?;
        vm.link(&from.map_name(), &staged, MAP)?;
        let path = staged.path().join(DATA);
        let length = staged.open(DATA)?.metadata().map_err(IoError::new("looking at", &path));
        let mut tree = tree::begin(&staged, length?.len())?;
        let hashed = |name: &str, kind: Kind, on: Piece<'_>| -> IoResult<Hashed> {
            Hashed::of(staged.open(name)?, kind, on)
                .map_err(IoError::new("reading", &staged.path().join(name)))
        };
        // Hashed before they are synced, so that the digests are known if the sync fails.
        let data = hashed(DATA, Kind::Sparse, &mut |at, piece| tree.update(at, piece))?;
        let map = hashed(MAP, Kind::Plain, &mut |_, _| Ok(()))?;
        for (name, hashed) in [(DATA, &data), (MAP, &map)] {
            if let Err(e) = staged.finish(name, &hashed.file) {
                let (data, map) = (Some(data.content), Some(map.content));
                self.note_unsynced(&vm, &from, Unsynced { data, map });
                return Err(e);
            }
            staged.protect(name, &hashed.file, hashed.content.data_bytes)?;
        }
        let tree = tree::end(&staged, tree, data.content.digest)?;
        staged.sync()?;
        Ok(StagedLayer::of(folder, data, tree, map))
    }

    /// Renames a staged layer into `layers/`, unless a sound copy is there; a damaged copy is
    /// exchanged. The caller holds the publish lock, and syncs `layers/` afterwards.
    pub(crate) fn publish_layer(&self, stage: &Stage, staged: &mut StagedLayer) -> IoResult<()> {
        let name = staged.layer.id.to_string();
        let if_taken = match self.open_whole_layer(&staged.layer, "this snapshot") {
            Ok(_) => return Ok(()),
            Err(OpenError::Damage(Damage::Missing { .. })) if !self.layers.has(&name)? => {
                IfTaken::Refuse
            }
            Err(OpenError::Io(e)) if !e.is_damage() => return Err(e),
            Err(damage) => {
                tracing::warn!(
                    %damage,
                    "a stored layer is damaged; putting a good copy in its place"
                );
                IfTaken::Exchange
            }
        };
        stage.rename(&staged.folder, &self.layers, &name, if_taken)?;
        self.verifier.forget(&self.layers.path().join(&name));
        staged.published = match if_taken {
            IfTaken::Refuse => Published::New,
            IfTaken::Exchange => Published::Replaced,
        };
        Ok(())
    }

    /// Undoes [`Self::publish_layer`], if the host allows it. A layer that replaced a damaged one
    /// stays.
    pub(crate) fn unpublish_layer(&self, stage: &Stage, staged: &mut StagedLayer) {
        if staged.published == Published::New {
            let name = staged.layer.id.to_string();
            let _best_effort = self.layers.rename(&name, stage, &staged.folder, IfTaken::Refuse);
            self.verifier.forget(&self.layers.path().join(&name));
            staged.published = Published::No;
        }
    }

    /// Opens and verifies a stored layer; `by` is the object that depends on it, named in errors.
    /// If the layer has a hash tree, each leaf of its data must be checked when it is read.
    pub(crate) fn open_layer(&self, layer: &LayerRef, by: &str) -> Result<OpenLayer, OpenError> {
        let (dir, data, map) = self.open_layer_files(layer.id, by)?;
        self.verify(&dir, MAP, &map, &layer.map, Kind::Plain)?;
        let tree = self.verify_disk(&dir, DATA, &data, &layer.data, None)?;
        Ok(OpenLayer { layer: *layer, data, map, tree })
    }

    /// As [`Self::open_layer`], but hashes all of the data: for a caller that would otherwise give
    /// damaged data a new digest, or keep it in place of a good copy.
    pub(crate) fn open_whole_layer(
        &self,
        layer: &LayerRef,
        by: &str,
    ) -> Result<(File, File), OpenError> {
        let (dir, data, map) = self.open_layer_files(layer.id, by)?;
        self.verify(&dir, MAP, &map, &layer.map, Kind::Plain)?;
        self.verify(&dir, DATA, &data, &layer.data, Kind::Sparse)?;
        Ok((data, map))
    }

    pub(crate) fn open_layer_files(
        &self,
        id: LayerId,
        by: &str,
    ) -> Result<(Dir, File, File), OpenError> {
        self.layer_is(id, by)?;
        let dir = self.layers.sub(&id.to_string())?;
        let by = format!("layer {id} of {by}");
        let (data, map) = (needed(&dir, DATA, &by)?, needed(&dir, MAP, &by)?);
        Ok((dir, data, map))
    }
}
