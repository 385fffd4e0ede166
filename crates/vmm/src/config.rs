//! What a VMM process is told: everything it needs arrives as open file descriptors named in a [`VmmConfig`].
//!
//! A zygote ([`crate::zygote`]) reads one with each message, and forks the process that it is for; descriptors are numbered by
//! their places in the message. `dayfly-vmm --config-fd N` reads the JSON of one from descriptor N to its end, once, and is
//! that process itself. The process opens no file by path, except guest-initiated vsock connections to sockets inside its
//! jail's root folder.

use dayfly_units::VmId;
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;
use std::path::PathBuf;

/// A descriptor's number in the VMM process, or its place among those of a message.
pub type FdNumber = i32;

/// The most vCPUs a VM may have.
pub const MAX_VCPUS: u8 = 16;
/// The most network devices a VM may have.
pub const MAX_NETS: u8 = 1;
/// The most disks a VM may have.
pub const MAX_DISKS: usize = 8;
/// The most layers a disk may have under its writable one.
pub const MAX_LAYERS: usize = 64;
/// The longest configuration, in bytes of JSON.
pub const MAX_CONFIG_BYTES: usize = 1 << 20;
/// The granularity of copy-on-write layers, in bytes.
pub const DISK_BLOCK_BYTES: u64 = 4096;
/// The context id of every guest: each VM has a vsock device and a unix socket of its own.
pub const GUEST_CID: u32 = 3;

/// One VM, whole.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmmConfig {
    /// Whose process this is; shown in its command line.
    pub id: VmId,
    /// The jail to enter before the guest runs. `None` only in tests of a single room.
    pub jail: Option<JailConfig>,
    /// `/dev/kvm`, opened read-write; a zygote has it already.
    pub kvm_fd: Option<FdNumber>,
    /// A listening unix stream socket that speaks [`crate::control`].
    pub control_fd: FdNumber,
    /// A connection that speaks the same, made ahead: what is sent on it before the process is there waits in it.
    #[serde(default)]
    pub link_fd: Option<FdNumber>,
    /// Whether to work at a lower priority until somebody waits for the guest.
    #[serde(default)]
    pub background: bool,
    /// A listening unix stream socket: `CONNECT <port>\n` → `OK <n>\n` → bytes to and from that port of the guest.
    pub vsock_fd: FdNumber,
    /// Where guest-initiated connections go: to port P of CID 2 is to the unix socket `<vsock_path>_<P>`,
    /// a path seen from inside the jail (`/vsock.sock`).
    pub vsock_path: PathBuf,
    /// An empty file opened for appending: what the guest writes to its serial console.
    pub console_fd: FdNumber,
    /// Bytes after which the console drops further output (noting once that it did).
    pub console_max_bytes: u64,
    /// An empty file for the JSON of the [`crate::control::ExitRecord`], written once, just before the process ends.
    pub exit_fd: FdNumber,
    /// How the guest comes to life.
    pub start: Start,
}

/// What a zygote is told once, before the first VM; with it comes `/dev/kvm`, opened
/// read-write.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ZygoteConfig {
    /// All that it and its VMMs will see of the host's files: the folder in which VMs have their folders.
    pub folder: PathBuf,
    /// The CPUs that its VMMs run on; empty: all.
    #[serde(default)]
    pub cpus: Vec<u32>,
    /// The NUMA node from which their memory comes, while there is some; `None`: wherever they run.
    #[serde(default)]
    pub node: Option<u32>,
}

/// Where a VMM lives.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JailConfig {
    /// Folder that becomes its root, a path in what its zygote sees; the daemon made it, it holds only this VM's sockets.
    pub root: PathBuf,
    /// The VM's own user.
    pub uid: u32,
    /// The VM's own group.
    pub gid: u32,
}

/// How the guest comes to life.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    /// Cold, from a kernel, at once.
    Boot(BootConfig),
    /// When it is told from which saved machine, by `Restore` over the control socket.
    Shell {
        /// For which VMs.
        shape: Shape,
        /// Whether to note which pages the guest touches, for `WorkingSet` ([`crate::memory::recorder`]).
        record: bool,
    },
}

impl Start {
    /// What has to be known of a VM before its guest.
    #[must_use]
    pub fn shape(&self) -> Shape {
        match self {
            Self::Boot(boot) => Shape {
                memory_bytes: boot.memory_bytes,
                vcpus: boot.vcpus,
                disks: u8::try_from(boot.disks.len()).unwrap_or(u8::MAX),
                nets: boot.nets,
            },
            Self::Shell { shape, .. } => *shape,
        }
    }
}

/// What a VM's shell depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shape {
    /// RAM, a multiple of 2 MiB, at least 64 MiB.
    pub memory_bytes: u64,
    /// 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// At most [`MAX_DISKS`].
    pub disks: u8,
    /// Network devices, at most [`MAX_NETS`].
    #[serde(default)]
    pub nets: u8,
}

/// What a network device is joined to ([`crate::control::Command::Connect`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkConfig {
    /// The address of the interface.
    pub mac: [u8; 6],
    /// The only address that packets may come from.
    pub address: Ipv4Addr,
    /// How fast the guest may send; `None`: as fast as it can.
    #[serde(default)]
    pub sends: Option<Rate>,
    /// How fast it may receive.
    #[serde(default)]
    pub receives: Option<Rate>,
}

/// A limit on bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// In the long run.
    pub bytes_per_second: u64,
    /// At once, after nothing for long.
    pub burst_bytes: u64,
}

/// A cold boot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BootConfig {
    /// An ELF vmlinux.
    pub kernel_fd: FdNumber,
    /// An initramfs, compressed as the kernel can read.
    pub initrd_fd: Option<FdNumber>,
    /// The kernel's command line.
    pub cmdline: String,
    /// RAM, a multiple of 2 MiB, at least 64 MiB.
    pub memory_bytes: u64,
    /// 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// In order vda, vdb, …; at most [`MAX_DISKS`].
    pub disks: Vec<DiskConfig>,
    /// Network devices, at most [`MAX_NETS`]; without a link.
    #[serde(default)]
    pub nets: u8,
}

/// A start from a snapshot. A descriptor is numbered by its place among those that come with the message, from 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreConfig {
    /// The sealed state that `Save` wrote.
    pub state_fd: FdNumber,
    /// Guest RAM as `Save` wrote it, mapped `MAP_PRIVATE`: nothing is copied, pages are shared until written.
    pub memory_fd: FdNumber,
    /// Pages of RAM that other memory files have.
    #[serde(default)]
    pub shared: Option<SharedConfig>,
    /// The same disks as when it was saved, each with a fresh writable layer.
    pub disks: Vec<DiskConfig>,
    /// The clone's VM generation id: new for every clone.
    pub generation: [u8; 16],
    /// The record of pages to lay ready before the guest runs ([`crate::memory::working_set`]).
    #[serde(default)]
    pub working_set_fd: Option<FdNumber>,
    /// A socket to the pager that fills the memory file, where that is not whole yet ([`crate::memory::lazy`]).
    #[serde(default)]
    pub pager_fd: Option<FdNumber>,
    /// Whether to wait for `Resume`.
    pub paused: bool,
}

/// Pages of RAM that are mapped from other memory files than the snapshot's own ([`crate::memory::backing`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedConfig {
    /// The sealed list of them.
    pub list_fd: FdNumber,
    /// The files, which are whole.
    pub file_fds: Vec<FdNumber>,
}

/// A disk: read-only layers under one writable layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskConfig {
    /// Size that the guest sees, a multiple of [`DISK_BLOCK_BYTES`].
    pub size_bytes: u64,
    /// The raw base image, read-only. Shorter than `size_bytes`: the rest reads as zero.
    pub base_fd: FdNumber,
    /// Frozen layers over it, the lowest first; at most [`MAX_LAYERS`].
    pub layers: Vec<LayerConfig>,
    /// An empty file, opened read-write, that takes this VM's writes; `None`: the guest sees a read-only disk.
    pub writable_fd: Option<FdNumber>,
}

/// A frozen copy-on-write layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerConfig {
    /// Sparse file: block b of the disk at byte b × [`DISK_BLOCK_BYTES`], where the map has it.
    pub data_fd: FdNumber,
    /// The sealed map of the blocks this layer has ([`crate::disk`]).
    pub map_fd: FdNumber,
}
