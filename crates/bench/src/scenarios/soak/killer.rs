//! Sends SIGKILL to processes of the testbed, from another thread.

use crate::prelude::*;
use crate::proc;
use crate::testbed::{Testbed, processes::Vmm, random::Random};
use dayfly_host::process::Process;
use dayfly_units::sync::lock;
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Between two kills, in milliseconds.
const PAUSE_MS: (u64, u64) = (10, 50);
/// Of a hundred kills this many are for the zygote.
const ZYGOTE: u64 = 3;
/// Clock ticks (10 ms) for which a VMM without a record counts as being made; older ones wait.
const YOUNG_TICKS: u64 = 3;

/// What was killed, and how often.
pub type Kills = BTreeMap<&'static str, u64>;

/// The ids of VMs whose processes were killed.
pub type Killed = Arc<Mutex<HashSet<VmId>>>;

/// Whom it kills.
struct Victims {
    name: PathBuf,
    vms: PathBuf,
    daemon: u32,
    random: Random,
    killed: Killed,
    kills: Kills,
}

impl Victims {
    fn kind(&self, vmm: &Vmm, now_ticks: u64) -> &'static str {
        match vmm.vm {
            None if vmm.parent == self.daemon => "zygote",
            None => "pre-forked VMM",
            Some(id) if self.vms.join(format!("{id}/vm.json")).exists() => "running",
            Some(_) if now_ticks.saturating_sub(vmm.process.start_ticks) <= YOUNG_TICKS => {
                "being made"
            }
            Some(_) => "waiting",
        }
    }

    /// Kills one process: first its kind is drawn, then which of them.
    fn kill(&mut self) -> Result<()> {
        let now = now_ticks()?;
        let mut kinds: BTreeMap<&'static str, Vec<Vmm>> = BTreeMap::new();
        for vmm in Vmm::all(&self.name) {
            kinds.entry(self.kind(&vmm, now)).or_default().push(vmm);
        }
        let zygote = self.random.below(100) < ZYGOTE;
        let kinds: Vec<_> =
            kinds.into_iter().filter(|(kind, _)| (*kind == "zygote") == zygote).collect();
        if kinds.is_empty() {
            return Ok(());
        }
        let (kind, all) = &kinds[self.random.index(kinds.len())];
        let vmm = all[self.random.index(all.len())];
        let Some(process) = Process::open(vmm.process)? else { return Ok(()) };
        // Before it is done: a lane that finds it dead finds it here. A pre-forked VMM may have a
        // VM meanwhile.
        if let Some(id) = Vmm::at(vmm.process.pid, &self.name).and_then(|now| now.vm) {
            lock(&self.killed).insert(id);
        }
        process.kill()?;
        *self.kills.entry(kind).or_default() += 1;
        Ok(())
    }

    /// Kills whenever it has the lock, until `end` is set.
    fn serve(mut self, gate: &Gate) -> Result<Kills> {
        let (least, most) = PAUSE_MS;
        loop {
            std::thread::sleep(Duration::from_millis(least + self.random.below(most - least)));
            match *lock(gate) {
                State::Rest => {}
                State::Kill => self.kill()?,
                State::End => return Ok(self.kills),
            }
        }
    }
}

/// Clock ticks since the host booted.
fn now_ticks() -> Result<u64> {
    let uptime = proc::read("/proc/uptime")?;
    let digits: String =
        uptime.split(' ').next().unwrap_or("").chars().filter(char::is_ascii_digit).collect();
    digits.parse().context("hundredths of a second in /proc/uptime")
}

/// What the thread does. It has the lock while it kills, so that no kill follows a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Rest,
    Kill,
    End,
}

type Gate = Mutex<State>;

/// The thread.
#[derive(Debug)]
pub struct Killer {
    gate: Arc<Gate>,
    killed: Killed,
    thread: JoinHandle<Result<Kills>>,
}

impl Killer {
    /// One that rests.
    pub fn new(testbed: &Testbed, seed: u64) -> Result<Self> {
        let killed = Killed::default();
        let victims = Victims {
            name: testbed.vmm_name(),
            vms: testbed.run().join("vms"),
            daemon: testbed.daemon()?,
            random: Random(seed),
            killed: killed.clone(),
            kills: Kills::default(),
        };
        let gate = Arc::new(Mutex::new(State::Rest));
        let seen = gate.clone();
        let thread = std::thread::spawn(move || victims.serve(&seen));
        Ok(Self { gate, killed, thread })
    }

    /// Those whose processes it has killed so far.
    pub fn killed(&self) -> Killed {
        self.killed.clone()
    }

    /// It kills from now on.
    pub fn go(&self) {
        *lock(&self.gate) = State::Kill;
    }

    /// It kills no more.
    pub fn rest(&self) -> Result<()> {
        *lock(&self.gate) = State::Rest;
        ensure!(!self.thread.is_finished(), "the thread that kills has ended");
        Ok(())
    }

    /// What it has killed.
    pub fn end(self) -> Result<Kills> {
        *lock(&self.gate) = State::End;
        self.thread.join().map_err(|_| anyhow!("the thread that kills panicked"))?
    }
}
