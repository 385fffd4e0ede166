use super::server::{Reply, Server};
use super::*;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::sync::{Arc, OnceLock};

/// Docker's configuration with user and password for `registry`.
fn docker(registry: &str) -> (tempfile::TempDir, DockerConfig) {
    docker_with(&format!(r#"{{"{registry}": {{"username": "user", "password": "hunter2"}}}}"#))
}

fn docker_with(auths: &str) -> (tempfile::TempDir, DockerConfig) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, format!(r#"{{"auths": {auths}}}"#)).unwrap();
    (folder, DockerConfig::at(path))
}

fn basic() -> String {
    format!("Basic {}", STANDARD.encode("user:hunter2"))
}

/// A challenge for the token server at `realm`.
fn bearer(realm: &str) -> Reply {
    let header = format!("WWW-Authenticate: Bearer realm=\"{realm}\",service=\"s s\"\r\n");
    Reply::new("401 Unauthorized", &header, "")
}

/// A registry that wants the token `t`, which its path `/token` grants with `granted`.
async fn with_tokens(granted: Reply) -> Server {
    let port = Arc::new(OnceLock::new());
    let own = Arc::clone(&port);
    let server = Server::start(move |asked| {
        if asked.target.starts_with("/token") {
            return granted.clone();
        }
        match asked.header("authorization") {
            "Bearer t" => Reply::ok("{}"),
            _ => bearer(&format!("http://127.0.0.1:{}/token", own.get().unwrap())),
        }
    })
    .await;
    port.set(server.port).unwrap();
    server
}

#[tokio::test]
async fn a_token_is_asked_for_once_with_the_scope_of_a_pull() {
    let server = with_tokens(Reply::ok(r#"{"token":"t","expires_in":60}"#)).await;
    let (_folder, docker) = docker(&server.host());
    let registry = client_with(Config::default(), docker);
    for tag in ["a/b:1", "a/b:2"] {
        registry.manifest(&server.image(tag)).await.unwrap();
    }
    let asked = server.asked();
    let targets: Vec<&str> = asked.iter().map(|asked| asked.target.as_str()).collect();
    let token = "/token?service=s%20s&scope=repository%3Aa%2Fb%3Apull";
    let [one, two] = ["/v2/a/b/manifests/1", "/v2/a/b/manifests/2"];
    assert_eq!(targets, [one, token, one, two]);
    assert_eq!(asked[1].header("authorization"), basic());
    assert_eq!(asked[0].header("authorization"), "");
    // Another repository needs another token.
    registry.manifest(&server.image("c")).await.unwrap();
    assert!(server.asked()[5].target.contains("repository%3Ac%3Apull"));
}

#[tokio::test]
async fn without_credentials_the_token_is_anonymous() {
    let server = with_tokens(Reply::ok(r#"{"access_token":"t"}"#)).await;
    client().manifest(&server.image("a")).await.unwrap();
    assert_eq!(server.asked()[1].header("authorization"), "");
}

#[tokio::test]
async fn an_identity_token_is_exchanged() {
    let server = with_tokens(Reply::ok(r#"{"access_token":"t"}"#)).await;
    let auths = format!(r#"{{"{}": {{"identitytoken": "i&d"}}}}"#, server.host());
    let (_folder, docker) = docker_with(&auths);
    client_with(Config::default(), docker).manifest(&server.image("a")).await.unwrap();
    let asked = &server.asked()[1];
    assert_eq!((asked.method.as_str(), asked.target.as_str()), ("POST", "/token"));
    let form = "grant_type=refresh_token&client_id=dayfly&refresh_token=i%26d&service=s%20s&\
                scope=repository%3Alibrary";
    assert!(asked.body.starts_with(&form[..60]), "{}", asked.body);
}

#[tokio::test]
async fn answers_of_a_token_server_are_bounded_and_quoted_nowhere() {
    for (granted, what) in [
        (Reply::ok(format!(r#"{{"token":"{}"}}"#, "t".repeat(2 << 20))), "at most 1048576"),
        (Reply::ok(format!(r#"{{"token":"{}"}}"#, "t".repeat(40_000))), "32 KiB"),
        (Reply::ok(r#"{"token":"hunter2\r\nX: y"}"#), "fits into a header"),
        (Reply::ok(r#"{"token":""}"#), "expected a token, got none"),
        (Reply::ok(r#"{"hunter2":"#), "JSON with token"),
        (Reply::status("401 Unauthorized"), "refuses requests without credentials"),
        (Reply::status("500 Internal Server Error"), "500 Internal"),
    ] {
        let server = with_tokens(granted).await;
        let error = client().manifest(&server.image("a")).await.unwrap_err().to_string();
        assert!(error.contains(what) && !error.contains("hunter2"), "{what}: {error}");
        assert!(error.len() < 2000, "{}", error.len());
    }
}

#[tokio::test]
async fn a_token_that_does_not_help_ends_with_the_users_name_and_no_secret() {
    let server = with_tokens(Reply::ok(r#"{"token":"wrong"}"#)).await;
    let (_folder, docker) = docker(&server.host());
    let registry = client_with(Config::default(), docker);
    let error = registry.manifest(&server.image("a")).await.unwrap_err();
    let text = format!("{error} {error:?} {registry:?}");
    assert!(text.contains("refuses user user") && text.contains("config.json"), "{text}");
    for secret in ["hunter2", "wrong", &basic()["Basic ".len()..]] {
        assert!(!text.contains(secret), "{text}");
    }
    assert_eq!(server.asked().len(), 3, "401, token, 401");
}

#[tokio::test]
async fn credentials_go_over_tls_or_to_hosts_that_are_insecure_by_name() {
    // The realm is at a host that is not insecure by name, without TLS.
    let server = Server::start(|_| bearer("http://tokens.example/token")).await;
    let (_folder, docker) = docker(&server.host());
    let registry = client_with(Config::default(), docker);
    let error = registry.manifest(&server.image("a")).await.unwrap_err();
    assert!(matches!(error, RegistryError::Challenge { .. }), "{error}");
    assert!(error.to_string().contains("http://tokens.example/token"), "{error}");
}

#[tokio::test]
async fn basic_credentials_go_to_their_registry_and_not_to_a_redirects_target() {
    let other = Server::start(|_| Reply::ok("{}")).await;
    let to = format!("http://{}/blob", other.host());
    let server = Server::start(move |asked| match asked.header("authorization") {
        "" => Reply::new("401 Unauthorized", "WWW-Authenticate: Basic realm=\"x\"\r\n", ""),
        _ => Reply::redirect(&to),
    })
    .await;
    let (_folder, docker) = docker(&server.host());
    let registry = client_with(Config::default(), docker);
    registry.manifest(&server.image("a")).await.unwrap();
    assert_eq!(server.asked()[1].header("authorization"), basic());
    assert_eq!(other.asked()[0].header("authorization"), "");
    // The other registry asks for credentials itself, and has none.
    let wants = "WWW-Authenticate: Basic realm=\"x\"\r\n";
    let other = Server::start(move |_| Reply::new("401 Unauthorized", wants, "")).await;
    let error = registry.manifest(&other.image("a")).await.unwrap_err();
    assert!(error.to_string().contains("refuses requests without credentials"), "{error}");
    assert!(other.asked().iter().all(|asked| asked.header("authorization").is_empty()));
}

#[tokio::test]
async fn a_redirects_target_that_asks_for_credentials_gets_none() {
    let wants = "WWW-Authenticate: Basic realm=\"x\"\r\n";
    let other = Server::start(move |_| Reply::new("401 Unauthorized", wants, "")).await;
    let to = format!("http://{}/blob", other.host());
    let server = Server::start(move |_| Reply::redirect(&to)).await;
    let (_folder, docker) = docker(&server.host());
    let registry = client_with(Config::default(), docker);
    assert!(registry.manifest(&server.image("a")).await.is_err());
    assert_eq!((server.asked().len(), other.asked().len()), (1, 1));
    assert_eq!(other.asked()[0].header("authorization"), "");
}

#[tokio::test]
async fn a_mirror_does_not_get_the_credentials_of_its_registry() {
    let wants = "WWW-Authenticate: Basic realm=\"x\"\r\n";
    let mirror = Server::start(move |_| Reply::new("401 Unauthorized", wants, "")).await;
    let server = Server::start(move |asked| match asked.header("authorization") {
        "" => Reply::new("401 Unauthorized", wants, ""),
        _ => Reply::ok("{}"),
    })
    .await;
    let (_folder, docker) = docker(&server.host());
    let text = format!("[registry.\"{}\"]\nmirrors = [\"{}\"]", server.host(), mirror.host());
    let registry = client_with(config(&text), docker);
    registry.manifest(&server.image("a")).await.unwrap();
    assert_eq!(mirror.asked().len(), 1);
    assert_eq!(mirror.asked()[0].header("authorization"), "");
}

#[tokio::test]
async fn a_challenge_that_no_client_can_meet_is_named() {
    for (header, what) in [
        ("WWW-Authenticate: Negotiate\r\n", "got negotiate"),
        ("", "401 without a challenge"),
        ("WWW-Authenticate: Bearer realm=\"x\"\r\n", "the realm \"x\""),
        ("WWW-Authenticate: Bearer\r\n", "the realm \"\""),
    ] {
        let server = Server::start(move |_| Reply::new("401 Unauthorized", header, "")).await;
        let error = client().manifest(&server.image("a")).await.unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}
