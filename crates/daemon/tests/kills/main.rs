//! The daemon is killed at each named step of each operation, and started again.
//!
//! ```text
//!  VM b is created ─▶ a failpoint is armed ─▶ operation on b ─▶ the daemon kills itself there
//!       ─▶ the next daemon: VM a, which lives through all kills, and b are checked
//! ```
//!
//! Programs, VMMs and pagers are the real ones, on bare `/dev/kvm`. The guests write to memory and
//! disk without end, and a clone checks that it has the content of one instant
//! ([`dayfly_microguest`], `grow=`). After each kill:
//! - `a` and `b` run on in the same processes, and their guests write. `b` may be gone if the
//!   operation was its removal.
//! - Both can be snapshotted, and a clone of the snapshot has the right content.
//! - The operation is wholly done or wholly undone.
//! - Nothing leaks: processes, run folders, layers, staged files.
//!
//! With DAYFLY_OLD=FOLDER, twenty VMs live on through upgrades from the programs in FOLDER, and
//! downgrades to them.
//!
//! `make long` runs all failpoints, and DAYFLY_KILLS=TEXT those whose names contain TEXT.

mod activation;
mod ahead;
mod check;
mod cpus;
mod groups;
mod guest;
mod living;
mod memory;
mod operation;
mod packer;
mod ports;
mod repeated;
mod space;
mod streams;
mod testbed;
mod upgrade;

use anyhow::{Context, Result};
use living::Living;
use operation::{Case, Operation, cases};
use std::collections::BTreeSet;
use std::time::Instant;
use testbed::Testbed;

/// The failpoints of every test run. `make long` has all.
const SOME: [&str; 5] = [
    "daemon.create.recorded",
    "daemon.fork.frozen",
    "daemon.save.frozen",
    "daemon.publish.committed",
    "daemon.remove.killed",
];

/// Kills one daemon, and checks what the next one has.
async fn kill(bed: &mut Testbed, a: &mut Living, case: &Case) -> Result<&'static str> {
    let b = Living::new(guest::create(bed, "b").await?, bed)?;
    operation::prepare(bed, &b, case.operation).await.context("before the operation")?;
    bed.arm(&case.armed())?;
    operation::run(bed, &b, case.operation).await?;
    bed.died()?;
    bed.start().await?;
    check::after(bed, a, b, case.operation).await
}

/// Kills the daemon in each case. A failure takes a new testbed, and the others still run.
async fn kill_all(cases: &[Case]) {
    let mut failures = Vec::new();
    let mut bed: Option<(Testbed, Living)> = None;
    for case in cases {
        let begun = Instant::now();
        let result = async {
            if bed.is_none() {
                let new = guest::testbed().await.context("making the snapshot of the test")?;
                let a = Living::new(guest::create(&new, "a").await?, &new)?;
                bed = Some((new, a));
            }
            let (bed, a) = bed.as_mut().context("made above")?;
            kill(bed, a, case).await
        };
        match result.await {
            Ok(outcome) => println!("{case}: {outcome}, {} ms", begun.elapsed().as_millis()),
            Err(error) => {
                println!("{case}: FAILED: {error:#}");
                let log = bed.take().map(|(bed, _)| bed.log()).unwrap_or_default();
                failures.push(format!("{case}: {error:#}\nthe daemons' log:\n{log}"));
            }
        }
    }
    if let Some((mut bed, _)) = bed
        && let Err(error) = bed.stop()
    {
        failures.push(format!("at the end: {error:#}"));
    }
    let points: BTreeSet<_> = cases.iter().map(|case| case.point).collect();
    println!("{} kills at {} failpoints", cases.len(), points.len());
    assert!(failures.is_empty(), "{} kills failed:\n{}", failures.len(), failures.join("\n\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_killed_at_some_steps_leaves_each_vm_and_operation_whole() {
    let cases: Vec<Case> = cases().into_iter().filter(|case| SOME.contains(&case.point)).collect();
    let first_of_each: Vec<Case> = SOME
        .iter()
        .map(|point| *cases.iter().find(|case| case.point == *point).expect(point))
        .collect();
    kill_all(&first_of_each).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "minutes: make long"]
async fn a_daemon_killed_at_every_step_leaves_each_vm_and_operation_whole() {
    let wanted = std::env::var("DAYFLY_KILLS").unwrap_or_default();
    let cases: Vec<Case> =
        cases().into_iter().filter(|case| case.to_string().contains(&wanted)).collect();
    assert!(!cases.is_empty(), "DAYFLY_KILLS={wanted}: no failpoint's name contains it");
    kill_all(&cases).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the programs of another version: DAYFLY_OLD=FOLDER"]
async fn twenty_vms_live_on_through_upgrades_and_downgrades() -> Result<()> {
    let old = std::env::var_os("DAYFLY_OLD").context("DAYFLY_OLD: expected a folder")?;
    upgrade::through(old.into()).await
}

#[test]
fn every_failpoint_has_a_case() {
    let killed = cases().into_iter().map(|case| case.point);
    let points: BTreeSet<_> = killed.chain(operation::ELSEWHERE.map(|(point, _)| point)).collect();
    let all: BTreeSet<_> = dayfly_daemon::failpoints::all().into_iter().collect();
    assert_eq!(points, all);
    let operations: BTreeSet<_> = cases().iter().map(|case| case.operation).collect();
    assert_eq!(operations, Operation::ALL.into());
}
