//! What VMs and their programs put out: events and logs.

use super::call::{empty_body, query, segment};
use super::{ByteStream, Client, ClientError, EventStream};
use crate::agent::Program;
use crate::types::EventKind;
use http::Method;

type Result<T> = std::result::Result<T, ClientError>;

fn of_program(vm: &str, program: &str, what: &str) -> String {
    format!("/v1/vms/{}/programs/{}{what}", segment(vm), segment(program))
}

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
    /// Only output since this time, in milliseconds since 1970. Only of programs.
    pub since_unix_ms: Option<u64>,
}

impl LogOptions {
    fn query(self) -> String {
        let part = |key, value: Option<u64>| {
            value.map_or_else(String::new, |value| format!("&{key}={value}"))
        };
        let tail = part("tail", self.tail);
        format!("follow={}{tail}{}", self.follow, part("since_unix_ms", self.since_unix_ms))
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
        self.stream(vm, &path).await
    }

    /// Reads a detached program's output; with `follow`, until no process can write to it any more.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn program_log(
        &self,
        vm: &str,
        program: &str,
        options: LogOptions,
    ) -> Result<ByteStream> {
        let options = options.query();
        let path = format!("/v1/vms/{}/logs?{options}&program={}", segment(vm), query(program));
        self.stream(vm, &path).await
    }

    /// Reads an archive as [`Client::read_archive`] does, but as the body of an HTTP answer, as
    /// clients without frames get it. The daemon then passes on each byte.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn read_archive_as_body(&self, vm: &str, path: &str) -> Result<ByteStream> {
        let path = format!("/v1/vms/{}/archive?path={}", segment(vm), query(path));
        self.body_stream(&path).await
    }

    /// Lists the detached programs of a VM, the oldest first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn programs(&self, vm: &str) -> Result<Vec<Program>> {
        self.list(&format!("/v1/vms/{}/programs", segment(vm))).await
    }

    /// Describes a detached program, given by id, start of its id, or process id.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn program(&self, vm: &str, program: &str) -> Result<Program> {
        self.json(Method::GET, of_program(vm, program, ""), empty_body()).await
    }

    /// Sends a signal, by number, to the process group of a detached program.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn kill_program(&self, vm: &str, program: &str, signal: i32) -> Result<()> {
        let path = of_program(vm, program, &format!("/kill?signal={signal}"));
        self.nothing(Method::POST, path, empty_body()).await
    }

    /// Waits until a detached program has ended.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn wait_for_program(&self, vm: &str, program: &str) -> Result<Program> {
        self.json(Method::GET, of_program(vm, program, "/wait"), empty_body()).await
    }

    /// Forgets a detached program that has ended, and its output.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn remove_program(&self, vm: &str, program: &str) -> Result<()> {
        self.nothing(Method::DELETE, of_program(vm, program, ""), empty_body()).await
    }
}
