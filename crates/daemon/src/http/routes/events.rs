//! Events of VMs, as server-sent events (HTML Standard, section 9.2).
//!
//! An answer takes one event after another from the daemon's ring, when its client has taken the
//! one before. Nothing is kept for a client.

use crate::base::error::{ApiError, Outcome};
use crate::base::time::unix_ms;
use crate::daemon::Daemon;
use crate::http::routes::extract::{Params, Shared};
use crate::model::events::Read;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dayfly_api::types::{ApiError as ErrorBody, Event, EventKind};
use dayfly_units::text::{SHORT, escaped};
use serde::Deserialize;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The period of a comment, by which the daemon notices that a client is gone.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The comment.
const COMMENT: &[u8] = b":\n\n";
/// The most words of a filter.
const MOST_WORDS: usize = 256;

/// Which events.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub struct EventParams {
    /// Only events of these VMs: ids, starts of ids or names, with commas between.
    vm: Option<String>,
    /// Only events of these kinds, with commas between.
    kind: Option<String>,
    /// Begin with the oldest event from this time on that the daemon keeps. Without it, only events
    /// after the request are sent. `Last-Event-ID` goes first.
    since_unix_ms: Option<u64>,
    /// End at this time.
    until_unix_ms: Option<u64>,
}

/// Which events a client wants.
#[derive(Debug, Default)]
struct Wanted {
    vms: Vec<String>,
    kinds: Vec<EventKind>,
}

fn words(what: &str, list: Option<String>) -> Outcome<Vec<String>> {
    let words: Vec<String> =
        list.iter().flat_map(|list| list.split(',')).map(str::to_owned).collect();
    match words.len() {
        ..=MOST_WORDS => Ok(words),
        got => {
            Err(ApiError::invalid(format_args!("{what}: expected at most {MOST_WORDS}, got {got}")))
        }
    }
}

impl Wanted {
    fn of(vm: Option<String>, kind: Option<String>) -> Outcome<Self> {
        let kind_of = |word: String| {
            let known = EventKind::ALL.iter().find(|(_, name)| *name == word);
            known.map(|(kind, _)| *kind).ok_or_else(|| {
                let all = EventKind::ALL.map(|(_, name)| name).join(", ");
                let got = escaped(&word, SHORT);
                ApiError::invalid(format_args!("kind: expected some of {all}, got {got}"))
            })
        };
        let kinds = words("kind", kind)?.into_iter().map(kind_of).collect::<Outcome<_>>()?;
        Ok(Self { vms: words("vm", vm)?, kinds })
    }

    fn matches(&self, event: &Event) -> bool {
        let id = event.vm.map(|id| id.to_string()).unwrap_or_default();
        let name = event.name.as_ref().map(|name| name.as_str());
        let this = |word: &String| {
            name == Some(word.as_str()) || (!word.is_empty() && id.starts_with(word.as_str()))
        };
        (self.vms.is_empty() || self.vms.iter().any(this))
            && (self.kinds.is_empty() || self.kinds.contains(&event.kind))
    }
}

/// Reports what happens to VMs, as server-sent events until the client goes away: `id`, `event`
/// (the kind), and `data` (an Event). A client that was disconnected sends the last id as
/// `Last-Event-ID` and gets what followed, after an event `gap` if some of that is lost. A client
/// that reads too slowly gets an event `cut` at the end.
#[utoipa::path(
    get,
    operation_id = "events",
    path = "/v1/events",
    params(EventParams,
        ("Last-Event-ID" = Option<String>, Header, description = "id of the last known event")),
    responses(
        (status = 200, body = Event, content_type = "text/event-stream"),
        (status = 400, body = ErrorBody)
    )
)]
pub async fn events(
    State(daemon): Shared,
    Params(params): Params<EventParams>,
    headers: HeaderMap,
) -> Outcome<Response> {
    let EventParams { vm, kind, since_unix_ms, until_unix_ms: until } = params;
    let wanted = Wanted::of(vm, kind)?;
    let log = &daemon.events;
    let last = headers.get("last-event-id").map(|id| String::from_utf8_lossy(id.as_bytes()));
    let (position, whole) = match (last, since_unix_ms) {
        (Some(last), _) => log.after(&last),
        (None, Some(since)) => (log.since(since), true),
        (None, None) => (log.end(), true),
    };
    let (changes, phase) = (log.changes(), if whole { Phase::Events } else { Phase::Gap });
    let reader = Reader { daemon, position, changes, wanted, until, phase };
    let pieces = futures::stream::unfold(reader, async |reader| reader.next().await);
    let kind = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((kind, Body::from_stream(pieces)).into_response())
}

enum Phase {
    /// The next piece says that events are missing.
    Gap,
    Events,
    /// The last piece was sent.
    Over,
}

struct Reader {
    daemon: Arc<Daemon>,
    position: u64,
    changes: watch::Receiver<u64>,
    wanted: Wanted,
    /// The time at which the stream ends, in milliseconds since 1970.
    until: Option<u64>,
    phase: Phase,
}

impl Reader {
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        match self.phase {
            Phase::Over => return None,
            Phase::Gap => {
                self.phase = Phase::Events;
                let why = "events before this one are missing; list the VMs anew";
                return Some((Ok(self.about(EventKind::Gap, why)), self));
            }
            Phase::Events => {}
        }
        loop {
            // Before the look, so that no later event is missed.
            self.changes.borrow_and_update();
            match self.daemon.events.read(self.position) {
                Read::Event(event) if self.until.is_some_and(|until| event.at_unix_ms > until) => {
                    return None;
                }
                Read::Event(event) => {
                    self.position += 1;
                    if self.wanted.matches(&event) {
                        return Some((Ok(text(&event)), self));
                    }
                }
                Read::Lost => {
                    self.phase = Phase::Over;
                    let why = "the client reads too slowly: the next events are not kept any \
                               more; connect again, with Last-Event-ID or after listing the VMs";
                    return Some((Ok(self.about(EventKind::Cut, why)), self));
                }
                Read::Nothing => {
                    let left = self.until.map(|until| until.saturating_sub(unix_ms()));
                    let left = left.map(Duration::from_millis);
                    let wait = left.map_or(KEEP_ALIVE, |left| left.min(KEEP_ALIVE));
                    let stop = self.daemon.stop.clone();
                    tokio::select! {
                        _ = self.changes.changed() => {}
                        () = stop.cancelled() => return None,
                        () = tokio::time::sleep(wait) => {
                            let over = left.is_some_and(|left| left <= wait);
                            let comment = Ok(Bytes::from_static(COMMENT));
                            return (!over).then_some((comment, self));
                        }
                    }
                }
            }
        }
    }

    /// An event about the stream. Its id is that of the event before the position.
    fn about(&self, kind: EventKind, message: &str) -> Bytes {
        text(&Event {
            id: self.daemon.events.id(self.position.saturating_sub(1)),
            at_unix_ms: unix_ms(),
            kind,
            vm: None,
            name: None,
            exit: None,
            snapshot: None,
            message: Some(message.to_owned()),
        })
    }
}

/// An event as it is sent. JSON has no line break.
fn text(event: &Event) -> Bytes {
    let json = serde_json::to_string(event).unwrap_or_default();
    format!("id: {}\nevent: {}\ndata: {json}\n\n", event.id, event.kind.name()).into()
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
