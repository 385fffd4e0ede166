//! Layers of a disk: frozen ones in `layers/`, by content, and those of one VM in `vms/`.

use crate::Inner;
use crate::blob::{Dir, IfTaken, Stage};
use crate::digest::Digest;
use crate::errors::{Damage, IoError, IoResult};
use crate::manifest::FileRef;
use crate::publish::{OpenError, needed};
use crate::snapshots::{CommitError, OpenLayer};
use crate::verify::{self, Kind};
use dayfly_units::VmId;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::str::FromStr;

pub(crate) const DATA: &str = "data";
pub(crate) const MAP: &str = "map";

/// A frozen layer, by its content: BLAKE3 over `dayfly layer 1\n`, the sparse digest of its data and the digest of its map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerId(Digest);

impl LayerId {
    /// The id of a layer with these files.
    #[must_use]
    pub fn of(data: &FileRef, map: &FileRef) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(b"dayfly layer 1\n")
            .update(&data.digest.0)
            .update(&data.bytes.to_le_bytes())
            .update(&map.digest.0);
        Self(hasher.finalize().into())
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for LayerId {
    type Err = crate::DigestError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// A frozen layer and its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRef {
    /// What it is called in `layers/`.
    pub id: LayerId,
    /// Its blocks; a sparse digest.
    pub data: FileRef,
    /// Its sealed map; a plain digest.
    pub map: FileRef,
}

impl LayerRef {
    pub(crate) fn check(&self, place: &str) -> Result<(), (String, String, String)> {
        self.data.check(&format!("{place}.data"))?;
        self.map.check(&format!("{place}.map"))?;
        let expected = LayerId::of(&self.data, &self.map);
        if expected == self.id {
            return Ok(());
        }
        Err((format!("{place}.id"), expected.to_string(), self.id.to_string()))
    }
}

/// A layer that one VM has made: its writable one, or one that it has frozen and that is in no snapshot yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmLayer {
    /// The VM.
    pub vm: VmId,
    /// Which of its disks, from 0.
    pub disk: u8,
    /// Counts the layers of that disk.
    pub number: u32,
}

impl VmLayer {
    /// [`Self::data_name`] of the first layer of the first disk.
    pub(crate) const FIRST_DATA: &str = "disk0.0.data";

    pub(crate) fn data_name(&self) -> String {
        format!("disk{}.{}.data", self.disk, self.number)
    }

    pub(crate) fn map_name(&self) -> String {
        format!("disk{}.{}.map", self.disk, self.number)
    }

    /// That of which `name` is a file.
    pub(crate) fn named(vm: VmId, name: &str) -> Option<Self> {
        let (disk, number) = name.strip_prefix("disk")?.split_once('.')?;
        let (number, _) = number.split_once('.')?;
        let layer = Self { vm, disk: disk.parse().ok()?, number: number.parse().ok()? };
        (name == layer.data_name() || name == layer.map_name()).then_some(layer)
    }
}

/// A frozen layer of a running VM's disk, wherever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChainLayer {
    /// In `layers/`.
    Stored(LayerRef),
    /// Frozen by the VM itself, and in no snapshot.
    Frozen(VmLayer),
    /// Frozen by the VM that it was forked from, or one above that, which may have gone: a [`crate::Pin`] holds it.
    Borrowed(VmLayer),
}

/// A layer made ready in a staging folder.
#[derive(Debug)]
pub(crate) struct StagedLayer {
    pub(crate) layer: LayerRef,
    /// Its folder in the stage.
    folder: String,
    data: File,
    map: File,
    /// Whether these very files are in `layers/` now; else the same content was there before.
    published: bool,
}

impl StagedLayer {
    /// Another descriptor of its data.
    pub(crate) fn data(&self) -> IoResult<File> {
        self.data
            .try_clone()
            .map_err(IoError::new("duplicating the descriptor of", std::path::Path::new(&self.folder)))
    }
}

impl StagedLayer {
    /// A layer that was written into `folder` of a stage, open here as `dir`, with this data and this map.
    pub(crate) fn made(dir: &Dir, folder: String, data: crate::sparse::Sparse, map: &[u8]) -> IoResult<Self> {
        let data = FileRef { digest: data.digest, bytes: data.bytes, data_bytes: data.data_bytes };
        let bytes = map.len() as u64;
        let map = FileRef { digest: Digest::of(map), bytes, data_bytes: bytes };
        let layer = LayerRef { id: LayerId::of(&data, &map), data, map };
        Ok(Self { layer, folder, data: dir.open(DATA)?, map: dir.open(MAP)?, published: false })
    }

    /// Another descriptor of its map.
    pub(crate) fn map(&self) -> IoResult<File> {
        self.map
            .try_clone()
            .map_err(IoError::new("duplicating the descriptor of", std::path::Path::new(&self.folder)))
    }
}

impl crate::Store {
    /// Opens stored layers, which `by` needs, and verifies them.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_layers(&self, layers: &[LayerRef], by: &str) -> Result<Vec<OpenLayer>, OpenError> {
        let open = |layer: &LayerRef| {
            let (data, map) = self.0.open_layer(layer, by)?;
            Ok(OpenLayer { layer: *layer, data, map })
        };
        layers.iter().map(open).collect()
    }
}

impl Inner {
    /// Hashes a VM's frozen layer, and gives its files a second name in the stage.
    pub(crate) fn stage_layer(&self, stage: &Stage, folder: String, from: VmLayer) -> IoResult<StagedLayer> {
        let vm = self.vms.sub(&from.vm.to_string())?;
        let staged = stage.make(&folder)?;
        vm.link(&from.data_name(), &staged, DATA)?;
        vm.link(&from.map_name(), &staged, MAP)?;
        let content = |name: &str, kind: Kind| -> IoResult<(FileRef, File)> {
            let file = staged.open(name)?;
            staged.finish(name, &file)?;
            let content =
                verify::digest(&file, kind).map_err(IoError::new("reading", &staged.path().join(name)))?;
            Ok((content, file))
        };
        let ((data, data_file), (map, map_file)) = (content(DATA, Kind::Sparse)?, content(MAP, Kind::Plain)?);
        staged.sync()?;
        let layer = LayerRef { id: LayerId::of(&data, &map), data, map };
        Ok(StagedLayer { layer, folder, data: data_file, map: map_file, published: false })
    }

    /// Renames a staged layer into `layers/`, unless it is there and sound. Call it while publishing; `layers/` is not synced yet.
    pub(crate) fn publish_layer(&self, stage: &Stage, staged: &mut StagedLayer) -> Result<(), CommitError> {
        let name = staged.layer.id.to_string();
        let if_taken = match self.open_layer(&staged.layer, "this snapshot") {
            Ok(_) => return Ok(()),
            Err(OpenError::Damage(Damage::Missing { .. })) if !self.layers.has(&name)? => IfTaken::Refuse,
            Err(OpenError::Io(e)) => return Err(e.into()),
            Err(damage) => {
                tracing::warn!(%damage, "a stored layer is damaged; putting a good copy in its place");
                IfTaken::Exchange
            }
        };
        stage.rename(&staged.folder, &self.layers, &name, if_taken)?;
        self.verifier.forget(&self.layers.path().join(&name));
        staged.published = true;
        Ok(())
    }

    /// Remembers the files of a layer just published as verified; after the last change of their names.
    pub(crate) fn remember_layer(&self, staged: &StagedLayer) {
        if staged.published {
            let folder = self.layers.path().join(staged.layer.id.to_string());
            self.verifier.remember(&folder.join(DATA), &staged.data, staged.layer.data.digest);
            self.verifier.remember(&folder.join(MAP), &staged.map, staged.layer.map.digest);
        }
    }

    /// Opens a layer, which `by` needs, and verifies it.
    pub(crate) fn open_layer(&self, layer: &LayerRef, by: &str) -> Result<(File, File), OpenError> {
        let (dir, data, map) = self.open_layer_files(layer.id, by)?;
        self.verify_layer(&dir, layer, &data, &map)?;
        Ok((data, map))
    }

    pub(crate) fn open_layer_files(&self, id: LayerId, by: &str) -> Result<(Dir, File, File), OpenError> {
        self.layer_is(id, by)?;
        let dir = self.layers.sub(&id.to_string())?;
        let by = format!("layer {id} of {by}");
        let (data, map) = (needed(&dir, DATA, &by)?, needed(&dir, MAP, &by)?);
        Ok((dir, data, map))
    }

    pub(crate) fn verify_layer(
        &self,
        dir: &Dir,
        layer: &LayerRef,
        data: &File,
        map: &File,
    ) -> Result<(), OpenError> {
        self.verify(dir, MAP, map, &layer.map, Kind::Plain)?;
        self.verify(dir, DATA, data, &layer.data, Kind::Sparse)?;
        Ok(())
    }
}
