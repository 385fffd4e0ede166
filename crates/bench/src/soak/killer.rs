//! Sends SIGKILL to processes of the room, from a thread of its own.

use crate::random::Random;
use crate::room::{Room, Vmm, processes};
use anyhow::{Context, Result, anyhow, bail};
use dayfly_host::process::Process;
use dayfly_units::VmId;
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two kills, in milliseconds.
const PAUSE_MS: (u64, u64) = (10, 50);
/// Of a hundred kills this many are for the zygote.
const ZYGOTE: u64 = 3;
/// Clock ticks (10 ms) for which a VMM without a record counts as being made; older ones wait.
const YOUNG_TICKS: u64 = 3;

/// What was killed, and how often.
pub type Kills = BTreeMap<&'static str, u64>;

/// The ids of VMs whose processes were killed.
#[derive(Debug, Clone, Default)]
pub struct Killed(Arc<Mutex<HashSet<VmId>>>);

impl Killed {
    pub fn has(&self, id: VmId) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(&id)
    }

    fn add(&self, id: VmId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
    }
}

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
            None => "spare",
            Some(id) if self.vms.join(format!("{id}/vm.json")).exists() => "running",
            Some(_) if now_ticks.saturating_sub(vmm.process.start_ticks) <= YOUNG_TICKS => "being made",
            Some(_) => "waiting",
        }
    }

    /// Kills one process: first its kind is drawn, then which of them.
    fn kill(&mut self) -> Result<()> {
        let now = now_ticks()?;
        let mut kinds: BTreeMap<&'static str, Vec<Vmm>> = BTreeMap::new();
        for vmm in processes(&self.name) {
            kinds.entry(self.kind(&vmm, now)).or_default().push(vmm);
        }
        let zygote = self.random.below(100) < ZYGOTE;
        let kinds: Vec<_> = kinds.into_iter().filter(|(kind, _)| (*kind == "zygote") == zygote).collect();
        if kinds.is_empty() {
            return Ok(());
        }
        let (kind, all) = &kinds[usize::try_from(self.random.below(kinds.len() as u64))?];
        let vmm = all[usize::try_from(self.random.below(all.len() as u64))?];
        let Some(process) = Process::open(vmm.process)? else { return Ok(()) };
        // Before it is done: whoever finds it dead finds it here. A spare may have become a VMM meanwhile.
        if let Some(id) = Vmm::at(vmm.process.pid, &self.name).and_then(|now| now.vm) {
            self.killed.add(id);
        }
        process.kill()?;
        *self.kills.entry(kind).or_default() += 1;
        Ok(())
    }

    /// Kills while it is told to go on; answers each word when it has done so.
    fn serve(&mut self, words: &Receiver<bool>, done: &Sender<()>) -> Result<()> {
        while let Ok(go) = words.recv() {
            let _ = done.send(());
            if !go {
                continue;
            }
            let (least, most) = PAUSE_MS;
            let pause = |random: &mut Random| Duration::from_millis(least + random.below(most - least));
            while words.recv_timeout(pause(&mut self.random)) == Err(RecvTimeoutError::Timeout) {
                self.kill()?;
            }
            let _ = done.send(());
        }
        Ok(())
    }
}

/// Clock ticks since the host booted.
fn now_ticks() -> Result<u64> {
    let uptime = std::fs::read_to_string("/proc/uptime").context("/proc/uptime")?;
    let digits: String =
        uptime.split(' ').next().unwrap_or("").chars().filter(char::is_ascii_digit).collect();
    digits.parse().context("hundredths of a second in /proc/uptime")
}

/// The thread.
#[derive(Debug)]
pub struct Killer {
    words: Sender<bool>,
    done: Receiver<()>,
    killed: Killed,
    thread: JoinHandle<Result<Kills>>,
}

impl Killer {
    /// One that rests.
    pub fn new(room: &Room, seed: u64) -> Result<Self> {
        let killed = Killed::default();
        let mut victims = Victims {
            name: room.vmm_name(),
            vms: room.run().join("vms"),
            daemon: room.daemon()?,
            random: Random(seed),
            killed: killed.clone(),
            kills: Kills::default(),
        };
        let (words, heard) = channel();
        let (told, done) = channel();
        let thread = std::thread::spawn(move || {
            victims.serve(&heard, &told)?;
            Ok(victims.kills)
        });
        Ok(Self { words, done, killed, thread })
    }

    pub fn killed(&self) -> Killed {
        self.killed.clone()
    }

    /// It kills from now on.
    pub fn go(&self) {
        let _ = self.words.send(true);
        let _ = self.done.recv();
    }

    /// It kills no more.
    pub fn rest(&self) -> Result<()> {
        let _ = self.words.send(false);
        if self.done.recv().is_err() {
            bail!("the thread that kills has ended");
        }
        Ok(())
    }

    /// What it has killed.
    pub fn end(self) -> Result<Kills> {
        drop(self.words);
        self.thread.join().map_err(|_| anyhow!("the thread that kills panicked"))?
    }
}
