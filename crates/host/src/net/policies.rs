//! The egress policies of guests, as the packet filter has them. No I/O, except for
//! [`Policies::reopen`].
//!
//! Guests with equal policies share a chain, and the addresses that names have opened. A policy is
//! known by a number, which the packet filter writes into the marks of the connections that the
//! policy has permitted.

use super::error::NetError;
use super::nft::{self, Change, MAX_OPENED};
use super::ranges::is_public;
use dayfly_units::Egress;
use dayfly_units::egress::{Service, Target};
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shortest time for which a name opens an address. A guest connects after it has resolved a
/// name, perhaps when the record's TTL has passed.
const LEAST_OPEN: Duration = Duration::from_secs(60);
/// The longest time for which a name opens an address.
const MOST_OPEN: Duration = Duration::from_secs(24 * 3600);
/// Addresses of one answer that are opened.
const MOST_OF_ANSWER: usize = 32;

/// What a question for a name has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The labels of the name that the guest asked for, from the root, in lower case.
    pub name: Vec<Box<[u8]>>,
    /// The addresses, each with its time to live.
    pub addresses: Vec<(Ipv4Addr, Duration)>,
}

/// An address that a name has opened.
#[derive(Debug, Clone)]
struct Opened {
    until: Instant,
    /// For how long it was opened.
    time: Duration,
    /// The name's labels; empty if an earlier daemon has opened the address.
    name: Vec<Box<[u8]>>,
}

/// A policy with rules.
#[derive(Debug, Clone)]
struct Policy {
    egress: Egress,
    guests: usize,
    services: Vec<Service>,
    /// By the place of the service in `services`.
    opened: BTreeMap<(usize, Ipv4Addr), Opened>,
}

/// The policies of all guests.
#[derive(Debug, Clone, Default)]
pub(super) struct Policies {
    /// The number of a guest's policy; `None` for a guest without a way out. Guests without a
    /// policy are left out.
    of: BTreeMap<Ipv4Addr, Option<u32>>,
    by_number: BTreeMap<u32, Arc<Policy>>,
    /// Guests of which the packet filter may have counted refused packets.
    counted: BTreeSet<Ipv4Addr>,
}

/// A number for a policy: FNV-1a of its text, which stays the same in every daemon. 0 is the mark
/// of a connection that no policy has permitted.
pub(super) fn number(egress: &Egress) -> u32 {
    let hash = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    egress.to_string().bytes().fold(0x811c_9dc5, hash).max(1)
}

/// Milliseconds from `now` to `until`.
fn left_ms(until: Instant, now: Instant) -> u64 {
    u64::try_from(until.saturating_duration_since(now).as_millis()).unwrap_or(u64::MAX)
}

impl Policy {
    /// Opens an address for a service, and returns whether there is room for it.
    fn open(&mut self, place: usize, address: Ipv4Addr, opened: Opened, now: Instant) -> bool {
        let of_service = |(of, _): &&(usize, Ipv4Addr)| *of == place;
        let most = usize::try_from(MAX_OPENED).unwrap_or(usize::MAX);
        if !self.opened.contains_key(&(place, address))
            && self.opened.keys().filter(of_service).count() >= most
        {
            self.opened.retain(|_, opened| opened.until > now);
            if self.opened.keys().filter(of_service).count() >= most {
                return false;
            }
        }
        self.opened.insert((place, address), opened);
        true
    }

    /// The places of the services at which a name may be reached.
    fn places(&self, name: &[Box<[u8]>]) -> Vec<usize> {
        let labels: Vec<&[u8]> = name.iter().map(|label| &**label).collect();
        let services = self.egress.services_of(&labels);
        services.iter().filter_map(|one| self.services.binary_search(one).ok()).collect()
    }
}

impl Policies {
    /// The policy with this number, which another one may have too: then the next number is tried.
    fn find(&self, egress: &Egress) -> (u32, bool) {
        let mut number = number(egress);
        loop {
            match self.by_number.get(&number) {
                None => return (number, false),
                Some(policy) if policy.egress == *egress => return (number, true),
                Some(_) => number = number.wrapping_add(1).max(1),
            }
        }
    }

    /// Gives a guest a policy instead of the one it has.
    pub(super) fn set(&mut self, guest: Ipv4Addr, egress: &Egress, changes: &mut Vec<Change>) {
        let had = self.of.get(&guest).copied();
        let new = match (egress.is_internet(), egress.rules()) {
            (true, _) => None,
            (false, []) => Some(None),
            (false, _) => {
                let (number, exists) = self.find(egress);
                if !exists {
                    changes.push(Change::NewPolicy(number, egress.clone()));
                    let services = egress.services_of_names();
                    let (egress, opened) = (egress.clone(), BTreeMap::new());
                    let policy = Policy { egress, guests: 0, services, opened };
                    self.by_number.insert(number, Arc::new(policy));
                }
                Some(Some(number))
            }
        };
        if had == new {
            return;
        }
        if let Some(had) = had {
            changes.push(Change::Unlimit(had, guest));
        }
        if let Some(new) = new {
            changes.push(Change::Limit(new, guest));
            self.counted.insert(guest);
            self.of.insert(guest, new);
        } else {
            self.of.remove(&guest);
        }
        if let Some(Some(number)) = new {
            self.count(number, 1);
            if let Some(Some(had)) = had {
                self.carry_over(had, number, changes);
            }
        }
        if let Some(Some(had)) = had {
            self.release(had, changes);
        }
    }

    /// Ends a guest's policy, and forgets what it was refused.
    pub(super) fn remove(&mut self, guest: Ipv4Addr, changes: &mut Vec<Change>) {
        if self.of.contains_key(&guest) {
            self.set(guest, &Egress::internet(), changes);
        }
        if self.counted.remove(&guest) {
            changes.push(Change::Forget(guest));
        }
    }

    fn count(&mut self, number: u32, more: usize) {
        if let Some(policy) = self.by_number.get_mut(&number) {
            Arc::make_mut(policy).guests += more;
        }
    }

    fn release(&mut self, number: u32, changes: &mut Vec<Change>) {
        let Some(policy) = self.by_number.get_mut(&number) else { return };
        let policy = Arc::make_mut(policy);
        policy.guests -= 1;
        if policy.guests == 0 {
            changes.push(Change::NoPolicy(number, policy.egress.clone()));
            self.by_number.remove(&number);
        }
    }

    /// Opens what names have opened for one policy for another one too, as far as that has rules
    /// for these names.
    fn carry_over(&mut self, from: u32, to: u32, changes: &mut Vec<Change>) {
        let now = Instant::now();
        let Some(opened) = self.by_number.get(&from).map(|policy| policy.opened.clone()) else {
            return;
        };
        for ((_, address), one) in opened {
            if one.until > now && !one.name.is_empty() {
                self.open_one(to, address, &one, now, changes);
            }
        }
    }

    /// Opens an address for all services of its name, and returns whether there was room.
    fn open_one(
        &mut self,
        number: u32,
        address: Ipv4Addr,
        one: &Opened,
        now: Instant,
        changes: &mut Vec<Change>,
    ) -> bool {
        let Some(policy) = self.by_number.get_mut(&number) else { return true };
        let mut room = true;
        for place in policy.places(&one.name) {
            // An address that stays open for long enough needs no change of the packet filter.
            let open = policy.opened.get(&(place, address));
            let long = |had: &Opened| had.until + had.time.max(one.time) / 2 >= one.until;
            if open.is_some_and(|had| had.until > now && long(had)) {
                continue;
            }
            if Arc::make_mut(policy).open(place, address, one.clone(), now) {
                changes.push(Change::Open(number, place, address, left_ms(one.until, now)));
            } else {
                room = false;
            }
        }
        room
    }

    /// Opens the addresses of a name for a guest. Returns the number of those that found no room.
    pub(super) fn open(
        &mut self,
        guest: Ipv4Addr,
        found: &Found,
        changes: &mut Vec<Change>,
    ) -> usize {
        let Some(Some(number)) = self.of.get(&guest).copied() else { return 0 };
        let now = Instant::now();
        let mut left_out = found.addresses.len().saturating_sub(MOST_OF_ANSWER);
        for (address, ttl) in found.addresses.iter().take(MOST_OF_ANSWER) {
            // A name must not lead to private addresses: only a rule with a range opens those.
            if !is_public(*address) {
                continue;
            }
            let time = (*ttl).clamp(LEAST_OPEN, MOST_OPEN);
            let one = Opened { until: now + time, time, name: found.name.clone() };
            left_out += usize::from(!self.open_one(number, *address, &one, now, changes));
        }
        left_out
    }

    /// Opens what the packet filter in the calling thread's namespace has open for these policies,
    /// for the rest of the time.
    pub(super) fn reopen(&mut self, changes: &mut Vec<Change>) -> Result<(), NetError> {
        let now = Instant::now();
        for (number, policy) in &mut self.by_number {
            for place in 0..policy.services.len() {
                for (address, ms) in nft::reopened(*number, place)? {
                    let time = Duration::from_millis(ms).min(MOST_OPEN);
                    let one = Opened { until: now + time, time, name: Vec::new() };
                    if ms > 0 && Arc::make_mut(policy).open(place, address, one, now) {
                        changes.push(Change::Open(*number, place, address, ms));
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the guest's policy permits a connection.
    pub(super) fn permits(&self, guest: Ipv4Addr, protocol: u8, to: Ipv4Addr, port: u16) -> bool {
        let policy = match self.of.get(&guest) {
            None => return true,
            Some(None) => return false,
            Some(Some(number)) => self.by_number.get(number),
        };
        let Some(policy) = policy else { return false };
        let in_range = policy.egress.rules().iter().any(|rule| match &rule.target {
            Target::Range(range) => range.contains(&to) && rule.service.has(protocol, port),
            Target::Name(_) => false,
        });
        let (now, services) = (Instant::now(), policy.services.iter().enumerate());
        let opened = |place| policy.opened.get(&(place, to)).is_some_and(|one| one.until > now);
        in_range
            || services.into_iter().any(|(place, one)| one.has(protocol, port) && opened(place))
    }
}

#[cfg(test)]
#[path = "policies_tests.rs"]
mod tests;
