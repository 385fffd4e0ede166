//! `layout_cost PROGRAM`: what a fresh address layout for each VMM would cost. A fork of this
//! process, against a fork that executes PROGRAM (`dayfly-vmm`), which ends at once because it gets
//! no arguments. Then, what the guest stage's filter of the main thread costs to install. The best
//! and the middle of many rounds each.
#![allow(clippy::unwrap_used, reason = "a tool for developers; it stops at the first surprise")]

use dayfly_vmm::jail;
use dayfly_vmm::seccomp::{Filters, Stage};
use std::ffi::CString;
use std::hint::black_box;
use std::time::{Duration, Instant};

const ROUNDS: usize = 300;

/// The time from fork to the end of a child that does `act`.
fn child(act: &dyn Fn()) -> Duration {
    let start = Instant::now();
    // SAFETY: this process has one thread. The child executes a program or leaves through _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid == 0 {
        act();
        // SAFETY: ends the child without running destructors.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: waits for the child that was made above.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    start.elapsed()
}

fn report(what: &str, acts: [&dyn Fn(); 2]) {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (times, act) in times.iter_mut().zip(acts) {
            times.push(child(act));
        }
    }
    times.iter_mut().for_each(|times| times.sort());
    let us = |n: usize, at: usize| times[n][at].as_secs_f64() * 1e6;
    for (name, at) in [("best", 0), ("middle", ROUNDS / 2)] {
        let (without, with) = (us(0, at), us(1, at));
        println!("{what}, {name}: {without:.0} us, {with:.0} us, {:.2} times", with / without);
    }
}

fn main() {
    let program = std::env::args().nth(1).expect("usage: layout_cost PROGRAM");
    let program = CString::new(program).unwrap();
    let none = std::fs::File::options().write(true).open("/dev/null").unwrap();
    let execute = || {
        let arguments = [program.as_ptr(), std::ptr::null()];
        // SAFETY: the descriptor is open, the program's name and the list of arguments end with
        // zero.
        unsafe {
            libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&none), 2);
            libc::execv(program.as_ptr(), arguments.as_ptr());
        }
    };
    report("fork, fork and exec", [&|| (), &execute]);
    let main = Filters::new().unwrap().main;
    jail::no_new_privileges().unwrap();
    let set_up = || main.enter(Stage::SetUp);
    let both = || {
        main.enter(Stage::SetUp);
        main.enter(Stage::Guest);
    };
    report("set-up filter, set-up and guest filter", [&set_up, &both]);
    black_box(main);
}
