//! Figures about the source tree, and every finding without the baseline.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use dayfly_tidy::check::Report;
use dayfly_tidy::lines::Count;
use dayfly_tidy::rules::circles::Circle;
use dayfly_tidy::rules::functions::functions;
use dayfly_tidy::rust::modules::Sources;
use dayfly_tidy::tree::Tree;
use dayfly_tidy::{check, lines};

#[derive(Parser)]
#[command(about = "Figures about the source tree, and every finding without the baseline")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Rust lines that are neither blank nor comment, per crate
    Lines,
    /// Every finding of every rule, and how many each rule has
    Check,
    /// Files that import each other, and the imports that tie them
    Circles {
        /// Do not count re-exports as imports
        #[arg(long)]
        no_reexports: bool,
    },
    /// The longest functions
    Functions {
        /// How many
        #[arg(long, default_value_t = 30)]
        most: usize,
    },
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let tree = Tree::read(&dayfly_tidy::root())?;
    let sources = Sources::parse(&tree)?;
    match arguments.command {
        Command::Lines => show_lines(&lines::count(&tree, &sources)?),
        Command::Check => return Ok(show_findings(&check::all(&tree, &sources)?)),
        Command::Circles { no_reexports } => {
            check::circles(&tree, &sources, !no_reexports).values().for_each(|found| show(found));
        }
        Command::Functions { most } => show_functions(&sources, most),
    }
    Ok(ExitCode::SUCCESS)
}

fn show_lines(counts: &BTreeMap<String, Count>) {
    println!("{:<12} {:>8} {:>8}", "crate", "code", "tests");
    let mut total = Count::default();
    for (name, count) in counts {
        println!("{name:<12} {:>8} {:>8}", count.code, count.tests);
        total.code += count.code;
        total.tests += count.tests;
    }
    println!("{:<12} {:>8} {:>8}", "total", total.code, total.tests);
}

fn show_findings(report: &Report) -> ExitCode {
    let mut counts = BTreeMap::<&str, usize>::new();
    for finding in &report.findings {
        println!("{finding}");
        *counts.entry(finding.rule.name()).or_default() += 1;
    }
    report.circles.values().for_each(|found| show(found));
    let circles: usize = report.circles.values().map(Vec::len).sum();
    for (rule, count) in counts.into_iter().chain([("circle", circles)]) {
        println!("{rule}: {count}");
    }
    if report.findings.is_empty() && circles == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn show(circles: &[Circle]) {
    circles.iter().for_each(|circle| println!("{circle}"));
}

fn show_functions(sources: &Sources, most: usize) {
    let all = sources
        .files()
        .flat_map(|(path, file)| functions(file).into_iter().map(move |function| (path, function)));
    let mut all: Vec<_> = all.collect();
    all.sort_by_key(|(path, function)| (std::cmp::Reverse(function.lines), *path, function.line));
    for (path, function) in all.iter().take(most) {
        println!("{:>5} {path}:{} {}", function.lines, function.line, function.name);
    }
}
