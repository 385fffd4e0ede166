//! Flattening: a chain of more than [`MOST`] layers is committed as [`MOST`] layers, by merging
//! adjacent layers.
//!
//! Every clone pays for a layer: two files to check, to pass on and to open. A merge is paid once,
//! by a commit. Each commit adds one layer. If there are too many, the layers at the top become
//! one. The merge takes at least two, and as few as possible so that the layer below is at least
//! twice as large as their sum.
//!
//! A large layer, such as a bake's, therefore stays as it is and is shared. Over a hundred
//! snapshots of one VM, each layer is copied five times. Merging the two adjacent layers with the
//! smallest sum would copy each one seventeen times.
//!
//! A merged layer is staged and published like any other layer, before the snapshot that refers to
//! it. Its source layers stay while other snapshots or VMs depend on them. The image is not a layer
//! and is never merged.
//!
//! Only the code that made a layer's map can read it ([`Merge`]). If reading fails, or the disk is
//! full, the chain is committed unmerged.

use super::staged::Staged;
use crate::blob::{Dir, Stage};
use crate::errors::IoError;
use crate::inner::{Inner, Store};
use crate::memory::BlockHint;
use crate::objects::layers::StagedLayer;
use crate::objects::manifest::DiskRef;
use crate::objects::tree;
use crate::objects::types::{DATA, LayerRef, MAP, VmLayer};
use crate::publish::OpenError;
use crate::sparse::{SparseHasher, is_zero, next_data};
use crate::vms::layers::next_number;
use dayfly_units::failpoint;
use dayfly_units::tree::TreeBuilder;
use dayfly_units::{PAGE_SIZE, VmId};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

/// The most layers of a disk in a committed snapshot.
pub const MOST: usize = 4;
/// Most bytes per copy.
const CHUNK_BYTES: u64 = 1 << 20;
/// The size that a layer counts in addition to its data, so that empty layers are merged too.
const LAYER_BYTES: u64 = 4096;

/// Adjacent layers as one layer.
pub struct Merged {
    /// The content of the merged layer's map file.
    pub map: Vec<u8>,
    /// Every byte that the merged layer has, as ascending ranges. Each range comes with the index
    /// of the layer that has its data at the same offset; 0 is the first of the given maps.
    pub runs: Box<dyn Iterator<Item = (usize, Range<u64>)>>,
}

/// Reads the maps of adjacent layers, the lowest first, and returns the merged layer.
pub type Merge = fn(&[BorrowedFd<'_>]) -> Result<Merged, Box<dyn std::error::Error + Send + Sync>>;

/// Why layers were not merged.
#[derive(Debug, thiserror::Error)]
pub enum FlattenError {
    /// [`Merge`] could not read the maps.
    #[error("the maps")]
    Maps(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// [`Merge`] returned a run that is out of order or out of bounds.
    #[error(
        "runs of a merged layer: expected bytes ascending from {from}, below {end}, \
         in a layer below {layers}, got {got:?} in {layer}"
    )]
    Run {
        /// End of the previous run, in bytes.
        from: u64,
        /// End of the disk, in bytes.
        end: u64,
        /// Number of layers.
        layers: usize,
        /// Byte range of the run.
        got: Range<u64>,
        /// Layer of the run.
        layer: usize,
    },
    /// A layer's data has another length than the disk.
    #[error("data of a layer: expected {expected} bytes, got {got}")]
    Length {
        /// The disk's size in bytes.
        expected: u64,
        /// The layer's length in bytes.
        got: u64,
    },
    /// A layer cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The host could not read or write a file.
    #[error(transparent)]
    Io(#[from] IoError),
}

/// Groups layers, given their sizes in bytes, into at most `most` groups of adjacent layers. Every
/// layer is in exactly one group.
fn plan(sizes: &[u64], most: usize) -> Vec<Range<usize>> {
    let mut groups: Vec<(Range<usize>, u64)> = sizes
        .iter()
        .enumerate()
        .map(|(n, bytes)| (n..n + 1, bytes.saturating_add(LAYER_BYTES)))
        .collect();
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

/// The new number of each layer of each disk, indexed by the old number; 0 is the image.
#[derive(Debug, Default)]
pub(super) struct Moves(Vec<Vec<u8>>);

impl Moves {
    /// The hint with the layer's new number. If an upper layer of the same group also has the
    /// block, the content differs; the comparison with the page finds out.
    pub(super) fn hint(&self, (frame, hint): (u32, BlockHint)) -> (u32, BlockHint) {
        let moved =
            self.0.get(usize::from(hint.disk)).and_then(|disk| disk.get(usize::from(hint.layer)));
        (frame, BlockHint { layer: moved.copied().unwrap_or(hint.layer), ..hint })
    }
}

impl Staged {
    /// Flattens the chains of `disks`, and drops staged layers that are not referenced any more.
    /// `None` if nothing was merged.
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

    /// Merges several layers and stages the result. `None` if there is only one layer, or the merge
    /// failed.
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
                let cause =
                    std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
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
            let (blocks, map) = match self.layers.iter().find(|staged| staged.layer.id == layer.id)
            {
                Some(staged) => (staged.data()?, staged.map()?),
                // Merged data gets another digest, so damage must show now.
                None => inner.open_whole_layer(layer, "a snapshot in the making")?,
            };
            if layer.data.bytes != size_bytes {
                return Err(FlattenError::Length { expected: size_bytes, got: layer.data.bytes });
            }
            data.push(blocks);
            maps.push(map);
        }
        let fds: Vec<BorrowedFd<'_>> = maps.iter().map(AsFd::as_fd).collect();
        let Merged { map, runs } = merge(&fds).map_err(FlattenError::Maps)?;
        let folder = self.folder();
        let dir = stage.make(&folder)?;
        let file = dir.create(DATA)?;
        file.set_len(size_bytes).map_err(IoError::new("extending", &dir.path().join(DATA)))?;
        let mut sums = (SparseHasher::default(), tree::begin(&dir, size_bytes)?);
        let (dir, file, end) = (&dir, &file, size_bytes);
        let mut copy = Copy { dir, name: DATA, file, sums: Some(&mut sums), from: 0, end };
        for (layer, bytes) in runs {
            copy.run(&data, layer, bytes)?;
        }
        let (hasher, tree) = sums;
        let content = hasher.finish(size_bytes);
        dir.finish(DATA, file)?;
        let tree = tree::end(dir, tree, content.digest)?;
        dir.write(MAP, &map)?;
        dir.sync()?;
        Ok(StagedLayer::made(dir, folder, content, tree, &map)?)
    }
}

impl Store {
    /// Merges frozen layers of one disk, the lowest first, into a new layer of `vm`; the source
    /// layers stay. `size_bytes` is the disk's size. The new layer is not hashed, because no
    /// snapshot refers to it. Returns `None` if `layers` is empty.
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
        let open = layers.iter().map(|layer| {
            let layer = self.open_frozen_layer(layer)?;
            Ok((layer.data, layer.map))
        });
        let (data, maps): (Vec<File>, Vec<File>) =
            open.collect::<Result<Vec<_>, IoError>>()?.into_iter().unzip();
        let fds: Vec<BorrowedFd<'_>> = maps.iter().map(AsFd::as_fd).collect();
        let Merged { map, runs } = merge(&fds).map_err(FlattenError::Maps)?;
        let merged = VmLayer { vm, number: next_number(&dir, lowest.disk)?, ..*lowest };
        let name = merged.data_name();
        let made = || {
            let file = dir.create(&name)?;
            file.set_len(size_bytes).map_err(IoError::new("extending", &dir.path().join(&name)))?;
            let (dir, name, file) = (&dir, name.as_str(), &file);
            let mut copy = Copy { dir, name, file, sums: None, from: 0, end: size_bytes };
            runs.into_iter().try_for_each(|(layer, bytes)| copy.run(&data, layer, bytes))?;
            failpoint::reached("store.merge.data_written");
            dir.write(&merged.map_name(), &map)?;
            failpoint::reached("store.merge.map_written");
            Ok(())
        };
        match made() {
            Ok(()) => Ok(Some(merged)),
            Err(error) => {
                // Files that remain are removed with the VM.
                let _best_effort = self.remove_vm_layer(&merged);
                Err(error)
            }
        }
    }
}

/// The data of a merged layer while it is written.
struct Copy<'a> {
    dir: &'a Dir,
    name: &'a str,
    file: &'a File,
    /// The digest and the hash tree; `None` for a layer of a VM.
    sums: Option<&'a mut (SparseHasher, TreeBuilder)>,
    /// End of the last run, in bytes.
    from: u64,
    /// End of the disk, in bytes.
    end: u64,
}

impl Copy<'_> {
    /// Copies one run; holes and zeroes are skipped.
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
            // The file system reports data in its own blocks, which may be smaller than a page.
            let start = (start - start % PAGE_SIZE).max(at);
            let end = end
                .next_multiple_of(PAGE_SIZE)
                .min(bytes.end)
                .min(start.saturating_add(CHUNK_BYTES));
            buffer.resize(usize::try_from(end - start).unwrap_or(0), 0);
            source.read_exact_at(&mut buffer, start).map_err(reading)?;
            if !is_zero_all(&buffer) {
                self.dir.write_at(self.name, self.file, &buffer, start)?;
                if let Some((hasher, tree)) = &mut self.sums {
                    hasher.update(start, &buffer);
                    let written = tree.update(start, &buffer);
                    written.map_err(IoError::new("writing the hash tree of", &path))?;
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
