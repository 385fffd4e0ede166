//! Docker's rules for where a copy goes.

/// What is at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Nothing.
    Missing,
    /// A folder, or a link to one.
    Folder,
    /// Anything else.
    File,
}

/// Where a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Into the destination, under its own name.
    Inside,
    /// What is in the source, into the destination.
    Contents,
    /// To the destination's own name.
    As,
}

/// Why a copy goes nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// A folder onto a file.
    #[error("is a file, and a folder cannot be copied over it")]
    FolderOverFile,
    /// `name/` that is not there.
    #[error("no such folder; make it first, or leave the last / away")]
    NoFolder,
    /// `file/.`
    #[error("the source is no folder; leave /. away")]
    NotAFolder,
}

/// Where a copy goes. `slash`: the destination was written with a `/` at its end; `contents`: the source with `/.`.
///
/// # Errors
/// [`PlaceError`].
pub const fn place(there: Kind, slash: bool, folder: bool, contents: bool) -> Result<Place, PlaceError> {
    match (there, folder) {
        (_, false) if contents => Err(PlaceError::NotAFolder),
        (Kind::Folder, true) if contents => Ok(Place::Contents),
        (Kind::Folder, _) => Ok(Place::Inside),
        (Kind::File, true) => Err(PlaceError::FolderOverFile),
        (Kind::Missing | Kind::File, false) if slash => Err(PlaceError::NoFolder),
        (Kind::Missing | Kind::File, _) => Ok(Place::As),
    }
}
