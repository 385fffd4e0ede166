//! `dayfly events`: shows what happens to VMs.

use super::options::past;
use crate::output::{self, Format, FormatArgs, rfc3339};
use crate::{connect, failure};
use anyhow::Result;
use dayfly_api::client::EventQuery;
use dayfly_api::types::{Event, EventKind};
use std::str::FromStr;

/// Arguments of `dayfly events`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Kinds: created, paused, unpaused, forked, snapshotted, updated, exited, removed, \
                  billed; and gap, if events before it are missing, and cut, the last one for a \
                  reader that is too slow.\n\
                  A daemon keeps its newest 4096 events."
)]
pub struct Args {
    /// Show events from this time on first: a time ago such as 90s or 10m, or seconds since 1970
    #[arg(long, value_name = "TIME", value_parser = past)]
    since: Option<u64>,
    /// End at this time: a time ago, now, or seconds since 1970
    #[arg(long, value_name = "TIME", value_parser = past)]
    until: Option<u64>,
    /// Show only events with this: vm=ID or NAME, or kind=KIND; may be repeated: one of each key
    /// must match
    #[arg(short, long = "filter", value_name = "KEY=VALUE")]
    filters: Vec<Filter>,
    /// Format of the output
    #[command(flatten)]
    format: FormatArgs,
}

/// A condition on an event.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Filter {
    Vm(String),
    Kind(EventKind),
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=').filter(|(_, value)| !value.is_empty()) {
            Some(("vm", vm)) if !vm.contains(',') => Ok(Self::Vm(vm.to_owned())),
            Some(("kind", name)) => {
                let kind = EventKind::ALL.iter().find(|(_, known)| *known == name);
                let names = || EventKind::ALL.map(|(_, name)| name).join(", ");
                let kind = kind.ok_or_else(|| format!("expected one of {}, got {name:?}", names()));
                kind.map(|(kind, _)| Self::Kind(*kind))
            }
            _ => Err(format!("expected vm=NAME or kind=KIND, got {text:?}")),
        }
    }
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let (since_unix_ms, until_unix_ms) = (self.since, self.until);
        let mut query = EventQuery { since_unix_ms, until_unix_ms, ..EventQuery::default() };
        for filter in self.filters {
            match filter {
                Filter::Vm(vm) => query.vms.push(vm),
                Filter::Kind(kind) => query.kinds.push(kind),
            }
        }
        let mut events = connect::client().await?.events(&query).await?;
        loop {
            let event = tokio::select! {
                event = events.next() => event?,
                Ok(()) = tokio::signal::ctrl_c() => std::process::exit(INTERRUPTED),
            };
            let Some(event) = event else { return Ok(()) };
            match self.format.format {
                Format::Json => output::emit(&output::json_line(&event)?)?,
                Format::Table => output::line(shown(&event))?,
            }
        }
    }
}

/// Exit code of a program that SIGINT ends.
const INTERRUPTED: i32 = failure::SIGNAL as i32 + 2;

/// One line about an event: time, kind, VM and what else is known.
fn shown(event: &Event) -> String {
    let mut line = format!("{} {}", rfc3339(event.at_unix_ms), event.kind.name());
    if let (Some(name), Some(id)) = (&event.name, event.vm) {
        line += &format!(" {name} ({id})");
    }
    if let Some(snapshot) = &event.snapshot {
        line += &format!(" as {snapshot}");
    }
    if let Some(exit) = &event.exit {
        line += &format!(": {}", exit.message);
    }
    if let Some(message) = &event.message {
        line += &format!(": {message}");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_and_times_are_read() {
        assert_eq!("vm=web".parse(), Ok(Filter::Vm("web".into())));
        assert_eq!("kind=exited".parse(), Ok(Filter::Kind(EventKind::Exited)));
        for bad in ["", "vm", "vm=", "vm=a,b", "kind=x", "name=x"] {
            assert!(bad.parse::<Filter>().is_err(), "{bad:?}");
        }
        assert_eq!(past("1700000000"), Ok(1_700_000_000_000));
        let (now, ago) = (past("now").unwrap(), past("1h").unwrap());
        assert!((now - 3_600_000..now + 60_000).contains(&(ago + 1)) && ago < now, "{now} {ago}");
        for bad in ["", "x", "-1s", "99999999999999999999"] {
            assert!(past(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_event_is_one_line() {
        let json = serde_json::json!({
            "id": "x-1", "at_unix_ms": 1_700_000_000_123_u64, "kind": "exited",
            "vm": "0123456789ab", "name": "web",
            "exit": {"reason": "ttl", "message": "over", "at_unix_ms": 1},
        });
        let event: Event = serde_json::from_value(json).unwrap();
        assert_eq!(shown(&event), "2023-11-14T22:13:20.123Z exited web (0123456789ab): over");
    }
}
