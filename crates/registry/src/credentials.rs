//! Credentials from docker's `config.json`: `auths`, `credHelpers`, `credsStore`.
//!
//! They are looked up when a registry asks for them, so a helper that is absent matters only then.

use crate::reference::DOCKER;
use crate::secret::Secret;
use crate::text::shown;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const MAX_FILE_BYTES: u64 = 4 << 20;
/// Upper limit for what a helper prints, in bytes.
const MAX_HELPER_BYTES: u64 = 256 << 10;
/// A helper may ask a person for a password.
const HELPER: Duration = Duration::from_secs(120);
/// The key of docker's registry in its file.
const DOCKER_KEY: &str = "https://index.docker.io/v1/";
/// The user name by which a helper says that its secret is an identity token.
const TOKEN_USER: &str = "<token>";

/// What a registry gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Credentials {
    /// Nothing.
    Anonymous,
    /// A user and a password.
    Basic(String, Secret),
    /// A token for the token server (OAuth2 refresh token).
    Identity(Secret),
    /// A token for the registry itself.
    Token(Secret),
}

/// Docker's configuration file.
#[derive(Debug, Clone)]
pub struct DockerConfig {
    path: Option<PathBuf>,
}

/// Why credentials were not found. No error has a part of a secret.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The file cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file, or what a helper printed, has an unexpected value.
    #[error("{place}: expected {expected}, got {got}; credentials for {registry}")]
    Value {
        /// The file and the key, or the helper.
        place: String,
        /// What is accepted.
        expected: &'static str,
        /// What was found, without values.
        got: String,
        /// The registry.
        registry: String,
    },
    /// A helper cannot be run, or fails.
    #[error(
        "credentials for {registry}: {program}, which {path} names: {why}; install it, or remove \
         it from the file",
        path = path.display()
    )]
    Helper {
        /// The registry.
        registry: String,
        /// The program.
        program: String,
        /// The file.
        path: PathBuf,
        /// The cause.
        why: String,
    },
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct File {
    auths: BTreeMap<String, Auth>,
    #[serde(rename = "credHelpers")]
    helpers: BTreeMap<String, String>,
    #[serde(rename = "credsStore")]
    store: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Auth {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
    registrytoken: String,
}

impl std::fmt::Debug for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(secret)")
    }
}

/// What a helper prints (github.com/docker/docker-credential-helpers).
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Helped {
    username: String,
    secret: String,
}

impl DockerConfig {
    /// `config.json` in `$DOCKER_CONFIG` or `~/.docker`.
    #[must_use]
    pub fn of_the_user() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = set("DOCKER_CONFIG").or_else(|| Some(set("HOME")?.join(".docker")));
        Self { path: folder.map(|folder| folder.join("config.json")) }
    }

    /// The file at `path`.
    #[must_use]
    pub const fn at(path: PathBuf) -> Self {
        Self { path: Some(path) }
    }

    /// No file.
    #[must_use]
    pub const fn none() -> Self {
        Self { path: None }
    }

    /// The file's path, for errors.
    pub(crate) fn shown(&self) -> String {
        self.path
            .as_deref()
            .map_or_else(|| "~/.docker/config.json".to_owned(), |path| path.display().to_string())
    }

    /// The credentials for `registry`, a name such as `docker.io` or `registry.lan:5000`.
    pub(crate) async fn find(&self, registry: &str) -> Result<Credentials, CredentialsError> {
        let Some(path) = &self.path else { return Ok(Credentials::Anonymous) };
        let Some(file) = read(path, registry)? else { return Ok(Credentials::Anonymous) };
        let key = if registry == DOCKER { DOCKER_KEY } else { registry };
        let helper = file.helpers.get(key).or_else(|| file.helpers.get(registry));
        if let Some(helper) = helper.or(file.store.as_ref()).filter(|name| !name.is_empty())
            && let Some(found) = ask(helper, key, path).await?
        {
            return Ok(found);
        }
        let stored = file.auths.get(key);
        let stored = stored.or_else(|| {
            let all = file.auths.iter();
            all.filter(|(key, _)| names(key, registry)).map(|(_, auth)| auth).next()
        });
        match stored {
            Some(auth) => stored_in(auth, path, registry),
            None => Ok(Credentials::Anonymous),
        }
    }
}

fn read(path: &Path, registry: &str) -> Result<Option<File>, CredentialsError> {
    let failed = |source| CredentialsError::Io { path: path.to_owned(), source };
    let file = match std::fs::File::open(path) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        other => other.map_err(failed)?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    let bad = |got: String| CredentialsError::Value {
        place: path.display().to_string(),
        expected: "docker's configuration of at most 4 MiB",
        got,
        registry: registry.to_owned(),
    };
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(bad("more".to_owned()));
    }
    // serde's own text may quote a value.
    let place =
        |e: serde_json::Error| bad(format!("an error at line {} column {}", e.line(), e.column()));
    serde_json::from_slice(&bytes).map(Some).map_err(place)
}

/// Whether the key of an entry means `registry`: a host, perhaps with a scheme and a path.
fn names(key: &str, registry: &str) -> bool {
    let bare = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://"));
    let host = bare.unwrap_or(key).split('/').next().unwrap_or_default();
    let host = if host == "index.docker.io" { DOCKER } else { host };
    host == registry
}

fn stored_in(auth: &Auth, path: &Path, registry: &str) -> Result<Credentials, CredentialsError> {
    let secret = |text: &str| Secret::new(text.to_owned());
    if !auth.registrytoken.is_empty() {
        return Ok(Credentials::Token(secret(&auth.registrytoken)));
    }
    if !auth.identitytoken.is_empty() {
        return Ok(Credentials::Identity(secret(&auth.identitytoken)));
    }
    if auth.auth.is_empty() {
        return Ok(match auth.username.as_str() {
            "" => Credentials::Anonymous,
            user => Credentials::Basic(user.to_owned(), secret(&auth.password)),
        });
    }
    let decoded = STANDARD.decode(auth.auth.trim()).ok();
    let text = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
    let pair = text.as_deref().and_then(|text| text.trim_end_matches('\0').split_once(':'));
    let Some((user, password)) = pair else {
        return Err(CredentialsError::Value {
            place: format!("{}: auths: auth", path.display()),
            expected: "USER:PASSWORD in base64",
            got: "something else".to_owned(),
            registry: registry.to_owned(),
        });
    };
    Ok(Credentials::Basic(user.to_owned(), secret(password)))
}

/// Asks a helper. `None` if it has nothing for `key`.
async fn ask(
    helper: &str,
    key: &str,
    path: &Path,
) -> Result<Option<Credentials>, CredentialsError> {
    let program = format!("docker-credential-{}", shown(helper));
    let failed = |why: String| CredentialsError::Helper {
        registry: key.to_owned(),
        program: program.clone(),
        path: path.to_owned(),
        why,
    };
    if !helper.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
        return Err(failed("expected a name of letters, digits, '-', '_', '.'".to_owned()));
    }
    let ran = tokio::time::timeout(HELPER, run(&program, key)).await;
    let (out, success) = ran
        .map_err(|_| failed(format!("expected an answer within {} s", HELPER.as_secs())))?
        .map_err(|e| failed(e.to_string()))?;
    if !success {
        // Helpers report an absent entry on standard output.
        let text = String::from_utf8_lossy(&out);
        if text.contains("credentials not found") {
            return Ok(None);
        }
        return Err(failed(format!("it failed: {}", shown(text.trim()))));
    }
    // The decoder's own text may quote the secret.
    let helped: Helped = serde_json::from_slice(&out)
        .map_err(|_| failed("expected JSON with Username and Secret".to_owned()))?;
    let secret = Secret::new(helped.secret);
    Ok(Some(match helped.username.as_str() {
        TOKEN_USER => Credentials::Identity(secret),
        "" => Credentials::Anonymous,
        _ => Credentials::Basic(helped.username, secret),
    }))
}

async fn run(program: &str, key: &str) -> io::Result<(Vec<u8>, bool)> {
    let mut child = tokio::process::Command::new(program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A helper that reads nothing prints why.
        let _ = stdin.write_all(key.as_bytes()).await;
    }
    let mut out = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(MAX_HELPER_BYTES).read_to_end(&mut out).await?;
    }
    Ok((out, child.wait().await?.success()))
}

#[cfg(test)]
#[path = "credentials_tests.rs"]
mod tests;
