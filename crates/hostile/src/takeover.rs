//! A process that an attacker has taken over, for tests: any thread of a running program makes the
//! system calls of a test.
//!
//! A VMM that its guest took over runs the guest's code in one of its threads: in its jail, as
//! its user, under that thread's seccomp filter, with its descriptors. [`Taken`] does the same to a
//! `dayfly-vmm` as it is shipped: it stops the thread (ptrace(2)), lets it make system calls, and
//! lets it go on as if nothing had happened. No build of the VMM with holes is needed.
//!
//! x86-64 only. All calls on a [`Taken`] must come from the thread that made it, because ptrace(2)
//! belongs to a thread.

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// How long a system call may take before it counts as [`Fate::Blocks`].
const MOST: Duration = Duration::from_secs(5);
/// A thread that has not stopped after this time does not, however busy the host is.
const NEVER: Duration = Duration::from_secs(120);
/// Bytes below the stack pointer that the program may use without moving it (System V ABI,
/// section 3.2.2).
const RED_ZONE: u64 = 128;
/// Bytes that [`Taken::scratch`] offers.
pub const SCRATCH_BYTES: u64 = 4096;
/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Results of a system call that the kernel restarts once no signal is handled
/// (include/linux/errno.h): ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK.
const RESTARTED: [i64; 4] = [-512, -513, -514, -516];

/// What came of a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It returned this; a negated errno(3) if it failed.
    Returned(i64),
    /// The seccomp filter refused it, and the process is ending or has ended.
    Refused,
    /// It had not returned after some seconds and was interrupted.
    Blocks,
}

/// A thread that makes the system calls of a test. When dropped, the thread goes on where it was.
#[derive(Debug)]
pub struct Taken {
    thread: i32,
    memory: File,
    before: libc::user_regs_struct,
    syscall_at: u64,
    ended: bool,
    /// ptrace(2) belongs to a thread.
    bound: PhantomData<*const ()>,
}

impl Taken {
    /// Stops the thread of process `pid` whose name is `name`, or the main thread.
    ///
    /// # Errors
    /// There is no such thread, or it cannot be traced.
    pub fn thread(pid: u32, name: Option<&str>) -> io::Result<Self> {
        let thread = match name {
            None => i32::try_from(pid).map_err(io::Error::other)?,
            Some(name) => find(pid, name)?,
        };
        // The option distinguishes stops at system calls from SIGTRAP.
        trace(libc::PTRACE_SEIZE, thread, 0, libc::PTRACE_O_TRACESYSGOOD as u64)?;
        trace(libc::PTRACE_INTERRUPT, thread, 0, 0)?;
        wait(thread)?;
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/task/{thread}/mem"))?;
        let before = registers(thread)?;
        let syscall_at = find_syscall(pid, &memory, &before)?;
        Ok(Self { thread, memory, before, syscall_at, ended: false, bound: PhantomData })
    }

    /// Makes a system call in the thread.
    ///
    /// # Errors
    /// The thread has ended, or cannot be traced.
    pub fn call(&mut self, number: i64, arguments: [u64; 6]) -> io::Result<Fate> {
        if self.ended {
            return Err(io::Error::other("the process has ended"));
        }
        match self.stepped(number, arguments) {
            // The thread ended between two stops. Unless it is waited for, its process stays.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                self.ended = true;
                while !matches!(wait(self.thread), Ok(Stop::Ended | Stop::Late) | Err(_)) {}
                Ok(Fate::Refused)
            }
            fate => fate,
        }
    }

    fn stepped(&mut self, number: i64, arguments: [u64; 6]) -> io::Result<Fate> {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let here = libc::user_regs_struct {
            rip: self.syscall_at,
            rax: number.cast_unsigned(),
            // Not within a system call, so nothing is restarted.
            orig_rax: u64::MAX,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..self.before
        };
        set_registers(self.thread, &here)?;
        // Two stops: the entry of the call and its end.
        for _ in 0..2 {
            trace(libc::PTRACE_SYSCALL, self.thread, 0, 0)?;
            match wait(self.thread)? {
                Stop::Syscall => {}
                Stop::Late => {
                    trace(libc::PTRACE_INTERRUPT, self.thread, 0, 0)?;
                    while !matches!(wait(self.thread)?, Stop::Syscall | Stop::Other) {}
                    return Ok(Fate::Blocks);
                }
                Stop::Signal(libc::SIGSYS) => {
                    self.ended = true;
                    trace(libc::PTRACE_DETACH, self.thread, 0, libc::SIGSYS as u64)?;
                    return Ok(Fate::Refused);
                }
                Stop::Ended => {
                    self.ended = true;
                    return Ok(Fate::Refused);
                }
                other => return Err(io::Error::other(format!("unexpected stop: {other:?}"))),
            }
        }
        if self.is_killed()? {
            self.ended = true;
            trace(libc::PTRACE_DETACH, self.thread, 0, 0)?;
            return Ok(Fate::Refused);
        }
        Ok(Fate::Returned(registers(self.thread)?.rax.cast_signed()))
    }

    /// Whether a filter has decided to kill the process: the call ends without having been made,
    /// and SIGSYS is pending.
    fn is_killed(&self) -> io::Result<bool> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.thread))?;
        let pending = status.lines().filter_map(|line| line.strip_prefix("SigPnd:"));
        let pending = pending.map(|mask| u64::from_str_radix(mask.trim(), 16)).next();
        let pending = pending.transpose().map_err(io::Error::other)?.unwrap_or(0);
        Ok(pending & 1 << (libc::SIGSYS - 1) != 0)
    }

    /// The address of [`SCRATCH_BYTES`] bytes of the thread's stack that the program does not use.
    #[must_use]
    pub const fn scratch(&self) -> u64 {
        (self.before.rsp - RED_ZONE - SCRATCH_BYTES) & !15
    }

    /// Writes to the process's memory.
    ///
    /// # Errors
    /// The address is not mapped.
    pub fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.memory.write_all_at(bytes, address)
    }

    /// Reads the process's memory.
    ///
    /// # Errors
    /// The address is not mapped.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.read_exact_at(bytes, address)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let mut after = self.before;
        // The kernel restarts an interrupted call only on its way out of the stop in which it found
        // no signal; that was the first stop.
        let inside = after.orig_rax != u64::MAX;
        if inside && RESTARTED.contains(&after.rax.cast_signed()) {
            after.rip -= SYSCALL.len() as u64;
            after.rax = after.orig_rax;
        }
        after.orig_rax = u64::MAX;
        // If these fail, the thread has ended.
        let _ = set_registers(self.thread, &after);
        let _ = trace(libc::PTRACE_DETACH, self.thread, 0, 0);
    }
}

/// Why a traced thread stopped.
#[derive(Debug)]
enum Stop {
    Syscall,
    Signal(i32),
    Other,
    Ended,
    Late,
}

fn find(pid: u32, name: &str) -> io::Result<i32> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let entry = entry?;
        let found = std::fs::read_to_string(entry.path().join("comm"))?;
        if found.trim_end() == name {
            return entry.file_name().to_string_lossy().parse().map_err(io::Error::other);
        }
        names.push(found.trim_end().to_owned());
    }
    Err(io::Error::other(format!("process {pid}: expected a thread {name:?}, got {names:?}")))
}

/// Where the process has the instruction `syscall`.
fn find_syscall(pid: u32, memory: &File, at: &libc::user_regs_struct) -> io::Result<u64> {
    let mut here = [0; 2];
    let last = at.rip.wrapping_sub(2);
    if memory.read_exact_at(&mut here, last).is_ok() && here == SYSCALL {
        return Ok(last);
    }
    for line in std::fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        let mut fields = line.split_whitespace();
        let (Some(range), Some(rights)) = (fields.next(), fields.next()) else { continue };
        let Some((from, to)) = range.split_once('-').filter(|_| rights.starts_with("r-x")) else {
            continue;
        };
        let hexadecimal = |text| u64::from_str_radix(text, 16).map_err(io::Error::other);
        let (from, to) = (hexadecimal(from)?, hexadecimal(to)?);
        let mut text = vec![0; usize::try_from(to - from).map_err(io::Error::other)?];
        if memory.read_exact_at(&mut text, from).is_ok()
            && let Some(at) = text.windows(2).position(|bytes| bytes == SYSCALL)
        {
            return Ok(from + at as u64);
        }
    }
    Err(io::Error::other("the program has no `syscall` instruction"))
}

fn trace(request: libc::c_uint, thread: i32, address: u64, data: u64) -> io::Result<()> {
    // SAFETY: the requests made with this function take integers, not addresses of this process.
    let result = unsafe { libc::ptrace(request, thread, address, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn registers(thread: i32) -> io::Result<libc::user_regs_struct> {
    let mut found = std::mem::MaybeUninit::<libc::user_regs_struct>::zeroed();
    // SAFETY: the kernel writes one user_regs_struct to `found`, which has room for it.
    let result =
        unsafe { libc::ptrace(libc::PTRACE_GETREGS, thread, 0, found.as_mut_ptr().cast::<u8>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed above, and every bit pattern is a value of its integers.
    Ok(unsafe { found.assume_init() })
}

fn set_registers(thread: i32, to: &libc::user_regs_struct) -> io::Result<()> {
    // SAFETY: the kernel reads one user_regs_struct from `to`.
    let result = unsafe { libc::ptrace(libc::PTRACE_SETREGS, thread, 0, std::ptr::from_ref(to)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether the thread sleeps in its call. On a busy host it may also wait for a CPU.
fn sleeps(thread: i32) -> io::Result<bool> {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat"))?;
    // The state is behind the name, which may have parentheses too.
    Ok(stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['S', 'D'])))
}

/// Waits until the thread stops or ends, or sleeps after [`MOST`]; at most [`NEVER`].
fn wait(thread: i32) -> io::Result<Stop> {
    let begun = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: the kernel writes one int to `status`.
        let got = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL | libc::WNOHANG) };
        match got {
            -1 => return Err(io::Error::last_os_error()),
            0 if begun.elapsed() > MOST && sleeps(thread)? => return Ok(Stop::Late),
            0 if begun.elapsed() > NEVER => return Ok(Stop::Late),
            0 => std::thread::sleep(Duration::from_micros(200)),
            _ if !libc::WIFSTOPPED(status) => return Ok(Stop::Ended),
            _ if status >> 16 != 0 => return Ok(Stop::Other),
            _ if libc::WSTOPSIG(status) == libc::SIGTRAP | 0x80 => return Ok(Stop::Syscall),
            _ => return Ok(Stop::Signal(libc::WSTOPSIG(status))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Fate, Taken};
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, ExitStatus, Stdio};

    /// `cat`, which waits for input.
    fn cat() -> Child {
        Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    }

    /// Checks that `child` has ended as `expected`. Here the tracer is the parent too, so it may
    /// have taken the status already.
    fn ended(child: &mut Child, expected: impl FnOnce(ExitStatus) -> bool) {
        match child.wait() {
            Ok(status) => assert!(expected(status), "{status}"),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ECHILD)),
        }
    }

    #[test]
    fn a_program_makes_the_calls_of_a_test_and_goes_on() {
        let mut child = cat();
        {
            let mut taken = Taken::thread(child.id(), None).unwrap();
            let own = taken.call(libc::SYS_getpid, [0; 6]).unwrap();
            assert_eq!(own, Fate::Returned(i64::from(child.id())));
            let room = taken.scratch();
            taken.write(room, b"taken over\n").unwrap();
            let wrote = taken.call(libc::SYS_write, [1, room, 11, 0, 0, 0]).unwrap();
            assert_eq!(wrote, Fate::Returned(11));
            let closed = taken.call(libc::SYS_close, [99, 0, 0, 0, 0, 0]).unwrap();
            assert_eq!(closed, Fate::Returned(-i64::from(libc::EBADF)));
            // Its input is empty and open.
            let read = taken.call(libc::SYS_read, [0, room, 1, 0, 0, 0]).unwrap();
            assert_eq!(read, Fate::Blocks);
        }
        let mut stdin = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut stdin, b"as before\n").unwrap();
        drop(stdin);
        let mut said = String::new();
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(said, "taken over\nas before\n");
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn a_call_that_ends_the_process_is_seen_as_its_end() {
        let mut child = cat();
        let mut taken = Taken::thread(child.id(), None).unwrap();
        assert_eq!(taken.call(libc::SYS_exit_group, [3, 0, 0, 0, 0, 0]).unwrap(), Fate::Refused);
        assert!(taken.call(libc::SYS_getpid, [0; 6]).is_err());
        drop(taken);
        ended(&mut child, |status| status.code() == Some(3));
    }

    #[test]
    fn a_call_that_a_filter_forbids_ends_the_process() {
        let mut child = cat();
        let mut taken = Taken::thread(child.id(), None).unwrap();
        let [nr, no_privs] = [libc::PR_SET_NO_NEW_PRIVS, 1].map(|n| u64::try_from(n).unwrap());
        let done = taken.call(libc::SYS_prctl, [nr, no_privs, 0, 0, 0, 0]).unwrap();
        assert_eq!(done, Fate::Returned(0));
        // Load the number; if it is getppid's, kill the process; else allow.
        let getppid = u32::try_from(libc::SYS_getppid).unwrap();
        let program: [(u16, u8, u8, u32); 4] = [
            (0x20, 0, 0, 0),
            (0x15, 0, 1, getppid),
            (0x06, 0, 0, 0x8000_0000),
            (0x06, 0, 0, 0x7fff_0000),
        ];
        let room = taken.scratch();
        for (at, (code, yes, no, k)) in (0..).zip(program) {
            let [c, k] = [u32::from(code), k].map(u32::to_le_bytes);
            taken.write(room + 8 * at, &[c[0], c[1], yes, no, k[0], k[1], k[2], k[3]]).unwrap();
        }
        // struct sock_fprog: u16 length, padding, address.
        let list = room + 64;
        taken.write(list, &4_u64.to_le_bytes()).unwrap();
        taken.write(list + 8, &room.to_le_bytes()).unwrap();
        let done = taken.call(libc::SYS_seccomp, [1, 0, list, 0, 0, 0]).unwrap();
        assert_eq!(done, Fate::Returned(0));
        let own = taken.call(libc::SYS_getpid, [0; 6]).unwrap();
        assert_eq!(own, Fate::Returned(i64::from(child.id())));
        assert_eq!(taken.call(libc::SYS_getppid, [0; 6]).unwrap(), Fate::Refused);
        drop(taken);
        ended(&mut child, |status| status.signal() == Some(libc::SIGSYS));
    }
}
