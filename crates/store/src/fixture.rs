//! A small store for tests: one image of a few pages, and VMs whose layers the test writes instead
//! of a VMM.

use crate::blob::fault;
use crate::objects::manifest::KernelRef;
use crate::{
    ChainLayer, CommitError, Committed, Digest, DiskSpec, ImageRef, ImageSpec, SnapshotSpec, Store,
    VmLayer, sparse,
};
use dayfly_units::{CpuModel, ImageConfig, Name, VmId};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(crate) const IMAGE: &str = "debian";

pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// Bytes of a disk: pages of zeroes between pages of `seed`.
pub(crate) fn disk(seed: u8) -> Vec<u8> {
    let mut bytes = vec![0; 16 * 4096];
    bytes[4096..8192].fill(seed);
    bytes[5 * 4096..6 * 4096].fill(seed.wrapping_add(1));
    bytes
}

pub(crate) fn image_spec(bytes: &[u8]) -> ImageSpec {
    let file = tempfile::tempfile().unwrap();
    let digest = sparse::copy(&mut &bytes[..], &file, bytes.len() as u64).unwrap().digest;
    let config = ImageConfig { cmd: vec!["sh".to_owned()], ..ImageConfig::default() };
    ImageSpec { size_bytes: bytes.len() as u64, digest, source: "a test".to_owned(), config }
}

pub(crate) fn put_image(
    store: &Store,
    image: &str,
    seed: u8,
) -> Result<crate::ImageManifest, crate::PutError> {
    let bytes = disk(seed);
    store.put_image_raw(&name(image), &image_spec(&bytes), &mut bytes.as_slice())
}

/// A store that contains [`IMAGE`].
pub(crate) fn store(root: &Path) -> Store {
    let store = Store::open(root).unwrap();
    put_image(&store, IMAGE, 1).unwrap();
    store
}

/// Opens a store again that no process has open.
pub(crate) fn reopen(root: &Path) -> Store {
    Store::open(root).unwrap()
}

/// A daemon's record of a VM with one disk.
#[derive(Debug, Clone)]
pub(crate) struct Vm {
    pub(crate) id: VmId,
    pub(crate) image: ImageRef,
    pub(crate) chain: Vec<ChainLayer>,
    pub(crate) writable: VmLayer,
}

impl Vm {
    /// A VM whose disk is the image and an empty layer.
    pub(crate) fn boot(store: &Store) -> Self {
        let id = VmId::random();
        let image = store.image(&name(IMAGE)).unwrap().reference();
        Self { id, image, chain: Vec::new(), writable: store.create_vm_layer(id, 0).unwrap().0 }
    }

    /// A clone of a snapshot.
    pub(crate) fn clone_of(store: &Store, snapshot: &str) -> Self {
        let id = VmId::random();
        let open = store.open_snapshot(&name(snapshot)).unwrap();
        let chain = open.manifest.disks[0].layers.iter().map(|&l| ChainLayer::Stored(l)).collect();
        Self {
            id,
            image: open.disks[0].image.clone(),
            chain,
            writable: store.create_vm_layer(id, 0).unwrap().0,
        }
    }

    pub(crate) fn write(&self, store: &Store, seed: u8) {
        let file = store.open_vm_layer(&self.writable, true).unwrap();
        file.set_len(16 * 4096).unwrap();
        file.write_all_at(&[seed; 4096], 3 * 4096).unwrap();
    }

    pub(crate) fn spec(&self, seed: u8, parent: Option<&str>) -> SnapshotSpec {
        SnapshotSpec {
            parent: parent.map(name),
            ancestors: Vec::new(),
            kernel: KernelRef {
                name: name("6.12"),
                release: "6.12.0".to_owned(),
                digest: Digest([7; 32]),
            },
            vcpus: 1,
            max_vcpus: 0,
            cpu_model: CpuModel::Host,
            nets: 0,
            memory_bytes: 64 * 4096,
            agent_version: format!("0.{seed}"),
            config: ImageConfig::default(),
            labels: [("seed".to_owned(), seed.to_string())].into(),
            egress: None,
            disks: vec![DiskSpec {
                image: self.image.clone(),
                size_bytes: 16 * 4096,
                writable: true,
                layers: self.chain.clone(),
            }],
        }
    }

    /// Saves as daemon and VMM do together, commits, and releases the VM's own layers. The VM
    /// depends on its frozen layer from the save on, even if the commit fails.
    pub(crate) fn snapshot(
        &mut self,
        store: &Store,
        to: &str,
        seed: u8,
    ) -> Result<Committed, CommitError> {
        let committed = self.commit(store, to, seed)?;
        // What cannot be removed now is removed with the VM.
        let _left = store.remove_vm_layers(&committed.replaced);
        Ok(committed)
    }

    /// As [`Self::snapshot`], up to the commit.
    pub(crate) fn commit(
        &mut self,
        store: &Store,
        to: &str,
        seed: u8,
    ) -> Result<Committed, CommitError> {
        let mut writer = store.snapshot_writer(&name(to))?;
        let freeze = writer.freeze(&self.writable)?;
        let path = store.root();
        fault::step("the VMM writes", path).map_err(crate::IoError::new("saving", path))?;
        save(writer.state(), writer.memory(), &freeze.map, seed);
        drop((freeze.map, freeze.next_data));
        let saved = writer.saved();
        self.chain.push(freeze.frozen);
        self.writable = freeze.next;
        let committed = saved.commit(&self.spec(seed, None))?;
        self.chain =
            committed.manifest.disks[0].layers.iter().map(|&l| ChainLayer::Stored(l)).collect();
        Ok(committed)
    }
}

/// Writes the files that a VMM saves.
pub(crate) fn save(state: &File, memory: &File, map: &File, seed: u8) {
    state.write_all_at(&[seed; 300], 0).unwrap();
    memory.set_len(64 * 4096).unwrap();
    memory.write_all_at(&[seed; 5000], 40 * 4096).unwrap();
    map.write_all_at(&[seed ^ 0xff; 200], 0).unwrap();
}

/// A snapshot of a new VM, which is removed afterwards.
pub(crate) fn bake(store: &Store, to: &str, seed: u8) -> Result<Committed, CommitError> {
    let mut vm = Vm::boot(store);
    vm.write(store, seed);
    let result = vm.snapshot(store, to, seed);
    store.remove_vm(vm.id).map_err(CommitError::from).and(result)
}

/// Opens the snapshot and compares every byte with its seed.
pub(crate) fn assert_is(store: &Store, snapshot: &str, seed: u8) {
    let open = store.open_snapshot(&name(snapshot)).unwrap();
    assert_eq!(open.manifest.labels["seed"], seed.to_string());
    let all = |file: &File| {
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    assert_eq!(all(&open.state), [seed; 300]);
    let memory = all(&open.memory);
    assert_eq!(memory.len(), 64 * 4096);
    assert!(
        memory
            .iter()
            .enumerate()
            .all(|(i, &b)| b == if (40 * 4096..40 * 4096 + 5000).contains(&i) { seed } else { 0 })
    );
    assert_eq!(all(&open.disks[0].base), disk(1));
    let top = open.disks[0].layers.last().unwrap();
    assert_eq!(all(&top.map), [seed ^ 0xff; 200]);
    assert_eq!(all(&top.data)[3 * 4096], seed);
}

/// Every path below the store's root except the lock, for comparison.
pub(crate) fn tree(root: &Path) -> Vec<String> {
    fn walk(folder: &Path, root: &Path, into: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            into.push(path.strip_prefix(root).unwrap().display().to_string());
            if path.is_dir() {
                walk(&path, root, into);
            }
        }
    }
    let mut all = Vec::new();
    walk(root, root, &mut all);
    all.sort();
    all
}
