//! RAM for tests, and snapshots of it in pages.

use crate::fixture::{IMAGE, Vm, disk, name};
use crate::{CommitError, Committed, PagedSpec, Store};
use dayfly_units::Name;
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
    let vm = Vm::boot(store);
    vm.write(store, seed);
    let result = (|| {
        let mut writer = store.snapshot_writer(&name(to))?;
        let freeze = writer.freeze(&vm.writable)?;
        writer.state().write_all_at(&[seed; 300], 0).unwrap();
        write(writer.memory(), memory);
        freeze.map.write_all_at(&[seed ^ 0xff; 200], 0).unwrap();
        let mut spec = vm.spec(seed, None);
        spec.memory_bytes = memory.len() as u64;
        spec.disks[0].layers = vec![freeze.frozen];
        writer.saved().commit_paged(&spec, pages)
    })();
    store.remove_vm(vm.id).map_err(CommitError::from).and(result)
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
