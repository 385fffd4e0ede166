//! Functions for the crate `fuzz`. Contents of the trees are files below `scratch`.

use super::blobs::{Blobs, sha256};
use super::choice::Wanted;
use super::error::BuildError;
use super::ext4;
use super::layer;
use super::oci;
use super::spool::Spool;
use super::tree::{Kind, NodeId, Tree};
use super::types::{Limits, Progress};
use dayfly_units::ImageConfig;
use std::path::Path;

/// What an image was unpacked into.
#[derive(Debug)]
pub struct Unpacked {
    /// Each name from the root, with the name of its kind.
    pub names: Vec<(Vec<u8>, &'static str)>,
    /// The number of nodes (inodes).
    pub nodes: usize,
}

const LIMITS: Limits = Limits { max_entries: 2000, max_content_bytes: 4 << 20 };

fn unpacked<T>(
    scratch: &Path,
    act: impl FnOnce(&mut Tree, &mut Spool<'_>) -> Result<T, BuildError>,
) -> Result<(Unpacked, T), BuildError> {
    let mut tree = Tree::new(2000);
    let mut progress = |_: Progress<'_>| {};
    let result = act(&mut tree, &mut Spool::new(scratch, LIMITS, &mut progress))?;
    let mut names = Vec::new();
    walk(&tree, Tree::ROOT, b"", &mut names);
    Ok((Unpacked { names, nodes: tree.node_count() }, result))
}

fn walk(tree: &Tree, id: NodeId, path: &[u8], names: &mut Vec<(Vec<u8>, &'static str)>) {
    let Kind::Dir(children) = &tree.node(id).kind else { return };
    for (name, child) in children {
        let below = [path, b"/", name].concat();
        names.push((below.clone(), tree.node(child.id).kind.name()));
        walk(tree, child.id, &below, names);
    }
}

/// An image for guests whose CPUs have x86-64-v3.
const fn wanted(image: Option<&str>) -> Wanted<'_> {
    Wanted { image, cpu_level: 3 }
}

/// Applies the layers `archives` to an empty tree.
///
/// # Errors
/// [`BuildError`].
pub fn layer(archives: &[&[u8]], scratch: &Path) -> Result<Unpacked, BuildError> {
    let all = unpacked(scratch, |tree, spool| {
        archives
            .iter()
            .try_for_each(|archive| layer::apply(tree, spool, *archive, "layer").map(drop))
    })?;
    Ok(all.0)
}

/// Unpacks the image of an OCI layout in `folder`.
///
/// # Errors
/// [`BuildError`].
pub fn layout(
    folder: &Path,
    image: Option<&str>,
    scratch: &Path,
) -> Result<(Unpacked, ImageConfig), BuildError> {
    let blobs = Blobs::Folder(folder.to_owned());
    unpacked(scratch, |tree, spool| oci::layout(&blobs, folder, wanted(image), tree, spool))
}

/// Unpacks the image of a `docker save` archive at `path`.
///
/// # Errors
/// [`BuildError`].
pub fn docker(
    path: &Path,
    image: Option<&str>,
    scratch: &Path,
) -> Result<(Unpacked, ImageConfig), BuildError> {
    let blobs = Blobs::archive(path)?;
    unpacked(scratch, |tree, spool| oci::docker(&blobs, path, wanted(image), tree, spool))
}

/// Whether a document that a registry sent is an index.
///
/// # Errors
/// [`BuildError`].
pub fn document(bytes: &[u8]) -> Result<bool, BuildError> {
    super::pulled::is_index("document", "", bytes)
}

/// The digest of a blob, `sha256:` and hexadecimal digits.
#[must_use]
pub fn digest(blob: &[u8]) -> String {
    sha256(blob)
}

/// The line of a command for debugfs.
///
/// # Errors
/// A word that debugfs cannot read.
pub fn script_line(words: &[&[u8]]) -> Result<Vec<u8>, BuildError> {
    ext4::quoted(words)
}
