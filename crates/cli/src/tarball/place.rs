//! Docker's rules for the destination of a copy.

/// The existing entry at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum There {
    /// No entry exists.
    Missing,
    /// A folder, or a link to a folder.
    Folder,
    /// Any other entry.
    File,
}

/// The destination of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Inside the destination folder, under the source's name.
    Inside,
    /// The source's content, inside the destination folder.
    Contents,
    /// Under the destination's name.
    As,
}

/// Why a copy is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// The source is a folder, and the destination is a file.
    #[error("is a file, and a folder cannot be copied over it")]
    FolderOverFile,
    /// The destination is `name/`, and no such folder exists.
    #[error("no such folder; make it first, or leave the last / away")]
    NoFolder,
    /// The source is `file/.`.
    #[error("the source is no folder; leave /. away")]
    NotAFolder,
}

/// Decides the destination of a copy. `slash`: the destination ends in `/`. `folder`: the source is
/// a folder. `contents`: the source ends in `/.`.
///
/// # Errors
/// [`PlaceError`].
pub const fn place(
    there: There,
    slash: bool,
    folder: bool,
    contents: bool,
) -> Result<Place, PlaceError> {
    match (there, folder) {
        (_, false) if contents => Err(PlaceError::NotAFolder),
        (There::Folder, true) if contents => Ok(Place::Contents),
        (There::Folder, _) => Ok(Place::Inside),
        (There::File, true) => Err(PlaceError::FolderOverFile),
        (There::Missing | There::File, false) if slash => Err(PlaceError::NoFolder),
        (There::Missing | There::File, _) => Ok(Place::As),
    }
}
