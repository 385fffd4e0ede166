//! Pages of RAM, by the node where they lay and the node of the CPU that freed them.

use super::frees::Free;
use super::pages::Spans;
use crate::prelude::*;
use dayfly_host::numa::Node;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// A VM, and its pages.
#[derive(Debug)]
pub struct Placed {
    /// Its VMM.
    pub pid: u32,
    /// The place of its node in the list of nodes.
    pub node: usize,
    /// Numbers of the pages of its RAM.
    pub pages: Vec<u64>,
}

/// Numbers of pages; nodes by their places in the list of nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// By the VM's node, then by the page's.
    allocated: Vec<Vec<u64>>,
    /// By the page's node, then by the freeing CPU's.
    freed: Vec<Vec<u64>>,
    /// By the page's node: those of which the kernel did not say that it freed them.
    unseen: Vec<u64>,
    /// By the thread that freed them.
    by: BTreeMap<String, u64>,
}

impl Counts {
    /// None yet.
    pub fn new(nodes: usize) -> Self {
        let square = vec![vec![0; nodes]; nodes];
        let (allocated, freed) = (square.clone(), square);
        Self { allocated, freed, unseen: vec![0; nodes], by: BTreeMap::new() }
    }

    /// What became of the pages of `vms`. A page that was freed, used again and freed again
    /// counts once.
    pub fn of(nodes: &[Node], spans: &Spans, vms: &[Placed], frees: &[Free]) -> Result<Self> {
        let mut counts = Self::new(nodes.len());
        let mut left = HashMap::new();
        for vm in vms {
            for page in &vm.pages {
                let number = spans.node(*page);
                let node = nodes.iter().position(|n| number.is_some() && n.number == number);
                let node = node.with_context(|| {
                    format!("page {page:#x}: expected a node with CPUs, got {number:?}")
                })?;
                counts.allocated[vm.node][node] += 1;
                left.insert(*page, node);
            }
        }
        for free in frees {
            let by = nodes.iter().position(|node| node.cpus.contains(&free.cpu));
            for page in free.page..free.page.saturating_add(free.pages) {
                if let Some(node) = left.remove(&page) {
                    let by = by.with_context(|| format!("CPU {}: of no node", free.cpu))?;
                    counts.freed[node][by] += 1;
                    *counts.by.entry(free.task.clone()).or_default() += 1;
                }
            }
        }
        left.values().for_each(|node| counts.unseen[*node] += 1);
        Ok(counts)
    }

    /// Adds others.
    pub fn add(&mut self, other: &Self) {
        let rows = self.allocated.iter_mut().zip(&other.allocated);
        for (row, more) in rows.chain(self.freed.iter_mut().zip(&other.freed)) {
            row.iter_mut().zip(more).for_each(|(count, more)| *count += more);
        }
        self.unseen.iter_mut().zip(&other.unseen).for_each(|(count, more)| *count += more);
        for (task, count) in &other.by {
            *self.by.entry(task.clone()).or_default() += count;
        }
    }

    /// Of all pages, those that a CPU of the same node freed.
    pub fn own_share(&self) -> f64 {
        share(&self.freed, self.unseen())
    }

    /// Of all pages, those that lay on their VM's node.
    pub fn home_share(&self) -> f64 {
        share(&self.allocated, 0)
    }

    /// Pages that were not seen freed.
    pub fn unseen(&self) -> u64 {
        self.unseen.iter().sum()
    }

    /// For people.
    pub fn table(&self, nodes: &[Node]) -> String {
        let name = |node: &Node| node.number.map_or_else(|| "?".to_owned(), |n| n.to_string());
        let names = |what: &str| {
            nodes.iter().map(|node| format!("{what} {}", name(node))).collect::<Vec<_>>()
        };
        let line = |first: &str, cells: Vec<String>| {
            let cells: String = cells.iter().map(|cell| format!("{cell:>18}")).collect();
            format!("  {first:<18}{cells}\n")
        };
        let heads = [names("freed by node"), vec!["not seen".into()], names("VMs of node")];
        let mut text = line("pages of RAM", heads.concat());
        for (place, node) in nodes.iter().enumerate() {
            let of_vms = self.allocated.iter().map(|row| &row[place]);
            let cells = self.freed[place].iter().chain([&self.unseen[place]]).chain(of_vms);
            let cells = cells.map(ToString::to_string).collect();
            text += &line(&format!("on node {}", name(node)), cells);
        }
        text + &format!("  {self} (wanted: 1, 0 and 1)\n")
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (own, home, unseen) = (self.own_share(), self.home_share(), self.unseen());
        write!(f, "freed by own node {own}, not seen {unseen}, on their VM's node {home}")
    }
}

/// What lies on the diagonal, by all; down to the millionth, so that one page of many shows.
fn share(square: &[Vec<u64>], others: u64) -> f64 {
    let own: u64 = square.iter().enumerate().map(|(place, row)| row[place]).sum();
    let all = square.iter().flatten().sum::<u64>() + others;
    if all == 0 { 0.0 } else { (float(own) / float(all) * 1e6).floor() / 1e6 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: u32, cpus: &[u32]) -> Node {
        Node { number: Some(number), cpus: cpus.to_vec(), memory_bytes: 1 }
    }

    #[test]
    fn every_page_is_counted_once_where_it_lay_and_where_it_was_freed() {
        let nodes = [node(0, &[0, 1]), node(2, &[2, 3])];
        let zones = "Node 0, zone A\n spanned 100\n start_pfn: 0\n\
                     Node 2, zone A\n spanned 100\n start_pfn: 100\n";
        let spans = Spans::parse(zones).unwrap();
        let vms = [
            Placed { pid: 1, node: 0, pages: vec![10, 11, 110] },
            Placed { pid: 2, node: 1, pages: vec![120, 121, 122] },
        ];
        let free = |cpu, page, pages| Free { cpu, task: format!("t{cpu}"), page, pages };
        // A foreign page; 10 again, after it was used again.
        let frees =
            [free(0, 50, 1), free(1, 10, 2), free(2, 10, 1), free(0, 110, 1), free(3, 120, 2)];
        let mut counts = Counts::of(&nodes, &spans, &vms, &frees).unwrap();
        assert_eq!(counts.allocated, [[2, 1], [0, 3]]);
        assert_eq!(counts.freed, [[2, 0], [1, 2]]);
        assert_eq!(
            (counts.unseen.clone(), counts.by["t1"], counts.by.get("t2")),
            (vec![0, 1], 2, None)
        );
        assert_eq!((counts.own_share(), counts.home_share()), (0.666_666, 0.833_333));
        let same = counts.clone();
        counts.add(&same);
        assert_eq!((counts.unseen(), counts.by["t3"], counts.own_share()), (2, 4, 0.666_666));
        assert!(counts.table(&nodes).contains("on node 2"), "{}", counts.table(&nodes));
        let nowhere = [Placed { pid: 1, node: 0, pages: vec![1000] }];
        assert!(Counts::of(&nodes, &spans, &nowhere, &[]).is_err());
    }
}
