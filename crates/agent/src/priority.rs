//! Programs first.

/// From now on this thread takes the CPU from no program when it wakes (`SCHED_BATCH`, sched(7)): a program of a guest with one vCPU goes
/// on where it was, and what it writes and how it ends are seen together. It has its share like any other, from the next tick on.
/// Children inherit it: [`crate::exec::spawn`] gives programs the usual policy.
pub fn after_programs() {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: reads `none`, which lives; changes how the kernel schedules this thread, nothing else. An old kernel that refuses it does
    // without.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const none) };
}
