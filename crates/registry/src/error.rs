//! Why something was not pulled.

use crate::credentials::CredentialsError;
use std::io;
use std::path::PathBuf;

/// Why a manifest or a blob was not pulled.
///
/// Causes of the network are texts, not sources: a `BrokenPipe` among the sources would be taken
/// for a closed standard output.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// A file of the cache could not be read or written.
    #[error("{what} {path}: {source}", path = path.display())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// There is no connection to the registry.
    #[error("registry {host}: no connection: {why}; check its name, and this host's network")]
    Connect {
        /// Host and port.
        host: String,
        /// The cause.
        why: String,
    },
    /// The TLS handshake failed.
    #[error("registry {host}: TLS: {why}; {next}")]
    Tls {
        /// Host and port.
        host: String,
        /// The cause.
        why: String,
        /// What the user can do.
        next: String,
    },
    /// Nothing arrived for too long.
    #[error("{url}: expected an answer, got silence for {seconds} s; try again later")]
    Silent {
        /// The request.
        url: String,
        /// The bound.
        seconds: u64,
    },
    /// The connection ended early, or its bytes are no HTTP.
    #[error("{url}: {why}")]
    Broken {
        /// The request.
        url: String,
        /// What is wrong.
        why: String,
    },
    /// The answer has an unexpected status.
    #[error("{url}: expected {expected}, got {status}{message}")]
    Status {
        /// The request.
        url: String,
        /// The expected status.
        expected: &'static str,
        /// The status, with its usual words.
        status: String,
        /// The first error in the answer's body, with `: ` before it, or nothing.
        message: String,
        /// Whether a later attempt may succeed.
        retry: bool,
        /// Seconds that the registry asks to wait.
        wait_s: Option<u64>,
    },
    /// The registry has no such image.
    #[error("image {image}: the registry {registry} has no such image{message}")]
    NotFound {
        /// The reference.
        image: String,
        /// The registry.
        registry: String,
        /// The first error in the answer's body, with `: ` before it, or nothing.
        message: String,
    },
    /// The registry refuses the user.
    #[error(
        "image {image}: the registry {registry} refuses {who}{message}; expected an image that \
         exists and is public, or credentials in {config} (docker login, or skopeo login \
         --compat-auth-file)"
    )]
    Denied {
        /// The reference.
        image: String,
        /// The registry.
        registry: String,
        /// As whom the request was made.
        who: String,
        /// The first error in the answer's body, with `: ` before it, or nothing.
        message: String,
        /// The file for credentials.
        config: String,
    },
    /// The registry asks for something that would send credentials to a wrong place, or that no
    /// client can do.
    #[error("registry {registry}: authentication: expected {expected}, got {got}")]
    Challenge {
        /// The registry.
        registry: String,
        /// What is accepted.
        expected: &'static str,
        /// What was found.
        got: String,
    },
    /// Credentials cannot be read.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// A redirect is not followed.
    #[error("{url}: redirect: expected {expected}, got {got}")]
    Redirect {
        /// The request.
        url: String,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// An answer is longer than its bound.
    #[error("{what}: expected at most {max} bytes, got more")]
    TooLarge {
        /// The request, or the blob.
        what: String,
        /// The bound.
        max: u64,
    },
    /// A document has an unexpected value.
    #[error("{url}: {place}: expected {expected}, got {got}")]
    Document {
        /// The request.
        url: String,
        /// The place in the answer.
        place: &'static str,
        /// What is accepted.
        expected: String,
        /// What was found.
        got: String,
    },
    /// Content has another digest than its name.
    #[error(
        "{what}: expected {expected}, got {got} of {bytes} bytes; the registry or the way to it \
         changes data"
    )]
    Digest {
        /// The blob or the manifest, with its registry.
        what: String,
        /// The digest that names it.
        expected: String,
        /// The digest of what arrived.
        got: String,
        /// The length of what arrived.
        bytes: u64,
    },
}

/// An error of a file operation.
pub(crate) fn io(
    what: &'static str,
    path: &std::path::Path,
) -> impl FnOnce(io::Error) -> RegistryError + use<> {
    let path = path.to_owned();
    move |source| RegistryError::Io { what, path, source }
}

impl RegistryError {
    /// Whether a later attempt may succeed.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::Broken { .. } => true,
            Self::Status { retry, .. } => *retry,
            _ => false,
        }
    }

    /// Whether another endpoint may have the image, such as the registry behind a mirror.
    pub(crate) fn is_of_the_endpoint(&self) -> bool {
        !matches!(self, Self::Io { .. })
    }

    /// Whether the registry says that it has no such image, or does not say whether it has one.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::NotFound { .. } | Self::Denied { .. })
    }
}
