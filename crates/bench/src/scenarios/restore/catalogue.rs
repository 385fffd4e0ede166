//! What is restored: services that are asked, a program that starts, and the six workloads of the
//! store's benchmark, each taken in the middle (`subjects.toml`).

use crate::prelude::*;
use crate::stock::Set;
use crate::stock::scripts::{self, LATER, Workload};
use std::sync::LazyLock;

/// Seconds of a workload before the snapshot.
const MIDDLE_S: u32 = 75;

/// A snapshot, and what its clones do.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// Its name.
    pub name: String,
    /// In words.
    pub what: String,
    /// A person waits for it: 80 % of a second are wanted, not 50 ("Efficiently Restoring Virtual
    /// Machines", section 5.2).
    pub interactive: bool,
    /// A text for /bin/sh that runs before the snapshot.
    #[serde(default)]
    begin: String,
    /// The workload that runs before the snapshot instead; it goes on in the clones.
    workload: Option<Workload>,
    /// A text for /bin/sh that a clone runs, with the number of the run as `$1`.
    #[serde(default)]
    run: String,
    set: Option<Set>,
}

impl Subject {
    /// The image.
    pub fn set(&self) -> &Set {
        self.set.as_ref().unwrap_or_else(|| scripts::image())
    }

    /// Size of its disk.
    pub const fn disk(&self) -> &'static str {
        if self.workload.is_some() { "3G" } else { "1G" }
    }

    /// What runs before the snapshot: a text for /bin/sh, and its words.
    pub fn begin(&self) -> (&str, Vec<String>) {
        let Some(script) = self.workload.map(Workload::script) else {
            return (&self.begin, Vec::new());
        };
        (LATER, vec![script.run.clone(), script.late.clone(), MIDDLE_S.to_string()])
    }

    /// What a clone runs: a text for /bin/sh, with the number of the run as `$1`.
    pub fn run(&self) -> &str {
        if self.workload.is_some() { "exec sleep 20" } else { &self.run }
    }
}

#[derive(Debug, Deserialize)]
struct Subjects {
    subject: Vec<Subject>,
}

static SUBJECTS: LazyLock<Subjects> = LazyLock::new(|| {
    toml::from_str(include_str!("subjects.toml")).expect("a test reads subjects.toml")
});

/// All of them.
pub fn subjects() -> &'static [Subject] {
    &SUBJECTS.subject
}

/// Those with these names, or all if there are no names.
pub fn chosen(names: &[String]) -> Result<Vec<&'static Subject>> {
    if names.is_empty() {
        return Ok(subjects().iter().collect());
    }
    let known: Vec<&str> = subjects().iter().map(|subject| subject.name.as_str()).collect();
    let find = |name: &String| {
        let found = subjects().iter().find(|subject| subject.name == *name);
        found.with_context(|| format!("subject {name:?}: expected one of {}", known.join(", ")))
    };
    names.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_names_and_each_is_there_once() {
        let names: BTreeSet<&str> = subjects().iter().map(|s| s.name.as_str()).collect();
        assert_eq!((names.len(), subjects().len()), (10, 10));
        names.iter().for_each(|name| drop(name.parse::<Name>().expect("a name")));
        for subject in subjects() {
            let (text, words) = subject.begin();
            assert!(!text.is_empty() && !subject.run().is_empty(), "{}", subject.name);
            assert_eq!(words.len(), if subject.workload.is_some() { 3 } else { 0 });
            assert_eq!(subject.set.is_none(), subject.workload.is_some(), "{}", subject.name);
        }
    }
}
