//! Scheduling of the agent's threads below programs.

/// From now on this thread preempts no program when it wakes (`SCHED_BATCH`, sched(7)). In a guest
/// with one vCPU a program continues undisturbed, so its output and its end are seen together. From
/// the next tick on, the thread has its normal share of the CPU. Children inherit the policy:
/// [`crate::exec::spawn`] resets it for programs.
pub fn after_programs() {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: reads `none`, which lives through the call, and only changes the scheduling of this
    // thread. A kernel that refuses leaves the policy unchanged.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const none) };
}
