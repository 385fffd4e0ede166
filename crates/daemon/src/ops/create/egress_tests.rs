//! Egress policies: who inherits which. What they permit is tested in `dayfly_host::net`.

use crate::base::progress::ProgressSender;
use crate::base::time::Asked;
use crate::ops::create::forking::{born_of, end, generations, says};
use crate::ops::create::harness::{ASKED, Room};
use crate::ops::create::{Order, create};
use crate::ops::{egress, fork, snapshot};
use crate::vm::Vm;
use crate::vm::record::Record;
use dayfly_api::types::{ErrorCode, ForkRequest, NetworkRequest, SnapshotRequest, VmNetwork};
use dayfly_pager::wire::Settings;
use dayfly_units::Egress;
use std::net::Ipv4Addr;
use std::sync::Arc;

fn policy(text: &str) -> Egress {
    text.parse().unwrap()
}

fn asked(vm: &Vm) -> String {
    vm.facts.network.policy().unwrap_or_default().to_string()
}

async fn clone_of(room: &Room, vm: &Arc<Vm>, egress: Option<Egress>) -> Arc<Vm> {
    let request = ForkRequest { egress, ..ASKED };
    let forked = fork::fork(&room.daemon, vm, request, Asked::now()).await.unwrap();
    room.daemon.registry.find(&forked.items[0].id.to_string()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn clones_and_snapshots_have_the_policy_that_the_vm_has_now() {
    let room = Room::with(0, Settings::default(), &generations("20", "20"), true).await;
    let network = Some(NetworkRequest::default().with_policy(policy("example.org:443")));
    let order = Order { network, ..room.order(&"parent".parse().unwrap()) };
    let parent = create(&room.daemon, Asked::now(), order).await.unwrap().keep();
    says(&parent, "verify ok seed 8\nready").await;
    let first = clone_of(&room, &parent, None).await;
    assert_eq!(asked(&first), "example.org:443");
    let own = clone_of(&room, &parent, Some(Egress::internet())).await;
    assert_eq!(asked(&own), "internet");
    // A VM without an address has no policy that could change.
    let error = egress::change(&room.daemon, &parent, Egress::none()).await.unwrap_err().0;
    assert_eq!(error.code, ErrorCode::State);
    assert!(error.message.contains("has no network"), "{}", error.message);
    // As `change` leaves it.
    parent.update(|live| {
        let (mac, address) = ("02:df:0a:58:00:02".to_owned(), Ipv4Addr::new(10, 88, 0, 2));
        let (network, closed, egress, published) = (None, false, None, Vec::new());
        let mut network = VmNetwork { address, mac, network, closed, egress, published };
        network.set_policy(Egress::none());
        live.network = Some(network);
    });
    let second = clone_of(&room, &parent, None).await;
    assert_eq!((asked(&second), second.facts.network.closed), ("none".to_owned(), true));
    let request = SnapshotRequest { name: "kept".parse().unwrap() };
    let progress = ProgressSender::without_receiver();
    snapshot::snapshot(room.daemon.clone(), parent.clone(), request, progress).await.unwrap();
    let later = born_of(&room, "kept").await.unwrap();
    assert_eq!(asked(&later), "none");
    // The next daemon applies what the record says now, not what was asked for at first.
    let bytes = Record::of(&parent).encode().unwrap();
    let record = Record::decode("record".into(), &bytes, parent.id).unwrap();
    assert_eq!(record.live.network.unwrap().policy(), Egress::none());
    for vm in [parent, first, own, second, later] {
        end(&room, &vm).await;
    }
    room.empty().await;
}
