//! The newest events of this daemon, for any number of readers.
//!
//! A reader has a position and nothing else, so it costs the same however slowly it reads. A reader
//! whose next event is no longer kept gets [`Read::Lost`].

use dayfly_api::types::Event;
use dayfly_units::sync::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// The number of events that are kept.
pub const KEPT: usize = 4096;

/// The events of one daemon.
#[derive(Debug)]
pub struct EventLog {
    /// Distinguishes the events of this daemon from those of an earlier one.
    instance: String,
    ring: Mutex<Ring>,
    /// The serial number of the next event; the first event has 1.
    next: watch::Sender<u64>,
    kept: usize,
}

#[derive(Debug)]
struct Ring {
    events: VecDeque<Arc<Event>>,
    /// The serial number of the first of `events`.
    first: u64,
}

/// What a reader finds at its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Read {
    /// The event at the position.
    Event(Arc<Event>),
    /// Nothing yet.
    Nothing,
    /// The event at the position is not kept any more.
    Lost,
}

impl EventLog {
    /// A log without events. `instance` is different for each daemon.
    #[must_use]
    pub fn new(instance: u64) -> Self {
        Self::keeping(KEPT, instance)
    }

    fn keeping(kept: usize, instance: u64) -> Self {
        Self {
            instance: format!("{instance:016x}"),
            ring: Mutex::new(Ring { events: VecDeque::new(), first: 1 }),
            next: watch::Sender::new(1),
            kept,
        }
    }

    /// Adds an event, and gives it its id.
    pub fn add(&self, event: Event) {
        let mut ring = lock(&self.ring);
        let serial = ring.first + ring.events.len() as u64;
        let id = self.id(serial);
        if ring.events.len() == self.kept {
            ring.events.pop_front();
            ring.first += 1;
        }
        ring.events.push_back(Arc::new(Event { id, ..event }));
        // With the lock, so that the number never falls.
        self.next.send_replace(serial + 1);
    }

    /// The id of the event with this serial number.
    #[must_use]
    pub fn id(&self, serial: u64) -> String {
        format!("{}-{serial}", self.instance)
    }

    /// The position after the newest event.
    #[must_use]
    pub fn end(&self) -> u64 {
        *self.next.borrow()
    }

    /// The position of the oldest event that is kept and not earlier than `since_unix_ms`.
    #[must_use]
    pub fn since(&self, since_unix_ms: u64) -> u64 {
        let ring = lock(&self.ring);
        let before = ring.events.iter().take_while(|event| event.at_unix_ms < since_unix_ms);
        ring.first + before.count() as u64
    }

    /// The position after the event `id`, which a client had last, and whether every event since
    /// then is kept. If not, the position is that of the oldest event that is kept.
    #[must_use]
    pub fn after(&self, id: &str) -> (u64, bool) {
        let oldest = lock(&self.ring).first;
        let serial = id
            .split_once('-')
            .filter(|(instance, _)| *instance == self.instance)
            .and_then(|(_, serial)| serial.parse::<u64>().ok())
            .filter(|serial| *serial < self.end());
        match serial.map(|serial| serial + 1) {
            Some(position) if position >= oldest => (position, true),
            _ => (oldest, false),
        }
    }

    /// What is at `position`.
    #[must_use]
    pub fn read(&self, position: u64) -> Read {
        let ring = lock(&self.ring);
        let Some(index) = position.checked_sub(ring.first) else { return Read::Lost };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        ring.events.get(index).map_or(Read::Nothing, |event| Read::Event(event.clone()))
    }

    /// The position after the newest event, to wait for its change.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::EventKind;
    use proptest::prelude::*;

    fn event(at_unix_ms: u64) -> Event {
        Event {
            id: String::new(),
            at_unix_ms,
            kind: EventKind::Paused,
            vm: None,
            name: None,
            exit: None,
            snapshot: None,
            message: None,
        }
    }

    /// The times of the events from `position` on, and whether one was lost.
    fn all(log: &EventLog, mut position: u64) -> (Vec<u64>, bool) {
        let mut times = Vec::new();
        loop {
            match log.read(position) {
                Read::Event(event) => times.push(event.at_unix_ms),
                Read::Nothing => return (times, false),
                Read::Lost => return (times, true),
            }
            position += 1;
        }
    }

    proptest! {
        #[test]
        fn a_reader_gets_each_event_once_or_learns_that_it_lost_some(
            kept in 1_usize..10,
            steps in proptest::collection::vec(any::<bool>(), 0..100),
        ) {
            let log = EventLog::keeping(kept, 7);
            let (mut added, mut position, mut got) = (0, log.end(), 0);
            for add in steps {
                if add {
                    log.add(event(added));
                    added += 1;
                    continue;
                }
                match log.read(position) {
                    Read::Event(event) => {
                        prop_assert_eq!(event.at_unix_ms, got);
                        prop_assert_eq!(&event.id, &log.id(got + 1));
                        (position, got) = (position + 1, got + 1);
                    }
                    Read::Nothing => prop_assert_eq!(got, added),
                    Read::Lost => {
                        prop_assert!(added - got > kept as u64);
                        let (oldest, whole) = log.after(&log.id(got));
                        prop_assert!(!whole);
                        (position, got) = (oldest, oldest - 1);
                    }
                }
            }
            prop_assert!(lock(&log.ring).events.len() <= kept);
        }
    }

    #[test]
    fn a_client_goes_on_after_its_last_event_and_learns_of_a_gap() {
        let log = EventLog::keeping(4, 7);
        assert_eq!(log.after(&log.id(0)), (1, true), "before the first");
        assert_eq!(log.after(&log.id(1)), (1, false), "of the future");
        (0..6).for_each(|at| log.add(event(10 * at)));
        assert_eq!(all(&log, log.since(0)), (vec![20, 30, 40, 50], false));
        assert_eq!(all(&log, log.since(31)), (vec![40, 50], false));
        assert_eq!(all(&log, 1), (vec![], true));
        assert_eq!(log.after(&log.id(3)), (4, true));
        assert_eq!(log.after(&log.id(6)), (7, true));
        assert_eq!(log.after(&log.id(2)), (3, true), "the next is kept");
        for gap in [&log.id(1), &log.id(7), "0000000000000008-3", "", "-", "7-3", "x"] {
            assert_eq!(log.after(gap), (3, false), "{gap}");
        }
    }
}
