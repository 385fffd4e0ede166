//! The run loop: KVM_RUN, and the handling of each exit.

use crate::control::ExitReason;
use crate::exit;
use crate::platform::Platform;
use kvm_ioctls::{VcpuExit, VcpuFd};

/// What to do after an exit: enter the guest again, end the VM, or end it as failed.
enum Then {
    GoOn,
    End(ExitReason, String),
    Broken(String),
}

/// Runs the guest until KVM_RUN is interrupted (EINTR). Ends the process if the guest or KVM ends
/// the VM.
pub fn until_kicked(id: u8, fd: &mut VcpuFd, platform: &Platform) {
    loop {
        let then = match fd.run() {
            Ok(VcpuExit::IoOut(port, data)) => match platform.port_write(port, data) {
                None => Then::GoOn,
                Some((reason, message)) => Then::End(reason, message.to_owned()),
            },
            Ok(VcpuExit::IoIn(port, data)) => {
                platform.port_read(port, data);
                Then::GoOn
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                platform.mmio_read(address, data);
                Then::GoOn
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                platform.mmio_write(address, data);
                Then::GoOn
            }
            Ok(VcpuExit::Shutdown) => {
                Then::End(ExitReason::Reboot, format!("triple fault on vCPU {id}"))
            }
            Ok(VcpuExit::SystemEvent(kind, _)) => system_event(kind),
            Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => Then::GoOn,
            Ok(VcpuExit::FailEntry(reason, cpu)) => Then::Broken(format!(
                "KVM_EXIT_FAIL_ENTRY: hardware reason {reason:#x} on CPU {cpu}"
            )),
            Ok(VcpuExit::InternalError) => Then::Broken("KVM_EXIT_INTERNAL_ERROR".to_owned()),
            Ok(VcpuExit::MemoryFault { flags, gpa, size }) => Then::Broken(format!(
                "KVM_EXIT_MEMORY_FAULT: guest address {gpa:#x}, {size:#x} bytes, flags {flags:#x}"
            )),
            Ok(other) => Then::Broken(format!("an unexpected exit: {other:?}")),
            Err(error) if error.errno() == libc::EINTR => return,
            Err(error) if error.errno() == libc::EAGAIN => Then::GoOn,
            Err(error) => Then::Broken(format!("KVM_RUN: {error}")),
        };
        match then {
            Then::GoOn => {}
            Then::End(reason, message) => exit::end(reason, &message),
            Then::Broken(message) => {
                let detail = internal_error(fd);
                let message = format!("vCPU {id}: {message}{detail}; {}", registers(fd));
                exit::end(ExitReason::Failed, &message);
            }
        }
    }
}

fn system_event(kind: u32) -> Then {
    match kind {
        kvm_bindings::KVM_SYSTEM_EVENT_SHUTDOWN => {
            Then::End(ExitReason::PowerOff, "KVM_SYSTEM_EVENT_SHUTDOWN".to_owned())
        }
        kvm_bindings::KVM_SYSTEM_EVENT_RESET => {
            Then::End(ExitReason::Reboot, "KVM_SYSTEM_EVENT_RESET".to_owned())
        }
        kvm_bindings::KVM_SYSTEM_EVENT_CRASH => {
            Then::End(ExitReason::Panic, "KVM_SYSTEM_EVENT_CRASH".to_owned())
        }
        other => Then::Broken(format!("KVM_EXIT_SYSTEM_EVENT of unknown type {other}")),
    }
}

/// Suberror and data of KVM_EXIT_INTERNAL_ERROR, which kvm-ioctls leaves in the kvm_run page.
fn internal_error(fd: &mut VcpuFd) -> String {
    let run = fd.get_kvm_run();
    if run.exit_reason != kvm_bindings::KVM_EXIT_INTERNAL_ERROR {
        return String::new();
    }
    // SAFETY: the exit reason says that this variant of the union is valid; it is plain integers.
    let internal = unsafe { run.__bindgen_anon_1.internal };
    let count = usize::try_from(internal.ndata).unwrap_or(0).min(internal.data.len());
    let name = match internal.suberror {
        1 => "emulation failed",
        2 => "simultaneous exceptions",
        3 => "delivering an event failed",
        4 => "unexpected exit",
        _ => "unknown",
    };
    format!(": suberror {} ({name}), data {:#x?}", internal.suberror, &internal.data[..count])
        .replace(['\n', ' '], " ")
}

fn registers(fd: &VcpuFd) -> String {
    let (regs, sregs) = match (fd.get_regs(), fd.get_sregs()) {
        (Ok(regs), Ok(sregs)) => (regs, sregs),
        (Err(error), _) | (_, Err(error)) => return format!("registers cannot be read: {error}"),
    };
    format!(
        "rip {:#x} rsp {:#x} rflags {:#x} rax {:#x} rbx {:#x} rcx {:#x} rdx {:#x} \
         rsi {:#x} rdi {:#x} cr0 {:#x} cr2 {:#x} cr3 {:#x} cr4 {:#x} efer {:#x} cs {:#x}",
        regs.rip,
        regs.rsp,
        regs.rflags,
        regs.rax,
        regs.rbx,
        regs.rcx,
        regs.rdx,
        regs.rsi,
        regs.rdi,
        sregs.cr0,
        sregs.cr2,
        sregs.cr3,
        sregs.cr4,
        sregs.efer,
        sregs.cs.selector
    )
}
