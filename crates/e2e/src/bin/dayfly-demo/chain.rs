//! Ten generations: a clone, a snapshot of the clone, a clone of that snapshot. Each generation
//! writes a file and keeps a value in Python's memory, and all later generations must have both.

use crate::clones::Demo;
use anyhow::{Context, Result, ensure};
use dayfly_api::agent::ExecSpec;
use dayfly_api::types::{CreateRequest, Lifetime, NetworkRequest, SnapshotRequest, Source};
use dayfly_cli::artefacts;
use dayfly_e2e::guest::{self, Kept};
use dayfly_units::Name;
use std::collections::BTreeMap;

const GENERATIONS: usize = 10;
/// The longest answer that a guest may give.
const ANSWER_BYTES: usize = 64 << 10;

/// Runs all generations from `snapshot`.
pub async fn run(demo: &mut Demo, snapshot: &Name) -> Result<()> {
    let mut parent = snapshot.clone();
    for generation in 1..=GENERATIONS {
        demo.steps.begin(format!("generation {generation} of {GENERATIONS}"));
        let name = demo.name(&format!("generation-{generation}"))?;
        demo.vms.push(name.to_string());
        let source = Source::Snapshot(parent.clone());
        let create = CreateRequest {
            source,
            name: Some(name.clone()),
            labels: BTreeMap::new(),
            forks: 0,
            lifetime: Lifetime::UNLIMITED,
            volumes: Vec::new(),
            limits: Default::default(),
            vcpus: None,
            network: NetworkRequest::default(),
        };
        demo.host.client.create(&create).await?;
        let vm = name.to_string();
        verify(demo, &vm, generation).await.with_context(|| format!("generation {generation}"))?;
        let (key, value) = mark(generation);
        output(demo, &vm, guest::script(r#"echo "$2" >"/root/$1""#, &[&key, &value])).await?;
        output(demo, &vm, guest::ask(&["keep", &key, &value])).await?;

        let child = Name::from(demo.name(&format!("chain-{generation}"))?);
        let stream =
            demo.host.client.snapshot_vm(&vm, &SnapshotRequest { name: child.clone() }).await?;
        demo.snapshots.push(child.clone());
        let stored = artefacts::watch_quietly(stream, &demo.steps).await?;
        ensure!(
            stored.parent.as_ref() == Some(&parent),
            "snapshot {child} says its parent is {:?}",
            stored.parent
        );
        parent = child;
        demo.remove_vms().await?;
    }
    println!(
        "{GENERATIONS} generations of clones of clones: \
         every file and every value in memory is there"
    );
    Ok(())
}

fn mark(generation: usize) -> (String, String) {
    (format!("generation{generation}"), guest::checksum(1000 + generation))
}

/// Checks that a VM has the files and values of all earlier generations, and no others.
async fn verify(demo: &Demo, vm: &str, generation: usize) -> Result<()> {
    let expected: BTreeMap<String, String> = (1..generation).map(mark).collect();
    let kept = output(demo, vm, guest::ask(&["kept"])).await?;
    let kept: Kept = serde_json::from_str(&kept).with_context(|| format!("the answer {kept:?}"))?;
    ensure!(kept.kept == expected, "memory: expected {expected:?}, got {:?}", kept.kept);
    let list =
        r#"cd /root; for f in generation*; do test -e "$f" && echo "$f $(cat "$f")"; done; true"#;
    let files = output(demo, vm, guest::script(list, &[])).await?;
    let files: BTreeMap<String, String> = files
        .lines()
        .filter_map(|l| l.split_once(' '))
        .map(|(k, v)| (k.into(), v.into()))
        .collect();
    ensure!(files == expected, "disk: expected {expected:?}, got {files:?}");
    Ok(())
}

/// The standard output of a program, which must end with code 0.
async fn output(demo: &Demo, vm: &str, spec: ExecSpec) -> Result<String> {
    let finished = demo.host.client.exec(vm, &spec).await?.finish(ANSWER_BYTES).await?;
    ensure!(
        finished.exit.code == Some(0),
        "{:?} ended with {:?}: {}",
        spec.argv,
        finished.exit,
        String::from_utf8_lossy(&finished.stderr)
    );
    String::from_utf8(finished.stdout).context("the program's output")
}
