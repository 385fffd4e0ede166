//! Admission by the memory that the host really has, besides the nominal budget
//! ([`crate::vm::budget`]).
//!
//! VMs do not touch all memory that they were promised. Of the part that they have not touched, as
//! much is expected to be touched as `--overcommit` says: a tenth if it is 1000 %. So the more
//! memory VMs take, the fewer are created:
//!
//! ```text
//! available ≥ reserve + (promised − touched) × 100 / overcommit
//! ```

use crate::base::error::ApiError;
use dayfly_api::types::ErrorCode;
use dayfly_host::memory;
use dayfly_units::{Bytes, sync::lock};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The host has too little memory for a VM.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "memory: expected at least {} available on this host, got {}: of the {} that VMs have not \
     touched yet, {} are kept, and {} as a reserve; remove some VMs, or start dayflyd with a \
     smaller --memory-reserve",
    Bytes(.keeps.saturating_add(*.reserve)), Bytes(*.available), Bytes(*.untouched), Bytes(*.keeps),
    Bytes(*.reserve)
)]
pub struct TooLittle {
    available: u64,
    untouched: u64,
    keeps: u64,
    reserve: u64,
}

impl From<TooLittle> for ApiError {
    fn from(e: TooLittle) -> Self {
        Self::new(ErrorCode::Exhausted, e)
    }
}

/// How long a figure of the host is used again: reading it takes as long as a tenth of a creation.
const FRESH: Duration = Duration::from_millis(10);
/// How long the sum of what VMs have touched is used again.
const SUM_FRESH: Duration = Duration::from_secs(1);

/// A figure, and when it was read.
#[derive(Debug, Default)]
struct Read(Option<(Instant, u64)>);

impl Read {
    fn get(&mut self, fresh: Duration, read: impl FnOnce() -> u64) -> u64 {
        match self.0 {
            Some((at, value)) if at.elapsed() < fresh => value,
            _ => self.0.insert((Instant::now(), read())).1,
        }
    }
}

/// The memory of the host.
#[derive(Debug)]
pub struct Available {
    reserve: Option<u64>,
    overcommit: u32,
    available: Mutex<Read>,
    touched: Mutex<Read>,
}

impl Available {
    /// Memory of which `reserve` bytes are promised to no VM; `None`: it limits nothing.
    #[must_use]
    pub fn new(reserve: Option<u64>, overcommit: u32) -> Self {
        let (available, touched) = (Mutex::default(), Mutex::default());
        Self { reserve, overcommit, available, touched }
    }

    /// Whether the host has the memory for VMs that were promised `promised` bytes, the new one
    /// included, even if they have touched nothing of it.
    #[must_use]
    pub fn is_ample(&self, promised: u64) -> bool {
        self.check_untouched(promised).is_ok()
    }

    /// As [`Self::is_ample`], with what VMs have touched. `touched` sums that up, unless the sum is
    /// known.
    ///
    /// # Errors
    /// [`TooLittle`].
    pub fn check(&self, promised: u64, touched: impl FnOnce() -> u64) -> Result<(), TooLittle> {
        let touched = lock(&self.touched).get(SUM_FRESH, touched);
        self.check_untouched(promised.saturating_sub(touched))
    }

    fn check_untouched(&self, untouched: u64) -> Result<(), TooLittle> {
        let Some(reserve) = self.reserve else { return Ok(()) };
        let read = || memory::available().unwrap_or(u64::MAX);
        let available = lock(&self.available).get(FRESH, read);
        decide(available, reserve, untouched, self.overcommit)
    }
}

/// Whether `available` bytes suffice for VMs that have not touched `untouched` bytes.
fn decide(available: u64, reserve: u64, untouched: u64, overcommit: u32) -> Result<(), TooLittle> {
    let keeps = u128::from(untouched) * 100 / u128::from(overcommit.max(100));
    let keeps = u64::try_from(keeps).unwrap_or(u64::MAX);
    if available < keeps.saturating_add(reserve) {
        return Err(TooLittle { available, untouched, keeps, reserve });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_more_memory_vms_take_the_fewer_are_created() {
        // 16 GiB of 24 are promised, and 1.6 GiB kept.
        assert_eq!(decide(20 * GIB, GIB, 16 * GIB, 1000), Ok(()));
        assert_eq!(decide(2 * GIB, GIB, 16 * GIB, 1000).unwrap_err().keeps, 16 * GIB / 10);
        assert_eq!(decide(3 * GIB, GIB, 16 * GIB, 1000), Ok(()));
        // Without over-commit, all of it is kept.
        assert!(decide(17 * GIB - 1, GIB, 16 * GIB, 100).is_err());
        assert!(decide(17 * GIB, GIB, 16 * GIB, 100).is_ok());
        assert!(decide(17 * GIB - 1, GIB, 16 * GIB, 50).is_err());
        assert_eq!(decide(GIB, GIB, u64::MAX, 100).unwrap_err().keeps, u64::MAX);
    }

    #[test]
    fn what_vms_have_touched_is_no_longer_kept_for_them() {
        let available = Available::new(Some(0), 100);
        assert!(available.is_ample(0) && !available.is_ample(u64::MAX));
        let asked = available.check(u64::MAX, || u64::MAX - 4096);
        assert_eq!(asked, Ok(()), "4096 bytes are untouched");
        let refused = Available::new(Some(u64::MAX - 4096), 100).check(4096, || 0).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("--memory-reserve") && text.contains("of the 4.0 KiB"), "{text}");
        assert!(Available::new(None, 100).is_ample(u64::MAX));
    }
}
