//! Records every change of the disk for tests. Outside tests nothing is recorded.

use std::fs::File;
use std::path::Path;

/// A change that succeeded.
#[cfg_attr(not(test), expect(dead_code, reason = "read in tests"))]
pub(crate) enum Change<'a> {
    Folder(&'a Path),
    File(&'a Path),
    Write { path: &'a Path, at: u64, bytes: &'a [u8] },
    SyncFile { path: &'a Path, file: &'a File },
    SyncFolder(&'a Path),
    Rename { from: &'a Path, to: &'a Path, exchange: bool },
    Link { from: &'a Path, to: &'a Path },
    Remove(&'a Path),
}

#[cfg(not(test))]
#[inline]
pub(crate) const fn made(_change: &Change) {}

#[cfg(test)]
pub(crate) use recorded::{
    Event, Log, acknowledge, acknowledge_as, listening, made, record, record_to,
};

#[cfg(test)]
mod recorded {
    use super::Change;
    use dayfly_units::sync::lock;
    use std::cell::RefCell;
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;
    use std::sync::{Arc, Mutex};

    /// A recorded [`Change`].
    #[derive(Debug, Clone)]
    pub(crate) enum Event {
        Folder(PathBuf),
        File(PathBuf),
        Write {
            path: PathBuf,
            at: usize,
            bytes: Vec<u8>,
        },
        /// With the file's content at that time, because tests also write to files without this
        /// module, as a VMM does.
        SyncFile {
            path: PathBuf,
            bytes: Vec<u8>,
        },
        SyncFolder(PathBuf),
        Rename {
            from: PathBuf,
            to: PathBuf,
            exchange: bool,
        },
        Link {
            from: PathBuf,
            to: PathBuf,
        },
        Remove(PathBuf),
        /// An operation reported success to its caller.
        Acknowledged(&'static str),
    }

    /// Changes in order; several threads may share one.
    pub(crate) type Log = Arc<Mutex<Vec<Event>>>;

    thread_local!(static LOG: RefCell<Option<Log>> = const { RefCell::new(None) });

    pub(crate) fn made(change: &Change) {
        LOG.with_borrow(|log| {
            let Some(log) = log else { return };
            lock(log).push(match *change {
                Change::Folder(path) => Event::Folder(path.to_owned()),
                Change::File(path) => Event::File(path.to_owned()),
                Change::Write { path, at, bytes } => Event::Write {
                    path: path.to_owned(),
                    at: usize::try_from(at).unwrap(),
                    bytes: bytes.to_owned(),
                },
                Change::SyncFile { path, file } => {
                    let mut bytes =
                        vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
                    file.read_exact_at(&mut bytes, 0).unwrap();
                    Event::SyncFile { path: path.to_owned(), bytes }
                }
                Change::SyncFolder(path) => Event::SyncFolder(path.to_owned()),
                Change::Rename { from, to, exchange } => {
                    Event::Rename { from: from.to_owned(), to: to.to_owned(), exchange }
                }
                Change::Link { from, to } => {
                    Event::Link { from: from.to_owned(), to: to.to_owned() }
                }
                Change::Remove(path) => Event::Remove(path.to_owned()),
            });
        });
    }

    /// Runs `run` and returns every change that this thread made.
    pub(crate) fn record<T>(run: impl FnOnce() -> T) -> (T, Vec<Event>) {
        let log = Log::default();
        let result = record_to(&log, run);
        let events = std::mem::take(&mut *lock(&log));
        (result, events)
    }

    /// Runs `run` and adds every change that this thread made to `log`.
    pub(crate) fn record_to<T>(log: &Log, run: impl FnOnce() -> T) -> T {
        LOG.set(Some(Arc::clone(log)));
        let result = run();
        LOG.set(None);
        result
    }

    /// Records that all changes of this thread up to now were acknowledged.
    pub(crate) fn acknowledge() {
        acknowledge_as("");
    }

    /// As [`acknowledge`], with a name for what was acknowledged.
    pub(crate) fn acknowledge_as(what: &'static str) {
        LOG.with_borrow(|log| {
            if let Some(log) = log {
                lock(log).push(Event::Acknowledged(what));
            }
        });
    }

    /// Whether changes on this thread are recorded.
    pub(crate) fn listening() -> bool {
        LOG.with_borrow(Option::is_some)
    }
}
