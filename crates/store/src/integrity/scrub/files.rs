//! Searches images, kernels, layers and block indexes.

use super::{Finding, Object, Read, Scrub, Trouble};
use crate::blob::Dir;
use crate::errors::{Damage, IoError};
use crate::integrity::verify::{self, Kind};
use crate::memory::{BLOCKS, BlockIndex};
use crate::objects::images::DISK;
use crate::objects::kernels::{INITRD, VMLINUX};
use crate::objects::manifest::{self, ImageManifest, KernelManifest};
use crate::objects::tree::{FileTree, TREE, trouble};
use crate::objects::types::FileRef;
use crate::objects::types::{DATA, LayerId, LayerRef, MAP};
use crate::publish::needed;
use crate::sparse::next_data;
use dayfly_units::Name;
use dayfly_units::tree::{LeafError, TreeReader};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

impl Scrub<'_> {
    /// Reads all of a file of `dir`, and compares it with `expected`.
    pub(super) fn content(
        &self,
        dir: &Dir,
        name: &str,
        file: &File,
        expected: &FileRef,
        kind: Kind,
    ) -> Read<()> {
        let path = dir.path().join(name);
        let length = file.metadata().map_err(IoError::new("looking at", &path))?.len();
        verify::same_length(&path, expected, length)?;
        let got = self.digest(dir, name, file, kind)?;
        Ok(verify::same(&path, expected, &got)?)
    }

    /// Reads all of a file, and returns its digest and sizes.
    fn digest(&self, dir: &Dir, name: &str, file: &File, kind: Kind) -> Read<FileRef> {
        let got =
            verify::digest_with(file, kind, &mut |_, piece| self.meter.step(piece.len() as u64));
        Ok(got.map_err(IoError::new("reading", &dir.path().join(name)))?)
    }

    /// Reads all of a disk file of `dir`. If it is damaged, and its hash tree is sound, the finding
    /// names the first leaf that is wrong, and the number of all.
    fn disk(&self, dir: &Dir, name: &str, file: &File, of: &FileRef) -> Read<()> {
        let result = self.content(dir, name, file, of, Kind::Sparse);
        let path = dir.path().join(name);
        let length = file.metadata().map_err(IoError::new("looking at", &path))?.len();
        match &result {
            Err(Trouble::Damage(_)) if length == of.bytes => {}
            _ => return result,
        }
        let Some(tree) = self.inner.tree(dir, of, None) else { return result };
        self.leaves(dir, name, file, of, &tree)?;
        result
    }

    /// Compares each leaf of a disk file with the file's tree.
    fn leaves(
        &self,
        dir: &Dir,
        name: &str,
        file: &File,
        of: &FileRef,
        tree: &FileTree,
    ) -> Read<()> {
        let path = dir.path().join(name);
        let reading = |e| IoError::new("reading", &path)(e);
        let nodes = |out: &mut [u8], at: u64| tree.file.read_exact_at(out, at);
        let mut reader = TreeReader::new(of.bytes, tree.root);
        let mut data = next_data(file, 0, of.bytes).map_err(reading)?;
        let (mut buffer, mut wrong, mut first) = (Vec::new(), 0_u64, None);
        for leaf in 0..reader.layout().leaves() {
            self.meter.step(0).map_err(reading)?;
            let leaf = reader.leaf(&nodes, leaf).map_err(|e| trouble(dir.path(), name, e))?;
            let end = leaf.at() + leaf.length() as u64;
            if data.is_some_and(|(_, end)| end <= leaf.at()) {
                data = next_data(file, leaf.at(), of.bytes).map_err(reading)?;
            }
            let is_hole = data.is_none_or(|(start, _)| start >= end);
            if is_hole && leaf.is_zero() {
                continue;
            }
            buffer.clear();
            buffer.resize(leaf.length(), 0);
            if !is_hole {
                file.read_exact_at(&mut buffer, leaf.at()).map_err(reading)?;
            }
            if let Err(LeafError::Leaf { at, end, expected, got }) = leaf.check(&buffer) {
                wrong += 1;
                first = first.or(Some((at, end, expected, got)));
            }
        }
        let Some((at, end, expected, got)) = first else { return Ok(()) };
        let place =
            format!("hash of bytes {at} to {end} (damaged parts of 64 KiB in all: {wrong})");
        let (expected, got) = (expected.to_string(), got.to_string());
        Err(Damage::Content { file: path, place, expected, got }.into())
    }

    /// Reads all of the hash tree of a disk file of `dir`. A file of a store from before hash trees
    /// has none.
    fn hash_tree(&self, dir: &Dir, of: &FileRef) -> Read<()> {
        let path = dir.path().join(TREE);
        // Trusted or not, it is read.
        self.inner.verifier.forget(&path);
        let root = self.manifests().find_map(|m| m.trees.get(&of.digest).copied());
        let Some(tree) = self.inner.open_tree(dir, of, root)? else { return Ok(()) };
        let nodes = |out: &mut [u8], at: u64| tree.file.read_exact_at(out, at);
        match TreeReader::new(of.bytes, tree.root).check_nodes(&nodes) {
            Ok(()) => Ok(()),
            Err(LeafError::Read { source, .. }) => {
                Err(IoError::new("reading", &path)(source).into())
            }
            Err(LeafError::Node { at, expected, got }) => {
                let place = format!("hash of the node at byte {at}");
                let (expected, got) = (expected.to_string(), got.to_string());
                Err(Damage::Content { file: path, place, expected, got }.into())
            }
            Err(other) => Err(trouble(dir.path(), TREE, other).into()),
        }
    }

    /// Lists entries whose names are not UTF-8. No other operation sees them.
    pub(super) fn foreign(&mut self) -> Result<(), IoError> {
        let inner = self.inner;
        let folders = [
            (Object::Image, &inner.images),
            (Object::Kernel, &inner.kernels),
            (Object::Layer, &inner.layers),
            (Object::Snapshot, &inner.snapshots),
        ];
        for (object, dir) in folders {
            for name in dir.foreign()? {
                let text = format!(
                    "{}: expected names in UTF-8, got {name}, which dayfly did not make; move it \
                     to another folder",
                    dir.path().display()
                );
                self.list(Finding { object, name, text, snapshots: Vec::new() });
            }
        }
        Ok(())
    }

    pub(super) fn images(&mut self) -> Result<(), IoError> {
        let inner = self.inner;
        let names = match self.chosen {
            false => inner.images.entries()?,
            true => {
                let needed =
                    self.manifests().flat_map(|m| &m.disks).map(|d| d.image.name.to_string());
                needed.collect::<BTreeSet<_>>().into_iter().collect()
            }
        };
        for name in names {
            // A missing image is reported with the snapshot that needs it.
            let Some(dir) = self.folder(Object::Image, &inner.images, &name)? else {
                continue;
            };
            self.report.images += 1;
            let result = self.image(&dir);
            let users =
                self.manifests().filter(|m| m.disks.iter().any(|d| d.image.name.as_str() == name));
            let users = users.map(|m| m.name.to_string()).collect();
            let at = (&inner.images, &dir);
            if !self.judge(Object::Image, &name, at, result, users)?
                && let Ok(name) = name.parse::<Name>()
            {
                self.bad_images.insert(name);
            }
            let tree = self.image_tree(&dir);
            self.judge(Object::HashTree, &format!("images/{name}"), at, tree, Vec::new())?;
        }
        Ok(())
    }

    fn image(&self, dir: &Dir) -> Read<()> {
        let manifest: ImageManifest = manifest::read(dir)?;
        let disk = needed(dir, DISK, &format!("image {}", manifest.name))?;
        self.disk(dir, DISK, &disk, &manifest.disk)
    }

    /// An unreadable manifest is reported with the disk.
    fn image_tree(&self, dir: &Dir) -> Read<()> {
        let manifest = manifest::read::<ImageManifest>(dir);
        manifest.map_or(Ok(()), |manifest| self.hash_tree(dir, &manifest.disk))
    }

    /// Kernels are skipped if snapshots are chosen, because no snapshot depends on a kernel's
    /// files.
    pub(super) fn kernels(&mut self) -> Result<(), IoError> {
        let inner = self.inner;
        let names = if self.chosen { Vec::new() } else { inner.kernels.entries()? };
        for name in names {
            let Some(dir) = self.folder(Object::Kernel, &inner.kernels, &name)? else {
                continue;
            };
            self.report.kernels += 1;
            let manifest = manifest::read::<KernelManifest>(&dir);
            let files = |m: KernelManifest| [(VMLINUX, m.vmlinux), (INITRD, m.initrd)];
            let (result, files) = match manifest {
                Ok(manifest) => (Ok(()), files(manifest).to_vec()),
                Err(e) => (Err(e.into()), Vec::new()),
            };
            self.judge(Object::Kernel, &name, (&inner.kernels, &dir), result, Vec::new())?;
            for (file, expected) in files {
                let open = needed(&dir, file, &format!("kernel {name}"));
                let result = open
                    .map_err(Into::into)
                    .and_then(|open| self.content(&dir, file, &open, &expected, Kind::Plain));
                self.judge(Object::Kernel, &name, (&inner.kernels, &dir), result, Vec::new())?;
            }
        }
        Ok(())
    }

    /// A layer that no snapshot references has no manifest; it is compared with its name.
    pub(super) fn layers(&mut self) -> Result<(), IoError> {
        let inner = self.inner;
        let mut known: BTreeMap<LayerId, (LayerRef, BTreeSet<String>)> = BTreeMap::new();
        for manifest in self.manifests() {
            for layer in manifest.disks.iter().flat_map(|d| &d.layers) {
                let users =
                    &mut known.entry(layer.id).or_insert_with(|| (*layer, BTreeSet::new())).1;
                users.insert(manifest.name.to_string());
            }
        }
        let mut ids: BTreeSet<LayerId> = known.keys().copied().collect();
        if !self.chosen {
            ids.extend(
                inner.layers.entries()?.iter().filter_map(|name| name.parse::<LayerId>().ok()),
            );
        }
        for id in ids {
            let name = id.to_string();
            let Some(dir) = self.folder(Object::Layer, &inner.layers, &name)? else {
                continue;
            };
            self.report.layers += 1;
            let (expected, users) = match known.get(&id) {
                Some((layer, users)) => (Some(layer), users.iter().cloned().collect::<Vec<_>>()),
                None => (None, Vec::new()),
            };
            let files: Vec<Read<()>> = match expected {
                Some(layer) => vec![
                    self.layer_file(&dir, MAP, &name, &layer.map, Kind::Plain),
                    self.layer_file(&dir, DATA, &name, &layer.data, Kind::Sparse),
                ],
                None => vec![self.layer_by_name(&dir, id)],
            };
            for result in files {
                if !self.judge(
                    Object::Layer,
                    &name,
                    (&inner.layers, &dir),
                    result,
                    users.clone(),
                )? {
                    self.bad_layers.insert(id);
                }
            }
            if let Some(layer) = expected {
                // It can be made again, so the snapshots are not damaged.
                let tree = self.hash_tree(&dir, &layer.data);
                let (at, name) = ((&inner.layers, &dir), format!("layers/{name}"));
                self.judge(Object::HashTree, &name, at, tree, Vec::new())?;
            }
        }
        Ok(())
    }

    fn layer_file(
        &self,
        dir: &Dir,
        file: &str,
        id: &str,
        expected: &FileRef,
        kind: Kind,
    ) -> Read<()> {
        let open = needed(dir, file, &format!("layer {id}"))?;
        match kind {
            Kind::Sparse => self.disk(dir, file, &open, expected),
            Kind::Plain => self.content(dir, file, &open, expected, kind),
        }
    }

    fn layer_by_name(&self, dir: &Dir, id: LayerId) -> Read<()> {
        let by = format!("layer {id}");
        let (data, map) = (needed(dir, DATA, &by)?, needed(dir, MAP, &by)?);
        let data = self.digest(dir, DATA, &data, Kind::Sparse)?;
        let map = self.digest(dir, MAP, &map, Kind::Plain)?;
        let got = LayerId::of(&data, &map);
        if got == id {
            return self.hash_tree(dir, &data);
        }
        let (expected, got) = (id.to_string(), got.to_string());
        let place = "digest of data and map, which the folder is named by".to_owned();
        Err(Damage::Content { file: dir.path().to_owned(), place, expected, got }.into())
    }

    pub(super) fn block_indexes(&mut self) -> Result<(), IoError> {
        let inner = self.inner;
        if self.chosen || !inner.root.has(BLOCKS)? {
            return Ok(());
        }
        let dir = inner.root.sub(BLOCKS)?;
        for name in dir.entries()? {
            let Ok(of) = name.parse() else { continue };
            self.meter.step_at(super::length(&dir.path().join(&name)), &dir.path().join(&name))?;
            self.report.block_indexes += 1;
            let read = BlockIndex::check(&dir, &name, &of);
            let read = read.map_err(|e| super::Trouble::of(e, dir.path().join(&name)));
            // An index removed meanwhile was not needed.
            if read.is_err() && !dir.has(&name)? {
                continue;
            }
            self.judge(Object::BlockIndex, &name, (&inner.root, &dir), read, Vec::new())?;
        }
        Ok(())
    }
}
