use super::*;
use std::os::unix::fs::PermissionsExt;

fn config(json: &str) -> (tempfile::TempDir, DockerConfig) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, json).unwrap();
    (folder, DockerConfig::at(path))
}

fn basic(user: &str, password: &str) -> Credentials {
    Credentials::Basic(user.into(), Secret::new(password.into()))
}

#[tokio::test]
async fn entries_are_found_by_the_host_that_they_are_for() {
    let pair = STANDARD.encode("u:p:q");
    let (_folder, config) = config(&format!(
        r#"{{"auths": {{
            "https://index.docker.io/v1/": {{"auth": "{pair}"}},
            "https://a.example/v2/": {{"username": "x", "password": "y"}},
            "b.example:5000": {{"identitytoken": "t"}},
            "c.example": {{"registrytoken": "r"}},
            "d.example": {{}},
            "bad.example": {{"auth": "!"}}
        }}, "HttpHeaders": {{"x": "y"}}}}"#
    ));
    for (registry, expected) in [
        ("docker.io", basic("u", "p:q")),
        ("a.example", basic("x", "y")),
        ("b.example:5000", Credentials::Identity(Secret::new("t".into()))),
        ("c.example", Credentials::Token(Secret::new("r".into()))),
        ("d.example", Credentials::Anonymous),
        ("b.example", Credentials::Anonymous),
        ("a.example.evil", Credentials::Anonymous),
    ] {
        assert_eq!(config.find(registry).await.unwrap(), expected, "{registry}");
    }
    let error = config.find("bad.example").await.unwrap_err().to_string();
    assert!(error.contains("USER:PASSWORD") && error.contains("bad.example"), "{error}");
    let absent = DockerConfig::at("/nonexistent/config.json".into());
    assert_eq!(absent.find("docker.io").await.unwrap(), Credentials::Anonymous);
}

#[tokio::test]
async fn an_error_quotes_no_secret() {
    let (_folder, config) = config(r#"{"auths": {"a": {"auth": 7, "password": "hunter2"}}}"#);
    let error = config.find("a").await.unwrap_err().to_string();
    assert!(error.contains("line 1") && !error.contains("hunter2"), "{error}");
    let shown = format!("{:?}", basic("u", "hunter2"));
    assert!(!shown.contains("hunter2"), "{shown}");
    let auth = Auth { password: "hunter2".into(), ..Auth::default() };
    assert!(!format!("{auth:?}").contains("hunter2"));
}

#[tokio::test]
async fn a_helper_is_asked_for_its_registry() {
    let folder = tempfile::tempdir().unwrap();
    let name = format!("dayfly-test-{}", std::process::id());
    let program = folder.path().join(format!("docker-credential-{name}"));
    let script = r#"#!/bin/sh
read -r key
case $key in
    a.example) echo '{"ServerURL":"a.example","Username":"u","Secret":"s"}' ;;
    b.example) echo '{"Username":"<token>","Secret":"t"}' ;;
    c.example) echo 'credentials not found in native keychain'; exit 1 ;;
    *) echo 'broken keychain'; exit 1 ;;
esac
"#;
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    // The helper's name is found on PATH, so the test names it by its path.
    let run = |key| run(program.to_str().unwrap(), key);
    assert!(run("a.example").await.unwrap().1);
    assert_eq!(run("d.example").await.unwrap(), (b"broken keychain\n".to_vec(), false));
    let (_folder, config) = config(
        r#"{"credHelpers": {"a.example": "no-such-helper"},
        "auths": {"b.example": {"username": "x", "password": "y"}}}"#,
    );
    let error = config.find("a.example").await.unwrap_err().to_string();
    assert!(error.contains("docker-credential-no-such-helper"), "{error}");
    assert_eq!(config.find("b.example").await.unwrap(), basic("x", "y"));
    let error = ask("../x", "a.example", Path::new("/c.json")).await.unwrap_err().to_string();
    assert!(error.contains("expected a name of letters"), "{error}");
}
