//! Making a finished staging folder visible under a name, taking one away, and the errors of doing so.

use crate::blob::{Dir, IfTaken, Stage};
use crate::errors::{Damage, IoError, IoResult};
use crate::manifest::{self, FileRef, Manifest, ManifestError};
use crate::pins::PinError;
use crate::verify::{Kind, VerifyError};
use crate::{Inner, Store};
use dayfly_units::Name;
use std::fs::File;
use std::sync::Arc;

/// Why an image, a kernel or a snapshot was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is none of that name.
    #[error("no {kind} named {name}")]
    NotFound {
        /// `image`, `kernel` or `snapshot`.
        kind: &'static str,
        /// The name asked for.
        name: Name,
    },
    /// It is damaged, foreign or incomplete.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The host could not read it.
    #[error(transparent)]
    Io(#[from] IoError),
}

/// Why an upload was not stored. The store is as it was.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// More was announced than a store takes.
    #[error("{what}: expected at most {max} bytes, got {got}")]
    TooLarge {
        /// Such as `disk`.
        what: &'static str,
        /// The limit.
        max: u64,
        /// What was announced.
        got: u64,
    },
    /// The stream is not one zstd frame with what was announced, or the connection broke.
    #[error("{what} of the upload")]
    Stream {
        /// Such as `disk`.
        what: &'static str,
        /// Why.
        #[source]
        source: crate::sparse::CopyError,
    },
    /// The stream's frame does not end, or more bytes follow it.
    #[error("the upload: expected its end after {announced} bytes of content, got more")]
    Longer {
        /// Content that was announced.
        announced: u64,
    },
    /// What arrived is not what was announced.
    #[error("digest of {what}: expected {expected}, got {got}")]
    Digest {
        /// Such as `disk`.
        what: &'static str,
        /// As announced.
        expected: String,
        /// Of what arrived.
        got: String,
    },
    /// A size or a text that does not make sense.
    #[error("{place}: expected {expected}, got {got}")]
    Invalid {
        /// Which field.
        place: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        got: String,
    },
    /// The name is taken by different content that is in use.
    #[error("{kind} {name} is there with other content, and in use by {}", by.join(", "))]
    InUse {
        /// `image` or `kernel`.
        kind: &'static str,
        /// The name.
        name: Name,
        /// Who uses it.
        by: Vec<String>,
    },
    /// The host could not write it.
    #[error(transparent)]
    Io(#[from] IoError),
}

/// Why something was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// There is none of that name.
    #[error("no {kind} named {name}")]
    NotFound {
        /// `image`, `kernel` or `snapshot`.
        kind: &'static str,
        /// The name asked for.
        name: Name,
    },
    /// Others need it.
    #[error("{kind} {name} is in use by {}", by.join(", "))]
    InUse {
        /// `image`.
        kind: &'static str,
        /// The name.
        name: Name,
        /// Such as `snapshot base`, `VM web-1`.
        by: Vec<String>,
    },
    /// The host could not remove it.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl From<ManifestError> for OpenError {
    fn from(e: ManifestError) -> Self {
        match e {
            ManifestError::Io(e) => Self::Io(e),
            ManifestError::Damage(d) => Self::Damage(d),
        }
    }
}

impl From<VerifyError> for OpenError {
    fn from(e: VerifyError) -> Self {
        match e {
            VerifyError::Io(e) => Self::Io(e),
            VerifyError::Damage(d) => Self::Damage(d),
        }
    }
}

impl From<PinError> for OpenError {
    fn from(e: PinError) -> Self {
        match e {
            PinError::Io(e) => Self::Io(e),
            PinError::Damage(d) => Self::Damage(d),
        }
    }
}

/// The folder of `name` in `parent`.
pub(crate) fn folder(parent: &Dir, kind: &'static str, name: &Name) -> Result<Dir, OpenError> {
    match parent.sub(name.as_str()) {
        Err(e) if e.is_not_found() => Err(OpenError::NotFound { kind, name: name.clone() }),
        other => Ok(other?),
    }
}

/// Opens the file `file` of a folder, which `by` needs.
pub(crate) fn needed(folder: &Dir, file: &str, by: &str) -> Result<File, OpenError> {
    match folder.open(file) {
        Err(e) if e.is_not_found() => {
            let path = folder.path().join(file);
            Err(Damage::Missing { file: path, what: format!("file {file}"), by: by.to_owned() }.into())
        }
        other => Ok(other?),
    }
}

/// Writes the manifest of a staged folder, and waits until all of the folder is on disk.
pub(crate) fn seal<M: Manifest>(folder: &Dir, manifest: &M) -> IoResult<()> {
    let path = folder.path().join(manifest::FILE);
    let bytes = manifest::encode(manifest).map_err(IoError::new("encoding", &path))?;
    folder.write(manifest::FILE, &bytes)?;
    folder.sync()
}

impl Inner {
    /// Renames `stage`/`from` to `parent`/`name`, changing places with what is there. Call it while publishing.
    pub(crate) fn replace(&self, stage: &Stage, from: &str, parent: &Dir, name: &str) -> IoResult<()> {
        let taken = parent.has(name)?;
        let if_taken = if taken { IfTaken::Exchange } else { IfTaken::Refuse };
        stage.sync()?;
        stage.rename(from, parent, name, if_taken)?;
        self.verifier.forget(&parent.path().join(name));
        // An error must mean that all is as it was.
        parent.sync().inspect_err(|_| {
            let _best_effort = match if_taken {
                IfTaken::Exchange => stage.rename(from, parent, name, if_taken),
                IfTaken::Refuse => parent.rename(name, stage, from, if_taken),
            };
        })
    }

    /// Renames `parent`/`name` into a staging folder that then goes with all in it. Call it while publishing. Tells whether it was there.
    pub(crate) fn retire(self: &Arc<Self>, parent: &Dir, name: &str) -> IoResult<bool> {
        let stage = self.stage()?;
        match parent.rename(name, &stage, "retired", IfTaken::Refuse) {
            Ok(()) => {}
            Err(e) if e.is_not_found() => return Ok(false),
            Err(e) => return Err(e),
        }
        self.verifier.forget(&parent.path().join(name));
        parent.sync().inspect_err(|_| {
            let _best_effort = stage.rename("retired", parent, name, IfTaken::Refuse);
        })?;
        Ok(true)
    }

    /// Verifies `file` of `folder`, already open.
    pub(crate) fn verify(
        &self,
        folder: &Dir,
        name: &str,
        file: &File,
        expected: &FileRef,
        kind: Kind,
    ) -> Result<(), VerifyError> {
        self.verifier.check(&folder.path().join(name), file, expected, kind)
    }
}

impl Store {
    /// Milliseconds since 1970; 0 before.
    pub(crate) fn now_unix_ms() -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.ok().and_then(|d| u64::try_from(d.as_millis()).ok()).unwrap_or(0)
    }
}
