//! The store through the API: a daemon without KVM, and snapshots made through the store itself.

use crate::fixture::snapshot;
use crate::http::routes::tests::{Served, served};
use dayfly_api::client::{Client, ProgressStream};
use dayfly_api::types::{
    CollectRequest, Collected, ErrorCode, Progress, Repaired, Verified, VerifyRequest,
};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;

/// All progress of a stream.
async fn all_progress(mut stream: ProgressStream) -> Vec<Progress> {
    let mut all = Vec::new();
    while let Some(progress) = stream.next().await.unwrap() {
        all.push(progress);
    }
    all
}

async fn verify(client: &Client, snapshots: &[&str]) -> Verified {
    let snapshots = snapshots.iter().map(|s| s.parse().unwrap()).collect();
    let all = all_progress(client.verify_store(&VerifyRequest { snapshots }).await.unwrap()).await;
    match all.last() {
        Some(Progress::Verified(verified)) => *verified.clone(),
        other => panic!("{other:?}"),
    }
}

async fn collect(client: &Client) -> Collected {
    match all_progress(client.collect_store(&CollectRequest::default()).await.unwrap()).await.last()
    {
        Some(Progress::Collected(collected)) => *collected.clone(),
        other => panic!("{other:?}"),
    }
}

fn packs(served: &Served, tenant: &str) -> Vec<PathBuf> {
    let folder = served.daemon.templates.store().root().join("pages").join(tenant);
    std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect()
}

fn flip(path: &std::path::Path, at: u64) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

/// `base` and `next` have pages 50 to 99 in common.
fn filled() -> Served {
    let served = served();
    let store = served.daemon.templates.store();
    snapshot(store, "default", "base", 0..100);
    snapshot(store, "default", "next", 50..400);
    snapshot(store, "another", "theirs", 0..10);
    served
}

#[tokio::test]
async fn an_empty_store_is_sound_and_has_nothing_to_collect() {
    let served = served();
    let client = Client::new(&served.socket);
    let stats = client.store_stats().await.unwrap();
    assert_eq!((stats.pages.unique, stats.dedup_ratio, stats.compression_ratio), (0, 0.0, 0.0));
    assert!(client.store_usage().await.unwrap().snapshots.is_empty());
    assert_eq!(verify(&client, &[]).await, Verified::default());
    assert_eq!(collect(&client).await, Collected::default());
}

#[tokio::test]
async fn what_only_one_snapshot_keeps_is_removed_with_it() {
    let served = filled();
    let client = Client::new(&served.socket);
    let stats = client.store_stats().await.unwrap();
    assert_eq!((stats.snapshots.count, stats.images.count, stats.layers.count), (2, 1, 2));
    assert_eq!((stats.pages.unique, stats.pages.referring_frames), (400, 450));
    assert_eq!(stats.memory.total_bytes(), 450 * 4096);
    assert!(stats.dedup_ratio == 1.125 && stats.compression_ratio > 1.0, "{stats:?}");
    let usage = client.store_usage().await.unwrap();
    let rows: Vec<_> = usage.snapshots.iter().map(|s| (s.name.as_str(), s.memory)).collect();
    let kinds = |shared: u64, own: u64| dayfly_api::types::MemoryKinds {
        shared_bytes: shared * 4096,
        own_bytes: own * 4096,
        ..Default::default()
    };
    assert_eq!(rows, [("next", kinds(50, 300)), ("base", kinds(50, 50))]);
    let next = &usage.snapshots[0];
    assert!(next.own_page_bytes > 0 && next.own_layer_bytes > 0);
    assert!(next.own_stored_bytes > next.own_page_bytes + next.own_layer_bytes);
    // Removed without the daemon, so that the requested gc has something to collect.
    served.daemon.templates.store().remove_snapshot(&"next".parse().unwrap()).unwrap();
    let collected = collect(&client).await;
    assert_eq!((collected.pages, collected.layers, collected.left_alone.len()), (300, 1, 0));
    assert_eq!(collected.layer_bytes, next.own_layer_bytes);
    let freed = u64::try_from(collected.pack_bytes).unwrap();
    assert!(freed >= next.own_page_bytes, "{freed}, {next:?}");
    let after = client.store_stats().await.unwrap();
    assert_eq!((after.pages.unique, after.layers.count), (100, 1));
    assert_eq!(collect(&client).await, Collected::default());
}

#[tokio::test]
async fn a_flipped_byte_of_a_pack_is_named_with_the_snapshots_that_need_it() {
    let served = filled();
    let client = Client::new(&served.socket);
    let sound = verify(&client, &[]).await;
    let VerifyCounts { images, layers, snapshots, pages } = VerifyCounts::of(&sound);
    assert_eq!((images, layers, snapshots, pages, sound.damaged.len()), (1, 3, 2, 400, 0));
    assert_eq!(VerifyCounts::of(&verify(&client, &["base"]).await).snapshots, 1);
    let all = packs(&served, "default");
    for pack in &all {
        flip(pack, 40);
    }
    let hurt = verify(&client, &[]).await;
    assert_eq!(hurt.damaged.len(), 16 * all.len(), "{hurt:?}");
    for damaged in &hurt.damaged {
        assert!(
            all.iter().any(|pack| damaged.message.starts_with(pack.to_str().unwrap())),
            "{damaged:?}"
        );
        assert!(damaged.kind == "pack" && damaged.message.contains("expected"), "{damaged:?}");
        assert!(
            damaged.snapshots.iter().all(|s| damaged.next.contains(s.as_str()))
                && !damaged.snapshots.is_empty()
        );
    }
    // Packs of other tenants are not verified.
    flip(&packs(&served, "another")[0], 40);
    assert_eq!(verify(&client, &[]).await.damaged.len(), hurt.damaged.len());
}

struct VerifyCounts {
    images: u64,
    layers: u64,
    snapshots: u64,
    pages: u64,
}

impl VerifyCounts {
    fn of(verified: &Verified) -> Self {
        let Verified { images, layers, snapshots, pages, .. } = *verified;
        Self { images, layers, snapshots, pages }
    }
}

#[tokio::test]
async fn a_snapshot_that_is_not_there_is_an_error_and_another_tenants_is_not_there() {
    let served = filled();
    let client = Client::new(&served.socket);
    for name in ["missing", "theirs"] {
        let request = VerifyRequest { snapshots: vec![name.parse().unwrap()] };
        let all = all_progress(client.verify_store(&request).await.unwrap()).await;
        let Some(Progress::Failed(error)) = all.last() else { panic!("{all:?}") };
        assert!(error.code == ErrorCode::NotFound && error.message.contains(name), "{error:?}");
    }
}

#[tokio::test]
async fn a_collection_leaves_alone_what_cannot_be_known_and_says_so() {
    let served = filled();
    let client = Client::new(&served.socket);
    let store = served.daemon.templates.store();
    let table = store.root().join("snapshots/base/table");
    flip(&table, 200);
    store.remove_snapshot(&"next".parse().unwrap()).unwrap();
    let collected = collect(&client).await;
    assert_eq!((collected.pages, collected.layers), (0, 1));
    let [left] = &collected.left_alone[..] else { panic!("{collected:?}") };
    assert!(
        left.what.contains("all pages") && left.message.contains(table.to_str().unwrap()),
        "{left:?}"
    );
    assert!(left.next.contains("dayfly snapshots rm base"), "{left:?}");
    let usage = client.store_usage().await.unwrap();
    assert!(
        matches!(&usage.unreadable[..], [u] if u.name == "base" && u.message.contains("table")),
        "{usage:?}"
    );
}

#[tokio::test]
async fn a_collection_goes_on_without_a_damaged_snapshot_that_the_user_names() {
    let served = filled();
    let client = Client::new(&served.socket);
    let store = served.daemon.templates.store();
    flip(&store.root().join("snapshots/base/manifest"), 200);
    flip(&store.root().join("snapshots/base/table"), 200);
    store.remove_snapshot(&"next".parse().unwrap()).unwrap();
    let stopped = collect(&client).await;
    assert_eq!((stopped.pages, stopped.layers, stopped.left_alone.len()), (0, 0, 2));
    for left in &stopped.left_alone {
        assert!(left.next.contains("dayfly store gc --without base"), "{left:?}");
    }
    let request = |name: &str| CollectRequest { without: vec![name.parse().unwrap()] };
    let all = all_progress(client.collect_store(&request("typo")).await.unwrap()).await;
    let Some(Progress::Failed(error)) = all.last() else { panic!("{all:?}") };
    assert!(error.code == ErrorCode::NotFound && error.message.contains("typo"), "{error:?}");
    let all = all_progress(client.collect_store(&request("base")).await.unwrap()).await;
    let Some(Progress::Collected(collected)) = all.last() else { panic!("{all:?}") };
    assert_eq!((collected.pages, collected.layers, collected.left_alone.len()), (400, 2, 0));
    assert!(store.root().join("snapshots/base").exists());
}

#[tokio::test]
async fn a_repair_names_the_snapshots_that_are_lost_and_a_bake_brings_them_back() {
    let served = filled();
    let client = Client::new(&served.socket);
    let repair = async || match all_progress(client.repair_store().await.unwrap()).await.last() {
        Some(Progress::Repaired(repaired)) => *repaired.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(repair().await, Repaired::default());
    for pack in packs(&served, "default") {
        flip(&pack, 40);
    }
    let repaired = repair().await;
    let names: Vec<_> = repaired.lost.iter().map(|lost| lost.name.as_str()).collect();
    assert_eq!(names, ["base", "next"], "{repaired:?}");
    for lost in &repaired.lost {
        assert!(lost.lost_pages >= 16 && lost.next.contains(&lost.name), "{lost:?}");
        assert!(lost.causes.iter().any(|cause| cause.contains("group 0, page 0")), "{lost:?}");
    }
    let store = served.daemon.templates.store();
    snapshot(store, "default", "again", 0..400);
    let repaired = repair().await;
    assert_eq!((repaired.lost, repaired.damaged), (vec![], vec![]));
    assert_eq!(verify(&client, &[]).await.damaged, []);
}

/// A client that goes away while it waits for another verification, and one during its own.
#[tokio::test]
async fn a_search_ends_when_no_client_listens_and_the_next_one_goes_on() {
    let served = filled();
    let client = Client::new(&served.socket);
    let held = served.daemon.maintenance.hold().await;
    let mut waiting = client.verify_store(&VerifyRequest::default()).await.unwrap();
    let first = waiting.next().await.unwrap();
    assert!(
        matches!(&first, Some(Progress::Phase { label }) if label.contains("waiting")),
        "{first:?}"
    );
    drop(waiting);
    drop(held);
    for _ in 0..20 {
        drop(client.verify_store(&VerifyRequest::default()).await.unwrap());
    }
    assert_eq!(verify(&client, &[]).await.damaged, []);
}
