//! Publishes a finished staging folder under a name, removes a published one, and defines the
//! errors of both.

use crate::blob::{Dir, IfTaken, Stage};
use crate::errors::{Damage, IoError, IoResult};
use crate::inner::{Inner, Store};
use crate::integrity::verify::{Kind, VerifyError};
use crate::objects::manifest::{self, Manifest, ManifestError};
use crate::objects::types::FileRef;
use crate::vms::pins::PinError;
use dayfly_units::Name;
use dayfly_units::failpoint;
use std::fs::File;
use std::sync::Arc;

/// Why an image, a kernel or a snapshot was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No entry has that name.
    #[error("no {kind} named {name}")]
    NotFound {
        /// `image`, `kernel` or `snapshot`.
        kind: &'static str,
        /// The name in the request.
        name: Name,
    },
    /// Its files are damaged, of another format, or incomplete.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The host could not read its files.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl OpenError {
    /// Whether another version of dayfly wrote a file, in an encoding that this one does not read.
    pub(crate) const fn is_version(&self) -> bool {
        matches!(self, Self::Damage(damage) if damage.is_version())
    }
}

/// Why an upload was not stored. The store is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// The announced size is over the store's limit.
    #[error("{what}: expected at most {max} bytes, got {got}")]
    TooLarge {
        /// The part of the upload, such as `disk`.
        what: &'static str,
        /// The limit in bytes.
        max: u64,
        /// The announced size in bytes.
        got: u64,
    },
    /// The stream is not one zstd frame with the announced content, or the connection broke.
    #[error("{what} of the upload")]
    Stream {
        /// The part of the upload, such as `disk`.
        what: &'static str,
        /// The cause.
        #[source]
        source: crate::sparse::CopyError,
    },
    /// The frame has more content than announced, or bytes follow the frame.
    #[error("the upload: expected its end after {announced} bytes of content, got more")]
    Longer {
        /// Announced bytes of content.
        announced: u64,
    },
    /// The content's digest differs from the announced one.
    #[error("digest of {what}: expected {expected}, got {got}")]
    Digest {
        /// The part of the upload, such as `disk`.
        what: &'static str,
        /// The announced digest.
        expected: String,
        /// The digest of the bytes received.
        got: String,
    },
    /// A size or a text is out of its bounds.
    #[error("{place}: expected {expected}, got {got}")]
    Invalid {
        /// The field.
        place: &'static str,
        /// The allowed values.
        expected: &'static str,
        /// The value given.
        got: String,
    },
    /// The name belongs to different content that is in use.
    #[error("{kind} {name} is there with other content, and in use by {}", by.join(", "))]
    InUse {
        /// `image` or `kernel`.
        kind: &'static str,
        /// The name.
        name: Name,
        /// The snapshots and VMs that use it.
        by: Vec<String>,
    },
    /// The host could not write it.
    #[error(transparent)]
    Io(#[from] IoError),
}

/// Why an entry was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// No entry has that name.
    #[error("no {kind} named {name}")]
    NotFound {
        /// `image`, `kernel` or `snapshot`.
        kind: &'static str,
        /// The name in the request.
        name: Name,
    },
    /// Other objects depend on the entry.
    #[error(
        "{kind} {name} is in use by {}; remove these first, `dayfly ps -a` lists VMs that have \
         ended too",
        by.join(", ")
    )]
    InUse {
        /// `image`.
        kind: &'static str,
        /// The name.
        name: Name,
        /// The objects that use it, such as `snapshot base`, `VM web-1`.
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

/// Opens the folder of `name` in `parent`.
pub(crate) fn folder(parent: &Dir, kind: &'static str, name: &Name) -> Result<Dir, OpenError> {
    match parent.sub(name.as_str()) {
        Err(e) if e.is_not_found() => Err(OpenError::NotFound { kind, name: name.clone() }),
        other => Ok(other?),
    }
}

/// Opens the file `file` of a folder. `by` is the object that needs it, named in errors.
pub(crate) fn needed(folder: &Dir, file: &str, by: &str) -> Result<File, OpenError> {
    match folder.open(file) {
        Err(e) if e.is_not_found() => {
            let path = folder.path().join(file);
            Err(Damage::Missing { file: path, what: format!("file {file}"), by: by.to_owned() }
                .into())
        }
        other => Ok(other?),
    }
}

/// Writes the manifest of a staged folder, and `fsync`s the folder.
pub(crate) fn seal<M: Manifest>(folder: &Dir, manifest: &M) -> IoResult<()> {
    let path = folder.path().join(manifest::FILE);
    let bytes = manifest::encode(manifest).map_err(IoError::new("encoding", &path))?;
    folder.write(manifest::FILE, &bytes)?;
    folder.sync()
}

/// An object that was removed, until its content is deleted.
pub(crate) struct Retired {
    stage: Option<Stage>,
    inner: Arc<Inner>,
}

impl Drop for Retired {
    fn drop(&mut self) {
        self.stage = None;
        self.inner.restore_reserve();
    }
}

impl Inner {
    /// Renames `stage`/`from` to `parent`/`name`, exchanging it with an existing entry. The caller
    /// holds the publish lock.
    pub(crate) fn replace(
        &self,
        stage: &Stage,
        from: &str,
        parent: &Dir,
        name: &str,
    ) -> IoResult<()> {
        self.writable()?;
        let taken = parent.has(name)?;
        let if_taken = if taken { IfTaken::Exchange } else { IfTaken::Refuse };
        stage.sync()?;
        stage.rename(from, parent, name, if_taken)?;
        failpoint::reached("store.replace.renamed");
        self.verifier.forget(&parent.path().join(name));
        // The caller takes an error to mean that nothing changed, so undo the rename.
        parent.sync().inspect_err(|_| {
            let _best_effort = match if_taken {
                IfTaken::Exchange => stage.rename(from, parent, name, if_taken),
                IfTaken::Refuse => parent.rename(name, stage, from, if_taken),
            };
        })
    }

    /// Renames `parent`/`name` into a staging folder. The caller holds the publish lock, and drops
    /// the result after it: this deletes the folder with its content. `None` if there was no such
    /// entry.
    pub(crate) fn retire(self: &Arc<Self>, parent: &Dir, name: &str) -> IoResult<Option<Retired>> {
        self.writable()?;
        let stage = self.with_reserve(IoError::is_no_space, || self.stage())?;
        let rename = || parent.rename(name, &stage, "retired", IfTaken::Refuse);
        match self.with_reserve(IoError::is_no_space, rename) {
            Ok(()) => {}
            Err(e) if e.is_not_found() => return Ok(None),
            Err(e) => return Err(e),
        }
        failpoint::reached("store.remove.renamed");
        self.verifier.forget(&parent.path().join(name));
        parent.sync().inspect_err(|_| {
            let _best_effort = stage.rename("retired", parent, name, IfTaken::Refuse);
        })?;
        failpoint::reached("store.remove.synced");
        Ok(Some(Retired { stage: Some(stage), inner: Arc::clone(self) }))
    }

    /// Verifies `file`, which is open from `folder`/`name`.
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
    /// Milliseconds since 1970; 0 if the clock is before 1970.
    pub(crate) fn now_unix_ms() -> u64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.ok().and_then(|d| u64::try_from(d.as_millis()).ok()).unwrap_or(0)
    }
}
