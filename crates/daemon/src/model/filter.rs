//! What is listed, by docker's rules.

use crate::base::error::{ApiError, Outcome};
use dayfly_api::types::{Vm, VmState};
use dayfly_units::suggest::hint;
use dayfly_units::text::{SHORT, escaped};

/// The longest value, in bytes.
pub const LONGEST: usize = 1024;

/// Conditions on a VM. Of each list but `labels`, one value must match, if there are any.
#[derive(Debug, Default)]
pub struct VmFilter {
    /// Starts of ids.
    pub ids: Vec<String>,
    /// Parts of names.
    pub names: Vec<String>,
    /// States.
    pub states: Vec<VmState>,
    /// `KEY` or `KEY=VALUE`; all must match.
    pub labels: Vec<String>,
    /// Names of snapshots or images that VMs were made from.
    pub ancestors: Vec<String>,
    /// Names of images.
    pub images: Vec<String>,
}

/// The states that `words` name.
///
/// # Errors
/// A word is no state.
pub fn states(words: &[String]) -> Outcome<Vec<VmState>> {
    let names = || VmState::ALL.iter().map(|(_, name)| *name);
    let state = |word: &String| {
        let known = VmState::ALL.iter().find(|(_, name)| name == word);
        known.map(|(state, _)| *state).ok_or_else(|| {
            ApiError::invalid(format_args!(
                "status: expected some of {}, got {}{}",
                names().collect::<Vec<_>>().join(", "),
                escaped(word, SHORT),
                hint(word, names())
            ))
        })
    };
    words.iter().map(state).collect()
}

/// Checks the values of the parameter `name`.
///
/// # Errors
/// One is too long. A query has a limit on the number of its parameters.
pub fn bounded(name: &str, values: Vec<String>) -> Outcome<Vec<String>> {
    match values.iter().map(String::len).find(|bytes| *bytes > LONGEST) {
        None => Ok(values),
        Some(got) => Err(ApiError::invalid(format_args!(
            "{name}: expected at most {LONGEST} bytes, got {got}"
        ))),
    }
}

impl VmFilter {
    /// Whether VMs that have ended are asked for by their state.
    #[must_use]
    pub fn wants_ended(&self) -> bool {
        self.states.contains(&VmState::Exited)
    }

    /// Whether `vm` is listed.
    #[must_use]
    pub fn lists(&self, vm: &Vm) -> bool {
        let id = vm.id.to_string();
        let made_from = |name: &String| {
            vm.image.as_str() == name || vm.snapshot.as_ref().is_some_and(|s| s.as_str() == name)
        };
        any(&self.ids, |start| id.starts_with(start.as_str()))
            && has_one_of(vm.name.as_str(), &self.names)
            && any(&self.states, |state| *state == vm.state)
            && any(&self.ancestors, made_from)
            && one_of(vm.image.as_str(), &self.images)
            && self.labels.iter().all(|label| has(vm, label))
    }
}

/// Whether one of `texts` is in `name`, or there is none.
#[must_use]
pub fn has_one_of(name: &str, texts: &[String]) -> bool {
    any(texts, |text| name.contains(text.as_str()))
}

/// Whether `name` is one of `names`, or there is none.
#[must_use]
pub fn one_of(name: &str, names: &[String]) -> bool {
    any(names, |other| name == other)
}

/// Whether one value matches, or there is none.
fn any<T>(values: &[T], matches: impl Fn(&T) -> bool) -> bool {
    values.is_empty() || values.iter().any(matches)
}

/// Whether `vm` has this label. A key may contain `=`: every cut is tried.
fn has(vm: &Vm, label: &str) -> bool {
    vm.labels.contains_key(label)
        || label.match_indices('=').any(|(at, _)| {
            vm.labels.get(&label[..at]).is_some_and(|value| *value == label[at + 1..])
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str, state: &str, labels: &[(&str, &str)]) -> Vm {
        let labels: std::collections::BTreeMap<_, _> = labels.iter().copied().collect();
        serde_json::from_value(serde_json::json!({
            "id": "0123456789ab", "name": name, "state": state, "exit": null,
            "snapshot": "web", "image": "debian", "kernel": "6.12", "vcpus": 1,
            "memory_bytes": 1, "created_unix_ms": 0, "ready_us": null, "ephemeral": false,
            "labels": labels,
        }))
        .unwrap()
    }

    fn listed(filters: &[(&str, &str)]) -> Vec<String> {
        let all = [
            vm("web-1", "running", &[("tier", "front"), ("team", "a"), ("a=b", "c")]),
            vm("web-2", "paused", &[("tier", "front")]),
            vm("db", "exited", &[("tier", "back")]),
        ];
        let of = |key: &str| {
            let values = filters.iter().filter(|(k, _)| *k == key);
            values.map(|(_, value)| (*value).to_owned()).collect::<Vec<_>>()
        };
        let filter = VmFilter {
            ids: of("id"),
            names: of("name"),
            states: states(&of("status")).unwrap(),
            labels: of("label"),
            ancestors: of("ancestor"),
            images: of("image"),
        };
        all.iter().filter(|vm| filter.lists(vm)).map(|vm| vm.name.to_string()).collect()
    }

    #[test]
    fn labels_must_all_match_and_one_value_of_each_other_parameter() {
        let none = Vec::<String>::new();
        assert_eq!(listed(&[]), ["web-1", "web-2", "db"]);
        assert_eq!(listed(&[("name", "web")]), ["web-1", "web-2"]);
        assert_eq!(listed(&[("name", "web"), ("name", "db")]), ["web-1", "web-2", "db"]);
        assert_eq!(listed(&[("name", "web"), ("status", "paused")]), ["web-2"]);
        assert_eq!(listed(&[("status", "paused"), ("status", "exited")]), ["web-2", "db"]);
        assert_eq!(listed(&[("label", "tier=front")]), ["web-1", "web-2"]);
        assert_eq!(listed(&[("label", "tier=front"), ("label", "team")]), ["web-1"]);
        assert_eq!(listed(&[("label", "tier=front"), ("label", "tier=back")]), none);
        assert_eq!(listed(&[("label", "a=b")]), ["web-1"], "a key with =");
        assert_eq!(listed(&[("label", "a=b=c")]), ["web-1"], "a key with =, and its value");
        assert_eq!(listed(&[("ancestor", "web"), ("ancestor", "x")]), ["web-1", "web-2", "db"]);
        assert_eq!(listed(&[("ancestor", "deb")]), none);
        assert_eq!(listed(&[("image", "debian")]), ["web-1", "web-2", "db"]);
        assert_eq!(listed(&[("image", "web")]), none);
        assert_eq!(listed(&[("id", "0123")]), ["web-1", "web-2", "db"]);
        assert_eq!(listed(&[("id", "123")]), none);
    }

    #[test]
    fn what_is_no_state_and_what_is_too_long_is_refused() {
        let error = states(&["runing".into()]).unwrap_err().to_string();
        assert!(
            error.ends_with(
                "starting, running, paused, exited, unknown, got runing; did you mean running?"
            ),
            "{error}"
        );
        assert!(bounded("name", vec!["x".repeat(LONGEST)]).is_ok());
        assert!(bounded("name", vec!["x".repeat(LONGEST + 1)]).is_err());
    }
}
