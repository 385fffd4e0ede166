//! RAM for tests, and snapshots with RAM in pages.

use crate::fixture::{IMAGE, Vm, disk, name};
use crate::{
    ChainLayer, CommitError, Committed, PagedSpec, SavedSnapshot, SnapshotSpec, Store, VmLayer,
};
use dayfly_units::{Name, VmId};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub(crate) const PAGE: usize = 4096;

/// The page of that number. Numbers divisible by 7 give zeroes; others compress well or not at all.
pub(crate) fn page(number: u64) -> Vec<u8> {
    if number.is_multiple_of(7) {
        return vec![0; PAGE];
    }
    let mut bytes = vec![0; PAGE];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&number.to_le_bytes());
    let random = if number.is_multiple_of(3) { PAGE } else { 512 };
    hasher.finalize_xof().fill(&mut bytes[..random]);
    bytes
}

/// RAM with these pages.
pub(crate) fn ram(pages: impl IntoIterator<Item = u64>) -> Vec<u8> {
    pages.into_iter().flat_map(page).collect()
}

/// An unnamed file with these bytes; zero pages are holes.
pub(crate) fn file(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    write(&file, bytes);
    file
}

fn write(file: &File, bytes: &[u8]) {
    crate::sparse::copy(&mut &bytes[..], file, bytes.len() as u64).unwrap();
}

/// Changes a bit of the byte at `at`. Published files are read-only.
pub(crate) fn flip(path: &Path, at: u64) {
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

/// The packs of the tenant `one`.
pub(crate) fn pack_files(root: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(root.join("pages/one")).unwrap().map(|e| e.unwrap().path());
    names.filter(|path| path.file_name().unwrap().len() == 64).collect()
}

/// A snapshot of the tenant `one` with this RAM in pages.
pub(crate) fn bake_one(store: &Store, to: &str, memory: &[u8]) {
    bake_paged(store, to, 5, memory, &PagedSpec::of(&name("one"))).unwrap();
}

pub(crate) fn bytes(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Saves `memory` as RAM of a VM with one disk, whose frozen layer has a page of `seed` at block 3.
pub(crate) fn bake_paged(
    store: &Store,
    to: &str,
    seed: u8,
    memory: &[u8],
    pages: &PagedSpec,
) -> Result<Committed, CommitError> {
    bake_paged_while(store, to, seed, memory, pages, |_| ())
}

/// As [`bake_paged`]; calls `while_saved` with RAM between save and commit.
pub(crate) fn bake_paged_while<T>(
    store: &Store,
    to: &str,
    seed: u8,
    memory: &[u8],
    pages: &PagedSpec,
    while_saved: impl FnOnce(&File) -> T,
) -> Result<Committed, CommitError> {
    let id = VmId::random();
    let result = saved(store, to, seed, memory, id).and_then(|(saved, spec)| {
        let _until_committed = while_saved(saved.memory());
        saved.commit_paged(&spec, pages)
    });
    store.remove_vm(id).map_err(CommitError::from).and(result)
}

/// The saved files of the VM `id`; its frozen layer is in the VM's folder.
pub(crate) fn saved(
    store: &Store,
    to: &str,
    seed: u8,
    memory: &[u8],
    id: VmId,
) -> Result<(SavedSnapshot, SnapshotSpec), CommitError> {
    let image = store.image(&name(IMAGE))?.reference();
    let (writable, data) = store.create_vm_layer(id, 0)?;
    data.set_len(16 * 4096).unwrap();
    data.write_all_at(&[seed; PAGE], 3 * 4096).unwrap();
    drop(data);
    let mut writer = store.snapshot_writer_in_memory(&name(to), memory.len() as u64)?;
    let freeze = writer.freeze(&writable)?;
    writer.state().write_all_at(&[seed; 300], 0).unwrap();
    write(writer.memory(), memory);
    freeze.map.write_all_at(&[seed ^ 0xff; 200], 0).unwrap();
    drop(freeze.map);
    let vm = Vm { id, image, chain: vec![freeze.frozen], writable };
    let spec = SnapshotSpec { memory_bytes: memory.len() as u64, ..vm.spec(seed, None) };
    Ok((writer.saved(), spec))
}

/// RAM of a snapshot, materialised in both ways, which must agree.
pub(crate) fn restored(store: &Store, tenant: &Name, snapshot: &str) -> Vec<u8> {
    let open = store.open_snapshot_pages(tenant, &name(snapshot)).unwrap();
    let to = tempfile::tempfile().unwrap();
    open.materialise(&to).unwrap();
    let all = bytes(&to);
    assert!(bytes(&store.open_snapshot(&name(snapshot)).unwrap().memory) == all);
    all
}

/// The number and content of the one block of [`crate::fixture::store`]'s image that a frame may
/// equal.
pub(crate) fn image_block() -> (u32, Vec<u8>) {
    assert_eq!(IMAGE, "debian");
    (1, disk(1)[PAGE..2 * PAGE].to_vec())
}

/// The bytes of the file `file` in `golden/`, which must exist. With `DAYFLY_GOLDEN=write` it is
/// first written from `now`: only for a new format.
pub(crate) fn golden(file: &str, now: &[u8]) -> Vec<u8> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(file);
    if std::env::var_os("DAYFLY_GOLDEN").is_some_and(|v| v == "write") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, now).unwrap();
    }
    std::fs::read(&path)
        .unwrap_or_else(|e| panic!("{}: {e}: a golden file is part of the format", path.display()))
}

/// The space that a snapshot takes.
pub(crate) fn used(store: &Store, tenant: &Name, snapshot: &str) -> crate::SnapshotUse {
    let usage = store.usage(tenant).unwrap();
    usage.snapshots.into_iter().find(|s| s.name.as_str() == snapshot).unwrap()
}

/// Merges layers whose maps are the test's: bit `n` of a little-endian u16 is block `n`.
pub(crate) fn merge(
    maps: &[std::os::fd::BorrowedFd<'_>],
) -> Result<crate::Merged, Box<dyn std::error::Error + Send + Sync>> {
    let mut layers = Vec::new();
    for map in maps {
        let mut bits = [0; 2];
        File::from(map.try_clone_to_owned()?).read_exact_at(&mut bits, 0)?;
        layers.push(u16::from_le_bytes(bits));
    }
    let all = layers.iter().fold(0_u16, |all, layer| all | layer);
    let runs = (0..16_u64).filter_map(move |block| {
        let top = layers.iter().rposition(|layer| layer >> block & 1 == 1)?;
        Some((top, block * 4096..(block + 1) * 4096))
    });
    Ok(crate::Merged { map: all.to_le_bytes().to_vec(), runs: Box::new(runs) })
}

/// Writes a page of `seed` to block `seed` % 16 of the layer `layer`, which has no other block;
/// returns the layer's map, as [`merge`] reads it.
fn write_block(store: &Store, layer: &VmLayer, seed: u8) -> Result<[u8; 2], CommitError> {
    let data = store.open_vm_layer(layer, true)?;
    data.set_len(16 * 4096).unwrap();
    let block = seed % 16;
    data.write_all_at(&[seed; PAGE], u64::from(block) * 4096).unwrap();
    Ok((1_u16 << block).to_le_bytes())
}

/// Writes one block ([`write_block`]) and freezes the layer as a fork does; no snapshot is made.
pub(crate) fn grow_frozen(store: &Store, vm: &mut Vm, seed: u8) -> VmLayer {
    let map = write_block(store, &vm.writable, seed).unwrap();
    let mut freezing = store.freezing();
    let freeze = freezing.freeze(&vm.writable).unwrap();
    freeze.map.write_all_at(&map, 0).unwrap();
    drop(freeze.map);
    freezing.keep();
    vm.chain.push(freeze.frozen);
    std::mem::replace(&mut vm.writable, freeze.next)
}

/// A snapshot of a VM, a clone of `from` if given, that first writes a page of `seed` to block
/// `seed` % 16.
pub(crate) fn grow(
    store: &Store,
    from: Option<&str>,
    to: &str,
    seed: u8,
    memory: &[u8],
) -> Result<(), CommitError> {
    let id = VmId::random();
    let (image, chain) = match from {
        None => (store.image(&name(IMAGE))?.reference(), Vec::new()),
        Some(from) => {
            let disk = store.snapshot(&name(from))?.disks.remove(0);
            (disk.image, disk.layers.into_iter().map(ChainLayer::Stored).collect())
        }
    };
    let vm = Vm { id, image, chain, writable: store.create_vm_layer(id, 0)?.0 };
    let result = grown(store, vm, to, seed, memory);
    store.remove_vm(id).map_err(CommitError::from).and(result)
}

fn grown(store: &Store, mut vm: Vm, to: &str, seed: u8, memory: &[u8]) -> Result<(), CommitError> {
    let map = write_block(store, &vm.writable, seed)?;
    let mut writer = store.snapshot_writer(&name(to))?;
    let freeze = writer.freeze(&vm.writable)?;
    writer.state().write_all_at(&[seed; 300], 0).unwrap();
    write(writer.memory(), memory);
    freeze.map.write_all_at(&map, 0).unwrap();
    drop(freeze.map);
    vm.chain.push(freeze.frozen);
    let spec = SnapshotSpec { memory_bytes: memory.len() as u64, ..vm.spec(seed, None) };
    writer.saved().merging(merge).commit_paged(&spec, &PagedSpec::of(&name("one")))?;
    Ok(())
}
