//! Which node's CPUs free a VM's memory when it dies (Swift Birth and Quick Death, section 5 and
//! table 1).
//!
//! The paper shows what freeing costs from afar; emulated nodes have no distances, so this counts.
//! VMs touch their memory; the numbers of their RAM's pages are learnt from their pagemaps; the VMs
//! die while the kernel traces every page that it frees and on which CPU ([`frees`]). Each page
//! of RAM is then looked up: where it lay, and where its freeing CPU was. A VM's own node is the
//! one on whose CPUs its VMM may run.
//!
//! Without `--here` this measures the host, if it has several nodes, and then machines that have
//! some ([`machines`]).

mod count;
mod frees;
mod machines;
mod pages;

use crate::prelude::*;
use crate::proc;
use crate::testbed::{Guest, Testbed, host::MIB};
use count::{Counts, Placed};
use dayfly_host::numa::{self, Node};
use dayfly_host::process::{Process, ProcessId};
use frees::Trace;
use pages::Spans;

/// What VMs touch, and how many there are. The last has large pages.
const CASES: [(u64, usize); 2] = [(64, 8), (320, 4)];
const WITHIN: Duration = Duration::from_secs(180);

/// How VMs die.
#[derive(Debug, Clone, Copy)]
enum Death {
    /// Removed, all at once.
    Together,
    /// Removed, one after another.
    OneByOne,
    /// The VMMs are killed from outside: only they themselves free their memory.
    Killed,
}

const DEATHS: [(Death, &str); 3] = [
    (Death::Together, "removed at once"),
    (Death::OneByOne, "removed one by one"),
    (Death::Killed, "killed from outside"),
];

/// Options of `numa`.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only measure this host
    #[arg(long)]
    here: bool,
    #[command(flatten)]
    machines: machines::Options,
}

impl Options {
    /// Where the machine is.
    pub fn home(&self, places: &Places) -> PathBuf {
        self.machines.home(places)
    }
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    if options.here {
        return measure("numa", places).await;
    }
    measure("numa-host", places).await?;
    machines::run(&options.machines, places).await
}

/// Measures this host.
async fn measure(scenario: &'static str, places: &Places) -> Result<()> {
    let nodes = numa::nodes()?;
    let what = format!("memory nodes with CPUs: {}", nodes.len());
    let report = Report::begin(places, scenario, "", &what);
    if nodes.len() < 2 {
        println!("  nothing to tell apart here");
        return Ok(());
    }
    let (spans, trace) = (Spans::read()?, Trace::new()?);
    let guests =
        CASES.into_iter().map(|(mib, _)| Guest::touching(mib)).collect::<Result<Vec<_>>>()?;
    let mut testbed = Testbed::baked(places, &guests).await?;
    testbed.start(&[]).await?;
    let mut all = Counts::new(nodes.len());
    let mut rounds = Vec::new();
    for ((mib, count), guest) in CASES.into_iter().zip(&guests) {
        for (death, how) in DEATHS {
            let ids = testbed.at_once(&guest.name, count).await?.ids;
            let mut vms = Vec::with_capacity(count);
            for id in &ids {
                testbed.console_ends(*id, "done\n", WITHIN).await?;
                vms.push(placed(&testbed, *id, guest, mib * MIB / PAGE_SIZE, &nodes).await?);
            }
            trace.begin()?;
            die(&testbed, &ids, &vms, death).await?;
            let counts = Counts::of(&nodes, &spans, &vms, &trace.end()?)?;
            let by_node: Vec<usize> = (0..nodes.len())
                .map(|node| vms.iter().filter(|vm| vm.node == node).count())
                .collect();
            let case = format!("{mib} MiB, {how}");
            println!("  {case:<30}{count} VMs by node {by_node:?}; {counts}");
            if matches!(death, Death::Killed) {
                testbed.remove_all(&ids).await?;
            }
            all.add(&counts);
            rounds.push(json!({
                "touched_mib": mib, "death": how, "vms_by_node": by_node, "pages": counts,
            }));
        }
    }
    print!("{}", all.table(&nodes));
    let cpus = nodes.iter().map(|node| json!({ "node": node.number, "cpus": node.cpus }));
    let figures = json!({
        "nodes": cpus.collect::<Vec<_>>(), "own_share": all.own_share(),
        "home_share": all.home_share(), "unseen": all.unseen(), "all": all, "rounds": rounds,
    });
    testbed.finish(&report, figures)
}

/// Where a VM is, and of which pages its RAM is made: of `wanted` at least.
async fn placed(
    testbed: &Testbed,
    id: VmId,
    guest: &Guest,
    wanted: u64,
    nodes: &[Node],
) -> Result<Placed> {
    let pid = testbed.client.vm(&id.to_string()).await?.pid;
    let pid = pid.with_context(|| format!("VM {id}: no process"))?;
    let allowed = proc::field(&format!("/proc/{pid}/status"), "Cpus_allowed_list")?;
    let cpus = numa::cpu_list(&allowed).context("Cpus_allowed_list of a VMM")?;
    let node = nodes.iter().position(|node| cpus.iter().all(|cpu| node.cpus.contains(cpu)));
    let node = node.with_context(|| format!("VM {id}: its CPUs {cpus:?} are of several nodes"))?;
    let pages = pages::guest_pages(pid, guest.memory_bytes)?;
    ensure!(pages.len() as u64 >= wanted, "VM {id}: expected {wanted} pages, got {}", pages.len());
    Ok(Placed { pid, node, pages })
}

/// Ends VMs, and waits until their processes are gone.
async fn die(testbed: &Testbed, ids: &[VmId], vms: &[Placed], death: Death) -> Result<()> {
    let process = |vm: &Placed| -> Result<Process> {
        let id = ProcessId::of(vm.pid)?.context("a VMM that runs")?;
        Process::open(id)?.context("a VMM that runs")
    };
    let processes: Vec<Process> = vms.iter().map(process).collect::<Result<_>>()?;
    match death {
        Death::Together => drop(testbed.remove_all(ids).await?),
        Death::OneByOne => {
            for id in ids {
                testbed.remove(*id).await?;
            }
        }
        Death::Killed => processes.iter().try_for_each(Process::kill)?,
    }
    for process in &processes {
        ensure!(process.wait(Some(WITHIN))?.is_some(), "process {} does not end", process.id().pid);
    }
    Ok(())
}
