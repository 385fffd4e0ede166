//! Machines with 2 to 4 emulated memory nodes, one after the other.
//!
//! Each machine is made for this and stopped at the end. A copy of this program runs
//! `dayfly-bench numa --here` in it, with the microguest and another daemon. Emulated nodes have no
//! distances, so this counts where pages lie, and times nothing.
//!
//! A page that another node's CPU freed, or that was not seen freed, makes this fail.

use crate::prelude::*;
use crate::stock::machine;
use std::collections::BTreeMap;

/// The copy: beside the programs that the machine carries.
const COPY: &str = "/usr/bin/dayfly-bench";
/// The copy's folder for results.
const OUT: &str = "/run/dayfly-bench";

/// Options about machines.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Memory nodes of the machines, one number for each
    #[arg(long, value_delimiter = ',', default_value = "2,3,4",
        value_parser = clap::value_parser!(u32).range(2..=4))]
    nodes: Vec<u32>,
    /// CPUs of the machine, all nodes together
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=16))]
    cpus: u32,
    /// The machine's folder [default: numa-machine beside the results]
    #[arg(long)]
    home: Option<PathBuf>,
}

impl Options {
    /// The machine's folder.
    pub fn home(&self, places: &Places) -> PathBuf {
        self.home.clone().unwrap_or_else(|| places.out.join("numa-machine"))
    }
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let what = format!("machines with {:?} memory nodes", options.nodes);
    let report = Report::begin(places, "numa", "", &what);
    let home = std::path::absolute(options.home(places)).context("the machine's folder")?;
    let mut machines = BTreeMap::new();
    for nodes in &options.nodes {
        let measured = measured(options.cpus, *nodes, &home).await;
        let stopped = machine::stop(&home);
        let figures = measured.with_context(|| format!("a machine with {nodes} memory nodes"))?;
        stopped?;
        machines.insert(*nodes, figures);
        summary(&machines)?;
    }
    let summary = summary(&machines)?;
    report.write(summary.clone())?;
    check(&summary)
}

/// The figures, as the copy wrote them. A machine that is left of a killed run may have other
/// nodes.
async fn measured(cpus: u32, nodes: u32, home: &Path) -> Result<Value> {
    let machine =
        machine::start(home, true, move |it| (it.cpus, it.numa_nodes) = (cpus, nodes)).await?;
    machine::copy_self(machine, COPY).await?;
    let words = [COPY, "numa", "--here", "--out", OUT];
    let status = machine::command(home, words)?.status().await?;
    if !status.success() {
        bail!("measuring in the machine failed; see above\n{}", machine::last_lines(home));
    }
    let figures = machine::command(home, ["cat", &format!("{OUT}/numa.json")])?;
    let figures = machine::output(home, figures, "reading the figures in the machine").await?;
    serde_json::from_slice(&figures).context("the figures from the machine")
}

/// `numa.json`: the worst of all machines, and below each number of nodes the figures of its
/// machine.
///
/// # Errors
/// A machine has other nodes than it should.
fn summary(machines: &BTreeMap<u32, Value>) -> Result<Value> {
    for (nodes, figures) in machines {
        let got = figures["nodes"].as_array().map_or(0, Vec::len);
        ensure!(
            u32::try_from(got) == Ok(*nodes),
            "expected {nodes} memory nodes in the machine, got {got}"
        );
    }
    let least = |key: &str| machines.values().filter_map(|it| it[key].as_f64()).reduce(f64::min);
    let sum = |key: &str| machines.values().filter_map(|it| it[key].as_u64()).sum::<u64>();
    Ok(json!({
        "own_share": least("own_share"), "home_share": least("home_share"),
        "unseen": sum("unseen"), "leaked": sum("leaked"), "machines": machines,
    }))
}

/// Whether every page was freed by a CPU of the same node, and nothing is left.
///
/// # Errors
/// What is not as it should be.
fn check(summary: &Value) -> Result<()> {
    let (share, unseen) = (&summary["own_share"], &summary["unseen"]);
    ensure!(
        share.as_f64() >= Some(1.0) && *unseen == 0,
        "freed by a CPU of the page's own node: expected every page, got a share of {share} and \
         {unseen} pages not seen"
    );
    ensure!(summary["leaked"] == 0, "{} processes were left over", summary["leaked"]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(nodes: u32, own_share: f64, unseen: u64, leaked: u64) -> (u32, Value) {
        let all: Vec<_> = (0..nodes).map(|node| json!({ "node": node, "cpus": [node] })).collect();
        let value = json!({
            "nodes": all, "own_share": own_share, "home_share": 1.0, "unseen": unseen,
            "leaked": leaked, "rounds": [1, 2],
        });
        (nodes, value)
    }

    fn of<const N: usize>(all: [(u32, Value); N]) -> Value {
        summary(&BTreeMap::from(all)).unwrap()
    }

    #[test]
    fn one_page_of_one_machine_that_another_node_freed_is_a_failure() {
        check(&of([figures(2, 1.0, 0, 0), figures(4, 1.0, 0, 0)])).unwrap();
        for bad in [figures(3, 0.999_999, 0, 0), figures(3, 1.0, 1, 0), figures(3, 1.0, 0, 1)] {
            let all = of([figures(2, 1.0, 0, 0), bad.clone(), figures(4, 1.0, 0, 0)]);
            assert!(check(&all).is_err(), "{bad:?}");
        }
        assert!(check(&of([])).is_err(), "nothing was measured");
    }

    #[test]
    fn a_machine_with_other_nodes_than_it_was_to_have_is_refused() {
        assert!(summary(&BTreeMap::from([(4, figures(2, 1.0, 0, 0).1)])).is_err());
    }

    #[test]
    fn what_a_machine_wrote_is_kept_whole() {
        let value = of([figures(3, 1.0, 0, 0)]);
        assert_eq!(value["machines"]["3"]["rounds"], json!([1, 2]));
        assert_eq!(value["machines"]["3"]["nodes"][2]["cpus"], json!([2]));
        assert_eq!((&value["own_share"], &value["unseen"]), (&json!(1.0), &json!(0)));
    }
}
