//! vCPUs: one thread each, which runs the guest until the VM asks it to park.
//!
//! ```text
//!            start                            kick: signal + immediate_exit
//!   ─────────────▶ Parked ◀──────────────────────────────── Running
//!                    │    want = Parked, KVM_RUN gave EINTR    ▲
//!                    └─────────────────────────────────────────┘
//!                                 want = Running
//! ```
//!
//! A parked thread has finished its last port or MMIO access, because KVM_RUN with `immediate_exit`
//! completes it. So the registers are those between two instructions. The thread has also released
//! the lock of its [`VcpuFd`], so that the thread that parked it may use the descriptor.

pub mod clocks;
pub mod run;
pub mod state;
mod tsc;

use crate::platform::Platform;
use crate::workers::Worker;
use dayfly_units::sync::lock;
use kvm_ioctls::VcpuFd;
use std::cell::Cell;
use std::os::unix::thread::JoinHandleExt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a vCPU may take to park: one exit from the guest and one access to a device.
const PARK_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Parked,
    Running,
}

#[derive(Debug)]
struct Wanted {
    want: Phase,
    is: Phase,
}

#[derive(Debug)]
struct Shared {
    fd: Mutex<VcpuFd>,
    phase: Mutex<Wanted>,
    changed: Condvar,
}

/// A vCPU did not park in time.
#[derive(Debug, thiserror::Error)]
#[error("vCPU {id} did not stop within {} s", PARK_TIMEOUT.as_secs())]
pub struct ParkError {
    /// The vCPU's APIC id.
    pub id: u8,
}

/// A vCPU and its thread. [`Vcpu::fd`] gives the descriptor while the vCPU is parked.
#[derive(Debug)]
pub struct Vcpu {
    id: u8,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

/// The signal that interrupts KVM_RUN.
fn kick_signal() -> i32 {
    libc::SIGRTMIN()
}

thread_local! {
    /// `immediate_exit` of the vCPU that this thread runs, for the signal handler; null if parked.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(std::ptr::null_mut()) };
}

extern "C" fn on_kick(_: i32) {
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: this thread set the pointer to a byte of the kvm_run page. The page is mapped
        // while the thread runs its vCPU, and the pointer is cleared before the mapping ends.
        unsafe { flag.write_volatile(1) };
    }
}

/// Installs the handler of the kick signal. Call it once, before the first vCPU starts.
pub fn install_kick_handler() {
    // SAFETY: a zeroed sigaction is valid; the handler writes one byte through a thread-local
    // pointer and nothing else. No SA_RESTART: KVM_RUN has to return.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(i32) = on_kick;
        action.sa_sigaction = handler as usize;
        libc::sigaction(kick_signal(), &raw const action, std::ptr::null_mut());
    }
}

impl Vcpu {
    /// Makes `worker` the thread of this vCPU. The vCPU starts parked.
    #[must_use]
    pub fn start(id: u8, fd: VcpuFd, platform: Arc<Platform>, worker: Worker) -> Self {
        let wanted = Wanted { want: Phase::Parked, is: Phase::Parked };
        let shared = Arc::new(Shared {
            fd: Mutex::new(fd),
            phase: Mutex::new(wanted),
            changed: Condvar::new(),
        });
        let mine = Arc::clone(&shared);
        let thread = worker.set_to(move |()| mine.run(id, &platform));
        Self { id, shared, thread }
    }

    /// The vCPU's APIC id.
    #[must_use]
    pub fn id(&self) -> u8 {
        self.id
    }

    /// Asks the vCPU to park; [`Vcpu::wait_parked`] waits for it.
    pub fn ask_to_park(&self) {
        lock(&self.shared.phase).want = Phase::Parked;
        self.kick();
    }

    fn kick(&self) {
        // SAFETY: `self` holds the thread's handle, and the thread never returns while the VM
        // lives, so its `pthread_t` is valid.
        unsafe { libc::pthread_kill(self.thread.as_pthread_t(), kick_signal()) };
    }

    /// Waits until the vCPU is parked.
    ///
    /// # Errors
    /// The vCPU does not park within ten seconds.
    pub fn wait_parked(&self) -> Result<(), ParkError> {
        let deadline = Instant::now() + PARK_TIMEOUT;
        let mut phase = lock(&self.shared.phase);
        while phase.is != Phase::Parked {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ParkError { id: self.id });
            }
            phase = self
                .shared
                .changed
                .wait_timeout(phase, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Ok(())
    }

    /// Asks the vCPU to run.
    pub fn resume(&self) {
        lock(&self.shared.phase).want = Phase::Running;
        self.shared.changed.notify_all();
    }

    /// The vCPU's descriptor. Blocks while the vCPU runs, so park the vCPU first.
    pub fn fd(&self) -> impl std::ops::Deref<Target = VcpuFd> + '_ {
        lock(&self.shared.fd)
    }
}

/// Calls KVM_RUN without entering the guest.
///
/// A VM's first KVM_RUN starts a thread in the kernel (kvm_mmu_post_init_vm, Linux 6.14), which
/// takes about 50 us. A vCPU's first KVM_RUN makes the vCPU the calling thread's. This call does
/// both ahead of a VM's creation.
pub fn first_run(vcpu: &mut VcpuFd) {
    vcpu.set_kvm_immediate_exit(1);
    // EINTR is expected. The first KVM_RUN that enters the guest reports any other error again.
    let _ = vcpu.run();
    vcpu.set_kvm_immediate_exit(0);
}

impl Shared {
    fn run(&self, id: u8, platform: &Platform) -> ! {
        first_run(&mut lock(&self.fd));
        loop {
            let mut phase = lock(&self.phase);
            while phase.want == Phase::Parked {
                phase.is = Phase::Parked;
                self.changed.notify_all();
                phase = self.changed.wait(phase).unwrap_or_else(PoisonError::into_inner);
            }
            phase.is = Phase::Running;
            drop(phase);

            let mut fd = lock(&self.fd);
            let flag: *mut u8 = &raw mut fd.get_kvm_run().immediate_exit;
            IMMEDIATE_EXIT.set(flag);
            loop {
                // SAFETY: a byte of the kvm_run page, which is mapped as long as `fd` lives.
                unsafe { flag.write_volatile(0) };
                // A kick before the write above lost its flag, but its thread set `want` first,
                // which is read here.
                if lock(&self.phase).want == Phase::Parked {
                    break;
                }
                run::until_kicked(id, &mut fd, platform);
            }
            // Finish the port or MMIO access of the last exit, if there was one.
            fd.set_kvm_immediate_exit(1);
            run::until_kicked(id, &mut fd, platform);
            IMMEDIATE_EXIT.set(std::ptr::null_mut());
        }
    }
}
