//! vCPUs: one thread each, which runs the guest until told to park.
//!
//! ```text
//!            start(paused)                    kick: signal + immediate_exit
//!   ─────────────▶ Parked ◀──────────────────────────────── Running
//!                    │    want = Parked, KVM_RUN gave EINTR    ▲
//!                    └─────────────────────────────────────────┘
//!                                 want = Running
//! ```
//!
//! A parked thread has finished the port or MMIO access it was in (KVM_RUN with `immediate_exit` completes it), so the
//! registers are those between two instructions, and it has let go of its [`VcpuFd`]: whoever parked it may use it.

pub mod clocks;
pub mod run;
pub mod state;

use crate::crew::Hand;
use crate::platform::Platform;
use kvm_ioctls::VcpuFd;
use std::cell::Cell;
use std::os::unix::thread::JoinHandleExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a vCPU may take to park. It needs one exit from the guest and one access to a device.
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
    /// Which.
    pub id: u8,
}

/// A vCPU and its thread.
#[derive(Debug)]
pub struct Vcpu {
    id: u8,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The signal that gets a thread out of KVM_RUN.
fn kick_signal() -> i32 {
    libc::SIGRTMIN()
}

thread_local! {
    /// `immediate_exit` of the vCPU that this thread runs, for the signal handler.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(std::ptr::null_mut()) };
}

extern "C" fn on_kick(_: i32) {
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: set by this very thread to a byte of the kvm_run page, which is mapped while the thread runs its vCPU,
        // and cleared before that mapping goes.
        unsafe { flag.write_volatile(1) };
    }
}

/// Installs the handler for the kick signal; once, before the first vCPU starts.
pub fn install_kick_handler() {
    // SAFETY: a zeroed sigaction is valid; the handler writes one byte through a thread-local pointer and nothing else.
    // No SA_RESTART: KVM_RUN has to return.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(i32) = on_kick;
        action.sa_sigaction = handler as usize;
        libc::sigaction(kick_signal(), &raw const action, std::ptr::null_mut());
    }
}

impl Vcpu {
    /// Sets `hand` to running it, parked.
    #[must_use]
    pub fn start(id: u8, fd: VcpuFd, platform: Arc<Platform>, hand: Hand) -> Self {
        let wanted = Wanted { want: Phase::Parked, is: Phase::Parked };
        let shared =
            Arc::new(Shared { fd: Mutex::new(fd), phase: Mutex::new(wanted), changed: Condvar::new() });
        let mine = Arc::clone(&shared);
        let thread = hand.set_to(move || mine.run(id, &platform));
        Self { id, shared, thread }
    }

    /// The APIC id.
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
        // SAFETY: the thread lives as long as its handle, which `self` holds; it never returns while the VM lives.
        unsafe { libc::pthread_kill(self.thread.as_pthread_t(), kick_signal()) };
    }

    /// Waits until the vCPU is parked.
    ///
    /// # Errors
    /// When it does not within ten seconds.
    pub fn wait_parked(&self) -> Result<(), ParkError> {
        let deadline = Instant::now() + PARK_TIMEOUT;
        let mut phase = lock(&self.shared.phase);
        while phase.is != Phase::Parked {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ParkError { id: self.id });
            }
            phase = self.shared.changed.wait_timeout(phase, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Lets the vCPU run.
    pub fn resume(&self) {
        lock(&self.shared.phase).want = Phase::Running;
        self.shared.changed.notify_all();
    }

    /// The vCPU's descriptor; blocks while the vCPU runs, so park it first.
    pub fn fd(&self) -> impl std::ops::Deref<Target = VcpuFd> + '_ {
        lock(&self.shared.fd)
    }
}

/// A KVM_RUN that does not enter the guest. The first one of a VM starts a thread in the kernel (kvm_mmu_post_init_vm, Linux 6.14), some
/// 50 us of a birth, and the first of a vCPU makes it this thread's: neither is left to the birth.
pub fn first_run(vcpu: &mut VcpuFd) {
    vcpu.set_kvm_immediate_exit(1);
    // EINTR, as asked; whatever else it is, the first real one says.
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
                // SAFETY: a byte of the kvm_run page, mapped as long as `fd` lives.
                unsafe { flag.write_volatile(0) };
                // A kick before the line above lost its flag, but what it wanted is already to be read here.
                if lock(&self.phase).want == Phase::Parked {
                    break;
                }
                run::until_kicked(id, &mut fd, platform);
            }
            // Finish the port or MMIO access that the last exit asked for, if any.
            fd.set_kvm_immediate_exit(1);
            run::until_kicked(id, &mut fd, platform);
            IMMEDIATE_EXIT.set(std::ptr::null_mut());
        }
    }
}
