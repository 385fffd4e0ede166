//! docker archives and OCI layouts: which image is selected, and what is verified.

use super::*;
use crate::disk::blobs::{Blobs, sha256};
use crate::disk::choice::Wanted;
use crate::disk::{Listed, Listing, Source, oci};
use dayfly_units::ImageConfig;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

type Files = BTreeMap<String, Vec<u8>>;
type Pack = fn(&[u8]) -> Vec<u8>;

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

fn zstd(data: &[u8]) -> Vec<u8> {
    zstd::encode_all(data, 1).unwrap()
}

fn xz(data: &[u8]) -> Vec<u8> {
    let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

fn plain(data: &[u8]) -> Vec<u8> {
    data.to_vec()
}

fn config(layers: &[Vec<u8>], architecture: &str) -> Vec<u8> {
    let diffs: Vec<String> = layers.iter().map(|l| sha256(l)).collect();
    json!({
        "os": "linux", "architecture": architecture,
        "config": {
            "Entrypoint": ["/bin/x"], "Cmd": ["a", "b"], "Env": ["A=1"], "WorkingDir": "/w",
            "User": "7:8",
        },
        "rootfs": {"type": "layers", "diff_ids": diffs},
    })
    .to_string()
    .into_bytes()
}

/// Adds a blob; returns its descriptor.
fn blob(files: &mut Files, kind: &str, data: &[u8]) -> Value {
    let digest = sha256(data);
    files.insert(format!("blobs/{}", digest.replace(':', "/")), data.to_vec());
    json!({"mediaType": kind, "digest": digest, "size": data.len()})
}

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Adds an image whose layers are in turn uncompressed, gzip and zstd; returns its manifest's
/// descriptor.
fn image(files: &mut Files, layers: &[Vec<u8>], architecture: &str) -> Value {
    let config =
        blob(files, "application/vnd.oci.image.config.v1+json", &config(layers, architecture));
    let packers: [(&str, Pack); 3] = [("", plain), ("+gzip", gzip), ("+zstd", zstd)];
    let layers: Vec<Value> = layers
        .iter()
        .zip(packers.iter().cycle())
        .map(|(data, (suffix, pack))| blob(files, &format!("{LAYER}{suffix}"), &pack(data)))
        .collect();
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers}).to_string();
    blob(files, MANIFEST, manifest.as_bytes())
}

fn layers() -> Vec<Vec<u8>> {
    vec![
        archive(&[
            dir("etc"),
            file("etc/a", b"1"),
            file("etc/b", b"2"),
            dir("gone"),
            file("gone/x", b"3"),
        ]),
        archive(&[file("etc/.wh.a", b""), file("gone/.wh..wh..opq", b""), file("gone/y", b"4")]),
        archive(&[file("etc/b", b"5"), file("c", b"6")]),
    ]
}

const EXPECTED: [&str; 6] =
    ["/ 755", "/c 644 \"6\"", "/etc/ 755", "/etc/b 644 \"5\"", "/gone/ 755", "/gone/y 644 \"4\""];

fn index(files: &mut Files, manifests: &[Value]) {
    let text = json!({"schemaVersion": 2, "manifests": manifests}).to_string();
    files.insert("index.json".to_owned(), text.into_bytes());
    files.insert("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
}

fn named(mut descriptor: Value, name: &str) -> Value {
    descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": name});
    descriptor
}

fn platform(mut descriptor: Value, architecture: &str) -> Value {
    descriptor["platform"] = json!({"os": "linux", "architecture": architecture});
    descriptor
}

fn write_folder(files: &Files, folder: &Path) {
    for (name, data) in files {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, data).unwrap();
    }
}

fn write_tar(files: &Files, path: &Path) {
    let mut builder = tar::Builder::new(std::fs::File::create(path).unwrap());
    for (name, data) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        builder.append_data(&mut header, name, data.as_slice()).unwrap();
    }
    builder.into_inner().unwrap();
}

fn read(blobs: &Blobs, reference: Option<&str>) -> Result<(Vec<String>, ImageConfig), BuildError> {
    let folder = tempfile::tempdir().unwrap();
    let mut ignored = |_: Progress<'_>| ();
    let mut spool = Spool::new(folder.path(), Limits::default(), &mut ignored);
    let mut tree = Tree::new(1000);
    let path = PathBuf::from("source");
    let from = if blobs.has("manifest.json") { oci::docker } else { oci::layout };
    let wanted = Wanted { image: reference, cpu_level: 3 };
    let run = from(blobs, &path, wanted, &mut tree, &mut spool)?;
    Ok((text(&tree), run))
}

/// Reads `files` as a folder and as an archive; both results must agree.
fn both(files: &Files, reference: Option<&str>) -> Result<(Vec<String>, ImageConfig), String> {
    let temp = tempfile::tempdir().unwrap();
    let (folder, tar) = (temp.path().join("layout"), temp.path().join("a.tar"));
    write_folder(files, &folder);
    write_tar(files, &tar);
    let one = read(&Blobs::Folder(folder), reference).map_err(|e| e.to_string());
    let two = read(&Blobs::archive(&tar).unwrap(), reference).map_err(|e| e.to_string());
    assert_eq!(one.as_ref().ok(), two.as_ref().ok(), "{one:?} {two:?}");
    one
}

fn fails(files: &Files, reference: Option<&str>, words: &[&str]) {
    let text = both(files, reference).unwrap_err();
    assert!(words.iter().all(|w| text.contains(w)), "{words:?} in {text}");
}

#[test]
fn an_oci_layout_with_every_compression() {
    let mut files = Files::new();
    let manifest = image(&mut files, &layers(), "amd64");
    index(&mut files, &[manifest]);
    let (tree, run) = both(&files, None).unwrap();
    assert_eq!(tree, EXPECTED);
    assert_eq!(
        (run.entrypoint, run.cmd),
        (vec!["/bin/x".to_owned()], vec!["a".to_owned(), "b".to_owned()])
    );
    assert_eq!(
        (run.env, run.workdir, run.user),
        (vec!["A=1".to_owned()], "/w".to_owned(), "7:8".to_owned())
    );
}

#[test]
fn an_index_of_platforms_gives_the_one_for_amd64() {
    let mut files = Files::new();
    let arm = platform(image(&mut files, &[archive(&[file("arm", b"")])], "arm64"), "arm64");
    let amd = platform(image(&mut files, &layers(), "amd64"), "amd64");
    let nested = json!({"schemaVersion": 2, "manifests": [arm.clone(), amd]}).to_string();
    let nested = blob(&mut files, INDEX, nested.as_bytes());
    index(&mut files, &[nested]);
    assert_eq!(both(&files, None).unwrap().0, EXPECTED);
    index(&mut files, std::slice::from_ref(&arm));
    fails(&files, None, &["expected an image for linux/amd64, at most variant v3", "got none"]);
    // An index that claims a wrong platform.
    index(&mut files, &[platform(arm, "amd64")]);
    fails(&files, None, &["expected linux/amd64, got linux/arm64"]);
}

/// An image with the file `name` for a variant of amd64.
fn variant(files: &mut Files, name: &str, variant: &str) -> Value {
    let mut one = platform(image(files, &[archive(&[file(name, b"")])], "amd64"), "amd64");
    one["platform"]["variant"] = json!(variant);
    one
}

#[test]
fn of_several_levels_the_highest_that_guests_have_is_taken() {
    let mut files = Files::new();
    let arm = platform(image(&mut files, &[archive(&[file("arm", b"")])], "arm64"), "arm64");
    let of = |files: &mut Files, levels: &[&str]| -> Vec<Value> {
        levels.iter().map(|level| variant(files, &format!("is{level}"), level)).collect()
    };
    for (levels, best) in [
        (vec!["", "v2"], "isv2"),
        (vec!["v3", "v2"], "isv3"),
        (vec!["v4", "v1"], "isv1"),
        (vec!["v2", "", "v9"], "isv2"),
    ] {
        let expected = ["/ 755", &format!("/{best} 644 \"\"")];
        // In a nested index, with a name or without one, or in index.json itself.
        let mut all = of(&mut files, &levels);
        all.insert(1, arm.clone());
        let text = json!({"schemaVersion": 2, "manifests": all}).to_string();
        let nested = blob(&mut files, INDEX, text.as_bytes());
        for top in [vec![nested.clone()], vec![named(nested, "one")], all.clone()] {
            index(&mut files, &top);
            assert_eq!(both(&files, None).unwrap().0, expected, "{levels:?}");
        }
        // A digest selects any of them, and the platform with it.
        for (level, one) in levels.iter().zip(of(&mut files, &levels)) {
            let digest = one["digest"].as_str().unwrap();
            let expected = ["/ 755", &format!("/is{level} 644 \"\"")];
            assert_eq!(both(&files, Some(digest)).unwrap().0, expected);
        }
        let digest = arm["digest"].as_str().unwrap();
        fails(&files, Some(digest), &["expected linux/amd64, got linux/arm64"]);
    }
    // What is not wanted may be of a kind that is unknown, or not there.
    let one = variant(&mut files, "one", "v1");
    let text = json!({"schemaVersion": 2, "manifests": [one.clone()]}).to_string();
    let nested = blob(&mut files, INDEX, text.as_bytes());
    let absent = json!({"mediaType": INDEX, "digest": sha256(b"absent"), "size": 6});
    let signature = json!({"mediaType": "text/signature", "digest": sha256(b"s"), "size": 1});
    let digest = one["digest"].as_str().unwrap();
    for top in [vec![absent, one.clone()], vec![signature, nested]] {
        index(&mut files, &top);
        assert_eq!(both(&files, Some(digest)).unwrap().0, ["/ 755", "/one 644 \"\""]);
    }
    let only = of(&mut files, &["v4"]);
    index(&mut files, &only);
    fails(&files, None, &["expected an image for linux/amd64, at most variant v3", "got none"]);
    fails(&files, Some(&format!("sha256:{}", "0".repeat(64))), &["expected one image, got 0"]);
}

#[test]
fn several_images_ask_for_one() {
    let mut files = Files::new();
    let one = named(image(&mut files, &layers(), "amd64"), "one");
    let two = named(image(&mut files, &[archive(&[file("two", b"")])], "amd64"), "two");
    index(&mut files, &[one, two]);
    fails(&files, None, &["expected one image, got 2", "one, two"]);
    fails(&files, Some("three"), &["got 0", "one, two"]);
    assert_eq!(both(&files, Some("one")).unwrap().0, EXPECTED);
    assert_eq!(both(&files, Some("two")).unwrap().0, ["/ 755", "/two 644 \"\""]);
}

/// `docker save` before version 25: a folder per layer, and a link if two images share a layer.
fn saved(files: &mut Files, name: &str, tag: &str, layers: &[Vec<u8>], pack: Pack) -> Value {
    let config = config(layers, "amd64");
    let config_name = format!("{}.json", &sha256(&config)[7..]);
    files.insert(config_name.clone(), config);
    let names: Vec<String> = (0..layers.len()).map(|i| format!("{name}{i}/layer.tar")).collect();
    for (name, data) in names.iter().zip(layers) {
        files.insert(name.clone(), pack(data));
    }
    json!({"Config": config_name, "RepoTags": [tag], "Layers": names})
}

#[test]
fn docker_archives_old_and_new() {
    for pack in [plain as Pack, gzip, zstd] {
        let mut files = Files::new();
        let one = saved(&mut files, "l", "one:latest", &layers(), pack);
        let two = saved(&mut files, "m", "two:1", &[archive(&[file("two", b"")])], pack);
        files.insert("manifest.json".to_owned(), json!([one]).to_string().into_bytes());
        assert_eq!(both(&files, None).unwrap().0, EXPECTED);
        files.insert("manifest.json".to_owned(), json!([one, two]).to_string().into_bytes());
        fails(&files, None, &["expected one image, got 2", "one:latest, two:1"]);
        for name in ["one:latest", "one"] {
            assert_eq!(both(&files, Some(name)).unwrap().0, EXPECTED);
        }
        let id = one["Config"].as_str().unwrap();
        assert_eq!(both(&files, Some(&id[..12])).unwrap().0, EXPECTED);
        // A layer that does not match the config's `diff_id`.
        files.insert("l1/layer.tar".to_owned(), archive(&[file("evil", b"")]));
        fails(&files, Some("one"), &["l1/layer.tar", "expected sha256:", "got sha256:"]);
    }
}

#[test]
fn a_docker_archive_with_a_link_to_a_shared_layer() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("a.tar");
    let mut files = Files::new();
    let one = saved(&mut files, "l", "one:latest", &layers(), plain);
    files.insert("manifest.json".to_owned(), json!([one]).to_string().into_bytes());
    let shared = files.remove("l0/layer.tar").unwrap();
    let mut bytes: Vec<Vec<u8>> = files.iter().map(|(name, data)| file(name, data)).collect();
    bytes.push(symlink("l0/layer.tar", "../shared/layer.tar"));
    bytes.push(file("shared/layer.tar", &shared));
    std::fs::write(&path, archive(&bytes)).unwrap();
    assert_eq!(read(&Blobs::archive(&path).unwrap(), None).unwrap().0, EXPECTED);
    // A link that leads out of the archive has no target; no file of the host is opened.
    bytes.truncate(bytes.len() - 2);
    bytes.push(symlink("l0/layer.tar", "../../../../../../etc/passwd"));
    std::fs::write(&path, archive(&bytes)).unwrap();
    assert!(matches!(read(&Blobs::archive(&path).unwrap(), None), Err(BuildError::Io { .. })));
}

#[test]
fn every_blob_is_verified() {
    let mut files = Files::new();
    let manifest = image(&mut files, &layers(), "amd64");
    index(&mut files, &[manifest]);
    for name in files.keys().filter(|n| n.starts_with("blobs/")).cloned().collect::<Vec<_>>() {
        let mut flipped = files.clone();
        let data = flipped.get_mut(&name).unwrap();
        let middle = data.len() / 2;
        data[middle] ^= 1;
        assert!(both(&flipped, None).is_err(), "{name} changed");
        let mut short = files.clone();
        short.get_mut(&name).unwrap().pop();
        fails(&short, None, &["expected", "got"]);
        let mut long = files.clone();
        long.get_mut(&name).unwrap().push(b' ');
        fails(&long, None, &["expected", "got"]);
        let mut gone = files.clone();
        gone.remove(&name);
        assert!(both(&gone, None).is_err(), "{name} missing");
    }
}

#[test]
fn documents_that_make_no_sense() {
    let mut files = Files::new();
    let mut manifest = image(&mut files, &layers(), "amd64");
    manifest["digest"] = json!("sha256:../../../../etc/passwd");
    index(&mut files, &[manifest]);
    fails(&files, None, &["digest", "64 hexadecimal digits", "etc/passwd"]);
    files.insert("index.json".to_owned(), b"{\"manifests\": 7}".to_vec());
    fails(&files, None, &["index.json", "line 1 column", "expected"]);
    files.insert("index.json".to_owned(), vec![b' '; 5 << 20]);
    fails(&files, None, &["index.json", "at most 4194304 bytes", "5242880"]);
    // An index cannot name itself, because it would contain its own digest; a deep index can be
    // made.
    let mut files = Files::new();
    let mut below = image(&mut files, &layers(), "amd64");
    for _ in 0..10 {
        let text = json!({"schemaVersion": 2, "manifests": [below]}).to_string();
        below = blob(&mut files, INDEX, text.as_bytes());
    }
    index(&mut files, &[below]);
    fails(&files, None, &["indices deep"]);
    // What an index says about itself goes to each manifest in it, so an index of many manifests
    // must not be long-winded. Other annotations are not kept.
    let mut files = Files::new();
    let one = image(&mut files, &layers(), "amd64");
    let many = json!({"manifests": vec![platform(one.clone(), "arm64"); 5000]}).to_string();
    let below = blob(&mut files, INDEX, many.as_bytes());
    index(&mut files, &[below]);
    fails(&files, None, &["at most 4096 manifests", "got 5001"]);
    index(&mut files, &[named(one.clone(), &"n".repeat(4097))]);
    fails(&files, None, &["name of an image", "at most 4096 bytes", "4097"]);
    let mut annotated = one;
    annotated["annotations"] = json!({"other": "x".repeat(1 << 20)});
    index(&mut files, &[annotated]);
    assert_eq!(both(&files, None).unwrap().0, EXPECTED);
    // Encrypted layers are refused.
    let mut files = Files::new();
    let config = blob(
        &mut files,
        "application/vnd.oci.image.config.v1+json",
        &config(&layers()[..1], "amd64"),
    );
    let layer = blob(&mut files, &format!("{LAYER}+gzip+encrypted"), &layers()[0]);
    let text = json!({"schemaVersion": 2, "config": config, "layers": [layer]}).to_string();
    let manifest = blob(&mut files, MANIFEST, text.as_bytes());
    index(&mut files, &[manifest]);
    fails(&files, None, &["media type of a layer", "encrypted"]);
}

/// An image of a listing: its names, its digest, and the tree that it gives.
type Known = (Vec<String>, String, Vec<String>);

/// The images of an archive, which are the same in each compression.
fn listed(files: &Files) -> Result<Vec<Known>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("images.tar");
    write_tar(files, &path);
    let tar = std::fs::read(&path).unwrap();
    let packers: [Pack; 4] = [plain, gzip, zstd, xz];
    let mut found: Vec<_> = packers
        .iter()
        .map(|pack| {
            std::fs::write(&path, pack(&tar)).unwrap();
            let cache = folder.path().join("cache");
            let opened = Listing::open(&path, Some(&cache), Limits::default(), &mut |_| ());
            let listing = opened.map_err(|error| error.to_string())?;
            let one = |listed: &Listed| {
                let Source::Loaded { path: plain, image, archive } = listing.source(listed) else {
                    panic!("another source");
                };
                assert_eq!(archive, path);
                let blobs = Blobs::archive(&plain).unwrap();
                let (tree, _) = read(&blobs, image.as_deref()).map_err(|e| e.to_string())?;
                Ok((listed.names.clone(), listed.digest.clone(), tree))
            };
            let images = listing.images.iter().map(one).collect::<Result<Vec<_>, String>>();
            drop(listing);
            assert_eq!(std::fs::read_dir(cache.join("staging")).unwrap().count(), 0, "left over");
            images
        })
        .collect();
    let first = found.remove(0);
    assert!(found.iter().all(|other| *other == first), "{found:?}");
    first
}

#[test]
fn each_image_of_an_archive_is_listed_and_can_be_built() {
    let mut files = Files::new();
    let other = vec![archive(&[file("only", b"x")])];
    let (one, two) = (image(&mut files, &layers(), "amd64"), image(&mut files, &other, "amd64"));
    let arm = image(&mut files, &other, "arm64");
    let digest = |descriptor: &Value| descriptor["digest"].as_str().unwrap().to_owned();
    // One name for two platforms, no name at all, and no name for another platform.
    let manifests = [
        named(platform(arm.clone(), "arm64"), "example.org/a:1"),
        named(platform(one.clone(), "amd64"), "example.org/a:1"),
        two.clone(),
        platform(arm.clone(), "arm64"),
    ];
    index(&mut files, &manifests);
    let only = ["/ 755", "/only 644 \"x\""].map(str::to_owned).to_vec();
    let expected = EXPECTED.map(str::to_owned).to_vec();
    let name = |name: &str| vec![name.to_owned()];
    let mixed = sha256(format!("{} {}", digest(&arm), digest(&one)).as_bytes());
    assert_eq!(
        listed(&files).unwrap(),
        [(name("example.org/a:1"), mixed, expected.clone()), (vec![], digest(&two), only.clone())]
    );

    let mut files = Files::new();
    let images = [
        saved(&mut files, "one", "a:1", &layers(), plain),
        saved(&mut files, "two", "b:2", &other, gzip),
    ];
    let id = |entry: &Value, files: &Files| sha256(&files[entry["Config"].as_str().unwrap()]);
    let ids = images.each_ref().map(|entry| id(entry, &files));
    files.insert("manifest.json".to_owned(), json!(images).to_string().into_bytes());
    let [first, second] = ids;
    assert_eq!(
        listed(&files).unwrap(),
        [(name("a:1"), first, expected), (name("b:2"), second, only)]
    );
}

#[test]
fn an_archive_without_images_or_with_too_many_is_refused() {
    let mut files = Files::new();
    index(&mut files, &[]);
    assert!(listed(&files).unwrap_err().contains("expected 1 to 256, got 0"));
    let one = image(&mut files, &layers(), "amd64");
    let many: Vec<Value> = (0..257).map(|n| named(one.clone(), &format!("a:{n}"))).collect();
    index(&mut files, &many);
    assert!(listed(&files).unwrap_err().contains("expected 1 to 256, got 257"));
    let text = listed(&[("x".to_owned(), b"y".to_vec())].into()).unwrap_err();
    assert!(text.contains("neither manifest.json nor index.json"), "{text}");
}
