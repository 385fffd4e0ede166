//! Six workloads as in table 1 of "Efficiently Restoring Virtual Machines", and one of which every
//! byte is known: `workloads.toml`.

use super::images::Set;
use crate::prelude::*;
use clap::ValueEnum;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// A workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// Idle windows
    Desktop,
    /// A media file is played
    Media,
    /// A file of 512 MiB is compressed
    Gzip,
    /// A C project is compiled
    Make,
    /// A file of 512 MiB is copied
    Copy,
    /// Postmark, of the paper's size
    Postmark,
    /// Memory and a file of which every byte is known: for exactness; not in the averages
    Pattern,
}

/// What a workload runs, and when it is late. Texts for /bin/sh, but for `what`.
#[derive(Debug, Deserialize)]
pub struct Script {
    /// In words.
    pub what: String,
    /// What is run.
    pub run: String,
    /// Succeeds when it is late.
    pub late: String,
    /// It is late in any case after these seconds.
    pub bound_s: u32,
    /// Prints how far it is.
    pub done: String,
}

#[derive(Debug, Deserialize)]
struct Workloads {
    image: Set,
    #[serde(flatten)]
    scripts: BTreeMap<Workload, Script>,
}

static WORKLOADS: LazyLock<Workloads> = LazyLock::new(|| {
    toml::from_str(include_str!("workloads.toml")).expect("a test reads workloads.toml")
});

impl Workload {
    /// What it runs.
    pub fn script(self) -> &'static Script {
        &WORKLOADS.scripts[&self]
    }
}

/// The image of the workloads.
pub fn image() -> &'static Set {
    &WORKLOADS.image
}

/// Waits in the guest until it is late; gives the seconds.
pub const LATER: &str = "setsid sh -c \"$1\" >/run/log 2>&1 </dev/null &
n=0; until sh -c \"$2\" 2>/dev/null || [ $n -ge \"$3\" ]; do sleep 1; n=$((n + 1)); done";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_workload_has_a_script() {
        for workload in Workload::value_variants() {
            assert!(workload.script().bound_s > 0, "{workload:?}");
        }
        assert_eq!(image().name, "workloads");
    }
}
