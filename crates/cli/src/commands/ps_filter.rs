//! `dayfly ps --filter`: which VMs are listed, by docker's rules.

use dayfly_api::types::{Vm, VmState};
use std::str::FromStr;

/// A condition on a VM: `--filter KEY=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Filter {
    /// The id begins with this.
    Id(String),
    /// The name contains this.
    Name(String),
    /// The state.
    Status(VmState),
    /// The VM has a label of this key, with this value if there is one.
    Label(String, Option<String>),
    /// The VM was made from this snapshot or image.
    Ancestor(String),
}

const STATES: [(&str, VmState); 5] = [
    ("starting", VmState::Starting),
    ("running", VmState::Running),
    ("paused", VmState::Paused),
    ("exited", VmState::Exited),
    ("unknown", VmState::Unknown),
];

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const KEYS: &str = "id, name, status, label or ancestor";
        let (key, value) = text
            .split_once('=')
            .filter(|(_, value)| !value.is_empty())
            .ok_or_else(|| format!("expected KEY=VALUE with {KEYS}, got {text:?}"))?;
        Ok(match key {
            "id" => Self::Id(value.to_owned()),
            "name" => Self::Name(value.to_owned()),
            "ancestor" => Self::Ancestor(value.to_owned()),
            "label" => match value.split_once('=') {
                Some((key, value)) => Self::Label(key.to_owned(), Some(value.to_owned())),
                None => Self::Label(value.to_owned(), None),
            },
            "status" => {
                let state = STATES.iter().find(|(name, _)| *name == value);
                let names = || STATES.map(|(name, _)| name).join(", ");
                let (_, state) = state
                    .ok_or_else(|| format!("status: expected one of {}, got {value:?}", names()))?;
                Self::Status(*state)
            }
            _ => return Err(format!("expected {KEYS}, got {key:?}")),
        })
    }
}

impl Filter {
    fn matches(&self, vm: &Vm) -> bool {
        match self {
            Self::Id(start) => vm.id.to_string().starts_with(start),
            Self::Name(part) => vm.name.as_str().contains(part),
            Self::Status(state) => vm.state == *state,
            Self::Ancestor(name) => [vm.snapshot.as_ref(), Some(&vm.image)]
                .into_iter()
                .flatten()
                .any(|n| n.as_str() == name),
            Self::Label(key, value) => vm
                .labels
                .get(key)
                .is_some_and(|has| value.as_ref().is_none_or(|value| value == has)),
        }
    }

    /// Whether a filter is about VMs that have ended, so that they are asked for.
    pub fn wants_ended(filters: &[Self]) -> bool {
        filters.contains(&Self::Status(VmState::Exited))
    }

    /// Whether `vm` is listed: all labels must match, and one filter of each other key.
    pub fn lists(filters: &[Self], vm: &Vm) -> bool {
        filters.iter().all(|filter| {
            let same = |other: &&Self| {
                !matches!(filter, Self::Label(..))
                    && std::mem::discriminant(*other) == std::mem::discriminant(filter)
            };
            filter.matches(vm) || filters.iter().filter(same).any(|other| other.matches(vm))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str, state: VmState, labels: &[(&str, &str)]) -> Vm {
        let labels: std::collections::BTreeMap<_, _> = labels.iter().copied().collect();
        serde_json::from_value(serde_json::json!({
            "id": "0123456789ab", "name": name, "state": state, "exit": null,
            "snapshot": "web", "image": "debian", "kernel": "6.12", "vcpus": 1,
            "memory_bytes": 1, "created_unix_ms": 0, "ready_us": null, "ephemeral": false,
            "labels": labels,
        }))
        .expect("a VM")
    }

    fn listed(filters: &[&str]) -> Vec<String> {
        let all = [
            vm("web-1", VmState::Running, &[("tier", "front"), ("team", "a")]),
            vm("web-2", VmState::Paused, &[("tier", "front")]),
            vm("db", VmState::Exited, &[("tier", "back")]),
        ];
        let filters: Vec<Filter> =
            filters.iter().map(|text| text.parse().expect("a filter")).collect();
        all.iter().filter(|vm| Filter::lists(&filters, vm)).map(|vm| vm.name.to_string()).collect()
    }

    #[test]
    fn labels_must_all_match_and_one_value_of_each_other_key() {
        assert_eq!(listed(&[]), ["web-1", "web-2", "db"]);
        assert_eq!(listed(&["name=web"]), ["web-1", "web-2"]);
        assert_eq!(listed(&["name=web", "name=db"]), ["web-1", "web-2", "db"]);
        assert_eq!(listed(&["name=web", "status=paused"]), ["web-2"]);
        assert_eq!(listed(&["status=paused", "status=exited"]), ["web-2", "db"]);
        assert_eq!(listed(&["label=tier=front"]), ["web-1", "web-2"]);
        assert_eq!(listed(&["label=tier=front", "label=team"]), ["web-1"]);
        assert_eq!(listed(&["label=tier=front", "label=tier=back"]), Vec::<String>::new());
        assert_eq!(listed(&["ancestor=debian"]), ["web-1", "web-2", "db"]);
        assert_eq!(listed(&["ancestor=deb"]), Vec::<String>::new());
        assert_eq!(listed(&["id=0123"]), ["web-1", "web-2", "db"]);
        assert_eq!(listed(&["id=123"]), Vec::<String>::new());
    }

    #[test]
    fn what_is_no_filter_is_refused_with_the_keys() {
        for (text, says) in [
            ("web", "expected KEY=VALUE with id, name, status, label or ancestor, got \"web\""),
            ("name=", "expected KEY=VALUE"),
            ("colour=red", "got \"colour\""),
            ("status=alive", "expected one of starting, running, paused, exited, unknown"),
        ] {
            let error = text.parse::<Filter>().expect_err("an error");
            assert!(error.contains(says), "{error}");
        }
    }
}
