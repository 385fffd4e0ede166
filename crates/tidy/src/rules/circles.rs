//! No circle of files that import each other, in any crate.

use std::collections::BTreeMap;

use petgraph::algo::{is_cyclic_directed, tarjan_scc};
use petgraph::graph::{DiGraph, NodeIndex};

use crate::rust::arrows::{Arrow, Arrows};

/// Files that import each other in a circle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Circle {
    /// The files, sorted.
    pub files: Vec<String>,
    /// Arrows without which there is no circle, the one with the fewest names first.
    pub cut: Vec<Tie>,
}

/// An arrow that ties a circle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tie {
    /// The importing file.
    pub from: String,
    /// The imported file.
    pub to: String,
    /// Line and names.
    pub arrow: Arrow,
}

impl std::fmt::Display for Tie {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.arrow.names.iter().map(String::as_str).collect();
        let kind = if self.arrow.reexport_only { "re-exports" } else { "imports" };
        let Self { from, to, arrow } = self;
        write!(out, "{from}:{} {kind} {} of {to}", arrow.line, names.join(", "))
    }
}

/// Circles of one crate, the one with the shortest cut first.
#[must_use]
pub fn find(arrows: &Arrows) -> Vec<Circle> {
    let mut graph = DiGraph::<&str, ()>::new();
    let mut nodes = BTreeMap::<&str, NodeIndex>::new();
    for (from, to) in arrows.keys() {
        let from = *nodes.entry(from).or_insert_with(|| graph.add_node(from));
        let to = *nodes.entry(to).or_insert_with(|| graph.add_node(to));
        graph.add_edge(from, to, ());
    }
    let components = tarjan_scc(&graph).into_iter().filter(|component| component.len() > 1);
    let mut circles: Vec<Circle> = components
        .map(|component| {
            let mut files: Vec<String> =
                component.iter().map(|node| graph[*node].to_owned()).collect();
            files.sort();
            let cut = cut(&files, arrows);
            Circle { files, cut }
        })
        .collect();
    circles.sort_by(|a, b| (a.cut.len(), &a.files).cmp(&(b.cut.len(), &b.files)));
    circles
}

/// A small set of arrows without which `files` are in no circle. No arrow of the set can be left
/// out; a smaller set of other arrows may exist, because the least one is too hard to find.
fn cut(files: &[String], arrows: &Arrows) -> Vec<Tie> {
    let inside = |name: &String| files.binary_search(name).ok();
    let mut edges: Vec<(usize, usize, &Arrow)> = arrows
        .iter()
        .filter_map(|((from, to), arrow)| Some((inside(from)?, inside(to)?, arrow)))
        .collect();
    // Arrows of many names are kept first, so that those that are cut have few.
    edges.sort_by_key(|(from, to, arrow)| (std::cmp::Reverse(arrow.names.len()), *from, *to));
    let order = order(files.len(), &edges);
    let (kept, against): (Vec<_>, Vec<_>) =
        edges.into_iter().partition(|(from, to, _)| order[*from] < order[*to]);
    let mut graph = DiGraph::<(), ()>::new();
    let nodes: Vec<NodeIndex> = files.iter().map(|_| graph.add_node(())).collect();
    for (from, to, _) in kept {
        graph.add_edge(nodes[from], nodes[to], ());
    }
    let mut cut = Vec::new();
    for (from, to, arrow) in against {
        let edge = graph.add_edge(nodes[from], nodes[to], ());
        if is_cyclic_directed(&graph) {
            graph.remove_edge(edge);
            cut.push(Tie {
                from: files[from].clone(),
                to: files[to].clone(),
                arrow: arrow.clone(),
            });
        }
    }
    cut.sort_by_key(|tie| (tie.arrow.names.len(), tie.from.clone(), tie.to.clone()));
    cut
}

/// Place of each node in an order that few arrows go against (Eades, Lin and Smyth 1993: nodes
/// without successors go to the end, without predecessors to the start, then the node whose
/// names go out most).
fn order(count: usize, edges: &[(usize, usize, &Arrow)]) -> Vec<usize> {
    let mut left: Vec<usize> = (0..count).collect();
    let (mut start, mut end) = (Vec::new(), Vec::new());
    while !left.is_empty() {
        let weights = |node: usize| {
            let sum = |own: fn(&(usize, usize, &Arrow)) -> (usize, usize)| -> i64 {
                edges
                    .iter()
                    .filter(|edge| own(edge).0 == node && left.contains(&own(edge).1))
                    .map(|(.., arrow)| i64::try_from(arrow.names.len()).unwrap_or(i64::MAX))
                    .sum()
            };
            (sum(|(from, to, _)| (*from, *to)), sum(|(from, to, _)| (*to, *from)))
        };
        let weighed: Vec<(usize, (i64, i64))> =
            left.iter().map(|node| (*node, weights(*node))).collect();
        let sink = weighed.iter().find(|(_, (out, _))| *out == 0);
        let source = weighed.iter().find(|(_, (_, into))| *into == 0);
        let chosen = if let Some((node, _)) = sink {
            end.push(*node);
            *node
        } else {
            let most = weighed.iter().max_by_key(|(node, (out, into))| {
                (out.saturating_sub(*into), std::cmp::Reverse(*node))
            });
            let Some((node, _)) = source.or(most) else { break };
            start.push(*node);
            *node
        };
        left.retain(|node| *node != chosen);
    }
    let mut order = vec![0; count];
    for (place, node) in start.into_iter().chain(end.into_iter().rev()).enumerate() {
        order[node] = place;
    }
    order
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::find;
    use crate::rust::arrows::{Arrow, Arrows};

    fn arrows(list: &[(&str, &str, usize)]) -> Arrows {
        let arrow = |names: usize| Arrow {
            line: 1,
            names: (0..names).map(|name| name.to_string()).collect::<BTreeSet<_>>(),
            reexport_only: false,
        };
        list.iter()
            .map(|(from, to, names)| (((*from).to_owned(), (*to).to_owned()), arrow(*names)))
            .collect()
    }

    #[test]
    fn a_tree_has_no_circle() {
        assert!(
            find(&arrows(&[("a", "b", 1), ("a", "c", 1), ("b", "d", 1), ("c", "d", 1)])).is_empty()
        );
    }

    #[test]
    fn circles_are_found_and_the_shortest_cut_comes_first() {
        let circles = find(&arrows(&[
            ("p", "q", 2),
            ("q", "p", 1),
            ("p", "r", 2),
            ("r", "p", 1),
            ("x", "y", 5),
            ("y", "z", 4),
            ("z", "x", 1),
            ("x", "p", 1),
        ]));
        assert_eq!(circles.len(), 2);
        assert_eq!(circles[0].files, ["x", "y", "z"]);
        assert_eq!(circles[0].cut.len(), 1);
        assert_eq!(circles[0].cut[0].to_string(), "z:1 imports 0 of x");
        assert_eq!(circles[1].files, ["p", "q", "r"]);
        let cut: Vec<String> = circles[1].cut.iter().map(|tie| tie.from.clone()).collect();
        assert_eq!(cut, ["q", "r"]);
    }
}
