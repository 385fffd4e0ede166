//! `io`: the disk and the network of a stock Debian guest, against QEMU's virtio devices under the
//! same KVM.
//!
//! | | dayfly | QEMU |
//! |---|---|---|
//! | started by | the daemon | this program: `q35`, `-cpu host` |
//! | kernel, initramfs | the daemon's | the same files |
//! | disk | the image, and a writable layer | a raw copy of the image, on the same file system |
//! | | page cache of the host | `cache=writeback`, the faster aio, an iothread |
//! | network | the daemon's: tap, routes, filter, veth | the same code's, other addresses |
//! | packets moved by | the VMM's process | QEMU's process (`vhost=off`), or the kernel |
//! | vCPUs, RAM, programs | the same | the same |
//!
//! In each round a guest of each VMM is booted, fills a file, does all jobs and is removed. fio
//! reads and writes that file past the guest's page cache. The traffic's other end is this program,
//! on the host that has the VMs: natively this process, else a copy of it in the machine. There
//! QEMU is that of this host, by the read-only share of `/usr`.

mod figures;
mod fio;
mod guests;
mod jobs;
mod network;
mod options;
mod peer;
mod qemu;
mod rounds;
mod threads;

use crate::prelude::*;
use crate::scenarios::closer::Promises;
use crate::stock::{Losses, Set, Stock, machine, remove_vms};
use dayfly_api::client::Client;
use dayfly_cli::progress::Steps;
use dayfly_e2e::setup::Host;
use dayfly_machine::{Machine, Share, guest::DAEMON_SOCKET};
use guests::Daemon;
use jobs::Job;
use options::DISK;
pub use options::Options;
use rounds::Measured;
use std::sync::{Arc, OnceLock};

/// The most guests that the emulation may lose.
const MOST_LOST: usize = 6;
/// The copy, in the machine's memory.
const COPY: &str = "/run/dayfly-bench";
/// Where the machine has this host's `/usr`.
const SHARED_ROOT: &str = "/host";
const BENCH_INIT: &str = include_str!("bench-init");
const QEMU: &str = "QEMU's virtio-blk (cache=writeback, iothread) and virtio-net (vhost=off) with \
     the same guest under the same KVM; more is better";

/// The image of the guests. What is made of its words is kept by its name, so other words need
/// another name.
fn image() -> Set {
    let prepare = format!(
        "cat >/usr/local/sbin/bench-init <<'END'\n{BENCH_INIT}END\n\
         chmod 755 /usr/local/sbin/bench-init\n"
    );
    Set {
        name: "io".to_owned(),
        packages: "fio iproute2".to_owned(),
        sources: String::new(),
        prepare,
        start: String::new(),
        port: 0,
        ask: String::new(),
    }
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    let jobs = jobs::chosen(&options.only)?;
    options.check()?;
    if let Some(daemon) = options.copy.daemon()? {
        // The machine's kernel has it as a module.
        let _without = std::process::Command::new("modprobe").arg("vhost_net").output();
        let losses = Losses::new(Arc::new(Steps::new()), true, MOST_LOST);
        let root = Some(SHARED_ROOT.into());
        let measured = rounds::measure(options, &jobs, daemon, root, losses).await?;
        println!("{}", serde_json::to_string(&measured)?);
        return Ok(());
    }
    let root = rustix::process::geteuid().is_root();
    ensure!(root, "io needs root: it makes a network, an image and guests of QEMU");
    let Options { rounds, seconds, cpus, memory, file, .. } = options;
    let count = jobs.len();
    let what = format!(
        "{rounds} rounds of {count} jobs of {seconds} s, file of {file}; {memory}, {cpus} vCPU"
    );
    let report = Report::begin(places, "io", QEMU, &what);
    let shares = vec!["usr=/usr".parse::<Share>()?];
    let home = options.home(places);
    let (stock, losses) = Stock::open_with(&options.stock, &home, MOST_LOST, shares).await?;
    let (kvm, kernel) = (stock.kvm(), stock.release.clone());
    let done = measured(&stock, losses, options, &jobs).await;
    let (measured, left) = stock.close(done).await?;
    let leaks = [left, measured.leaks.clone(), machine_leaks(kvm, &home)].concat();
    leaks.iter().for_each(|leak| eprintln!("left over: {leak}"));

    let rows = figures::rows(&jobs, &measured);
    let mut promises = Promises::default();
    let mean = figures::promise(&rows, &measured, &mut promises);
    promises.at_most("things that are left", 0.0, float(leaks.len() as u64));
    figures::print(&rows);
    println!(
        "  {}, aio={:?}; lost to the emulation: {}",
        measured.qemu, measured.aio, measured.lost
    );
    promises.print();
    report.write(json!({
        "kvm": kvm, "kernel": kernel, "shape": options.shape(), "rounds": rounds,
        "qemu": measured.qemu, "aio": measured.aio, "aio_tried": measured.tried,
        "rows": rows, "geometric_mean": shown_mean(mean), "written": measured.written,
        "lost": measured.lost, "leaked": leaks.len(), "promises": promises.figures(),
    }))?;
    promises.hold()
}

/// NaN is no JSON.
fn shown_mean(mean: f64) -> Option<f64> {
    mean.is_finite().then(|| rounded(mean))
}

/// The daemon that this run uses, if it is this host's.
static NATIVE: OnceLock<Client> = OnceLock::new();

/// After an interruption: removes the VMs of a native daemon. Those of the machine end with it.
pub async fn clean_up() -> Result<()> {
    match NATIVE.get() {
        Some(client) => remove_vms(client).await,
        None => Ok(()),
    }
}

/// Measures, natively or in the machine, and removes every VM. Also returns what is left.
async fn measured(
    stock: &Stock,
    losses: Losses,
    options: &Options,
    jobs: &[Job],
) -> Result<(Measured, Vec<String>)> {
    if stock.home.is_none() {
        let _first = NATIVE.set(stock.client.clone());
    }
    stock.remove_vms().await?;
    let image = stock.image(&image(), DISK).await?.name;
    let daemon = Daemon {
        client: stock.client.clone(),
        state: stock.state.clone().into(),
        kernel: stock.kernel.clone(),
        image,
    };
    let measured = match &stock.home {
        None => rounds::measure(options, jobs, daemon, None, losses).await,
        Some(home) => inside(home, &daemon, stock).await,
    };
    // Whether it went well or not.
    let removed = stock.remove_vms().await;
    let measured = measured?;
    removed?;
    let host = Host { client: stock.client.clone(), machine: None };
    Ok((measured, host.leaks().await?))
}

/// Has a copy of this program in the machine of `home` measure. A drop ends the copy, and QEMU with
/// it; the network of QEMU's guests ends with the machine.
async fn inside(home: &Path, daemon: &Daemon, stock: &Stock) -> Result<Measured> {
    stock.steps.begin("measuring in the machine");
    machine::copy_self(Machine::open(home).context("the machine")?, COPY).await?;
    // This program's own words come first; the last of an option counts.
    let words = std::iter::once(COPY.to_owned()).chain(std::env::args().skip(1));
    let state = daemon.state.display().to_string();
    let more = [
        ["--out", "/run"],
        ["--inside", DAEMON_SOCKET],
        ["--state", &state],
        ["--image", daemon.image.as_str()],
        ["--stored-kernel", daemon.kernel.as_str()],
    ];
    let words = words.chain(more.into_iter().flatten().map(str::to_owned));
    let output = machine::command(home, words)?;
    let output = machine::output(home, output, "measuring in the machine").await?;
    serde_json::from_slice(&output).context("the figures from the machine")
}

/// What a machine that has ended has left on this host.
fn machine_leaks(kvm: &str, home: &Path) -> Vec<String> {
    if kvm == "native" {
        return Vec::new();
    }
    dayfly_machine::leaks(home).iter().map(ToString::to_string).collect()
}
