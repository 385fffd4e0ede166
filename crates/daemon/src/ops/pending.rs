//! Stores pending snapshots: `dayfly fork --as`.
//!
//! ```text
//!  ForkPoint ─▶ found by name ─▶ RAM complete ─▶ copied, coloured ─▶ hashed, synced, published
//!              ╰── clones start from the host's memory ────────────────────────╯
//! ```
//!
//! Until it is published, a pending snapshot exists only in the daemon; if the daemon ends before,
//! the snapshot is lost.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::daemon::Daemon;
use crate::model::disk::Disk;
use crate::model::facts::Facts;
use crate::ops::publish::{self, Ready};
use crate::ops::save::Saved;
use crate::templates::fork_point::ForkPoint;
use crate::templates::memory_backing::MemoryBacking;
use crate::vmm::sizes::Template;
use dayfly_store::Meter;
use dayfly_units::{Name, error::chain, failpoint};
use dayfly_vmm::memory::backing::{Backing, Piece};
use rustix::fs::SeekFrom;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Bytes of one copy.
const CHUNK_BYTES: usize = 1 << 20;
const ZERO: [u8; 4096] = [0; 4096];

/// A pending snapshot whose fork is in progress; it is removed if this is dropped without
/// [`Self::keep`].
#[derive(Debug)]
pub struct Begun {
    daemon: Arc<Daemon>,
    name: Option<Name>,
}

impl Begun {
    /// Keeps the pending snapshot.
    pub fn keep(mut self) {
        self.name = None;
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let Some(name) = self.name.take() else { return };
        let daemon = self.daemon.clone();
        self.daemon.undo.spawn(async move {
            if let Err(e) = blocking(move || daemon.templates.remove_snapshot(&name)).await {
                tracing::error!("a template that no client waited for: {e}");
            }
        });
    }
}

/// Makes the fork point the pending snapshot `name`: clones of it can start at once, while it is
/// being stored.
///
/// # Errors
/// The name is taken, or the host has too few descriptors.
pub async fn begin(
    daemon: &Arc<Daemon>,
    fork_point: &Arc<ForkPoint>,
    name: Name,
) -> Outcome<Begun> {
    let template = Arc::new(fork_point.as_template(&name)?);
    let removed = daemon.templates.pending().begin(&name, template.clone())?;
    failpoint::reached("daemon.pending.begun");
    let begun = Begun { daemon: daemon.clone(), name: Some(name.clone()) };
    // The snapshot of the VM that was forked.
    let parent = fork_point.facts.snapshot.clone();
    let work = daemon.clone();
    daemon.undo.spawn(async move {
        let stored = store(&work, &template, &name, parent, &removed).await;
        failpoint::reached("daemon.pending.stored");
        drop(template);
        let stored = stored.unwrap_or_else(|e| {
            tracing::error!(snapshot = %name, "a fork did not become a template: {e}");
            false
        });
        if let Err(e) = finish(&work, &name, stored).await {
            tracing::error!(snapshot = %name, "{e}");
        }
    });
    Ok(begun)
}

/// Ends the pending snapshot: from now on it is found in the store, unless it was removed
/// meanwhile.
async fn finish(daemon: &Arc<Daemon>, name: &Name, stored: bool) -> Outcome<()> {
    let pending = daemon.templates.pending();
    let (shared, name) = (daemon.clone(), name.clone());
    if !pending.finish(&name) {
        let (shared, gone) = (daemon.clone(), name.clone());
        let removed = if stored {
            blocking(move || shared.templates.remove_stored(&gone)).await
        } else {
            Ok(())
        };
        pending.end(&name);
        return removed;
    }
    if stored {
        let template =
            blocking(move || Template::of(&*shared.templates.open_snapshot(&name)?)).await?;
        daemon.pool.expect(&template).await;
    }
    Ok(())
}

/// Copies and stores the pending snapshot; `false` if it was removed meanwhile.
async fn store(
    daemon: &Arc<Daemon>,
    fork_point: &Arc<ForkPoint>,
    name: &Name,
    parent: Option<Name>,
    removed: &CancellationToken,
) -> Outcome<bool> {
    if let Some(pager) = MemoryBacking::Fork(fork_point.ram.clone()).filling() {
        tokio::select! {
            whole = pager.whole(daemon.config.deadlines.save) => whole?,
            () = removed.cancelled() => return Ok(false),
            () = daemon.stop.cancelled() => return Ok(false),
        }
    }
    let (shared, of, called) = (daemon.clone(), fork_point.clone(), name.clone());
    blocking(move || commit(&shared, &of, &called, parent)).await
}

fn commit(
    daemon: &Daemon,
    fork_point: &ForkPoint,
    name: &Name,
    parent: Option<Name>,
) -> Outcome<bool> {
    let failed = |e: io::Error| {
        ApiError::internal(format_args!("snapshot {name}: putting it together: {e}"))
    };
    let writer =
        daemon.templates.store().snapshot_writer_in_memory(name, fork_point.facts.memory_bytes)?;
    copy_ram(fork_point, writer.memory()).map_err(failed)?;
    copy(
        &fork_point.state,
        0,
        fork_point.state.metadata().map_err(failed)?.len(),
        writer.state(),
        0,
    )
    .map_err(failed)?;
    failpoint::reached("daemon.pending.copied");
    let disks: Vec<Disk> = fork_point.disks.iter().map(|open| open.disk.clone()).collect();
    let facts = Facts { snapshot: parent, ..fork_point.facts.clone() };
    let spec = publish::spec_of(&facts, &disks, fork_point.agent_version.clone());
    let mut ready = Ready::new(name, Saved::without_page_map(writer.saved()), &spec)?;
    if let Some(record) = publish::inherited(daemon, &facts) {
        ready = ready.expecting(&record)?;
    }
    let wanted = daemon.templates.pending().is_wanted(name) && !daemon.stop.is_cancelled();
    if wanted {
        ready.store(daemon, None, &Meter::default())?;
    }
    Ok(wanted)
}

/// Copies the RAM of the fork point from all files that have parts of it.
fn copy_ram(fork_point: &ForkPoint, into: &File) -> io::Result<()> {
    let memory = fork_point.ram.memory.try_clone()?;
    let backing = match &fork_point.ram.shared {
        None => Backing::of(memory),
        Some(shared) => {
            let others = shared.files.iter().map(File::try_clone).collect::<io::Result<_>>()?;
            Backing::sharing(memory, &shared.list, others)
                .map_err(|e| io::Error::other(chain(&e)))?
        }
    };
    let pieces = backing.pieces(0..fork_point.facts.memory_bytes);
    pieces
        .into_iter()
        .try_for_each(|Piece { offset, len, file, at, .. }| copy(file, at, len, into, offset))
}

/// Copies `len` bytes, or fewer at the end of the file. Zero pages become holes.
fn copy(from: &File, at: u64, len: u64, into: &File, to: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let (mut at, end, shift) = (at, at + len, to.wrapping_sub(at));
    while at < end {
        at = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let hole = rustix::fs::seek(from, SeekFrom::Hole(at))?.min(end);
        while at < hole {
            let size = usize::try_from(hole - at).unwrap_or(usize::MAX).min(CHUNK_BYTES);
            let Some(chunk) = buffer.get_mut(..size) else { return Ok(()) };
            from.read_exact_at(chunk, at)?;
            for page in chunk.chunks(ZERO.len()) {
                if ZERO.get(..page.len()) != Some(page) {
                    into.write_all_at(page, at.wrapping_add(shift))?;
                }
                at += page.len() as u64;
            }
        }
    }
    Ok(())
}
