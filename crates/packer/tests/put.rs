//! A real packer stores RAM for a store, and is killed at each step.

#![expect(clippy::unwrap_used, reason = "in a test it is how a failure shows")]

mod fixture;

use dayfly_store::PagesError;
use dayfly_units::needs;
use fixture::{Step, Worker, memory, put, store};

#[test]
fn a_packer_stores_the_same_as_this_process() {
    let memory = memory(3 << 20);
    let (_one, here) = store();
    let expected = put(&here, &memory, None).unwrap();
    let (_two, there) = store();
    let mut worker = Worker::new();
    let got = put(&there, &memory, Some(&mut worker)).unwrap();
    assert_eq!(got.table, expected.table);
    assert_eq!(got.stats, expected.stats);
    assert!(worker.is_gone());
}

#[test]
fn a_packer_that_is_killed_at_any_step_fails_the_put_and_leaves_nothing() {
    let memory = memory(40 << 20);
    for step in [Step::Begun, Step::Classified, Step::Asked, Step::Written] {
        let (folder, store) = store();
        let mut worker = Worker::new();
        worker.killed_at = Some(step);
        match put(&store, &memory, Some(&mut worker)) {
            Err(PagesError::Work(e)) => println!("{step:?}: {e}"),
            other => panic!("{step:?}: {other:?}"),
        }
        assert!(worker.is_gone());
        let left = |of: &str| std::fs::read_dir(folder.path().join(of)).unwrap().count();
        assert_eq!((left("pages/one"), left("staging")), (0, 0), "{step:?}");
        let again = put(&store, &memory, Some(&mut Worker::new())).unwrap();
        assert_eq!(again.stats.new_pages, 10_240, "{step:?}");
    }
}

#[test]
fn a_packer_ends_with_its_daemon() {
    let worker = Worker::new();
    assert!(!worker.is_gone());
    assert!(worker.ends_without_socket());
}

#[test]
fn a_packer_that_does_not_end_by_itself_is_killed_with_the_thread_that_started_it() {
    let started = std::thread::spawn(|| {
        let worker = Worker::new().jailed();
        worker.stop();
        worker
    });
    // Its socket is still open.
    let worker = started.join().unwrap();
    assert_eq!(worker.killed_by(), Some(libc::SIGKILL));
}

#[test]
fn a_packer_is_in_the_jail_of_the_document() {
    let worker = Worker::new().jailed();
    let (status, limits) = (worker.proc("status"), worker.proc("limits"));
    let line = |of: &str, begin: &str| -> Vec<String> {
        let line = of.lines().find_map(|line| line.strip_prefix(begin));
        line.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
    };
    for (field, expected) in [
        ("NoNewPrivs:", "1"),
        ("Seccomp:", "2"),
        ("CapEff:", "0000000000000000"),
        ("CapPrm:", "0000000000000000"),
        ("CapInh:", "0000000000000000"),
    ] {
        assert_eq!(line(&status, field), [expected], "{field}");
    }
    for (limit, most) in [
        ("Max core file size", 0),
        ("Max locked memory", 0),
        ("Max open files", 4096),
        ("Max file size", 80 << 20),
        ("Max address space", 16_u64 << 30),
    ] {
        let got: Vec<u64> =
            line(&limits, limit).iter().map_while(|word| word.parse().ok()).collect();
        // The hard limit of the test's process may be lower.
        assert!(got.len() == 2 && got.iter().all(|got| *got <= most), "{limit}: {got:?}");
    }
    assert_eq!(worker.proc("oom_score_adj").trim(), "1000");
    if needs::root() {
        let user = dayfly_packer::jail::USER.to_string();
        assert_eq!(line(&status, "Uid:"), [user.as_str(); 4]);
        assert_eq!(line(&status, "Gid:"), [user.as_str(); 4]);
        assert!(line(&status, "Groups:").is_empty(), "{status}");
        let root = std::fs::read_link(worker.path("root")).unwrap();
        assert!(root.ends_with("fdinfo"), "{}", root.display());
    }
}

/// The most memory of a child that has ended, in KiB.
fn children_kib() -> i64 {
    usage(libc::RUSAGE_CHILDREN).ru_maxrss
}

fn usage(of: libc::c_int) -> libc::rusage {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills the structure, of which zeroes are a value.
    unsafe {
        libc::getrusage(of, usage.as_mut_ptr());
        usage.assume_init()
    }
}

/// CPU time of this process, or of children that have ended, in microseconds.
fn cpu_us(of: libc::c_int) -> i64 {
    let usage = usage(of);
    let us = |time: libc::timeval| time.tv_sec * 1_000_000 + time.tv_usec;
    us(usage.ru_utime) + us(usage.ru_stime)
}

#[test]
#[ignore = "a measurement: DAYFLY_MEASURE_STATE names a folder of a disk"]
fn what_a_gibibyte_costs() {
    let memory = memory(1 << 30);
    for turn in 0..3 {
        for packed in [true, false] {
            let (_folder, store) = store();
            // The namespace is opened, which a daemon does once.
            drop(store.tenant(&"one".parse().unwrap()).unwrap());
            let mut worker = packed.then(Worker::new);
            let before = (cpu_us(libc::RUSAGE_SELF), cpu_us(libc::RUSAGE_CHILDREN));
            let begun = std::time::Instant::now();
            drop(put(&store, &memory, worker.as_mut()).unwrap());
            let ms = begun.elapsed().as_millis();
            let here = cpu_us(libc::RUSAGE_SELF) - before.0;
            let packer = cpu_us(libc::RUSAGE_CHILDREN) - before.1;
            let kib = children_kib();
            println!("{turn}, {packed}: here {here} us, packer {packer} us, {kib} KiB, {ms} ms");
        }
    }
}
