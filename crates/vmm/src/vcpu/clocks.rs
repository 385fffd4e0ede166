//! Time across a save: a restored guest's two clocks continue together from their values at the
//! save.
//!
//! The guest has a TSC per vCPU (the host's TSC plus an offset) and one kvmclock per VM. Linux
//! compares both, and calls the TSC unstable when they differ by a fraction of a millisecond.
//! Setting each clock to its saved value is too coarse, because the settings take effect one after
//! the other.
//!
//! KVM_GET_CLOCK gives kvmclock together with the host's TSC at the same instant. Call the pair of
//! the save (k₀, t₀) and the pair of now (k₁, t₁). Each vCPU's new offset is
//! `t₀ + offset + (k₁ − k₀) · frequency − t₁` (`Documentation/virt/kvm/devices/vcpu.rst`, "TSC
//! offset"). The TSCs of all vCPUs keep their distances, so they stay as synchronised as they were.
//!
//! KVM gives no pair if the host's TSC is unstable, and no offsets before Linux 5.16. Then the
//! first vCPU's TSC is written, and the others follow it.
//!
//! Wall-clock time is not touched here: it continues from the save too, and the agent sets it.

use super::state::{MSR_TSC, MSR_TSC_DEADLINE, StateError, VcpuState, get_msr, on, set_msrs};
use super::tsc;
use kvm_bindings::{KVM_CLOCK_HOST_TSC, kvm_clock_data, kvm_vcpu_events};
use kvm_ioctls::{VcpuFd, VmFd};

/// The parts of a saved vCPU that depend on the instant at which the vCPU continues.
#[derive(Debug, Clone)]
pub struct VcpuTime {
    tsc_khz: u32,
    tsc_offset: Option<u64>,
    tsc: u64,
    deadline: Option<u64>,
    events: kvm_vcpu_events,
}

impl VcpuTime {
    /// The time of a vCPU that was not started yet: its TSC is that of this one, and its timer is
    /// not set.
    #[must_use]
    pub fn of_new(&self) -> Self {
        Self { deadline: None, events: kvm_vcpu_events::default(), ..*self }
    }
}

impl From<&VcpuState> for VcpuTime {
    fn from(state: &VcpuState) -> Self {
        Self {
            tsc_khz: state.tsc_khz,
            tsc_offset: state.tsc_offset,
            tsc: state.msr(MSR_TSC).unwrap_or(0),
            deadline: state.msr(MSR_TSC_DEADLINE),
            events: state.events,
        }
    }
}

fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> Result<(), StateError> {
    tsc::set_offset(vcpu, offset).map_err(on("KVM_SET_DEVICE_ATTR of the TSC offset"))
}

/// The offset with which a TSC of `khz` continues, by the module's formula. Wraps as the TSC does.
fn new_offset(offset: u64, khz: u32, then: &kvm_clock_data, now: &kvm_clock_data) -> u64 {
    let elapsed_ns = u128::from(now.clock.saturating_sub(then.clock));
    let ticks = elapsed_ns * u128::from(khz) / 1_000_000;
    let ticks = u64::try_from(ticks & u128::from(u64::MAX)).unwrap_or(0);
    then.host_tsc.wrapping_add(offset).wrapping_add(ticks).wrapping_sub(now.host_tsc)
}

fn has_host_tsc(clock: &kvm_clock_data) -> bool {
    clock.flags & KVM_CLOCK_HOST_TSC != 0
}

/// Sets kvmclock, then each vCPU's TSC, its timer's deadline and its pending events. `vcpus` and
/// `times` pair up, the first vCPU first.
///
/// A saved deadline of zero may mean that the timer has fired but its interrupt is not yet
/// delivered. Such a deadline is set to the saved TSC, which has passed, so the timer fires once
/// more rather than never. A timer that is not in deadline mode ignores the deadline.
///
/// # Errors
/// The ioctl or MSR that failed.
pub fn start(
    vm: &VmFd,
    saved: &kvm_clock_data,
    vcpus: &[&VcpuFd],
    times: &[VcpuTime],
) -> Result<(), StateError> {
    // Without flags, kvmclock continues from the saved value, however long ago the save was.
    let clock = kvm_clock_data { clock: saved.clock, ..Default::default() };
    vm.set_clock(&clock).map_err(on("KVM_SET_CLOCK"))?;
    let now = vm.get_clock().map_err(on("KVM_GET_CLOCK"))?;
    let host_khz =
        vcpus.first().map(|vcpu| vcpu.get_tsc_khz()).transpose().map_err(on("KVM_GET_TSC_KHZ"))?;
    let same_rate = times.iter().all(|time| Some(time.tsc_khz) == host_khz);
    let offsets: Option<Vec<u64>> = times.iter().map(|time| time.tsc_offset).collect();
    match offsets {
        Some(offsets) if same_rate && has_host_tsc(saved) && has_host_tsc(&now) => {
            for ((vcpu, time), offset) in vcpus.iter().zip(times).zip(offsets) {
                set_tsc_offset(vcpu, new_offset(offset, time.tsc_khz, saved, &now))?;
            }
        }
        offsets => follow_first(vcpus, times, offsets)?,
    }
    for (vcpu, time) in vcpus.iter().zip(times) {
        if let Some(deadline) = time.deadline {
            let deadline = if deadline == 0 { time.tsc } else { deadline };
            set_msrs(vcpu, &[(MSR_TSC_DEADLINE, deadline)])?;
        }
        vcpu.set_vcpu_events(&time.events).map_err(on("KVM_SET_VCPU_EVENTS"))?;
    }
    Ok(())
}

/// Writes the first vCPU's TSC, and gives the other vCPUs the distances to it that they had.
fn follow_first(
    vcpus: &[&VcpuFd],
    times: &[VcpuTime],
    offsets: Option<Vec<u64>>,
) -> Result<(), StateError> {
    let (Some(first), Some(first_time)) = (vcpus.first(), times.first()) else { return Ok(()) };
    let wanted = first_time.tsc;
    set_msrs(first, &[(MSR_TSC, wanted)])?;
    // KVM may replace a written TSC by the value it expects, if both are close
    // (kvm_synchronize_tsc). Raise the offset if that made the TSC go backwards.
    let base = match (tsc::offset(first), get_msr(first, MSR_TSC)?) {
        (Some(offset), now) if now < wanted => Some(offset.wrapping_add(wanted - now)),
        (offset, _) => offset,
    };
    for (n, (vcpu, time)) in vcpus.iter().zip(times).enumerate() {
        match (base, &offsets) {
            (Some(base), Some(saved)) => {
                set_tsc_offset(vcpu, base.wrapping_add(saved[n].wrapping_sub(saved[0])))?;
            }
            _ if n == 0 => {}
            // KVM takes a TSC within a second of the expected one as "synchronised with the other
            // vCPUs".
            _ => set_msrs(vcpu, &[(MSR_TSC, time.tsc)])?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tsc_advances_exactly_as_kvmclock_does() {
        let clock = |clock, host_tsc| kvm_clock_data { clock, host_tsc, ..Default::default() };
        // Saved at host TSC 1000 with offset -400: the guest read 600. Restored on a host that
        // reads 50 million, 2 ms of kvmclock later, at 3 GHz: the guest reads 600 + 6 million.
        let offset = 0u64.wrapping_sub(400);
        let new = new_offset(offset, 3_000_000, &clock(7, 1000), &clock(2_000_007, 50_000_000));
        assert_eq!(50_000_000u64.wrapping_add(new), 6_000_600);
        // A kvmclock that seems to go back does not turn the TSC back.
        let new = new_offset(offset, 3_000_000, &clock(7, 1000), &clock(6, 2000));
        assert_eq!(2000u64.wrapping_add(new), 600);
    }
}
