//! Clients that go away in the middle of a fork or a snapshot, and ask again at once, while the
//! guest writes to memory and disk.
//!
//! A fork or a snapshot is dropped after a random number of polls, so at each of its awaits. What
//! it began goes on beside the next one. The guest ([`dayfly_microguest`], `grow=`) is the model:
//! its memory says what each block and page must hold, and each clone compares that with what it
//! reads. A layer that is missing from a chain, or is in the wrong place, shows as a wrong block.
//!
//! DAYFLY_SEED=N repeats a run, as far as the scheduler allows. DAYFLY_ROUNDS=N sets the rounds.

use crate::base::progress::ProgressSender;
use crate::base::time::Asked;
use crate::ops::create::forking::{born_of, end};
use crate::ops::create::harness::{Room, until};
use crate::ops::create::last_lines::console_tail;
use crate::ops::fork::fork;
use crate::ops::snapshot::snapshot;
use crate::vm::Vm;
use dayfly_api::types::{ForkRequest, Lifetime, SnapshotRequest};
use dayfly_pager::wire::Settings;
use dayfly_units::Name;
use dayfly_vmm::arch::layout;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// What a client asks for, and what its clones are made of.
#[derive(Debug, Clone)]
enum Asking {
    /// A clone.
    Fork,
    /// A clone, and a snapshot of that name.
    ForkAs(Name),
    /// A snapshot of that name.
    Snapshot(Name),
}

/// A client that goes away after a number of polls.
struct Leaving<F> {
    asking: Option<Pin<Box<F>>>,
    left: u32,
    /// Whether it goes away when it would be answered next, not while it waits.
    late: bool,
    polls: u32,
}

impl<F: Future> Leaving<F> {
    fn new(asking: F, polls: u32, late: bool) -> Self {
        Self { asking: Some(Box::pin(asking)), left: polls, late, polls: 0 }
    }
}

impl<F: Future> Future for Leaving<F> {
    /// The answer, unless the client went away; and how often it was polled.
    type Output = (Option<F::Output>, u32);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let left = self.left;
        if let Some(asking) = self.asking.as_mut().filter(|_| left > 0) {
            if let Poll::Ready(answer) = asking.as_mut().poll(context) {
                return Poll::Ready((Some(answer), self.polls + 1));
            }
            self.polls += 1;
            self.left -= 1;
            if self.left > 0 || self.late {
                return Poll::Pending;
            }
        }
        self.asking = None;
        Poll::Ready((None, self.polls))
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

struct Client {
    room: Room,
    vm: Arc<Vm>,
    random: Random,
    /// Names that were asked for.
    names: u32,
    /// The most polls of one request.
    most: u64,
}

impl Client {
    async fn new(seed: u64) -> Self {
        let words = format!("grow={:x}:40:1:1:h", layout::GENERATION.0);
        let room = Room::with(0, Settings::default(), &words, true).await;
        let vm = room.create(&"vm".parse().unwrap()).await.unwrap().keep();
        until("it writes", || console_tail(&vm.dir).contains("churning")).await;
        Self { room, vm, random: Random(seed), names: 0, most: 8 }
    }

    fn any(&mut self) -> Asking {
        self.names += 1;
        let name = format!("s{}", self.names).parse().unwrap();
        match self.random.below(3) {
            0 => Asking::Fork,
            1 => Asking::ForkAs(name),
            _ => Asking::Snapshot(name),
        }
    }

    /// Asks; the clones that the daemon answers with.
    async fn ask(&self, asking: &Asking) -> crate::base::error::Outcome<Vec<Arc<Vm>>> {
        let (daemon, vm) = (&self.room.daemon, &self.vm);
        let template = match asking {
            Asking::Snapshot(name) => {
                let (request, progress) =
                    (SnapshotRequest { name: name.clone() }, ProgressSender::without_receiver());
                snapshot(daemon.clone(), vm.clone(), request, progress).await?;
                return Ok(Vec::new());
            }
            Asking::ForkAs(name) => Some(name.clone()),
            Asking::Fork => None,
        };
        let request = ForkRequest {
            count: 1,
            name: None,
            labels: BTreeMap::new(),
            forks: 0,
            egress: None,
            publish: Vec::new(),
            publish_exposed: false,
            lifetime: Lifetime::UNLIMITED,
            limits: None,
            template,
        };
        let forked = fork(daemon, vm, request, Asked::now()).await?;
        let found = forked.items.iter().map(|item| daemon.registry.find(&item.id.to_string()));
        Ok(found.map(Result::unwrap).collect())
    }

    /// A client asks and goes away, and another asks at once. Returns after how many polls the
    /// first went away; `None` if it was answered.
    async fn round(&mut self) -> Option<u32> {
        let (first, second) = (self.any(), self.any());
        let polls = u32::try_from(self.random.below(self.most + 2)).unwrap();
        let late = self.random.below(2) == 0;
        let (answer, polls) = Leaving::new(self.ask(&first), polls, late).await;
        let what = format!("{second:?} after {polls} polls of {first:?}");
        let mut clones = Vec::new();
        let left = answer.is_none();
        if let Some(answer) = answer {
            self.most = self.most.max(polls.into());
            clones.extend(answer.unwrap_or_else(|e| panic!("{first:?}: {e}")));
        }
        clones.extend(self.ask(&second).await.unwrap_or_else(|e| panic!("{what}: {e}")));
        let answered = [&second].into_iter().chain((!left).then_some(&first));
        for name in answered.filter_map(Asking::name) {
            clones.push(born_of(&self.room, name.as_str()).await.unwrap());
        }
        for clone in clones {
            self.is_right(&clone, &what).await;
            end(&self.room, &clone).await;
        }
        for name in [&first, &second].into_iter().filter_map(Asking::name) {
            let _not_there_or_not_yet = self.room.daemon.templates.remove_snapshot(name);
        }
        left.then_some(polls)
    }

    /// Waits until a clone has checked its content.
    async fn is_right(&self, clone: &Arc<Vm>, what: &str) {
        let console = || console_tail(&clone.dir);
        until(what, || ["found ", "failed"].iter().any(|end| console().contains(end))).await;
        let said = console();
        assert!(!said.contains("failed"), "{what}: {said}");
    }
}

impl Asking {
    const fn name(&self) -> Option<&Name> {
        match self {
            Self::Fork => None,
            Self::ForkAs(name) | Self::Snapshot(name) => Some(name),
        }
    }
}

async fn rounds(default: u64) {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |n| n.parse().expect("a number"))
    };
    let seed = number("DAYFLY_SEED", u64::from(std::process::id()));
    let rounds = number("DAYFLY_ROUNDS", default);
    println!("DAYFLY_SEED={seed}");
    let mut client = Client::new(seed).await;
    let mut left = BTreeSet::new();
    let (mut round, mut gone) = (0, 0);
    // On a quick host more clients get their answer before they go away.
    while round < rounds || gone <= rounds / 4 && round < 4 * rounds {
        let polls = client.round().await;
        gone += u64::from(polls.is_some());
        left.extend(polls);
        round += 1;
        if round % 100 == 0 {
            println!("{round} rounds, {gone} clients went away");
        }
    }
    println!("{round} rounds, {gone} clients went away, after {left:?} polls");
    assert!(gone > rounds / 4, "too few clients went away");
    let Client { room, vm, .. } = client;
    assert!(vm.phase().alive(), "{:?}", vm.live().exit);
    end(&room, &vm).await;
    room.empty().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_spoils_nothing_for_the_next() {
    rounds(12).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "many minutes: make long"]
async fn a_thousand_clients_that_go_away_spoil_nothing() {
    rounds(1000).await;
}
