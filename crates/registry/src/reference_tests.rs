use super::*;
use proptest::prelude::*;

const HEX: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

#[test]
fn references_read_as_in_docker() {
    let digest = format!("sha256:{HEX}");
    for (text, canonical, familiar) in [
        ("debian", "docker.io/library/debian:latest", "debian:latest"),
        ("debian:12", "docker.io/library/debian:12", "debian:12"),
        ("a/b", "docker.io/a/b:latest", "a/b:latest"),
        ("index.docker.io/debian:1", "docker.io/library/debian:1", "debian:1"),
        ("docker.io/library/a:1", "docker.io/library/a:1", "a:1"),
        ("localhost/a", "localhost/a:latest", "localhost/a:latest"),
        ("localhost:5000", "docker.io/library/localhost:5000", "localhost:5000"),
        ("localhost:5000/a/b:x", "localhost:5000/a/b:x", "localhost:5000/a/b:x"),
        ("[::1]:5000/a", "[::1]:5000/a:latest", "[::1]:5000/a:latest"),
        ("quay.io/a__b/c-d.e:V1.0", "quay.io/a__b/c-d.e:V1.0", "quay.io/a__b/c-d.e:V1.0"),
        ("Host/a", "Host/a:latest", "Host/a:latest"),
        ("10.0.0.1/a---b", "10.0.0.1/a---b:latest", "10.0.0.1/a---b:latest"),
    ] {
        let reference: Reference = text.parse().unwrap();
        assert_eq!(
            (reference.to_string(), reference.familiar()),
            (canonical.into(), familiar.into())
        );
        assert_eq!(canonical.parse::<Reference>().unwrap(), reference);
        assert_eq!(familiar.parse::<Reference>().unwrap(), reference);
    }
    let both: Reference = format!("a.b/c:1@{digest}").parse().unwrap();
    assert_eq!((both.tag(), both.selector()), (Some("1"), digest.clone()));
    let only: Reference = format!("c@{digest}").parse().unwrap();
    assert_eq!((only.tag(), only.domain(), only.path()), (None, "docker.io", "library/c"));
    assert_eq!("c:2".parse::<Reference>().unwrap().selector(), "2");
    let pinned = "c:2".parse::<Reference>().unwrap().pinned(digest.parse().unwrap());
    assert_eq!(pinned.familiar(), format!("c:2@{digest}"));
}

#[test]
fn what_is_no_reference_is_refused_by_its_part() {
    let long_tag = format!("a:{}", "t".repeat(129));
    let long = format!("a.b/{}", "x/".repeat(130) + "x");
    let bad_digest = format!("a@sha256:{}", HEX.to_uppercase());
    for (text, part) in [
        ("", "name"),
        ("A", "name"),
        ("a//b", "name"),
        ("a/", "name"),
        ("/a", "name"),
        ("a.b/", "name"),
        ("a..b", "name"),
        ("a___b", "name"),
        ("-a", "name"),
        ("a-", "name"),
        ("a b", "name"),
        ("é", "name"),
        (HEX, "name"),
        (&long, "name"),
        ("a:", "tag"),
        ("a:.x", "tag"),
        ("a:x/y:", "tag"),
        (&long_tag, "tag"),
        ("a@", "digest"),
        ("a@sha512:00", "digest"),
        (&bad_digest, "digest"),
        ("a:b:c", "tag"),
        ("a:0/b", "registry"),
        ("a:99999/b", "registry"),
        ("a:x/b", "registry"),
        ("-.a/b", "registry"),
        ("[::g]:5000/a", "registry"),
        ("[::1/a", "registry"),
        ("http://a.b/c", "registry"),
        ("u@a.b/c", "digest"),
    ] {
        let error = text.parse::<Reference>().unwrap_err();
        assert_eq!(error.part, part, "{text:?}: {error}");
    }
}

proptest! {
    #[test]
    fn any_text_is_a_reference_that_reads_back_or_an_error(
        text in "([a-zA-Z0-9.:/@_-]{0,40}|.{0,60})(@sha256:[0-9a-f]{64})?"
    ) {
        if let Ok(reference) = text.parse::<Reference>() {
            prop_assert_eq!(reference.to_string().parse::<Reference>(), Ok(reference.clone()));
            prop_assert_eq!(reference.familiar().parse::<Reference>(), Ok(reference.clone()));
            prop_assert!(!reference.path().split('/').any(|part| matches!(part, "" | "." | "..")));
            prop_assert!(reference.tag().is_some() || reference.digest().is_some());
            prop_assert!(reference.to_string().bytes().all(|b| b.is_ascii_graphic()));
        }
    }

    #[test]
    fn what_the_grammar_makes_is_read(
        domain in "([a-z0-9]{1,8}\\.[a-z0-9]{1,8}|localhost)(:[1-9][0-9]{0,3})?",
        path in "[a-z0-9]{1,5}((\\.|_|__|-{1,3})[a-z0-9]{1,5}){0,2}(/[a-z0-9]{1,5}){0,2}",
        tag in proptest::option::of("[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}"),
    ) {
        prop_assume!(!domain.starts_with("docker.io"));
        let colon = tag.as_ref().map(|tag| format!(":{tag}")).unwrap_or_default();
        let reference: Reference = format!("{domain}/{path}{colon}").parse().unwrap();
        prop_assert_eq!(reference.domain(), &domain);
        prop_assert_eq!(reference.path(), &path);
        prop_assert_eq!(reference.tag(), Some(tag.as_deref().unwrap_or("latest")));
    }
}
