use super::*;
use crate::fixture_pages::golden;
use dayfly_units::CpuModel;
use std::path::Path;

pub(crate) fn file_ref(n: u8) -> FileRef {
    FileRef { digest: Digest([n; 32]), bytes: 8192, data_bytes: 4096 }
}

pub(crate) fn snapshot(name: &str, layers: &[u8]) -> SnapshotManifest {
    let layer = |&n: &u8| {
        let (data, map) = (file_ref(n), file_ref(n ^ 0x80));
        LayerRef { id: crate::LayerId::of(&data, &map), data, map }
    };
    SnapshotManifest {
        name: name.parse().unwrap(),
        created_unix_ms: 1_700_000_000_000,
        parent: Some("parent".parse().unwrap()),
        ancestors: vec![Digest([9; 32])],
        kernel: KernelRef {
            name: "6.12".parse().unwrap(),
            release: "6.12.0".to_owned(),
            digest: Digest([1; 32]),
        },
        vcpus: 2,
        max_vcpus: 0,
        cpu_model: CpuModel::Host,
        nets: 0,
        memory_bytes: 8192,
        agent_version: "0.1.0".to_owned(),
        config: ImageConfig { env: vec!["A=b".to_owned()], ..ImageConfig::default() },
        labels: [("k".to_owned(), "v".to_owned())].into(),
        disks: vec![DiskRef {
            image: ImageRef { name: "debian".parse().unwrap(), digest: Digest([2; 32]) },
            size_bytes: 1 << 30,
            writable: true,
            layers: layers.iter().map(layer).collect(),
        }],
        memory: file_ref(3),
        state: file_ref(4),
        trees: [(Digest([2; 32]), Digest([8; 32]))].into(),
        egress: None,
    }
}

fn read_back(bytes: &[u8]) -> Result<SnapshotManifest, Damage> {
    decode(Path::new("/store/snapshots/base/manifest"), bytes)
}

#[test]
fn a_manifest_reads_back() {
    let manifest = snapshot("base", &[5, 6]);
    assert_eq!(read_back(&encode(&manifest).unwrap()).unwrap(), manifest);
}

#[test]
fn every_truncation_and_every_flipped_bit_is_refused_with_its_file() {
    let whole = encode(&snapshot("base", &[5])).unwrap();
    for len in 0..whole.len() {
        let error = read_back(&whole[..len]).unwrap_err();
        assert!(error.to_string().starts_with("/store/snapshots/base/manifest: "), "{error}");
    }
    for bit in 0..whole.len() * 8 {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(matches!(read_back(&flipped), Err(Damage::Seal { .. })), "bit {bit}");
    }
}

#[test]
fn another_kind_and_another_version_are_reported_as_such() {
    let image = sealed::seal(&ImageManifest::MAGIC, 1, b"{}");
    let text = read_back(&image).unwrap_err().to_string();
    assert!(text.contains(r#"expected "DFsnaps\\n", got "DFimage\\n""#), "{text}");
    let future = sealed::seal(&SnapshotManifest::MAGIC, 8, b"{}");
    let text = read_back(&future).unwrap_err().to_string();
    assert!(text.contains("version at byte 40: expected 1 to 7, got 8"), "{text}");
}

#[test]
fn sealed_nonsense_is_refused_with_its_place() {
    let sealed = |json: &str| sealed::seal(&SnapshotManifest::MAGIC, 1, json.as_bytes());
    for (json, place) in
        [("", "line 1, column 0"), ("{}", "missing field `name`"), ("[1,", "line 1")]
    {
        let text = read_back(&sealed(json)).unwrap_err().to_string();
        assert!(
            text.contains(place) && text.contains("expected the JSON of a snapshot manifest"),
            "{text}"
        );
    }
    let good = snapshot("base", &[5]);
    let changed = |change: &dyn Fn(&mut SnapshotManifest)| {
        let mut manifest = good.clone();
        change(&mut manifest);
        read_back(&encode(&manifest).unwrap()).unwrap_err().to_string()
    };
    let text =
        changed(&|m| m.disks[0].layers[0].id = crate::LayerId::of(&file_ref(0), &file_ref(0)));
    assert!(text.contains("disks[0].layers[0].id: expected "), "{text}");
    let text = changed(&|m| _ = m.trees.insert(Digest([1; 32]), Digest([8; 32])));
    assert!(text.contains("trees: expected digests of the disks' files, got 0101"), "{text}");
    let text = changed(&|m| m.memory.data_bytes = 9000);
    assert!(text.contains("memory.data_bytes: expected at most 8192, got 9000"), "{text}");
    let text = changed(&|m| m.max_vcpus = 1);
    assert!(text.contains("max_vcpus: expected at least 2, got 1"), "{text}");
    let text = changed(&|m| m.disks.clear());
    assert!(text.contains("disks: expected at least 1, got 0"), "{text}");
    let text = changed(&|m| m.disks[0].layers = vec![m.disks[0].layers[0]; 65]);
    assert!(text.contains("disks[0].layers: expected at most 64, got 65"), "{text}");
    let text = changed(&|m| m.ancestors = vec![Digest([9; 32]); 9]);
    assert!(text.contains("ancestors: expected at most 8, got 9"), "{text}");
    let text = changed(&|m| m.disks = vec![m.disks[0].clone(); 9]);
    assert!(text.contains("disks: expected at most 8, got 9"), "{text}");
}

#[test]
fn a_manifest_that_could_not_be_read_back_is_not_written() {
    let mut manifest = snapshot("base", &[]);
    manifest.labels.insert("k".to_owned(), "x".repeat(2 << 20));
    assert!(encode(&manifest).unwrap_err().to_string().contains("expected at most 1048576 bytes"));
}

/// Snapshots and images outlive a version of dayfly. If this test fails, an old store is
/// unreadable: raise `VERSION`, read both versions, and add a line.
#[test]
fn the_bytes_of_each_version_are_frozen() {
    let frozen = |golden_file: &str, bytes: Vec<u8>, digest: &str| {
        let frozen = golden(golden_file, &bytes);
        assert_eq!(Digest::of(&frozen).to_string(), digest, "{golden_file}");
        assert!(frozen == bytes, "{golden_file}: this version writes other bytes");
        frozen
    };
    let file = file_ref(3);
    let image = ImageManifest {
        name: "debian".parse().unwrap(),
        disk: file,
        created_unix_ms: 1,
        source: "a folder".to_owned(),
        config: ImageConfig::default(),
    };
    let mut kernel = KernelManifest {
        name: "6.12".parse().unwrap(),
        release: "6.12.0".to_owned(),
        digest: Digest([1; 32]),
        vmlinux: file,
        initrd: file,
        modules: Some(ImageRef { name: "modules-1".parse().unwrap(), digest: file.digest }),
        created_unix_ms: 1,
    };
    let path = Path::new("/store/manifest");
    let digest = "34a6edfda9982aef61bb6f3bc62bb2ad9df6bfb7fa7751c79a211f6f139a090d";
    let bytes = frozen("image-1", encode(&image).unwrap(), digest);
    assert_eq!(decode::<ImageManifest>(path, &bytes).unwrap(), image);
    let digest = "f924bee8a2d542871fcb8940ffadf0bb77ad651bbafe21d11ad8f0c375289876";
    let bytes = frozen("kernel-2", encode(&kernel).unwrap(), digest);
    assert_eq!(decode::<KernelManifest>(path, &bytes).unwrap(), kernel);
    // Version 1, without modules.
    kernel.modules = None;
    let json = serde_json::to_string_pretty(&kernel).unwrap();
    let json = json.replace("  \"modules\": null,\n", "");
    let first = sealed::seal(&KernelManifest::MAGIC, 1, json.as_bytes());
    let digest = "ad7827daf71bd972f20bfdd3257fd56edef9b9905aa97e25709013672177424b";
    let bytes = frozen("kernel-1", first, digest);
    assert_eq!(decode::<KernelManifest>(path, &bytes).unwrap(), kernel);
    // The ids of its layers are frozen with it.
    let mut manifest = snapshot("base", &[5, 6]);
    let rules = "*.example.org:443,192.0.2.0/24:tcp:1-1023,198.51.100.7:icmp";
    let egress = Some(rules.parse().unwrap());
    let limited = SnapshotManifest { egress, ..manifest.clone() };
    let digest = "2bdaf3b5d2fdeff06bce6481b7ff87475c399b9f0a456e8eb5d21d306372b79f";
    let bytes = frozen("snapshot-5", encode(&limited).unwrap(), digest);
    assert_eq!(read_back(&bytes).unwrap(), limited);
    let level = SnapshotManifest { cpu_model: CpuModel::V3, ..limited.clone() };
    let digest = "3ec8c33b25a964040ec8cb409952d97d041dfafb46a516a21327ce76812d895a";
    let bytes = frozen("snapshot-6", encode(&level).unwrap(), digest);
    assert_eq!(read_back(&bytes).unwrap(), level);
    let sized = SnapshotManifest { max_vcpus: 16, ..manifest.clone() };
    let digest = "365447eebb09fc8fd0ae3e3e802044fceab7c766d609435451d05f3fa33afd84";
    let bytes = frozen("snapshot-7", encode(&sized).unwrap(), digest);
    assert_eq!(read_back(&bytes).unwrap(), sized);
    let digest = "57c99557a6ee90132042a755320fae456efda2e3e7802449c61dcdae29d2bcd0";
    let bytes = frozen("snapshot-4", encode(&manifest).unwrap(), digest);
    assert_eq!(read_back(&bytes).unwrap(), manifest);

    // Version 3, without the roots of hash trees.
    let without_trees = |manifest: &SnapshotManifest| {
        let json = serde_json::to_string_pretty(manifest).unwrap();
        json.replace(",\n  \"trees\": {}", "")
    };
    manifest.trees.clear();
    let third = sealed::seal(&SnapshotManifest::MAGIC, 3, without_trees(&manifest).as_bytes());
    let digest = "05fc78ee07bc04ab3522196e1318d2587839df7af137b7d8a4045982736afc28";
    assert_eq!(read_back(&frozen("snapshot-3", third, digest)).unwrap(), manifest);
    // Version 2, without ancestors.
    manifest.ancestors.clear();
    let json = without_trees(&manifest).replace("  \"ancestors\": [],\n", "");
    let second = sealed::seal(&SnapshotManifest::MAGIC, 2, json.as_bytes());
    let digest = "6e45e95c7f83c2080c6d18d5e3870fecc3dd1c5f22ca9fcf0ab36c73926f3253";
    assert_eq!(read_back(&frozen("snapshot-2", second, digest)).unwrap(), manifest);
    // Version 1, without network devices.
    let json = json.replace("  \"nets\": 0,\n", "");
    let first = sealed::seal(&SnapshotManifest::MAGIC, 1, json.as_bytes());
    let digest = "0dadd0fb9ba46efe366f60022128290a7800c9d5f2be916b0bce7d3ce25ce994";
    assert_eq!(read_back(&frozen("snapshot-1", first, digest)).unwrap(), manifest);
}
