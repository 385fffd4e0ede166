//! Frozen layers whose fsync failed.
//!
//! The kernel reports an error of writing back once per open file, and then counts the pages as
//! written: a second fsync succeeds although the disk does not have the data. So a failed fsync of
//! a layer is remembered, with the digests of its files, which were read from the page cache before
//! the fsync. Before the layer is used again it is copied to new files, which are synced and must
//! have these digests. The page cache may have dropped the data meanwhile; then the layer is lost,
//! and the error says so.
//!
//! It is remembered in memory and in the file `disk<d>.<n>.unsynced` of the VM's folder, for the
//! next daemon. On a disk that fails that file may not be written either.

use crate::blob::{Dir, Stage};
use crate::errors::{IoError, IoResult};
use crate::inner::Inner;
use crate::integrity::verify::{Kind, digest};
use crate::objects::types::{DATA, MAP, Unsynced, VmLayer};
use dayfly_units::error::chain;
use dayfly_units::sealed::{self, HEADER_BYTES, Magic};
use dayfly_units::sync::lock;
use std::io::{self, Read};

const MAGIC: Magic = *b"DFunsyn\n";
const VERSION: u32 = 1;
const MAX_BYTES: u64 = 4096;

impl Inner {
    /// Remembers that the fsync of a layer failed.
    pub(crate) fn note_unsynced(&self, dir: &Dir, layer: &VmLayer, unsynced: Unsynced) {
        tracing::warn!(
            vm = %layer.vm,
            disk = layer.disk,
            number = layer.number,
            "the disk failed to write a layer; it is copied before its next use"
        );
        lock(&self.unsynced).insert(*layer, unsynced);
        let name = layer.unsynced_name();
        let json = serde_json::to_vec(&unsynced).map_err(io::Error::from);
        let json = json.map_err(IoError::new("encoding", dir.path()));
        let written = json.and_then(|json| {
            dir.unlink(&name)?;
            dir.write(&name, &sealed::seal(&MAGIC, VERSION, &json))
        });
        if let Err(e) = written {
            tracing::warn!("a failed fsync is remembered in memory only: {}", chain(&e));
        }
    }

    /// What is remembered of a layer whose fsync failed.
    pub(super) fn unsynced(&self, dir: &Dir, layer: &VmLayer) -> IoResult<Option<Unsynced>> {
        if let Some(known) = lock(&self.unsynced).get(layer) {
            return Ok(Some(*known));
        }
        let name = layer.unsynced_name();
        if !dir.has(&name)? {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        let path = dir.path().join(&name);
        let file = dir.open(&name)?;
        let most = MAX_BYTES + HEADER_BYTES as u64 + 1;
        file.take(most).read_to_end(&mut bytes).map_err(IoError::new("reading", &path))?;
        // An unreadable note still says that the fsync failed.
        Ok(Some(decode(&bytes).unwrap_or(Unsynced { data: None, map: None })))
    }

    /// Forgets a layer that was copied, or is removed.
    pub(crate) fn forget_unsynced(&self, dir: &Dir, layer: &VmLayer) -> IoResult<()> {
        lock(&self.unsynced).remove(layer);
        dir.unlink(&layer.unsynced_name())
    }

    /// Syncs the copies of a layer in `stage`, and compares them with what is remembered of the
    /// original.
    pub(super) fn sync_copies(
        &self,
        stage: &Stage,
        layer: &VmLayer,
        expected: Unsynced,
    ) -> IoResult<()> {
        let files = [(DATA, Kind::Sparse, expected.data), (MAP, Kind::Plain, expected.map)];
        for (name, kind, expected) in files {
            let file = stage.open(name)?;
            stage.finish(name, &file)?;
            let path = stage.path().join(name);
            let got = digest(&file, kind).map_err(IoError::new("reading", &path))?;
            if let Some(expected) = expected.filter(|expected| *expected != got) {
                let text = format!(
                    "digest of the {name}: expected {}, got {}: the disk failed to write it, and \
                     memory does not have it any more; VM {} can not be saved or forked",
                    expected.digest, got.digest, layer.vm
                );
                let source = io::Error::new(io::ErrorKind::InvalidData, text);
                let path = self.vms.path().join(layer.vm.to_string()).join(layer.data_name());
                return Err(IoError { doing: "copying", path, source });
            }
        }
        Ok(())
    }
}

pub(crate) fn decode(bytes: &[u8]) -> Option<Unsynced> {
    let (_, json) = sealed::open(&MAGIC, VERSION..=VERSION, MAX_BYTES, bytes).ok()?;
    serde_json::from_slice(json).ok()
}

#[cfg(test)]
#[path = "unsynced_tests.rs"]
mod tests;
