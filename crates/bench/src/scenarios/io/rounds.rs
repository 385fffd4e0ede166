//! The rounds: in each one a guest of each VMM is booted, does all jobs and is removed. The order
//! of the VMMs alternates from round to round.

use super::fio;
use super::guests::{Aio, Daemon, Shape};
use super::jobs::{self, Job};
use super::network::Network;
use super::options::Options;
use super::peer::Peer;
use super::qemu::{Choice, Parts, Qemu};
use super::threads::{self, Written};
use crate::figures::geometric_mean;
use crate::prelude::*;
use crate::requests::{MAX_OUTPUT, create, gone};
use crate::stock::{LABEL, Losses};
use dayfly_api::types::{BootSource, Source};
use dayfly_e2e::{guest::script, traffic::PORT};
use dayfly_units::CpuModel;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

/// How long a guest may take from its start until its program serves.
const BOOT: Duration = Duration::from_secs(300);
/// Between two attempts to reach the program.
const AGAIN: Duration = Duration::from_millis(100);
/// How long the file of the jobs may take.
const FILL: Duration = Duration::from_secs(1800);
/// Starts the program in a guest of the daemon; bench-init does in one of QEMU.
const SERVE: &str =
    "DAYFLY_GUEST=1 setsid dayfly-witness serve >/run/bench-serve 2>&1 </dev/null &";
const VHOST: &str = "/dev/vhost-net";

/// A VMM, as figures name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Vmm {
    /// dayfly.
    Dayfly,
    /// QEMU; its process moves the packets.
    Qemu,
    /// QEMU, and the host's kernel moves the packets.
    QemuVhost,
}

/// Figures of jobs, by their names, each in the job's unit.
pub type Rates = BTreeMap<String, Vec<f64>>;

/// What was measured where the guests are.
#[derive(Debug, Serialize, Deserialize)]
pub struct Measured {
    /// One figure for each round.
    pub rates: BTreeMap<Vmm, Rates>,
    /// Of all VMMs of dayfly together; none if only the network was measured.
    pub written: Option<Written>,
    /// QEMU's version.
    pub qemu: String,
    /// The one that QEMU used.
    pub aio: Aio,
    /// The geometric mean of the figures of the disk with each, if both were tried.
    pub tried: BTreeMap<Aio, f64>,
    /// Guests that the emulation crashed, and that were made again.
    pub lost: usize,
    /// What QEMU's guests have left.
    pub leaks: Vec<String>,
}

/// The VMMs of a round, in their order: A B, then B A.
pub fn order(round: usize, vhost: bool) -> Vec<Vmm> {
    let mut order = vec![Vmm::Dayfly, Vmm::Qemu];
    order.extend(vhost.then_some(Vmm::QemuVhost));
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// Measures the jobs with guests of `daemon` and of QEMU, which is below the folder `root`.
pub async fn measure(
    options: &Options,
    jobs: &[Job],
    daemon: Daemon,
    root: Option<PathBuf>,
    losses: Losses,
) -> Result<Measured> {
    let parts = Parts::of(&daemon.state, &daemon.kernel, &daemon.image, root);
    let qemu = parts.version().await?;
    let network = Network::new(options.addresses)?;
    parts.sweep().with_context(|| parts.beside.display().to_string())?;
    let mut bench = Bench { shape: options.shape(), daemon, parts, network, losses };
    let (disks, nets): (Vec<Job>, Vec<Job>) = jobs.iter().copied().partition(Job::is_disk);
    let vhost = !nets.is_empty() && Path::new(VHOST).exists();
    let (aio, tried) = bench.best_aio(options.aio, &disks).await?;
    let mut rates: BTreeMap<Vmm, Rates> = BTreeMap::new();
    let mut written = Vec::new();
    for round in 0..options.rounds {
        for vmm in order(round, vhost) {
            let (jobs, vhost) = match vmm {
                Vmm::QemuVhost => (&nets[..], true),
                _ => (jobs, false),
            };
            let what = format!("round {} of {}, {vmm:?}", round + 1, options.rounds);
            let got = if vmm == Vmm::Dayfly {
                let (got, bytes) = bench.of_dayfly(&what, jobs).await?;
                written.push(bytes);
                got
            } else {
                bench.of_qemu(&what, jobs, Choice { aio, vhost }).await?
            };
            let of_vmm = rates.entry(vmm).or_default();
            for (job, rate) in std::iter::zip(jobs, got) {
                of_vmm.entry(job.to_string()).or_default().push(rate);
            }
        }
    }
    let written = (!disks.is_empty()).then(|| Written::sum(&written));
    let lost = bench.losses.count;
    drop(bench);
    let leaks = super::network::leaks();
    Ok(Measured { rates, written, qemu, aio, tried, lost, leaks })
}

struct Bench {
    shape: Shape,
    daemon: Daemon,
    parts: Parts,
    network: Network,
    losses: Losses,
}

impl Bench {
    /// `wanted`, or the one with which QEMU's disk is faster.
    async fn best_aio(
        &mut self,
        wanted: Option<Aio>,
        disks: &[Job],
    ) -> Result<(Aio, BTreeMap<Aio, f64>)> {
        let mut tried = BTreeMap::new();
        if let Some(aio) = wanted {
            return Ok((aio, tried));
        }
        if disks.is_empty() {
            return Ok((Aio::IoUring, tried));
        }
        for aio in [Aio::IoUring, Aio::Threads] {
            let what = format!("trying {aio:?} of QEMU");
            let rates = self.of_qemu(&what, disks, Choice { aio, vhost: false }).await?;
            tried.insert(aio, geometric_mean(rates));
        }
        let faster = tried.iter().max_by(|a, b| a.1.total_cmp(b.1)).context("no aio")?;
        Ok((*faster.0, tried))
    }

    async fn of_qemu(&mut self, what: &str, jobs: &[Job], choice: Choice) -> Result<Vec<f64>> {
        let Self { shape, parts, network, losses, .. } = self;
        losses.steps.begin(what);
        let run = async || {
            let mut guest = Qemu::start(parts, *shape, choice, network).await?;
            let rates = tokio::select! {
                rates = rates(network.address(), jobs, *shape) => {
                    rates.with_context(|| guest.last_lines())
                }
                error = guest.lost() => Err(error),
            };
            guest.end().await?;
            rates
        };
        losses.kept(what, run).await
    }

    /// Also counts what the VMM's threads have written.
    async fn of_dayfly(&mut self, what: &str, jobs: &[Job]) -> Result<(Vec<f64>, Written)> {
        let Self { shape, daemon, losses, .. } = self;
        losses.steps.begin(what);
        let run = async || {
            let boot = BootSource {
                image: daemon.image.clone(),
                kernel: Some(daemon.kernel.clone()),
                memory_bytes: shape.memory.0,
                vcpus: shape.cpus,
                init: None,
                cpu_model: CpuModel::Host,
            };
            let request = create(Source::Boot(boot), &[LABEL]);
            let vm = timeout(BOOT, daemon.client.create(&request)).await.context("a boot")??;
            let id = vm.id.to_string();
            let measured = async {
                let address = vm.network.as_ref().context("the VM has no network")?.address;
                let pid = daemon.client.vm(&id).await?.pid.context("the VM has no process")?;
                let exec = daemon.client.exec(&id, &script(SERVE, &[])).await?;
                exec.finish(MAX_OUTPUT).await?;
                let rates = rates(address, jobs, *shape).await?;
                Ok((rates, threads::written(pid)?))
            };
            let measured = measured.await;
            gone(daemon.client.remove_vm(&id, true).await)?;
            measured
        };
        losses.kept(what, run).await
    }
}

/// The figures of the jobs in a guest that boots, or has booted.
async fn rates(address: Ipv4Addr, jobs: &[Job], shape: Shape) -> Result<Vec<f64>> {
    let at = SocketAddrV4::new(address, PORT);
    let reached = async {
        while !matches!(timeout(BOOT, TcpStream::connect(at)).await, Ok(Ok(_))) {
            sleep(AGAIN).await;
        }
    };
    timeout(BOOT, reached).await.with_context(|| format!("{at}: no program in the guest"))?;
    let (peer, jobs) = (Peer(at), jobs.to_vec());
    apart(move || {
        if jobs.iter().any(Job::is_disk) {
            fio::filled(&peer.run(&jobs::fill(shape.file.0), FILL)?)?;
        }
        jobs.iter().map(|job| rate(peer, *job, shape).with_context(|| job.to_string())).collect()
    })
    .await
}

fn rate(peer: Peer, job: Job, shape: Shape) -> Result<f64> {
    let time = Duration::from_secs(shape.seconds);
    match job {
        Job::Disk(disk) => {
            fio::rate(&disk, &peer.run(&disk.text(shape.file.0, shape.seconds), time)?)
        }
        Job::Net(traffic) => peer.rate(traffic, time),
    }
}

/// What `work` returns, in a thread that ends with this process: a runtime waits at its end for
/// those of `spawn_blocking`.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (send, receive) = oneshot::channel();
    let thread = std::thread::Builder::new().name("peer".to_owned());
    // If the receiver is gone, nothing wants the result.
    thread.spawn(move || drop(send.send(work()))).context("the peer's thread")?;
    receive.await.context("the peer's thread ended")?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_the_vmms_alternates() {
        let orders: Vec<_> = (0..3).map(|round| order(round, false)).collect();
        let (there, back) = ([Vmm::Dayfly, Vmm::Qemu], [Vmm::Qemu, Vmm::Dayfly]);
        assert_eq!(orders, [there, back, there]);
        assert_eq!(order(1, true), [Vmm::QemuVhost, Vmm::Qemu, Vmm::Dayfly]);
    }
}
