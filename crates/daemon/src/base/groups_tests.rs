use super::*;
use dayfly_api::types::ErrorCode;
use dayfly_host::groups::Controllers;
use dayfly_units::needs;

/// Only a hang takes this long.
const WITHIN: Duration = Duration::from_secs(120);

fn limits() -> VmLimits {
    VmLimits::default()
}

#[test]
fn a_daemon_without_groups_refuses_limits_by_name_and_nothing_else() {
    let stock = GroupStock::none(&NoGroups::Nowhere);
    stock.check(&limits(), 1).unwrap();
    assert!(
        stock.take().is_none() && stock.template().is_none() && stock.adopt("", 0, None).is_none()
    );
    let error = stock.check(&VmLimits { cpu_weight: Some(1), ..limits() }, 1).unwrap_err().0;
    assert_eq!(error.code, ErrorCode::Invalid);
    assert!(error.message.contains("no control groups: no cgroup hierarchy"), "{error:?}");
    stock.end();
}

/// Waits until the thread of the stock has done what `holds` looks for.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < WITHIN, "{what}: not within {WITHIN:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn groups_are_made_ahead_used_again_and_removed_at_the_end() {
    let run = tempfile::tempdir().unwrap();
    let can = Groups::check(&Root::Own);
    if !needs::met(needs::Need::Groups, can.is_ok_and(Controllers::are_all)) {
        return;
    }
    let stock = GroupStock::open(&Root::Own, run.path(), false);
    let inner = stock.0.clone().unwrap();
    let ready = || lock(&inner.state).ready.len();
    until("groups are made ahead", || ready() == READY);
    let (first, _entry) = stock.take().unwrap();
    let (number, tree) = (first.number(), first.tree());
    assert!(stock.own().contains(&GroupName::Vm(number)));
    assert!(stock.adopt(&tree, number, None).is_none(), "it has an owner");
    assert!(stock.adopt(&tree, 4_000_000, None).is_none(), "there is no such group");
    until("another group is made", || ready() == READY);
    drop(first);
    let settled = || {
        let state = lock(&inner.state);
        let is_ready = state.ready.iter().any(|(name, _)| *name == GroupName::Vm(number));
        state.returned.is_empty() && (is_ready || !state.own.contains(&GroupName::Vm(number)))
    };
    until("the returned group is ready or removed", settled);
    // A process in a group that is returned lives on.
    let (lease, entry) = stock.take().unwrap();
    let mut spawn = dayfly_host::spawn::Spawn::new(
        dayfly_host::spawn::Program::Path("/bin/sleep".into()),
        "sleep",
    );
    spawn.argv.push("1000".into());
    spawn.group = Some(entry);
    let process = dayfly_host::process::Process::from_child(spawn.run().unwrap()).unwrap();
    let (name, number) = (lease.name, lease.number());
    drop(lease);
    let folder = inner.groups.folders()[0].clone();
    drop(inner);
    stock.end();
    assert!(process.is_alive().unwrap());
    assert!(folder.join(name.path()).is_dir());
    // The next daemon has it again.
    drop(stock);
    let mut next = GroupStock::open(&Root::Own, run.path(), false);
    // The thread of the stock before may not have ended yet, and has its lock.
    until("the tree is free", || {
        if next.0.is_err() {
            next = GroupStock::open(&Root::Own, run.path(), false);
        }
        next.0.is_ok()
    });
    let pid = process.id().pid;
    assert!(next.adopt(&tree, number, None).is_none());
    assert!(next.adopt(&tree, number, Some(1)).is_none());
    assert!(next.adopt("/another", number, Some(pid)).is_none());
    let lease = next.adopt(&tree, number, Some(pid)).unwrap();
    process.kill().unwrap();
    process.wait(Some(WITHIN)).unwrap();
    assert!(lease.usage().is_some());
    drop(lease);
    // Until the thread has taken the group back.
    until("the tree is removed", || {
        next.end();
        !folder.exists()
    });
}
