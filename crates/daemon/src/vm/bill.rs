//! What a VM has taken from the host: what the kernel has counted of its control group, and what
//! its VMM has counted of its devices ([`dayfly_vmm::meter`]). Closer (section IV-B): a VM pays for
//! what is done for it, wherever that is done.

use crate::base::group_limits::shown;
use crate::base::time::monotonic_us;
use crate::model::live::Live;
use crate::model::memory_time::product;
use crate::vm::Vm;
use crate::vm::ledger::us;
use crate::vm::record::read_meter;
use dayfly_api::types::{CpuParts, DiskTraffic, NetTraffic, VmExit, VmUsage};
use dayfly_host::cpu_time;
use dayfly_host::groups::Usage;
use dayfly_host::process::Process;
use dayfly_vmm::meter::Metered;
use std::sync::Arc;
use std::time::Duration;

/// How the names of vCPU threads begin ([`dayfly_vmm::workers`]).
const VCPU: &str = "vcpu";

/// A VM's bill at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bill {
    /// CPU time and memory; `None` if the VM has no control group.
    pub usage: Option<VmUsage>,
    /// What its guest has moved to and from each disk; empty if its VMM does not count it.
    pub disks: Vec<DiskTraffic>,
    /// What its guest has sent and received; `None` without a network device, or if its VMM does
    /// not count it.
    pub net: Option<NetTraffic>,
}

/// What a VM has, for its bill, and what was done for it outside of its control group.
#[derive(Debug, Clone, Copy, Default)]
pub struct Account {
    disks: usize,
    net: bool,
    creation_us: u64,
    relays_us: u64,
    destruction_us: u64,
    memory: MemoryAccount,
}

/// The memory over time that a VM is billed.
#[derive(Debug, Clone, Copy, Default)]
enum MemoryAccount {
    /// No look so far, and the VM lives.
    #[default]
    Unknown,
    /// Until now, in byte-seconds.
    Known(u64),
    /// The VM has ended before the first look, this many microseconds after its request: it counts
    /// with the most that it had.
    Ended(u64),
}

impl MemoryAccount {
    fn of(live: &Live, ended_us: Option<u64>) -> Self {
        match (live.memory_time, live.asked_us, ended_us) {
            (Some(look), _, ended_us) => {
                Self::Known(look.until(ended_us.unwrap_or_else(monotonic_us)))
            }
            (None, Some(asked_us), Some(ended_us)) => {
                Self::Ended(ended_us.saturating_sub(asked_us))
            }
            (None, ..) => Self::Unknown,
        }
    }

    fn byte_seconds(self, most_bytes: Option<u64>) -> u64 {
        match self {
            Self::Unknown => 0,
            Self::Known(byte_seconds) => byte_seconds,
            Self::Ended(us) => product(most_bytes.unwrap_or(0), us),
        }
    }
}

impl Account {
    /// That of a VM in this state. `ended_us`: when its process ended, in microseconds of
    /// `CLOCK_MONOTONIC`; `None` if it lives. Its memory does not count after that; if it is before
    /// the last look, it counts until the look.
    #[must_use]
    pub fn of(live: &Live, ended_us: Option<u64>) -> Self {
        Self {
            memory: MemoryAccount::of(live, ended_us),
            disks: live.disks.len(),
            net: live.network.is_some(),
            creation_us: live.creation_us,
            relays_us: live.relays_us,
            destruction_us: 0,
        }
    }
}

/// What the threads of vCPUs of a VMM have taken, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vcpus {
    /// As the kernel counts it, while they live.
    Counted(u64),
    /// They have ended: what is left of the group's time, and no less than this, which was counted
    /// before.
    AtLeast(u64),
}

/// What a group's CPU time of `all_us` was for.
///
/// No figure goes down from one call to a later one, also across daemons: `Metered` never does, and
/// the rest, at the end, is at least what was counted of the vCPUs, because device threads may have
/// done more than they noted and not less. The figure of the vCPUs, which is the kernel's, comes
/// before those of the VMM, which its guest may have taken over.
fn parts(all_us: u64, metered: &Metered, vcpus: Vcpus, of: Account) -> CpuParts {
    let mut left_us = all_us;
    // Of a VMM that its guest took over, no more than its group has.
    let mut take = |us: u64| {
        let taken = us.min(left_us);
        left_us -= taken;
        taken
    };
    let (Vcpus::Counted(counted_us) | Vcpus::AtLeast(counted_us)) = vcpus;
    let counted_us = take(counted_us);
    let set_up_us = take(metered.set_up_us);
    let io_us = take(metered.io_us);
    let work_us = take(metered.main_us.saturating_add(of.relays_us));
    let vcpus_us = match vcpus {
        Vcpus::Counted(_) => counted_us,
        Vcpus::AtLeast(_) => counted_us + left_us,
    };
    let creation_us = set_up_us.saturating_add(of.creation_us);
    CpuParts { vcpus_us, io_us, work_us, creation_us, destruction_us: of.destruction_us }
}

impl Bill {
    /// The bill of a VM whose group and VMM have counted this.
    #[must_use]
    pub fn new(
        usage: Option<&Usage>,
        metered: Option<&Metered>,
        vcpus: Vcpus,
        account: Account,
    ) -> Self {
        let Account { disks, net, .. } = account;
        let moved = |metered: &Metered| metered.disks.iter().take(disks).map(disk).collect();
        let divided = |usage: VmUsage| {
            let parts = metered.map(|metered| parts(usage.cpu_us, metered, vcpus, account));
            let memory_byte_seconds = account.memory.byte_seconds(usage.memory_peak_bytes);
            VmUsage { parts, memory_byte_seconds, ..usage }
        };
        Self {
            usage: usage.and_then(shown).map(divided),
            disks: metered.map(moved).unwrap_or_default(),
            net: metered.filter(|_| net).map(|metered| packets(&metered.net)),
        }
    }

    /// The last bill of a VM that has ended.
    #[must_use]
    pub fn of(exit: &VmExit) -> Self {
        let VmExit { usage, disk_traffic, net_traffic, .. } = exit.clone();
        Self { usage, disks: disk_traffic, net: net_traffic }
    }

    /// The exit with this bill, which is the last one.
    #[must_use]
    pub fn close(self, exit: VmExit) -> VmExit {
        let Self { usage, disks: disk_traffic, net: net_traffic } = self;
        // What is left of its memory is not the VM's any more.
        let usage = usage.map(|usage| VmUsage { memory_bytes: None, ..usage });
        VmExit { usage, disk_traffic, net_traffic, ..exit }
    }
}

/// A VMM's figures of a disk in the API's form.
pub(crate) const fn disk(of: &dayfly_vmm::disk::DiskTraffic) -> DiskTraffic {
    let dayfly_vmm::disk::DiskTraffic { reads, read_bytes, writes, written_bytes } = *of;
    DiskTraffic { reads, read_bytes, writes, written_bytes }
}

const fn packets(of: &dayfly_vmm::meter::NetTraffic) -> NetTraffic {
    let dayfly_vmm::meter::NetTraffic {
        received_packets,
        received_bytes,
        sent_packets,
        sent_bytes,
        refused_packets,
    } = *of;
    NetTraffic { received_packets, received_bytes, sent_packets, sent_bytes, refused_packets }
}

/// A part of the destruction of a VM, from when it is queued until it is done: the last bill waits
/// for its drop.
#[derive(Debug)]
pub struct Destroying(Arc<Vm>);

impl Destroying {
    /// Runs `work` on this thread, and bills it. Two system calls.
    pub fn by<T>(&self, work: impl FnOnce() -> T) -> T {
        let (result, took) = cpu_time::of(work);
        self.0.ledger.destruction_took(took);
        result
    }
}

impl Drop for Destroying {
    fn drop(&mut self) {
        self.0.ledger.destruction_ends();
    }
}

impl Vm {
    /// Its bill until now. Blocks for some microseconds.
    #[must_use]
    pub fn bill(&self) -> Bill {
        let account =
            Account { relays_us: self.ledger.relays.us(), ..Account::of(&self.live(), None) };
        let metered = self.ledger.highest(read_meter(&self.dir.exit()));
        let vcpus = self.process().and_then(|process| of_vcpus(&process)).unwrap_or(0);
        let vcpus = self.ledger.vcpus_us(vcpus);
        // The group last, so that it has what its threads have.
        Bill::new(self.usage().as_ref(), metered.as_ref(), Vcpus::Counted(vcpus), account)
    }

    /// Its last bill, after its process has ended at `ended_us` of `CLOCK_MONOTONIC`. `usage` and
    /// `metered`: the last figures. Waits until the threads that destroy it are done, at most 30 s.
    #[must_use]
    pub fn last_bill(
        &self,
        ended_us: u64,
        usage: Option<&Usage>,
        metered: Option<Metered>,
    ) -> Bill {
        let destruction_us = self.ledger.destruction_us();
        let account = Account {
            relays_us: self.ledger.relays.us(),
            destruction_us,
            ..Account::of(&self.live(), Some(ended_us))
        };
        let vcpus = Vcpus::AtLeast(self.ledger.vcpus_us(0));
        // Its files may be gone already: then with what was kept of them.
        Bill::new(usage, self.ledger.highest(metered).as_ref(), vcpus, account)
    }

    /// Keeps what its VMM has counted, because its files are about to be removed. Three system
    /// calls.
    pub fn keep_metered(&self) {
        self.ledger.highest(read_meter(&self.dir.exit()));
    }

    /// Bills CPU time of the daemon or of a zygote that was taken to create it.
    pub fn costs(&self, took: Duration) {
        self.update(|live| live.creation_us = live.creation_us.saturating_add(us(took)));
    }

    /// Begins a part of its destruction.
    #[must_use]
    pub fn destroying(self: &Arc<Self>) -> Destroying {
        self.ledger.destruction_begins();
        Destroying(self.clone())
    }
}

/// What the vCPUs of this VMM have taken, in microseconds; `None` if it has ended, and its pid may
/// be another process's.
fn of_vcpus(vmm: &Process) -> Option<u64> {
    let took = cpu_time::of_threads(vmm.id().pid, VCPU).ok()?;
    vmm.is_alive().is_ok_and(|alive| alive).then(|| us(took))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::ExitKind;
    use dayfly_host::groups::CpuTime;
    use dayfly_vmm::disk::DiskTraffic as Counted;

    fn metered() -> Metered {
        let disks = std::array::from_fn(|n| Counted { reads: n as u64, ..Counted::default() });
        Metered { disks, ..Metered::default() }
    }

    #[test]
    fn a_vmm_reports_of_the_devices_that_the_vm_has_and_of_no_more() {
        let account = |disks, net| Account { disks, net, ..Account::default() };
        let new = |metered: Option<&Metered>, account| {
            Bill::new(None, metered, Vcpus::AtLeast(0), account)
        };
        let bill = new(Some(&metered()), account(2, false));
        let reads: Vec<u64> = bill.disks.iter().map(|disk| disk.reads).collect();
        assert_eq!((reads, bill.net, bill.usage), (vec![0, 1], None, None));
        let bill = new(Some(&metered()), account(usize::MAX, true));
        assert_eq!((bill.disks.len(), bill.net), (8, Some(NetTraffic::default())));
        assert_eq!(new(None, account(2, true)), Bill::default());
    }

    #[test]
    fn parts_are_no_more_than_the_whole_and_at_the_end_all_of_it() {
        let metered = Metered { io_us: 20, main_us: 3, set_up_us: 1, ..Metered::default() };
        let account =
            Account { creation_us: 100, relays_us: 4, destruction_us: 1000, ..Account::default() };
        let of = |all_us, vcpus| parts(all_us, &metered, vcpus, account);
        let parts = |vcpus_us, io_us, work_us, creation_us| CpuParts {
            vcpus_us,
            io_us,
            work_us,
            creation_us,
            destruction_us: 1000,
        };
        assert_eq!(of(90, Vcpus::Counted(60)), parts(60, 20, 7, 101));
        // Device threads noted 2 us less than they had done.
        assert_eq!(of(90, Vcpus::AtLeast(60)), parts(62, 20, 7, 101));
        // A VMM that was taken over cannot claim more than its group has.
        let lies = Metered { io_us: u64::MAX, main_us: u64::MAX, ..metered };
        let lied = |vcpus| super::parts(90, &lies, vcpus, account);
        assert_eq!(lied(Vcpus::Counted(60)), parts(60, 29, 0, 101));
        assert_eq!(lied(Vcpus::AtLeast(60)), parts(60, 29, 0, 101));
    }

    #[test]
    fn what_a_vmm_takes_back_stays_on_the_bill() {
        let vm = Arc::new(crate::fixture::vm());
        let high = Metered { io_us: 20, ..metered() };
        assert_eq!(vm.ledger.highest(Some(high)), Some(high));
        // It has lowered its words, then cut its file.
        assert_eq!(vm.ledger.highest(Some(Metered::default())), Some(high));
        let cpu = Some(CpuTime { all_us: 100, ..CpuTime::default() });
        let usage = Usage { cpu, ..Usage::default() };
        let bill = vm.last_bill(0, Some(&usage), None);
        assert_eq!(bill.usage.unwrap().parts.unwrap().io_us, 20);
    }

    #[test]
    fn a_closed_bill_has_the_whole_destruction() {
        let vm = Arc::new(crate::fixture::vm());
        let (first, second) = (vm.destroying(), vm.destroying());
        let last = {
            let vm = vm.clone();
            std::thread::spawn(move || vm.ledger.destruction_us())
        };
        let spin = || {
            let begun = cpu_time::own();
            while cpu_time::own() < begun + Duration::from_millis(2) {}
        };
        first.by(spin);
        drop(first);
        second.by(spin);
        drop(second);
        assert!(last.join().unwrap() >= 4000);
    }

    #[test]
    fn removal_and_last_bill_each_know_whether_the_other_was_before() {
        let vm = crate::fixture::vm();
        assert!(!vm.ledger.removed());
        assert!(vm.ledger.closed());
        let vm = crate::fixture::vm();
        assert!(!vm.ledger.closed());
        assert!(vm.ledger.removed());
    }

    #[test]
    fn memory_does_not_count_after_the_end() {
        let live = crate::fixture::vm().live();
        let look = crate::model::memory_time::MemoryTime::first(0, 1_000_000, 10);
        let live = Live { memory_time: Some(look), asked_us: Some(0), ..live };
        let of =
            |live: &Live, ended_us| MemoryAccount::of(live, Some(ended_us)).byte_seconds(Some(7));
        // Until the look, if it ended before that.
        assert_eq!((of(&live, 3_000_000), of(&live, 500_000)), (30, 10));
        let live = Live { memory_time: None, ..live };
        assert_eq!(of(&live, 2_000_000), 14);
    }

    #[test]
    fn a_vm_that_was_never_looked_at_counts_with_the_most_that_it_had() {
        let at = |memory| Account { memory, ..Account::default() };
        let cpu = Some(CpuTime::default());
        let usage = Usage { cpu, memory_peak_bytes: Some(1000), ..Usage::default() };
        let of = |memory| {
            let bill = Bill::new(Some(&usage), None, Vcpus::AtLeast(0), at(memory));
            bill.usage.unwrap().memory_byte_seconds
        };
        assert_eq!(of(MemoryAccount::Unknown), 0);
        assert_eq!(of(MemoryAccount::Known(7)), 7);
        assert_eq!(of(MemoryAccount::Ended(2_500_000)), 2500);
    }

    #[test]
    fn an_exit_has_the_last_bill_without_the_memory_that_is_left() {
        let cpu = Some(CpuTime { all_us: 7, ..CpuTime::default() });
        let usage = Usage { cpu, memory_bytes: Some(1), ..Usage::default() };
        let exit = crate::model::exit::exit_now(ExitKind::PowerOff, "");
        let account = Account { disks: 2, net: true, ..Account::default() };
        let bill = Bill::new(Some(&usage), Some(&metered()), Vcpus::AtLeast(0), account);
        let exit = bill.close(exit);
        let usage = exit.usage.unwrap();
        assert_eq!((usage.cpu_us, usage.memory_bytes), (7, None));
        assert_eq!((exit.disk_traffic.len(), exit.net_traffic), (2, Some(NetTraffic::default())));
    }
}
