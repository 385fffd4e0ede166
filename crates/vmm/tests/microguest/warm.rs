//! Warm VMMs: adopting a guest, and recording its working set.

use crate::harness::{Snapshot, Vmm};
use crate::room::{BINARY, MIB, Room};
use dayfly_microguest::{End, orders};
use dayfly_units::needs;
use dayfly_vmm::config::Shape;
use dayfly_vmm::control::{ClientError, Command, ExitReason};
use dayfly_vmm::memory::working_set;
use std::path::Path;

#[test]
fn a_warm_vmm_waits_for_a_guest_of_its_shape() {
    if !needs::kvm() {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(1, false);
    let binary = Path::new(BINARY);
    let mut warm = Vmm::warm(binary, &room.path("warm"), snapshot.shape, false);
    let mut client = warm.client();
    let refused = |result: Result<(), ClientError>| match result {
        Err(ClientError::Refused(message)) => message,
        other => panic!("{other:?}"),
    };
    assert!(client.status().unwrap().paused);
    for result in [client.pause(), client.resume(), client.save(&[])] {
        assert!(refused(result).contains("no guest yet"));
    }
    warm.adopt(&snapshot, orders(0x99, End::Not), false).unwrap();
    warm.wait_for("obeyed 99\n", 60);
    let no_disks = Snapshot { disks: Vec::new(), ..snapshot.clone() };
    let again = refused(warm.adopt(&no_disks, orders(0x9a, End::Not), false));
    assert!(again.contains("got a VM"), "{again}");
    // A warm VMM that waits can be ended.
    let mut idle = Vmm::warm(binary, &room.path("idle"), snapshot.shape, false);
    idle.client().quit().unwrap();
    assert_eq!(idle.wait_exit(10).0.reason, ExitReason::Quit);
    for (shape, expected) in [
        (Shape { vcpus: 2, ..snapshot.shape }, "vCPUs: expected 1 to 1"),
        (
            Shape { memory_bytes: 128 * MIB, ..snapshot.shape },
            "bytes of memory: expected 134217728",
        ),
        (Shape { disks: 2, ..snapshot.shape }, "disks: expected 2"),
    ] {
        let mut other = Vmm::warm(binary, &room.path(expected), shape, false);
        assert!(matches!(other.adopt(&snapshot, [0; 16], false), Err(ClientError::Gone)));
        let (record, _) = other.wait_exit(10);
        assert!(record.message.contains(expected), "{}", record.message);
    }
}

#[test]
fn what_a_recording_touched_is_laid_ready_in_the_clones_after_it() {
    if !needs::kvm() || !needs::root() {
        return;
    }
    let room = Room::new();
    let (_parent, snapshot) = room.snapshot(1, true);
    let binary = Path::new(BINARY);
    let mut recording = Vmm::recording_vmm(binary, &room.path("recording"), snapshot.shape, true);
    recording.adopt(&snapshot, orders(0x51, End::Not), false).unwrap();
    let console = recording.wait_for("obeyed 51\n", 60);
    assert!(
        console.contains("verify ok seed 7\n"),
        "it sees the pages as they were saved: {console}"
    );
    let record = room.path("working-set");
    let file = std::fs::File::create(&record).unwrap();
    let fds = [std::os::fd::AsFd::as_fd(&file)];
    recording.client().call(&Command::WorkingSet, &fds).unwrap();
    let working_set::Record { runs, order } =
        working_set::decode(&std::fs::read(&record).unwrap(), 64 * MIB).unwrap();
    let count =
        |written| -> u32 { runs.iter().filter(|r| r.written == written).map(|r| r.pages).sum() };
    // The guest verified 64 pages and filled them anew; it only read its code. It touched nothing
    // else of its 16,384 pages.
    assert!((64..100).contains(&count(true)) && (1..100).contains(&count(false)), "{runs:?}");
    assert_eq!(order.len(), runs.iter().map(|run| run.pages as usize).sum::<usize>(), "each once");
    // A saved recording is a snapshot like any other.
    let next = recording.save(&room.path("next"));
    let mut after = room.clone("after", &next, 0x52, End::PowerOff);
    assert_eq!(after.wait_exit(60).0.reason, ExitReason::PowerOff);
    assert!(after.console().contains("verify ok seed 51\n"), "{}", after.console());

    let ready = Snapshot { working_set: Some(record), ..snapshot.clone() };
    let mut clone = room.clone("clone", &ready, 0x53, End::PowerOff);
    assert_eq!(clone.wait_exit(60).0.reason, ExitReason::PowerOff);
    assert!(
        clone.console().contains("verify ok seed 7\n")
            && clone.console().contains("verify ok seed 53\n")
    );
    // A clone that is not recorded reports the pages that became its own: all that the recorded
    // clone wrote, and no page that is not written.
    let mut plain = room.clone("plain", &snapshot, 0x54, End::Not);
    plain.wait_for("obeyed 54\n", 60);
    let second = room.path("written");
    let file = std::fs::File::create(&second).unwrap();
    plain.client().call(&Command::WorkingSet, &[std::os::fd::AsFd::as_fd(&file)]).unwrap();
    let written = working_set::decode(&std::fs::read(&second).unwrap(), 64 * MIB).unwrap().runs;
    assert!(written.iter().all(|run| run.written), "{written:?}");
    let pages = |runs: &[working_set::Run]| -> std::collections::BTreeSet<u32> {
        runs.iter()
            .filter(|run| run.written)
            .flat_map(|run| run.first..run.first + run.pages)
            .collect()
    };
    assert!(pages(&written).is_superset(&pages(&runs)), "{runs:?} {written:?}");
    assert!(pages(&written).len() < 200, "{written:?}");
    // A warm VMM without a guest has no working set.
    let warm = Vmm::warm(binary, &room.path("no-guest"), snapshot.shape, true);
    let refused = warm.client().call(&Command::WorkingSet, &fds);
    assert!(matches!(&refused, Err(ClientError::Refused(_))), "{refused:?}");
}
