//! Which CPUs of the host are booked, without I/O. A VM with booked CPUs has them alone; all others
//! share what is left, which is at least one CPU.

use crate::base::error::ApiError;
use dayfly_api::types::ErrorCode;
use dayfly_host::cpus::CpuList;
use dayfly_host::numa::Node;
use dayfly_host::process::Named;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

/// Why no CPUs were booked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoCpus {
    /// More than this host can give.
    #[error(
        "cpus_booked: expected at least 1, and at most {most} on this host, got {wanted}: it has \
         {host} CPUs; {main} of them are dayflyd's (--main-cpus), and one stays for VMs that book \
         none"
    )]
    Range {
        /// The most that a VM can book.
        most: usize,
        /// What was asked for.
        wanted: u32,
        /// CPUs of the host.
        host: usize,
        /// CPUs of dayflyd.
        main: usize,
    },
    /// Other VMs have them.
    #[error(
        "cpus_booked: expected at most {left} now, got {wanted}: VMs have booked {booked} of the \
         {most} CPUs that can be booked on this host; remove one of them, or book fewer"
    )]
    Booked {
        /// CPUs that can be booked now.
        left: usize,
        /// What was asked for.
        wanted: u32,
        /// CPUs that are booked.
        booked: usize,
        /// The most that all VMs can book.
        most: usize,
    },
}

impl From<NoCpus> for ApiError {
    fn from(e: NoCpus) -> Self {
        let code = match e {
            NoCpus::Range { .. } => ErrorCode::Invalid,
            NoCpus::Booked { .. } => ErrorCode::Exhausted,
        };
        Self::new(code, e)
    }
}

/// Checks that dayflyd can have the CPUs `main` of `host`.
///
/// # Errors
/// What is wrong.
pub fn check_main(main: &CpuList, host: &CpuList) -> Result<(), String> {
    let unknown = main.without(host);
    if !unknown.is_empty() {
        return Err(format!("expected CPUs of this host, which are {host}, got {unknown} too"));
    }
    if host.without(main).is_empty() {
        return Err(format!("expected some of the CPUs {host}, got all: VMs need one at least"));
    }
    Ok(())
}

/// The CPUs of a host: those of dayflyd, those of each memory node, and those that are booked.
#[derive(Debug, Default)]
pub struct Allocator {
    main: CpuList,
    nodes: Vec<CpuList>,
    booked: CpuList,
}

impl Allocator {
    /// No CPU is booked. VMs get none of `main`.
    #[must_use]
    pub fn new(main: CpuList, nodes: Vec<CpuList>) -> Self {
        Self { main, nodes, booked: CpuList::default() }
    }

    /// The CPUs that are booked.
    #[must_use]
    pub const fn booked(&self) -> &CpuList {
        &self.booked
    }

    /// Checks that `wanted` of the CPUs of the host can be booked now.
    ///
    /// # Errors
    /// [`NoCpus`].
    pub fn check(&self, host: &CpuList, wanted: u32) -> Result<(), NoCpus> {
        let n = usize::try_from(wanted).unwrap_or(usize::MAX);
        let of_vms = host.without(&self.main);
        let free = of_vms.without(&self.booked);
        // One stays shared.
        let (most, left) = (of_vms.len().saturating_sub(1), free.len().saturating_sub(1));
        if n == 0 || n > most {
            let (host, main) = (host.len(), host.len() - of_vms.len());
            return Err(NoCpus::Range { most, wanted, host, main });
        }
        if n > left {
            let booked = of_vms.and(&self.booked).len();
            return Err(NoCpus::Booked { left, wanted, booked, most });
        }
        Ok(())
    }

    /// Books `wanted` of the CPUs of the host that are free: on the node that then has the fewest
    /// left, so that other nodes stay whole. If none has enough, on as few nodes as possible.
    ///
    /// # Errors
    /// [`NoCpus`]; nothing is booked.
    pub fn book(&mut self, host: &CpuList, wanted: u32) -> Result<CpuList, NoCpus> {
        self.check(host, wanted)?;
        let n = usize::try_from(wanted).unwrap_or(usize::MAX);
        let free = host.without(&self.main).without(&self.booked);
        let mut nodes: Vec<CpuList> = self.nodes.iter().map(|node| node.and(&free)).collect();
        // The kernel leaves some CPUs without a node that has memory.
        let in_nodes = nodes.iter().fold(CpuList::default(), |all, node| all.or(node));
        nodes.push(free.without(&in_nodes));
        let whole = nodes.iter().filter(|node| node.len() >= n).min_by_key(|node| node.len());
        let chosen: CpuList = match whole {
            Some(node) => node.iter().take(n).collect(),
            None => {
                nodes.sort_by_key(|node| Reverse(node.len()));
                nodes.iter().flat_map(CpuList::iter).take(n).collect()
            }
        };
        self.booked = self.booked.or(&chosen);
        Ok(chosen)
    }

    /// Books these CPUs for a VM that has them from an earlier daemon. Returns those that no other
    /// VM has.
    pub fn adopt(&mut self, cpus: &CpuList) -> CpuList {
        let own = cpus.without(&self.booked);
        self.booked = self.booked.or(&own);
        own
    }

    /// Returns CPUs.
    pub fn give_back(&mut self, cpus: &CpuList) {
        self.booked = self.booked.without(cpus);
    }

    /// The CPUs of VMs that book none, at least one of the host. `None`: all of the host.
    #[must_use]
    pub fn shared(&self, host: &CpuList) -> Option<CpuList> {
        let of_vms = host.without(&self.main);
        if of_vms.len() == host.len() && of_vms.and(&self.booked).is_empty() {
            return None;
        }
        // VMs of an earlier daemon may have all, with more CPUs of dayflyd or fewer of the host.
        let choices = [of_vms.without(&self.booked), of_vms];
        choices.into_iter().find(|cpus| !cpus.is_empty())
    }
}

/// What a daemon has booked.
#[derive(Debug, Default)]
pub struct Cpus {
    pub(super) allocator: Allocator,
    /// The CPUs of groups that an earlier daemon made and that no VM of this one has, by number.
    pub(super) left: BTreeMap<u32, CpuList>,
    /// CPUs of VMs that are being killed.
    pub(super) leaving: CpuList,
    /// The host's memory nodes.
    pub(super) nodes: Vec<Node>,
    /// VMMs, pagers and relays, with their users beside root.
    pub(super) ours: Vec<(Named, Range<u32>)>,
    /// Whether all of their processes are on the shared CPUs, or on booked ones.
    pub(super) gathered: bool,
    /// Why nothing can be booked, such as a group of an earlier daemon that cannot be read.
    pub(super) broken: Option<String>,
}

impl Cpus {
    /// The index of the memory node that has most of these CPUs.
    pub(super) fn node_of(&self, cpus: &CpuList) -> Option<usize> {
        let has = |node: &Node| node.cpus.iter().copied().collect::<CpuList>().and(cpus).len();
        let counts = self.nodes.iter().map(has).enumerate().filter(|(_, count)| *count > 0);
        counts.max_by_key(|(_, count)| *count).map(|(node, _)| node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(text: &str) -> CpuList {
        text.parse().unwrap()
    }

    #[test]
    fn cpus_come_from_one_node_if_one_has_them_and_one_cpu_stays_shared() {
        let host = list("0-11");
        let mut of = Allocator::new(list("0"), vec![list("0-3"), list("4-7"), list("8-11")]);
        assert_eq!(of.shared(&host), Some(list("1-11")));
        // The node with the fewest left.
        assert_eq!(of.book(&host, 2), Ok(list("1-2")));
        assert_eq!(of.book(&host, 4), Ok(list("4-7")));
        assert_eq!(of.shared(&host), Some(list("3,8-11")));
        assert_eq!(
            of.book(&host, 5).unwrap_err(),
            NoCpus::Booked { left: 4, wanted: 5, booked: 6, most: 10 }
        );
        of.give_back(&list("1-2"));
        // No node has five: as few nodes as possible.
        assert_eq!(of.book(&host, 5), Ok(list("1,8-11")));
        let message = of.book(&host, 11).unwrap_err().to_string();
        assert!(
            message.contains("at most 10 on this host, got 11") && message.contains("--main-cpus")
        );
        assert!(matches!(of.book(&host, 0), Err(NoCpus::Range { .. })));
    }

    #[test]
    fn what_an_earlier_daemon_booked_is_given_to_no_other_vm() {
        let host = list("0-3");
        let mut of = Allocator::new(CpuList::default(), vec![host.clone()]);
        assert_eq!(of.shared(&host), None);
        assert_eq!(of.adopt(&list("1-2")), list("1-2"));
        assert_eq!(of.adopt(&list("2,9")), list("9"), "one of them is that of another VM");
        assert_eq!((of.book(&host, 1), of.shared(&host)), (Ok(list("0")), Some(list("3"))));
        // CPUs were taken offline, until VMs with booked CPUs have all that are left.
        assert_eq!(of.shared(&list("1-2")), Some(list("1-2")));
        assert!(matches!(of.book(&list("1-2"), 1), Err(NoCpus::Booked { left: 0, .. })));
        let mut of = Allocator::new(list("0"), Vec::new());
        assert_eq!(of.adopt(&list("1")), list("1"));
        assert_eq!(of.shared(&list("0-1")), Some(list("1")), "not on those of dayflyd");
        // A host of one CPU, or of none but dayflyd's.
        for host in ["0", "5", ""] {
            assert!(matches!(of.book(&list(host), 1), Err(NoCpus::Range { .. })), "{host}");
        }
    }

    #[test]
    fn dayflyd_s_cpus_are_some_of_the_host_s() {
        assert_eq!(check_main(&list("0,2"), &list("0-3")), Ok(()));
        assert_eq!(check_main(&list(""), &list("0")), Ok(()));
        let unknown = check_main(&list("0,4-5"), &list("0-3")).unwrap_err();
        assert!(unknown.contains("are 0-3, got 4-5"), "{unknown}");
        assert!(check_main(&list("0-1"), &list("0-1")).unwrap_err().contains("got all"));
    }

    proptest! {
        /// Against a model: each CPU has at most one owner, is returned, and comes from one node if
        /// one has enough.
        #[test]
        fn no_cpu_is_booked_twice_and_each_is_returned(
            sizes in prop::collection::vec(1_u32..5, 1..5),
            main in prop::collection::btree_set(0_u32..16, 0..3),
            steps in prop::collection::vec(
                (any::<bool>(), 0_u32..6, any::<prop::sample::Index>()),
                0..40,
            ),
        ) {
            let mut first = 0;
            let nodes: Vec<CpuList> = sizes.iter().map(|size| {
                first += size;
                (first - size..first).collect()
            }).collect();
            let host: CpuList = (0..first).collect();
            let main: CpuList = main.into_iter().collect();
            let mut of = Allocator::new(main.clone(), nodes.clone());
            let mut owners: Vec<CpuList> = Vec::new();
            for (books, wanted, which) in steps {
                if books {
                    let free = host.without(&main).without(of.booked());
                    match of.book(&host, wanted) {
                        Ok(got) => {
                            prop_assert_eq!(got.len(), wanted as usize);
                            prop_assert_eq!(got.and(&free), got.clone(), "each was free");
                            let mut most = nodes.iter().map(|node| node.and(&free).len());
                            if most.any(|free| free >= got.len()) {
                                let one = |node: &CpuList| node.and(&got) == got;
                                prop_assert!(nodes.iter().any(one), "{} of {}", got, free);
                            }
                            owners.push(got);
                        }
                        Err(_) => prop_assert!(wanted == 0 || free.len() < wanted as usize + 1),
                    }
                } else if !owners.is_empty() {
                    let gone = owners.swap_remove(which.index(owners.len()));
                    of.give_back(&gone);
                }
                let sum: usize = owners.iter().map(CpuList::len).sum();
                prop_assert_eq!(of.booked().len(), sum);
                if !host.without(&main).is_empty() {
                    let shared = of.shared(&host).unwrap_or_else(|| host.clone());
                    prop_assert!(!shared.is_empty() && shared.and(of.booked()).is_empty());
                    prop_assert!(shared.and(&main).is_empty());
                }
            }
        }
    }
}
