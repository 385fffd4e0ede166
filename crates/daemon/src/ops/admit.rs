//! Checks that the host has memory and disk space for an operation, before it begins.

use crate::base::cpus::Booking;
use crate::base::error::{ApiError, Outcome, blocking};
use crate::daemon::Daemon;
use crate::model::step::Step;
use crate::ops::space::survey;
use crate::vm::Vm;
use crate::vm::budget::Reservation;
use crate::vm::space::{NoRoom, Share};
use dayfly_api::types::{ErrorCode, VmLimits};
use dayfly_host::memory;
use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// How long a request waits for the CPUs of VMs that are being killed, which takes 40 ms for each
/// GiB of their memory.
const LEAVES: Duration = Duration::from_secs(5);

/// What an error of the limits of a fork's clone is about.
pub const OF_FORK: &str =
    "with the limits of the VM that is forked; clones of a snapshot have none";

/// Checks that `count` VMs of `memory_bytes` fit together: the budget, the host's memory, and
/// their shares of the disk. Reserves nothing.
///
/// # Errors
/// What is missing.
pub async fn together(daemon: &Arc<Daemon>, count: u32, memory_bytes: u64) -> Outcome<()> {
    let fit = (0..count)
        .map(|_| daemon.budget.reserve(memory_bytes, None))
        .collect::<Result<Vec<_>, _>>();
    // With the reservations of all.
    let fit = fit.map_err(Step::Memory.failed())?;
    available(daemon).await?;
    drop(fit);
    surveyed(daemon, || daemon.space.check_shares(count.into())).await
}

/// Checks that the host has the memory for all VMs that have reserved some, and takes a share of
/// the disk for one that has.
///
/// # Errors
/// What is missing.
pub async fn one(daemon: &Arc<Daemon>) -> Outcome<Share> {
    available(daemon).await?;
    surveyed(daemon, || daemon.space.share()).await
}

/// Books CPUs for a VM that wants some; makes no system call for others.
///
/// # Errors
/// There are not enough, or the host cannot give CPUs to one VM.
pub async fn cpus(daemon: &Arc<Daemon>, wanted: Option<u32>) -> Outcome<Option<Booking>> {
    let Some(wanted) = wanted else { return Ok(None) };
    // Boxed, because few creations need it.
    Box::pin(book(daemon, wanted)).await.map(Some)
}

async fn book(daemon: &Arc<Daemon>, wanted: u32) -> Outcome<Booking> {
    let until = Instant::now() + LEAVES;
    loop {
        let (groups, leaving) = (daemon.groups.clone(), daemon.groups.leaving());
        let booked = blocking(move || groups.book(wanted)).await;
        let lacks = booked.as_ref().is_err_and(|e| e.0.code == ErrorCode::Exhausted);
        // A removal has returned, and the process has not ended yet.
        let Some(leaving) = leaving.filter(|_| lacks) else { return booked };
        if timeout_at(until, leaving).await.is_err() {
            return booked;
        }
    }
}

/// Checks that `count` clones of `vm` fit together, as [`together`] and [`cpus_together`] do. Their
/// limits are those of `vm` that `asked` does not replace.
///
/// # Errors
/// What is missing.
pub async fn clones(
    daemon: &Arc<Daemon>,
    vm: &Vm,
    count: u32,
    asked: Option<VmLimits>,
) -> Outcome<()> {
    together(daemon, count, vm.facts.memory_bytes).await?;
    let own = vm.facts.limits;
    let limits = asked.map_or(own, |asked| asked.or(own));
    let fit = cpus_together(daemon, count, limits.cpus_booked);
    fit.map_err(|e| if own.is_none() { e } else { e.during(OF_FORK) })
}

/// Reserves memory for a VM: on the node of its booked CPUs, or near what is `ready` for it.
///
/// # Errors
/// No node has enough.
pub fn memory(
    daemon: &Daemon,
    bytes: u64,
    booking: Option<&Booking>,
    ready: Option<usize>,
) -> Outcome<Reservation> {
    let reserved = match booking.and_then(|booking| booking.node) {
        Some(node) => daemon.budget.reserve_on(bytes, node),
        None => daemon.budget.reserve(bytes, ready),
    };
    reserved.map_err(Step::Memory.failed())
}

/// Checks that `count` VMs can book `wanted` CPUs each. Books none.
///
/// # Errors
/// As [`cpus`].
pub fn cpus_together(daemon: &Daemon, count: u32, wanted: Option<u32>) -> Outcome<()> {
    let Some(wanted) = wanted else { return Ok(()) };
    // Those of VMs that are being killed are waited for later.
    if daemon.groups.leaving().is_some() {
        return Ok(());
    }
    daemon.groups.check_cpus(wanted.saturating_mul(count))
}

/// Checks that the disk has room for `what`, which takes about `bytes`.
///
/// # Errors
/// How much is missing.
pub async fn room(daemon: &Arc<Daemon>, what: &'static str, bytes: u64) -> Outcome<()> {
    surveyed(daemon, || daemon.space.check(what, bytes)).await
}

/// Checks that the disk has room for a snapshot of `vm`: at most the memory that it has written.
///
/// # Errors
/// How much is missing.
pub async fn snapshot(daemon: &Arc<Daemon>, vm: &Vm) -> Outcome<()> {
    let own = vm.process().map_or(0, |vmm| memory::anonymous(vmm.id().pid).unwrap_or(0));
    room(daemon, "a snapshot", own.min(vm.facts.memory_bytes)).await
}

async fn available(daemon: &Arc<Daemon>) -> Outcome<()> {
    let shares = daemon.budget.shares();
    let promised = shares.iter().map(|share| share.0).fold(0, u64::saturating_add);
    if daemon.available.is_ample(promised) {
        return Ok(());
    }
    let shared = daemon.clone();
    let check = move || shared.available.check(promised, || touched(&shared));
    blocking(move || check().map_err(Step::Memory.failed())).await
}

/// Bytes that VMs have touched of the memory that they were promised.
fn touched(daemon: &Daemon) -> u64 {
    let vms = daemon.registry.all();
    let touched = vms.iter().filter_map(|vm| {
        let bytes = memory::anonymous(vm.process()?.id().pid).ok()?;
        Some(bytes.min(vm.facts.memory_bytes))
    });
    touched.fold(0, u64::saturating_add)
}

/// Runs `check`, which knows an upper limit of what VMs have left of their shares, and once more
/// with the exact sum if it fails.
async fn surveyed<T>(daemon: &Arc<Daemon>, check: impl Fn() -> Result<T, NoRoom>) -> Outcome<T> {
    if let Ok(passed) = check() {
        return Ok(passed);
    }
    survey(daemon).await;
    check().map_err(ApiError::from)
}

/// The bytes of an upload, which end with an error when they would take the space of VMs.
#[derive(Debug)]
pub struct Upload<R> {
    from: R,
    daemon: Arc<Daemon>,
    /// Why it ended too early.
    refused: Option<NoRoom>,
    /// Bytes until the next look at the free space.
    unchecked: usize,
}

/// An upload is checked after this many bytes. They are compressed, so they may become more.
const UNCHECKED_BYTES: usize = 256 << 10;

impl<R: Read> Upload<R> {
    /// The upload that `from` gives.
    #[must_use]
    pub const fn new(daemon: Arc<Daemon>, from: R) -> Self {
        Self { from, daemon, refused: None, unchecked: 0 }
    }

    /// The result of the operation that has read the upload. If the upload ended because of space,
    /// that is the error.
    ///
    /// # Errors
    /// As `result`.
    pub fn result<T>(self, result: Outcome<T>) -> Outcome<T> {
        match (result, self.refused) {
            (Err(_), Some(refused)) => Err(refused.into()),
            (result, _) => result,
        }
    }
}

impl<R: Read> Read for Upload<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.unchecked == 0 {
            if let Err(e) = self.daemon.space.check_running("an upload") {
                self.refused = Some(e);
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.unchecked = UNCHECKED_BYTES;
        }
        let read = self.from.read(buffer)?;
        self.unchecked = self.unchecked.saturating_sub(read);
        Ok(read)
    }
}
