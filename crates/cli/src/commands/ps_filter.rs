//! `dayfly ps --filter`: docker's grammar. The daemon applies the filters.

use dayfly_api::client::VmQuery;
use dayfly_api::types::VmState;
use dayfly_units::suggest::hint;
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
    /// The VM has this label: KEY or KEY=VALUE.
    Label(String),
    /// The VM was made from this snapshot or image.
    Ancestor(String),
    /// The VM's root disk is of this image.
    Image(String),
}

const KEYS: [&str; 6] = ["id", "name", "status", "label", "ancestor", "image"];

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let keys = || KEYS.join(", ");
        let (key, value) = text
            .split_once('=')
            .filter(|(_, value)| !value.is_empty())
            .ok_or_else(|| format!("expected KEY=VALUE with {}, got {text:?}", keys()))?;
        let value = value.to_owned();
        Ok(match key {
            "id" => Self::Id(value),
            "name" => Self::Name(value),
            "ancestor" => Self::Ancestor(value),
            "image" => Self::Image(value),
            "label" => Self::Label(value),
            "status" => {
                let names = || VmState::ALL.iter().map(|(_, name)| *name);
                let state = VmState::ALL.iter().find(|(_, name)| *name == value);
                let (state, _) = state.ok_or_else(|| {
                    let all = names().collect::<Vec<_>>().join(", ");
                    format!("status: expected one of {all}, got {value:?}{}", hint(&value, names()))
                })?;
                Self::Status(*state)
            }
            _ => return Err(format!("expected {}, got {key:?}{}", keys(), hint(key, KEYS))),
        })
    }
}

/// The query for these filters; `all` for VMs that have ended too.
pub fn query(all: bool, filters: Vec<Filter>) -> VmQuery {
    let mut query = VmQuery { all, ..VmQuery::default() };
    for filter in filters {
        match filter {
            Filter::Id(start) => query.ids.push(start),
            Filter::Name(part) => query.names.push(part),
            Filter::Status(state) => query.states.push(state),
            Filter::Label(label) => query.labels.push(label),
            Filter::Ancestor(name) => query.ancestors.push(name),
            Filter::Image(name) => query.images.push(name),
        }
    }
    query
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_become_one_query() {
        let filters = ["label=a=b", "label=c", "name=web", "status=paused", "ancestor=s", "id=01"];
        let filters = filters.map(|text| text.parse().expect("a filter")).to_vec();
        let got = query(true, filters);
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let expected = VmQuery {
            all: true,
            ids: words(&["01"]),
            names: words(&["web"]),
            states: vec![VmState::Paused],
            labels: words(&["a=b", "c"]),
            ancestors: words(&["s"]),
            images: words(&[]),
        };
        assert_eq!(got, expected);
    }

    #[test]
    fn what_is_no_filter_is_refused_with_the_keys() {
        for (text, says) in [
            (
                "web",
                "expected KEY=VALUE with id, name, status, label, ancestor, image, got \"web\"",
            ),
            ("name=", "expected KEY=VALUE"),
            ("colour=red", "got \"colour\""),
            ("state=running", "got \"state\"; did you mean status?"),
            ("lable=x", "did you mean label?"),
            ("status=alive", "expected one of starting, running, paused, exited, unknown"),
            ("status=runing", "did you mean running?"),
        ] {
            let error = text.parse::<Filter>().expect_err("an error");
            assert!(error.contains(says), "{error}");
        }
    }
}
