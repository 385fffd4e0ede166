//! The egress policy of a lease: applied, changed, counted, and ended with the lease.

use crate::base::config::Config;
use crate::model::facts::Facts;
use crate::net::{Attachment, NetError, Networks};
use dayfly_api::types::NetworkRequest;
use dayfly_host::net::VmNetns;
use dayfly_units::{Egress, VmId};

#[test]
fn a_policy_changes_while_the_address_is_leased_and_ends_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config {
        run: folder.path().to_owned(),
        network: Some("10.88.0.0/28".parse().unwrap()),
        ..crate::fixture::config(folder.path())
    };
    let inside = std::thread::spawn(move || {
        crate::fixture::own_network();
        let networks = Networks::new(&config, &[]);
        let network = networks.get().unwrap();
        let rules: Egress = "example.org:443,192.0.2.0/24".parse().unwrap();
        let mut lease = networks.lease().unwrap();
        let address = lease.address();
        lease.admit(&NetworkRequest::default().with_policy(rules.clone())).unwrap();
        let named = lease.register(VmId::random(), &"limited".parse().unwrap());
        let control = lease.egress(&named);
        assert_eq!((named.guest().egress(), control.refused().unwrap()), (rules.clone(), (0, 0)));
        for policy in [Egress::none(), Egress::internet(), rules.clone()] {
            control.set(&policy).unwrap();
            assert_eq!(named.guest().egress(), policy);
        }
        named.guest().refuse(3);
        assert_eq!(control.refused().unwrap(), (0, 3));
        // The next daemon finds the rules in the filter as the record has them, and the VM's end
        // removes them: its address is given again without any.
        drop((named, lease));
        assert!(matches!(control.set(&Egress::none()), Err(NetError::Ended)));
        assert_eq!(network.clean(), 1);
        let asked = NetworkRequest::default().with_policy(rules);
        let networks = Networks::new(&config, &[(address, asked.clone())]);
        let adopted = networks.adopt(address, &asked).unwrap();
        let named = adopted.register(VmId::random(), &"limited".parse().unwrap());
        assert_eq!(named.guest().egress(), asked.policy().unwrap());
        adopted.egress(&named).set(&Egress::none()).unwrap();
        drop((named, adopted));
        assert_eq!(networks.get().unwrap().clean(), 1);
        networks.end();
    });
    inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn a_vm_without_a_policy_changes_nothing_in_the_packet_filter() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config {
        run: folder.path().to_owned(),
        network: Some("10.88.0.0/28".parse().unwrap()),
        ..crate::fixture::config(folder.path())
    };
    let inside = std::thread::spawn(move || {
        crate::fixture::own_network();
        let networks = Networks::new(&config, &[]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let changes = networks.get().unwrap().vm_netns.run(VmNetns::changes_of_rules);
        let changes = changes.unwrap().unwrap();
        let changed = || rustix::io::read(&changes, &mut [0; 4096]).is_ok();
        let attach = |network: NetworkRequest| {
            let facts = Facts { nets: 1, network, ..crate::fixture::facts() };
            let allocated = Attachment::allocate(&networks, &facts, &[]);
            let mut attachment = runtime.block_on(allocated).unwrap();
            attachment.name(VmId::random(), &"plain".parse().unwrap());
            attachment
        };
        let plain = attach(NetworkRequest::default());
        let internet = attach(NetworkRequest::default().with_policy(Egress::internet()));
        assert!(!changed(), "a VM without a policy");
        assert!(plain.shown().unwrap().egress.is_none());
        assert!(internet.egress().is_some());
        let limited = attach(NetworkRequest::default().with_policy("192.0.2.1".parse().unwrap()));
        assert!(changed(), "what this test shows is not what it says");
        assert_eq!(limited.shown().unwrap().policy(), "192.0.2.1".parse().unwrap());
        drop((plain, internet, limited));
        networks.end();
    });
    inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}
