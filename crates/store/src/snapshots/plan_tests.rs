use super::*;
use crate::fixture::{name, store};
use crate::fixture_pages::{bake_paged, bytes, image_block, ram};
use crate::memory::Kind;
use crate::{PagedSpec, Store};
use std::os::unix::fs::FileExt;

/// RAM with duplicate pages, zeroes, and a block of the disk.
fn memory() -> Vec<u8> {
    let mut memory = ram((0..120).chain(5..15).chain([7, 7, 14]));
    memory.extend(image_block().1);
    memory.resize(memory.len().next_multiple_of(2 << 20), 0);
    memory
}

fn planned() -> (tempfile::TempDir, Store, OpenSnapshot, Plan) {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path());
    bake_paged(&store, "s", 3, &memory(), &PagedSpec::of(&name("own"))).unwrap();
    let (open, plan) = store.open_lazily(&name("s")).unwrap();
    (root, store, open, plan.unwrap())
}

fn reader(plan: Plan) -> Result<PageReader, PagesError> {
    PageReader::open(&plan.table, &plan.places, plan.packs, plan.disks)
}

/// All of RAM, read through a reader.
fn read(reader: &PageReader) -> Result<Vec<u8>, PagesError> {
    let table = reader.table();
    let mut all = vec![0; table.frames() as usize * PAGE];
    let mut buffer = GroupBuffer::default();
    for run in table.runs() {
        for n in 0..run.frames {
            let to = &mut all[(run.first + n) as usize * PAGE..][..PAGE];
            match run.kind {
                Kind::Zero | Kind::Free => {}
                Kind::Page { hash } => {
                    reader.read_group(reader.group_of(hash + n).unwrap(), &mut buffer)?;
                    to.copy_from_slice(reader.page(hash + n, &buffer)?);
                }
                Kind::Disk { disk, layer, block } => {
                    reader.read_blocks(disk, layer, block + n, to)?
                }
            }
        }
    }
    Ok(all)
}

#[test]
fn a_reader_has_every_frame_whatever_becomes_of_the_store() {
    let (_root, store, open, plan) = planned();
    assert_eq!(bytes(&open.memory).len(), memory().len());
    assert!(bytes(&open.memory).iter().all(|b| *b == 0), "RAM is missing as yet");
    let reader = reader(plan).unwrap();
    assert!(reader.table().runs().iter().any(|run| matches!(run.kind, Kind::Disk { .. })));
    drop(open);
    store.remove_snapshot(&name("s")).unwrap();
    assert!(store.gc_pages().unwrap().packs > 0, "its packs are retired");
    assert!(read(&reader).unwrap() == memory());
}

#[test]
fn memory_is_read_only_to_who_opens_it_and_keeps_its_length() {
    let (_root, _store, open, plan) = planned();
    assert!(open.memory.set_len(0).is_err() && plan.memory.set_len(0).is_err());
    assert!(open.memory.write_at(&[1], 0).is_err());
    plan.memory.write_all_at(&[9; PAGE], 0).unwrap();
    assert_eq!(bytes(&open.memory)[..PAGE], [9; PAGE]);
}

#[test]
fn a_damaged_page_is_named_and_not_given() {
    let (root, _store, _open, plan) = planned();
    let pack =
        std::fs::read_dir(root.path().join("pages/own")).unwrap().next().unwrap().unwrap().path();
    let mut permissions = pack.metadata().unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o600);
    std::fs::set_permissions(&pack, permissions).unwrap();
    let file = File::options().read(true).write(true).open(&pack).unwrap();
    let reader = reader(plan).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 100).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 100).unwrap();
    let error = read(&reader).unwrap_err().to_string();
    let id = pack.file_name().unwrap().to_str().unwrap().to_owned();
    assert!(error.contains(&id) && error.contains("group"), "{error}");
}

#[test]
fn a_plan_that_lies_is_refused() {
    let refused = |change: &dyn Fn(&mut Plan), what: &str| {
        let (_root, _store, _open, mut plan) = planned();
        change(&mut plan);
        let error = reader(plan).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(&|plan| plan.places.truncate(plan.places.len() - 1), "bytes of places");
    refused(&|plan| plan.places[3] = 1, "places of pages");
    refused(&|plan| plan.places[6] = 1, "places of pages");
    refused(&|plan| plan.packs.clear(), "places of pages");
    refused(&|plan| plan.disks.clear(), "files of disks");
    refused(&|plan| plan.table[60] ^= 1, "table of a plan");
    refused(&|plan| plan.packs[0] = tempfile::tempfile().unwrap(), "pack 0 of a plan");
    // A place of another page: the page's hash differs from the table's.
    let (_root, _store, _open, mut plan) = planned();
    plan.places.copy_within(8..16, 0);
    assert!(read(&reader(plan).unwrap()).is_err());
}
