//! What the machines gave, and whether it is what is wanted.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The figures of one machine: those that are judged, and the rest as they are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Of all pages of the VMs' RAM, how many a CPU of their own node freed: 1 is all of them.
    own_share: f64,
    /// … and how many lay on their VM's node.
    home_share: f64,
    /// Pages of which the kernel did not say that it freed them.
    unseen: u64,
    /// Processes left over.
    leaked: u64,
    /// Its nodes, with their CPUs.
    nodes: Vec<Value>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// `target/bench/numa.json`: the worst of all machines, and each machine by its number of nodes.
#[derive(Debug, Default, Serialize)]
pub struct Machines {
    own_share: Option<f64>,
    home_share: Option<f64>,
    unseen: u64,
    leaked: u64,
    machines: BTreeMap<u32, Figures>,
}

impl Machines {
    /// Adds those of a machine that was to have so many nodes.
    ///
    /// # Errors
    /// It had others: nothing was told apart then.
    pub fn add(&mut self, nodes: u32, figures: Figures) -> Result<()> {
        let got = figures.nodes.len();
        ensure!(u32::try_from(got) == Ok(nodes), "expected {nodes} memory nodes in the machine, got {got}");
        let least = |all: Option<f64>, one: f64| Some(all.map_or(one, |all| all.min(one)));
        self.own_share = least(self.own_share, figures.own_share);
        self.home_share = least(self.home_share, figures.home_share);
        self.unseen += figures.unseen;
        self.leaked += figures.leaked;
        self.machines.insert(nodes, figures);
        Ok(())
    }

    /// Whether every page was freed by a CPU of its own node, and nothing is left.
    ///
    /// # Errors
    /// What is not as it should be.
    pub fn judge(&self) -> Result<()> {
        let Self { own_share, unseen, leaked, .. } = self;
        ensure!(
            own_share.is_some_and(|share| share >= 1.0) && *unseen == 0,
            "freed by a CPU of the page's own node: expected every page, got a share of {} and {unseen} pages not seen",
            own_share.unwrap_or(0.0)
        );
        ensure!(*leaked == 0, "{leaked} processes were left over");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn figures(nodes: usize, own_share: f64, unseen: u64, leaked: u64) -> Figures {
        let nodes: Vec<_> = (0..nodes).map(|node| json!({ "node": node, "cpus": [node] })).collect();
        let value = json!({
            "nodes": nodes, "own_share": own_share, "home_share": 1, "unseen": unseen, "leaked": leaked,
            "rounds": [1, 2],
        });
        serde_json::from_value(value).unwrap()
    }

    fn of(all: &[(u32, Figures)]) -> Machines {
        let mut machines = Machines::default();
        for (nodes, figures) in all {
            machines.add(*nodes, figures.clone()).unwrap();
        }
        machines
    }

    #[test]
    fn one_page_of_one_machine_that_another_node_freed_is_a_failure() {
        of(&[(2, figures(2, 1.0, 0, 0)), (4, figures(4, 1.0, 0, 0))]).judge().unwrap();
        for bad in [figures(4, 0.999_999, 0, 0), figures(4, 1.0, 1, 0), figures(4, 1.0, 0, 1)] {
            assert!(of(&[(2, figures(2, 1.0, 0, 0)), (4, bad.clone())]).judge().is_err(), "{bad:?}");
            assert!(of(&[(4, bad.clone()), (2, figures(2, 1.0, 0, 0))]).judge().is_err(), "{bad:?}");
        }
        assert!(Machines::default().judge().is_err(), "nothing was measured");
    }

    #[test]
    fn a_machine_with_other_nodes_than_it_was_to_have_is_refused() {
        assert!(Machines::default().add(4, figures(2, 1.0, 0, 0)).is_err());
    }

    #[test]
    fn what_a_machine_wrote_is_kept_whole() {
        let value = serde_json::to_value(of(&[(3, figures(3, 1.0, 0, 0))])).unwrap();
        assert_eq!(value["machines"]["3"]["rounds"], json!([1, 2]));
        assert_eq!(value["machines"]["3"]["nodes"][2]["cpus"], json!([2]));
        assert_eq!((&value["own_share"], &value["unseen"]), (&json!(1.0), &json!(0)));
    }
}
