//! Forks that become templates: `dayfly fork --as`.
//!
//! ```text
//! Epoch ─▶ found by its name ─▶ all memory has arrived ─▶ put together, coloured ─▶ hashed, synced, published ─▶ a snapshot like any other
//!             ╰── clones start from what is in the host's memory ──────────────────────────╯
//! ```
//!
//! Until it is published it lives with the daemon: one that ends before has not made it.

use crate::daemon::Daemon;
use crate::error::{Fault, Outcome, blocking, chain};
use crate::fork::{Epoch, EpochDisk};
use crate::snapshot::{self, Ready, Saved};
use crate::time::unix_ms;
use crate::vm::beneath::Beneath;
use crate::vm::registry::lock;
use crate::vm::source::Template;
use crate::vm::{Disk, Facts, ForkFacts};
use dayfly_api::types;
use dayfly_store::Meter;
use dayfly_units::Name;
use dayfly_vmm::memory::backing::{Backing, Piece};
use rustix::fs::SeekFrom;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use tokio_util::sync::CancellationToken;

/// Bytes that are copied at once.
const CHUNK_BYTES: usize = 1 << 20;
const ZERO: [u8; 4096] = [0; 4096];

/// Those that are not stored yet.
#[derive(Debug, Default)]
pub struct Forming(Mutex<HashMap<Name, Growing>>);

#[derive(Debug)]
struct Growing {
    epoch: Arc<Epoch>,
    /// Whether nobody wants it any more. Its name is free once it is also gone from the store.
    removed: CancellationToken,
}

impl Growing {
    fn is_wanted(&self) -> bool {
        !self.removed.is_cancelled()
    }
}

impl Forming {
    /// What clones of it start from.
    #[must_use]
    pub fn find(&self, name: &Name) -> Option<Arc<Epoch>> {
        lock(&self.0).get(name).filter(|growing| growing.is_wanted()).map(|growing| growing.epoch.clone())
    }

    /// Whether the name is taken.
    #[must_use]
    pub fn has(&self, name: &Name) -> bool {
        lock(&self.0).contains_key(name)
    }

    /// Gives what tells that it was removed.
    fn begin(&self, name: &Name, epoch: Arc<Epoch>) -> Outcome<CancellationToken> {
        match lock(&self.0).entry(name.clone()) {
            Entry::Occupied(_) => Err(snapshot::taken(name)),
            Entry::Vacant(free) => {
                let removed = CancellationToken::new();
                free.insert(Growing { epoch, removed: removed.clone() });
                Ok(removed)
            }
        }
    }

    fn is_wanted(&self, name: &Name) -> bool {
        lock(&self.0).get(name).is_some_and(Growing::is_wanted)
    }

    /// It is stored, or will not be; `false` where it is to be removed from the store before [`Self::end`].
    fn finish(&self, name: &Name) -> bool {
        let mut all = lock(&self.0);
        let wanted = all.get(name).is_some_and(Growing::is_wanted);
        let ended = if wanted { all.remove(name) } else { None };
        drop(all);
        // Outside the lock: the last to know of an epoch removes files.
        drop(ended);
        wanted
    }

    fn end(&self, name: &Name) {
        let ended = lock(&self.0).remove(name);
        drop(ended);
    }

    /// Nobody wants it any more; whether there was one.
    pub fn remove(&self, name: &Name) -> bool {
        let all = lock(&self.0);
        let growing = all.get(name).filter(|growing| growing.is_wanted());
        growing.map(|growing| growing.removed.cancel()).is_some()
    }

    /// One of them, in the API's words.
    #[must_use]
    pub fn shown(&self, name: &Name) -> Option<types::Snapshot> {
        self.find(name).map(|epoch| shown(name, &epoch.facts))
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> Vec<types::Snapshot> {
        let wanted = lock(&self.0);
        let wanted = wanted.iter().filter(|(_, growing)| growing.is_wanted());
        wanted.map(|(name, growing)| shown(name, &growing.epoch.facts)).collect()
    }
}

fn shown(name: &Name, facts: &Facts) -> types::Snapshot {
    types::Snapshot {
        name: name.clone(),
        created_unix_ms: facts.created_unix_ms,
        image: facts.image.clone(),
        kernel: facts.kernel.name.clone(),
        // What `facts` names is itself.
        parent: None,
        vcpus: facts.vcpus,
        memory_bytes: facts.memory_bytes,
        memory_stored_bytes: 0,
        layers: Vec::new(),
        layers_stored_bytes: 0,
        forming: true,
        resident: None,
    }
}

impl Epoch {
    /// The same as a template, which outlives the VM and whatever becomes of its layers.
    fn as_template(&self, name: &Name) -> Outcome<Self> {
        let failed = |e: io::Error| Fault::internal(format_args!("template {name}: descriptors: {e}"));
        let open = |open: &EpochDisk| {
            let both = |(data, map): &(File, File)| Ok::<_, io::Error>((data.try_clone()?, map.try_clone()?));
            let layers = open.layers.iter().map(both).collect::<Result<_, _>>()?;
            Ok::<_, io::Error>(EpochDisk { base: open.base.try_clone()?, layers, disk: open.disk.clone() })
        };
        let disks = self.disks.iter().map(open).collect::<Result<_, _>>().map_err(failed)?;
        let facts = Facts {
            snapshot: Some(name.clone()),
            fork: ForkFacts::default(),
            created_unix_ms: unix_ms(),
            ..self.facts.clone()
        };
        Ok(Self {
            ram: self.ram.clone(),
            state: self.state.try_clone().map_err(failed)?,
            disks,
            facts,
            agent_version: self.agent_version.clone(),
            pin: self.pin.clone(),
            frozen: self.frozen,
        })
    }
}

/// A template that has begun; one that is dropped without [`Self::keep`] is removed again.
#[derive(Debug)]
pub struct Begun {
    daemon: Arc<Daemon>,
    name: Option<Name>,
}

impl Begun {
    /// It stays.
    pub fn keep(mut self) {
        self.name = None;
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let Some(name) = self.name.take() else { return };
        let daemon = self.daemon.clone();
        self.daemon.undo.spawn(async move {
            if let Err(e) = blocking(move || daemon.depot.remove_snapshot(&name)).await {
                tracing::error!("a template that nobody waited for: {e}");
            }
        });
    }
}

/// Makes the epoch the template `name`: clones of it can start at once, and it is stored meanwhile.
///
/// # Errors
/// The name is taken, or the host cannot.
pub async fn begin(daemon: &Arc<Daemon>, epoch: &Arc<Epoch>, name: Name) -> Outcome<Begun> {
    let template = Arc::new(epoch.as_template(&name)?);
    let removed = daemon.depot.forming().begin(&name, template.clone())?;
    let begun = Begun { daemon: daemon.clone(), name: Some(name.clone()) };
    // That of the VM which was forked.
    let parent = epoch.facts.snapshot.clone();
    let work = daemon.clone();
    daemon.undo.spawn(async move {
        let stored = store(&work, &template, &name, parent, &removed).await;
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

/// From now on it is found in the store, if it is there; or it goes from there.
async fn finish(daemon: &Arc<Daemon>, name: &Name, stored: bool) -> Outcome<()> {
    let forming = daemon.depot.forming();
    let (shared, name) = (daemon.clone(), name.clone());
    if !forming.finish(&name) {
        let (shared, gone) = (daemon.clone(), name.clone());
        let removed = if stored { blocking(move || shared.depot.remove_stored(&gone)).await } else { Ok(()) };
        forming.end(&name);
        return removed;
    }
    if stored {
        let template = blocking(move || Template::of(&*shared.depot.open_snapshot(&name)?)).await?;
        daemon.pool.expect(&template).await;
    }
    Ok(())
}

/// Puts it together and stores it; `false` where nobody wants it any more.
async fn store(
    daemon: &Arc<Daemon>,
    epoch: &Arc<Epoch>,
    name: &Name,
    parent: Option<Name>,
    removed: &CancellationToken,
) -> Outcome<bool> {
    if let Some(pager) = Beneath::Fork(epoch.ram.clone()).filling() {
        tokio::select! {
            whole = pager.whole(daemon.config.deadlines.save) => whole?,
            () = removed.cancelled() => return Ok(false),
            () = daemon.stop.cancelled() => return Ok(false),
        }
    }
    let (shared, of, called) = (daemon.clone(), epoch.clone(), name.clone());
    blocking(move || commit(&shared, &of, &called, parent)).await
}

fn commit(daemon: &Daemon, epoch: &Epoch, name: &Name, parent: Option<Name>) -> Outcome<bool> {
    let failed = |e: io::Error| Fault::internal(format_args!("snapshot {name}: putting it together: {e}"));
    let writer = daemon.depot.store().snapshot_writer_in_memory(name, epoch.facts.memory_bytes)?;
    copy_ram(epoch, writer.memory()).map_err(failed)?;
    copy(&epoch.state, 0, epoch.state.metadata().map_err(failed)?.len(), writer.state(), 0)
        .map_err(failed)?;
    let disks: Vec<Disk> = epoch.disks.iter().map(|open| open.disk.clone()).collect();
    let facts = Facts { snapshot: parent, ..epoch.facts.clone() };
    let spec = snapshot::spec_of(&facts, &disks, epoch.agent_version.clone());
    let mut ready = Ready::new(name, Saved::without_page_map(writer.saved()), &spec)?;
    if let Some(record) = snapshot::inherited(daemon, &facts) {
        ready = ready.expecting(&record)?;
    }
    let wanted = daemon.depot.forming().is_wanted(name) && !daemon.stop.is_cancelled();
    if wanted {
        ready.store(daemon, &Meter::default())?;
    }
    Ok(wanted)
}

/// RAM as it was at that instant, from all files that have a part of it.
fn copy_ram(epoch: &Epoch, into: &File) -> io::Result<()> {
    let memory = epoch.ram.memory.try_clone()?;
    let backing = match &epoch.ram.shared {
        None => Backing::of(memory),
        Some(shared) => {
            let others = shared.files.iter().map(File::try_clone).collect::<io::Result<_>>()?;
            Backing::sharing(memory, &shared.list, others).map_err(|e| io::Error::other(chain(&e)))?
        }
    };
    let pieces = backing.pieces(0..epoch.facts.memory_bytes);
    pieces.into_iter().try_for_each(|Piece { offset, len, file, at, .. }| copy(file, at, len, into, offset))
}

/// Copies `len` bytes, where there are as many; zeroes become holes.
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
