//! What registries send, and references that users type.

use crate::target::{Heap, Outcome, Target, planted};
use dayfly_registry::{Reference, fuzzing};

/// The targets of this file.
pub const TARGETS: &[Target] = &[Target {
    name: "registry",
    what: "references; challenges, redirects, errors and documents of registries",
    stateful: false,
    most_bytes: 8192,
    heap: Heap { fixed: 64 << 10, per_byte: 64 },
    run: registry,
    seeds,
}];

fn registry(input: &[u8]) -> Outcome {
    let Some((kind, input)) = input.split_first() else { return Outcome::Refused };
    let text = String::from_utf8_lossy(input);
    Outcome::of(match kind % 5 {
        0 => reference(&text),
        1 => challenges(&text),
        2 => redirect(&text),
        3 => fuzzing::explained(input).is_some(),
        _ => dayfly_image::fuzzing::document(input).is_ok(),
    })
}

fn reference(text: &str) -> bool {
    let Ok(reference) = text.parse::<Reference>() else { return false };
    for shown in [reference.to_string(), reference.familiar()] {
        assert_eq!(shown.parse().as_ref(), Ok(&reference), "{shown}");
        assert!(shown.bytes().all(|byte| byte.is_ascii_graphic()), "{shown}");
    }
    let parts: Vec<&str> = reference.path().split('/').collect();
    assert!(!parts.iter().any(|part| matches!(*part, "" | "." | "..")), "{reference}");
    planted(|| parts.len() == 3 && reference.tag().is_some_and(|tag| tag.len() == 2));
    true
}

fn challenges(text: &str) -> bool {
    let all = fuzzing::challenges(text);
    let bytes = |(name, value): (&String, &String)| name.len() + value.len();
    let total: usize = all.iter().flat_map(|one| &one.parameters).map(bytes).sum();
    assert!(total <= text.len(), "{total} bytes of {}", text.len());
    !all.is_empty()
}

fn redirect(location: &str) -> bool {
    let Some((shown, whole)) = fuzzing::redirect("https://a.example/v2/x?y", location) else {
        return false;
    };
    assert!(whole.starts_with("https://"), "{whole}");
    assert!(whole.bytes().all(|byte| byte.is_ascii_graphic()), "{whole}");
    // No query, which may hold a signature, and no user with a password.
    let host = shown.split('/').nth(2).unwrap_or_default();
    assert!(!shown.contains('?') && !host.contains('@'), "{shown}");
    true
}

fn seeds() -> Vec<Vec<u8>> {
    let digest = format!("sha256:{}", "0123456789abcdef".repeat(4));
    let index = r#"{"manifests":[{"mediaType":"application/vnd.oci.image.index.v1+json",
        "digest":"x","size":1}]}"#;
    let texts = [
        (0, "debian".to_owned()),
        (0, format!("localhost:5000/a/b__c:V1.0@{digest}")),
        (0, "[::1]:5000/a-b.c".to_owned()),
        (1, r#"Bearer realm="https://a/t",service="s",scope="x", Basic realm="q\"q""#.to_owned()),
        (2, "https://b.example:5000/z?signature=1".to_owned()),
        (2, "//c/z".to_owned()),
        (2, "z#y".to_owned()),
        (3, r#"{"errors":[{"code":"DENIED","message":"no"}]}"#.to_owned()),
        (4, index.to_owned()),
        (4, r#"{"config":{},"layers":[]}"#.to_owned()),
        (4, r#"{"schemaVersion":1,"fsLayers":[]}"#.to_owned()),
    ];
    texts.into_iter().map(|(kind, text)| [&[kind], text.as_bytes()].concat()).collect()
}
