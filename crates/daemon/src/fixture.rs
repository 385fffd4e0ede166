//! What unit tests of several rooms need.

use crate::config::{Config, Deadlines};
use crate::vm::budget::{Budget, Reservation};
use dayfly_host::numa::Node;
use dayfly_store::{
    ChainLayer, Digest, DiskSpec, ImageConfig, ImageSpec, KernelRef, PagedSpec, SnapshotSpec, Store, sparse,
};
use dayfly_units::{Name, VmId};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// A configuration with all folders below `folder`, and no VMM program.
pub(crate) fn config(folder: &Path) -> Config {
    Config {
        state: folder.join("s"),
        run: folder.join("r"),
        vmm: "/nonexistent/dayfly-vmm".into(),
        overcommit: 100,
        network: None,
        pool: 0,
        deadlines: Deadlines::default(),
    }
}

/// A host with one node that has enough.
pub(crate) fn nodes() -> Vec<Node> {
    vec![Node { number: None, cpus: Vec::new(), memory_bytes: 1 << 40 }]
}

/// Some memory of such a host.
pub(crate) fn memory() -> Reservation {
    Arc::new(Budget::new(&nodes(), 100)).reserve(64 << 20, None).unwrap()
}

/// Stores the image `debian`, unless it is there, and a snapshot of a VM on it, which is gone: RAM of one page of each of `pages`.
pub(crate) fn snapshot(store: &Store, tenant: &str, to: &str, pages: std::ops::Range<u64>) {
    let name = |text: &str| -> Name { text.parse().unwrap() };
    let disk: Vec<u8> = (0..8_u8).flat_map(|n| [n; 4096]).collect();
    if store.image(&name("debian")).is_err() {
        let scratch = tempfile::tempfile().unwrap();
        let digest = sparse::copy(&mut &disk[..], &scratch, disk.len() as u64).unwrap().digest;
        let (source, config) = (String::new(), ImageConfig::default());
        let spec = ImageSpec { size_bytes: disk.len() as u64, digest, source, config };
        store.put_image_raw(&name("debian"), &spec, &mut disk.as_slice()).unwrap();
    }
    let vm = VmId::random();
    let (layer, data) = store.create_vm_layer(vm, 0).unwrap();
    data.set_len(disk.len() as u64).unwrap();
    data.write_all_at(to.as_bytes(), 0).unwrap();
    let mut writer = store.snapshot_writer(&name(to)).unwrap();
    let freeze = writer.freeze(&layer).unwrap();
    freeze.map.write_all_at(&[1; 100], 0).unwrap();
    writer.state().write_all_at(&[2; 300], 0).unwrap();
    let memory_bytes = (pages.end - pages.start) * 4096;
    writer.memory().set_len(memory_bytes).unwrap();
    for (frame, page) in (0..).zip(pages) {
        let digest = Digest::of(&page.to_le_bytes());
        let bytes: Vec<u8> = (0..128).flat_map(|_| digest.0).collect();
        writer.memory().write_all_at(&bytes, frame * 4096).unwrap();
    }
    let image = store.image(&name("debian")).unwrap().reference();
    let layers: Vec<ChainLayer> = vec![freeze.frozen];
    let spec = SnapshotSpec {
        parent: None,
        kernel: KernelRef { name: name("6.12"), release: "6.12".into(), digest: Digest([7; 32]) },
        vcpus: 1,
        nets: 0,
        memory_bytes,
        agent_version: "0".into(),
        config: ImageConfig::default(),
        labels: [].into(),
        disks: vec![DiskSpec { image, size_bytes: disk.len() as u64, writable: true, layers }],
    };
    writer.saved().commit_paged(&spec, &PagedSpec::of(&name(tenant))).unwrap();
    store.remove_vm(vm).unwrap();
}
