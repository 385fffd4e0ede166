//! Images of a registry: Debian's `docker-registry` on this host.

use crate::harness::{dayfly, ok, refused, world};
use crate::images::archive;
use dayfly_registry::testing::LocalRegistry;
use dayfly_units::needs;
use std::path::Path;

/// Pushes an image whose command is `echo TEXT`.
fn push(registry: &LocalRegistry, folder: &Path, text: &str, name: &str) {
    let config = format!(r#"{{"Env":["PATH=/bin"],"Cmd":["/bin/echo","{text}"]}}"#);
    archive(folder, &config);
    let path = folder.join("image.tar");
    registry.push(&format!("docker-archive:{}", path.display()), name).unwrap();
}

/// The names in the first column of `dayfly images`.
fn names() -> Vec<String> {
    let table = ok(&["images"]);
    table.lines().skip(1).filter_map(|line| Some(line.split(' ').next()?.to_owned())).collect()
}

#[test]
fn an_image_of_a_registry_runs_and_is_found_the_next_time() {
    if !needs::registry() {
        return;
    }
    let world = world();
    let folder = tempfile::tempdir().unwrap();
    let registry = LocalRegistry::start().unwrap();
    push(&registry, folder.path(), "first", "e2e/pulled:1");
    let name = format!("{}/e2e/pulled:1", registry.host());
    refused(&["run", "--pull", "never", &name], &["no image named", &name]);
    assert_eq!(ok(&["run", &name]), "first");
    let shown: serde_json::Value = serde_json::from_str(&ok(&["inspect", &name])).unwrap();
    let (image, digest) = (shown["name"].as_str().unwrap(), shown["digests"][0].as_str().unwrap());
    assert_eq!(shown["references"][0], name.as_str());
    assert!(image.starts_with("pulled-") && names().contains(&name), "{shown}");
    let again = dayfly(&["pull", &name]);
    assert_eq!((again.code, again.out), (0, format!("{name}\n")), "{}", again.err);
    assert!(again.err.contains("up to date") && again.err.contains(digest), "{}", again.err);
    ok(&["tag", &name, "e2e-other:x"]);
    assert!(names().contains(&"e2e-other:x".to_owned()));

    // The tag moves. The snapshot of the first run keeps its image.
    push(&registry, folder.path(), "second", "e2e/pulled:1");
    let moved = dayfly(&["pull", &name]);
    assert!(moved.code == 0 && moved.err.contains("Downloaded newer image"), "{moved:?}");
    let second = ok(&["image", "inspect", &name]);
    assert!(!second.contains(digest), "{second}");
    // Without the registry: by another tag, by a digest, by the name in the store.
    drop(registry);
    let by_digest = format!("{}@{digest}", name.trim_end_matches(":1"));
    assert_ne!(dayfly(&["image", "inspect", &by_digest]).code, 0, "no tag of that repository");
    for name in ["e2e-other:x", image] {
        assert_eq!(ok(&["run", "--pull", "never", name, "/bin/echo", name]), name);
    }
    refused(&["rmi", image], &["in use by snapshot"]);
    let made = ok(&["snapshots", "-q"]);
    for snapshot in made.lines().filter(|name| name.starts_with(image)) {
        ok(&["snapshots", "rm", snapshot]);
    }
    assert_eq!(ok(&["rmi", "e2e-other:x", &name]), format!("e2e-other:x\n{name}"));
    let left = ok(&["images", "-q"]);
    assert!(!left.contains("pulled-"), "{left}");
    refused(&["rmi", &name], &["no image named", &name]);
    let gone = dayfly(&["run", &name]);
    assert!(gone.code == 125 && gone.err.contains("no connection"), "{gone:?}");
    world.clean();
}
