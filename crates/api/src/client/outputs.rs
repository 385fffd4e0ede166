//! What VMs and their programs put out: events and logs.

use super::call::{query, segment};
use super::{ByteStream, Client, ClientError, EventStream};
use crate::types::EventKind;

type Result<T> = std::result::Result<T, ClientError>;

/// Which events a client wants. The default is all from now on, without end.
#[derive(Debug, Clone, Default)]
pub struct EventQuery {
    /// Only events of these VMs: ids, starts of ids or names.
    pub vms: Vec<String>,
    /// Only events of these kinds.
    pub kinds: Vec<EventKind>,
    /// Begin with the oldest event from this time on, in milliseconds since 1970.
    pub since_unix_ms: Option<u64>,
    /// End at this time.
    pub until_unix_ms: Option<u64>,
    /// Begin after the event with this id.
    pub last_event_id: Option<String>,
}

impl EventQuery {
    fn path(&self) -> String {
        let list = |words: Vec<&str>| (!words.is_empty()).then(|| query(&words.join(",")));
        let parts = [
            ("vm", list(self.vms.iter().map(String::as_str).collect())),
            ("kind", list(self.kinds.iter().map(|kind| kind.name()).collect())),
            ("since_unix_ms", self.since_unix_ms.map(|ms| ms.to_string())),
            ("until_unix_ms", self.until_unix_ms.map(|ms| ms.to_string())),
        ];
        let parts = parts.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?)));
        format!("/v1/events?{}", parts.collect::<Vec<_>>().join("&"))
    }
}

/// Which part of a log is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Whether to follow the output until its end.
    pub follow: bool,
    /// The number of lines of the output so far; `None`: all.
    pub tail: Option<u64>,
}

impl LogOptions {
    fn query(self) -> String {
        let tail = self.tail.map_or_else(String::new, |tail| format!("&tail={tail}"));
        format!("follow={}{tail}", self.follow)
    }
}

impl Client {
    /// Reports what happens to VMs.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn events(&self, query: &EventQuery) -> Result<EventStream> {
        let last = query.last_event_id.as_deref();
        Ok(EventStream::new(self.events_after(&query.path(), last).await?))
    }

    /// Reads the output of the detached program of the `run` that created a VM; of a VM without
    /// one, and with `console`, the console's. With `follow`, until its end.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn logs(&self, vm: &str, console: bool, options: LogOptions) -> Result<ByteStream> {
        let options = options.query();
        let path = format!("/v1/vms/{}/logs?{options}&console={console}", segment(vm));
        Ok(ByteStream::new(self.stream(&path).await?))
    }

    /// Reads a detached program's output; with `follow`, until no process can write to it any more.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn program_log(
        &self,
        vm: &str,
        program: u32,
        options: LogOptions,
    ) -> Result<ByteStream> {
        let options = options.query();
        let path = format!("/v1/vms/{}/logs?{options}&program={program}", segment(vm));
        Ok(ByteStream::new(self.stream(&path).await?))
    }
}
