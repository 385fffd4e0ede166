//! What clients do: lanes side by side, each with its own VMs.

use super::killer::Killed;
use crate::prelude::*;
use crate::requests::{create, create_many, gone};
use crate::testbed::{Testbed, host::now_us, random::Random};
use dayfly_api::client::ClientError;
use dayfly_api::types::{ErrorCode, RemoveManyRequest, Source, VmState};
use dayfly_units::sync::lock;
use futures::future::{join_all, try_join_all};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use tokio::time::timeout;

const LANES: usize = 6;
/// VMs that a lane has at most when it asks for more.
const KEEPS: usize = 10;
/// The most of one request.
const MANY: usize = 24;
/// After this a request counts as hung.
const HUNG: Duration = Duration::from_secs(10);
/// After this nothing may be left of a birth that failed.
const UNDONE: Duration = Duration::from_secs(1);
/// A client that hangs up does so after at most so much, in microseconds.
const TIMEOUT_US: u64 = 12_000;
/// How many microseconds at most a lane rests now and then.
const REST_US: u64 = 100_000;
/// The label of VMs whose client may have hung up.
const IMPATIENT: &str = "impatient";
/// What the tally calls births that failed.
pub const FAILED: &str = "failed: ";

/// How often what happened.
pub type Tally = BTreeMap<String, u64>;

/// All lanes.
pub struct Lanes<'a> {
    testbed: &'a Testbed,
    name: Name,
    random: RefCell<Random>,
    killed: Killed,
    born: Cell<usize>,
    until: Cell<usize>,
    tally: RefCell<Tally>,
    longest_us: Cell<u64>,
}

impl<'a> Lanes<'a> {
    pub fn new(testbed: &'a Testbed, name: &Name, seed: u64, killed: Killed) -> Self {
        Self {
            testbed,
            name: name.clone(),
            random: RefCell::new(Random(seed)),
            killed,
            born: Cell::new(0),
            until: Cell::new(0),
            tally: RefCell::default(),
            longest_us: Cell::new(0),
        }
    }

    /// VMs born.
    pub fn born(&self) -> usize {
        self.born.get()
    }

    /// What happened, and the longest request in microseconds.
    pub fn end(self) -> (Tally, u64) {
        (self.tally.into_inner(), self.longest_us.get())
    }

    fn draw(&self, below: u64) -> u64 {
        self.random.borrow_mut().below(below)
    }

    fn note(&self, what: impl Into<String>) {
        *self.tally.borrow_mut().entry(what.into()).or_default() += 1;
    }

    /// Runs until `count` more are born, and all are gone.
    pub async fn round(&mut self, births: usize) -> Result<()> {
        self.until.set(self.born.get() + births);
        let lanes = &*self;
        try_join_all((0..LANES).map(|_| lanes.lane())).await.map(drop)
    }

    async fn lane(&self) -> Result<()> {
        let mut own = Vec::new();
        while self.born.get() < self.until.get() || !own.is_empty() {
            let enough = self.born.get() >= self.until.get() || own.len() > KEEPS;
            match self.draw(100) {
                _ if enough => self.end_some(&mut own).await?,
                0..45 => self.create(&mut own, false, false).await?,
                45..60 => self.create(&mut own, true, false).await?,
                60..67 => self.create(&mut own, false, true).await?,
                67..70 => self.create(&mut own, true, true).await?,
                // So that the pool fills now and then.
                70..75 => tokio::time::sleep(Duration::from_micros(self.draw(REST_US))).await,
                _ => self.end_some(&mut own).await?,
            }
        }
        Ok(())
    }

    /// A request that may not hang.
    async fn asked<T>(&self, what: &str, request: impl Future<Output = T>) -> Result<T> {
        let begun = now_us();
        let answer = timeout(HUNG, request).await;
        self.longest_us.set(self.longest_us.get().max(now_us() - begun));
        answer.with_context(|| format!("{what}: no answer after {HUNG:?}"))
    }

    /// Asks for a VM or for many; the client may hang up in the middle.
    async fn create(&self, own: &mut Vec<VmId>, many: bool, hang_up: bool) -> Result<()> {
        let (client, labels) = (&self.testbed.client, if hang_up { &[IMPATIENT][..] } else { &[] });
        let what = if many { "batch create" } else { "create" };
        let count = if many { 2 + self.random.borrow_mut().index(MANY - 1) } else { 1 };
        let request = async {
            if many {
                return client.create_many(&create_many(&self.name, count, labels)).await;
            }
            let request = create(Source::Snapshot(self.name.clone()), labels);
            Ok(vec![client.create(&request).await?])
        };
        let answer = if hang_up {
            let time_limit = Duration::from_micros(self.draw(TIMEOUT_US));
            let Ok(answer) = timeout(time_limit, request).await else {
                self.note(format!("hung up: {what}"));
                return Ok(());
            };
            answer
        } else {
            self.asked(what, request).await?
        };
        match answer {
            Ok(vms) => {
                self.born.set(self.born.get() + vms.len());
                own.extend(vms.iter().map(|vm| vm.id));
                self.note(format!("done: {what}"));
            }
            // Its VMM was killed.
            Err(e) if e.code() == Some(ErrorCode::Guest) => {
                self.note(format!("{FAILED}{what}: {}", cause(&e.to_string())));
            }
            Err(e) => bail!("{what}: {:?}: {e}", e.code()),
        }
        Ok(())
    }

    async fn end_some(&self, own: &mut Vec<VmId>) -> Result<()> {
        if own.is_empty() {
            return Ok(());
        }
        let (how, index) = (self.draw(4), |count| self.random.borrow_mut().index(count));
        let count = if how < 2 { own.len().min(1 + index(MANY)) } else { 1 };
        let at = index(own.len() - count + 1);
        let ids: Vec<VmId> = own.drain(at..at + count).collect();
        match how {
            0 | 1 => {
                let vms = ids.iter().map(ToString::to_string).collect();
                let request = RemoveManyRequest { vms, force: true };
                self.done("batch remove", self.testbed.client.remove_many(&request)).await
            }
            2 => self.remove(ids[0], true).await,
            _ => self.kill(ids[0]).await,
        }
    }

    async fn done(
        &self,
        what: &str,
        request: impl Future<Output = Result<(), ClientError>>,
    ) -> Result<()> {
        self.asked(what, request).await?.with_context(|| what.to_owned())?;
        self.note(format!("done: {what}"));
        Ok(())
    }

    async fn remove(&self, id: VmId, force: bool) -> Result<()> {
        self.done("remove", self.testbed.client.remove_vm(&id.to_string(), force)).await
    }

    /// Afterwards it has ended, and may be removed as such.
    async fn kill(&self, id: VmId) -> Result<()> {
        match self.asked("kill", self.testbed.client.kill(&id.to_string())).await? {
            Ok(()) => self.note("done: kill"),
            Err(e) if e.code() == Some(ErrorCode::State) && lock(&self.killed).contains(&id) => {
                self.note("kill: had been killed from outside");
            }
            Err(e) => return Err(e).context("kill"),
        }
        self.remove(id, false).await
    }

    /// Removes the VMs whose clients hung up too late; there may be no others.
    pub async fn nothing_is_left(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let vms = self.testbed.client.vms(true).await?;
            if vms.is_empty() {
                return Ok(());
            }
            // Births that failed are undone after the answer, which no client has to wait
            // for.
            let foreign = vms.iter().find(|vm| !vm.labels.contains_key(IMPATIENT));
            if let Some(vm) = foreign.filter(|_| begun.elapsed() > UNDONE) {
                bail!(
                    "VM {} is {:?} although its client ended it or got an error: {vm:?}",
                    vm.id,
                    vm.state
                );
            }
            if begun.elapsed() > HUNG {
                bail!("{} VMs are left of clients that hung up: {vms:?}", vms.len());
            }
            // One that starts is undone by itself.
            let there = vms
                .iter()
                .filter(|vm| vm.state != VmState::Starting && vm.labels.contains_key(IMPATIENT));
            let removed = there.map(async |vm| {
                let removed = self.testbed.client.remove_vm(&vm.id.to_string(), true).await;
                removed.is_ok().then(|| self.note("hung up too late: removed"));
                gone(removed)
            });
            join_all(removed).await.into_iter().collect::<Result<Vec<()>>>()?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Why a birth failed, in a few words: without the VM, and the path of the record that it left.
fn cause(error: &str) -> &str {
    let line = error.lines().next().unwrap_or("");
    let why = line.split_once(": ").map_or(line, |(_, why)| why);
    let why = why.split_once(" (").map_or(why, |(why, _)| why);
    let without = why.strip_prefix("VM ").and_then(|rest| rest.split_once(' '));
    without.map_or(why, |(_, why)| why)
}
