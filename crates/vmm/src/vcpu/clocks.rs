//! Time across a save: a restored guest's clocks go on where they stopped, together.
//!
//! A guest has two: its TSC, per vCPU the host's plus an offset, and its kvmclock, one per VM. Linux compares them, and calls
//! the TSC unstable when they drift apart by a fraction of a millisecond, so setting each to its saved value, one a little
//! after the other, will not do. KVM_GET_CLOCK gives kvmclock together with the host's TSC at that very moment; with that
//! pair from the save (k₀, t₀) and one from now (k₁, t₁), each vCPU's new offset is
//! `t₀ + offset + (k₁ − k₀) · frequency − t₁` (`Documentation/virt/kvm/devices/vcpu.rst`, "TSC offset"). All vCPUs keep
//! their distances, so they stay as synchronised as they were.
//!
//! Where KVM tells no pair (an unstable host TSC) or no offsets (before Linux 5.16), the first vCPU's TSC is written and the
//! others follow it.
//!
//! Wall-clock time is not touched: it goes on from the save too, and the agent sets it.

use super::state::{MSR_TSC, MSR_TSC_DEADLINE, StateError, VcpuState, get_msr, on, set_msrs};
use kvm_bindings::{
    KVM_CLOCK_HOST_TSC, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_clock_data, kvm_device_attr,
};
use kvm_ioctls::{VcpuFd, VmFd};
use std::os::fd::AsRawFd;

/// KVM_SET_DEVICE_ATTR and KVM_GET_DEVICE_ATTR: `_IOW(0xAE, 0xe1 and 0xe2, struct kvm_device_attr)` of 24 bytes; kvm-ioctls
/// has neither for x86-64's vCPUs.
const KVM_SET_DEVICE_ATTR: libc::Ioctl = 0x4018_aee1;
const KVM_GET_DEVICE_ATTR: libc::Ioctl = 0x4018_aee2;

/// Reads or writes `offset` as the vCPU's TSC offset.
fn tsc_offset_ioctl(vcpu: &VcpuFd, request: libc::Ioctl, offset: &mut u64) -> Result<(), kvm_ioctls::Error> {
    let attr = kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: std::ptr::from_mut(offset).addr() as u64,
        flags: 0,
    };
    // SAFETY: `attr` and the u64 its `addr` points to outlive the call, which reads or writes those eight bytes.
    let result = unsafe { libc::ioctl(vcpu.as_raw_fd(), request, &raw const attr) };
    if result == 0 { Ok(()) } else { Err(kvm_ioctls::Error::last()) }
}

/// The guest's TSC minus the host's; `None` where KVM has no such attribute.
#[must_use]
pub fn tsc_offset(vcpu: &VcpuFd) -> Option<u64> {
    let mut offset = 0;
    tsc_offset_ioctl(vcpu, KVM_GET_DEVICE_ATTR, &mut offset).ok().map(|()| offset)
}

fn set_tsc_offset(vcpu: &VcpuFd, mut offset: u64) -> Result<(), StateError> {
    tsc_offset_ioctl(vcpu, KVM_SET_DEVICE_ATTR, &mut offset)
        .map_err(on("KVM_SET_DEVICE_ATTR of the TSC offset"))
}

/// The offset that lets a TSC of `khz` go on: see the module. Wraps as the TSC itself does.
fn new_offset(offset: u64, khz: u32, then: &kvm_clock_data, now: &kvm_clock_data) -> u64 {
    let elapsed_ns = u128::from(now.clock.saturating_sub(then.clock));
    let ticks = elapsed_ns * u128::from(khz) / 1_000_000;
    let ticks = u64::try_from(ticks & u128::from(u64::MAX)).unwrap_or(0);
    then.host_tsc.wrapping_add(offset).wrapping_add(ticks).wrapping_sub(now.host_tsc)
}

fn has_host_tsc(clock: &kvm_clock_data) -> bool {
    clock.flags & KVM_CLOCK_HOST_TSC != 0
}

/// Sets kvmclock, every vCPU's TSC, its timer's deadline and its pending events, in this order. `vcpus` and `states` pair up, the
/// first vCPU first.
///
/// A deadline of zero may mean that the timer has fired and its interrupt was not yet delivered: it is set to "now", so that
/// it fires once more rather than never. A timer that is not in deadline mode ignores it.
///
/// # Errors
/// Naming the ioctl or MSR.
pub fn start(
    vm: &VmFd,
    saved: &kvm_clock_data,
    vcpus: &[&VcpuFd],
    states: &[VcpuState],
) -> Result<(), StateError> {
    // Without flags: the clock goes on from the saved value, whatever the time since.
    let clock = kvm_clock_data { clock: saved.clock, ..Default::default() };
    vm.set_clock(&clock).map_err(on("KVM_SET_CLOCK"))?;
    let now = vm.get_clock().map_err(on("KVM_GET_CLOCK"))?;
    let host_khz = vcpus.first().map(|vcpu| vcpu.get_tsc_khz()).transpose().map_err(on("KVM_GET_TSC_KHZ"))?;
    let same_rate = states.iter().all(|state| Some(state.tsc_khz) == host_khz);
    let offsets: Option<Vec<u64>> = states.iter().map(|state| state.tsc_offset).collect();
    match offsets {
        Some(offsets) if same_rate && has_host_tsc(saved) && has_host_tsc(&now) => {
            for ((vcpu, state), offset) in vcpus.iter().zip(states).zip(offsets) {
                set_tsc_offset(vcpu, new_offset(offset, state.tsc_khz, saved, &now))?;
            }
        }
        offsets => follow_first(vcpus, states, offsets)?,
    }
    for (vcpu, state) in vcpus.iter().zip(states) {
        if let Some(deadline) = value(state, MSR_TSC_DEADLINE) {
            let deadline = if deadline == 0 { tsc_of(state) } else { deadline };
            set_msrs(vcpu, &[(MSR_TSC_DEADLINE, deadline)])?;
        }
        vcpu.set_vcpu_events(&state.events).map_err(on("KVM_SET_VCPU_EVENTS"))?;
    }
    Ok(())
}

/// Writes the first vCPU's TSC and gives the others the offsets they had to it.
fn follow_first(
    vcpus: &[&VcpuFd],
    states: &[VcpuState],
    offsets: Option<Vec<u64>>,
) -> Result<(), StateError> {
    let (Some(first), Some(first_state)) = (vcpus.first(), states.first()) else { return Ok(()) };
    let wanted = tsc_of(first_state);
    set_msrs(first, &[(MSR_TSC, wanted)])?;
    // KVM may round a write that lies near what it expects to what it expects (kvm_synchronize_tsc): never backwards.
    let base = match (tsc_offset(first), get_msr(first, MSR_TSC)?) {
        (Some(offset), now) if now < wanted => Some(offset.wrapping_add(wanted - now)),
        (offset, _) => offset,
    };
    for (n, (vcpu, state)) in vcpus.iter().zip(states).enumerate() {
        match (base, &offsets) {
            (Some(base), Some(saved)) => {
                set_tsc_offset(vcpu, base.wrapping_add(saved[n].wrapping_sub(saved[0])))?;
            }
            _ if n == 0 => {}
            // Within a second of what KVM expects, it takes the write for "synchronised with the others".
            _ => set_msrs(vcpu, &[(MSR_TSC, tsc_of(state))])?,
        }
    }
    Ok(())
}

fn value(state: &VcpuState, msr: u32) -> Option<u64> {
    state.msrs.iter().find(|(index, _)| *index == msr).map(|(_, value)| *value)
}

fn tsc_of(state: &VcpuState) -> u64 {
    value(state, MSR_TSC).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tsc_advances_exactly_as_kvmclock_does() {
        let clock = |clock, host_tsc| kvm_clock_data { clock, host_tsc, ..Default::default() };
        // Saved at host TSC 1000 with offset -400: the guest read 600. Restored on a host that reads 50 million,
        // 2 ms of kvmclock later, at 3 GHz: the guest reads 600 + 6 million.
        let offset = 0u64.wrapping_sub(400);
        let new = new_offset(offset, 3_000_000, &clock(7, 1000), &clock(2_000_007, 50_000_000));
        assert_eq!(50_000_000u64.wrapping_add(new), 6_000_600);
        // A clock that seems to go back does not take the TSC with it.
        let new = new_offset(offset, 3_000_000, &clock(7, 1000), &clock(6, 2000));
        assert_eq!(2000u64.wrapping_add(new), 600);
    }
}
