//! RAM for tests, and snapshots of it in pages.

use crate::fixture::{IMAGE, Vm, disk, name};
use crate::{ChainLayer, CommitError, Committed, PagedSpec, SavedSnapshot, SnapshotSpec, Store};
use dayfly_units::{Name, VmId};
use std::fs::File;
use std::os::unix::fs::FileExt;

pub(crate) const PAGE: usize = 4096;

/// A page of that number: numbers divisible by 7 are zeroes; others compress well or not at all.
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

/// RAM of these pages.
pub(crate) fn ram(pages: impl IntoIterator<Item = u64>) -> Vec<u8> {
    pages.into_iter().flat_map(page).collect()
}

/// An unnamed file with these bytes, zero pages as holes.
pub(crate) fn file(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    write(&file, bytes);
    file
}

fn write(file: &File, bytes: &[u8]) {
    crate::sparse::copy(&mut &bytes[..], file, bytes.len() as u64).unwrap();
}

pub(crate) fn bytes(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Saves `memory` as the RAM of a VM with one disk, whose frozen layer has a page of `seed` at block 3.
pub(crate) fn bake_paged(
    store: &Store,
    to: &str,
    seed: u8,
    memory: &[u8],
    pages: &PagedSpec,
) -> Result<Committed, CommitError> {
    bake_paged_while(store, to, seed, memory, pages, |_| ())
}

/// As [`bake_paged`]; `while_saved` has the RAM between save and commit.
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

/// What the VMM of the VM `id` has saved; its frozen layer is in the VM's folder.
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
    let mut writer = store.snapshot_writer_in_memory(&name(to), memory.len() as u64)?;
    let freeze = writer.freeze(&writable)?;
    writer.state().write_all_at(&[seed; 300], 0).unwrap();
    write(writer.memory(), memory);
    freeze.map.write_all_at(&[seed ^ 0xff; 200], 0).unwrap();
    let vm = Vm { id, image, chain: vec![freeze.frozen], writable };
    let spec = SnapshotSpec { memory_bytes: memory.len() as u64, ..vm.spec(seed, None) };
    Ok((writer.saved(), spec))
}

/// The RAM of a snapshot, materialised by both ways to it.
pub(crate) fn restored(store: &Store, tenant: &Name, snapshot: &str) -> Vec<u8> {
    let open = store.open_snapshot_pages(tenant, &name(snapshot)).unwrap();
    let to = tempfile::tempfile().unwrap();
    open.materialise(&to).unwrap();
    let all = bytes(&to);
    assert!(bytes(&store.open_snapshot(&name(snapshot)).unwrap().memory) == all);
    all
}

/// The one block of the image of [`crate::fixture::store`] that a frame may equal, and its content.
pub(crate) fn image_block() -> (u32, Vec<u8>) {
    assert_eq!(IMAGE, "debian");
    (1, disk(1)[PAGE..2 * PAGE].to_vec())
}

/// The bytes of a file in `golden/`, which must be there. With `DAYFLY_GOLDEN=write` it is made of `now` first: for a new format only.
pub(crate) fn golden(file: &str, now: &[u8]) -> Vec<u8> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(file);
    if std::env::var_os("DAYFLY_GOLDEN").is_some_and(|v| v == "write") {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, now).unwrap();
    }
    std::fs::read(&path)
        .unwrap_or_else(|e| panic!("{}: {e}: a golden file is part of the format", path.display()))
}

/// What a snapshot takes.
pub(crate) fn used(store: &Store, tenant: &Name, snapshot: &str) -> crate::SnapshotUse {
    let usage = store.usage(tenant).unwrap();
    usage.snapshots.into_iter().find(|s| s.name.as_str() == snapshot).unwrap()
}

/// Layers as one, as those who write their maps read them.
pub(crate) fn merge(
    maps: &[std::os::fd::BorrowedFd<'_>],
) -> Result<crate::Merged, Box<dyn std::error::Error + Send + Sync>> {
    let merge = dayfly_vmm::disk::Merge::of(maps)?;
    let map = merge.map().encode();
    Ok(crate::Merged { map, runs: Box::new(merge.into_runs()) })
}

/// A snapshot of a VM, a clone of `from` if there is one, that writes a page of `seed` to block `seed` % 16 first.
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
    let data = store.open_vm_layer(&vm.writable, true)?;
    data.set_len(16 * 4096).unwrap();
    let block = u64::from(seed) % 16;
    data.write_all_at(&[seed; PAGE], block * 4096).unwrap();
    let mut map = dayfly_vmm::disk::layer::LayerMap::empty(16).unwrap();
    map.insert(block);
    let mut writer = store.snapshot_writer(&name(to))?;
    let freeze = writer.freeze(&vm.writable)?;
    writer.state().write_all_at(&[seed; 300], 0).unwrap();
    write(writer.memory(), memory);
    freeze.map.write_all_at(&map.encode(), 0).unwrap();
    vm.chain.push(freeze.frozen);
    let spec = SnapshotSpec { memory_bytes: memory.len() as u64, ..vm.spec(seed, None) };
    writer.saved().merging(merge).commit_paged(&spec, &PagedSpec::of(&name("one")))?;
    Ok(())
}
