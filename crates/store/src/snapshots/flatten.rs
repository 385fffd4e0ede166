//! Flattening: a chain of more than [`MOST`] layers is committed as one of so many, adjacent layers merged into one.
//!
//! What a layer costs, every clone pays: two files to look at, to pass on and to open. What a merge costs, a commit pays, once. Each commit adds one
//! layer; when these are too many, the upper ones become one, as few of them as there are above a layer that is at least twice as large as they
//! together. So a large one (a bake's) stays as it is and is shared, and of the layers of a hundred snapshots of one VM each is
//! copied five times (merging the two adjacent ones that are smallest together: seventeen times).
//!
//! The merged layer is staged like any other, and becomes visible like any other: before the snapshot that refers to it. The layers it was made
//! of stay as long as other snapshots and VMs stand on them. The image is no layer and is never merged.
//!
//! Which blocks a layer has only its maker can read ([`Merge`]). Where he cannot, or the disk is full, the chain stays as it is.

use super::commit::Staged;
use crate::blob::{Dir, Stage};
use crate::errors::IoError;
use crate::layers::{DATA, LayerRef, MAP, StagedLayer, VmLayer};
use crate::manifest::DiskRef;
use crate::memory::BlockHint;
use crate::publish::OpenError;
use crate::sparse::{SparseHasher, is_zero, next_data};
use crate::vms::next_number;
use crate::{Inner, Store};
use dayfly_units::{PAGE_SIZE, VmId};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

/// The most layers of a disk that a snapshot is committed with.
pub const MOST: usize = 4;
/// Bytes copied at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// What a layer weighs besides its data, so that empty ones are merged too.
const LAYER_BYTES: u64 = 4096;

/// Adjacent layers as one.
pub struct Merged {
    /// The map of the one: a file's bytes.
    pub map: Vec<u8>,
    /// Every byte that the one has, as ranges that ascend, each with the layer (0 is the first of the maps given) whose data has it at the same place.
    pub runs: Box<dyn Iterator<Item = (usize, Range<u64>)>>,
}

/// Reads the maps of adjacent layers, the lowest first, and says what they are as one.
pub type Merge = fn(&[BorrowedFd<'_>]) -> Result<Merged, Box<dyn std::error::Error + Send + Sync>>;

/// Why layers were not merged.
#[derive(Debug, thiserror::Error)]
pub enum FlattenError {
    /// What their maker says of their maps.
    #[error("the maps")]
    Maps(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A run that cannot be.
    #[error(
        "runs of a merged layer: expected bytes ascending from {from}, below {end}, in a layer below {layers}, got {got:?} in {layer}"
    )]
    Run {
        /// The end of the one before.
        from: u64,
        /// The end of the disk.
        end: u64,
        /// How many layers there are.
        layers: usize,
        /// Its bytes.
        got: Range<u64>,
        /// Its layer.
        layer: usize,
    },
    /// A layer of another disk.
    #[error("data of a layer: expected {expected} bytes, got {got}")]
    Length {
        /// The disk's.
        expected: u64,
        /// The layer's.
        got: u64,
    },
    /// A layer cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The host.
    #[error(transparent)]
    Io(#[from] IoError),
}

/// Which adjacent layers, of these sizes in bytes, become one, so that at most `most` are left: every layer is in one group.
fn plan(sizes: &[u64], most: usize) -> Vec<Range<usize>> {
    let mut groups: Vec<(Range<usize>, u64)> =
        sizes.iter().enumerate().map(|(n, bytes)| (n..n + 1, bytes.saturating_add(LAYER_BYTES))).collect();
    while groups.len() > most.max(1) {
        let Some((top, mut bytes)) = groups.pop() else { break };
        let mut start = top.start;
        while let Some((group, more)) = groups.pop() {
            (start, bytes) = (group.start, bytes.saturating_add(more));
            if groups.last().is_none_or(|(_, below)| below / 2 >= bytes) {
                break;
            }
        }
        groups.push((start..top.end, bytes));
    }
    groups.into_iter().map(|(group, _)| group).collect()
}

/// Where the layers of each disk went: in place of the number that a layer had (0 is the image), the number that it has.
#[derive(Debug, Default)]
pub(super) struct Moves(Vec<Vec<u8>>);

impl Moves {
    /// The block of the layer that has it now. Of one that lay under another of its group it is another block by now, which the comparison shows.
    pub(super) fn hint(&self, (frame, hint): (u32, BlockHint)) -> (u32, BlockHint) {
        let moved = self.0.get(usize::from(hint.disk)).and_then(|disk| disk.get(usize::from(hint.layer)));
        (frame, BlockHint { layer: moved.copied().unwrap_or(hint.layer), ..hint })
    }
}

impl Staged {
    /// Flattens the chains of `disks`, and keeps of the staged layers those that they refer to then. `None`: all are as they were.
    pub(super) fn flatten(
        &mut self,
        inner: &Inner,
        stage: &Stage,
        disks: &mut [DiskRef],
        merge: Merge,
    ) -> Option<Moves> {
        let mut moves = Moves::default();
        let mut any = false;
        for disk in &mut *disks {
            let sizes: Vec<u64> = disk.layers.iter().map(|layer| layer.data.data_bytes).collect();
            let groups = plan(&sizes, MOST);
            let mut of_disk = vec![0];
            let mut layers = Vec::with_capacity(groups.len());
            for group in groups {
                let old = disk.layers.get(group).unwrap_or_default();
                let new = self.merged(inner, stage, old, disk.size_bytes, merge);
                for (n, _) in old.iter().enumerate() {
                    let place = layers.len() + if new.is_some() { 1 } else { n + 1 };
                    of_disk.push(u8::try_from(place).unwrap_or(u8::MAX));
                }
                any |= new.is_some();
                match new {
                    Some(one) => layers.push(one),
                    None => layers.extend_from_slice(old),
                }
            }
            disk.layers = layers;
            moves.0.push(of_disk);
        }
        let named = |id| disks.iter().flat_map(|disk| &disk.layers).any(|layer| layer.id == id);
        self.layers.retain(|staged| named(staged.layer.id));
        any.then_some(moves)
    }

    /// One layer in place of several, staged. `None`: there is but one, or it cannot be.
    fn merged(
        &mut self,
        inner: &Inner,
        stage: &Stage,
        layers: &[LayerRef],
        size_bytes: u64,
        merge: Merge,
    ) -> Option<LayerRef> {
        if layers.len() < 2 {
            return None;
        }
        match self.stage_merged(inner, stage, layers, size_bytes, merge) {
            Ok(staged) => {
                let layer = staged.layer;
                self.layers.push(staged);
                Some(layer)
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                tracing::warn!(%error, cause, "a chain of layers stays as long as it is");
                None
            }
        }
    }

    fn stage_merged(
        &mut self,
        inner: &Inner,
        stage: &Stage,
        layers: &[LayerRef],
        size_bytes: u64,
        merge: Merge,
    ) -> Result<StagedLayer, FlattenError> {
        let (mut data, mut maps) = (Vec::new(), Vec::new());
        for layer in layers {
            let (blocks, map) = match self.layers.iter().find(|staged| staged.layer.id == layer.id) {
                Some(staged) => (staged.data()?, staged.map()?),
                None => inner.open_layer(layer, "a snapshot in the making")?,
            };
            if layer.data.bytes != size_bytes {
                return Err(FlattenError::Length { expected: size_bytes, got: layer.data.bytes });
            }
            data.push(blocks);
            maps.push(map);
        }
        let borrowed: Vec<BorrowedFd<'_>> = maps.iter().map(AsFd::as_fd).collect();
        let Merged { map, runs } = merge(&borrowed).map_err(FlattenError::Maps)?;
        let folder = self.folder();
        let dir = stage.make(&folder)?;
        let file = dir.create(DATA)?;
        file.set_len(size_bytes).map_err(IoError::new("extending", &dir.path().join(DATA)))?;
        let hasher = Some(SparseHasher::default());
        let mut copy = Copy { dir: &dir, name: DATA, file: &file, hasher, from: 0, end: size_bytes };
        for (layer, bytes) in runs {
            copy.run(&data, layer, bytes)?;
        }
        let content = copy.hasher.unwrap_or_default().finish(size_bytes);
        dir.finish(DATA, &file)?;
        dir.write(MAP, &map)?;
        dir.sync()?;
        Ok(StagedLayer::made(&dir, folder, content, &map)?)
    }
}

impl Store {
    /// One layer of `vm` in the place of several that VMs have frozen of a disk of `size_bytes`, the lowest first; these stay. Nothing of it is hashed: it is no
    /// snapshot's.
    ///
    /// # Errors
    /// [`FlattenError`]; there is no new layer then.
    pub fn merge_vm_layers(
        &self,
        vm: VmId,
        layers: &[VmLayer],
        size_bytes: u64,
        merge: Merge,
    ) -> Result<Option<VmLayer>, FlattenError> {
        let Some(lowest) = layers.first() else { return Ok(None) };
        let dir = self.0.vms.sub(&vm.to_string())?;
        let open = layers.iter().map(|layer| self.open_frozen_layer(layer));
        let (data, maps): (Vec<File>, Vec<File>) = open.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        let borrowed: Vec<BorrowedFd<'_>> = maps.iter().map(AsFd::as_fd).collect();
        let Merged { map, runs } = merge(&borrowed).map_err(FlattenError::Maps)?;
        let merged = VmLayer { vm, number: next_number(&dir, lowest.disk)?, ..*lowest };
        let name = merged.data_name();
        let made = || {
            let file = dir.create(&name)?;
            file.set_len(size_bytes).map_err(IoError::new("extending", &dir.path().join(&name)))?;
            let (dir, name, file) = (&dir, name.as_str(), &file);
            let mut copy = Copy { dir, name, file, hasher: None, from: 0, end: size_bytes };
            runs.into_iter().try_for_each(|(layer, bytes)| copy.run(&data, layer, bytes))?;
            Ok(dir.write(&merged.map_name(), &map)?)
        };
        match made() {
            Ok(()) => Ok(Some(merged)),
            Err(error) => {
                // What is left of it goes with its VM.
                let _best_effort = self.remove_vm_layer(&merged);
                Err(error)
            }
        }
    }
}

/// The data of a merged layer in the making.
struct Copy<'a> {
    dir: &'a Dir,
    name: &'a str,
    file: &'a File,
    hasher: Option<SparseHasher>,
    /// The end of the last run.
    from: u64,
    /// The end of the disk.
    end: u64,
}

impl Copy<'_> {
    /// Copies what is neither a hole nor zero.
    fn run(&mut self, data: &[File], layer: usize, bytes: Range<u64>) -> Result<(), FlattenError> {
        let within = bytes.start >= self.from && bytes.start < bytes.end && bytes.end <= self.end;
        let aligned = bytes.start.is_multiple_of(PAGE_SIZE);
        let Some(source) = data.get(layer).filter(|_| within && aligned) else {
            let (from, end, layers) = (self.from, self.end, data.len());
            return Err(FlattenError::Run { from, end, layers, got: bytes, layer });
        };
        self.from = bytes.end;
        let path = self.dir.path().join(self.name);
        let reading = |e| IoError::new("reading a layer for", &path)(e);
        let mut buffer = Vec::new();
        let mut at = bytes.start;
        while let Some((start, end)) = next_data(source, at, bytes.end).map_err(reading)? {
            // A file system's blocks may be smaller than ours.
            let start = (start - start % PAGE_SIZE).max(at);
            let end = end.next_multiple_of(PAGE_SIZE).min(bytes.end).min(start.saturating_add(CHUNK_BYTES));
            buffer.resize(usize::try_from(end - start).unwrap_or(0), 0);
            source.read_exact_at(&mut buffer, start).map_err(reading)?;
            if !is_zero_all(&buffer) {
                self.dir.write_at(self.name, self.file, &buffer, start)?;
                if let Some(hasher) = &mut self.hasher {
                    hasher.update(start, &buffer);
                }
            }
            at = end;
        }
        Ok(())
    }
}

fn is_zero_all(bytes: &[u8]) -> bool {
    bytes.chunks(crate::sparse::PAGE).all(is_zero)
}

#[cfg(test)]
#[path = "flatten_tests.rs"]
mod tests;
