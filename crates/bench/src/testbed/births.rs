//! Births: when the request was sent, when it was answered, when the guest ran, and what the birth
//! found ready.

use super::daemon::Testbed;
use super::host::{now_us, settled_available};
use crate::prelude::*;
use crate::requests::create_many;
use dayfly_api::types::Vm;
use futures::future::try_join_all;
use std::collections::BTreeMap;

/// The birth of a VM as client and VMM saw it, in microseconds of [`super::host::now_us`].
#[derive(Debug)]
pub struct Birth {
    /// The VM.
    pub vm: Vm,
    /// When the request was about to be sent.
    pub sent_us: u64,
    /// When the answer had been read.
    pub answered_us: u64,
    /// When the restored guest first wrote to a port.
    pub written_us: u64,
}

/// Births that were asked for by one request, in microseconds.
#[derive(Debug)]
pub struct AtOnce {
    /// From the request to the last first port write.
    pub all_us: u64,
    /// From the request to the answer.
    pub answered_us: u64,
    /// From the request to the first port write of each.
    pub each_us: Vec<u64>,
    /// The VMs.
    pub ids: Vec<VmId>,
}

impl Birth {
    /// From the request to the first port write.
    pub fn took_us(&self) -> u64 {
        self.written_us - self.sent_us
    }

    /// Adds the timeline of the VM, as times since the request was sent.
    pub fn note(&self, timeline: &[(String, u64)], phases: &mut Phases) -> Result<()> {
        let written = timeline.iter().find(|(phase, _)| phase == "vmm: first port write");
        let (_, written) = written.context("a timeline without the first port write")?;
        // The timeline counts from when the daemon had read the request; the guest's write is known
        // in both clocks.
        let asked_us = self.took_us().saturating_sub(*written);
        phases.add("daemon asked", asked_us);
        for (phase, us) in timeline {
            phases.add(phase, asked_us + us);
        }
        phases.add("client has the answer", self.answered_us - self.sent_us);
        Ok(())
    }
}

/// Births of one kind.
#[derive(Debug, Default)]
pub struct Kind {
    /// From the request to the first port write.
    pub us: Vec<u64>,
    /// From the request to the answer.
    pub answers_us: Vec<u64>,
    /// Phases since the request.
    pub phases: Phases,
}

/// Births by kind (`hit`: found a warm clone; `warm_vmm`: found a warm VMM only; `miss`: found
/// neither) and by what was born.
#[derive(Debug, Default)]
pub struct Births(BTreeMap<(&'static str, &'static str), Kind>);

impl Births {
    /// Adds births, and removes their VMs. Their kind is `kind`, or else what the marks in their
    /// timelines say.
    pub async fn add(
        &mut self,
        testbed: &Testbed,
        births: &[(&'static str, Birth)],
        kind: Option<&'static str>,
    ) -> Result<()> {
        let timelines = testbed.timelines(births.iter().map(|(_, birth)| birth)).await?;
        for ((what, birth), timeline) in births.iter().zip(timelines) {
            let has = |mark: &str| timeline.iter().any(|(phase, _)| phase == mark);
            let found = match (has("vmm runs: the clone was ready"), has("vmm runs")) {
                (true, _) => "hit",
                (_, true) => "miss",
                _ => "warm_vmm",
            };
            let kind = self.0.entry((kind.unwrap_or(found), what)).or_default();
            birth.note(&timeline, &mut kind.phases)?;
            kind.us.push(birth.took_us());
            kind.answers_us.push(birth.answered_us - birth.sent_us);
            testbed.remove(birth.vm.id).await?;
        }
        Ok(())
    }

    /// Takes those of a kind out; there may be none.
    pub fn take(&mut self, kind: &'static str, what: &'static str) -> Kind {
        self.0.remove(&(kind, what)).unwrap_or_default()
    }
}

impl Testbed {
    /// As [`Self::create`], with all times.
    pub async fn birth(&self, snapshot: &Name) -> Result<Birth> {
        let (vm, sent_us) = self.create(snapshot).await?;
        let answered_us = now_us();
        let written_us = self.first_port_write_us(vm.id)?;
        Ok(Birth { vm, sent_us, answered_us, written_us })
    }

    /// A birth that counts nowhere: the first of a daemon opens the files of its snapshot.
    pub async fn warm_up(&self, snapshot: &Name) -> Result<()> {
        let birth = self.birth(snapshot).await?;
        self.remove(birth.vm.id).await.map(drop)
    }

    /// Births that are asked for by one request.
    pub async fn at_once(&self, snapshot: &Name, count: usize) -> Result<AtOnce> {
        let request = create_many(snapshot, count, &[]);
        let begun = now_us();
        let created = self.client.create_many(&request).await?;
        let answered_us = now_us() - begun;
        let written = created.iter().map(|vm| Ok(self.first_port_write_us(vm.id)? - begun));
        let each_us = written.collect::<Result<Vec<u64>>>()?;
        let all_us = each_us.iter().copied().max().unwrap_or(0);
        Ok(AtOnce { all_us, answered_us, each_us, ids: created.iter().map(|vm| vm.id).collect() })
    }

    /// Waits until the pool is full, and begins to weigh VMs.
    pub async fn scales(&self) -> Result<Scales> {
        self.pool_is_full().await?;
        Ok(Scales { available: settled_available()?, waiting: self.waiting().await?.0 })
    }

    /// The timelines of VMs. They are asked for together, because the daemon waits some seconds for
    /// an agent, which these guests do not have.
    pub async fn timelines(
        &self,
        births: impl Iterator<Item = &Birth>,
    ) -> Result<Vec<Vec<(String, u64)>>> {
        let ids: Vec<_> = births.map(|birth| birth.vm.id.to_string()).collect();
        let details = try_join_all(ids.iter().map(|id| self.client.vm(id))).await?;
        Ok(details.into_iter().map(|details| details.timeline).collect())
    }
}

/// The host's memory and the pool before VMs were made.
#[derive(Debug, Clone, Copy)]
pub struct Scales {
    available: u64,
    waiting: usize,
}

impl Scales {
    /// The memory of each of `count` VMs that were made since. A VM that waits in the pool weighs
    /// as much as one that was asked for.
    pub async fn each_bytes(self, testbed: &Testbed, count: usize) -> Result<u64> {
        testbed.pool_is_full().await?;
        let weighed = (count + testbed.waiting().await?.0).saturating_sub(self.waiting).max(1);
        Ok(self.available.saturating_sub(settled_available()?) / weighed as u64)
    }
}
