//! CPUs of the host that one VM has alone (Closer, sections III and IV): guest and devices
//! together, as its whole process is in one control group.
//!
//! ```text
//!  book ──▶ taken from the CPUs that VMs share ──▶ group `booked/<n>` made with them
//!                       ▲                                  │ the VMM is forked into it
//!                       └── given back ◀── the VM has ended ◀┘
//! ```
//!
//! CPUs leave the shared ones before they are a VM's, and come back when its process is gone, so
//! that no two VMs have one. A VM that books none costs nothing more: its group follows the shared
//! CPUs. The groups of an earlier daemon in which processes live count before anything is booked,
//! whether or not their VMs have readable records.

use crate::base::cpu_alloc::{Allocator, Cpus, check_main};
use crate::base::error::{ApiError, Outcome};
use crate::base::group_limits::refused;
use crate::base::groups::{GroupLease, GroupStock, Stock};
use dayfly_host::cpus::CpuList;
use dayfly_host::groups::{GroupError, GroupName};
use dayfly_host::numa::Node;
use dayfly_host::process::Named;
use dayfly_host::reaper::Booked;
use dayfly_sys::group::Entry;
use dayfly_units::sync::lock;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Booked CPUs. A drop gives them back, and blocks for some microseconds.
#[derive(Debug)]
pub struct Booking {
    stock: Arc<Stock>,
    cpus: CpuList,
    /// Its VM may live longer than this daemon: nothing is given back.
    kept: AtomicBool,
    /// The index of the memory node that has most of them.
    pub node: Option<usize>,
}

impl Drop for Booking {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::Relaxed) {
            self.stock.give_back(&self.cpus);
        }
    }
}

impl Booked for Booking {
    fn cpus(&self) -> &CpuList {
        &self.cpus
    }
}

impl Booking {
    fn new(stock: &Arc<Stock>, cpus: CpuList, node: Option<usize>) -> Self {
        Self { stock: stock.clone(), cpus, kept: AtomicBool::new(false), node }
    }

    /// The CPUs.
    #[must_use]
    pub const fn cpus(&self) -> &CpuList {
        &self.cpus
    }

    /// Its VM is being killed: a request that lacks CPUs waits for these.
    pub fn leaves(&self) {
        let mut cpus = lock(&self.stock.cpus);
        cpus.leaving = cpus.leaving.or(&self.cpus);
    }
}

/// The booking of a VM that may live longer than this daemon. A drop gives nothing back.
#[derive(Debug, Default)]
pub struct KeptBooking(Option<Arc<Booking>>);

impl KeptBooking {
    /// Keeps `booking`.
    pub fn keep(&mut self, booking: Booking) {
        self.0 = Some(Arc::new(booking));
    }

    /// What is kept.
    #[must_use]
    pub const fn get(&self) -> Option<&Arc<Booking>> {
        self.0.as_ref()
    }

    /// What was kept.
    pub fn take(&mut self) -> Option<Arc<Booking>> {
        self.0.take()
    }
}

impl Drop for KeptBooking {
    fn drop(&mut self) {
        // The VM has the CPUs as long as its process lives.
        if let Some(booking) = &self.0 {
            booking.kept.store(true, Ordering::Relaxed);
        }
    }
}

impl GroupStock {
    /// Keeps VMs off the CPUs `main`, which are dayflyd's, and learns which CPUs VMs of an earlier
    /// daemon have. `ours` are VMMs, pagers and relays, of root or of one of the users beside them.
    /// To be called before the first VMM is made. Without `main` and without such VMs, it changes
    /// nothing.
    ///
    /// # Errors
    /// VMs cannot be kept off `main`.
    pub fn begin_cpus(
        &self,
        main: &CpuList,
        nodes: &[Node],
        ours: Vec<(Named, Range<u32>)>,
    ) -> Result<(), String> {
        let stock = match &self.0 {
            Ok(stock) => stock,
            Err(_) if main.is_empty() => return Ok(()),
            Err(why) => {
                return Err(format!(
                    "--main-cpus: VMs of this daemon have no control groups: {why}; docs/limits.md \
                     says what helps"
                ));
            }
        };
        let of_nodes = nodes.iter().map(|node| node.cpus.iter().copied().collect());
        let mut cpus = lock(&stock.cpus);
        let cpus = &mut *cpus;
        cpus.allocator = Allocator::new(main.clone(), of_nodes.collect());
        (cpus.nodes, cpus.ours) = (nodes.to_vec(), ours);
        let (booked, all) = stock.groups.booked();
        for (number, own) in booked {
            let both = own.and(main);
            if !both.is_empty() {
                tracing::warn!(
                    "--main-cpus: a VM of an earlier daemon has booked CPUs {both} of {main}, and \
                     keeps them until it ends"
                );
            }
            let own = cpus.allocator.adopt(&own);
            cpus.left.insert(number, own);
        }
        if let Err(e) = all {
            let why = format!("which CPUs VMs of an earlier daemon have is not known: {e}");
            tracing::error!("{why}");
            cpus.broken = Some(why.clone());
            return if main.is_empty() { Ok(()) } else { Err(format!("--main-cpus: {why}")) };
        }
        if main.is_empty() && cpus.left.is_empty() && !stock.groups.had_cpus() {
            return Ok(());
        }
        let shared = stock.groups.host_cpus().and_then(|host| {
            check_main(main, &host).map_err(GroupError::Main)?;
            stock.share(cpus, &host)
        });
        match shared {
            Err(e) if main.is_empty() => {
                tracing::error!("the CPUs that VMs share: {e}");
                Ok(())
            }
            shared => shared.map_err(|e| format!("--main-cpus: {e}")),
        }
    }

    /// Books `wanted` CPUs. Blocks for less than a millisecond; once in v1, for a grace period.
    ///
    /// # Errors
    /// The host has too few free CPUs, or no controller cpuset.
    pub fn book(&self, wanted: u32) -> Outcome<Booking> {
        let stock = self.stock()?;
        let mut cpus = lock(&stock.cpus);
        if let Some(why) = &cpus.broken {
            return Err(ApiError::internal(format_args!("cpus_booked: {why}")));
        }
        let host = stock.groups.host_cpus().map_err(refused)?;
        let booked = cpus.allocator.book(&host, wanted)?;
        if let Err(e) = stock.share(&mut cpus, &host) {
            cpus.allocator.give_back(&booked);
            // The first error says more.
            let _ = stock.share(&mut cpus, &host);
            return Err(refused(e));
        }
        let node = cpus.node_of(&booked);
        Ok(Booking::new(stock, booked, node))
    }

    /// Checks that `wanted` CPUs could be booked now, by one VM or several. Books nothing.
    ///
    /// # Errors
    /// As [`Self::book`].
    pub fn check_cpus(&self, wanted: u32) -> Outcome<()> {
        let stock = self.stock()?;
        let host = stock.groups.host_cpus().map_err(refused)?;
        Ok(lock(&stock.cpus).allocator.check(&host, wanted)?)
    }

    /// Waits until a VM that is being killed has given CPUs back. `None`: there is none, and it
    /// makes no sense to wait.
    #[must_use]
    pub fn leaving(&self) -> Option<impl Future<Output = ()> + Send + 'static> {
        let stock = self.0.as_ref().ok()?.clone();
        // Registered before the look, so that no end is missed.
        let given_back = stock.given_back.clone().notified_owned();
        (!lock(&stock.cpus).leaving.is_empty()).then_some(given_back)
    }

    /// A VMM is in no group: the next booking looks for it.
    pub fn has_stray(&self) {
        if let Ok(stock) = &self.0 {
            lock(&stock.cpus).gathered = false;
        }
    }

    /// The CPUs of a VM of an earlier daemon that lives in the group `number`, if that was found,
    /// and whose record has the CPUs `recorded`. No other VM gets them. `None`: it has none.
    #[must_use]
    pub fn adopt_cpus(&self, number: Option<u32>, recorded: &CpuList) -> Option<Booking> {
        let stock = self.0.as_ref().ok()?;
        let mut cpus = lock(&stock.cpus);
        let had = number.and_then(|number| cpus.left.remove(&number)).unwrap_or_default();
        let more = cpus.allocator.adopt(&recorded.without(&had));
        let own = had.or(&more);
        if had != *recorded {
            tracing::warn!(
                group = ?number, %recorded, kernel = %had,
                "the CPUs that a VM has booked are not those that the kernel has for it"
            );
        }
        match stock.groups.host_cpus() {
            Ok(host) if !own.without(&host).is_empty() => {
                tracing::warn!(group = ?number, booked = %own, %host, "booked CPUs are offline");
            }
            _ => {}
        }
        let node = cpus.node_of(&own);
        (!own.is_empty()).then(|| Booking::new(stock, own, node))
    }

    /// Ends the adoption: VMs that book no CPUs get those that no VM has.
    pub fn share_the_rest(&self) {
        let Ok(stock) = &self.0 else { return };
        if !lock(&stock.cpus).allocator.booked().is_empty() {
            stock.give_back(&CpuList::default());
        }
    }

    /// A new group with these booked CPUs.
    ///
    /// # Errors
    /// The kernel refuses. Nothing is left of the group.
    pub fn booked(&self, cpus: &CpuList) -> io::Result<(GroupLease, Entry)> {
        let stock = self.stock().map_err(|e| io::Error::other(e.0.message))?;
        let (name, entry) =
            stock.make_by(GroupName::Booked, |name| stock.groups.book(name.number(), cpus))?;
        Ok((GroupLease { name, stock: stock.clone() }, entry))
    }
}

impl Stock {
    /// Keeps VMs that book no CPUs on those that are left of `host`.
    fn share(&self, cpus: &mut Cpus, host: &CpuList) -> Result<(), GroupError> {
        if cpus.broken.is_some() {
            // Some of them may be a VM's.
            return Ok(());
        }
        let gathered = std::mem::take(&mut cpus.gathered);
        let shared = cpus.allocator.shared(host);
        self.off.set(shared.as_ref().map(|shared| host.without(shared)).unwrap_or_default());
        self.groups.share_cpus(shared.as_ref())?;
        if !gathered {
            self.groups.gather(&cpus.ours)?;
        }
        cpus.gathered = true;
        Ok(())
    }

    /// Gives `gone` back to VMs that book no CPUs.
    fn give_back(&self, gone: &CpuList) {
        let mut cpus = lock(&self.cpus);
        cpus.allocator.give_back(gone);
        cpus.leaving = cpus.leaving.without(gone);
        self.given_back.notify_waiters();
        if lock(&self.state).ended {
            // The groups are the next daemon's.
            return;
        }
        let shared = self.groups.host_cpus().and_then(|host| self.share(&mut cpus, &host));
        if let Err(e) = shared {
            tracing::warn!("CPUs {gone} are not given back to all VMs until the next booking: {e}");
        }
    }

    /// A group of an earlier daemon with booked CPUs is gone.
    pub(super) fn forget_booked(&self, number: u32) {
        let left = lock(&self.cpus).left.remove(&number);
        if let Some(gone) = left {
            self.give_back(&gone);
        }
    }
}

#[cfg(test)]
#[path = "cpus_tests.rs"]
mod tests;
