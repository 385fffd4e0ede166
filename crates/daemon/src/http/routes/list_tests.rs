//! Pages and filters of lists, through the socket.

use super::tests::{raw, request, running, served};
use dayfly_api::client::{Client, VmQuery};
use dayfly_api::types::{ErrorCode, List, Vm, VmState};

#[tokio::test]
async fn a_list_is_read_page_by_page_while_it_changes() {
    let served = served();
    let vms: Vec<_> = (0..5).map(|n| running(&served, &format!("vm-{n}")).0).collect();
    let listed = served.daemon.registry.all();
    let page = async |query: String| -> List<Vm> {
        let path = format!("/v1/vms?{query}");
        let (line, body) = raw(&served.socket, &request("GET", &path, "")).await;
        assert!(line.contains("200"), "{line}: {body}");
        serde_json::from_str(&body).unwrap()
    };
    let first = page("limit=2".into()).await;
    assert_eq!(first.items.len(), 2);
    // The last VM of the page goes, and so does one of the next page.
    for gone in [&listed[1], &listed[3]] {
        served.daemon.registry.forget(gone);
    }
    let cursor = first.next.unwrap();
    let second = page(format!("limit=2&cursor={cursor}")).await;
    let ids = |list: &[Vm]| list.iter().map(|vm| vm.id).collect::<Vec<_>>();
    assert_eq!(ids(&first.items), [listed[0].id, listed[1].id]);
    assert_eq!(ids(&second.items), [listed[2].id, listed[4].id]);
    assert_eq!(second.next, None);
    assert_eq!(vms.len() - 2, page("all=true".into()).await.items.len());
}

#[tokio::test]
async fn the_daemon_filters_vms() {
    let served = served();
    let (web, _) = running(&served, "web");
    let (ended, _) = running(&served, "ended");
    let exit = crate::model::exit::exit_now(dayfly_api::types::ExitKind::Killed, "killed");
    drop(ended.ended(exit));
    let client = Client::new(&served.socket);
    let listed = async |query: VmQuery| -> Vec<String> {
        let vms = client.vms_with(&query).await.unwrap();
        vms.into_iter().map(|vm| vm.name.to_string()).collect()
    };
    let words = |word: &str| vec![word.to_owned()];
    let none = VmQuery::default;
    assert_eq!(listed(none()).await, ["web"]);
    assert_eq!(listed(VmQuery { states: vec![VmState::Exited], ..none() }).await, ["ended"]);
    assert_eq!(listed(VmQuery { all: true, names: words("e"), ..none() }).await.len(), 2);
    assert_eq!(listed(VmQuery { names: words("nd"), ..none() }).await, [""; 0]);
    assert_eq!(listed(VmQuery { ids: words(&web.id.to_string()), ..none() }).await, ["web"]);
    assert_eq!(listed(VmQuery { labels: words("schön=\u{7f}"), ..none() }).await, ["web"]);
    assert_eq!(listed(VmQuery { labels: words("schön=x"), ..none() }).await, [""; 0]);
    let image = web.facts.image.to_string();
    assert_eq!(listed(VmQuery { images: words(&image), ..none() }).await, ["web"]);
    assert_eq!(listed(VmQuery { ancestors: words(&image), ..none() }).await, ["web"]);
}

#[tokio::test]
async fn a_list_refuses_what_it_does_not_know() {
    let served = served();
    let (_vm, _listener) = running(&served, "web");
    for (path, says) in [
        ("/v1/vms?state=running", "did you mean status?"),
        ("/v1/vms?status=runing", "did you mean running?"),
        ("/v1/vms?limit=0", "limit: expected 1 to 1000, got 0"),
        ("/v1/vms?limit=1001", "limit: expected 1 to 1000, got 1001"),
        ("/v1/vms?cursor=x", "cursor: expected the `next` of a page of the list of VMs"),
        ("/v1/snapshots?img=x", "expected some of name, image, parent, limit, cursor"),
        ("/v1/images?nmae=x", "did you mean name?"),
        ("/v1/kernels?cursor=x", "cursor"),
        ("/v1/vms/web/programs?runing=true", "did you mean running?"),
        ("/v1/events?knd=created", "did you mean kind?"),
    ] {
        let (line, body) = raw(&served.socket, &request("GET", path, "")).await;
        let error: dayfly_api::types::ApiError = serde_json::from_str(&body).unwrap();
        assert!(line.contains("400") && error.code == ErrorCode::Invalid, "{path}: {line}");
        assert!(error.message.contains(says), "{path}: {}", error.message);
    }
}
