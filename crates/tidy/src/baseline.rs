//! The ratchet: what broke a rule already is counted in `baseline.toml`, and the counts only
//! fall. A file with more findings than its count fails; one with fewer fails too, until the
//! count is lowered.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::check::Report;
use crate::finding::Rule;

/// Path of the baseline in the tree.
pub const PATH: &str = "crates/tidy/baseline.toml";

/// Most findings of one rule that a report shows.
const SHOWN: usize = 20;

const HEAD: &str = "\
# What broke a rule of crates/tidy before the rule was made. Counts only fall.
# `DAYFLY_UPDATE=1 cargo test --release -p dayfly-tidy` lowers them to what there is;
# `DAYFLY_UPDATE=raise` also raises them, which a commit must explain.
";

/// Files of each circle of a crate, relative to the crate.
type Circles = BTreeMap<String, Vec<BTreeSet<String>>>;

/// Findings that are allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// Findings by file and name of the rule.
    #[serde(default)]
    files: BTreeMap<String, BTreeMap<String, usize>>,
    #[serde(default)]
    circles: Circles,
}

impl Baseline {
    /// Reads a baseline.
    ///
    /// # Errors
    /// The text is none.
    pub fn parse(text: &str) -> Result<Self> {
        let mut baseline: Self = toml::from_str(text).with_context(|| PATH.to_owned())?;
        baseline.circles.values_mut().for_each(|circles| circles.sort());
        Ok(baseline)
    }

    /// What a report would be allowed by.
    #[must_use]
    pub fn of(report: &Report) -> Self {
        let mut baseline = Self::default();
        for finding in &report.findings {
            let rules = baseline.files.entry(finding.path.clone()).or_default();
            *rules.entry(finding.rule.name().to_owned()).or_default() += 1;
        }
        for (name, circles) in &report.circles {
            let folder = format!("crates/{name}/");
            let short = |path: &String| path.trim_start_matches(&folder).to_owned();
            let circles = circles.iter().map(|circle| circle.files.iter().map(short).collect());
            baseline.circles.insert(name.clone(), circles.collect());
        }
        baseline.circles.values_mut().for_each(|circles| circles.sort());
        baseline.circles.retain(|_, circles| !circles.is_empty());
        baseline
    }

    /// This baseline, lowered to what `now` has less of. Nothing is raised.
    #[must_use]
    pub fn lowered(&self, now: &Self) -> Self {
        let mut lowered = self.clone();
        for (path, rules) in &mut lowered.files {
            for (rule, count) in rules.iter_mut() {
                *count = now.count(path, rule).min(*count);
            }
            rules.retain(|_, count| *count > 0);
        }
        lowered.files.retain(|_, rules| !rules.is_empty());
        for (name, circles) in &mut lowered.circles {
            let now = now.circles.get(name).cloned().unwrap_or_default();
            let (known, new): (Vec<_>, Vec<_>) =
                now.into_iter().partition(|files| circles.iter().any(|old| files.is_subset(old)));
            circles.retain(|old| new.iter().any(|files| !files.is_disjoint(old)));
            let rest =
                known.into_iter().filter(|files| !circles.iter().any(|old| files.is_subset(old)));
            let rest: Vec<_> = rest.collect();
            circles.extend(rest);
            circles.sort();
        }
        lowered.circles.retain(|_, circles| !circles.is_empty());
        lowered
    }

    fn count(&self, path: &str, rule: &str) -> usize {
        self.files.get(path).and_then(|rules| rules.get(rule)).copied().unwrap_or(0)
    }

    /// As text: a line for each file, a line for each circle.
    #[must_use]
    pub fn to_text(&self) -> String {
        let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
        let mut out = format!("{HEAD}\n[files]\n");
        for (path, rules) in &self.files {
            let rules: Vec<String> =
                rules.iter().map(|(rule, count)| format!("{rule} = {count}")).collect();
            let _ = writeln!(out, "{} = {{ {} }}", quoted(path), rules.join(", "));
        }
        out.push_str("\n[circles]\n");
        for (name, circles) in &self.circles {
            let _ = writeln!(out, "{name} = [");
            for files in circles {
                let files: Vec<String> = files.iter().map(|file| quoted(file)).collect();
                let _ = writeln!(out, "    [{}],", files.join(", "));
            }
            out.push_str("]\n");
        }
        out
    }

    /// Everything in which `report` differs from this baseline, as lines to print.
    #[must_use]
    pub fn compare(&self, report: &Report) -> Vec<String> {
        let now = Self::of(report);
        let mut lines = Vec::new();
        for rule in Rule::ALL {
            let mut worse = Vec::new();
            for path in self.paths(&now) {
                let (count, allowed) =
                    (now.count(path, rule.name()), self.count(path, rule.name()));
                if count < allowed {
                    lines.push(format!(
                        "{path}:1: {}: {count} findings, expected the {allowed} of {PATH}; lower \
                         it: DAYFLY_UPDATE=1 cargo test --release -p dayfly-tidy",
                        rule.name(),
                    ));
                } else if count > allowed {
                    let here = report.findings.iter();
                    let here = here.filter(|found| found.rule == rule && found.path == *path);
                    let note = match allowed {
                        0 => String::new(),
                        _ => format!(" ({count} in this file, {allowed} are allowed)"),
                    };
                    worse.extend(here.map(|found| format!("{found}{note}")));
                }
            }
            shorten(rule.name(), worse, &mut lines);
        }
        self.compare_circles(&now, report, &mut lines);
        lines
    }

    fn paths<'a>(&'a self, now: &'a Self) -> BTreeSet<&'a String> {
        self.files.keys().chain(now.files.keys()).collect()
    }

    fn compare_circles(&self, now: &Self, report: &Report, lines: &mut Vec<String>) {
        let none = Vec::new();
        let mut worse = Vec::new();
        for (name, circles) in &report.circles {
            let allowed = self.circles.get(name).unwrap_or(&none);
            let folder = format!("crates/{name}/");
            for circle in circles {
                let short = |path: &String| path.trim_start_matches(&folder).to_owned();
                let files: BTreeSet<String> = circle.files.iter().map(short).collect();
                if !allowed.iter().any(|old| files.is_subset(old)) {
                    worse.push(circle.to_string());
                }
            }
        }
        let fewer = worse.is_empty() && self.circles != now.circles;
        shorten("circle", worse, lines);
        if fewer {
            lines.push(format!(
                "{PATH}:1: circle: fewer files are in circles than it allows; lower it: \
                 DAYFLY_UPDATE=1 cargo test --release -p dayfly-tidy"
            ));
        }
    }
}

/// Appends the first lines of a rule, and how many there are more.
fn shorten(rule: &str, found: Vec<String>, lines: &mut Vec<String>) {
    let more = found.len().saturating_sub(SHOWN);
    lines.extend(found.into_iter().take(SHOWN));
    if more > 0 {
        lines
            .push(format!("{rule}: {more} more; all: cargo run --release -p dayfly-tidy -- check"));
    }
}

#[cfg(test)]
mod tests;
