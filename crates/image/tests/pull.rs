//! Images of registries: Debian's `docker-registry`, filled by `skopeo`, and a server of files for
//! what that registry refuses to store.
#![allow(clippy::unwrap_used, reason = "tests")]

use dayfly_image::{BuildOptions, BuiltImage, Pull, PullError, build};
use dayfly_registry::testing::LocalRegistry;
use dayfly_registry::{BlobDigest, Config, DockerConfig, Policy, Reference, Registry, Settings};
use dayfly_registry::{RegistryError, Timeouts};
use dayfly_units::needs;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Documents and blobs by their digests, with their media types.
type Blobs = BTreeMap<String, (String, Vec<u8>)>;

fn add(blobs: &mut Blobs, kind: &str, bytes: Vec<u8>) -> Value {
    let digest = BlobDigest::of(&bytes).to_string();
    let described = json!({"mediaType": kind, "digest": digest, "size": bytes.len()});
    blobs.insert(digest, (kind.to_owned(), bytes));
    described
}

/// Adds an image of one layer, in which `/etc/text` is `text`.
fn image(blobs: &mut Blobs, text: &str, architecture: &str) -> Value {
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(text.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, "etc/text", text.as_bytes()).unwrap();
    let tar = tar.into_inner().unwrap();
    let diff = BlobDigest::of(&tar).to_string();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&tar).unwrap();
    let layer = add(blobs, LAYER, gzip.finish().unwrap());
    let config = json!({"os": "linux", "architecture": architecture,
        "config": {"Cmd": ["/etc/text"]}, "rootfs": {"type": "layers", "diff_ids": [diff]}});
    let config = add(blobs, CONFIG, config.to_string().into_bytes());
    let manifest =
        json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]});
    add(blobs, MANIFEST, manifest.to_string().into_bytes())
}

fn index(blobs: &mut Blobs, manifests: &[Value]) -> Value {
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests});
    add(blobs, INDEX, index.to_string().into_bytes())
}

fn platform(mut descriptor: Value, architecture: &str, variant: &str) -> Value {
    descriptor["platform"] =
        json!({"os": "linux", "architecture": architecture, "variant": variant});
    descriptor
}

/// Writes an OCI layout with `top` as the image `x`; returns skopeo's name for it.
fn layout(folder: &Path, blobs: &Blobs, mut top: Value) -> String {
    std::fs::create_dir_all(folder.join("blobs/sha256")).unwrap();
    for (digest, (_, bytes)) in blobs {
        std::fs::write(folder.join("blobs").join(digest.replace(':', "/")), bytes).unwrap();
    }
    top["annotations"] = json!({"org.opencontainers.image.ref.name": "x"});
    let index = json!({"schemaVersion": 2, "manifests": [top]});
    std::fs::write(folder.join("index.json"), index.to_string()).unwrap();
    std::fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    format!("oci:{}:x", folder.display())
}

fn client(docker: DockerConfig) -> Registry {
    let (config, timeouts) = (Config::default(), Timeouts::default());
    let policy = Policy { attempts: 1, ..Policy::default() };
    Registry::new(Settings { config, docker, timeouts, policy })
}

fn made(pull: &Pull<'_>, cache: &Path, out: &str) -> BuiltImage {
    let options = BuildOptions { cache: Some(cache.to_owned()), ..BuildOptions::default() };
    build(&pull.source(), &options, &cache.join(out), &mut |_| ()).unwrap()
}

/// The file `/etc/text` of a disk.
fn text(image: &BuiltImage) -> String {
    let mut debugfs = std::process::Command::new("/usr/sbin/debugfs");
    let out = debugfs.args(["-R", "cat /etc/text"]).arg(&image.root_ext4).output().unwrap();
    String::from_utf8(out.stdout).unwrap()
}

fn reference(host: &str, name: &str) -> Reference {
    format!("{host}/{name}").parse().unwrap()
}

#[tokio::test]
async fn an_image_of_a_registry_becomes_a_disk_and_a_second_pull_fetches_no_layer() {
    if !needs::registry() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let docker = folder.path().join("config.json");
    let local = LocalRegistry::with_user().unwrap();
    local.write_docker_config(&docker).unwrap();
    let mut blobs = Blobs::new();
    let amd64 = platform(image(&mut blobs, "amd64", "amd64"), "amd64", "");
    let v2 = platform(image(&mut blobs, "v2", "amd64"), "amd64", "v2");
    let arm64 = platform(image(&mut blobs, "arm64", "arm64"), "arm64", "v8");
    let top = index(&mut blobs, &[arm64, amd64, v2.clone()]);
    let from = layout(&folder.path().join("layout"), &blobs, top.clone());
    local.push(&from, "team/app:1").unwrap();

    let (cache, registry) = (folder.path().join("cache"), client(DockerConfig::at(docker)));
    let image = reference(&local.host(), "team/app:1");
    let anonymous = client(DockerConfig::none());
    let denied = Pull::begin(&anonymous, &image, 1, Some(&cache)).await.err().unwrap();
    assert!(matches!(denied, PullError::Registry(RegistryError::Denied { .. })), "{denied}");
    for (level, expected) in [(1, "amd64"), (2, "v2"), (4, "v2")] {
        let pull = Pull::begin(&registry, &image, level, Some(&cache)).await.unwrap();
        assert_eq!(pull.image().digest().unwrap().to_string(), top["digest"]);
        let done = AtomicU64::new(0);
        pull.fetch(&done).await.unwrap();
        assert_eq!(done.load(Ordering::Relaxed), pull.layer_bytes());
        let disk = made(&pull, &cache, expected);
        assert_eq!(text(&disk), expected);
        assert_eq!(disk.manifest.run.cmd, ["/etc/text"]);
        let source = format!("registry {} {}", pull.image(), pull.manifest_digest());
        assert_eq!(disk.manifest.source, source);
    }
    // The registry has lost its layers; the cache has them. Two pulls at once do no harm.
    let lost = |digest: &str| {
        let hex = digest.strip_prefix("sha256:").unwrap();
        let blobs = local.data().join("docker/registry/v2/blobs/sha256");
        std::fs::remove_dir_all(blobs.join(&hex[..2]).join(hex)).unwrap();
    };
    blobs.iter().filter(|(_, (kind, _))| kind == LAYER).for_each(|(digest, _)| lost(digest));
    let both = async || {
        let pull = Pull::begin(&registry, &image, 2, Some(&cache)).await.unwrap();
        pull.fetch(&AtomicU64::new(0)).await.unwrap();
        pull
    };
    let (first, second) = tokio::join!(both(), both());
    assert_eq!(text(&made(&second, &cache, "second")), "v2");
    drop(second);
    assert_eq!(text(&made(&first, &cache, "first")), "v2", "each pull has its own layout");
    // A digest names one image, whatever its platform.
    let named = image.pinned(v2["digest"].as_str().unwrap().parse().unwrap());
    let pull = Pull::begin(&registry, &named, 1, Some(&cache)).await.unwrap();
    assert_eq!(pull.manifest_digest(), named.digest().unwrap());
    first.forget();
    let lost = first.fetch(&AtomicU64::new(0)).await.unwrap_err();
    assert!(lost.to_string().contains("sha256:"), "{lost}");
    drop((first, pull));
    let left = std::fs::read_dir(cache.join("staging")).unwrap().count();
    assert_eq!(left, 0, "a pull that has ended leaves no layout");
}

#[tokio::test]
async fn a_moved_tag_is_another_image() {
    if !needs::registry() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let local = LocalRegistry::start().unwrap();
    let (cache, registry) = (folder.path().join("cache"), client(DockerConfig::none()));
    let reference = reference(&local.host(), "app");
    let mut seen = Vec::new();
    for name in ["one", "two"] {
        let mut blobs = Blobs::new();
        let top = image(&mut blobs, name, "amd64");
        local.push(&layout(&folder.path().join(name), &blobs, top), "app:latest").unwrap();
        let pull = Pull::begin(&registry, &reference, 1, Some(&cache)).await.unwrap();
        pull.fetch(&AtomicU64::new(0)).await.unwrap();
        assert_eq!(text(&made(&pull, &cache, name)), name);
        assert_eq!(registry.digest(&reference).await.unwrap().as_ref(), pull.image().digest());
        seen.push(pull.manifest_digest().clone());
    }
    assert_ne!(seen[0], seen[1]);
    let old = reference.pinned(seen[0].clone());
    let pull = Pull::begin(&registry, &old, 1, Some(&cache)).await.unwrap();
    pull.fetch(&AtomicU64::new(0)).await.unwrap();
    assert_eq!(text(&made(&pull, &cache, "old")), "one");
    let absent = Pull::begin(&registry, &"127.0.0.1:1/a".parse().unwrap(), 1, Some(&cache)).await;
    assert!(absent.err().unwrap().to_string().contains("registry 127.0.0.1:1: no connection"));
}

/// Serves `blobs`, and the document `top` under every tag. Returns host and port.
fn served(blobs: Blobs, top: (String, Vec<u8>)) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let blobs = Arc::new(blobs);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
                head.push(byte[0]);
            }
            let line = String::from_utf8_lossy(&head).into_owned();
            let target = line.split(' ').nth(1).unwrap_or_default();
            let name = target.rsplit('/').next().unwrap_or_default();
            let tag = (!name.starts_with("sha256:")).then_some(&top);
            let (status, (kind, bytes)) = match tag.or_else(|| blobs.get(name)) {
                Some(found) => ("200 OK", found.clone()),
                None => ("404 Not Found", Default::default()),
            };
            let length = bytes.len();
            let answer = format!(
                "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
            );
            // The client may have what it wants, and end the connection.
            let _ = stream.write_all(&[answer.as_bytes(), &bytes].concat());
        }
    });
    host
}

/// Pulls the image with `top`, to its disk's text.
async fn pulled(blobs: &Blobs, kind: &str, top: &Value) -> Result<String, PullError> {
    let bytes = match top["digest"].as_str().and_then(|digest| blobs.get(digest)) {
        Some((_, bytes)) => bytes.clone(),
        None => top.to_string().into_bytes(),
    };
    let host = served(blobs.clone(), (kind.to_owned(), bytes));
    let (registry, cache) = (client(DockerConfig::none()), tempfile::tempdir().unwrap());
    let pull = Pull::begin(&registry, &reference(&host, "a:1"), 1, Some(cache.path())).await?;
    pull.fetch(&AtomicU64::new(0)).await?;
    Ok(text(&made(&pull, cache.path(), "out")))
}

#[tokio::test]
async fn an_image_inside_nested_indices_is_found_to_a_bound() {
    let mut blobs = Blobs::new();
    let mut top = platform(image(&mut blobs, "deep", "amd64"), "amd64", "");
    for _ in 0..4 {
        top = index(&mut blobs, &[top]);
    }
    assert_eq!(pulled(&blobs, INDEX, &top).await.unwrap(), "deep");
    let deeper = index(&mut blobs, &[top]);
    let error = pulled(&blobs, INDEX, &deeper).await.unwrap_err().to_string();
    assert!(error.contains("4 indices deep"), "{error}");
    let below = |n| json!({"mediaType": INDEX, "digest": format!("x{n}"), "size": 1});
    let many: Vec<Value> = (0..17).map(below).collect();
    let wide = json!({"schemaVersion": 2, "manifests": many});
    let error = pulled(&blobs, INDEX, &wide).await.unwrap_err().to_string();
    assert!(error.contains("at most 16 indices"), "{error}");
    let odd = json!({"manifests": [{"mediaType": INDEX, "digest": "../../etc/passwd", "size": 1}]});
    let error = pulled(&blobs, INDEX, &odd).await.unwrap_err().to_string();
    assert!(error.contains("expected sha256: and 64"), "{error}");
}

#[tokio::test]
async fn documents_that_are_no_image_of_this_platform_are_refused_with_the_reason() {
    let mut blobs = Blobs::new();
    let good = image(&mut blobs, "x", "amd64");
    let arm = image(&mut blobs, "arm", "arm64");
    let only_arm = index(&mut blobs, &[platform(arm.clone(), "arm64", "")]);
    let layers = json!([{"mediaType": "application/x", "digest": good["digest"], "size": 1}]);
    let config = json!({"mediaType": CONFIG, "digest": good["digest"], "size": 5 << 20});
    let huge = json!([{"mediaType": LAYER, "digest": good["digest"], "size": u64::MAX}]);
    let real: Value = serde_json::from_slice(&blobs[good["digest"].as_str().unwrap()].1).unwrap();
    for (kind, top, what) in [
        (INDEX, &only_arm, "expected an image for linux/amd64"),
        (MANIFEST, &arm, "expected linux/amd64, got linux/arm64"),
        (INDEX, &good, "a manifest that the registry calls an index"),
        (MANIFEST, &only_arm, "an index that the registry calls a manifest"),
        ("", &json!({"manifests": [], "layers": [], "config": {}}), "parts of both"),
        ("", &json!({"schemaVersion": 1, "fsLayers": []}), "schema 1"),
        ("", &json!({}), "got neither"),
        (MANIFEST, &json!({"config": real["config"], "layers": layers}), "media type of a layer"),
        (MANIFEST, &json!({"config": config, "layers": []}), "config: expected at most 4194304"),
        (MANIFEST, &json!({"config": real["config"], "layers": huge}), "layers of at most"),
        ("text/html", &json!("<html>"), "expected an image document"),
    ] {
        let error = pulled(&blobs, kind, top).await.unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
        assert!(!error.contains("staging"), "{error}");
    }
    // A type that says nothing is no obstacle.
    assert_eq!(pulled(&blobs, "application/octet-stream", &good).await.unwrap(), "x");
}
