//! The CPUs and the memory node of a zygote and its VMMs.

use super::error::{ZygoteError, step};
use crate::config::ZygoteConfig;
use std::io;

/// Restricts this thread, and threads and processes that it starts later, to `cpus`. An empty list
/// changes nothing.
pub(super) fn only(cpus: &[u32]) -> io::Result<()> {
    if cpus.is_empty() {
        return Ok(());
    }
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus {
        let cpu = usize::try_from(*cpu).unwrap_or(usize::MAX);
        if cpu < rustix::thread::CpuSet::MAX_CPU {
            set.set(cpu);
        }
    }
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Restricts this process and its children to the configured CPUs, and makes them prefer the memory
/// of the configured node.
pub(super) fn stay_on(config: &ZygoteConfig) -> Result<(), ZygoteError> {
    only(&config.cpus).map_err(step("choosing CPUs"))?;
    let Some(node) = config.node else { return Ok(()) };
    const BITS: u32 = u64::BITS * 16;
    if node >= BITS {
        return Err(step("choosing a memory node")(io::Error::from(io::ErrorKind::InvalidInput)));
    }
    let mut nodes = [0_u64; 16];
    nodes[(node / u64::BITS) as usize] = 1 << (node % u64::BITS);
    // Preferred, not bound: if the node is full, VMs become slower, but do not die.
    // SAFETY: set_mempolicy(2) reads BITS bits from `nodes`, which has as many. The kernel expects
    // the number of bits plus one.
    let result = unsafe {
        libc::syscall(
            libc::SYS_set_mempolicy,
            libc::MPOL_PREFERRED,
            nodes.as_ptr(),
            u64::from(BITS) + 1,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(step("choosing a memory node")(io::Error::last_os_error()))
    }
}
