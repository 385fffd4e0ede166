//! What the daemon and a process of streams say to each other.

use crate::target::{Heap, Outcome, Target, planted};
use dayfly_relay::streams::message::{Event, Handed, Heard, Order, Rules};

/// The targets of this file.
pub const TARGETS: &[Target] = &[Target {
    name: "stream-messages",
    what: "hand-overs of streams, and messages of their lines",
    stateful: false,
    most_bytes: 4096,
    heap: Heap { fixed: 256 << 10, per_byte: 64 },
    run: messages,
    seeds,
}];

fn seeds() -> Vec<Vec<u8>> {
    let rules = Rules { passed: 1 << 5, ending: 1 << 9, passed_max: 9, ending_max: 7 };
    let handed = Handed {
        rules,
        to_agent: b"one".to_vec(),
        to_client: b"two".to_vec(),
        header: vec![1],
        farewell: b"bye".to_vec(),
        body_left: 0,
    };
    vec![
        handed.encode(),
        Event::Ended(vec![0, 0, 0, 0, 9]).encode(),
        Event::Wrong([9; 5]).encode(),
        Event::Heard { question: 1, heard: Heard { bytes: 2, waits: true } }.encode(),
        Order::Go.encode(),
        Order::Ask(1).encode(),
        Order::Finish(b"bye".to_vec()).encode(),
    ]
}

fn messages(input: &[u8]) -> Outcome {
    let mut outcome = Outcome::Refused;
    if let Some(handed) = Handed::decode(input) {
        assert!(handed.encode() == input, "a hand-over encoded again");
        planted(|| handed.header.len() == 3);
        outcome = Outcome::Accepted;
    }
    if let Some(event) = Event::decode(input) {
        assert!(event.encode() == input, "an event encoded again");
        outcome = Outcome::Accepted;
    }
    if let Some(order) = Order::decode(input) {
        assert!(order.encode() == input, "an order encoded again");
        outcome = Outcome::Accepted;
    }
    outcome
}
