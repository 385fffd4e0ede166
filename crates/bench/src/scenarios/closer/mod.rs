//! Who pays for the work of VMs (Closer, sections III to V), in four parts:
//!
//! - [`traced`]: an independent tracer against the control groups, and what the daemon itself takes
//!   beside idle VMs (Table II; Fig. 12, right);
//! - [`fairness`]: three VMs that are asked at 1:3:6, and the I/O on their bills (Fig. 13);
//! - [`attack`]: one VM floods all that serves it, beside a VM with a booked CPU (section I);
//! - [`greedy`]: a VM that wants more memory than its limit permits.
//!
//! Each promise is printed with what was expected and what was measured. The scenario fails if one
//! does not hold.

mod attack;
mod fairness;
mod greedy;
mod groups;
mod network;
mod options;
mod peers;
mod perf;
mod promises;
mod trace;
mod traced;

use crate::prelude::*;
use crate::testbed::{Guest, Testbed};
use dayfly_host::cpus;
use options::Measured;
pub use options::Options;
pub use promises::Promises;

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let what = format!("{:?} each, {} idle VMs", options.time(), options.idle);
    let report = Report::begin(places, "closer", "", &what);
    let (mut promises, mut leaked) = (Promises::default(), 0);
    let mut figures = json!({ "seconds": options.seconds });
    if options.has(Measured::Traced) {
        let (traced, left) = traced::measure(options, places, &mut promises).await?;
        figures["charged"] = traced;
        leaked += left;
    }
    if [Measured::Fairness, Measured::Attack, Measured::Greedy].map(|part| options.has(part))
        != [false; 3]
    {
        leaked += networked(options, places, &mut figures, &mut promises).await?;
    }
    promises.at_most("processes that are left", 0.0, float(leaked as u64));
    promises.print();
    figures["leaked"] = leaked.into();
    figures["promises"] = promises.figures();
    report.write(figures)?;
    promises.hold()
}

/// The parts whose VMs have a network. It is this process's own, and ends with it.
async fn networked(
    options: &Options,
    places: &Places,
    figures: &mut Value,
    promises: &mut Promises,
) -> Result<usize> {
    network::enter_own()?;
    let idle = Guest::idle("idle")?;
    let guests = [fairness::serving()?, attack::flooding()?, greedy::writing()?, idle];
    let arguments = ["--pool", "0", "--network", network::RANGE];
    // On a tmpfs, for `greedy`.
    let below = Path::new("/dev/shm");
    let mut testbed = Testbed::baked_in(below, places, &guests, &arguments).await?;
    let [serving, flooding, writing, idle] = guests.each_ref().map(|guest| &guest.name);
    if options.has(Measured::Fairness) {
        testbed.start(&arguments).await?;
        figures["fairness"] = fairness::measure(options, &testbed, serving, promises).await?;
        testbed.stop()?;
    }
    if options.has(Measured::Greedy) {
        testbed.start(&arguments).await?;
        let greedy = greedy::measure(&testbed, serving, writing, options.time(), promises);
        figures["greedy"] = greedy.await?;
        testbed.stop()?;
    }
    if options.has(Measured::Attack) {
        // With two CPUs, one for the VM that books it, none is left for dayflyd alone.
        let first = cpus::online()?.iter().next().unwrap_or(0).to_string();
        let main = (cpus::online()?.len() > 2).then_some(["--main-cpus", &first]);
        let arguments: Vec<&str> =
            arguments.iter().copied().chain(main.into_iter().flatten()).collect();
        testbed.start(&arguments).await?;
        let names = attack::Names { victim: serving, attacker: flooding, other: idle };
        let attacked = attack::Attack { testbed: &testbed, names, has_main: main.is_some() };
        figures["attack"] = attacked.measure(options.time(), promises).await?;
    }
    testbed.end()
}
