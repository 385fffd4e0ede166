//! A damaged snapshot is refused with an error that names file, place, expected and got.

use crate::harness::{BASE, ok, on_host, refused, sh, state_dir, world};
use sha2::Digest;

/// Changes one file of a snapshot while `look` runs.
fn with_damage(file: &str, damage: &str, look: impl FnOnce()) {
    let change = format!(
        "set -e; f=$(ls -d {file}); cp -a $f $f.kept; chattr -i $f 2>/dev/null || true; \
         chmod u+w $f; {damage}",
    );
    let got = on_host(&change);
    assert_eq!(got.code, 0, "{change}: {}{}", got.out, got.err);
    look();
    let got = on_host(&format!("set -e; f=$(ls -d {file}.kept); mv -f $f ${{f%.kept}}"));
    assert_eq!(got.code, 0, "{}", got.err);
}

#[test]
fn damaged_foreign_and_incomplete_snapshots_are_refused() {
    let world = world();
    ok(&["create", "--name", "source", BASE]);
    sh("source", "echo layered >/root/file; sync");
    ok(&["snapshot", "source", "-t", "e2e-hurt"]);
    ok(&["rm", "-f", "source"]);
    let run = ["run", "e2e-hurt", "cat", "/root/file"];
    assert_eq!(ok(&run), "layered");

    let folder = format!("{}/snapshots/e2e-hurt", state_dir());
    let flip = |at: u64| {
        format!(
            "b=$(dd if=$f bs=1 skip={at} count=1 2>/dev/null | od -An -tu1 | tr -d ' '); \
             printf \"\\\\$(printf %o $((b ^ 4)))\" | \
             dd of=$f bs=1 seek={at} conv=notrunc 2>/dev/null"
        )
    };
    let cut = |bytes: u64| format!("truncate -s {bytes} $f");
    for (file, damages) in [
        ("state", vec![cut(100), flip(3), flip(41), flip(2000)]),
        ("table", vec![cut(5000), flip(41), flip(3000)]),
        ("manifest", vec![cut(20), flip(200)]),
    ] {
        for damage in damages {
            with_damage(&format!("{folder}/{file}"), &damage, || {
                refused(&run, &[file, "expected", "got"])
            });
        }
        assert_eq!(ok(&run), "layered", "after {file} was put back");
    }

    // Only a bake records a working set. A clone of its snapshot is refused as well.
    let record = format!("{}/snapshots/{BASE}/working-set", state_dir());
    for damage in [flip(100), cut(90)] {
        with_damage(&record, &damage, || {
            refused(&["run", BASE, "true"], &["working-set", "expected", "got"])
        });
    }
    assert_eq!(ok(&["run", BASE, "echo", "well"]), "well");

    let layers = format!("{}/layers", state_dir());
    let youngest = on_host(&format!("ls -td {layers}/* | head -n 1")).out;
    let youngest = youngest.trim();
    let moved = on_host(&format!("mv {youngest} {layers}/../staging-away"));
    assert_eq!(moved.code, 0, "{}", moved.err);
    let name = youngest.rsplit('/').next().unwrap();
    refused(&run, &[&name[..12]]);
    assert_eq!(on_host(&format!("mv {layers}/../staging-away {youngest}")).code, 0);
    assert_eq!(ok(&run), "layered", "after the layer was put back");
    ok(&["snapshots", "rm", "e2e-hurt"]);
    world.clean();
}

#[test]
fn a_hostile_archive_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let layer = folder.path().join("layer.tar");
    let mut tar = tar::Builder::new(std::fs::File::create(&layer).unwrap());
    let mut header = tar::Header::new_gnu();
    let path = b"../../etc/escaped";
    header.as_old_mut().name[..path.len()].copy_from_slice(path);
    header.set_size(4);
    header.set_mode(0o644);
    header.set_cksum();
    tar.append(&header, b"evil".as_slice()).unwrap();
    tar.finish().unwrap();
    drop(tar);
    let archive = folder.path().join("image.tar");
    let mut tar = tar::Builder::new(std::fs::File::create(&archive).unwrap());
    tar.append_path_with_name(&layer, "layer.tar").unwrap();
    // The digest is correct, so only the entry's name can be the reason for the refusal.
    let digest = hex::encode(sha2::Sha256::digest(std::fs::read(&layer).unwrap()));
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux",
            "rootfs":{{"type":"layers","diff_ids":["sha256:{digest}"]}}}}"#
    );
    let manifest = r#"[{"Config":"config.json","RepoTags":["a:b"],"Layers":["layer.tar"]}]"#;
    for (name, body) in [("config.json", config.as_str()), ("manifest.json", manifest)] {
        let mut header = tar::Header::new_gnu();
        header.set_size(body.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        tar.append_data(&mut header, name, body.as_bytes()).unwrap();
    }
    tar.finish().unwrap();
    drop(tar);
    let world = world();
    refused(
        &["image", "build", "--from", archive.to_str().unwrap(), "e2e-hostile"],
        &["../../etc/escaped"],
    );
    assert!(!std::path::Path::new("/etc/escaped").exists());
    world.clean();
}
