//! Which node's CPUs free a VM's memory when it dies (Swift Birth and Quick Death, section 5 and table 1).
//!
//! The paper shows what freeing costs from afar; emulated nodes have no distances, so this counts. VMs touch their memory; the numbers
//! of their RAM's pages are learnt from their pagemaps; the VMs die while the kernel tells of every page that it frees and on which
//! CPU ([`frees`]). Each page of RAM is then looked up: where it lay, and where its freeing CPU was. A VM's own node is the one on
//! whose CPUs its VMM may run.
//!
//! It takes a host with several nodes: `make bench BENCH=numa` runs it in a machine that has them, and on this host if it has.

mod count;
mod frees;
mod pages;

use crate::common::{self, MIB};
use crate::room::Room;
use crate::scale::{at_once, remove_all};
use anyhow::{Context, Result, bail, ensure};
use count::{Counts, Placed};
use dayfly_host::numa::{self, Node};
use dayfly_host::process::{Process, ProcessId};
use dayfly_units::{Name, PAGE_SIZE, VmId};
use dayfly_vmm::arch::layout;
use frees::Trace;
use pages::Spans;
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// What VMs touch, and how many there are. The last has large pages.
const CASES: [(u64, usize); 2] = [(64, 8), (320, 4)];
/// A guest's RAM besides what it touches.
const REST: u64 = 64 * MIB;
const WITHIN: Duration = Duration::from_secs(180);

/// How VMs die.
#[derive(Debug, Clone, Copy)]
enum Death {
    /// Removed, all at once.
    Together,
    /// Removed, one after another.
    OneByOne,
    /// The VMMs are killed from outside: nobody but themselves frees their memory.
    Killed,
}

impl Death {
    const ALL: [Self; 3] = [Self::Together, Self::OneByOne, Self::Killed];

    const fn name(self) -> &'static str {
        match self {
            Self::Together => "removed at once",
            Self::OneByOne => "removed one by one",
            Self::Killed => "killed from outside",
        }
    }
}

/// Runs it.
pub async fn run(programs: &Path, out: &Path) -> Result<()> {
    let nodes = numa::nodes()?;
    println!("numa: {} with memory and CPUs; load {}", of(nodes.len(), "node"), common::load());
    if nodes.len() < 2 {
        println!("  nothing to tell apart here");
        return Ok(());
    }
    let (spans, trace) = (Spans::read()?, Trace::new()?);
    let mut room = Room::new(programs)?;
    let name = |mib: u64| format!("touch-{mib}").parse::<Name>();
    for (mib, _) in CASES {
        let pages = mib * MIB / PAGE_SIZE;
        let words = format!("until={:x} say=b touch={pages:x}", layout::GENERATION.0);
        room.bake(&name(mib)?, mib * MIB + REST, &words)?;
    }
    room.start().await?;
    let mut all = Counts::new(nodes.len());
    let mut rounds = Vec::new();
    for (mib, count) in CASES {
        for death in Death::ALL {
            let ids = at_once(&room, &name(mib)?, count).await?.ids;
            let mut vms = Vec::with_capacity(count);
            for id in &ids {
                touched(&room, *id).await?;
                vms.push(placed(&room, *id, mib * MIB, &nodes).await?);
            }
            trace.begin()?;
            die(&room, &ids, &vms, death).await?;
            let counts = Counts::of(&nodes, &spans, &vms, &trace.end()?)?;
            let by_node = count_by_node(&vms, nodes.len());
            println!(
                "  {:<30}{} VMs by node {by_node:?}; {counts}",
                format!("{mib} MiB, {}", death.name()),
                count
            );
            if matches!(death, Death::Killed) {
                remove_all(&room, &ids).await?;
            }
            rounds.push(json!({
                "touched_mib": mib, "death": death.name(), "vms_by_node": by_node, "pages": counts,
            }));
            all.add(&counts);
        }
    }
    let leaked = room.end()?;
    print!("{}", all.table(&nodes));
    println!("  leaked processes: {leaked}");
    let cpus: Vec<_> = nodes.iter().map(|node| json!({ "node": node.number, "cpus": node.cpus })).collect();
    let value = json!({
        "nodes": cpus, "own_share": all.own_share(), "home_share": all.home_share(), "unseen": all.unseen(),
        "all": all, "rounds": rounds, "load": common::load(), "leaked": leaked,
    });
    common::write(out, "numa.json", &value)
}

fn of(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn count_by_node(vms: &[Placed], nodes: usize) -> Vec<usize> {
    (0..nodes).map(|node| vms.iter().filter(|vm| vm.node == node).count()).collect()
}

/// Waits until a guest has touched its memory.
async fn touched(room: &Room, id: VmId) -> Result<()> {
    let begun = Instant::now();
    while !room.console(id).ends_with("done\n") {
        if begun.elapsed() > WITHIN {
            bail!("VM {id}: its guest has not touched its memory; console {:?}", room.console(id));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Where a VM is, and of which pages its RAM is made.
async fn placed(room: &Room, id: VmId, touched: u64, nodes: &[Node]) -> Result<Placed> {
    let pid = room.client.vm(&id.to_string()).await?.pid.with_context(|| format!("VM {id}: no process"))?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("a VMM's status")?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let cpus = allowed.and_then(|list| numa::cpu_list(list.trim())).context("Cpus_allowed_list of a VMM")?;
    let node = nodes.iter().position(|node| cpus.iter().all(|cpu| node.cpus.contains(cpu)));
    let node = node.with_context(|| format!("VM {id}: its CPUs {cpus:?} are of several nodes"))?;
    let pages = pages::guest_pages(pid, touched + REST)?;
    let wanted = touched / PAGE_SIZE;
    ensure!(pages.len() as u64 >= wanted, "VM {id}: expected {wanted} pages, got {}", pages.len());
    Ok(Placed { pid, node, pages })
}

/// Ends VMs, and waits until their processes are gone.
async fn die(room: &Room, ids: &[VmId], vms: &[Placed], death: Death) -> Result<()> {
    let process = |vm: &Placed| -> Result<Process> {
        let id = ProcessId::of(vm.pid)?.context("a VMM that runs")?;
        Process::open(id)?.context("a VMM that runs")
    };
    let processes: Vec<Process> = vms.iter().map(process).collect::<Result<_>>()?;
    match death {
        Death::Together => drop(remove_all(room, ids).await?),
        Death::OneByOne => {
            for id in ids {
                room.remove(*id).await?;
            }
        }
        Death::Killed => processes.iter().try_for_each(Process::kill)?,
    }
    for process in &processes {
        ensure!(process.wait(Some(WITHIN))?.is_some(), "process {} does not end", process.id().pid);
    }
    Ok(())
}
