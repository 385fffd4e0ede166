//! A VM's id and user, reserved before the VM exists.

use dayfly_host::cpus::CpuList;
use dayfly_units::VmId;

/// The user id of slot 0 in records that do not name the VM's user: those of older daemons.
pub const OLD_FIRST_UID: u32 = 200_000;

/// The most VMs at one time.
pub const MAX_VMS: u32 = 32_768;

/// Where a VMM is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Its VM's id, user and node.
    pub vm_slot: VmSlot,
    /// The CPUs that its VM has booked; `None`: those that VMs share.
    pub cpus: Option<CpuList>,
}

impl From<VmSlot> for Placement {
    fn from(vm_slot: VmSlot) -> Self {
        Self { vm_slot, cpus: None }
    }
}

/// An id and a slot that no other VM or warm VMM has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VmSlot {
    /// The id.
    pub id: VmId,
    /// The slot.
    pub slot: u32,
    /// The user and group id of its VMM: the first id of the daemon's range
    /// ([`crate::vm::uids`]) plus the slot.
    pub uid: u32,
    /// Index of its memory node in the host's list of nodes.
    pub node: usize,
}
