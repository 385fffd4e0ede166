//! Tests of the task that keeps the host's rules in place.

use crate::base::config::Config;
use crate::net::keeper::keep_at_least;
use crate::net::names::server::place;
use crate::net::network::LEAST_READY;
use crate::templates::cache::TemplateCache;
use crate::templates::pagers::Pagers;
use dayfly_host::net::VmNetns;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

/// nf_tables requests in the calling thread's namespace. Numbers are from
/// linux/netfilter/nf_tables.h.
mod nf_tables {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::netlink::{NETFILTER, SocketAddrNetlink};
    use rustix::net::{AddressFamily, SendFlags, SocketType, recv, send, socket};
    use std::os::fd::AsFd;

    /// NFT_MSG_NEWTABLE.
    pub(super) const NEW_TABLE: u16 = 10 << 8;

    /// Removes all tables, as `nft flush ruleset` does.
    pub(super) fn flush() {
        // Without a family and a name, NFT_MSG_DELTABLE deletes all tables. The message lies
        // between a batch's begin and end.
        let message = |kind: u16, flags: u16, subsystem: [u8; 2]| {
            let head =
                [&20_u32.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 8]];
            [&head.concat()[..], &[0, 0], &subsystem].concat()
        };
        const REQUEST: u16 = 1;
        const ACK: u16 = 4;
        let batch = [
            message(0x10, REQUEST, [0, 10]),
            message(NEW_TABLE | 2, REQUEST | ACK, [0; 2]),
            message(0x11, REQUEST, [0, 10]),
        ];
        let socket = socket(AddressFamily::NETLINK, SocketType::RAW, Some(NETFILTER)).unwrap();
        rustix::net::connect(&socket, &SocketAddrNetlink::new(0, 0)).unwrap();
        send(&socket, &batch.concat(), SendFlags::empty()).unwrap();
        let mut answer = [0; 4096];
        let (_, bytes) = recv(&socket, &mut answer, rustix::net::RecvFlags::empty()).unwrap();
        // An NLMSG_ERROR with error 0 is an acknowledgement.
        assert_eq!((bytes >= 20, &answer[16..20]), (true, &[0; 4][..]));
    }

    /// Waits for changes, and returns the types of the messages.
    pub(super) fn changes(socket: &impl AsFd) -> Vec<u16> {
        let time_limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let came = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&time_limit)).unwrap();
        assert_eq!(came, 1, "nothing has changed for {} s", time_limit.tv_sec);
        let mut kinds = Vec::new();
        let mut bytes = [0; 1 << 16];
        while let Ok(length) = rustix::io::read(socket, &mut bytes) {
            let mut rest = &bytes[..length];
            while let [a, b, c, d, kind_0, kind_1, ..] = *rest {
                kinds.push(u16::from_ne_bytes([kind_0, kind_1]));
                let length =
                    usize::try_from(u32::from_ne_bytes([a, b, c, d])).unwrap().next_multiple_of(4);
                rest = rest.get(length..).unwrap_or_default();
            }
        }
        kinds
    }
}

#[test]
fn the_host_s_rules_are_back_once_they_are_gone_without_a_clock() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let host = std::thread::spawn(move || {
        crate::fixture::own_network();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let network = Some("10.88.0.0/16".parse().unwrap());
            let config = Config { network, ..crate::fixture::config(&path) };
            std::fs::create_dir_all(&config.run).unwrap();
            std::fs::create_dir_all(&config.state).unwrap();
            let store = dayfly_store::Store::open(&config.state).unwrap();
            let templates = TemplateCache::new(store, Pagers::new(&config));
            let daemon = crate::fixture::daemon(config, templates, crate::fixture::nodes());
            assert_eq!(daemon.networks.missing(), None);
            let keeping = tokio::spawn(keep_at_least(
                daemon.networks.clone(),
                daemon.stop.clone(),
                Duration::from_secs(1 << 20),
            ));
            // When taps wait, the task has checked the rules and waits for changes.
            while daemon.networks.count().1 < LEAST_READY {
                tokio::task::yield_now().await;
            }
            let network = daemon.networks.get().unwrap().clone();
            let again = tokio::task::spawn_blocking(move || {
                let changes = VmNetns::changes_of_rules().unwrap();
                nf_tables::flush();
                while !nf_tables::changes(&changes).contains(&nf_tables::NEW_TABLE) {}
                network.vm_netns.restore_rules().unwrap()
            });
            assert!(!again.await.unwrap(), "they were not whole");
            daemon.stop.cancel();
            keeping.await.unwrap();
            daemon.networks.end();
        });
    });
    host.join().unwrap();
}

/// The address of the name service is in use when the daemon starts, and becomes free later.
#[test]
fn names_are_served_once_their_port_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let host = std::thread::spawn(move || {
        crate::fixture::own_network();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let network = Some("10.88.0.0/16".parse().unwrap());
            let config = Config { network, ..crate::fixture::config(&path) };
            std::fs::create_dir_all(&config.run).unwrap();
            std::fs::create_dir_all(&config.state).unwrap();
            let store = dayfly_store::Store::open(&config.state).unwrap();
            let templates = TemplateCache::new(store, Pagers::new(&config));
            let daemon = crate::fixture::daemon(config, templates, crate::fixture::nodes());
            let network = daemon.networks.get().unwrap().clone();
            let at = place(network.prefix);
            let take = || network.vm_netns.run(move || UdpSocket::bind(at)).unwrap();
            let other = take().unwrap();
            let keeping = tokio::spawn(keep_at_least(
                daemon.networks.clone(),
                daemon.stop.clone(),
                Duration::from_millis(1),
            ));
            // The task makes taps after it has tried to start the service.
            while daemon.networks.count().1 < LEAST_READY {
                tokio::task::yield_now().await;
            }
            drop(other);
            let begun = Instant::now();
            // The test's own socket may be in the service's way for a moment.
            while take().is_ok() {
                assert!(begun.elapsed() < Duration::from_secs(60), "the service does not start");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            daemon.stop.cancel();
            keeping.await.unwrap();
            daemon.networks.end();
        });
    });
    host.join().unwrap();
}
