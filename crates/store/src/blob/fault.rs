//! Fault injection for tests. Outside tests every step succeeds.

use std::io;
use std::path::Path;

#[cfg(not(test))]
#[inline]
#[expect(clippy::unnecessary_wraps, reason = "it fails in tests")]
pub(crate) const fn step(_doing: &'static str, _path: &Path) -> io::Result<()> {
    Ok(())
}

/// A read of the file or folder at `path`.
#[cfg(not(test))]
#[inline]
#[expect(clippy::unnecessary_wraps, reason = "it fails in tests")]
pub(crate) const fn read(_path: &Path) -> io::Result<()> {
    Ok(())
}

/// Whether this thread injects or records faults. If so, it must do all work itself, because plans
/// are thread-local.
#[cfg(not(test))]
#[inline]
pub(crate) const fn planned() -> bool {
    false
}

#[cfg(test)]
pub(crate) use injected::{
    Unreadable, planned, read, step, unreadable, with_crash_at, with_errno_at, with_failure_at,
    with_trace, with_trace_and_errno_at,
};

#[cfg(test)]
mod injected {
    use super::{Path, io};
    use dayfly_units::sync::lock;
    use std::cell::RefCell;
    use std::collections::BTreeSet;
    use std::path::PathBuf;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Plan {
        /// Steps that succeed before the fault.
        left: Option<u32>,
        /// Whether every later step fails too, as after a crash.
        crash: bool,
        /// The error number of the fault; `None` for an error without one.
        errno: Option<i32>,
        active: bool,
        hit: bool,
        trace: Vec<(&'static str, PathBuf)>,
    }

    thread_local!(static PLAN: RefCell<Plan> = RefCell::default());

    pub(crate) fn step(doing: &'static str, path: &Path) -> io::Result<()> {
        crate::blob::interleave::step();
        PLAN.with_borrow_mut(|plan| {
            plan.trace.push((doing, path.to_owned()));
            let fails = match plan.left {
                _ if plan.hit => plan.crash,
                Some(0) => true,
                _ => false,
            };
            plan.left = plan.left.map(|n| n.saturating_sub(1));
            plan.hit |= fails;
            match plan.errno {
                _ if !fails => Ok(()),
                Some(errno) => Err(io::Error::from_raw_os_error(errno)),
                None => Err(io::Error::other("injected fault")),
            }
        })
    }

    /// Files that the disk cannot read, for all threads: tests use their own folders.
    static UNREADABLE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

    /// Makes reads of a file fail with EIO, until the result is dropped.
    pub(crate) fn unreadable(path: &Path) -> Unreadable {
        lock(&UNREADABLE).insert(path.to_owned());
        Unreadable(path.to_owned())
    }

    pub(crate) struct Unreadable(PathBuf);

    impl Drop for Unreadable {
        fn drop(&mut self) {
            lock(&UNREADABLE).remove(&self.0);
        }
    }

    pub(crate) fn read(path: &Path) -> io::Result<()> {
        match lock(&UNREADABLE).contains(path) {
            true => Err(io::Error::from_raw_os_error(5)),
            false => Ok(()),
        }
    }

    pub(crate) fn planned() -> bool {
        PLAN.with_borrow(|plan| plan.active) || crate::blob::watch::listening()
    }

    fn with<T>(left: Option<u32>, crash: bool, run: impl FnOnce() -> T) -> (T, Plan) {
        with_plan(Plan { left, crash, ..Plan::default() }, run)
    }

    fn with_plan<T>(plan: Plan, run: impl FnOnce() -> T) -> (T, Plan) {
        PLAN.set(Plan { active: true, ..plan });
        let result = run();
        (result, PLAN.take())
    }

    /// Runs `run` with only step number `n` failing, with `errno`. Returns whether that step was
    /// reached.
    pub(crate) fn with_errno_at<T>(n: u32, errno: i32, run: impl FnOnce() -> T) -> (T, bool) {
        let plan = Plan { left: Some(n), errno: Some(errno), ..Plan::default() };
        let (result, plan) = with_plan(plan, run);
        (result, plan.hit)
    }

    /// Runs `run` with step number `n` and all later steps failing. Returns whether step `n` was
    /// reached.
    pub(crate) fn with_crash_at<T>(n: u32, run: impl FnOnce() -> T) -> (T, bool) {
        let (result, plan) = with(Some(n), true, run);
        (result, plan.hit)
    }

    /// Runs `run` with only step number `n` failing. Returns whether that step was reached.
    pub(crate) fn with_failure_at<T>(n: u32, run: impl FnOnce() -> T) -> (T, bool) {
        let (result, plan) = with(Some(n), false, run);
        (result, plan.hit)
    }

    /// As [`with_errno_at`], and returns every step.
    pub(crate) fn with_trace_and_errno_at<T>(
        n: u32,
        errno: i32,
        run: impl FnOnce() -> T,
    ) -> (T, Vec<(&'static str, PathBuf)>) {
        let plan = Plan { left: Some(n), errno: Some(errno), ..Plan::default() };
        let (result, plan) = with_plan(plan, run);
        (result, plan.trace)
    }

    /// Runs `run` and returns every step it took.
    pub(crate) fn with_trace<T>(run: impl FnOnce() -> T) -> (T, Vec<(&'static str, PathBuf)>) {
        let (result, plan) = with(None, false, run);
        (result, plan.trace)
    }
}
