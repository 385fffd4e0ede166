//! One VM floods what a guest and its network peer can flood, beside a VM with a booked CPU that
//! answers requests, and while other VMs are created (Closer, section I).
//!
//! The attacker is the first clone of its snapshot, so its memory comes from a pager. Over and
//! over it asks the gateway for a name, asks its VMM for a vsock connection, and touches a page.
//! Its peer floods its published ports, UDP and TCP. The same is measured before without the
//! attacker: the *quiet* time.
//!
//! What the attacker *took* is the traced time of its control group, and what pagers and group
//! `main` took more than in the quiet time.

use super::groups::{Owner, Part, Tree};
use super::network;
use super::network::{Published, published};
use super::options::SETTLE;
use super::peers::{self, Asked, Flood};
use super::promises::Promises;
use super::trace::{Times, Tracer};
use crate::prelude::*;
use crate::scenarios::dns::messages;
use crate::testbed::host::MIB;
use crate::testbed::processes::pids;
use crate::testbed::{Guest, Testbed};
use dayfly_api::types::{VmDetails, VmLimits};
use dayfly_daemon::base::prefix::Prefix;
use dayfly_host::{cpus, numa};
use dayfly_vmm::arch::layout;

/// VMs that are created meanwhile.
const CREATIONS: u32 = 100;
/// Requests a second to the VM with a booked CPU.
const PER_SECOND: usize = 100;
/// The attacker's RAM. The first pages hold something when it is cloned.
const RAM: u64 = 1024 * MIB;
const FILLED_PAGES: u64 = 16 * 1024;
/// What the attacker asks for: a name that is not answered locally.
const NAME: &str = "flood.example";
/// The most that others may take of booked CPUs, in percent.
const MOST_OF_BOOKED: f64 = 1.0;
/// By how much a bill may differ from what was taken, as a part of the latter.
const BILL: f64 = 0.05;
/// Below this there was no attack.
const LEAST_PACKETS: f64 = 100.0;

const COLUMNS: [Column; 3] =
    [("quiet", "/quiet", Us), ("attacked", "/attacked", Us), ("ratio", "/ratio", Digits(2))];

/// A guest that floods as soon as it was asked for the first time.
pub fn flooding() -> Result<Guest> {
    let range: Prefix = network::RANGE.parse().map_err(anyhow::Error::msg)?;
    // The first 32 MiB are the guest's own.
    let pages = (RAM - 64 * MIB) / PAGE_SIZE;
    let words = format!(
        "fill=7:{FILLED_PAGES:x} until={:x} flood={:x}:{pages:x}",
        layout::GENERATION.0,
        u32::from(range.gateway()),
    );
    Guest::new("floods", RAM, words)
}

/// Snapshots.
#[derive(Debug)]
pub struct Names<'a> {
    pub victim: &'a Name,
    pub attacker: &'a Name,
    /// Of the VMs that are created meanwhile.
    pub other: &'a Name,
}

/// The scenario.
#[derive(Debug)]
pub struct Attack<'a> {
    pub testbed: &'a Testbed,
    pub names: Names<'a>,
    /// Whether dayflyd has CPUs on which no VM runs.
    pub has_main: bool,
}

/// What was measured in the quiet time, or under attack.
struct Phase {
    times: Times,
    created_us: Vec<u64>,
    failed: Vec<String>,
    asked: Asked,
    /// The attacker as the trace began and ended.
    attacker: Option<[VmDetails; 2]>,
}

/// What processes have open and run.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Open {
    threads: usize,
    descriptors: usize,
}

/// The VM with booked CPUs.
struct Victim {
    vm: Published,
    cpus: Vec<u32>,
    group: String,
}

/// What of booked CPUs others took, in percent of their time.
#[derive(Debug, Serialize)]
struct Others {
    /// Other VMs and pagers.
    vms: f64,
    main: f64,
    kernel: f64,
    /// Programs that have nothing to do with dayfly.
    foreign: f64,
    own: f64,
}

impl Others {
    fn of(times: &Times, cpus: &[u32], group: &str) -> Self {
        let all = times.seconds() * float(cpus.len() as u64);
        let part = |matches: &dyn Fn(&Owner) -> bool| {
            rounded(100.0 * times.on(cpus, |owner| owner.group != group && matches(owner)) / all)
        };
        Self {
            vms: part(&|owner| matches!(owner.part, Part::Vms | Part::Templates)),
            main: part(&|owner| owner.part == Part::Main),
            kernel: part(&|owner| owner.part == Part::Kernel),
            foreign: part(&|owner| owner.part == Part::Foreign),
            own: rounded(100.0 * times.on(cpus, |owner| owner.group == group) / all),
        }
    }
}

/// What a VM took, in seconds: its group, and what each other part took more under attack than in
/// the quiet time.
fn taken(group: f64, more: &[[f64; 2]]) -> f64 {
    let more = more.iter().map(|[quiet, attacked]| (attacked - quiet).max(0.0));
    group + more.sum::<f64>()
}

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

/// What the processes of a group have open and run.
fn open(tree: &Tree, group: &str) -> Open {
    let own = pids().filter(|pid| tree.owner_of(*pid).is_some_and(|owner| owner.group == group));
    own.fold(Open::default(), |open, pid| Open {
        threads: open.threads + count(&format!("/proc/{pid}/task")),
        descriptors: open.descriptors + count(&format!("/proc/{pid}/fd")),
    })
}

impl Attack<'_> {
    async fn details(&self, id: VmId) -> Result<VmDetails> {
        Ok(self.testbed.client.vm(&id.to_string()).await?)
    }

    fn tree(&self) -> Result<Tree> {
        Tree::of(self.testbed.daemon()?)
    }

    /// The control group of a VM.
    fn group(&self, details: &VmDetails) -> Result<String> {
        let owner = details.pid.and_then(|pid| self.tree().ok()?.owner_of(pid));
        let group = owner.filter(|owner| owner.part == Part::Vms).map(|owner| owner.group);
        group.with_context(|| format!("VM {}: expected a control group", details.vm.id))
    }

    /// Creates the VM with a booked CPU, and keeps this program off that CPU.
    async fn victim(&self) -> Result<Victim> {
        let limits = VmLimits { cpus_booked: Some(1), ..VmLimits::default() };
        let vm = published(self.testbed, self.names.victim, limits).await?;
        let details = self.details(vm.id).await?;
        let group = self.group(&details)?;
        let shared = cpus::online()?.without(&details.cpus.iter().copied().collect());
        numa::stay_on(&shared.iter().collect::<Vec<_>>())?;
        peers::until_it_answers(vm.udp, &[0; 8])?;
        Ok(Victim { vm, cpus: details.cpus, group })
    }

    /// Creates VMs, spread over `time`. Each is removed when the next one runs.
    async fn creations(&self, time: Duration) -> (Vec<u64>, Vec<String>) {
        let (begun, mut us, mut failed) = (tokio::time::Instant::now(), Vec::new(), Vec::new());
        let mut before = None;
        for n in 0..CREATIONS {
            tokio::time::sleep_until(begun + time / CREATIONS * n).await;
            match self.testbed.birth(self.names.other).await {
                Ok(birth) => {
                    us.push(birth.took_us());
                    if let Some(id) = before.replace(birth.vm.id) {
                        failed.extend(self.testbed.remove(id).await.err().map(|e| e.to_string()));
                    }
                }
                Err(error) => failed.push(format!("{error:#}")),
            }
        }
        if let Some(id) = before {
            failed.extend(self.testbed.remove(id).await.err().map(|e| e.to_string()));
        }
        (us, failed)
    }

    /// Traces; returns what the VM was before and afterwards, if one is named.
    async fn traced(
        &self,
        id: Option<VmId>,
        time: Duration,
    ) -> Result<(Times, Option<[VmDetails; 2]>)> {
        let mut tracer = Tracer::new(self.tree()?)?;
        let Some(id) = id else { return Ok((tracer.run(time).await?, None)) };
        let before = self.details(id).await?;
        let times = tracer.run(time).await?;
        Ok((times, Some([before, self.details(id).await?])))
    }

    async fn phase(
        &self,
        victim: &Victim,
        attacker: Option<VmId>,
        time: Duration,
    ) -> Result<Phase> {
        let asking = peers::ask(victim.vm.udp, PER_SECOND, time);
        let (traced, (created_us, failed)) =
            tokio::join!(self.traced(attacker, time), self.creations(time));
        let asked = asking.join().map_err(|_| anyhow!("the thread that asks panicked"))??;
        for error in &failed {
            eprintln!("  a creation or removal failed: {error}");
        }
        let (times, attacker) = traced?;
        Ok(Phase { times, created_us, failed, asked, attacker })
    }

    /// Creates the attacker, waits until it attacks, and returns what pagers took meanwhile, in
    /// seconds.
    async fn attacker(&self) -> Result<(Published, f64)> {
        let mut tracer = Tracer::new(self.tree()?)?;
        let begins = async {
            let limits = VmLimits::default();
            let vm = published(self.testbed, self.names.attacker, limits).await?;
            peers::until_it_answers(vm.udp, &messages::question(0, NAME))?;
            anyhow::Ok(vm)
        };
        let (times, vm) = tokio::join!(tracer.run(SETTLE), begins);
        Ok((vm?, times?.of(Part::Templates)))
    }

    /// Measures it.
    pub async fn measure(&self, time: Duration, promises: &mut Promises) -> Result<Value> {
        self.testbed.warm_up(self.names.other).await?;
        let victim = self.victim().await?;
        tokio::time::sleep(SETTLE).await;
        let quiet = self.phase(&victim, None, time).await?;

        let (vm, pagers_s) = self.attacker().await?;
        let (group, tree) = (self.group(&self.details(vm.id).await?)?, self.tree()?);
        let before = open(&tree, &group);
        let flood = Flood::begin(vm.udp, vm.tcp);
        tokio::time::sleep(SETTLE).await;
        let attacked = self.phase(&victim, Some(vm.id), time).await?;
        let after = open(&tree, &group);
        flood.end()?;
        self.testbed.remove_all(&[vm.id, victim.vm.id]).await?;

        let others = Others::of(&attacked.times, &victim.cpus, &victim.group);
        println!("  booked CPUs, %: {others:?}");
        println!(
            "  attacker: {pagers_s:.3} s of pagers at its creation; {before:?}, then {after:?}"
        );
        let used = others.vms + if self.has_main { others.main } else { 0.0 };
        promises.at_most("booked CPUs used by others, %", MOST_OF_BOOKED, used);
        let threads = [before, after].map(|open| float(open.threads as u64));
        promises.at_most("threads of the attacker", threads[0], threads[1]);
        // Its VMM's main thread, vCPU and devices: it lives, and was counted.
        promises.at_least("threads of the attacker afterwards", 3.0, threads[1]);
        let created = attacked.created_us.len();
        promises.at_least("creations", f64::from(CREATIONS), float(created as u64));
        let failed = attacked.failed.len() as u64;
        let phases = [&quiet, &attacked];
        promises.at_most("creations and removals that fail", 0.0, float(failed));
        Ok(json!({
            "ratios": ratios(&quiet, &attacked),
            "bill": bill(&group, phases, promises)?,
            "booked_cpus_percent": others, "booked_cpus": victim.cpus,
            "main_has_cpus": self.has_main, "created": created, "failed": attacked.failed,
            "failed_quiet": quiet.failed,
            "answered_percent": phases.map(|phase| phase.asked.answered()),
            "attacker": {
                "before": before, "attacked": after, "pagers_at_creation_s": rounded(pagers_s),
            },
            "traced_s": phases.map(|phase| phase.times.figures()),
        }))
    }
}

/// Prints how long creations and requests took, quiet and attacked.
fn ratios(quiet: &Phase, attacked: &Phase) -> Value {
    let table = Table::new(24, "", &COLUMNS);
    let mut ratios = json!({});
    for (what, of) in [
        ("creation", [&quiet.created_us, &attacked.created_us]),
        ("request", [&quiet.asked.us, &attacked.asked.us]),
    ] {
        for (name, part) in [("p50", 0.5), ("p99", 0.99)] {
            let [quiet, attacked] = of.map(|us| Spread::of(us).quantile(part));
            let row =
                json!({ "quiet": quiet, "attacked": attacked, "ratio": ratio(attacked, quiet) });
            table.row(&format!("{what}, {name}"), &row);
            ratios[what][name] = row;
        }
    }
    ratios
}

/// The attacker's bill against what it took, and whether it did attack.
fn bill(group: &str, phases: [&Phase; 2], promises: &mut Promises) -> Result<Value> {
    let [_, attacked] = phases;
    let [before, after] = attacked.attacker.as_ref().context("no attacker")?;
    let usage = |details: &VmDetails| details.usage.context("the attacker has no bill");
    let billed = Duration::from_micros(usage(after)?.cpu_us - usage(before)?.cpu_us).as_secs_f64();
    let main = phases.map(|phase| phase.times.cpus_of(Part::Main));
    let seconds = attacked.times.seconds();
    let own = attacked.times.of_group(group);
    let pagers = attacked.times.of(Part::Templates);
    let more = [Part::Templates, Part::Main]
        .map(|part| phases.map(|phase| phase.times.cpus_of(part) * seconds));
    let taken = taken(own, &more);
    let moved = |details: &VmDetails| {
        details.net_traffic.map_or([0; 2], |net| [net.sent_packets, net.received_packets])
    };
    let (from, to) = (moved(before), moved(after));
    let [sent, received] =
        [0, 1].map(|n| float(to[n].saturating_sub(from[n])) / attacked.times.seconds());
    println!(
        "  attacker: {sent:.0} packets sent and {received:.0} received a second; billed \
         {billed:.3} s; traced {own:.3} s in its group, {pagers:.3} s of pagers\n  group main: \
         {:.4} CPUs; {:.4} in the quiet time, ratio {:.2}",
        main[1],
        main[0],
        main[1] / main[0],
    );
    promises.at_most("samples lost in the attack", 0.0, float(attacked.times.lost));
    promises.about("the attacker's bill / its group", 1.0, BILL, billed / own);
    promises.about("the attacker's bill / all that it took", 1.0, BILL, billed / taken);
    promises.at_least("packets of the attacker a second", LEAST_PACKETS, sent);
    promises.at_least("packets to the attacker a second", LEAST_PACKETS, received);
    Ok(json!({
        "billed_s": rounded(billed), "taken_s": rounded(taken), "group_s": rounded(own),
        "pagers_s": rounded(pagers), "ratio": rounded(billed / taken),
        "sent_per_second": rounded(sent), "received_per_second": rounded(received),
        "main_cpus": main.map(rounded), "main_ratio": rounded(main[1] / main[0]),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_take_more_is_taken_by_the_attacker() {
        assert!((taken(2.0, &[[0.0, 0.5], [0.25, 1.0]]) - 3.25).abs() < 1e-9);
        // Less than in the quiet time is no discount.
        assert!((taken(2.0, &[[0.0, 0.5], [0.25, 0.0]]) - 2.5).abs() < 1e-9);
    }

    #[test]
    fn the_attacker_touches_only_its_own_ram() {
        let guest = flooding().unwrap();
        let pages = guest.words.rsplit(':').next().unwrap();
        let pages = u64::from_str_radix(pages, 16).unwrap();
        assert!(32 * MIB + pages * PAGE_SIZE <= guest.memory_bytes);
        assert!(FILLED_PAGES <= pages);
    }
}
