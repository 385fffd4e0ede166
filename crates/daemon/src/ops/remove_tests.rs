use super::*;
use crate::model::facts::Facts;
use crate::templates::pagers::Pagers;
use dayfly_host::process::ProcessId;

/// The store reports on the dropping thread that the last pin of a removed snapshot's layer is
/// dropped.
#[tokio::test]
async fn what_a_vm_had_is_dropped_by_a_reaper_before_the_vm_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let config = crate::fixture::config(folder.path());
    std::fs::create_dir_all(config.vms()).unwrap();
    let store = dayfly_store::Store::open(&config.state).unwrap();
    crate::fixture::snapshot(&store, "default", "s", 0..3);
    let (dropped, drops) = std::sync::mpsc::channel();
    store.when_garbage(move || {
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        dropped.send(thread).unwrap();
    });
    let open = store.open_snapshot(&"s".parse().unwrap()).unwrap();
    let (images, layers) = (open.manifest.images(), open.manifest.layer_ids());
    let pin = store.pin("VM test", &images, &layers, &[]).unwrap();
    drop(open);
    store.remove_snapshot(&"s".parse().unwrap()).unwrap();
    assert_eq!(store.gc().unwrap().layers, [], "the VM depends on it");
    let templates = TemplateCache::new(store, Pagers::new(&config));
    let daemon = crate::fixture::daemon(config, templates, crate::fixture::nodes());
    let vm = daemon.registry.reserve(
        &daemon.config,
        None,
        // A VM that stays in the list keeps its layers, to start again.
        Facts { auto_remove: true, ..crate::fixture::facts() },
        crate::fixture::memory(),
        None,
    );
    let vm = vm.unwrap();
    vm.keep_pinned(pin);
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let process = ProcessId::of(child.id()).unwrap().unwrap();
    let process = Arc::new(Process::open(process).unwrap().unwrap());
    vm.hold(process.clone());
    watch(&daemon, vm.clone(), process.clone());
    process.kill().unwrap();
    child.wait().unwrap();
    vm.wait_gone().await;
    assert_eq!(drops.try_recv().as_deref(), Ok("reaper0"));
}

#[tokio::test]
async fn a_vm_is_freed_on_its_own_cpus_for_its_own_bill() {
    let host = dayfly_host::cpus::online().unwrap();
    assert!(host.len() > 1, "it needs two CPUs");
    let folder = tempfile::tempdir().unwrap();
    let config = crate::fixture::config(folder.path());
    std::fs::create_dir_all(config.vms()).unwrap();
    let store = dayfly_store::Store::open(&config.state).unwrap();
    let templates = TemplateCache::new(store, Pagers::new(&config));
    let daemon = crate::fixture::daemon(config, templates, crate::fixture::nodes());
    let booked: dayfly_host::cpus::CpuList = host.iter().skip(1).take(1).collect();
    let none = dayfly_host::cpus::CpuList::default();
    let (normal, first) = (libc::SCHED_OTHER, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK);
    let first = if rustix::process::geteuid().is_root() { first } else { normal };
    for (own, is_short, policy) in
        [(booked, false, normal), (none.clone(), false, normal), (none, true, first)]
    {
        let (facts, memory) = (crate::fixture::facts(), crate::fixture::memory());
        let vm = daemon.registry.reserve(&daemon.config, None, facts, memory, None).unwrap();
        vm.update(|live| live.cpus = own.clone());
        let (done, seen) = oneshot::channel();
        let work = move || {
            let allowed = rustix::thread::sched_getaffinity(None).unwrap();
            let cpus = (0..1024).filter(|cpu| allowed.is_set(*cpu as usize));
            // SAFETY: sched_getscheduler(2) of the calling thread.
            let policy = unsafe { libc::sched_getscheduler(0) };
            done.send((cpus.collect(), policy)).unwrap();
            // Something to bill.
            let begun = dayfly_host::cpu_time::own();
            while dayfly_host::cpu_time::own() < begun + Duration::from_millis(2) {}
            true
        };
        freed(&daemon, &vm, is_short, || {}, work).await.unwrap();
        let expected = if own.is_empty() { host.clone() } else { own };
        assert_eq!(seen.await.unwrap(), (expected, policy));
        let cpu = Some(dayfly_host::groups::CpuTime::default());
        let usage = dayfly_host::groups::Usage { cpu, ..Default::default() };
        let bill = vm.last_bill(0, Some(&usage), Some(dayfly_vmm::meter::Metered::default()));
        assert!(bill.usage.unwrap().parts.unwrap().destruction_us >= 2000);
    }
}

#[tokio::test]
async fn a_slot_is_free_when_no_process_of_its_vm_s_streams_has_its_user() {
    let folder = tempfile::tempdir().unwrap();
    let config = crate::fixture::config(folder.path());
    std::fs::create_dir_all(config.vms()).unwrap();
    let store = dayfly_store::Store::open(&config.state).unwrap();
    let templates = TemplateCache::new(store, Pagers::new(&config));
    let daemon = crate::fixture::daemon(config, templates, crate::fixture::nodes());
    let facts = Facts { auto_remove: true, ..crate::fixture::facts() };
    let memory = crate::fixture::memory();
    let vm = daemon.registry.reserve(&daemon.config, None, facts, memory, None).unwrap();
    let started = || std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let (mut vmm, mut of_streams) = (started(), started());
    let open = |child: &std::process::Child| {
        let id = ProcessId::of(child.id()).unwrap().unwrap();
        Process::open(id).unwrap().unwrap()
    };
    let process = Arc::new(open(&vmm));
    vm.hold(process.clone());
    vm.streams.adopt(open(&of_streams), Arc::default(), ());
    watch(&daemon, vm.clone(), process.clone());
    process.kill().unwrap();
    vmm.wait().unwrap();
    let released = async {
        while vm.holds_slot() {
            tokio::task::spawn_blocking(std::thread::yield_now).await.unwrap();
        }
    };
    let released = timeout(Duration::from_secs(120), released).await;
    let has_ended = of_streams.try_wait().unwrap().is_some();
    let _ = of_streams.kill();
    of_streams.wait().unwrap();
    assert!(has_ended, "another VM could have the user of a process of this one");
    released.expect("the slot is not released");
}
