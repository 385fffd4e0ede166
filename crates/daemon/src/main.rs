//! The program `dayflyd`; the library crate [`dayfly_daemon`] describes how it works.

use anyhow::Context;
use clap::Parser;
use dayfly_daemon::base::config::{self, Config, Deadlines, DiskSpace};
use dayfly_daemon::base::cpu_alloc::check_main;
use dayfly_daemon::base::prefix::Prefix;
use dayfly_daemon::vm::uids::IdFiles;
use dayfly_daemon::volumes::server;
use dayfly_host::cpus::{self, CpuList};
use dayfly_host::groups::Root;
use dayfly_units::{Bytes, ParseBytesError, failpoint};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};

/// The daemon of dayfly: virtual machines that are born fast, live a day, and are gone.
#[derive(Debug, Parser)]
#[command(name = "dayflyd", version)]
struct Options {
    /// Folder of images, kernels, layers and snapshots.
    #[arg(long, env = "DAYFLY_STATE", default_value = "/var/lib/dayfly")]
    state: PathBuf,
    /// Folder of the API socket and of the VMs' folders.
    #[arg(long, env = "DAYFLY_RUN", default_value = "/run/dayfly")]
    run: PathBuf,
    /// The dayfly-vmm program; by default the one beside dayflyd.
    #[arg(long, env = "DAYFLY_VMM")]
    vmm: Option<PathBuf>,
    /// Memory that all VMs together may have, in percent of the host's. Clones share unwritten
    /// pages, so more than 100 is useful.
    #[arg(
        long,
        env = "DAYFLY_OVERCOMMIT",
        value_name = "PERCENT",
        default_value_t = dayfly_daemon::base::config::OVERCOMMIT
    )]
    overcommit: u32,
    /// Memory of the host that no VM is promised, such as 512M, or none: VMs are then created
    /// whatever memory is available. By default a thirty-second of the host's memory.
    #[arg(long, env = "DAYFLY_MEMORY_RESERVE", value_name = "SIZE", value_parser = reserve)]
    memory_reserve: Option<Reserve>,
    /// Space that each VM's disks are guaranteed. A VM within it never waits for space. By default
    /// a 4096th of the file system, 4 to 64 MiB.
    #[arg(long, env = "DAYFLY_DISK_SHARE", value_name = "SIZE")]
    disk_share: Option<Bytes>,
    /// The most that the layers of one VM may have on the host's disk; the VM waits at the limit.
    /// By default no limit but the size of its disks.
    #[arg(long, env = "DAYFLY_DISK_QUOTA", value_name = "SIZE")]
    disk_quota: Option<Bytes>,
    /// Free space of the state folder below which bakes, snapshots, uploads and new VMs are
    /// refused. By default a thirty-second of the file system, at most 1 GiB.
    #[arg(long, env = "DAYFLY_DISK_RESERVE", value_name = "SIZE")]
    disk_reserve: Option<Bytes>,
    /// Free space of the run folder below which new VMs are refused.
    #[arg(long, env = "DAYFLY_RUN_RESERVE", value_name = "SIZE", default_value = "8M")]
    run_reserve: Bytes,
    /// The most VMMs and clones that wait, made ahead of demand; 0 for none. By default as many as
    /// fit a twentieth of the host's memory.
    #[arg(long, env = "DAYFLY_POOL", value_name = "N")]
    pool: Option<usize>,
    /// The addresses of VMs, such as 10.88.0.0/16, or none: VMs then have no network.
    #[arg(
        long,
        env = "DAYFLY_NETWORK",
        value_name = "ADDRESS/BITS",
        default_value = dayfly_daemon::base::config::NETWORK,
        value_parser = network
    )]
    network: Network,
    /// A private range that VMs may reach unless they are closed, such as 10.1.0.0/16; may be
    /// repeated. The host's own addresses stay out of reach.
    #[arg(long, env = "DAYFLY_REACH", value_name = "ADDRESS/BITS", value_delimiter = ',')]
    reach: Vec<ipnet::Ipv4Net>,
    /// Where VMs have their control groups: the path of a group, such as /dayfly, which is made; or
    /// none: VMs have no limits and no bill. By default in the daemon's own group.
    #[arg(long, env = "DAYFLY_GROUP_ROOT", value_name = "PATH", value_parser = group_root)]
    group_root: Option<Root>,
    /// CPUs of dayflyd and of its helpers, such as 0 or 0-1,8, on which no VM then runs. By default
    /// dayflyd runs where VMs do. Needs control groups with the controller cpuset.
    #[arg(long, env = "DAYFLY_MAIN_CPUS", value_name = "LIST", default_value = "")]
    main_cpus: CpuList,
    /// Socket on which the machine's supervisor takes orders for published ports.
    #[arg(long, env = "DAYFLY_PORTS", value_name = "SOCKET", hide = true)]
    ports: Option<PathBuf>,
    /// Factor of the time limits for guests, VMMs and pages, 1 to 100. Use more than 1 on a host
    /// that is emulated or far too small.
    #[arg(
        long,
        env = "DAYFLY_TIMEOUT_FACTOR",
        value_name = "TIMES",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=100)
    )]
    timeout_factor: u32,
    /// Lists the failpoints, one of which the environment variable DAYFLY_FAILPOINT arms.
    #[arg(long, hide = true)]
    failpoints: bool,
}

/// Value of [`Options::network`]; `None`: VMs have no network.
#[derive(Debug, Clone, Copy)]
struct Network(Option<Prefix>);

/// Value of [`Options::memory_reserve`]; `None`: no reserve.
#[derive(Debug, Clone, Copy)]
struct Reserve(Option<u64>);

fn reserve(text: &str) -> Result<Reserve, String> {
    if text == "none" {
        return Ok(Reserve(None));
    }
    text.parse()
        .map(|Bytes(bytes)| Reserve(Some(bytes)))
        .map_err(|e: ParseBytesError| e.to_string())
}

fn group_root(text: &str) -> Result<Root, String> {
    match text {
        "none" => Ok(Root::Nowhere),
        path if path.starts_with('/') && !path.split('/').any(|name| name == "..") => {
            Ok(Root::At(path.into()))
        }
        _ => Err("expected an absolute path of a group, such as /dayfly, or none".to_owned()),
    }
}

fn network(text: &str) -> Result<Network, String> {
    if text == "none" {
        Ok(Network(None))
    } else {
        text.parse().map(|prefix| Network(Some(prefix)))
    }
}

fn beside() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("finding dayflyd's own program")?;
    Ok(own.with_file_name("dayfly-vmm"))
}

fn main() -> anyhow::Result<()> {
    if std::env::args_os().nth(1).is_some_and(|option| option == server::JOIN) {
        return server::join_streams().context("joining two streams");
    }
    dayfly_daemon::base::heap::keep_less();
    let options = Options::parse();
    // Before threads, which inherit it.
    stay_on_main(&options.main_cpus)?;
    // SAFETY: nothing before this line starts a thread.
    let huge = unsafe { dayfly_sys::code::to_huge_pages() };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.context("starting threads")?.block_on(run(options, huge))
}

/// Restricts this process to its CPUs. Processes that it starts inherit that, except VMMs and
/// pagers, which are in control groups with other CPUs.
fn stay_on_main(main: &CpuList) -> anyhow::Result<()> {
    if main.is_empty() {
        return Ok(());
    }
    let host = cpus::online().context("--main-cpus: the CPUs of this host")?;
    check_main(main, &host).map_err(|why| anyhow::anyhow!("--main-cpus: {why}"))?;
    cpus::keep_to(main).with_context(|| format!("--main-cpus: staying on {main}"))
}

/// Raises the soft limit of open files to the hard limit. Each VM takes several descriptors, and
/// each of its published ports one.
fn more_descriptors() -> std::io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?)
}

async fn run(options: Options, huge: std::io::Result<usize>) -> anyhow::Result<()> {
    dayfly_daemon::base::log::begin();
    let failpoints = dayfly_daemon::failpoints::all();
    if options.failpoints {
        failpoints.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    match huge {
        Ok(1..) => {}
        Ok(0) => tracing::debug!("no part of this program's code fills a huge page"),
        Err(e) => tracing::info!("requests will be slower, with the code in small pages: {e}"),
    }
    if let Some(armed) = failpoint::arm_from_env(&failpoints)? {
        tracing::warn!("{}={armed}: this daemon will end there", failpoint::VARIABLE);
    }
    let absolute =
        |path: PathBuf| std::path::absolute(&path).with_context(|| format!("{}", path.display()));
    let vmm = absolute(options.vmm.map_or_else(beside, Ok)?)?;
    anyhow::ensure!(vmm.is_file(), "{}: no such program; DAYFLY_VMM names another", vmm.display());
    more_descriptors().context("raising the limit of open files")?;
    let nodes = dayfly_host::numa::nodes().context("looking at the host's memory")?;
    let memory_bytes = nodes.iter().map(|node| node.memory_bytes).sum();
    let config = Config {
        state: absolute(options.state)?,
        run: absolute(options.run)?,
        vmm,
        overcommit: options.overcommit,
        memory_reserve_bytes: options
            .memory_reserve
            .map_or(Some(memory_bytes / config::MEMORY_RESERVE_FRACTION), |Reserve(bytes)| bytes),
        disk: DiskSpace {
            share_bytes: options.disk_share.map(|Bytes(bytes)| bytes),
            quota_bytes: options.disk_quota.map(|Bytes(bytes)| bytes),
            reserve_bytes: options.disk_reserve.map(|Bytes(bytes)| bytes),
            run_reserve_bytes: options.run_reserve.0,
        },
        pool: options.pool.unwrap_or_else(|| config::pool(memory_bytes)),
        network: options.network.0,
        reach: options.reach,
        ports: options.ports.map(absolute).transpose()?,
        group_root: options.group_root.unwrap_or(Root::Own),
        main_cpus: options.main_cpus,
        first_uid: IdFiles::read()?.choose()?,
        deadlines: Deadlines::default().times(options.timeout_factor),
    };
    if let Err(e) = dayfly_host::process::keep_for_oom() {
        tracing::warn!("the kernel may end this daemon before VMs if memory is short: {e}");
    }
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    dayfly_daemon::serve::serve(config, async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
    .await
}
