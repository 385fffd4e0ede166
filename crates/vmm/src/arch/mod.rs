//! x86-64: where things lie in a guest's physical address space, and everything that firmware and boot loader do on a
//! real machine: kernel, boot parameters, ACPI tables, page tables, first registers, CPUID.
//!
//! What may not enter: threads, devices' behaviour, files.

pub mod acpi;
pub mod boot;
pub mod cpuid;
pub mod layout;
pub mod regs;
