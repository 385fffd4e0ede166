//! x86-64: the guest-physical address space, and the work that firmware and boot loader do on a
//! real machine. That is kernel, boot parameters, ACPI tables, page tables, first registers, CPUID.
//!
//! What may not enter: threads, the behaviour of devices, files.

pub mod acpi;
pub mod boot;
pub mod cpuid;
pub mod features;
pub mod layout;
pub mod regs;
