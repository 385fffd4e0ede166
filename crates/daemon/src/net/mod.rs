//! The network of VMs: who has which address, what its tap is, which ports of it are published, and who is called what.
//!
//! ```text
//!  guest ── virtio-net ── tap ┐                                   ┌─ the host's own network
//!  guest ── virtio-net ── tap ┼─ the tenant's namespace ── uplink ┤   (masqueraded; published ports are relayed)
//!  guest ── virtio-net ── tap ┘   (routes, names)                 └
//! ```
//!
//! The room for deciding; what Linux is told lies in [`dayfly_host::net`]. What may not enter: packets, but for the questions
//! that [`names`] answers.
//!
//! A VM is who its tap is: address and MAC belong to the tap, whoever has it, so nothing is configured on the host when a VM is
//! born, and a birth takes a tap that waits. It goes back when the VM has ended. The one that waits longest is taken first: what the
//! last owner of an address was asked comes to nobody for as long as can be.
//!
//! A host without what this takes (root, tun, nf_tables) has VMs without a network, and says why where somebody asks for one.

mod lease;
mod names;
mod publish;
#[cfg(test)]
mod tests;
mod wires;

pub use lease::Lease;
pub use publish::{MAX_PUBLISHED, Published};
pub use wires::Wires;

use crate::config::Config;
use crate::daemon::Daemon;
use crate::error::{Fault, chain};
use crate::vm::registry::lock;
use dayfly_api::types::ErrorCode;
use dayfly_host::net::{Tap, Tenant, TenantSpec};
use std::collections::{BTreeSet, VecDeque};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// So many taps wait at least, where there are addresses.
const LEAST_READY: usize = 16;
/// So many that were used wait at most: making one takes a millisecond, keeping one some kilobytes.
const MOST_READY: usize = 1024;
/// So many other places are tried where the tap of one is there already.
const OTHERS_TRIED: usize = 512;
/// How often it is looked whether enough wait.
const TICK: Duration = Duration::from_secs(5);

/// Why there is no network for a VM.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NetError {
    /// This daemon has none.
    #[error("network: this host has none for VMs: {0}")]
    None(Arc<str>),
    /// All addresses are taken.
    #[error("network {prefix}: expected a free address, all {taken} are taken")]
    Full {
        /// Its addresses.
        prefix: Prefix,
        /// How many there are.
        taken: usize,
    },
    /// The host refused a tap.
    #[error("network: a tap for {address}: {why}")]
    Tap {
        /// For whom.
        address: Ipv4Addr,
        /// Somebody has one for it.
        busy: bool,
        /// Why.
        why: Arc<str>,
    },
}

impl From<NetError> for Fault {
    fn from(e: NetError) -> Self {
        let code = match &e {
            NetError::None(_) => ErrorCode::State,
            NetError::Full { .. } => ErrorCode::Exhausted,
            NetError::Tap { .. } => ErrorCode::Internal,
        };
        Self::new(code, e)
    }
}

/// Addresses in a row: `10.88.0.0/16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// The first, which is nobody's.
    pub first: Ipv4Addr,
    /// How many bits they have in common: 8 to 29.
    pub bits: u8,
}

impl std::fmt::Display for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.first, self.bits)
    }
}

impl std::str::FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "expected the first address of a network and 8 to 29 bits, such as 10.88.0.0/16, got {text:?}"
            )
        };
        let (first, bits) = text.split_once('/').ok_or_else(wrong)?;
        let (first, bits) =
            (first.parse::<Ipv4Addr>().map_err(|_| wrong())?, bits.parse::<u8>().map_err(|_| wrong())?);
        let prefix = Self { first, bits };
        let fits = (8..=29).contains(&bits) && u32::from(first).is_multiple_of(1 << (32 - u32::from(bits)));
        if fits { Ok(prefix) } else { Err(wrong()) }
    }
}

impl Prefix {
    /// The gateway's address, the second.
    #[must_use]
    pub fn gateway(self) -> Ipv4Addr {
        self.address(0).unwrap_or(self.first)
    }

    /// That of the `index`th VM, from 1; the last but one is the host's, and the last is for broadcasts, as everywhere.
    fn address(self, index: u32) -> Option<Ipv4Addr> {
        let count = 1_u32 << (32 - u32::from(self.bits));
        (index + 3 < count).then(|| Ipv4Addr::from(u32::from(self.first) + 1 + index))
    }

    /// The place of an address, as [`Self::address`] counts.
    fn index(self, address: Ipv4Addr) -> Option<u32> {
        let index = u32::from(address).checked_sub(u32::from(self.first))?.checked_sub(1)?;
        (index > 0 && self.address(index).is_some()).then_some(index)
    }
}

/// The MAC of who has this address: locally administered, and no other's.
#[must_use]
pub fn mac(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x02, 0xdf, a, b, c, d]
}

/// A MAC as people write it.
#[must_use]
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// The network that this daemon has, if it has one.
#[derive(Debug)]
pub struct Networks(Result<Arc<Network>, Arc<str>>);

#[derive(Debug)]
struct Network {
    tenant: Tenant,
    prefix: Prefix,
    state: Mutex<State>,
    /// Fewer wait than should.
    wanted: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Taps that wait, the longest first.
    ready: VecDeque<(u32, Tap)>,
    /// Places that somebody has, or that a tap waits for.
    taken: BTreeSet<u32>,
    /// Where the search for a free place begins.
    next: u32,
    /// No more are made.
    closed: bool,
}

impl State {
    /// A place that nobody has, and from now on somebody: the next in a circle.
    fn place(&mut self, prefix: Prefix) -> Option<u32> {
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
    fn make(&self) -> Result<(u32, Tap), NetError> {
        // After a daemon was killed its taps are there until the kernel has closed them.
        for _ in 0..OTHERS_TRIED {
            match self.make_next() {
                Err(NetError::Tap { busy: true, .. }) => {}
                made => return made,
            }
        }
        self.make_next()
    }

    fn make_next(&self) -> Result<(u32, Tap), NetError> {
        let mut state = lock(&self.state);
        let Some(place) = state.place(self.prefix) else {
            return Err(NetError::Full { prefix: self.prefix, taken: state.taken.len() });
        };
        drop(state);
        let address = self.prefix.address(place).unwrap_or(self.prefix.first);
        self.tenant.tap(&format!("vm{place}"), address, mac(address)).map(|tap| (place, tap)).map_err(|e| {
            lock(&self.state).taken.remove(&place);
            let busy = e.is_busy();
            NetError::Tap { address, busy, why: chain(&e).into() }
        })
    }

    /// A tap that nobody has any more.
    fn take_back(&self, place: u32, tap: Option<Tap>) {
        // What came for the last owner is not for the next.
        let tap = tap.filter(|tap| tap.drain().is_ok());
        let mut state = lock(&self.state);
        match tap {
            Some(tap) if !state.closed && state.ready.len() < MOST_READY => {
                state.ready.push_back((place, tap))
            }
            tap => {
                drop(state);
                // Its name is free when it is closed, and not before.
                drop(tap);
                lock(&self.state).taken.remove(&place);
            }
        }
    }

    /// Makes taps until enough wait. Blocks.
    fn fill(&self) -> Result<(), NetError> {
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

impl Networks {
    /// None, and why.
    #[must_use]
    pub fn none(why: &str) -> Self {
        Self(Err(why.into()))
    }

    /// The network that the configuration asks for, as a daemon before left it or a new one. Blocks.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let Some(prefix) = config.network else {
            return Self::none("the daemon was started with --network none");
        };
        let spec = TenantSpec {
            pin: config.netns(),
            first: prefix.first,
            bits: prefix.bits,
            uplink: config.uplink(),
        };
        match Tenant::open_or_create(&spec) {
            Ok(tenant) => {
                let (state, wanted) = (Mutex::default(), Notify::new());
                Self(Ok(Arc::new(Network { tenant, prefix, state, wanted })))
            }
            Err(e) => Self::none(&chain(&e)),
        }
    }

    fn get(&self) -> Result<&Arc<Network>, NetError> {
        self.0.as_ref().map_err(|why| NetError::None(why.clone()))
    }

    /// Why there is none.
    #[must_use]
    pub fn missing(&self) -> Option<&str> {
        self.0.as_ref().err().map(|why| &**why)
    }

    /// An address whose tap waits.
    #[must_use]
    pub fn ready(&self) -> Option<Lease> {
        let network = self.0.as_ref().ok()?;
        let mut state = lock(&network.state);
        let (place, tap) = state.ready.pop_front()?;
        if state.ready.len() < LEAST_READY / 2 {
            network.wanted.notify_one();
        }
        drop(state);
        Some(Lease::new(network, place, Some(tap)))
    }

    /// An address, whose tap is made if none waits. Blocks.
    ///
    /// # Errors
    /// [`NetError`].
    pub fn lease(&self) -> Result<Lease, NetError> {
        let network = self.get()?;
        match self.ready() {
            Some(lease) => Ok(lease),
            None => network.make().map(|(place, tap)| Lease::new(network, place, Some(tap))),
        }
    }

    /// The address that a VM has which an earlier daemon started. Its tap goes with its VMM.
    #[must_use]
    pub fn adopt(&self, address: Ipv4Addr) -> Option<Lease> {
        let network = self.0.as_ref().ok()?;
        let place = network.prefix.index(address)?;
        lock(&network.state).taken.insert(place).then(|| Lease::new(network, place, None))
    }

    /// How many addresses VMs have, and how many taps wait.
    #[must_use]
    pub fn count(&self) -> (usize, usize) {
        let Ok(network) = &self.0 else { return (0, 0) };
        let state = lock(&network.state);
        (state.taken.len() - state.ready.len(), state.ready.len())
    }

    /// Lets go of all taps that wait; where no VM has an address, of the whole network. Blocks.
    pub fn end(&self) {
        let Ok(network) = &self.0 else { return };
        let mut state = lock(&network.state);
        state.closed = true;
        let (places, taps): (Vec<u32>, Vec<Tap>) = std::mem::take(&mut state.ready).into_iter().unzip();
        state.taken.retain(|place| !places.contains(place));
        let unused = state.taken.is_empty();
        drop(state);
        if let Err(e) = network.tenant.remove_taps(taps) {
            tracing::error!("removing taps: {}", chain(&e));
        }
        if unused && let Err(e) = network.tenant.remove() {
            tracing::error!("removing the network of VMs: {}", chain(&e));
        }
    }
}

/// Keeps taps ready and answers questions for names, until the daemon stops.
pub async fn keep(daemon: Arc<Daemon>) {
    let Ok(network) = daemon.networks.get().cloned() else { return };
    let answering = names::serve(&daemon, &network).map_err(|e| tracing::error!("names of VMs: {e}"));
    let mut failed = false;
    while !daemon.stop.is_cancelled() {
        let filling = network.clone();
        let filled = tokio::task::spawn_blocking(move || filling.fill()).await;
        if let Ok(Err(e)) = filled
            && !std::mem::replace(&mut failed, true)
        {
            tracing::error!("making taps ahead of demand: {}", chain(&e));
        }
        tokio::select! {
            () = network.wanted.notified() => {}
            () = tokio::time::sleep(TICK) => {}
            () = daemon.stop.cancelled() => {}
        }
    }
    drop(answering);
}
