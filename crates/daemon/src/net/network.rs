//! The addresses and taps of a network: which are in use, which wait, and which must be cleaned.

use crate::base::prefix::Prefix;
use crate::net::error::NetError;
use crate::net::mac::mac;
use crate::net::names::Index;
use crate::net::publisher::Publisher;
use dayfly_api::types::NetworkRequest;
use dayfly_host::net::{Guest, Tap, TapSpec, VmNetns};
use dayfly_units::error::chain;
use dayfly_units::sync::lock;
use std::collections::{BTreeSet, VecDeque};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// Minimum number of waiting taps, if there are free addresses.
pub(super) const LEAST_READY: usize = 16;
/// Maximum number of waiting taps. Creating a tap takes a millisecond, keeping one costs some
/// kilobytes.
const MOST_READY: usize = 1024;
/// Number of further places to try if the tap of a place still exists.
const OTHERS_TRIED: usize = 512;

/// What the guest with this address may reach, for the packet filter.
pub(super) fn guest(address: Ipv4Addr, asked: &NetworkRequest) -> Guest {
    Guest {
        address,
        network: asked.network.as_ref().map(ToString::to_string),
        egress: asked.policy().unwrap_or_default(),
    }
}

/// Name of the tap of a place.
pub(super) fn tap_name(place: u32) -> String {
    format!("vm{place}")
}

#[derive(Debug)]
pub(super) struct Network {
    pub(super) vm_netns: VmNetns,
    pub(super) prefix: Prefix,
    pub(super) state: Mutex<State>,
    /// Guests of an earlier daemon that this daemon has not adopted.
    pub(super) unclaimed: Mutex<Vec<Guest>>,
    /// The VMs by address and name.
    pub(super) names: Arc<Index>,
    /// Ranges that guests reach although they are not public.
    pub(super) reach: Arc<[ipnet::Ipv4Net]>,
    /// The process that listens for published ports, if it is not this daemon.
    pub(super) publisher: Option<Arc<Publisher>>,
    /// The program that relays published ports.
    pub(super) relay: PathBuf,
    /// Wakes the keeper: addresses were returned, or too few taps wait.
    pub(super) wanted: Notify,
}

/// A returned address that is not clean yet: the host still has state of its last VM.
#[derive(Debug)]
pub(super) struct Returned {
    pub(super) place: u32,
    pub(super) guest: Guest,
    /// A tap that no VMM got. It is closed and opened anew, like all others.
    pub(super) tap: Option<Tap>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Waiting taps, the longest waiting first.
    pub(super) ready: VecDeque<(u32, Tap)>,
    /// Returned addresses of which connections, rules or packets remain.
    pub(super) returned: Vec<Returned>,
    /// Places that are in use or have a waiting tap.
    pub(super) taken: BTreeSet<u32>,
    /// The place at which the search for a free place begins.
    next: u32,
    /// Whether no more taps are created.
    pub(super) closed: bool,
}

impl State {
    /// Takes the next free place, cyclically; `None` if all are taken.
    pub(super) fn place(&mut self, prefix: Prefix) -> Option<u32> {
        let last = (1_u32 << (32 - u32::from(prefix.bits))) - 4;
        if self.taken.len() >= usize::try_from(last).unwrap_or(usize::MAX) {
            return None;
        }
        let mut place = self.next.clamp(1, last);
        while self.taken.contains(&place) {
            place = if place == last { 1 } else { place + 1 };
        }
        self.next = if place == last { 1 } else { place + 1 };
        self.taken.insert(place);
        Some(place)
    }
}

impl Network {
    pub(super) fn make(&self) -> Result<(u32, Tap), NetError> {
        match self.make_free() {
            Err(NetError::Full { .. }) if self.clean() > 0 => {}
            made => return made,
        }
        let cleaned = lock(&self.state).ready.pop_front();
        cleaned.map_or_else(|| self.make_free(), Ok)
    }

    fn make_free(&self) -> Result<(u32, Tap), NetError> {
        // The taps of a killed daemon exist until the kernel has closed them.
        for _ in 0..OTHERS_TRIED {
            match self.make_next() {
                Err(NetError::Tap { busy: true, .. }) => {}
                made => return made,
            }
        }
        self.make_next()
    }

    fn tap_spec(&self, place: u32) -> TapSpec {
        let address = self.prefix.address(place).unwrap_or(self.prefix.first);
        TapSpec { name: tap_name(place), address, mac: mac(address) }
    }

    fn make_next(&self) -> Result<(u32, Tap), NetError> {
        let mut state = lock(&self.state);
        let Some(place) = state.place(self.prefix) else {
            return Err(NetError::Full { prefix: self.prefix, taken: state.taken.len() });
        };
        drop(state);
        let TapSpec { name, address, mac } = self.tap_spec(place);
        self.vm_netns.tap(&name, address, mac).map(|tap| (place, tap)).map_err(|e| {
            lock(&self.state).taken.remove(&place);
            let busy = e.is_busy();
            NetError::Tap { address, busy, why: chain(&e).into() }
        })
    }

    /// Queues a returned address; the keeper cleans it for the next VM.
    pub(super) fn take_back(&self, returned: Returned) {
        lock(&self.state).returned.push(returned);
        self.wanted.notify_one();
    }

    /// Cleans the returned addresses for other VMs and returns their number. Blocks.
    pub(super) fn clean(&self) -> usize {
        let returned = std::mem::take(&mut lock(&self.state).returned);
        let guests: Vec<Guest> = returned.iter().map(|one| one.guest.clone()).collect();
        if !guests.is_empty()
            && let Err(e) = self.vm_netns.dismiss(&guests)
        {
            tracing::error!("addresses that cannot be used again yet: {}", chain(&e));
            lock(&self.state).returned.extend(returned);
            return 0;
        }
        let close = |Returned { place, tap, .. }| {
            drop(tap);
            place
        };
        self.renew(returned.into_iter().map(close).collect());
        guests.len()
    }

    /// Makes cleaned addresses available: their taps are opened anew and wait, or are removed.
    ///
    /// The VMM had the only description of its tap. A new one has no flags and no packets of it.
    fn renew(&self, mut places: Vec<u32>) {
        let state = lock(&self.state);
        let room = if state.closed { 0 } else { MOST_READY.saturating_sub(state.ready.len()) };
        drop(state);
        let mut surplus = places.split_off(room.min(places.len()));
        let wanted: Vec<TapSpec> = places.iter().map(|place| self.tap_spec(*place)).collect();
        match self.vm_netns.taps(&wanted) {
            Ok(taps) => {
                for (place, tap) in places.into_iter().zip(taps) {
                    match tap {
                        Ok(tap) => lock(&self.state).ready.push_back((place, tap)),
                        Err(e) => {
                            // A process may still have the description, such as another VMM to
                            // which this one sent it.
                            tracing::warn!(
                                "a tap that is removed instead of used again: {}",
                                chain(&e)
                            );
                            surplus.push(place);
                        }
                    }
                }
            }
            Err(e) => {
                tracing::error!("taps that cannot be used again: {}", chain(&e));
                surplus.extend(places);
            }
        }
        self.remove(&surplus);
    }

    /// Removes taps and frees their places.
    pub(super) fn remove(&self, places: &[u32]) {
        let names: Vec<String> = places.iter().map(|place| tap_name(*place)).collect();
        if let Err(e) = self.vm_netns.remove_taps(&names) {
            // A tap that exists is opened again with its place, or skipped if it is busy.
            tracing::error!("removing taps: {}", chain(&e));
        }
        // The name of a tap is free only now.
        let mut state = lock(&self.state);
        for place in places {
            state.taken.remove(place);
        }
    }

    /// Creates taps until enough wait. Blocks.
    pub(super) fn fill(&self) -> Result<(), NetError> {
        loop {
            let state = lock(&self.state);
            if state.closed || state.ready.len() >= LEAST_READY {
                return Ok(());
            }
            drop(state);
            let made = self.make()?;
            lock(&self.state).ready.push_back(made);
        }
    }
}
