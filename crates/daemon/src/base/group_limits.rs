//! Limits and bills of VMs: the API's form, and that of control groups.

use crate::base::error::ApiError;
use dayfly_api::types::{ErrorCode, IoMax, VmLimits, VmUsage};
use dayfly_host::groups::{self as host, CpuTime, GroupError, Limits, Usage};
use std::io;

/// Part of RAM that is allowed for the host's page tables. Those of the VMM and those of KVM have 8
/// bytes each for 4 KiB of RAM, with the levels above a little more: a 256th in all. The double is
/// allowed, so that page tables never take of what `memory_max_bytes` gives.
const TABLES_FRACTION: u64 = 128;

/// The range of `cpu_max_millicpus`. With less, a guest would not answer in time.
pub const MILLICPUS: std::ops::RangeInclusive<u32> = 50..=1_024_000;
/// The range of `cpu_weight`, which is that of cgroup v2.
pub const WEIGHTS: std::ops::RangeInclusive<u32> = 1..=10_000;
/// The least `memory_max_bytes`: some times what a VMM takes beside RAM and page tables.
pub const LEAST_MEMORY_BYTES: u64 = 16 << 20;
/// The least `pids_max` without vCPUs: more than the other threads of a VMM, which are at most
/// five, and eight that the kernel may make for its ring. If there is no place for these, their
/// reads are synchronous.
pub const LEAST_PIDS: u32 = 16;
/// The most `pids_max`: the kernel's PID_MAX_LIMIT.
pub const MOST_PIDS: u32 = 4_194_304;
/// The least rates of disks, in bytes. With less, a guest would not answer in time.
pub const LEAST_IO_BYTES: u64 = 64 << 10;
/// The same in requests.
pub const LEAST_IO_REQUESTS: u64 = 10;

/// The use in the API's form; `None` if CPU time is not counted.
#[must_use]
pub const fn shown(usage: &Usage) -> Option<VmUsage> {
    let Usage { cpu: Some(cpu), memory_bytes, memory_peak_bytes, .. } = *usage else { return None };
    let CpuTime { all_us: cpu_us, user_us: cpu_user_us, system_us: cpu_system_us } = cpu;
    Some(VmUsage {
        cpu_us,
        cpu_user_us,
        cpu_system_us,
        memory_bytes,
        memory_peak_bytes,
        memory_byte_seconds: 0,
        parts: None,
    })
}

/// The limit of the memory of a VM's group, RAM included.
#[must_use]
pub fn memory_limit_bytes(limits: &VmLimits, ram_bytes: u64) -> Option<u64> {
    let ram = ram_bytes.saturating_add(ram_bytes / TABLES_FRACTION);
    limits.memory_max_bytes.map(|bytes| bytes.saturating_add(ram))
}

pub(super) fn host_limits(limits: &VmLimits, ram_bytes: u64) -> Limits {
    let memory_max_bytes = memory_limit_bytes(limits, ram_bytes);
    let VmLimits { cpu_max_millicpus, cpu_weight, pids_max, .. } = *limits;
    Limits { cpu_max_millicpus, cpu_weight, memory_max_bytes, pids_max }
}

pub(super) const fn host_io(io_max: &IoMax) -> host::IoMax {
    let IoMax { read_bytes_per_s, write_bytes_per_s, reads_per_s, writes_per_s } = *io_max;
    host::IoMax {
        read_bytes: read_bytes_per_s,
        write_bytes: write_bytes_per_s,
        reads: reads_per_s,
        writes: writes_per_s,
    }
}

pub(super) fn refused(error: GroupError) -> ApiError {
    let code = match &error {
        // EINVAL: for example more CPU time than a group above may have.
        GroupError::Refused { source, .. } if source.kind() != io::ErrorKind::InvalidInput => {
            ErrorCode::Internal
        }
        _ => ErrorCode::Invalid,
    };
    ApiError::new(code, error)
}

/// Checks what can be checked of limits without the host.
pub(super) fn check_range(limits: &VmLimits, vcpus: u8) -> Result<(), ApiError> {
    let pids = LEAST_PIDS + u32::from(vcpus);
    let wrong = |limit: &str, least: u64, most: u64, got: u64| {
        Err(ApiError::invalid(format_args!("{limit}: expected {least} to {most}, got {got}")))
    };
    match *limits {
        VmLimits { cpu_max_millicpus: Some(got), .. } if !MILLICPUS.contains(&got) => {
            let (least, most) = (*MILLICPUS.start(), *MILLICPUS.end());
            wrong("cpu_max_millicpus", least.into(), most.into(), got.into())
        }
        VmLimits { cpu_weight: Some(got), .. } if !WEIGHTS.contains(&got) => {
            wrong("cpu_weight", (*WEIGHTS.start()).into(), (*WEIGHTS.end()).into(), got.into())
        }
        VmLimits { memory_max_bytes: Some(got), .. } if got < LEAST_MEMORY_BYTES => {
            wrong("memory_max_bytes", LEAST_MEMORY_BYTES, u64::MAX, got)
        }
        VmLimits { pids_max: Some(got), .. } if !(pids..=MOST_PIDS).contains(&got) => {
            wrong("pids_max", pids.into(), MOST_PIDS.into(), got.into())
        }
        VmLimits { io_max: Some(io_max), .. } => check_io(&io_max),
        _ => Ok(()),
    }
}

/// Checks the rates of disks.
fn check_io(io_max: &IoMax) -> Result<(), ApiError> {
    let IoMax { read_bytes_per_s, write_bytes_per_s, reads_per_s, writes_per_s } = *io_max;
    if *io_max == IoMax::default() {
        return Err(ApiError::invalid("io_max: expected at least one rate, got none"));
    }
    for (rate, least, got) in [
        ("read_bytes_per_s", LEAST_IO_BYTES, read_bytes_per_s),
        ("write_bytes_per_s", LEAST_IO_BYTES, write_bytes_per_s),
        ("reads_per_s", LEAST_IO_REQUESTS, reads_per_s),
        ("writes_per_s", LEAST_IO_REQUESTS, writes_per_s),
    ] {
        if let Some(got) = got.filter(|got| *got < least) {
            return Err(ApiError::invalid(format_args!(
                "io_max.{rate}: expected at least {least}, got {got}"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_out_of_range_are_refused_with_the_range() {
        let refused = |limits: VmLimits| check_range(&limits, 4).unwrap_err().0.message;
        let message = refused(VmLimits { cpu_max_millicpus: Some(49), ..VmLimits::default() });
        assert_eq!(message, "cpu_max_millicpus: expected 50 to 1024000, got 49");
        let message = refused(VmLimits { cpu_weight: Some(0), ..VmLimits::default() });
        assert_eq!(message, "cpu_weight: expected 1 to 10000, got 0");
        let message = refused(VmLimits { memory_max_bytes: Some(1), ..VmLimits::default() });
        assert!(message.starts_with("memory_max_bytes: expected 16777216 to "), "{message}");
        let message = refused(VmLimits { pids_max: Some(19), ..VmLimits::default() });
        assert!(message.starts_with("pids_max: expected 20 to "), "{message}");
        let all = VmLimits {
            cpu_max_millicpus: Some(50),
            cpu_weight: Some(10_000),
            memory_max_bytes: Some(16 << 20),
            pids_max: Some(20),
            cpus_booked: Some(1),
            io_max: Some(IoMax { writes_per_s: Some(10), ..IoMax::default() }),
        };
        check_range(&all, 4).unwrap();
        let io = |io_max| refused(VmLimits { io_max: Some(io_max), ..VmLimits::default() });
        assert_eq!(io(IoMax::default()), "io_max: expected at least one rate, got none");
        let message = io(IoMax { read_bytes_per_s: Some(65_535), ..IoMax::default() });
        assert_eq!(message, "io_max.read_bytes_per_s: expected at least 65536, got 65535");
    }
}
