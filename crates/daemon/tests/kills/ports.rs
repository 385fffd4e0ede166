//! Relays of published ports, through ends of the daemon, of the relay, and of the VM. The guest
//! does not answer: clients connect to the listener, and wait.

use crate::guest::{self, BASE, GUEST};
use crate::living::Living;
use crate::testbed::{Testbed, until};
use anyhow::{Context, Result, ensure};
use dayfly_api::types::{PortProtocol, Publish, VmLimits};
use dayfly_host::groups::{Groups, Root};
use dayfly_host::process::{Process, ProcessId, scan_below};
use dayfly_units::{VmId, needs};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::UnshareFlags;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::Command;
use std::time::Instant;

const TCP: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 5001);
const UDP: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 5002);

fn ports() -> Vec<Publish> {
    let port = |(host, host_port), guest_port, protocol| Publish {
        host: Some(IpAddr::V4(host)),
        host_port,
        guest_port,
        protocol,
    };
    vec![port(TCP, 80, PortProtocol::Tcp), port(UDP, 53, PortProtocol::Udp)]
}

/// Runs `test` in a network namespace, and with a folder /run, that only this thread and what it
/// starts can see. Both are gone when these have ended.
fn with_own_network(test: impl AsyncFnOnce() -> Result<()> + Send) -> Result<()> {
    let test = || {
        // SAFETY: unshare(2) of these namespaces affects only this thread and what it starts.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWNET) }
            .context("this test needs CAP_SYS_ADMIN")?;
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        mount("none", "/run", "tmpfs", MountFlags::empty(), None)?;
        let up = Command::new("ip").args(["link", "set", "lo", "up"]).status()?;
        ensure!(up.success(), "ip: {up}");
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(test())
    };
    std::thread::scope(|scope| {
        let thread = scope.spawn(test);
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The relays of this testbed.
fn relays(bed: &Testbed) -> Result<Vec<ProcessId>> {
    let found = scan_below(&bed.run().join("vms"), "dayfly-relay")?;
    Ok(found.iter().map(|relay| relay.process).collect())
}

fn kill(relay: ProcessId) -> Result<()> {
    let process = Process::open(relay)?.context("a relay that has ended")?;
    process.kill()?;
    ensure!(process.wait(None)?.is_some());
    Ok(())
}

/// Waits until there is one relay that is not `other`, and clients find it.
async fn one_but(bed: &Testbed, other: Option<ProcessId>) -> Result<ProcessId> {
    let mut one = None;
    until("there is a relay", async || {
        one = match *relays(bed)? {
            [relay] if Some(relay) != other => Some(relay),
            _ => None,
        };
        Ok(one.is_some() && TcpStream::connect(TCP).is_ok())
    })
    .await?;
    UdpSocket::bind(UDP).err().context("a UDP port that is not bound")?;
    one.context("found above")
}

/// The control groups of a process, without the numbers and names of hierarchies.
fn groups(pid: u32) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    Ok(text.lines().map(str::to_owned).collect())
}

async fn leaks_nothing(bed: &Testbed) -> Result<()> {
    let leaks = bed.client.leaks().await?;
    ensure!(leaks.is_empty(), "{leaks:?}");
    Ok(())
}

#[test]
fn a_relay_outlives_daemons_and_ends_with_its_vm() -> Result<()> {
    with_own_network(outlives)
}

async fn outlives() -> Result<()> {
    let mut bed = Testbed::new()?;
    bed.network = "10.77.0.0/24";
    guest::store(&bed, GUEST, 'c')?;
    bed.start().await?;
    guest::base(&bed, GUEST, BASE).await?;
    ensure!(relays(&bed)?.is_empty(), "a VM without ports has a relay");
    let ports = ports();
    let has_groups = Groups::check(&Root::Own).is_ok_and(|all| all.are_all());
    let limits = match needs::met(needs::Need::Groups, has_groups) {
        true => {
            let (memory_max_bytes, pids_max) = (Some(16 << 20), Some(17));
            VmLimits { memory_max_bytes, pids_max, ..VmLimits::default() }
        }
        false => VmLimits::default(),
    };
    let created = guest::create_published(&bed, "published", ports.clone(), limits).await?;
    let vm = Living::new(created, &bed)?;
    let first = one_but(&bed, None).await?;
    // The kernel bills the VM.
    let vmm = bed.processes().get(&vm.id).context("a VM without a VMM")?.pid;
    ensure!(groups(first.pid)? == groups(vmm)?, "{:?}", groups(first.pid)?);
    leaks_nothing(&bed).await?;

    // It outlives its daemon, which does not miss it, and the next one leaves it alone.
    bed.kill()?;
    TcpStream::connect(TCP)?;
    // That of a VM that is gone is swept.
    let name = bed.run().join(format!("vms/{}/dayfly-relay", VmId::random()));
    let mut stray = Command::new("sleep").arg0(name).arg("1000").spawn()?;
    bed.start().await?;
    ensure!(stray.wait()?.signal() == Some(9));
    ensure!(one_but(&bed, None).await? == first);
    let network = vm.listed(&bed).await?.network.context("a VM without a network")?;
    ensure!(network.published == ports, "{:?}", network.published);
    leaks_nothing(&bed).await?;

    // It is replaced if it ends: that of a daemon before, that of this daemon, and one that ends
    // while no daemon runs.
    kill(first)?;
    let second = one_but(&bed, Some(first)).await?;
    kill(second)?;
    let third = one_but(&bed, Some(second)).await?;
    bed.kill()?;
    kill(third)?;
    ensure!(TcpStream::connect(TCP).is_err());
    bed.start().await?;
    let fourth = one_but(&bed, Some(third)).await?;
    vm.runs_on(&bed).await?;
    ensure!(groups(fourth.pid)? == groups(vmm)?, "{:?}", groups(fourth.pid)?);
    // A daemon that stops leaves it too.
    bed.stop()?;
    bed.start().await?;
    ensure!(one_but(&bed, None).await? == fourth);

    // It ends with its VM, and the ports are free.
    bed.client.remove_vm(&vm.word(), true).await?;
    until("the relay has ended", async || Ok(relays(&bed)?.is_empty())).await?;
    // A process that ends has no command line any more before its files are closed.
    until("the ports are free", async || {
        Ok(TcpListener::bind(TCP).is_ok() && UdpSocket::bind(UDP).is_ok())
    })
    .await?;
    leaks_nothing(&bed).await?;

    // Also while no daemon runs.
    let created = guest::create_published(&bed, "second", ports, limits).await?;
    let vm = Living::new(created, &bed)?;
    one_but(&bed, None).await?;
    bed.kill()?;
    kill(*bed.processes().get(&vm.id).context("a VM without a VMM")?)?;
    until("the relay has ended", async || Ok(relays(&bed)?.is_empty())).await?;
    bed.start().await?;
    ensure!(relays(&bed)?.is_empty());
    bed.client.remove_vm(&vm.word(), true).await?;
    leaks_nothing(&bed).await?;
    bed.stop()
}

/// How often the threads of a process have waited.
fn waits(pid: u32) -> Result<u64> {
    let mut all = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(task?.path().join("status")).unwrap_or_default();
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        all += count.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(all)
}

/// CPU time of a process, in ticks of the clock.
fn ticks(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(')').context("a stat line")?.1.split_whitespace();
    Ok(fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum())
}

/// Words that go to the guest and back, one after another.
const WORDS: u32 = 20_000;
/// Bytes that go to the guest afterwards.
const BYTES: usize = 1 << 30;

#[test]
fn bytes_of_published_ports_are_the_work_of_the_vm_and_not_of_the_daemon() -> Result<()> {
    with_own_network(bytes_pass)
}

async fn bytes_pass() -> Result<()> {
    let mut bed = Testbed::new()?;
    bed.network = "10.77.0.0/24";
    guest::store(&bed, GUEST, 'c')?;
    bed.start().await?;
    guest::base(&bed, GUEST, BASE).await?;
    let created = guest::create_published(&bed, "served", ports(), VmLimits::default()).await?;
    let vm = Living::new(created, &bed)?;
    // A program of the host stands where the guest would be: the microguest speaks no TCP.
    let address = vm.listed(&bed).await?.network.context("a VM without a network")?.address;
    let address_of_lo = format!("{address}/32");
    let added =
        Command::new("ip").args(["address", "add", &address_of_lo, "dev", "lo"]).status()?;
    ensure!(added.success(), "ip: {added}");
    let guest = TcpListener::bind((address, 80))?;
    // So that only the relay runs for the VM.
    bed.client.pause(&vm.word()).await?;
    let relay = one_but(&bed, None).await?.pid;
    let daemon = bed.pid()?;

    let served = std::thread::spawn(move || -> Result<()> {
        loop {
            let (mut stream, _) = guest.accept()?;
            let mut word = [0; 4];
            // The client that only looked whether there is a relay.
            if stream.read_exact(&mut word).is_err() {
                continue;
            }
            for _ in 1..WORDS {
                stream.write_all(&word)?;
                stream.read_exact(&mut word)?;
            }
            let count = std::io::copy(&mut stream, &mut std::io::sink())?;
            ensure!(count == u64::try_from(BYTES)?, "{count}");
            return Ok(());
        }
    });
    let (before, ticks_before) = (waits(daemon)?, ticks(daemon)?);
    let (relay_before, began) = (waits(relay)?, Instant::now());
    let mut client = TcpStream::connect(TCP)?;
    client.set_nodelay(true)?;
    let mut word = *b"word";
    for _ in 1..WORDS {
        client.write_all(&word)?;
        client.read_exact(&mut word)?;
    }
    let words = began.elapsed();
    let (daemon_waits, relay_waits) = (waits(daemon)? - before, waits(relay)? - relay_before);
    let daemon_ticks = ticks(daemon)? - ticks_before;
    // The connection goes on without a daemon.
    bed.kill()?;
    client.write_all(&word)?;
    let began = Instant::now();
    let piece = vec![0; 1 << 16];
    for _ in 0..BYTES / piece.len() {
        client.write_all(&piece)?;
    }
    drop(client);
    served.join().map_err(|_| anyhow::anyhow!("the guest's program"))??;
    let bytes = began.elapsed();
    println!(
        "{WORDS} words there and back in {words:?}, {} MiB in {bytes:?}; waits: {daemon_waits} of \
         dayflyd, {relay_waits} of the relay; ticks: {} of dayflyd, {} of the relay",
        BYTES >> 20,
        daemon_ticks,
        ticks(relay)?,
    );
    // It would wait at least once for each word, as the relay does. Its own clocks are few.
    ensure!(relay_waits > u64::from(WORDS) / 2, "{relay_waits}");
    ensure!(daemon_waits < u64::from(WORDS) / 10, "{daemon_waits}");
    bed.start().await?;
    ensure!(one_but(&bed, None).await?.pid == relay);
    bed.client.remove_vm(&vm.word(), true).await?;
    bed.stop()
}
