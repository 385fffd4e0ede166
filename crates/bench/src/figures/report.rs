//! The report of a run: `NAME.json` and plots in the folder for results.
//!
//! Each JSON file has the figures of its scenario, and below `run` what they depend on: host, date,
//! commit, load, and what the floor is.

use super::plot::Plot;
use crate::{places::Places, proc};
use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The C program of `floor/birth.c`.
pub const C_FLOOR: &str = "a C program that makes a VM of the same memory in its own process \
     and runs it to its first port write: no jail, no devices, no daemon (floor/birth.c)";

/// What figures depend on, and where they go.
#[derive(Debug, Clone)]
pub struct Report {
    out: PathBuf,
    name: &'static str,
    /// What `ratio_to_floor` and the like compare with.
    floor: &'static str,
    host: String,
    date: String,
    commit: String,
    load: String,
}

impl Report {
    /// Of the scenario `name`, which begins now and is compared with `floor`. Prints `what` is
    /// done, and how busy the host is.
    pub fn begin(places: &Places, name: &'static str, floor: &'static str, what: &str) -> Self {
        let date = said(Command::new("date").args(["-u", "+%FT%TZ"]));
        let (out, load) = (places.out.clone(), busy());
        println!("{name}: {what}; load {load}");
        Self { out, name, floor, host: host(), date, commit: commit(), load }
    }

    /// The folder for results.
    pub fn folder(&self) -> &Path {
        &self.out
    }

    fn path(&self) -> PathBuf {
        self.out.join(format!("{}.json", self.name))
    }

    /// Writes the figures, and prints where they are.
    pub fn write(&self, figures: Value) -> Result<()> {
        self.save(figures)?;
        println!("  {}", self.path().display());
        Ok(())
    }

    /// Writes the figures.
    pub fn save(&self, mut figures: Value) -> Result<()> {
        figures["run"] = json!({
            "host": self.host, "date": self.date, "commit": self.commit, "floor": self.floor,
            "load_before": self.load, "load_after": busy(),
        });
        let path = self.path();
        let text = serde_json::to_string_pretty(&figures)? + "\n";
        std::fs::write(&path, text).with_context(|| path.display().to_string())
    }

    /// Draws a plot into `NAME` followed by `suffix` and `.svg`.
    pub fn draw(&self, suffix: &str, plot: &Plot) -> Result<()> {
        let path = self.out.join(format!("{}{suffix}.svg", self.name));
        let notes = [
            format!("{}; {}; commit {}; load {}", self.host, self.date, self.commit, self.load),
            if self.floor.is_empty() { String::new() } else { format!("floor: {}", self.floor) },
        ];
        std::fs::write(&path, plot.svg(&notes)).with_context(|| path.display().to_string())?;
        println!("  {}", path.display());
        Ok(())
    }
}

/// JSON that an earlier run wrote, if there is any.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match std::fs::read(path) {
        Ok(bytes) => {
            Ok(Some(serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}

/// Load averages of 1, 5 and 15 minutes: figures that were taken beside a compiler are worth
/// little.
fn busy() -> String {
    let text = proc::read("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// The host in a line: name, CPUs, memory, kernel.
fn host() -> String {
    let read = |name| proc::read(&format!("/proc/sys/kernel/{name}")).unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let model = proc::field("/proc/cpuinfo", "model name").unwrap_or_else(|_| "CPU".to_owned());
    let gib = proc::memory_bytes("MemTotal").unwrap_or(0) >> 30;
    let (name, kernel) = (read("hostname"), read("osrelease"));
    format!("{}: {cpus} x {model}, {gib} GiB, Linux {}", name.trim(), kernel.trim())
}

/// The commit that the checkout has now, and whether files differ from it. `make bench` builds the
/// program from that commit first.
fn commit() -> String {
    let words = ["describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"];
    said(Command::new("git").arg("-C").arg(env!("CARGO_MANIFEST_DIR")).args(words))
}

/// What a program writes in one line.
fn said(command: &mut Command) -> String {
    let text = command.output().map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    text.ok().filter(|text| !text.is_empty()).unwrap_or_else(|| "unknown".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_its_figures_depend_on() {
        let folder = tempfile::tempdir().unwrap();
        let report =
            Report::begin(&Places::new(Some(folder.path())).unwrap(), "birth", C_FLOOR, "");
        report.write(json!({ "hit": 7 })).unwrap();
        let text = std::fs::read_to_string(folder.path().join("birth.json")).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&value["hit"], &value["run"]["floor"]), (&json!(7), &json!(C_FLOOR)));
        for fact in ["host", "date", "commit", "load_before", "load_after"] {
            assert!(value["run"][fact].as_str().is_some_and(|text| !text.is_empty()), "{text}");
        }
    }
}
