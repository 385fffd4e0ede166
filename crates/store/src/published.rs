//! What the publish lock protects beside the folders: a log of the snapshots that changed while a
//! gc looks at all of them ([`crate::watch`]).

/// What the publish lock protects beside the folders.
#[derive(Debug, Default)]
pub(crate) struct Published {
    /// Number of [`Watch`]es.
    pub(crate) watches: usize,
    /// The names of snapshots that were published or removed, while there is a watch.
    pub(crate) changed: Vec<String>,
}
