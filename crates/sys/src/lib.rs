//! # sys
//!
//! Kernel interfaces that neither libc nor rustix wraps, written once for the daemon, the VMM, the
//! pager and the guest's agent:
//!
//! | module | interface | users |
//! |---|---|---|
//! | [`uffd`] | userfaultfd(2) | VMM, pager |
//! | [`fdwire`] | descriptors over unix sockets (SCM_RIGHTS, unix(7)) | daemon, VMM, pager |
//! | [`pagemap`] | entries of `/proc/<pid>/pagemap` | daemon, VMM |
//! | [`ioprio`] | ioprio_set(2) | pager |
//! | [`populate`] | page faults taken ahead (madvise(2)) | daemon, VMM, pager |
//! | [`code`] | huge pages for the program itself (madvise(2), mremap(2)) | daemon |
//! | [`clone3`] | clone3(2) | daemon, VMM, agent |
//! | [`group`] | entering a control group (cgroups(7)) | daemon, VMM |
//! | [`reopen`] | another description of an open file, by /proc/self/fd | daemon |
//! | [`landlock`] | landlock(7) | VMM |
//! | [`writers`] | leases and fs-verity: whether a file can be written to | store |
//! | `netlink` | messages of netlink(7); a feature | daemon, agent |
//!
//! This crate makes the system calls and checks their results. What a failure means is up to the
//! caller: it contains no policy, starts no thread, and knows nothing about VMs.

pub mod clone3;
pub mod code;
pub mod fdwire;
pub mod group;
pub mod ioprio;
pub mod landlock;
#[cfg(feature = "netlink")]
pub mod netlink;
pub mod pagemap;
pub mod populate;
pub mod reopen;
pub mod uffd;
pub mod writers;
