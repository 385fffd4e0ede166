//! The index of VMs by name and address, which the name service uses.
//!
//! An entry is made when a VM gets its address, and ends with a guard ([`Registration`]) when the
//! VM returns the address. A lookup is one hash lookup under a lock that only protects these maps;
//! the registry of VMs is not involved.
//!
//! VMs are resolved by name and by id. A hostname is no name here, because a guest chooses its
//! hostname and could take another VM's name.

use crate::net::names::limits::Bucket;
use dayfly_units::{Egress, Name, VmId, VmName, sync::lock};
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;
use tokio_util::sync::CancellationToken;

/// Which names a VM may resolve.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// The network whose VMs resolve each other; a VM without one only resolves itself.
    pub group: Option<Arc<str>>,
    /// Which other names are forwarded: those that the VM's egress policy resolves.
    pub egress: Egress,
}

/// A VM that has an address.
#[derive(Debug)]
pub struct Guest {
    /// The VM's address.
    pub address: Ipv4Addr,
    /// The VM's label below `dayfly.internal`: its name, or its id if the name is no DNS label.
    pub label: Box<str>,
    /// The VM's id, which is a second label.
    id: Box<str>,
    /// The network whose VMs it resolves.
    group: Option<Arc<str>>,
    /// Its egress policy, which may change.
    egress: RwLock<Egress>,
    /// Names that its policy has refused, and addresses that were not opened.
    refused: AtomicU64,
    bucket: Mutex<Bucket>,
    /// Number of its questions that are being forwarded.
    pub(super) forwards: Arc<AtomicUsize>,
    /// Number of its TCP connections.
    pub(super) connections: Arc<AtomicUsize>,
    /// Cancelled when the VM returns its address.
    pub(super) gone: CancellationToken,
    /// Whether the VM still has the address. Packets are sent to it under this lock.
    present: Mutex<bool>,
}

impl Guest {
    /// Takes one question from the rate limit; false if the limit is reached.
    pub(super) fn may_ask(&self, now: Instant) -> bool {
        lock(&self.bucket).take(now)
    }

    /// Calls `send`, which sends a packet to the VM's address and does not block, unless the VM has
    /// returned the address. The address is not returned while `send` runs, so that no packet
    /// reaches the next VM with it.
    pub(super) fn deliver(&self, send: impl FnOnce()) {
        let present = lock(&self.present);
        if *present {
            send();
        }
    }

    /// Its egress policy.
    #[must_use]
    pub fn egress(&self) -> Egress {
        self.egress.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes its egress policy, for the questions from now on.
    pub fn set_egress(&self, egress: Egress) {
        *self.egress.write().unwrap_or_else(PoisonError::into_inner) = egress;
    }

    /// Counts what its policy has refused.
    pub(in crate::net) fn refuse(&self, more: u64) {
        self.refused.fetch_add(more, Ordering::Relaxed);
    }

    /// The number of names that its policy has refused, and of addresses that were not opened.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Whether this VM may resolve `other`.
    fn finds(&self, other: &Self) -> bool {
        self.address == other.address || self.group.is_some() && self.group == other.group
    }
}

#[derive(Debug, Default)]
struct Maps {
    by_address: HashMap<Ipv4Addr, Arc<Guest>>,
    /// By name and by id.
    by_label: HashMap<Box<str>, Arc<Guest>>,
}

/// All VMs that have an address.
#[derive(Debug, Default)]
pub struct Index {
    maps: RwLock<Maps>,
}

/// The entry of a VM; dropping this removes the entry.
#[derive(Debug)]
pub struct Registration {
    index: Arc<Index>,
    guest: Arc<Guest>,
}

impl Registration {
    /// The VM of the entry.
    #[must_use]
    pub const fn guest(&self) -> &Arc<Guest> {
        &self.guest
    }
}

impl Index {
    /// Adds a VM. A name with a dot, which older daemons permitted, is no DNS label; such a VM is
    /// resolved by its id only.
    #[must_use]
    pub fn insert(
        self: &Arc<Self>,
        address: Ipv4Addr,
        id: VmId,
        name: &Name,
        policy: Policy,
    ) -> Registration {
        let id: Box<str> = id.to_string().into();
        let label = name.as_str().parse::<VmName>().map_or(id.clone(), |name| name.as_str().into());
        let guest = Arc::new(Guest {
            address,
            label: label.clone(),
            id: id.clone(),
            group: policy.group,
            egress: RwLock::new(policy.egress),
            refused: AtomicU64::new(0),
            bucket: Mutex::default(),
            forwards: Arc::default(),
            connections: Arc::default(),
            gone: CancellationToken::new(),
            present: Mutex::new(true),
        });
        let mut maps = self.maps.write().unwrap_or_else(PoisonError::into_inner);
        maps.by_label.insert(id, guest.clone());
        maps.by_label.insert(label, guest.clone());
        maps.by_address.insert(address, guest.clone());
        drop(maps);
        Registration { index: self.clone(), guest }
    }

    fn read<T>(&self, look: impl FnOnce(&Maps) -> T) -> T {
        look(&self.maps.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The VM at this address.
    #[must_use]
    pub fn guest(&self, address: Ipv4Addr) -> Option<Arc<Guest>> {
        self.read(|maps| maps.by_address.get(&address).cloned())
    }

    /// The address of the VM with this name or id, in lower case, if the VM at `asker` may resolve
    /// it.
    #[must_use]
    pub fn resolve(&self, asker: Ipv4Addr, label: &str) -> Option<Ipv4Addr> {
        self.read(|maps| {
            let (asker, other) = (maps.by_address.get(&asker)?, maps.by_label.get(label)?);
            asker.finds(other).then_some(other.address)
        })
    }

    /// The label of the VM at this address, if the VM at `asker` may resolve it.
    #[must_use]
    pub fn name_of(&self, asker: Ipv4Addr, address: Ipv4Addr) -> Option<Box<str>> {
        self.read(|maps| {
            let (asker, other) = (maps.by_address.get(&asker)?, maps.by_address.get(&address)?);
            asker.finds(other).then(|| other.label.clone())
        })
    }

    /// Number of VMs, and number of labels.
    #[must_use]
    pub fn len(&self) -> (usize, usize) {
        self.read(|maps| (maps.by_address.len(), maps.by_label.len()))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let guest = &self.guest;
        {
            let mut maps = self.index.maps.write().unwrap_or_else(PoisonError::into_inner);
            // Only entries of this VM: a VM that ends slowly may already have a successor with the
            // same name.
            for label in [&guest.id, &guest.label] {
                if maps.by_label.get(label).is_some_and(|of| Arc::ptr_eq(of, guest)) {
                    maps.by_label.remove(label);
                }
            }
            if maps.by_address.get(&guest.address).is_some_and(|of| Arc::ptr_eq(of, guest)) {
                maps.by_address.remove(&guest.address);
            }
        }
        *lock(&guest.present) = false;
        guest.gone.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 88, 0, last)
    }

    fn group(name: &str) -> Policy {
        Policy { group: Some(name.into()), egress: Egress::internet() }
    }

    #[test]
    fn a_vm_finds_itself_and_those_of_its_group() {
        let index = Arc::new(Index::default());
        let ids: Vec<VmId> = (0..5).map(|_| VmId::random()).collect();
        let policies = [group("a"), group("a"), group("b"), Policy::default(), Policy::default()];
        let _all: Vec<Registration> = (2..)
            .zip(&ids)
            .zip(policies)
            .map(|((last, id), policy)| {
                index.insert(ip(last), *id, &format!("vm{last}").parse().unwrap(), policy)
            })
            .collect();
        for asker in 2..7_u8 {
            for other in 2..7_u8 {
                let finds = asker == other || asker < 4 && other < 4;
                let found = finds.then(|| ip(other));
                assert_eq!(
                    index.resolve(ip(asker), &format!("vm{other}")),
                    found,
                    "{asker} {other}"
                );
                let id = ids[usize::from(other) - 2].to_string();
                assert_eq!(index.resolve(ip(asker), &id), found, "{asker} {other}");
                let name = index.name_of(ip(asker), ip(other));
                assert_eq!(name.is_some(), finds, "{asker} {other}");
                assert!(name.is_none_or(|name| *name == *format!("vm{other}")));
            }
        }
        // An address without a VM resolves nothing.
        assert_eq!((index.resolve(ip(9), "vm2"), index.name_of(ip(9), ip(2))), (None, None));
    }

    #[test]
    fn an_entry_ends_with_its_vm_and_not_with_a_successor_s() {
        let index = Arc::new(Index::default());
        let (first, second) = (VmId::random(), VmId::random());
        let name: Name = "web".parse().unwrap();
        let old = index.insert(ip(2), first, &name, Policy::default());
        let gone = index.guest(ip(2)).unwrap().gone.clone();
        // The old VM's process is still ending, but its name is already free.
        let new = index.insert(ip(3), second, &name, Policy::default());
        assert_eq!(index.resolve(ip(3), "web"), Some(ip(3)));
        assert!(!gone.is_cancelled());
        drop(old);
        assert!(gone.is_cancelled());
        assert_eq!(index.resolve(ip(3), "web"), Some(ip(3)));
        assert_eq!(index.resolve(ip(3), &second.to_string()), Some(ip(3)));
        assert!(index.guest(ip(2)).is_none());
        drop(new);
        assert_eq!(index.len(), (0, 0));
        // A name from an older daemon.
        let dotted = index.insert(ip(2), first, &"pypi.org".parse().unwrap(), Policy::default());
        assert_eq!(index.resolve(ip(2), "pypi.org"), None);
        assert_eq!(index.resolve(ip(2), &first.to_string()), Some(ip(2)));
        drop(dotted);
        assert_eq!(index.len(), (0, 0));
    }
}
