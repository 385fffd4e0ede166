//! All rules at once.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Result;

use crate::finding::Finding;
use crate::lists::{self, Lists};
use crate::rules::circles::{self, Circle};
use crate::rules::words::{self, Words};
use crate::rules::{columns, crates, files, folders, functions, pages, safety};
use crate::rust::arrows;
use crate::rust::modules::{Modules, Sources};
use crate::tree::Tree;

/// What the rules found.
#[derive(Debug, Default)]
pub struct Report {
    /// Findings, sorted by rule and place.
    pub findings: Vec<Finding>,
    /// Circles by crate.
    pub circles: BTreeMap<String, Vec<Circle>>,
}

/// Applies every rule to `tree`.
///
/// # Errors
/// A file of the tree is no Rust or no TOML, or a list of the rules is none.
pub fn all(tree: &Tree, sources: &Sources) -> Result<Report> {
    let lists = Lists::parse(tree.text(lists::PATH).unwrap_or_default())?;
    let words = Words::parse(tree.text(words::PATH).unwrap_or_default())?;
    let mut report = Report::default();
    for name in tree.crates() {
        let modules = Modules::of_crate(tree, sources, &name);
        let arrows = arrows::of_modules(&modules);
        report.findings.extend(folders::check(tree, &name, &modules, &arrows));
        report.circles.insert(name, circles::find(&arrows));
    }
    report.findings.extend(crates::check(tree)?);
    report.findings.extend(functions::check(sources));
    report.findings.extend(files::check(tree, &lists));
    report.findings.extend(columns::check(tree, &lists));
    report.findings.extend(words.check(tree, &lists)?);
    report.findings.extend(pages::check(tree));
    report.findings.extend(safety::check(tree));
    report.findings.sort();
    Ok(report)
}

/// Circles by crate. Arrows that only re-exports make may be left out.
#[must_use]
pub fn circles(
    tree: &Tree,
    sources: &Sources,
    with_reexports: bool,
) -> BTreeMap<String, Vec<Circle>> {
    let of_crate = |name: String| {
        let mut arrows = arrows::of_modules(&Modules::of_crate(tree, sources, &name));
        arrows.retain(|_, arrow| with_reexports || !arrow.reexport_only);
        (name, circles::find(&arrows))
    };
    tree.crates().into_iter().map(of_crate).collect()
}

impl fmt::Display for Circle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.cut.first().map_or(("", 1), |tie| (tie.from.as_str(), tie.arrow.line));
        write!(
            out,
            "{}:{}: circle: {} files import each other ({}), expected no circle; move what is \
             used in both ways below its users. Without these {} imports there is none:",
            first.0,
            first.1,
            self.files.len(),
            self.files.join(" "),
            self.cut.len(),
        )?;
        for tie in &self.cut {
            write!(out, "\n    {tie}")?;
        }
        Ok(())
    }
}
