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

/// The shortest time for which a guest may use an answer. A guest connects after it has resolved a
/// name, perhaps when the record's TTL has passed.
const LEAST_OPEN: Duration = Duration::from_secs(60);
/// The longest time for which a guest may use an answer.
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
    /// The end of the time for which the guest may use the answer. It is before `until`, so that
    /// not every answer changes the packet filter.
    needed: Instant,
    /// The name's labels; empty if an earlier daemon has opened the address.
    name: Arc<[Box<[u8]>]>,
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
    /// The addresses that are, or were, open for the service at this place.
    fn opened_at(&self, place: usize) -> impl Iterator<Item = (Ipv4Addr, &Opened)> + use<'_> {
        let all = (place, Ipv4Addr::UNSPECIFIED)..=(place, Ipv4Addr::BROADCAST);
        self.opened.range(all).map(|((_, address), one)| (*address, one))
    }

    /// The number of addresses that can still be opened for the service at this place.
    fn room_at(&self, place: usize, now: Instant) -> usize {
        let most = usize::try_from(MAX_OPENED).unwrap_or(usize::MAX);
        most.saturating_sub(self.opened_at(place).filter(|(_, one)| one.until > now).count())
    }

    /// Removes the addresses that are no longer open for the service at this place.
    fn remove_closed(&mut self, place: usize, now: Instant) {
        let closed = self.opened_at(place).filter(|(_, one)| one.until <= now);
        let closed: Vec<Ipv4Addr> = closed.map(|(address, _)| address).collect();
        for address in closed {
            self.opened.remove(&(place, address));
        }
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
        let policies = [from, to].map(|number| self.by_number.get(&number).cloned());
        let [Some(from), Some(policy)] = policies else { return };
        let mut places: BTreeMap<&[Box<[u8]>], Vec<usize>> = BTreeMap::new();
        let mut wanted: BTreeMap<usize, Vec<(Ipv4Addr, Opened)>> = BTreeMap::new();
        for ((_, address), one) in &from.opened {
            if one.until <= now || one.name.is_empty() {
                continue;
            }
            for place in places.entry(&one.name).or_insert_with(|| policy.places(&one.name)) {
                let one = Opened { needed: one.until, ..one.clone() };
                wanted.entry(*place).or_default().push((*address, one));
            }
        }
        drop(policy);
        for (place, wanted) in wanted {
            self.open_at(to, place, &wanted, now, changes);
        }
    }

    /// Opens addresses for a policy's service. Returns those that found no room.
    fn open_at(
        &mut self,
        number: u32,
        place: usize,
        wanted: &[(Ipv4Addr, Opened)],
        now: Instant,
        changes: &mut Vec<Change>,
    ) -> Vec<Ipv4Addr> {
        let Some(policy) = self.by_number.get_mut(&number) else { return Vec::new() };
        let (mut room, mut opened, mut left_out) = (None, false, Vec::new());
        for (address, one) in wanted {
            let until = policy.opened.get(&(place, *address)).map(|had| had.until);
            // An address that stays open for long enough needs no change of the packet filter.
            if until.is_some_and(|until| until >= one.needed) {
                continue;
            }
            // The packet filter's lock is held, so the addresses are counted once.
            let room = room.get_or_insert_with(|| policy.room_at(place, now));
            if until.is_none_or(|until| until <= now) {
                let Some(less) = room.checked_sub(1) else {
                    left_out.push(*address);
                    continue;
                };
                *room = less;
            }
            // This copies the policy if an earlier state of it is kept, so it comes last.
            let policy = Arc::make_mut(policy);
            if !opened {
                policy.remove_closed(place, now);
                opened = true;
            }
            policy.opened.insert((place, *address), one.clone());
            changes.push(Change::Open(number, place, *address, left_ms(one.until, now)));
        }
        left_out
    }

    /// Opens the addresses of a name for a guest. Returns the number of those that were left out.
    pub(super) fn open(
        &mut self,
        guest: Ipv4Addr,
        found: &Found,
        now: Instant,
        changes: &mut Vec<Change>,
    ) -> usize {
        let Some(Some(number)) = self.of.get(&guest).copied() else { return 0 };
        let Some(policy) = self.by_number.get(&number) else { return 0 };
        let places = policy.places(&found.name);
        let name: Arc<[Box<[u8]>]> = found.name.as_slice().into();
        // A name must not lead to private addresses: only a rule with a range opens those.
        let public = found.addresses.iter().filter(|(address, _)| is_public(*address));
        let opened = |ttl: Duration| {
            let time = ttl.clamp(LEAST_OPEN, MOST_OPEN);
            Opened { until: now + time + time / 2, needed: now + time, name: name.clone() }
        };
        let mut wanted: Vec<(Ipv4Addr, Opened)> =
            public.map(|(address, ttl)| (*address, opened(*ttl))).collect();
        let more = wanted.len().saturating_sub(MOST_OF_ANSWER);
        wanted.truncate(MOST_OF_ANSWER);
        let mut left_out = BTreeSet::new();
        for place in places {
            left_out.extend(self.open_at(number, place, &wanted, now, changes));
        }
        left_out.len() + more
    }

    /// The part that [`Self::open`] changes for a guest.
    pub(super) fn part_of(&self, guest: Ipv4Addr) -> Self {
        let number = self.of.get(&guest).copied().flatten();
        let policy = number.and_then(|number| self.by_number.get_key_value(&number));
        let by_number = policy.map(|(number, policy)| (*number, policy.clone()));
        Self { by_number: by_number.into_iter().collect(), ..Self::default() }
    }

    /// Undoes what [`Self::open`] has changed since [`Self::part_of`].
    pub(super) fn restore(&mut self, part: Self) {
        self.by_number.extend(part.by_number);
    }

    /// Opens what the packet filter in the calling thread's namespace has open for these policies,
    /// for the rest of the time.
    pub(super) fn reopen(&mut self, changes: &mut Vec<Change>) -> Result<(), NetError> {
        const LONGEST: Duration = MOST_OPEN.saturating_mul(2);
        let now = Instant::now();
        let services = |(number, policy): (&u32, &Arc<Policy>)| (*number, policy.services.len());
        let all: Vec<(u32, usize)> = self.by_number.iter().map(services).collect();
        for (number, services) in all {
            for place in 0..services {
                let mut wanted = nft::reopened(number, place)?;
                wanted.retain(|(_, ms)| *ms > 0);
                let opened = |(address, ms)| {
                    let until = now + Duration::from_millis(ms).min(LONGEST);
                    (address, Opened { until, needed: until, name: Arc::default() })
                };
                let wanted: Vec<(Ipv4Addr, Opened)> = wanted.into_iter().map(opened).collect();
                self.open_at(number, place, &wanted, now, changes);
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
