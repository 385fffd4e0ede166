//! What clients do: lanes side by side, each with VMs of its own.

use super::killer::Killed;
use crate::common::now_us;
use crate::random::Random;
use crate::room::Room;
use anyhow::{Context, Result, bail};
use dayfly_api::client::ClientError;
use dayfly_api::types::{
    CreateManyRequest, CreateRequest, ErrorCode, NetworkRequest, RemoveManyRequest, Source, Vm, VmState,
};
use dayfly_units::{Name, VmId};
use futures::future::{join_all, try_join_all};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::timeout;

const LANES: usize = 6;
/// VMs that a lane has at most when it asks for more.
const KEEPS: usize = 10;
/// The most of one request.
const MANY: u64 = 24;
/// After this a request counts as hung.
const HUNG: Duration = Duration::from_secs(10);
/// After this nothing may be left of a birth that failed.
const UNDONE: Duration = Duration::from_secs(1);
/// After how many microseconds at most whoever hangs up does so.
const PATIENCE_US: u64 = 12_000;
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
    room: &'a Room,
    name: Name,
    random: RefCell<Random>,
    killed: Killed,
    born: Cell<usize>,
    until: Cell<usize>,
    tally: RefCell<Tally>,
    longest_us: Cell<u64>,
}

impl<'a> Lanes<'a> {
    pub fn new(room: &'a Room, name: &Name, seed: u64, killed: Killed) -> Self {
        Self {
            room,
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

    /// Until so many more are born, and all are gone.
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
                0..45 => self.create(&mut own, false).await?,
                45..60 => self.create_many(&mut own, false).await?,
                60..67 => self.create(&mut own, true).await?,
                67..70 => self.create_many(&mut own, true).await?,
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

    /// As [`Self::asked`]; `None` where its client hung up in the middle.
    async fn perhaps<T>(
        &self,
        hang_up: bool,
        what: &str,
        request: impl Future<Output = T>,
    ) -> Result<Option<T>> {
        if !hang_up {
            return self.asked(what, request).await.map(Some);
        }
        let patience = Duration::from_micros(self.draw(PATIENCE_US));
        let answer = timeout(patience, request).await.ok();
        if answer.is_none() {
            self.note(format!("hung up: {what}"));
        }
        Ok(answer)
    }

    fn born_or_failed(
        &self,
        what: &str,
        answer: Result<Vec<Vm>, ClientError>,
        own: &mut Vec<VmId>,
    ) -> Result<()> {
        match answer {
            Ok(vms) => {
                self.born.set(self.born.get() + vms.len());
                own.extend(vms.iter().map(|vm| vm.id));
                self.note(format!("done: {what}"));
            }
            // Its VMM was killed.
            Err(e) if e.code() == Some(ErrorCode::Guest) => {
                let text = e.to_string();
                let line = text.lines().next().unwrap_or("");
                let why = line.split_once(": ").map_or(line, |(_, why)| why);
                // Without the path of the record that it left.
                let why = why.split_once(" (").map_or(why, |(why, _)| why);
                self.note(format!("{FAILED}{what}: {why}"));
            }
            Err(e) => bail!("{what}: {:?}: {e}", e.code()),
        }
        Ok(())
    }

    fn labels(hang_up: bool) -> BTreeMap<String, String> {
        hang_up.then(|| (IMPATIENT.to_owned(), String::new())).into_iter().collect()
    }

    async fn create(&self, own: &mut Vec<VmId>, hang_up: bool) -> Result<()> {
        let source = Source::Snapshot(self.name.clone());
        let request = CreateRequest {
            source,
            name: None,
            labels: Self::labels(hang_up),
            forks: 0,
            network: NetworkRequest::default(),
        };
        match self.perhaps(hang_up, "create", self.room.client.create(&request)).await? {
            Some(answer) => self.born_or_failed("create", answer.map(|vm| vec![vm]), own),
            None => Ok(()),
        }
    }

    async fn create_many(&self, own: &mut Vec<VmId>, hang_up: bool) -> Result<()> {
        let source = Source::Snapshot(self.name.clone());
        let count = u32::try_from(2 + self.draw(MANY - 1))?;
        let request = CreateManyRequest {
            source,
            count,
            labels: Self::labels(hang_up),
            network: NetworkRequest::default(),
        };
        match self.perhaps(hang_up, "batch create", self.room.client.create_many(&request)).await? {
            Some(answer) => self.born_or_failed("batch create", answer, own),
            None => Ok(()),
        }
    }

    async fn end_some(&self, own: &mut Vec<VmId>) -> Result<()> {
        if own.is_empty() {
            return Ok(());
        }
        let how = self.draw(4);
        let count = if how < 2 { own.len().min(1 + usize::try_from(self.draw(MANY))?) } else { 1 };
        let at = usize::try_from(self.draw((own.len() - count + 1) as u64))?;
        let ids: Vec<VmId> = own.drain(at..at + count).collect();
        match how {
            0 | 1 => self.remove_many(&ids).await,
            2 => self.remove(ids[0], true).await,
            _ => self.kill(ids[0]).await,
        }
    }

    async fn remove_many(&self, ids: &[VmId]) -> Result<()> {
        let vms = ids.iter().map(ToString::to_string).collect();
        let request = RemoveManyRequest { vms, force: true };
        self.asked("batch remove", self.room.client.remove_many(&request)).await?.context("batch remove")?;
        self.note("done: batch remove");
        Ok(())
    }

    async fn remove(&self, id: VmId, force: bool) -> Result<()> {
        self.asked("remove", self.room.client.remove_vm(&id.to_string(), force)).await?.context("remove")?;
        self.note("done: remove");
        Ok(())
    }

    /// Afterwards it has ended, and may be removed as such.
    async fn kill(&self, id: VmId) -> Result<()> {
        match self.asked("kill", self.room.client.kill(&id.to_string())).await? {
            Ok(()) => self.note("done: kill"),
            Err(e) if e.code() == Some(ErrorCode::State) && self.killed.has(id) => {
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
            let vms = self.room.client.vms(true).await?;
            if vms.is_empty() {
                return Ok(());
            }
            // Births that failed are undone after the answer, which is not what anybody has to wait for.
            let foreign = vms.iter().find(|vm| !vm.labels.contains_key(IMPATIENT));
            if let Some(vm) = foreign.filter(|_| begun.elapsed() > UNDONE) {
                bail!("VM {} is {:?} although its client ended it or got an error: {vm:?}", vm.id, vm.state);
            }
            if begun.elapsed() > HUNG {
                bail!("{} VMs are left of clients that hung up: {vms:?}", vms.len());
            }
            // One that starts is undone by itself.
            let there =
                vms.iter().filter(|vm| vm.state != VmState::Starting && vm.labels.contains_key(IMPATIENT));
            let removed =
                there.map(async |vm| match self.room.client.remove_vm(&vm.id.to_string(), true).await {
                    Ok(()) => {
                        self.note("hung up too late: removed");
                        Ok(())
                    }
                    Err(e) if e.code() == Some(ErrorCode::NotFound) => Ok(()),
                    Err(e) => Err(e),
                });
            join_all(removed).await.into_iter().collect::<Result<Vec<()>, _>>()?;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
