use super::*;
use dayfly_host::numa::Node;
use std::sync::mpsc;
use std::time::Duration;

#[test]
fn releases_compare_as_numbers() {
    assert!(by_version("6.12.117+deb12-cloud-amd64") > by_version("6.1.0-56-cloud-amd64"));
    assert!(by_version("6.1.10") > by_version("6.1.9"));
    assert_eq!(by_version(""), Vec::<u64>::new());
}

/// The store reports on the dropping thread that the last pin of a removed snapshot's layer is
/// dropped. That is the thread that closes the snapshot and frees its RAM.
#[test]
fn a_snapshot_that_makes_room_is_closed_by_a_reaper_and_without_the_lock_of_the_list() {
    let folder = tempfile::tempdir().unwrap();
    let config = crate::fixture::config(folder.path());
    let store = Store::open(&config.state).unwrap();
    for (name, pages) in [("a", 0..3), ("b", 3..6)] {
        crate::fixture::snapshot(&store, "default", name, pages);
    }
    let (closed, closings) = mpsc::channel();
    let list: Arc<Mutex<Option<Arc<Mutex<Recent>>>>> = Arc::default();
    let seen = list.clone();
    store.when_garbage(move || {
        let free = lock(&seen).as_ref().is_some_and(|list| list.try_lock().is_ok());
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        closed.send((thread, free)).unwrap();
    });
    let node = Node { number: None, cpus: Vec::new(), memory_bytes: 1 << 30 };
    let reapers = Arc::new(Reapers::new(&[node], &Arc::default()).unwrap());
    let templates = TemplateCache::new(store, Pagers::new(&config)).freeing_on(reapers);
    *lock(&list) = Some(templates.open.clone());
    lock(&templates.open).resident_most = 10;
    let [a, b]: [Name; 2] = ["a", "b"].map(|name| name.parse().unwrap());
    let open = |name| Arc::new(OpenTemplate::whole(templates.store.open_snapshot(name).unwrap()));
    templates.keep(&a, &open(&a), 10);
    templates.store.remove_snapshot(&a).unwrap();
    templates.collect();
    assert_eq!(closings.try_recv(), Err(mpsc::TryRecvError::Empty), "it is open");
    templates.keep(&b, &open(&b), 10);
    let closing = closings.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(closing, ("reaper0".to_owned(), true));
    assert!(templates.known_snapshot(&b).is_some());
}

#[test]
fn a_wrong_name_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let pagers = Pagers::new(&crate::fixture::config(folder.path()));
    let cache = TemplateCache::new(Store::open(folder.path()).unwrap(), pagers);
    assert!(cache.open_snapshot(&"none".parse().unwrap()).is_err());
    assert!(lock(&cache.loading).is_empty());
}
