use super::server::{Reply, Server, Then};
use super::*;
use std::sync::Arc;

const BODY: &str = r#"{"schemaVersion":2}"#;

async fn error(reply: Reply) -> (RegistryError, Server) {
    let server = Server::start(move |_| reply.clone()).await;
    let error = client().manifest(&server.image("a/b:1")).await.unwrap_err();
    (error, server)
}

#[tokio::test]
async fn a_manifest_has_the_digest_of_its_bytes_and_the_type_that_the_registry_states() {
    let server = Server::start(|_| {
        let kind = "Content-Type: Application/vnd.oci.image.manifest.v1+json; charset=utf-8\r\n";
        Reply::new("200 OK", kind, BODY)
    })
    .await;
    let image = server.image("a/b:1");
    let manifest = client().manifest(&image).await.unwrap();
    assert_eq!(manifest.bytes, BODY.as_bytes());
    assert_eq!(manifest.digest, BlobDigest::of(BODY.as_bytes()));
    assert_eq!(manifest.media_type, "application/vnd.oci.image.manifest.v1+json");
    let asked = &server.asked()[0];
    assert_eq!(asked.target, "/v2/a/b/manifests/1");
    assert!(asked.header("accept").contains("docker.distribution.manifest.list"), "{asked:?}");
    assert_eq!(asked.header("host"), server.host());
    let pinned = client().manifest(&image.pinned(manifest.digest.clone())).await.unwrap();
    assert_eq!(pinned, manifest);
    assert!(server.asked()[1].target.ends_with(&manifest.digest.to_string()));
}

#[tokio::test]
async fn another_manifest_than_the_one_named_is_refused() {
    let server = Server::start(|_| Reply::ok(BODY)).await;
    let image = server.image("a/b").pinned(BlobDigest::of(b"another"));
    let error = client().manifest(&image).await.unwrap_err().to_string();
    let (expected, got) = (BlobDigest::of(b"another"), BlobDigest::of(BODY.as_bytes()));
    assert!(error.contains(&format!("expected {expected}, got {got} of 19 bytes")), "{error}");
    let stated = format!("Docker-Content-Digest: {expected}\r\n");
    let (error, _) = self::error(Reply::new("200 OK", &stated, BODY)).await;
    assert!(matches!(error, RegistryError::Digest { .. }), "{error}");
}

#[tokio::test]
async fn a_manifest_has_at_most_4_mib() {
    let most = vec![b' '; 4 << 20];
    let server = Server::start(move |_| Reply::ok(&most)).await;
    assert_eq!(client().manifest(&server.image("a")).await.unwrap().bytes.len(), 4 << 20);
    for reply in [
        Reply::ok(vec![b' '; (4 << 20) + 1]),
        Reply::raw("HTTP/1.1 200 OK\r\n\r\n{}".to_owned() + &" ".repeat(4096)).then(Then::Again),
    ] {
        let (error, server) = self::error(reply).await;
        assert!(matches!(error, RegistryError::TooLarge { max: 4_194_304, .. }), "{error}");
        assert_eq!(server.asked().len(), 1, "a second attempt would be as long");
    }
}

#[tokio::test]
async fn heads_are_bounded() {
    // The bound is checked before each read, so that twice as much may be read.
    let line = format!("X: {}\r\n", "x".repeat(4000));
    for headers in [line.repeat(90), "X: y\r\n".repeat(200), "x".repeat(300_000)] {
        let reply = Reply::raw(format!("HTTP/1.1 200 OK\r\n{headers}\r\n{BODY}"));
        let (error, _) = error(reply).await;
        assert!(matches!(error, RegistryError::Broken { .. }), "{error}");
    }
    let informational = Reply::raw("HTTP/1.1 100 Continue\r\n\r\n").then(Then::Stall);
    let server = Server::start(move |_| informational.clone()).await;
    let error = hasty().manifest(&server.image("a")).await.unwrap_err();
    assert!(matches!(error, RegistryError::Silent { .. }), "{error}");
}

#[tokio::test]
async fn silence_ends_a_request_at_each_place() {
    for reply in [
        Reply::raw(""),
        Reply::raw("HTTP/1.1 200 OK\r\nX: "),
        Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"),
    ] {
        let server = Server::start(move |_| reply.clone().then(Then::Stall)).await;
        let error = hasty().manifest(&server.image("a")).await.unwrap_err();
        assert!(matches!(error, RegistryError::Silent { .. }), "{error}");
    }
}

#[tokio::test]
async fn redirects_are_followed_to_a_bound_and_only_over_http() {
    let end = Server::start(|_| Reply::ok(BODY)).await;
    let to = format!("http://{}/elsewhere?signature=secret", end.host());
    let server = Server::start(move |_| Reply::redirect(&to)).await;
    let manifest = client().manifest(&server.image("a")).await.unwrap();
    assert_eq!(manifest.bytes, BODY.as_bytes());
    assert_eq!(end.asked()[0].target, "/elsewhere?signature=secret");

    let (error, server) = error(Reply::redirect("/again")).await;
    assert!(error.to_string().contains("at most 5 redirects"), "{error}");
    assert_eq!(server.asked().len(), 6);
    for to in ["ftp://a/", "http://user:password@127.0.0.1/", "http://", "http://a/\u{1}"] {
        let (error, _) = self::error(Reply::redirect(to)).await;
        assert!(
            matches!(error, RegistryError::Redirect { .. } | RegistryError::Broken { .. }),
            "{error}"
        );
        assert!(!error.to_string().contains('\u{1}'), "{error}");
    }
}

#[tokio::test]
async fn passing_errors_are_tried_again_and_others_are_not() {
    for (status, requests) in [("429 Too Many Requests", 3), ("503 Service Unavailable", 3)] {
        let reply = Reply::new(status, "Retry-After: 86400\r\n", "");
        let (error, server) = error(reply).await;
        assert!(error.to_string().contains(status), "{error}");
        assert_eq!(server.asked().len(), requests);
    }
    let (error, server) = error(Reply::status("418 I'm a teapot")).await;
    assert!(matches!(error, RegistryError::Status { retry: false, .. }), "{error}");
    assert_eq!(server.asked().len(), 1);
    // Two failures, then the manifest.
    let left = Arc::new(AtomicU64::new(2));
    let server = Server::start(move |_| {
        match left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)) {
            Ok(2) => Reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"),
            Ok(_) => Reply::status("502 Bad Gateway"),
            Err(_) => Reply::ok(BODY),
        }
    })
    .await;
    assert!(client().manifest(&server.image("a")).await.is_ok());
}

#[tokio::test]
async fn an_image_that_is_not_there_is_named_with_the_registrys_words_escaped() {
    let body = r#"{"errors":[{"code":"NAME_UNKNOWN","message":"no \u001b[2J such\u202e"}]}"#;
    let (error, server) = error(Reply::new("404 Not Found", "", body)).await;
    assert!(error.is_absent());
    let (text, host) = (error.to_string(), server.host());
    let expected = format!(
        "image {host}/a/b:1: the registry {host} has no such image: no \\x1b[2J such\\u{{202e}}"
    );
    assert_eq!(text, expected);
    let (error, _) = self::error(Reply::new("404 Not Found", "", "x".repeat(1 << 20))).await;
    assert!(error.to_string().ends_with("has no such image"), "{error}");
}

#[tokio::test]
async fn a_tag_is_looked_up_without_its_manifest() {
    let digest = BlobDigest::of(BODY.as_bytes());
    let stated = format!("Docker-Content-Digest: {digest}\r\n");
    let server = Server::start(move |asked| {
        let reply = Reply::new("200 OK", &stated, BODY);
        match asked.target.as_str() {
            "/v2/a/manifests/none" => Reply::status("404 Not Found"),
            "/v2/a/manifests/get" => Reply::status("405 Method Not Allowed"),
            _ if asked.method == "HEAD" => {
                let end = reply.bytes.len() - BODY.len();
                Reply::raw(&reply.bytes[..end])
            }
            _ => reply,
        }
    })
    .await;
    let registry = client();
    assert_eq!(registry.digest(&server.image("a:1")).await.unwrap(), Some(digest.clone()));
    assert_eq!(registry.digest(&server.image("a:get")).await.unwrap(), None);
    assert!(registry.digest(&server.image("a:none")).await.unwrap_err().is_absent());
    let before = server.asked().len();
    let pinned = server.image("a:1").pinned(digest.clone());
    assert_eq!(registry.digest(&pinned).await.unwrap(), Some(digest));
    assert_eq!(server.asked().len(), before, "a digest names itself");
}

#[tokio::test]
async fn mirrors_are_asked_first_and_the_registry_if_they_fail() {
    let registry = Server::start(|_| Reply::ok("registry")).await;
    let (bad, good) = (
        Server::start(|_| Reply::status("500 X")).await,
        Server::start(|_| Reply::ok("mirror")).await,
    );
    let mirrors = |names: &[String]| {
        config(&format!("[registry.\"{}\"]\nmirrors = {names:?}", registry.host()))
    };
    let image = registry.image("a:1");
    let client = client_with(mirrors(&[bad.host(), good.host()]), DockerConfig::none());
    assert_eq!(client.manifest(&image).await.unwrap().bytes, b"mirror");
    assert_eq!((bad.asked().len(), registry.asked().len()), (3, 0));
    let ns = format!("/v2/a/manifests/1?ns=127.0.0.1%3A{}", registry.port);
    assert_eq!(good.asked()[0].target, ns);
    let client = client_with(mirrors(&[bad.host()]), DockerConfig::none());
    assert_eq!(client.manifest(&image).await.unwrap().bytes, b"registry");
}

#[tokio::test]
async fn a_registry_that_is_not_insecure_by_name_is_asked_with_tls_only() {
    let server = Server::start(|_| Reply::ok(BODY)).await;
    // A name of this host that is not a loopback name.
    let url = crate::url::Url::parse(&format!("https://127.0.0.1:{}/v2/", server.port)).unwrap();
    let request = crate::transport::Request::new(http::Method::GET);
    let client = client();
    let sent = client.base.transport.send(&url, &crate::tls::Trust::Host, &request, None).await;
    let error = sent.unwrap_err();
    assert!(matches!(error, RegistryError::Tls { .. }), "{error}");
    assert!(error.to_string().contains("registries.toml"), "{error}");
    let endpoints = Config::default().endpoints("registry.example.com");
    assert!(!endpoints[0].insecure);
    assert!(server.asked().is_empty());
}
