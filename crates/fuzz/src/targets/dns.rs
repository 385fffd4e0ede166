//! The guests' name service: questions, answers of the host's servers, decisions and limits.

use crate::events::Events;
use crate::target::{Heap, Outcome, Target, planted};
use dayfly_daemon::base::prefix::Prefix;
use dayfly_daemon::net::names::answer::{self, MAX_VISITS_PER_BYTE};
use dayfly_daemon::net::names::limits::{Bucket, Gate, Turn};
use dayfly_daemon::net::names::message::{self, MAX_QUESTION_BYTES, Query, Unusable};
use dayfly_daemon::net::names::policy::{self, Decision};
use dayfly_daemon::net::names::{Index, Policy, Registration, Scope};
use dayfly_units::{Name, VmId};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const SMALL: Heap = Heap { fixed: 256 << 10, per_byte: 512 };
const NET: [u8; 2] = [10, 88];

/// The targets of this file.
pub const TARGETS: &[Target] = &[
    Target {
        name: "dns-question",
        what: "a guest's question, and its answer from here",
        stateful: false,
        most_bytes: 600,
        heap: SMALL,
        run: question,
        seeds: questions,
    },
    Target {
        name: "dns-answer",
        what: "an answer of the host's servers for a guest",
        stateful: false,
        most_bytes: 4096,
        heap: SMALL,
        run: from_server,
        seeds: answers,
    },
    Target {
        name: "dns-gate",
        what: "VMs that come, go and ask; turns and buckets",
        stateful: true,
        most_bytes: 1024,
        heap: Heap { fixed: 1 << 20, per_byte: 8 << 10 },
        run: gate,
        seeds: || {
            let ask = questions().swap_remove(1);
            let ask = [&[ASK, 0, u8::try_from(ask.len()).unwrap()], &ask[..]].concat();
            vec![
                [&[COME, 0, 1, b'a', COME, 1, 1, b'b'], &ask[..], &[TAKE, 0, 5, LATER, 9, GO, 0]]
                    .concat(),
                [ENTER, 0].repeat(30),
            ]
        },
    },
];

fn labels(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
    bytes
}

fn ask(name: &str, kind: u16, edns: bool) -> Vec<u8> {
    let head = [7, 0x0100, 1, 0, 0, u16::from(edns)];
    let mut bytes: Vec<u8> = head.iter().flat_map(|word: &u16| word.to_be_bytes()).collect();
    bytes.extend(labels(name));
    bytes.extend(kind.to_be_bytes());
    bytes.extend([0, 1]);
    if edns {
        bytes.extend([0, 0, 41, 0x10, 0, 0, 0, 0x80, 0, 0, 0]);
    }
    bytes
}

fn questions() -> Vec<Vec<u8>> {
    vec![
        ask("example.org", 1, true),
        ask("b.dayfly.internal", 1, false),
        ask("1.0.88.10.in-addr.arpa", 12, false),
        ask(&format!("{}8.b.d.0.1.0.0.2.ip6.arpa", "0.".repeat(24)), 12, false),
        ask("localhost", 28, false),
        ask("", 2, false),
    ]
}

/// The service as it is at each question: two VMs that resolve each other, of which
/// one has rules, and a closed one.
fn world() -> (Arc<Index>, Scope, Vec<Registration>) {
    let index = Arc::new(Index::default());
    let add = |n: u8, name: &str, group: Option<&str>, egress: &str| {
        let (id, name) = (format!("00000000000{n}"), name.parse::<Name>().unwrap());
        let egress = egress.parse().unwrap();
        let policy = Policy { group: group.map(Into::into), egress };
        index.insert(address(n), id.parse::<VmId>().unwrap(), &name, policy)
    };
    let all = vec![
        add(0, "a", Some("blue"), "internet"),
        add(1, "b", Some("blue"), "*.org:tcp:443,example.org"),
        add(2, "c", Some("red"), "none"),
    ];
    (index, scope(), all)
}

fn scope() -> Scope {
    let prefix = Prefix { first: Ipv4Addr::new(NET[0], NET[1], 0, 0), bits: 16 };
    Scope { prefix, reach: Vec::new().into() }
}

fn address(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(NET[0], NET[1], 1, n)
}

fn parse(bytes: &[u8]) -> Result<Query, Unusable> {
    let mut visits = 0;
    let parsed = message::parse(bytes, &mut visits);
    assert!(visits <= bytes.len(), "{visits} reads of {} bytes", bytes.len());
    match &parsed {
        Err(Unusable::Reply(reply)) => check_answer(bytes, reply),
        Err(Unusable::Silence) => {}
        Ok(query) => {
            let forwarded = query.forwarded(99);
            let again = message::parse(&forwarded, &mut 0).expect("a forwarded question");
            let (asked, forwarded) = (&query.question, again.question);
            let (name, lower) = (asked.name.wire().to_ascii_lowercase(), forwarded.name.wire());
            assert_eq!(lower, name, "the name that is forwarded");
            assert_eq!((forwarded.kind, forwarded.class), (asked.kind, asked.class), "forwarded");
        }
    }
    parsed
}

/// An answer repeats the id and is marked as an answer. It is never a question, because two
/// services could then answer each other for ever.
fn check_answer(question: &[u8], answer: &[u8]) {
    assert!(answer.len() <= MAX_QUESTION_BYTES.max(512) + 300, "{} bytes", answer.len());
    assert_eq!(answer[..2], question[..2], "the id");
    assert_eq!(message::parse(answer, &mut 0), Err(Unusable::Silence), "an answer that asks");
}

fn question(input: &[u8]) -> Outcome {
    let Ok(query) = parse(input) else { return Outcome::Refused };
    let (index, scope, vms) = world();
    for n in 0..3 {
        let guest = index.guest(address(n)).unwrap();
        match policy::decide(&index, &scope, &guest, &query) {
            Decision::Answer(answer) => {
                check_answer(input, &answer);
                planted(|| answer.len() > 12 && answer[7] == 1 && query.question.kind == 255);
            }
            Decision::Refuse(answer) => {
                assert!(n > 0, "refused without a policy");
                check_answer(input, &answer);
            }
            Decision::Forward => assert!(!guest.egress().is_none(), "a closed VM's question"),
        }
    }
    drop(vms);
    Outcome::Accepted
}

/// An answer's id, flags and records, behind the question it belongs to.
fn answers() -> Vec<Vec<u8>> {
    let with = |name: &str, kind: u16, counts: [u16; 3], records: &[u8]| {
        let mut bytes: Vec<u8> = [9_u16, 0x8180, 1].iter().flat_map(|w| w.to_be_bytes()).collect();
        bytes.extend(counts.iter().flat_map(|w| w.to_be_bytes()));
        bytes.extend(&ask(name, kind, false)[12..]);
        bytes.extend(records);
        bytes
    };
    let record = |kind: u16, data: &[u8]| {
        let length = u16::try_from(data.len()).unwrap().to_be_bytes();
        [&[0xc0, 12][..], &kind.to_be_bytes(), &[0, 1, 0, 0, 0, 60], &length, data].concat()
    };
    let soa = [&labels("ns.org")[..], &labels("x.org"), &[0; 20]].concat();
    vec![
        with("example.org", 1, [1, 0, 0], &record(1, &[93, 184, 216, 34])),
        with(
            "example.org",
            1,
            [2, 0, 0],
            &[record(5, &labels("w.example.org")), record(1, &[10, 0, 0, 1])].concat(),
        ),
        with("example.org", 15, [1, 0, 0], &record(15, &[0, 5, 0xc0, 12])),
        with(
            "example.org",
            28,
            [0, 1, 1],
            &[&record(6, &soa)[..], &[0, 0, 41, 4, 0xd0, 0, 0, 0, 0, 0, 0]].concat(),
        ),
        with("example.org", 65, [1, 0, 0], &record(65, &[0, 1, 0, 0, 4, 0, 4, 10, 0, 0, 1])),
        with("example.org", 16, [1, 0, 0], &record(16, b"\x03abc")),
    ]
}

fn from_server(input: &[u8]) -> Outcome {
    // The question is the one that the message repeats, so that its records are reached.
    let end = input.get(12..).and_then(|rest| rest.iter().position(|b| *b == 0));
    let Some(asked) = end.and_then(|end| input.get(12..12 + end + 5)) else {
        return Outcome::Refused;
    };
    let mut bytes = ask("", 1, true)[..12].to_vec();
    bytes[11] = 0;
    bytes.extend_from_slice(asked);
    let Ok(query) = message::parse(&bytes, &mut 0) else { return Outcome::Refused };
    let mut visits = 0;
    let parsed = answer::parse(input, &query, 9, &[], &mut visits);
    let most = input.len() * MAX_VISITS_PER_BYTE;
    assert!(visits <= most + 512, "{visits} reads of {} bytes", input.len());
    let Ok(parsed) = parsed else { return Outcome::Refused };
    let addresses = parsed.addresses();
    assert!(addresses.len() <= 256, "{} addresses", addresses.len());
    for limit in [512, 1232, answer::MAX_TCP_BYTES] {
        let written = parsed.write(&query, limit);
        assert!(written.len() <= limit, "{} bytes, at most {limit}", written.len());
        let again = answer::parse(&written, &query, query.id, &[], &mut 0);
        assert!(again.is_ok(), "written for {limit}: {:?}", again.err());
        planted(|| limit > 5000 && written.len() > 12 && written[7] == 3);
    }
    Outcome::Accepted
}

const COME: u8 = 0;
const GO: u8 = 1;
const ASK: u8 = 2;
const ENTER: u8 = 3;
const LEAVE: u8 = 4;
const TAKE: u8 = 5;
const LATER: u8 = 6;
const EVENTS: u8 = 7;
/// Shared turns, turns of one guest, and guests.
const SHARED: usize = 8;
const EACH: usize = 4;
const GUESTS: usize = 4;

#[derive(Default)]
struct World {
    index: Arc<Index>,
    present: [Option<Registration>; GUESTS],
    own: [Arc<AtomicUsize>; GUESTS],
    turns: [Vec<Turn>; GUESTS],
    buckets: [Bucket; GUESTS],
    taken: u32,
    passed: Duration,
}

impl World {
    fn event(&mut self, gate: &Arc<Gate>, events: &mut Events<'_>, start: Instant) -> Option<()> {
        let (event, who) = (events.byte()? % EVENTS, usize::from(events.byte()?) % GUESTS);
        let number = u8::try_from(who).unwrap();
        match event {
            COME => {
                let name = String::from_utf8_lossy(events.bytes()?).parse::<Name>();
                let name = name.unwrap_or_else(|_| "web-1".parse().unwrap());
                let group = (who < 3).then(|| Arc::from("blue"));
                let egress = if who == 1 { "a.b:443" } else { "internet" };
                let policy = Policy { group, egress: egress.parse().unwrap() };
                let id = format!("00000000000{number}").parse().unwrap();
                // The one before ends afterwards, as a VM that ends slowly.
                let new = self.index.insert(address(number), id, &name, policy);
                self.present[who] = Some(new);
            }
            GO => self.present[who] = None,
            ASK => {
                let bytes = events.bytes()?;
                let guest = self.index.guest(address(number));
                if let (Some(guest), Ok(query)) = (guest, parse(bytes))
                    && let Decision::Answer(answer) | Decision::Refuse(answer) =
                        policy::decide(&self.index, &scope(), &guest, &query)
                {
                    check_answer(bytes, &answer);
                    planted(|| self.turns[who].len() == 2 && answer[3] & 15 == 5);
                }
            }
            ENTER => self.turns[who].extend(gate.enter(&self.own[who])),
            LEAVE => drop(self.turns[who].pop()),
            TAKE => {
                for _ in 0..events.byte()? {
                    self.taken += u32::from(self.buckets[0].take(start + self.passed));
                }
            }
            _ => self.passed += Duration::from_millis(u64::from(events.byte()?)),
        }
        Some(())
    }

    fn check(&self, gate: &Gate) {
        for (turns, own) in self.turns.iter().zip(&self.own) {
            assert_eq!(turns.len(), own.load(Ordering::Relaxed), "turns of a guest");
            assert!(turns.len() <= EACH, "{} turns of a guest", turns.len());
        }
        let shared: usize = self.turns.iter().map(|turns| turns.len().saturating_sub(1)).sum();
        assert!(gate.held() <= SHARED && gate.held() <= shared + GUESTS, "{} held", gate.held());
        let present = self.present.iter().flatten().count();
        assert_eq!(self.index.len().0, present, "addresses");
        assert!(self.index.len().1 <= 2 * present, "labels");
        let most = 400 + self.passed.as_millis() / 5 + 1;
        assert!(u128::from(self.taken) <= most, "{} questions in {:?}", self.taken, self.passed);
    }
}

fn gate(input: &[u8]) -> Outcome {
    let gate = Gate::new(SHARED, EACH);
    let (mut world, mut events, mut count) = (World::default(), Events::new(input), 0);
    let start = Instant::now();
    while count < 256 && world.event(&gate, &mut events, start).is_some() {
        world.check(&gate);
        count += 1;
    }
    world.turns.iter_mut().for_each(Vec::clear);
    assert_eq!(gate.held(), 0, "turns that are left");
    Outcome::of(count > 0)
}
