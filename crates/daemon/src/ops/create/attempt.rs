//! The phases of creating a VM: source, memory, network, name, process, identity.

use crate::base::error::{ApiError, Outcome, blocking};
use crate::base::metrics::{self, CreatePhase};
use crate::base::time::Asked;
use crate::daemon::Daemon;
use crate::model::program::for_run;
use crate::model::state::Event;
use crate::model::step::{self, Step};
use crate::net::Attachment;
use crate::ops::create::guard::{Next, VmGuard};
use crate::ops::create::last_lines::explain;
use crate::ops::create::order::{Order, Origin};
use crate::ops::create::start::start;
use crate::ops::{admit, expiry, keeper, volumes};
use crate::vm::{Vm, record};
use crate::vmm::agent_link::{self, AgentLink, LinkError};
use crate::vmm::link::Link;
use crate::vmm::pool::{Pool, UnderWay, WarmVmm};
use crate::vmm::sizes::Template;
use crate::vmm::source::{Opened, Purpose};
use crate::vmm::{guest_socket, identity};
use dayfly_api::agent::{PROTOCOL, Ready, Request, check_strings, protocol_of, request_frames};
use dayfly_api::types::{ErrorCode, EventKind, ExitKind, VmExit};
use dayfly_units::text::escaped;
use dayfly_units::{Name, failpoint};
use dayfly_vmm::config::Shape;
use dayfly_vmm::control::Command;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::time::timeout;

/// The longest version of an agent, in characters.
const VERSION: usize = 64;

/// Factor of a clone's start time for which the pool pauses while the clone's program starts,
/// because the guest needs the CPU. An emulated host takes 25 ms for a clone and 100 ms for its
/// program; one with KVM a twentieth of both.
const PROGRAM: u32 = 4;
/// The most time for which the pool pauses for a program.
const PROGRAM_AT_MOST: Duration = Duration::from_millis(500);

/// Creates and starts a VM. If it fails, or its future is dropped, nothing of the VM stays.
///
/// # Errors
/// What is missing, damaged, taken or exhausted; or why the guest did not start, with the end of
/// its console.
pub async fn create(daemon: &Arc<Daemon>, asked: Asked, order: Order) -> Outcome<VmGuard> {
    expiry::check(order.lifetime)?;
    match attempt(daemon, asked, &order, true).await {
        Err(Failed { error, was_dying: true }) => {
            tracing::warn!("what was ready for a VM was dying, making another: {error}");
            let again = rare(attempt(daemon, asked, &order, false));
            again.await.map_err(|failed| failed.error)
        }
        result => result.map_err(|failed| failed.error),
    }
}

/// Boxes a future that few creations need. The future of every creation is smaller then, which
/// matters because its bytes are copied several times on the way from a request to its handler.
fn rare<F: Future>(future: F) -> Pin<Box<F>> {
    Box::pin(future)
}

/// Why an attempt failed, and whether another one may succeed because the pool's warm VMM or clone
/// was dying.
struct Failed {
    error: ApiError,
    was_dying: bool,
}

impl<E> From<E> for Failed
where
    ApiError: From<E>,
{
    fn from(e: E) -> Self {
        Self { error: e.into(), was_dying: false }
    }
}

async fn attempt(
    daemon: &Arc<Daemon>,
    asked: Asked,
    order: &Order,
    from_pool: bool,
) -> Result<VmGuard, Failed> {
    let wanted = order.name.clone().map(Name::from);
    let done = |step| step::done(step, wanted.as_ref());
    let (purpose, lifetime, until) = (order.purpose, order.lifetime, order.until);
    let reserved = reserve(daemon, asked, order, wanted.as_ref(), from_pool).await?;
    let Reserved { under_way, vm, mut guard, opened, opened_us, next, warm } = reserved;
    let mut under_way = Some(under_way);
    let (began, how) = started_with(&opened, warm.as_ref());
    let ready_made = warm.is_some();
    let (mut vmm, ready) = match start(daemon, &vm, opened, warm, purpose).await {
        Ok(started) => started,
        Err(error) => return Err(rare(not_started(&vm, guard, error, ready_made)).await),
    };
    done(Step::Guest)?;
    let running_us = asked.elapsed_us();
    if !ready_made {
        daemon.launcher.prepare(vm.node);
    }
    if vm.facts.fork.max_clones > 0 {
        daemon.serve_self_forks(vm.clone(), guest_socket::listen(&vm)?);
    }
    let connected_us = AtomicU64::new(running_us);
    vm.mark(how, running_us);
    let alive = bring_up(daemon, &vm, asked, &mut vmm, ready, next.as_ref(), &connected_us);
    let result = tokio::select! {
        biased;
        result = alive => result,
        () = vm.wait_gone() => Err(ApiError::new(ErrorCode::Guest, "its VMM ended")),
    };
    let link = match result {
        Ok(link) => link.filter(|_| next.is_some()),
        Err(error) => {
            return Err(rare(explain(&vm, error)).await.during(Step::Identity.text()).into());
        }
    };
    done(Step::Identity)?;
    vm.cap().await?;
    let ready_us = asked.elapsed_us();
    let longest = Duration::from_micros(ready_us).saturating_mul(PROGRAM).min(PROGRAM_AT_MOST);
    guard.next =
        link.and_then(|link| Some(Next { link, lasting: under_way.take()?.lasting(longest) }));
    vm.update(|live| {
        live.ready_us = Some(ready_us);
        live.timeline.push(("identity taken".into(), ready_us));
    });
    let phases = [
        (CreatePhase::Open, opened_us),
        (CreatePhase::Run, running_us),
        (CreatePhase::Connect, connected_us.into_inner()),
        (CreatePhase::Identity, ready_us),
    ];
    daemon.metrics.created(began, &phases);
    if let Err(refused) = vm.step(Event::Ready) {
        // The VM ended at this moment.
        return Err(rare(explain(&vm, refused.into())).await.into());
    }
    expiry::begin(daemon, &vm, lifetime, until);
    if !vm.facts.ephemeral {
        // Before a client learns of the VM, because the next daemon sweeps a VM without a record.
        record::write(&daemon.registry, &vm).await.map_err(|e| e.during("its record"))?;
        failpoint::reached("daemon.create.recorded");
    }
    daemon.happened(&vm, EventKind::Created);
    tracing::debug!(vm = %vm.id, name = %vm.name, ready_us, "created");
    Ok(guard)
}

/// A VM whose source is open and whose memory, network, name and slot are reserved.
struct Reserved {
    under_way: UnderWay,
    vm: Arc<Vm>,
    guard: VmGuard,
    opened: Opened,
    opened_us: u64,
    /// The request to its agent, completed by the image's configuration.
    next: Option<Request>,
    /// What the pool had for it.
    warm: Option<WarmVmm>,
}

/// Opens the source of a VM, and reserves its memory, network and name.
async fn reserve(
    daemon: &Arc<Daemon>,
    asked: Asked,
    order: &Order,
    wanted: Option<&Name>,
    from_pool: bool,
) -> Result<Reserved, Failed> {
    let done = |step| step::done(step, wanted);
    let opened = open(daemon, &order.origin).await?;
    done(Step::Source)?;
    let opened_us = asked.elapsed_us();
    let under_way = daemon.pool.creation();
    let (labels, network) = (order.labels.clone(), order.network.clone());
    let (own_vcpus, vcpus) = (opened.vcpus(None)?, opened.vcpus(order.vcpus)?);
    let mut facts = opened.facts(labels, order.ephemeral, order.forks, network, vcpus);
    facts.auto_remove = order.lifetime.auto_remove;
    // Replaces that of the VM from which it was forked.
    facts.request.clone_from(&order.request);
    if let Some(asked) = &order.volumes {
        facts.volumes.clone_from(asked);
    }
    let inherited = !facts.limits.is_none();
    if let Some(asked) = order.limits {
        facts.limits = asked.or(facts.limits);
    }
    let of_fork = |e: ApiError| if inherited { e.during(admit::OF_FORK) } else { e };
    daemon.groups.check(&facts.limits, facts.vcpus).map_err(of_fork)?;
    volumes::supported(&opened, &facts.volumes)?;
    let folders = volumes::open(daemon, &facts.volumes).await?;
    let mut next = order.next.clone();
    // Before anything is taken from the pool, which has to get it back after an error.
    if let Some(Request::Exec(spec)) = &mut next {
        for_run(spec, order.entrypoint.as_deref(), &facts.config)?;
        let protocol = opened.agent_version().map_or(PROTOCOL, protocol_of);
        check_strings(spec.as_mut(), protocol).map_err(|e| ApiError::from_strings(&e))?;
    }
    let booking = admit::cpus(daemon, facts.limits.cpus_booked).await.map_err(of_fork)?;
    // What waits in the pool is in a group that shares its CPUs with others.
    let from_pool = from_pool && order.purpose == Purpose::User && booking.is_none();
    let pooled = Pooled::of(&opened, vcpus, from_pool)?;
    let ready = pooled.node(&daemon.pool);
    let memory = admit::memory(daemon, facts.memory_bytes, booking.as_ref(), ready)?;
    let share = admit::one(daemon).await?;
    done(Step::Memory)?;
    let attachment = Attachment::allocate(&daemon.networks, &facts, &[]).await;
    let attachment = attachment.map_err(Step::Network.failed())?;
    done(Step::Network)?;
    let warm = pooled.take(&daemon.pool, memory.node);
    let vm_slot = warm.as_ref().map(|warm| warm.vm_slot);
    let name = order.name.clone();
    let vm = match daemon.registry.reserve(&daemon.config, name, facts, memory, vm_slot) {
        Ok(vm) => vm,
        Err(refused) => {
            if let Some(warm) = warm {
                rare(keeper::give_back(daemon, warm)).await;
            }
            return Err(Step::Name.failed()(refused).into());
        }
    };
    vm.keep_share(share);
    vm.keep_booking(booking);
    let guard = VmGuard::new(daemon.clone(), vm.clone(), order.batch.clone());
    if let Some(batch) = &order.batch {
        batch.add(vm.id).map_err(ApiError::internal)?;
    }
    done(Step::Name)?;
    vm.attach(attachment);
    vm.volumes.keep(folders);
    vm.update(|live| {
        live.disks = opened.disks();
        live.starts_vcpus = vcpus > own_vcpus;
        live.asked_us = Some(asked.at_us());
        live.timeline.push(("source verified and open".into(), opened_us));
    });
    Ok(Reserved { under_way, vm, guard, opened, opened_us, next, warm })
}

/// Opens and verifies what a VM starts from.
async fn open(daemon: &Arc<Daemon>, origin: &Origin) -> Outcome<Opened> {
    Ok(match origin {
        Origin::Template(open) => Opened::Snapshot(open.clone()),
        Origin::Fork(fork_point, number) => Opened::Fork(fork_point.clone(), *number),
        Origin::Source(source) => match Opened::known(&daemon.templates, source) {
            Some(opened) => opened,
            None => {
                let (shared, source) = (daemon.clone(), source.clone());
                blocking(move || Opened::open(&shared.templates, source))
                    .await
                    .map_err(Step::Source.failed())?
            }
        },
    })
}

/// What the pool may have for a VM; empty if the VM must not come from the pool.
struct Pooled {
    template: Option<Template>,
    shape: Option<Shape>,
}

impl Pooled {
    fn of(opened: &Opened, vcpus: u8, pooled: bool) -> Outcome<Self> {
        let template = opened.template(vcpus)?.filter(|_| pooled);
        let shape = opened.shape(vcpus)?.filter(|_| pooled);
        Ok(Self { template, shape })
    }

    /// The node of what the pool has.
    fn node(&self, pool: &Pool) -> Option<usize> {
        match &self.template {
            Some(template) => pool.node_of(template),
            None => self.shape.and_then(|shape| pool.node_of_warm_vmm(shape)),
        }
    }

    /// Takes what the pool has on this node.
    fn take(self, pool: &Pool, node: usize) -> Option<WarmVmm> {
        match self.template {
            Some(template) => pool.take(&template, node),
            None => self.shape.and_then(|shape| pool.take_warm_vmm(shape, node)),
        }
    }
}

/// What a VM is started with, for the metrics and for its timeline.
fn started_with(opened: &Opened, warm: Option<&WarmVmm>) -> (metrics::Start, &'static str) {
    match warm {
        Some(warm) if warm.has_guest() => (metrics::Start::Clone, "vmm runs: the clone was ready"),
        Some(_) => (metrics::Start::WarmVmm, "vmm runs: a warm VMM was ready"),
        None if matches!(opened, Opened::Boot { .. }) => (metrics::Start::Boot, "vmm runs"),
        None => (metrics::Start::Nothing, "vmm runs"),
    }
}

/// The error of a VM that did not start. If what the pool gave was dying, the VM is removed before
/// this returns, because another attempt needs its name.
async fn not_started(vm: &Arc<Vm>, guard: VmGuard, error: ApiError, ready_made: bool) -> Failed {
    let step =
        if vm.process().is_none() && vm.live().exit.is_none() { Step::Vmm } else { Step::Guest };
    let error = explain(vm, error).await.during(step.text());
    let lost = |exit: VmExit| matches!(exit.reason, ExitKind::Lost | ExitKind::Memory);
    let lost = vm.live().exit.is_some_and(lost);
    if !(ready_made && lost) {
        return error.into();
    }
    match guard.end().await {
        Ok(()) => Failed { error, was_dying: true },
        Err(e) => e.into(),
    }
}

/// As [`identify`], and mounts the VM's volumes before the guest gets the request `next`.
pub(super) async fn bring_up(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    asked: Asked,
    vmm: &mut Link,
    ready: Option<UnixListener>,
    next: Option<&Request>,
    connected_us: &AtomicU64,
) -> Outcome<Option<AgentLink>> {
    if vm.facts.volumes.is_empty() {
        return identify(daemon, vm, asked, vmm, ready, next, connected_us).await;
    }
    let with_volumes = async {
        identify(daemon, vm, asked, vmm, ready, None, connected_us).await?;
        volumes::mount(daemon, vm).await?;
        vm.mark("volumes mounted", asked.elapsed_us());
        let Some(next) = next else { return Ok(None) };
        let mut link = AgentLink::connect(&vm.dir.vsock(), daemon.config.deadlines.agent).await?;
        let protocol = vm.update(|live| protocol_of(&live.agent_version));
        let frames = request_frames(&mut next.clone(), protocol).map_err(LinkError::from)?;
        link.send_frames(&frames, "starting a program").await?;
        Ok(Some(link))
    };
    rare(with_volumes).await
}

/// Waits until the guest is ready, gives it its identity and connects its network. Stores in
/// `connected_us` when the agent accepted a connection.
async fn identify(
    daemon: &Daemon,
    vm: &Vm,
    asked: Asked,
    vmm: &mut Link,
    ready: Option<UnixListener>,
    next: Option<&Request>,
    connected_us: &AtomicU64,
) -> Outcome<Option<AgentLink>> {
    if let Some(listener) = ready {
        let ready = rare(booted(daemon, listener)).await?;
        vm.mark("agent ready", asked.elapsed_us());
        // Escaped, because the version is shown and written to every snapshot.
        let version = escaped(&ready.version, VERSION).to_string();
        vm.update(|live| live.agent_version = version);
    }
    if !vm.has_agent() {
        // A guest without an agent is ready once it runs.
        connect_network(daemon, vm, vmm).await?;
        return Ok(None);
    }
    let link = identity::give(daemon.config.deadlines.agent, vm, next, || {
        let us = asked.elapsed_us();
        connected_us.store(us, Ordering::Relaxed);
        vm.mark("agent connected", us);
    })
    .await?;
    connect_network(daemon, vm, vmm).await?;
    Ok(Some(link))
}

/// Connects the guest to the network, now that it has its identity. Before, its packets are
/// dropped.
async fn connect_network(daemon: &Daemon, vm: &Vm, vmm: &mut Link) -> Outcome<()> {
    let Some((link, tap)) = vm.attachment(|attachment| attachment.link(&vm.facts.network)) else {
        // The guest has no network: its packets are dropped, as before.
        return Ok(());
    };
    vmm.ask(&Command::Connect(link), &tap)?;
    // From here on only the VMM has the tap.
    drop(tap);
    vmm.done(daemon.config.deadlines.control).await?;
    vm.connect_ports(&daemon.config);
    Ok(())
}

/// Waits for the report of the agent after a cold boot.
async fn booted(daemon: &Daemon, listener: UnixListener) -> Outcome<Ready> {
    let within = daemon.config.deadlines.boot;
    let ready = async {
        let io = |source| LinkError::Io { doing: "reporting ready", source };
        let (mut stream, _) = listener.accept().await.map_err(io)?;
        agent_link::read_ready(&mut stream).await
    };
    match timeout(within, ready).await {
        Ok(ready) => Ok(ready?),
        Err(_) => Err(LinkError::Timeout { doing: "booting", waited: within }.into()),
    }
}
