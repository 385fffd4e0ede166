//! The system calls that each kind of thread may make (seccomp(2)). Any other call, and any
//! argument outside its bounds, ends the process: the kernel kills it with SIGSYS.
//!
//! The kernel kills, instead of a SIGSYS handler that ends the process, because a process that its
//! guest took over could change its handler's data and stack, and go on. The daemon reads the
//! signal from the VMM's pidfd (`dayfly_host::process`), so the cause is known all the same.
//!
//! There are five kinds of thread:
//! - A vCPU thread runs the guest. Of KVM's ioctls it may call KVM_RUN, and read registers for a
//!   last message.
//! - The thread of the disks moves bytes between guest memory and the files of disks.
//! - The device thread moves bytes between guest memory, the tap and sockets.
//! - The main thread serves the control socket, loads and saves.
//! - The recorder's thread gives pages to a clone whose working set is recorded.
//!
//! Each thread has two filters, one after the other:
//!
//! ```text
//!         set-up filter                           guest filter, stacked
//! start ────────────────▶ set-up: becomes the user ───────────────────▶ guest: vCPUs may run
//!                         maps memory, loads state
//! ```
//!
//! The kernel applies both, so the guest filter only takes away what set-up alone needs. No thread
//! may open a file, map a file or memory that is executable, or start a process or thread, once
//! the guest can run.

mod bound;
mod call;
mod calls;
mod main_calls;
mod requests;
mod tree;

pub use bound::{Bound, Width};
pub use call::{Call, Stage, Thread};
pub use calls::calls;
pub use tree::TreeError;

use std::io;
use std::sync::Arc;
use tree::{Calls, When};

/// A compiled filter.
pub type Program = seccompiler::BpfProgram;

/// The two filters of a kind of thread.
#[derive(Debug, Clone)]
pub struct ThreadFilter {
    set_up: Arc<Program>,
    guest: Arc<Program>,
}

/// The filters of all kinds of thread.
#[derive(Debug, Clone)]
pub struct Filters {
    /// Filters of vCPU threads.
    pub vcpu: ThreadFilter,
    /// Filters of the thread of all devices but the disks.
    pub devices: ThreadFilter,
    /// Filters of the thread of the disks.
    pub disks: ThreadFilter,
    /// Filters of the main thread.
    pub main: ThreadFilter,
    /// Filters of the recorder's thread.
    pub recorder: ThreadFilter,
}

/// A filter could not be made; the text is the kind of thread.
#[derive(Debug, thiserror::Error)]
#[error("seccomp filter of {0:?} threads")]
pub struct FilterError(Thread, #[source] TreeError);

/// F_GETFD: with debug assertions, the standard library looks at a descriptor before it closes it.
const CHECK_BEFORE_CLOSE: &[Bound] = &[bound::low(1, libc::F_GETFD.cast_unsigned())];

/// The calls that a thread may make in a stage.
fn allowed(thread: Thread, stage: Stage) -> Result<Calls, TreeError> {
    let mut all = Calls::new();
    for call in calls().filter(|call| call.is_for(thread, stage)) {
        let number = u32::try_from(call.number).map_err(|_| TreeError::Number(call.number))?;
        match all.entry(number).or_insert_with(|| When::Within(Vec::new())) {
            When::Within(lists) if !call.within.is_empty() => lists.extend(call.within),
            always => *always = When::Always,
        }
    }
    if cfg!(debug_assertions) {
        let fcntl = libc::SYS_fcntl;
        let number = u32::try_from(fcntl).map_err(|_| TreeError::Number(fcntl))?;
        if let When::Within(lists) = all.entry(number).or_insert_with(|| When::Within(Vec::new())) {
            lists.push(CHECK_BEFORE_CLOSE);
        }
    }
    Ok(all)
}

/// The calls of the set-up that the guest stage forbids, wholly or with some arguments.
fn narrowed(set_up: &Calls, guest: &Calls) -> Calls {
    let narrower = |(number, before): (&u32, &When)| {
        let after = guest.get(number).cloned().unwrap_or(When::Never);
        (after != *before).then_some((*number, after))
    };
    set_up.iter().filter_map(narrower).collect()
}

impl ThreadFilter {
    fn new(thread: Thread) -> Result<Self, FilterError> {
        let failed = |error| FilterError(thread, error);
        let set_up = allowed(thread, Stage::SetUp).map_err(failed)?;
        let guest = narrowed(&set_up, &allowed(thread, Stage::Guest).map_err(failed)?);
        Ok(Self {
            set_up: Arc::new(tree::compile(&set_up, false).map_err(failed)?),
            guest: Arc::new(tree::compile(&guest, true).map_err(failed)?),
        })
    }

    /// Applies a stage's filter to the calling thread, for the thread's lifetime. The set-up's
    /// filter comes first. A failure ends the process, so that nothing runs unfiltered.
    pub fn enter(&self, stage: Stage) {
        let program = match stage {
            Stage::SetUp => &self.set_up,
            Stage::Guest => &self.guest,
        };
        if let Err(error) = install(program) {
            crate::exit::fail(&InstallError(error));
        }
    }
}

/// A filter could not be installed.
#[derive(Debug, thiserror::Error)]
#[error("installing a seccomp filter")]
struct InstallError(#[source] io::Error);

/// Installs a filter by one seccomp(2). no_new_privs is set already
/// ([`crate::jail::no_new_privileges`]).
fn install(program: &Program) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: the kernel reads `len` instructions from `filter`, and changes nothing.
    // seccompiler's sock_filter has the layout of the kernel's: u16, u8, u8, u32.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Filters {
    /// Compiles the filters of all kinds of thread.
    ///
    /// # Errors
    /// A filter is too long for its jumps.
    pub fn new() -> Result<Self, FilterError> {
        Ok(Self {
            vcpu: ThreadFilter::new(Thread::Vcpu)?,
            devices: ThreadFilter::new(Thread::Devices)?,
            disks: ThreadFilter::new(Thread::Disks)?,
            main: ThreadFilter::new(Thread::Main)?,
            recorder: ThreadFilter::new(Thread::Recorder)?,
        })
    }

    /// The filters of one kind of thread.
    #[must_use]
    pub const fn of(&self, thread: Thread) -> &ThreadFilter {
        match thread {
            Thread::Vcpu => &self.vcpu,
            Thread::Devices => &self.devices,
            Thread::Disks => &self.disks,
            Thread::Main => &self.main,
            Thread::Recorder => &self.recorder,
        }
    }
}
