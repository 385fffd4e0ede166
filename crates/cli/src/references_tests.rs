use super::*;
use dayfly_units::ImageConfig;

const D: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const M: &str = "sha256:1123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn reference(text: &str) -> Reference {
    text.parse().unwrap()
}

fn record(image: &str) -> Record {
    let (digest, manifest) = (Some(D.to_owned()), Some(M.to_owned()));
    Record { image: image.parse().unwrap(), disk: "disk".into(), digest, manifest }
}

fn image(name: &str, digest: &str, source: &str) -> Image {
    Image {
        name: name.parse().unwrap(),
        digest: digest.into(),
        size_bytes: 0,
        stored_bytes: 0,
        created_unix_ms: 0,
        source: source.into(),
        config: ImageConfig::default(),
    }
}

#[test]
fn references_are_kept_across_processes_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    assert_eq!(References::read(&path).unwrap(), References::default());
    let change = |text: &str, image: &str| {
        References::change_in(folder.path(), |all| all.set(&reference(text), record(image)))
    };
    assert_eq!(change("a:1", "a-1").unwrap(), None);
    assert_eq!(change("a:1", "a-2").unwrap(), Some(record("a-1")));
    let all = References::read(&path).unwrap();
    assert_eq!(all.find(&reference("docker.io/library/a:1")), Some(&record("a-2")));
    assert_eq!(all.find(&reference("a")), None);
    assert!(all.names(&"a-2".parse().unwrap()) && !all.names(&"a-1".parse().unwrap()));
    // What a killed process left is overwritten.
    std::fs::write(path.with_extension("new"), "x").unwrap();
    assert!(References::change_in(folder.path(), |all| all.forget(&reference("a:1"))).unwrap());
    assert_eq!(References::read(&path).unwrap(), References::default());
}

#[test]
fn a_digest_finds_what_was_pulled_by_a_tag_of_the_same_repository() {
    let mut all = References::default();
    all.set(&reference("h.example/a:1"), record("a-1"));
    for found in [D, M] {
        assert!(all.find(&reference(&format!("h.example/a@{found}"))).is_some(), "{found}");
        assert!(all.find(&reference(&format!("h.example/a:9@{found}"))).is_some(), "{found}");
    }
    for other in [
        format!("h.example/ab@{D}"),
        format!("a@{D}"),
        format!("h.example/a@{}", &M.replace('1', "2")),
    ] {
        assert!(all.find(&reference(&other)).is_none(), "{other}");
    }
    all.set(&reference(&format!("h.example/b:x@{D}")), record("b-1"));
    assert!(all.find(&reference(&format!("h.example/b@{D}"))).is_some());
    assert!(all.find(&reference("h.example/b:x")).is_none(), "the tag beside a digest is dropped");
}

#[test]
fn a_record_means_an_image_with_its_content_only() {
    let record = record("a-1");
    let source = format!("registry docker.io/library/a:1@{D} {M}");
    assert!(record.means(&image("a-1", "disk", "")));
    assert!(record.means(&image("a-1", "another build of it", &source)));
    assert!(!record.means(&image("a-1", "another", "registry x")));
    assert!(!record.means(&image("a-1", "another", &source.replace("registry", "archive"))));
    assert!(!record.means(&image("a-2", "disk", &source)));
    let mut all = References::default();
    all.set(&reference("a:2"), record.clone());
    all.set(&reference("a:1"), record.clone());
    let named = image("a-1", "disk", "");
    let names: Vec<String> = all.of(&named).map(|(reference, _)| reference.familiar()).collect();
    assert_eq!(names, ["a:1", "a:2"]);
    all.forget_image(&record.image);
    assert_eq!(all, References::default());
}

#[test]
fn a_damaged_file_is_named_with_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    for bytes in [&b"{}"[..], &sealed::seal(&MAGIC, 2, b"{}"), &sealed::seal(&MAGIC, 1, b"[]")] {
        std::fs::write(&path, bytes).unwrap();
        let error = format!("{:#}", References::read(&path).unwrap_err());
        assert!(error.starts_with(&path.display().to_string()), "{error}");
        assert!(error.contains("remove the file"), "{error}");
    }
}

#[test]
fn an_image_is_named_by_a_name_or_a_reference() {
    for (text, name, is_reference) in [
        ("debian", true, true),
        ("debian:12", false, true),
        ("localhost:5000/a", false, true),
        ("a..b", true, false),
    ] {
        let arg: ImageArg = text.parse().unwrap();
        assert_eq!((arg.name.is_some(), arg.reference.is_some()), (name, is_reference), "{text}");
        assert_eq!(arg.to_string(), text);
    }
    for (text, part) in [("Web", "name"), ("a:", "tag"), ("A/b:c:d", "tag"), ("", "name")] {
        let error = text.parse::<ImageArg>().unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}
