//! CPUs of groups, on real hierarchies of v1. The end-to-end test `cpus` has v2.

use super::find::{mounts, v1_cpuset};
use super::*;
use crate::cpus::CpuList;
use crate::numa::stay_on;
use crate::process::{Named, Process};
use dayfly_units::needs;
use std::time::{Duration, Instant};

/// Only a hang takes this long.
const WITHIN: Duration = Duration::from_secs(120);

/// The groups of a new run folder, with those CPUs of this host that the first half of it has, and
/// the others. `None` without v1, or with one CPU.
fn groups(run: &Path, root: &Root) -> Option<(Groups, [CpuList; 2])> {
    let can = Groups::check(&Root::Own);
    if !needs::met(needs::Need::Groups, can.is_ok_and(Controllers::are_all)) {
        return None;
    }
    let groups = Groups::open(root, run, false).unwrap();
    let host = groups.host_cpus().map(|host| host.iter().collect::<Vec<_>>());
    let is_v1 = groups.cpusets.as_ref().is_some_and(|cpusets| cpusets.v1_tree().is_some());
    match host {
        Ok(host) if host.len() > 1 && is_v1 => {
            let (first, rest) = host.split_at(host.len() / 2);
            Some((groups, [first, rest].map(|half| half.iter().copied().collect())))
        }
        _ => {
            groups.close().unwrap();
            let thread = std::thread::current();
            eprintln!("{}: no v1 cpuset, or one CPU: nothing was tested", thread.name()?);
            None
        }
    }
}

/// A process that a test has started, and that it does not leave.
struct Sleeper(Process);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _ = self.0.wait(Some(WITHIN));
    }
}

/// A process with this `argv[0]` in the group of `entry`, which waits.
fn process(name: &Path, entry: Entry) -> Sleeper {
    let mut spawn = Spawn::new(Program::Path("/bin/sleep".into()), name);
    spawn.argv.push("1000".into());
    spawn.group = Some(entry);
    Sleeper(Process::from_child(spawn.run().unwrap()).unwrap())
}

/// The CPUs on which a process may run.
fn allowed(process: &Sleeper) -> CpuList {
    let path = format!("/proc/{}/status", process.0.id().pid);
    let text = std::fs::read_to_string(path).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.unwrap().parse().unwrap()
}

/// Removes all groups and the tree.
fn removed(groups: &Groups, tree: &Path) {
    let begun = Instant::now();
    for group in groups.list().unwrap() {
        // The kernel may refuse for a moment after the last process has ended.
        while !groups.remove(group).unwrap() {
            assert!(begun.elapsed() < WITHIN, "{group}: still used");
        }
    }
    while groups.folders().iter().any(|folder| folder.exists()) || tree.exists() {
        groups.close().unwrap();
        assert!(begun.elapsed() < WITHIN, "{}: left", tree.display());
    }
}

fn booked(groups: &Groups) -> Vec<(u32, CpuList)> {
    let (booked, all) = groups.booked();
    all.unwrap();
    booked
}

fn tree(groups: &Groups) -> PathBuf {
    groups.cpusets.as_ref().unwrap().v1_tree().unwrap().to_owned()
}

#[test]
fn a_group_has_its_cpus_alone_and_all_others_follow_one_file() {
    let run = tempfile::tempdir().unwrap();
    let Some((groups, [first, rest])) = groups(run.path(), &Root::Own) else { return };
    let (all, tree, name) = (first.or(&rest), tree(&groups), run.path().join("dayfly-vmm"));
    // Before CPUs are booked, nothing is made, opened or entered.
    groups.make(GroupName::Vm(1)).unwrap();
    groups.make(GroupName::Vm(2)).unwrap();
    let [before, mut early] = [1, 2].map(|n| groups.entry(GroupName::Vm(n)).unwrap());
    assert_eq!(before.tasks().len(), groups.folders().len());
    groups.complete(&mut early).unwrap();
    assert_eq!(early.tasks().len(), groups.folders().len());
    assert!(!tree.exists() && !groups.had_cpus());
    let old = process(&name, before);
    let early_entry = |n| {
        groups.make(GroupName::Template(n)).unwrap();
        groups.entry(GroupName::Template(n)).unwrap()
    };
    let vms = run.path().join("vms");
    let relay = process(&vms.join("0123456789ab/dayfly-relay"), early_entry(4));
    let stranger = process(Path::new("sleep"), early_entry(3));
    let ours = [(Named::Exactly(name.clone()), 0..0), (Named::OfVms(vms, "dayfly-relay"), 0..0)];

    groups.share_cpus(Some(&first)).unwrap();
    assert_eq!(allowed(&old), all, "until it is moved");
    groups.gather(&ours).unwrap();
    groups.gather(&ours).unwrap();
    assert_eq!((allowed(&old), allowed(&relay)), (first.clone(), first.clone()));
    assert_eq!(allowed(&stranger), all);
    groups.complete(&mut early).unwrap();
    groups.complete(&mut early).unwrap();
    assert_eq!(early.tasks().len(), groups.folders().len() + 1);
    // A process inherits the affinity of the thread that starts it: as a VMM that of dayflyd.
    stay_on(&rest.iter().collect::<Vec<_>>()).unwrap();
    let shares = process(&name, early);
    stay_on(&first.iter().collect::<Vec<_>>()).unwrap();
    groups.book(7, &rest).unwrap();
    assert_eq!(groups.book(7, &rest).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(booked(&groups), [], "no process is in it");
    let books = process(&name, groups.entry(GroupName::Booked(7)).unwrap());
    stay_on(&all.iter().collect::<Vec<_>>()).unwrap();
    assert_eq!((allowed(&shares), allowed(&books)), (first.clone(), rest.clone()));
    assert_eq!(booked(&groups), [(7, rest.clone())]);
    // Of a daemon that was killed while it made or removed a group.
    for folder in [&groups.folders()[0], &tree] {
        std::fs::create_dir(folder.join("booked/9")).unwrap();
        assert_eq!(booked(&groups), [(7, rest.clone())]);
        assert!(groups.remove(GroupName::Booked(9)).unwrap());
    }
    assert!(groups.contains(GroupName::Booked(7), books.0.id().pid).unwrap());
    assert!(groups.list().unwrap().contains(&GroupName::Booked(7)));
    groups.gather(&ours).unwrap();
    assert_eq!(allowed(&books), rest, "it is not moved");
    let mems = std::fs::read_to_string(tree.join("booked/7/cpuset.mems")).unwrap();
    assert_ne!(mems.trim(), "");

    groups.share_cpus(None).unwrap();
    assert_eq!([&old, &books].map(allowed), [all, rest.clone()]);
    // An affinity that was inherited holds again once the group has such CPUs. Therefore a VMM sets
    // its own in its group.
    let since_6_2 = allowed(&shares);
    assert!(since_6_2 == rest || since_6_2 == first.or(&rest), "{since_6_2}");
    assert!(!groups.remove(GroupName::Booked(7)).unwrap(), "a process is in it");
    groups.lift_rates_of(books.0.id().pid).unwrap();
    drop([old, relay, stranger, shares, books]);
    assert_eq!(booked(&groups), []);
    removed(&groups, &tree);
}

#[test]
fn folders_that_another_program_removed_are_made_again() {
    let run = tempfile::tempdir().unwrap();
    let Some((groups, [first, rest])) = groups(run.path(), &Root::Own) else { return };
    let tree = tree(&groups);
    for _ in 0..2 {
        groups.share_cpus(Some(&first)).unwrap();
        groups.book(1, &rest).unwrap();
        assert!(groups.remove(GroupName::Booked(1)).unwrap());
        for folder in [tree.join("shared"), tree.join("booked"), tree.clone()] {
            std::fs::remove_dir(folder).unwrap();
        }
    }
    let missing = groups.cpusets.as_ref().unwrap().tasks(None).unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    groups.share_cpus(None).unwrap();
    assert!(groups.had_cpus());
    // A daemon that was killed; its run folder is gone, and the next daemon sweeps.
    drop(groups);
    std::fs::remove_dir_all(run.path()).unwrap();
    let other = tempfile::tempdir().unwrap();
    let begun = Instant::now();
    while tree.exists() {
        assert!(begun.elapsed() < WITHIN, "{}: left", tree.display());
        Groups::open(&Root::Own, other.path(), false).unwrap().close().unwrap();
    }
}

#[test]
fn a_group_above_the_tree_gets_cpus_before_the_tree() {
    let run = tempfile::tempdir().unwrap();
    let root = format!("/dayfly-test-{}", std::process::id());
    let Some((groups, [first, rest])) = groups(run.path(), &Root::At(Path::new(&root).join("a")))
    else {
        return;
    };
    let tree = tree(&groups);
    groups.make(GroupName::Vm(0)).unwrap();
    groups.share_cpus(Some(&first)).unwrap();
    let shares = process(Path::new("x"), groups.entry(GroupName::Vm(0)).unwrap());
    groups.book(1, &rest).unwrap();
    let books = process(Path::new("x"), groups.entry(GroupName::Booked(1)).unwrap());
    assert_eq!((allowed(&shares), allowed(&books)), (first, rest));
    drop([shares, books]);
    removed(&groups, &tree);
    let trees = groups.folders().iter().chain(std::iter::once(&tree));
    for base in trees.filter_map(|tree| tree.parent()) {
        for made in base.ancestors().take(2) {
            std::fs::remove_dir(made).unwrap();
        }
    }
}

#[test]
fn cpuset_is_used_only_if_no_group_of_every_vm_is_in_its_hierarchy() {
    let base = |options: &str| {
        let text = format!("30 22 0:26 / /cg/x rw - cgroup cgroup rw,{options}\n");
        let own = format!("4:{options}:/own\n");
        v1_cpuset(&mounts(&text), &own, &Root::Own).map(|found| found.base)
    };
    assert_eq!(base("cpuset"), Some("/cg/x/own".into()));
    assert_eq!(base("cpuset,freezer"), Some("/cg/x/own".into()));
    // A group without CPUs cannot be entered.
    assert_eq!(base("cpu,cpuset"), None);
    assert_eq!(base("freezer"), None);
}
