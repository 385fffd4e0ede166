use super::*;
use dayfly_api::types::{ErrorCode, VmLimits};
use dayfly_host::groups::{Controllers, Groups, NoGroups, Root};
use dayfly_host::process::{Named, Process};
use dayfly_host::spawn::{Program, Spawn};
use dayfly_units::needs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Only a hang takes this long.
const WITHIN: Duration = Duration::from_secs(120);

/// The CPUs of this host, if a daemon can book some of them.
fn host() -> Option<CpuList> {
    let can = Groups::check(&Root::Own);
    if !needs::met(needs::Need::Groups, can.is_ok_and(Controllers::are_all)) {
        return None;
    }
    let run = tempfile::tempdir().unwrap();
    let groups = Groups::open(&Root::Own, run.path(), false).unwrap();
    let host = groups.host_cpus();
    groups.close().unwrap();
    let host = host.ok().filter(|host| host.len() > 1);
    if host.is_none() {
        eprintln!("a host without cpuset, or with one CPU: nothing was tested");
    }
    host
}

/// The groups of a daemon with the run folder `run`. The thread of the daemon before may still have
/// the lock.
fn open(run: &Path, main: &CpuList) -> GroupStock {
    let begun = Instant::now();
    loop {
        let stock = GroupStock::open(&Root::Own, run, false);
        if stock.0.is_ok() {
            let nodes = dayfly_host::numa::nodes().unwrap();
            stock
                .begin_cpus(main, &nodes, vec![(Named::Exactly(run.join("dayfly-vmm")), 0..0)])
                .unwrap();
            return stock;
        }
        assert!(begun.elapsed() < WITHIN, "the tree is not free");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < WITHIN, "{what}: not within {WITHIN:?}");
        std::thread::sleep(Duration::from_millis(1));
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

fn process(run: &Path, entry: Entry) -> Sleeper {
    let program = Program::Path("/bin/sleep".into());
    let mut spawn = Spawn::new(program, run.join("dayfly-vmm"));
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

fn refusal(stock: &GroupStock, wanted: u32) -> ErrorCode {
    stock.book(wanted).unwrap_err().0.code
}

/// Ends the stock, until nothing is left of its tree.
fn closed(stock: &GroupStock) {
    let folder = stock.groups().unwrap().folders()[0].clone();
    until("the tree is removed", || {
        stock.end();
        !folder.exists()
    });
}

#[test]
fn a_daemon_without_groups_books_nothing_and_keeps_vms_off_no_cpu() {
    let stock = GroupStock::none(&NoGroups::Nowhere);
    let none = CpuList::default();
    stock.begin_cpus(&none, &[], Vec::new()).unwrap();
    let why = stock.begin_cpus(&"0".parse().unwrap(), &[], Vec::new()).unwrap_err();
    assert!(why.contains("--main-cpus") && why.contains("no cgroup hierarchy"), "{why}");
    assert_eq!(refusal(&stock, 1), ErrorCode::Invalid);
    let limits = VmLimits { cpus_booked: Some(1), ..VmLimits::default() };
    assert_eq!(stock.check(&limits, 1).unwrap_err().0.code, ErrorCode::Invalid);
    assert!(stock.adopt_cpus(Some(1), &none).is_none());
}

#[test]
fn booked_cpus_are_one_vm_s_until_it_ends_and_over_daemons() {
    let run = tempfile::tempdir().unwrap();
    let Some(host) = host() else { return };
    let most = u32::try_from(host.len() - 1).unwrap();
    let none = CpuList::default();
    let stock = open(run.path(), &none);
    let tree = stock.groups().unwrap();
    assert!(!tree.had_cpus(), "it was asked for nothing");
    // What is ready was made before the first booking.
    let (shares, entry) = stock.take().unwrap();
    let shared = process(run.path(), entry);
    assert_eq!(allowed(&shared), host);
    assert_eq!(refusal(&stock, 0), ErrorCode::Invalid);
    assert_eq!(refusal(&stock, most + 1), ErrorCode::Invalid);
    assert!(!tree.had_cpus(), "nothing is booked");

    let booking = stock.book(most).unwrap();
    let own = booking.cpus().clone();
    assert_eq!(own.len(), host.len() - 1);
    assert_eq!(booking.node, Some(0));
    assert_eq!(allowed(&shared), host.without(&own));
    assert_eq!(refusal(&stock, 1), ErrorCode::Exhausted);
    let (lease, entry) = stock.booked(&own).unwrap();
    let books = process(run.path(), entry);
    assert_eq!(allowed(&books), own);
    let (late, entry) = stock.take().unwrap();
    let later = process(run.path(), entry);
    assert_eq!(allowed(&later), host.without(&own));
    drop(later);
    drop(late);

    // The daemon ends, and the VM lives on.
    let (number, tree) = (lease.number(), lease.tree());
    let mut kept = KeptBooking::default();
    kept.keep(booking);
    drop((kept, lease, shares));
    stock.end();
    assert_eq!((allowed(&books), allowed(&shared)), (own.clone(), host.without(&own)));
    drop(stock);

    // Before anything is adopted, the CPUs are not free; whatever a record says.
    let next = open(run.path(), &none);
    assert_eq!(refusal(&next, 1), ErrorCode::Exhausted);
    let lease = next.adopt(&tree, number, Some(books.0.id().pid)).unwrap();
    assert!(lease.has_cpus());
    let booking = next.adopt_cpus(Some(number), &own).unwrap();
    assert_eq!(booking.cpus(), &own);
    assert!(next.adopt_cpus(None, &own).is_none(), "another VM has them");
    next.take_the_rest();
    assert_eq!(refusal(&next, 1), ErrorCode::Exhausted);
    assert_eq!(allowed(&shared), host.without(&own));
    drop(books);
    drop((booking, lease));
    assert_eq!(allowed(&shared), host);
    let again = next.book(most).unwrap();
    assert!(next.leaving().is_none(), "to wait makes no sense");
    again.leaves();
    let mut leaving = Box::pin(next.leaving().unwrap());
    let mut look = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(leaving.as_mut().poll(&mut look).is_pending());
    drop(again);
    assert!(leaving.as_mut().poll(&mut look).is_ready() && next.leaving().is_none());
    assert_eq!(next.check_cpus(most + 1).unwrap_err().0.code, ErrorCode::Invalid);
    next.check_cpus(most).unwrap();
    drop(next.book(most).unwrap());
    drop(shared);
    closed(&next);
}

#[test]
fn the_cpus_of_a_vm_that_is_not_adopted_come_back_when_its_group_is_gone() {
    let run = tempfile::tempdir().unwrap();
    let Some(host) = host() else { return };
    let most = u32::try_from(host.len() - 1).unwrap();
    let none = CpuList::default();
    let stock = open(run.path(), &none);
    let booking = stock.book(most).unwrap();
    let (lease, entry) = stock.booked(booking.cpus()).unwrap();
    let books = process(run.path(), entry);
    let own = booking.cpus().clone();
    let mut kept = KeptBooking::default();
    kept.keep(booking);
    drop((kept, lease));
    stock.end();
    drop(stock);
    let next = open(run.path(), &none);
    next.take_the_rest();
    assert_eq!((refusal(&next, 1), allowed(&books)), (ErrorCode::Exhausted, own.clone()));
    drop(books);
    until("they are free", || next.book(most).is_ok());
    // The record of a VM whose group is gone: its CPUs are given to no other VM.
    let booking = next.adopt_cpus(None, &own).unwrap();
    assert_eq!(refusal(&next, 1), ErrorCode::Exhausted);
    drop(booking);
    drop(next.book(1).unwrap());
    closed(&next);
}

#[test]
fn no_vm_runs_on_the_cpus_of_dayflyd() {
    let run = tempfile::tempdir().unwrap();
    let Some(host) = host() else { return };
    let main: CpuList = host.iter().take(1).collect();
    let stock = open(run.path(), &main);
    let of_vms = host.without(&main);
    // As a VMM inherits the affinity of dayflyd.
    dayfly_host::numa::stay_on(&main.iter().collect::<Vec<_>>()).unwrap();
    let (lease, entry) = stock.take().unwrap();
    let vmm = process(run.path(), entry);
    let (pager_lease, entry) = stock.template().unwrap();
    let pager = process(run.path(), entry);
    assert_eq!([&vmm, &pager].map(allowed), [of_vms.clone(), of_vms.clone()]);
    let beyond = u32::try_from(of_vms.len()).unwrap();
    let refused = stock.book(beyond).unwrap_err().0;
    assert_eq!(refused.code, ErrorCode::Invalid);
    assert!(refused.message.contains("--main-cpus"), "{refused:?}");
    drop(vmm);
    drop(pager);
    drop((lease, pager_lease));
    closed(&stock);
    // CPUs that no host has, and all of them.
    let stock = GroupStock::open(&Root::Own, run.path(), false);
    for main in [&"8191".parse().unwrap(), &host] {
        let why = stock.begin_cpus(main, &[], Vec::new()).unwrap_err();
        assert!(why.starts_with("--main-cpus: expected"), "{why}");
    }
    closed(&stock);
}
