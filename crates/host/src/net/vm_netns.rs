//! The VM network namespace: its gateway, its uplink and its taps.

use super::error::{NetError, file};
use super::messages::{neighbour, route, up};
use super::netlink::Batch;
use super::netns::Netns;
use super::policies::{Found, Policies};
use super::setup::{carries, index, inside, outside, outside_filter, sweep, whole};
use super::spec::{GATEWAY_MAC, Guest, NEXT, TapSpec, UPLINK, VmNetnsSpec};
use super::tap::Tap;
use super::{conntrack, nft, ways};
use dayfly_units::Egress;
use dayfly_units::sync::lock;
use libc::{RTM_DELLINK, RTM_GETLINK, RTM_NEWLINK, RTM_NEWNEIGH, RTM_NEWROUTE};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkHeader, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::{RouteScope, RouteType};
use netlink_sys::protocols::NETLINK_ROUTE;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

/// The interface group (IFLA_GROUP of rtnetlink(7)) whose members are removed together.
const DOOMED: u32 = 0xdf;
/// Taps per batch, because all acknowledgements of a batch wait in one socket's buffer.
const TOGETHER: usize = 128;

/// A VM network namespace.
#[derive(Debug)]
pub struct VmNetns {
    netns: Netns,
    spec: VmNetnsSpec,
    /// Guests by network, as the packet filter has them. Hold the lock while changing the filter.
    networks: Mutex<Networks>,
}

/// What guests reach, as the packet filter has it.
#[derive(Debug, Clone, Default)]
struct Networks {
    /// Addresses of guests, by the name of their network.
    by_name: BTreeMap<String, BTreeSet<Ipv4Addr>>,
    /// The egress policies of guests.
    policies: Policies,
}

/// Returns the packet filter changes that admit these guests, and adds the guests to `networks`.
fn admitting<'a>(
    networks: &mut Networks,
    guests: impl Iterator<Item = &'a Guest>,
) -> Vec<nft::Change> {
    let mut changes = Vec::new();
    for guest in guests {
        if let Some(name) = &guest.network {
            let others = networks.by_name.entry(name.clone()).or_default();
            if others.is_empty() {
                changes.push(nft::Change::NewNetwork(name.clone()));
            }
            if others.insert(guest.address) {
                changes.push(nft::Change::Join(name.clone(), guest.address));
            }
        }
        networks.policies.set(guest.address, &guest.egress, &mut changes);
    }
    changes
}

/// Returns the packet filter changes that undo [`admitting`], and removes the guests from
/// `networks`.
fn dismissing<'a>(
    networks: &mut Networks,
    guests: impl Iterator<Item = &'a Guest>,
) -> Vec<nft::Change> {
    let mut changes = Vec::new();
    for guest in guests {
        if let Some(name) = &guest.network
            && let Some(others) = networks.by_name.get_mut(name)
        {
            if others.remove(&guest.address) {
                changes.push(nft::Change::Leave(name.clone(), guest.address));
            }
            if others.is_empty() {
                networks.by_name.remove(name);
                changes.push(nft::Change::NoNetwork(name.clone()));
            }
        }
        networks.policies.remove(guest.address, &mut changes);
    }
    changes
}

impl VmNetns {
    /// Opens the namespace that `spec` names, if it is complete and has these addresses. Otherwise
    /// creates a new one, and VMs of the previous one lose their network. The calling thread's
    /// namespace is the host's. `guests` are the live guests of the previous daemon.
    ///
    /// # Errors
    /// The addresses are invalid, or the host refuses; nothing of a new namespace remains.
    pub fn open_or_create(spec: &VmNetnsSpec, guests: &[Guest]) -> Result<Self, NetError> {
        spec.check()?;
        let with = |netns| Self { netns, spec: spec.clone(), networks: Mutex::default() };
        if let Ok(netns) = Netns::open(&spec.pin)
            && whole(&netns, spec)?
        {
            let vm_netns = with(netns);
            // Sets everything again, because another version of dayfly may have made the namespace,
            // or for other ranges.
            vm_netns.netns.run(|| {
                vm_netns
                    .filter(guests)
                    .and_then(|()| ways::remove_stale(index(UPLINK)?, NEXT, &spec.ways()))
                    .and_then(|()| inside(spec))
            })??;
            outside_filter(spec)?;
            let live: BTreeSet<Ipv4Addr> = guests.iter().map(|guest| guest.address).collect();
            vm_netns.forget(|address| spec.is_a_guest_s(*address) && !live.contains(address))?;
            return Ok(vm_netns);
        }
        sweep(spec)?;
        let made = Netns::create(&spec.pin).and_then(|netns| {
            let vm_netns = with(netns);
            vm_netns.set_up(guests)?;
            Ok(vm_netns)
        });
        made.inspect_err(|_| {
            let _ = sweep(spec);
        })
    }

    fn set_up(&self, guests: &[Guest]) -> Result<(), NetError> {
        let Self { netns, spec, .. } = self;
        let mut peer = LinkMessage::default();
        peer.attributes = vec![
            LinkAttribute::IfName(UPLINK.to_owned()),
            LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()),
        ];
        let mut veth = LinkMessage::default();
        veth.attributes = vec![
            LinkAttribute::IfName(spec.uplink.clone()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
            ]),
        ];
        let mut batch = Batch::default();
        batch.ask(
            format!("making the uplink {}", spec.uplink),
            RTM_NEWLINK,
            NLM_F_CREATE | NLM_F_EXCL,
            &veth,
        );
        batch.send(NETLINK_ROUTE)?;
        netns.run(|| self.filter(guests).and_then(|()| inside(spec)))??;
        outside(spec)?;
        netns.run(|| carries(UPLINK))??;
        carries(&spec.uplink)
    }

    fn networks(&self) -> MutexGuard<'_, Networks> {
        lock(&self.networks)
    }

    /// Sets the packet filter's rules in the namespace, which the calling thread must be in.
    fn filter(&self, guests: &[Guest]) -> Result<(), NetError> {
        let mut networks = self.networks();
        *networks = Networks::default();
        let mut changes = admitting(&mut networks, guests.iter());
        // Addresses that an earlier daemon has opened stay open for the rest of their time.
        networks.policies.reopen(&mut changes)?;
        let most_connections = self.spec.most_connections;
        let (gateway, host) = (self.spec.gateway(), self.spec.host());
        let inside = nft::Inside { uplink: UPLINK, gateway, host, most_connections };
        Ok(nft::set_inside(inside, &changes)?)
    }

    /// Applies a guest's restrictions and network, before the guest sends its first packet.
    ///
    /// # Errors
    /// The host refuses: the guest then reaches what every guest reaches by default.
    pub fn admit(&self, guest: &Guest) -> Result<(), NetError> {
        if !guest.is_special() {
            return Ok(());
        }
        let mut networks = self.networks();
        let before = networks.clone();
        let changes = admitting(&mut networks, std::iter::once(guest));
        self.change(&changes).inspect_err(|_| *networks = before)
    }

    /// Changes the egress policy of a guest. From now on, packets of connections that the new
    /// policy forbids are dropped, in both directions.
    ///
    /// # Errors
    /// The host refuses: the guest has the policy before.
    pub fn set_egress(&self, address: Ipv4Addr, egress: &Egress) -> Result<(), NetError> {
        let mut networks = self.networks();
        let before = networks.clone();
        let mut changes = Vec::new();
        networks.policies.set(address, egress, &mut changes);
        if changes.is_empty() {
            return Ok(());
        }
        self.change(&changes).inspect_err(|_| *networks = before)
    }

    /// Forgets the connections that the guest's policy forbids, in both namespaces, so that they do
    /// not count for the guest's maximum. The calling thread must be in the host's namespace.
    ///
    /// # Errors
    /// The host refuses.
    pub fn cut(&self, address: Ipv4Addr) -> Result<(), NetError> {
        let policies = self.networks().policies.clone();
        let cut = self.netns.run(|| {
            let mut some = conntrack::begun(address)?;
            some.retain(|one| {
                let outside = !self.spec.is_a_guest_s(one.to) && one.to != self.spec.gateway();
                outside && !policies.permits(address, one.protocol, one.to, one.port)
            });
            conntrack::cut(&some).map(|()| some)
        })??;
        Ok(conntrack::cut(&cut)?)
    }

    /// Opens the addresses of a name for a guest, as far as its policy has rules for the name.
    /// Returns the number of addresses that cannot be opened, because too many are open.
    ///
    /// # Errors
    /// The host refuses.
    pub fn open(&self, address: Ipv4Addr, found: &Found) -> Result<usize, NetError> {
        let mut networks = self.networks();
        let before = networks.policies.part_of(address);
        let mut changes = Vec::new();
        let left_out = networks.policies.open(address, found, Instant::now(), &mut changes);
        if !changes.is_empty() {
            self.change(&changes).inspect_err(|_| networks.policies.restore(before))?;
        }
        Ok(left_out)
    }

    /// The number of packets that egress policies have refused, by guest; guests without any are
    /// left out.
    ///
    /// # Errors
    /// The host refuses.
    pub fn refused(&self) -> Result<BTreeMap<Ipv4Addr, u64>, NetError> {
        Ok(self.netns.run(nft::refused)??)
    }

    /// Applies the changes in the namespace.
    fn change(&self, changes: &[nft::Change]) -> Result<(), NetError> {
        Ok(self.netns.run(|| nft::change(changes))??)
    }

    /// Removes the rules and the tracked connections of guests that are gone, so that other guests
    /// may get their addresses.
    ///
    /// # Errors
    /// The host refuses: the addresses must not be used again.
    pub fn dismiss(&self, guests: &[Guest]) -> Result<(), NetError> {
        let mut networks = self.networks();
        let before = networks.clone();
        let changes = dismissing(&mut networks, guests.iter());
        if !changes.is_empty() {
            self.change(&changes).inspect_err(|_| *networks = before)?;
        }
        drop(networks);
        let gone: BTreeSet<Ipv4Addr> = guests.iter().map(|guest| guest.address).collect();
        self.forget(|address| gone.contains(address))
    }

    /// Deletes all tracked connections of the addresses that `whose` selects, in this namespace and
    /// in the host's. The calling thread must be in the host's namespace.
    fn forget(&self, whose: impl Fn(&Ipv4Addr) -> bool + Send) -> Result<(), NetError> {
        let forgotten = self.netns.run(|| {
            let mut some = conntrack::addresses()?;
            some.retain(whose);
            conntrack::forget(&some).map(|()| some)
        })??;
        // An address without connections in the namespace has none in the host's.
        Ok(conntrack::forget(&forgotten)?)
    }

    /// Opens the tap of a guest, and makes it with the route to the guest if it does not exist. The
    /// tap stays when the result is dropped.
    ///
    /// # Errors
    /// The tap is open elsewhere, the address is no guest's, or the host refuses; nothing that this
    /// call made remains.
    pub fn tap(&self, name: &str, address: Ipv4Addr, mac: [u8; 6]) -> Result<Tap, NetError> {
        let wanted = TapSpec { name: name.to_owned(), address, mac };
        self.check(&wanted)?;
        self.netns.run(|| opened(&wanted))?
    }

    /// As [`Self::tap`] for several guests, with one thread in the namespace.
    ///
    /// # Errors
    /// The namespace cannot be entered. A tap that cannot be had is an error in the result.
    pub fn taps(&self, wanted: &[TapSpec]) -> Result<Vec<Result<Tap, NetError>>, NetError> {
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let one = |wanted| self.check(wanted).and_then(|()| opened(wanted));
        self.netns.run(|| wanted.iter().map(one).collect())
    }

    fn check(&self, wanted: &TapSpec) -> Result<(), NetError> {
        if self.spec.is_a_guest_s(wanted.address) {
            Ok(())
        } else {
            Err(NetError::Foreign(wanted.address, self.spec.first, self.spec.bits))
        }
    }

    /// Removes taps, whether they are open or not, in batches, because the removal of a single tap
    /// waits for a grace period of the kernel (16 ms). Names without a tap are left out.
    ///
    /// # Errors
    /// The host refuses.
    pub fn remove_taps(&self, names: &[String]) -> Result<(), NetError> {
        if names.is_empty() { Ok(()) } else { self.netns.run(|| remove(names))? }
    }

    /// Removes all taps except those in `kept`: an earlier daemon left them.
    ///
    /// # Errors
    /// The host refuses.
    pub fn remove_other_taps(&self, kept: &BTreeSet<String>) -> Result<(), NetError> {
        self.netns.run(|| {
            let mut names = interfaces()?;
            names.retain(|name| name != "lo" && name != UPLINK && !kept.contains(name));
            remove(&names)
        })?
    }

    /// Runs `act` in a new thread that has entered the namespace.
    ///
    /// # Errors
    /// The thread cannot be created, or may not enter the namespace.
    pub fn run<R: Send>(&self, act: impl FnOnce() -> R + Send) -> Result<R, NetError> {
        self.netns.run(act)
    }

    /// A non-blocking socket that becomes readable when the packet filter's rules change in the
    /// calling thread's namespace, which must be the host's.
    ///
    /// # Errors
    /// The host refuses.
    pub fn changes_of_rules() -> Result<OwnedFd, NetError> {
        Ok(nft::changes()?)
    }

    /// Sets the host's rules again if another program removed the table or its last chain, as
    /// `nft flush ruleset` does, and returns whether it had. Single rules are not looked for. The
    /// calling thread must be in the host's namespace.
    ///
    /// # Errors
    /// The host refuses.
    pub fn restore_rules(&self) -> Result<bool, NetError> {
        let missing = !nft::has_host(&self.spec.uplink)?;
        if missing {
            outside_filter(&self.spec)?;
        }
        Ok(missing)
    }

    /// Removes the namespace, its uplink and its rules. The calling thread must be in the host's
    /// namespace.
    ///
    /// # Errors
    /// The host refuses.
    pub fn remove(&self) -> Result<(), NetError> {
        sweep(&self.spec)
    }
}

/// Opens or makes a tap in the calling thread's namespace. Everything is set again, because an
/// earlier user of the tap may have changed it.
fn opened(wanted: &TapSpec) -> Result<Tap, NetError> {
    let TapSpec { name, address, mac } = wanted;
    let tap = Tap::open(name)?;
    let index = index(name)?;
    let mut batch = Batch::default();
    batch.ask(format!("setting up {name}"), RTM_NEWLINK, 0, &up(index, Some(GATEWAY_MAC)));
    let route = route((*address, 32), RouteType::Unicast, RouteScope::Link, Some(index), None);
    let replace = NLM_F_CREATE | NLM_F_REPLACE;
    batch.ask(format!("the route to {address}"), RTM_NEWROUTE, replace, &route);
    let neighbour = neighbour(index, *address, *mac);
    batch.ask(format!("the neighbour {address}"), RTM_NEWNEIGH, replace, &neighbour);
    // A tap that existed had no carrier until it was opened. This makes it carry packets at once,
    // as in [`carries`].
    let mut look = LinkMessage::default();
    look.header = LinkHeader { index, ..LinkHeader::default() };
    batch.ask(format!("waiting for {name}"), RTM_GETLINK, 0, &look);
    batch.send(NETLINK_ROUTE)?;
    tap.stay()?;
    Ok(tap)
}

/// Removes taps of the calling thread's namespace.
fn remove(names: &[String]) -> Result<(), NetError> {
    for some in names.chunks(TOGETHER) {
        let mut batch = Batch::default();
        for index in some.iter().filter_map(|name| index(name).ok()) {
            let mut message = LinkMessage::default();
            message.header = LinkHeader { index, ..LinkHeader::default() };
            message.attributes = vec![LinkAttribute::Group(DOOMED)];
            batch.ask("marking a tap", RTM_NEWLINK, 0, &message);
        }
        let mut doomed = LinkMessage::default();
        doomed.attributes = vec![LinkAttribute::Group(DOOMED)];
        batch.ask("removing taps", RTM_DELLINK, 0, &doomed);
        match batch.send(NETLINK_ROUTE) {
            // NODEV: none of these taps exists any more. A concurrent call may have removed them,
            // because the group is the same.
            Err(e) if e.errno != Errno::NODEV => return Err(e.into()),
            _ => {}
        }
    }
    Ok(())
}

/// The names of the interfaces in the calling thread's namespace.
fn interfaces() -> Result<Vec<String>, NetError> {
    // Two lines of headings, then `name: counters` for each interface (proc_pid_net(5)).
    let path = Path::new("/proc/thread-self/net/dev");
    let table = std::fs::read_to_string(path).map_err(file("reading", path))?;
    let names = table.lines().skip(2).filter_map(|line| line.split_once(':'));
    Ok(names.map(|(name, _)| name.trim().to_owned()).collect())
}
