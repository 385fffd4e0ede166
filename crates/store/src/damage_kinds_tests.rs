//! Damage of each kind to each kind of file, before and after the store has opened it: it is named,
//! never served, everything else works, and the next put of the content heals it.

use crate::blob::fault::{self, Unreadable};
use crate::fixture::{Vm, disk, name, put_image};
use crate::fixture_pages::{PAGE, bytes, ram};
use crate::objects::tree::CheckedFile;
use crate::{
    ChainLayer, CommitError, Digest, DiskFile, FileTree, KernelSpec, Meter, Object, PagedSpec,
    Scope, SnapshotSpec, Store,
};
use dayfly_units::VmId;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A snapshot, its image, its RAM and the seed of its layer. The two have nothing in common.
struct Sample {
    snapshot: &'static str,
    image: &'static str,
    seed: u8,
}

const BASE: Sample = Sample { snapshot: "base", image: "debian", seed: 1 };
const OTHER: Sample = Sample { snapshot: "other", image: "alpine", seed: 60 };

impl Sample {
    fn ram(&self) -> Vec<u8> {
        let own = ram(u64::from(self.seed) * 100..u64::from(self.seed) * 100 + 40);
        // A frame that is a block of the image.
        [disk(self.seed)[PAGE..2 * PAGE].to_vec(), own].concat()
    }

    fn working_set(&self) -> Vec<u8> {
        dayfly_units::sealed::seal(b"DFworkse", 1, &[self.seed; 600])
    }

    fn bake(&self, store: &Store) -> Result<(), CommitError> {
        let id = VmId::random();
        let image = store.image(&name(self.image))?.reference();
        let (writable, data) = store.create_vm_layer(id, 0)?;
        data.set_len(16 * PAGE as u64).unwrap();
        data.write_all_at(&[self.seed; PAGE], 3 * PAGE as u64).unwrap();
        drop(data);
        let memory = self.ram();
        let mut writer =
            store.snapshot_writer_in_memory(&name(self.snapshot), memory.len() as u64)?;
        let freeze = writer.freeze(&writable)?;
        writer.state().write_all_at(&[self.seed; 300], 0).unwrap();
        writer.memory().write_all_at(&memory, 0).unwrap();
        freeze.map.write_all_at(&[self.seed; 200], 0).unwrap();
        drop(freeze.map);
        let vm = Vm { id, image, chain: vec![freeze.frozen], writable };
        let spec = SnapshotSpec { memory_bytes: memory.len() as u64, ..vm.spec(self.seed, None) };
        let mut prepared = writer.saved().prepare(&spec, &[])?;
        prepared.keep_working_set(&self.working_set())?;
        let committed = prepared.commit_paged(&PagedSpec::of(&name("one")))?;
        assert!(matches!(vm.chain[..], [ChainLayer::Frozen(_)]));
        store.remove_vm_layers(&committed.replaced)?;
        store.remove_vm(id)?;
        Ok(())
    }

    /// Whether the snapshot is served; if so, every byte is right.
    fn is_served(&self, store: &Store, at: &str) -> bool {
        let Ok(open) = store.open_snapshot(&name(self.snapshot)) else { return false };
        assert!(bytes(&open.memory) == self.ram(), "{at}: RAM");
        assert!(bytes(&open.state) == [self.seed; 300], "{at}: state");
        let file = &open.disks[0];
        let layer = &file.layers[0];
        let image = checked(&file.base, file.tree.as_ref());
        let Some((image, data)) = image.zip(checked(&layer.data, layer.tree.as_ref())) else {
            return false;
        };
        assert!(image == disk(self.seed), "{at}: image");
        assert!(data[3 * PAGE] == self.seed, "{at}: layer");
        assert!(bytes(&layer.map) == [self.seed; 200], "{at}: map");
        let working_set = open.working_set.as_ref().map(bytes);
        assert!(working_set == Some(self.working_set()), "{at}: working set");
        true
    }
}

/// What a reader of a disk file gets; `None`: an error.
fn checked(file: &fs::File, tree: Option<&FileTree>) -> Option<Vec<u8>> {
    let mut all = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    let tree = tree.map(|tree| tree.try_clone().unwrap());
    let file = CheckedFile::new(DiskFile { file: file.try_clone().unwrap(), tree }).unwrap();
    file.read(0, &mut all).ok().map(|()| all)
}

fn put_kernel(store: &Store) {
    let both = vec![3; 9000];
    let spec = KernelSpec {
        release: "6.12".to_owned(),
        vmlinux_bytes: 5000,
        initrd_bytes: 4000,
        digest: Digest::of(&both),
        modules: None,
    };
    let body = zstd::encode_all(&both[..], 1).unwrap();
    store.put_kernel(&name("k"), &spec, &mut &body[..]).unwrap();
}

/// A file, the object that it belongs to, and what brings its content back.
type Harmed = (PathBuf, Object, fn(&Store));

/// A file of each kind that only `base` needs.
fn files(root: &Path, store: &Store) -> Vec<Harmed> {
    let again: fn(&Store) = |store| {
        store.remove_snapshot(&name("base")).unwrap();
        BASE.bake(store).unwrap();
    };
    // Another snapshot with the same content; `base` stays.
    let beside: fn(&Store) = |store| {
        Sample { snapshot: "beside", ..BASE }.bake(store).unwrap();
    };
    let image: fn(&Store) = |store| drop(put_image(store, BASE.image, BASE.seed).unwrap());
    let snapshot = root.join("snapshots/base");
    let layer = store.snapshot(&name("base")).unwrap().layer_ids()[0].to_string();
    let layer = root.join("layers").join(layer);
    let open = store.open_snapshot_pages(&name("one"), &name("base")).unwrap();
    let space = store.tenant(&name("one")).unwrap().space;
    let pack = space.find(&open.table.hashes()[0]).unwrap().unwrap().pack.path.clone();
    let digest = store.image(&name(BASE.image)).unwrap().manifest.disk.digest;
    vec![
        (pack, Object::Pack, beside),
        (snapshot.join("table"), Object::Snapshot, again),
        (snapshot.join("manifest"), Object::Snapshot, again),
        (snapshot.join("state"), Object::Snapshot, again),
        (snapshot.join("working-set"), Object::Snapshot, again),
        (layer.join("data"), Object::Layer, beside),
        (layer.join("map"), Object::Layer, beside),
        (root.join("images").join(BASE.image).join("disk"), Object::Image, image),
        (root.join("images").join(BASE.image).join("manifest"), Object::Image, image),
        (root.join("blocks").join(digest.to_string()), Object::BlockIndex, beside),
        (root.join("kernels/k/vmlinux"), Object::Kernel, put_kernel),
        (root.join("kernels/k/initrd"), Object::Kernel, put_kernel),
        (root.join("kernels/k/manifest"), Object::Kernel, put_kernel),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Harm {
    Flip,
    Truncate,
    Eio,
}

impl Harm {
    /// Harms the file in its first third, so that a pack loses a group and not its footer.
    fn to(self, file: &Path) -> Option<Unreadable> {
        if self == Self::Eio {
            return Some(fault::unreadable(file));
        }
        fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
        let open = fs::File::options().read(true).write(true).open(file).unwrap();
        let length = open.metadata().unwrap().len();
        if self == Self::Truncate {
            open.set_len(length / 2).unwrap();
        } else {
            let mut byte = [0];
            open.read_exact_at(&mut byte, length / 3).unwrap();
            open.write_all_at(&[byte[0] ^ 16], length / 3).unwrap();
        }
        None
    }
}

fn sample(root: &Path) -> Store {
    let store = Store::open(root).unwrap();
    for sample in [BASE, OTHER] {
        put_image(&store, sample.image, sample.seed).unwrap();
        sample.bake(&store).unwrap();
    }
    put_kernel(&store);
    store
}

#[test]
fn each_damage_to_each_kind_of_file_is_named_contained_and_healed() {
    let count = {
        let root = tempfile::tempdir().unwrap();
        files(root.path(), &sample(root.path())).len()
    };
    let mut cases = 0;
    for which in 0..count {
        for harm in [Harm::Flip, Harm::Truncate, Harm::Eio] {
            for opened_before in [false, true] {
                cases += 1;
                let root = tempfile::tempdir().unwrap();
                let mut store = sample(root.path());
                let (file, object, heal) = files(root.path(), &store).swap_remove(which);
                let short = file.strip_prefix(root.path()).unwrap();
                let at = format!("{} {harm:?}, opened before: {opened_before}", short.display());
                assert!(BASE.is_served(&store, &at), "{at}");
                let broken = if opened_before {
                    harm.to(&file)
                } else {
                    drop(store);
                    let broken = harm.to(&file);
                    store = Store::open(root.path()).unwrap();
                    broken
                };
                contained(&store, &file, object, &at);
                heal(&store);
                drop(broken);
                assert!(BASE.is_served(&store, &at), "{at}: it is healed");
                store.gc().unwrap();
                store.gc_pages().unwrap();
                let left = store.verify(&Scope::All, &Meter::default()).unwrap().damage;
                assert_eq!(left, [], "{at}");
                drop(store);
                let store = Store::open(root.path()).unwrap();
                assert!(BASE.is_served(&store, &at) && OTHER.is_served(&store, &at), "{at}");
            }
        }
    }
    println!("{cases} combinations of a file, a damage and its time");
}

/// The damage to `file` is named and not served, and all else works.
fn contained(store: &Store, file: &Path, object: Object, at: &str) {
    // A snapshot does not need these.
    let is_apart = matches!(object, Object::Kernel | Object::BlockIndex);
    let served = BASE.is_served(store, at);
    assert!(served || !is_apart, "{at}: refused");
    let report = store.verify(&Scope::All, &Meter::default()).unwrap();
    let path = file.to_str().unwrap();
    let named = report.damage.iter().any(|d| d.object == object && d.text.contains(path));
    assert!(named, "{at}: {:?}", report.damage);
    let others = report.damage.iter().filter(|d| {
        d.name == OTHER.snapshot || d.snapshots.iter().any(|name| name == OTHER.snapshot)
    });
    assert_eq!(others.count(), 0, "{at}: {:?}", report.damage);
    assert!(OTHER.is_served(store, at), "{at}: the other snapshot");
    // A new snapshot, a removal and a gc.
    Sample { snapshot: "new", ..OTHER }.bake(store).unwrap();
    store.remove_snapshot(&name("new")).unwrap();
    let is_manifest = file.ends_with("snapshots/base/manifest");
    assert_eq!(store.gc().is_err(), is_manifest, "{at}");
    assert_eq!(store.gc_pages().is_err(), file.ends_with("snapshots/base/table"), "{at}");
    let without = [name("base")].into();
    if is_manifest {
        assert!(store.gc_without(&without).is_ok(), "{at}");
    }
    if file.ends_with("snapshots/base/table") {
        store.gc_pages_of(&name("one"), &without, &Meter::default()).unwrap();
    }
    assert!(OTHER.is_served(store, at), "{at}: the other snapshot after a gc");
}
