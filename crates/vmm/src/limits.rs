//! Limits of a VMM's resources (setrlimit(2)), which bound what it takes from the host if its guest
//! takes it over.

use crate::config::DISK_BLOCK_BYTES;
use crate::disk;
use rustix::process::{Resource, Rlimit, setrlimit};

/// The most open descriptors: disks' layers, and a socket for each vsock connection.
pub const MAX_OPEN_FDS: u64 = 4096;
/// The most threads of a VM's user. A VMM makes its threads as root; the filters forbid others.
pub const MAX_THREADS: u64 = 256;
/// Bytes of a file beyond RAM and disks: maps of layers, state, console.
const FILE_SLACK: u64 = 64 << 20;
/// Address space beyond RAM and the disks' indices: stacks, heap, buffers of connections.
const SPACE_SLACK: u64 = 1 << 30;
/// A disk's index has a byte for each block; a rebase makes a second one.
const INDEX_BYTES_PER_BLOCK: u64 = 2;

fn limit(resource: Resource, bytes: u64) {
    // Fails only if the hard limit is lower already, and then nothing needs to be done.
    let _ = setrlimit(resource, Rlimit { current: Some(bytes), maximum: Some(bytes) });
}

/// The longest file that a VM writes: its RAM or its largest disk.
#[must_use]
pub fn file_bytes(memory_bytes: u64, disks_bytes: &[u64]) -> u64 {
    let disk = disks_bytes.iter().copied().max().unwrap_or(0);
    memory_bytes.max(disk).saturating_add(FILE_SLACK)
}

/// The most address space of a VM: the reservation of RAM, the sets of pages of a fork, the disks'
/// indices and sets of written blocks, and `base_bytes` of the process before it had a VM.
#[must_use]
pub fn space_bytes(base_bytes: u64, memory_bytes: u64, disks_bytes: &[u64]) -> u64 {
    let indices = disks_bytes.iter().map(|disk| {
        disk.div_ceil(DISK_BLOCK_BYTES) * INDEX_BYTES_PER_BLOCK
            + disk.div_ceil(disk::CHUNK_BYTES) * disk::MAX_BYTES_PER_CHUNK
    });
    let parts = [base_bytes, memory_bytes, memory_bytes / 64, SPACE_SLACK];
    parts.into_iter().chain(indices).fold(0, u64::saturating_add)
}

/// Limits the sizes of files (RLIMIT_FSIZE) and of the address space (RLIMIT_AS) to those of one
/// VM. A write past the limit ends the VM with an exit record (SIGXFSZ, [`crate::exit`]).
pub fn of_vm(base_bytes: u64, memory_bytes: u64, disks_bytes: &[u64]) {
    limit(Resource::Fsize, file_bytes(memory_bytes, disks_bytes));
    limit(Resource::As, space_bytes(base_bytes, memory_bytes, disks_bytes));
}

/// The higher oom_score_adj (proc(5)), the sooner the kernel ends a process if the host is out of
/// memory.
const OOM_SCORE: &str = "500";

/// Makes the kernel end this process and its children before the daemon and other programs of the
/// host, if the host is out of memory. A failure changes only that order.
pub fn prefer_for_oom() {
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
}

/// The size of this process's address space, which is the first field of `/proc/self/statm`. If it
/// cannot be read, a value that limits nothing.
#[must_use]
pub fn space_now() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').next().and_then(|pages| pages.parse::<u64>().ok());
    pages.map_or(u64::MAX, |pages| pages.saturating_mul(dayfly_units::PAGE_SIZE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_cover_ram_and_disks_and_little_more() {
        const GIB: u64 = 1 << 30;
        assert_eq!(file_bytes(GIB, &[]), GIB + FILE_SLACK);
        assert_eq!(file_bytes(GIB, &[10 * GIB, 3 * GIB]), 10 * GIB + FILE_SLACK);
        // Indices of 4 + 2 MiB, twice, and sets with 1536 chunks of 1 KiB.
        let disks = (12 << 20) + (1536 << 10);
        let expected = 5 * GIB + 4 * GIB + (64 << 20) + SPACE_SLACK + disks;
        assert_eq!(space_bytes(5 * GIB, 4 * GIB, &[16 * GIB, 8 * GIB]), expected);
        assert_eq!(space_bytes(u64::MAX, GIB, &[GIB]), u64::MAX);
        let now = space_now();
        assert!((1 << 20..u64::MAX).contains(&now), "{now}");
    }
}
