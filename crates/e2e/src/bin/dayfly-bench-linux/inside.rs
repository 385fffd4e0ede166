//! This program in the machine: copied in, run beside the daemon, its figures read from its standard output.

use crate::cpu::{self, Spent};
use crate::figures::Figures;
use crate::guests::Guests;
use crate::{Options, measure};
use anyhow::{Context, Result, ensure};
use dayfly_api::client::Client;
use dayfly_cli::progress::Steps;
use dayfly_e2e::inside;
use dayfly_machine::Machine;
use dayfly_machine::guest::DAEMON_SOCKET;
use dayfly_units::Name;
use std::path::Path;
use std::sync::Arc;

/// The copy, in the machine's memory.
const COPY: &str = "/run/dayfly-bench-linux";

/// Has the copy in the machine of `home` measure. Dropped, it ends the copy.
pub async fn run(home: &Path, options: &Options, image: &Name) -> Result<Figures> {
    let machine = Machine::open(home).context("the machine")?;
    let processes = machine.status().context("the machine")?.processes;
    let of_machine = || cpu::of_processes(processes.iter().map(|(pid, _)| *pid));
    let own = std::env::current_exe().context("finding dayfly-bench-linux's own program")?;
    inside::copy(machine, own, COPY).await?;
    let (here, machine) = (cpu::read()?, of_machine());
    let words = [COPY, "--inside", DAEMON_SOCKET].map(str::to_owned).into_iter().chain(words(options, image));
    let output = inside::command(home, words)?.output().await.context("dayfly machine exec")?;
    ensure!(output.status.success(), "measuring in the machine failed; see above");
    let (all, machine) = (here.spent()?, of_machine().saturating_sub(machine));
    let others = Spent { busy: all.busy.saturating_sub(machine), ..all };
    let mut figures: Figures =
        serde_json::from_slice(&output.stdout).context("the figures from the machine")?;
    figures.disturbed(others);
    Ok(figures)
}

/// The options of the copy.
fn words(options: &Options, image: &Name) -> Vec<String> {
    let mut words = vec![format!("--image={image}"), format!("--kernel={}", options.kernel)];
    words.push(format!("--memory={}", options.memory.0));
    for (name, value) in [
        ("cpus", u16::from(options.cpus)),
        ("boots", options.boots),
        ("clones", options.clones),
        ("series", options.series),
        ("bursts", options.bursts),
    ] {
        words.push(format!("--{name}={value}"));
    }
    words.extend(options.unrehearsed.then(|| "--unrehearsed".to_owned()));
    words
}

/// The copy's part: measures, and prints.
pub async fn measure(options: &Options, socket: &Path) -> Result<()> {
    let guests = Guests::new(Client::new(socket), Arc::new(Steps::new()), true);
    let image = options.image.clone().context("--inside takes an --image")?;
    let figures = measure::run(guests, options, &image).await?;
    println!("{}", serde_json::to_string(&figures)?);
    Ok(())
}
