use super::super::tests::{running, served};
use super::*;
use dayfly_api::client::{Client, EventQuery};
use dayfly_api::types::ErrorCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// The kinds and names of the next events.
async fn next(
    stream: &mut dayfly_api::client::EventStream,
    count: usize,
) -> Vec<(EventKind, String)> {
    let mut got = Vec::new();
    for _ in 0..count {
        let event = stream.next().await.unwrap().unwrap();
        got.push((event.kind, event.name.map(|name| name.to_string()).unwrap_or_default()));
    }
    got
}

#[tokio::test]
async fn a_client_gets_what_it_asks_for_and_goes_on_after_its_last_event() {
    use EventKind::{Created, Gap, Paused, Removed, Unpaused};
    let served = served();
    let (daemon, client) = (&served.daemon, Client::new(&served.socket));
    let ((web, _web), (db, _db)) = (running(&served, "web"), running(&served, "db"));
    daemon.happened(&web, Created);
    let at = daemon.events.since(0);
    assert!(at < daemon.events.end());
    let mut new = client.events(&EventQuery::default()).await.unwrap();
    let all = EventQuery { since_unix_ms: Some(0), ..EventQuery::default() };
    let mut all = client.events(&all).await.unwrap();
    let of_db = EventQuery { vms: vec!["x".into(), "db".into()], ..EventQuery::default() };
    let mut of_db = client.events(&of_db).await.unwrap();
    let start = web.id.to_string()[..6].to_owned();
    let kinds = vec![Removed, Paused];
    let removals = EventQuery { vms: vec![start], kinds, ..EventQuery::default() };
    let mut removals = client.events(&removals).await.unwrap();
    for (vm, kind) in [(&web, Paused), (&db, Created), (&web, Unpaused), (&web, Removed)] {
        daemon.happened(vm, kind);
    }
    let (web, db) = (|kind| (kind, "web".to_owned()), |kind| (kind, "db".to_owned()));
    assert_eq!(
        next(&mut all, 5).await,
        [web(Created), web(Paused), db(Created), web(Unpaused), web(Removed)]
    );
    assert_eq!(next(&mut of_db, 1).await, [db(Created)]);
    assert_eq!(next(&mut removals, 2).await, [web(Paused), web(Removed)]);
    let first = new.next().await.unwrap().unwrap();
    assert_eq!(first.kind, Paused);
    drop(new);
    let after =
        |last: &str| EventQuery { last_event_id: Some(last.into()), ..EventQuery::default() };
    let mut on = client.events(&after(&first.id)).await.unwrap();
    assert_eq!(next(&mut on, 3).await, [db(Created), web(Unpaused), web(Removed)]);
    // Of an earlier daemon.
    let mut on = client.events(&after("0123456789abcdef-3")).await.unwrap();
    let gap = on.next().await.unwrap().unwrap();
    assert_eq!(gap.kind, Gap);
    assert!(gap.message.unwrap().contains("list the VMs anew"));
    assert_eq!(next(&mut on, 1).await, [web(Created)]);
    // One that lost its connection after the gap.
    let mut on = client.events(&after(&gap.id)).await.unwrap();
    assert_eq!(next(&mut on, 1).await, [web(Created)]);
    let past = EventQuery {
        since_unix_ms: Some(0),
        until_unix_ms: Some(unix_ms()),
        ..EventQuery::default()
    };
    let mut past = client.events(&past).await.unwrap();
    next(&mut past, 5).await;
    assert_eq!(past.next().await.unwrap(), None);
    daemon.stop.cancel();
    assert_eq!(all.next().await.unwrap(), None, "the daemon does not wait for its clients");
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_with_a_last_event() {
    let served = served();
    let (vm, _vm) = running(&served, "v");
    let mut stream = UnixStream::connect(&served.socket).await.unwrap();
    stream
        .write_all(b"GET /v1/events HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut head = [0; 8];
    stream.read_exact(&mut head).await.unwrap();
    // Far more than the sockets' buffers and the ring hold.
    for _ in 0..20 * crate::model::events::KEPT {
        served.daemon.happened(&vm, EventKind::Updated);
        tokio::task::yield_now().await;
    }
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await.unwrap();
    let text = String::from_utf8(text).unwrap();
    let last = text.rmatch_indices("event: ").next().map(|(at, _)| &text[at..]).unwrap();
    assert!(last.starts_with("event: cut\n") && last.contains("Last-Event-ID"), "{last}");
    assert!(text.matches("event: updated").count() < 20 * crate::model::events::KEPT);
}

#[tokio::test]
async fn a_filter_that_is_none_is_refused() {
    let served = served();
    let client = Client::new(&served.socket);
    let many = EventQuery { vms: vec!["x".into(); MOST_WORDS + 1], ..EventQuery::default() };
    let refused = client.events(&many).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::Invalid), "{refused}");
    let refused = Wanted::of(None, Some("paused,\u{1b}x".into())).unwrap_err();
    assert!(refused.0.message.ends_with(r"gap, cut, got \x1bx"));
    assert!(Wanted::of(Some("a,b".into()), Some("paused,exited".into())).is_ok());
}
