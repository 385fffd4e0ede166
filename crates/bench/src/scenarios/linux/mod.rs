//! `linux`: a cold boot and a clone of a stock Linux, both to the first answer of a program, and
//! many clones at once.
//!
//! `POST /v1/run` runs a program in a guest that is booted for it, and in one that is cloned for
//! it: the same program, asked for in the same way. The clock runs in the client, from before the
//! request is sent until the client has read the program's exit.
//!
//! The client runs where the VMs are: natively in this process, else in a copy of this program in
//! the machine, because the machine's forwarded socket would cost more than some of what is
//! measured. The copy only measures, and prints its samples. This process removes what the copy
//! leaves, also if the copy fails or is interrupted.

mod answer;
mod cpu;
mod measure;

use crate::prelude::*;
use crate::stock::{Losses, machine};
use answer::{Guests, program, remove_all};
use cpu::{Cpu, Spent};
use dayfly_api::client::Client;
use dayfly_cli::progress::Steps;
use dayfly_e2e::setup;
use dayfly_machine::{Machine, guest::DAEMON_SOCKET};
pub use measure::Options;
use measure::{Burst, Measured};
use std::sync::{Arc, OnceLock};

/// The wanted ratio of a boot's first answer to a clone's.
const LEAST_RATIO: f64 = 40.0;
/// The wanted ratio of many at once to the CPU time of as many single ones.
const MOST_RATIO: f64 = 1.1;
/// The most guests that the emulation may lose: about one clone in a hundred is lost if the machine
/// has two CPUs.
const MOST_LOST: usize = 6;
/// The copy, in the machine's memory.
const COPY: &str = "/run/dayfly-bench";

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let steps = Arc::new(Steps::new());
    if let Some(socket) = &options.inside {
        let image = options.image.as_ref().context("--inside takes an --image")?;
        let guests =
            Guests { client: Client::new(socket), losses: Losses::new(steps, true, MOST_LOST) };
        let measured = measure::run(guests, options, image).await?;
        println!("{}", serde_json::to_string(&measured)?);
        return Ok(());
    }
    let host = setup::host().await?;
    let client = STARTED.get_or_init(|| host.client.clone());
    let kernel = setup::kernel(client, options.kernel.as_str(), &steps).await?;
    let image = setup::image(client, &steps).await?;
    steps.end();
    let Options { boots, series, bursts, clones, memory, cpus, .. } = options;
    let what = format!(
        "{boots} boots, {series} x {} clones one at a time, {bursts} x {clones} at once; Linux {}, \
         {memory}, {cpus} vCPU",
        measure::SERIES,
        kernel.release
    );
    let report = Report::begin(places, "linux", "a cold boot of the same guest", &what);
    remove_all(client).await?;
    let measured = match &host.machine {
        Some(home) => inside(home, &image).await.map(|(samples, others)| (samples, Some(others))),
        None => {
            let losses = Losses::new(steps.clone(), false, MOST_LOST);
            let guests = Guests { client: client.clone(), losses };
            measure::run(guests, options, &image).await.map(|samples| (samples, None))
        }
    };
    steps.end();
    // Whether it went well or not.
    let removed = remove_all(client).await;
    let (measured, others) = measured?;
    removed?;
    let leaks = host.leaks().await?;
    leaks.iter().for_each(|leak| eprintln!("left over: {leak}"));
    let mut figures = figures(options, &measured, others)?;
    figures["kvm"] = host.kvm().into();
    figures["kernel"] = kernel.release.into();
    figures["leaked"] = leaks.len().into();
    report.write(figures)?;
    ensure!(leaks.is_empty(), "{} things were left over", leaks.len());
    Ok(())
}

/// The daemon that this run uses, once it is known.
static STARTED: OnceLock<Client> = OnceLock::new();

/// After an interruption: removes the VMs. Before a daemon is known there are none.
pub async fn clean_up() -> Result<()> {
    match STARTED.get() {
        Some(client) => remove_all(client).await,
        None => Ok(()),
    }
}

/// Has a copy of this program in the machine of `home` measure. Also returns how many CPUs of this
/// host were busy with something else than the machine: the machine, whose CPUs are threads, cannot
/// know. A drop ends the copy.
async fn inside(home: &Path, image: &Name) -> Result<(Measured, f64)> {
    let machine = Machine::open(home).context("the machine")?;
    let processes = machine.status().context("the machine")?.processes;
    let of_machine = || cpu::of_processes(processes.iter().map(|(pid, _)| *pid));
    machine::copy_self(machine, COPY).await?;
    // This program's own words come first; the last of an option counts.
    let words = std::iter::once(COPY.to_owned()).chain(std::env::args().skip(1));
    let more = ["--out=/run", "--inside", DAEMON_SOCKET, "--image", image.as_str()];
    let words = words.chain(more.map(str::to_owned));
    let (here, before) = (cpu::read()?, of_machine());
    let samples = machine::command(home, words)?;
    let samples = machine::output(home, samples, "measuring in the machine").await?;
    let (all, machine) = (here.spent()?, of_machine().saturating_sub(before));
    let others = Spent { busy: all.busy.saturating_sub(machine), ..all };
    let measured = serde_json::from_slice(&samples).context("the samples from the machine")?;
    Ok((measured, rounded(others.cpus())))
}

/// What the samples come to, which is printed too. Beside the machine `others` CPUs of this host
/// were busy.
fn figures(options: &Options, measured: &Measured, others: Option<f64>) -> Result<Value> {
    let cpu = Cpu::of(&measured.costs).context("no series")?;
    let at_once = at_once(options.clones.into(), &measured.bursts, &cpu, measured.cpus)?;
    println!("  to the first answer:");
    let table = Table::new(8, "", &SPREAD);
    let mut figures = json!({
        "cpus": measured.cpus, "vcpus": options.cpus, "memory_bytes": options.memory.0,
        "program": program().argv, "recorded": !options.unrecorded, "lost": measured.lost,
        "ratio": ratio(median(&measured.boots.took_us), median(&measured.clones.took_us)),
        "cpu": cpu, "at_once": at_once, "others_cpus": others,
    });
    for (key, series) in [("boot", &measured.boots), ("clone", &measured.clones)] {
        let spread = Spread::of(&series.took_us);
        table.row(key, &spread);
        let mut of_series = json!(spread.unit(Unit::Ms));
        let stages = series.stages.medians().into_iter();
        of_series["stages"] = stages
            .map(|(stage, us, n)| json!({ "stage": stage, "p50_ms": ms(us), "n": n }))
            .collect();
        figures[key] = of_series;
    }
    println!("  boot / clone: {} (wanted: at least {LEAST_RATIO})", figures["ratio"]);
    measured.boots.stages.print("a boot");
    measured.clones.stages.print("a clone");
    println!(
        "  CPU time of a clone: {} ms (less {} ms of background; series differ {} x)",
        cpu.per_clone_ms, cpu.background_ms, cpu.spread
    );
    let many = &figures["at_once"];
    println!(
        "  {} at once: {} ms; CPU time of as many single ones over {} CPUs: {} ms;\n    {} x \
         (wanted: at most {MOST_RATIO}); {} CPUs busy, {} ms of CPU time each, {} VMMs were ready",
        many["clones"],
        many["wall_ms"],
        measured.cpus,
        many["expected_ms"],
        many["ratio"],
        many["busy_cpus"],
        many["cpu_ms_per_clone"],
        many["waiting"]
    );
    if let Some(others) = others {
        println!(
            "  beside the machine {others:.2} CPUs of this host were busy: if that is much, \
             figures are worth little"
        );
    }
    println!("  lost to the emulation, and made again: {}", measured.lost);
    Ok(figures)
}

/// Many clones asked for at the same moment, compared with the CPU time of as many `single` ones,
/// divided by the number of CPUs: the round of the median.
fn at_once(clones: u64, rounds: &[Burst], single: &Cpu, cpus: usize) -> Result<Value> {
    let middle = cpu::middle(rounds, |round| round.wall_ms).context("no burst")?;
    let expected_ms = rounded(float(clones) * single.per_clone_ms / float(cpus as u64));
    Ok(json!({
        "clones": clones, "rounds": rounds.len(), "wall_ms": middle.wall_ms,
        "walls_ms": rounds.iter().map(|round| round.wall_ms).collect::<Vec<_>>(),
        "expected_ms": expected_ms, "ratio": rounded(middle.wall_ms / expected_ms),
        "busy_cpus": rounded(middle.cpus),
        "cpu_ms_per_clone": rounded(middle.busy_ms / float(clones)), "waiting": middle.waiting,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_at_once_are_compared_with_the_cpu_time_of_single_ones() {
        let spent = |ms| Spent { busy: Duration::from_millis(ms), wall: Duration::from_secs(1) };
        let cpu = Cpu::new(1, spent(200), spent(0), spent(0));
        let burst = |wall_ms| Burst { wall_ms, cpus: 1.5, busy_ms: 900.0, waiting: 2 };
        let rounds = [burst(700.0), burst(500.0), burst(440.0)];
        let got = at_once(4, &rounds, &cpu, 2).expect("a round");
        let [wall, expected, by] = ["wall_ms", "expected_ms", "ratio"].map(|key| got[key].as_f64());
        assert_eq!((wall, expected, by), (Some(500.0), Some(400.0), Some(1.25)));
        assert_eq!(got["cpu_ms_per_clone"], 225.0);
        assert_eq!(got["walls_ms"], json!([700.0, 500.0, 440.0]));
    }
}
