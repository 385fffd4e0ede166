//! From a request to a VM whose agent has its identity.
//!
//! ```text
//! Order ─▶ source verified, open, pinned ─▶ id, name, slot reserved ─▶ VMM started ─▶ (boot: Ready) ─▶ Identity ─▶ Newborn
//! ```
//!
//! A [`Newborn`] that is dropped takes its VM with it: whoever waits for it may go away at any moment.

use super::agent_link::{self, AgentLink, LinkError};
use super::launch::{self, Fds};
use super::link::{self, Link};
use super::pool::{Guest, Lasting, Shell};
use super::source::{self, CloneOf, Frozen, Opened, Template};
use super::state::Event;
use super::step::{self, Step};
use super::{Vm, death, identity};
use crate::daemon::Daemon;
use crate::depot::Loaded;
use crate::door;
use crate::error::{Fault, Outcome, blocking};
use crate::fork::Epoch;
use crate::metrics::{self, Birth};
use crate::net::Wires;
use crate::time::Asked;
use dayfly_api::agent::{Ready, Request};
use dayfly_api::types::{CreateRequest, ErrorCode, ExitKind, NetworkRequest, Source};
use dayfly_host::process::Process;
use dayfly_units::Name;
use dayfly_vmm::config::{Shape, Start};
use dayfly_vmm::control::Command;
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::net::UnixListener as StdListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::time::timeout;

/// Read from the end of a console.
const CONSOLE_READ_BYTES: u64 = 16 << 10;
/// Of these, what an error shows.
const CONSOLE_LINES: usize = 20;

/// While a clone's program starts, which takes so many times as long as the clone itself, the pool holds back: the CPU that it takes is the
/// guest's. An emulated host needs 25 ms and then some 100, one with KVM of its own a twentieth of both.
const PROGRAM: u32 = 4;
/// … and so long at most.
const PROGRAM_AT_MOST: Duration = Duration::from_millis(500);

/// What is to be born.
#[derive(Debug, Clone)]
pub struct Order {
    /// What it starts from.
    pub origin: Origin,
    /// Its name; the id where there is none.
    pub name: Option<Name>,
    /// As given.
    pub labels: BTreeMap<String, String>,
    /// Whether it goes with the connection or the bake that wants it.
    pub ephemeral: bool,
    /// How many clones of itself, at one time, its guest may ask for.
    pub forks: u32,
    /// Whether it plays a rehearsal.
    pub part: Part,
    /// What it has of the network; `None`: what it is a clone of has, or all.
    pub network: Option<NetworkRequest>,
    /// What is asked of its agent as soon as it is who it is: [`Newborn::take_next`] gives the link for the answer.
    pub next: Option<Request>,
}

/// What a VM starts from.
#[derive(Debug, Clone)]
pub enum Origin {
    /// What is found by its name.
    Source(Source),
    /// A snapshot that is open, and perhaps not found yet.
    Template(Arc<Loaded>),
    /// A VM that was forked, and which of its clones this is, from 1.
    Fork(Arc<Epoch>, u32),
}

/// What a VM is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// To be used.
    User,
    /// To be used, once somebody wants it; it waits until then.
    Pool,
    /// To learn which pages it touches; its VMM notes each. What is known of that is not laid ready: it would be noted too.
    Touched,
    /// To learn which pages it writes; nothing was made ready for it.
    Written,
}

impl Order {
    /// What `create` asks for.
    #[must_use]
    pub fn create(request: CreateRequest) -> Self {
        Self {
            origin: Origin::Source(request.source),
            name: request.name,
            labels: request.labels,
            forks: request.forks,
            ephemeral: false,
            part: Part::User,
            network: Some(request.network),
            next: None,
        }
    }
}

/// A VM that nobody has yet.
#[derive(Debug)]
pub struct Newborn {
    daemon: Arc<Daemon>,
    vm: Option<Arc<Vm>>,
    next: Option<Next>,
}

/// The answer to [`Order::next`] is on its way.
#[derive(Debug)]
pub struct Next {
    /// Where it comes from.
    pub link: AgentLink,
    /// To be dropped with the first of it.
    pub lasting: Lasting,
}

impl Newborn {
    /// Where the answer to [`Order::next`] comes from; once.
    pub fn take_next(&mut self) -> Option<Next> {
        self.next.take()
    }

    /// The VM.
    ///
    /// # Panics
    /// Never: only [`Self::keep`], which consumes this, takes it out.
    #[must_use]
    #[expect(clippy::expect_used, reason = "locally proven: `vm` is taken by `keep` and `drop` alone")]
    pub fn vm(&self) -> Arc<Vm> {
        self.vm.clone().expect("a newborn has its VM")
    }

    /// It lives on by itself.
    #[must_use]
    pub fn keep(mut self) -> Arc<Vm> {
        let vm = self.vm();
        self.vm = None;
        vm
    }

    /// Ends it, and waits until nothing of it is left.
    ///
    /// # Errors
    /// Its process survives SIGKILL, or a file cannot be removed.
    pub async fn end(mut self) -> Outcome<()> {
        let vm = self.vm();
        death::remove(&self.daemon, &vm).await?;
        self.vm = None;
        Ok(())
    }
}

impl Drop for Newborn {
    fn drop(&mut self) {
        if let Some(vm) = self.vm.take() {
            let daemon = self.daemon.clone();
            let task = self.daemon.undo.clone();
            task.spawn(async move {
                if let Err(e) = death::remove(&daemon, &vm).await {
                    tracing::error!("removing VM {}: {e}", vm.id);
                }
            });
        }
    }
}

/// Makes and starts a VM. Dropped, or failed, it leaves nothing.
///
/// # Errors
/// What is missing, damaged, taken or exhausted; or why the guest did not come to life, with the end of its console.
pub async fn birth(daemon: &Arc<Daemon>, asked: Asked, order: Order) -> Outcome<Newborn> {
    match attempt(daemon, asked, order.clone(), true).await {
        Err(Failed { fault, was_dying: true }) => {
            tracing::warn!("what was ready for a birth was dying, making another: {fault}");
            attempt(daemon, asked, order, false).await.map_err(|failed| failed.fault)
        }
        result => result.map_err(|failed| failed.fault),
    }
}

/// Why there is no newborn: a fault, and whether another attempt may do better because the shell or clone that the pool had
/// did not live any more.
struct Failed {
    fault: Fault,
    was_dying: bool,
}

impl<E> From<E> for Failed
where
    Fault: From<E>,
{
    fn from(e: E) -> Self {
        Self { fault: e.into(), was_dying: false }
    }
}

async fn attempt(
    daemon: &Arc<Daemon>,
    asked: Asked,
    order: Order,
    from_pool: bool,
) -> Result<Newborn, Failed> {
    let opened = match order.origin {
        Origin::Template(open) => Opened::Snapshot(open),
        Origin::Fork(epoch, number) => Opened::Fork(epoch, number),
        Origin::Source(source) => match Opened::known(daemon, &source) {
            Some(opened) => opened,
            None => {
                let shared = daemon.clone();
                blocking(move || Opened::open(&shared, source)).await.map_err(Step::Source.failed())?
            }
        },
    };
    let wanted = order.name.clone();
    let done = |step| step::done(step, wanted.as_ref());
    done(Step::Source)?;
    let opened_us = asked.elapsed_us();
    let mut under_way = Some(daemon.pool.birth());
    let facts = opened.facts(order.labels, order.ephemeral, order.forks, order.network);
    let pooled = from_pool && order.part == Part::User;
    let (template, shape) = (opened.template()?.filter(|_| pooled), opened.shape()?.filter(|_| pooled));
    let ready = match &template {
        Some(template) => daemon.pool.node_of(template),
        None => shape.and_then(|shape| daemon.pool.node_of_shell(shape)),
    };
    let memory = daemon.budget.reserve(facts.memory_bytes, ready).map_err(Step::Memory.failed())?;
    done(Step::Memory)?;
    let wires = Wires::lay(daemon, &facts).await.map_err(Step::Network.failed())?;
    done(Step::Network)?;
    let shell = match template {
        Some(template) => daemon.pool.take(&template, memory.node),
        None => shape.and_then(|shape| daemon.pool.take_shell(shape, memory.node)),
    };
    let seat = shell.as_ref().map(|shell| shell.seat);
    let vm = match daemon.registry.reserve(&daemon.config, order.name, facts, memory, seat) {
        Ok(vm) => vm,
        Err(refused) => {
            if let Some(shell) = shell {
                daemon.pool.give_back(shell);
            }
            return Err(Step::Name.failed()(refused).into());
        }
    };
    let mut newborn = Newborn { daemon: daemon.clone(), vm: Some(vm.clone()), next: None };
    vm.wire(wires);
    vm.update(|live| {
        live.disks = opened.disks();
        live.asked_us = Some(asked.at_us());
        live.timeline.push(("source verified and open".into(), opened_us));
    });
    let (began, how) = match &shell {
        Some(shell) if shell.is_primed() => (metrics::Start::Clone, "vmm runs: the clone was ready"),
        Some(_) => (metrics::Start::Shell, "vmm runs: a shell was ready"),
        None if matches!(opened, Opened::Boot { .. }) => (metrics::Start::Boot, "vmm runs"),
        None => (metrics::Start::Nothing, "vmm runs"),
    };
    let ready_made = shell.is_some();
    let (mut vmm, ready) = match start(daemon, &vm, opened, shell, order.part).await {
        Ok(started) => started,
        Err(fault) => {
            let step =
                if vm.process().is_none() && vm.live().exit.is_none() { Step::Vmm } else { Step::Guest };
            let fault = explain(&vm, fault).await.during(step.text());
            let lost = vm.live().exit.is_some_and(|exit| exit.reason == ExitKind::Lost);
            if ready_made && lost {
                newborn.end().await?; // its name is free again
                return Err(Failed { fault, was_dying: true });
            }
            return Err(fault.into());
        }
    };
    done(Step::Guest)?;
    let running_us = asked.elapsed_us();
    if !ready_made {
        launch::prepare(daemon, vm.node);
    }
    if vm.facts.fork.may > 0 {
        door::open(daemon, &vm)?;
    }
    let connected_us = AtomicU64::new(running_us);
    vm.mark(how, running_us);
    let alive = async {
        if let Some(listener) = ready {
            let ready = booted(daemon, listener).await?;
            vm.mark("agent ready", asked.elapsed_us());
            vm.update(|live| live.agent_version = ready.version);
        }
        if !vm.has_agent() {
            // It is there once it runs.
            plug(daemon, &vm, &mut vmm).await?;
            return Ok(None);
        }
        let link = identity::give(daemon, &vm, order.next.as_ref(), || {
            let us = asked.elapsed_us();
            connected_us.store(us, Ordering::Relaxed);
            vm.mark("agent connected", us);
        })
        .await?;
        plug(daemon, &vm, &mut vmm).await?;
        Ok(Some(link))
    };
    let result = tokio::select! {
        biased;
        result = alive => result,
        () = vm.wait_gone() => Err(Fault::new(ErrorCode::Guest, "its VMM ended")),
    };
    let link = match result {
        Ok(link) => link.filter(|_| order.next.is_some()),
        Err(fault) => return Err(explain(&vm, fault).await.during(Step::Identity.text()).into()),
    };
    done(Step::Identity)?;
    let ready_us = asked.elapsed_us();
    let longest = Duration::from_micros(ready_us).saturating_mul(PROGRAM).min(PROGRAM_AT_MOST);
    newborn.next = link.and_then(|link| Some(Next { link, lasting: under_way.take()?.lasting(longest) }));
    vm.update(|live| {
        live.ready_us = Some(ready_us);
        live.timeline.push(("identity taken".into(), ready_us));
    });
    let phases = [
        (Birth::Open, opened_us),
        (Birth::Run, running_us),
        (Birth::Connect, connected_us.into_inner()),
        (Birth::Identity, ready_us),
    ];
    daemon.metrics.birth(began, &phases);
    if let Err(refused) = vm.step(Event::Ready) {
        // It ended in this very moment.
        return Err(explain(&vm, refused.into()).await.into());
    }
    if !vm.facts.ephemeral {
        death::note(daemon, &vm).await;
    }
    tracing::debug!(vm = %vm.id, name = %vm.name, ready_us, "born");
    Ok(newborn)
}

/// From now on packets pass: the guest is who it is to be.
async fn plug(daemon: &Daemon, vm: &Vm, vmm: &mut Link) -> Outcome<()> {
    let failed = |e| Fault::internal(format_args!("a tap: {e}"));
    let Some((link, tap)) = vm.wires(|wires| wires.link(&vm.facts.network)).transpose().map_err(failed)?
    else {
        // Whatever it sends is lost, as before.
        return Ok(());
    };
    link::tell(vmm, &Command::Connect(link), &tap, daemon.config.deadlines.control).await?;
    vm.wires(Wires::lead);
    Ok(())
}

/// Starts the VMM. Whoever waits may go away meanwhile; the process is known to its VM before anybody can end that.
async fn start(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    opened: Opened,
    shell: Option<Shell>,
    part: Part,
) -> Outcome<(Link, Option<UnixListener>)> {
    let within = daemon.config.deadlines.control;
    // A clone that is ready is let go here and now: no thread is changed, no file is touched.
    if let Some(Shell { process, mut link, guest: Some(guest), .. }) = shell {
        vm.hold(process.clone());
        let Guest { disks, beneath, pin, agent_version, .. } = guest;
        vm.keep_pinned(pin);
        vm.stand_on(beneath);
        vm.update(|live| {
            live.disks = disks;
            live.agent_version = agent_version;
        });
        let asked = link.ask(&Command::Resume, &[]);
        // After it, for the guest's sake; and whatever came of it.
        death::watch(daemon, vm.clone(), process);
        asked?;
        link.done(within).await?;
        return Ok((link, None));
    }
    // Before anything is waited for: who waits may go away, and the process with it.
    let link = shell.map(|Shell { process, link, .. }| {
        held(daemon, vm, process);
        link
    });
    let launching = vm.launching.clone().lock_owned().await;
    let (shared, started) = (daemon.clone(), vm.clone());
    // It is a CPU that this takes: more at once would only make all of them later.
    let turn = daemon.makers.clone().acquire_owned().await.map_err(Fault::internal)?;
    let (mut link, ready) = blocking(move || {
        let (_launching, _turn) = (launching, turn);
        let (daemon, vm) = (shared, started);
        match opened {
            Opened::Snapshot(open) => {
                let (shape, version) = (Template::of(&open)?.shape, &open.manifest.agent_version);
                clone(&daemon, &vm, (&open).into(), shape, version, part, link)
            }
            Opened::Fork(epoch, _) => {
                let (shape, version) = (epoch.shape(), &epoch.agent_version);
                clone(&daemon, &vm, (&*epoch).into(), shape, version, part, link)
            }
            Opened::Boot { boot, image, kernel } => {
                let mut fds = Fds::default();
                let (start, pin) = source::boot(&daemon, &vm, boot, *image, *kernel, &mut fds)?;
                vm.keep_pinned(pin);
                let launched = launch::launch(&daemon, vm.seat(), start, fds, false)?;
                held(&daemon, &vm, launched.process);
                Ok((launched.link, launched.ready))
            }
        }
    })
    .await?;
    if ready.is_none() {
        link.done(within).await?;
    }
    let listener = ready.map(|ready| {
        ready.set_nonblocking(true)?;
        UnixListener::from_std(ready)
    });
    let listener =
        listener.transpose().map_err(|e| Fault::internal(format_args!("listening for a guest: {e}")))?;
    Ok((link, listener))
}

/// Tells a shell, the one of `link` or a new one, to become a clone. Blocks.
fn clone(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    frozen: Frozen<'_>,
    shape: Shape,
    agent_version: &str,
    part: Part,
    link: Option<Link>,
) -> Outcome<(Link, Option<StdListener>)> {
    vm.update(|live| agent_version.clone_into(&mut live.agent_version));
    // First the process: it gets ready while its disks are made.
    let link = match link {
        Some(link) => link,
        None => {
            let start = Start::Shell { shape, record: part == Part::Touched };
            let launched = launch::launch(daemon, vm.seat(), start, Fds::default(), false)?;
            held(daemon, vm, launched.process);
            launched.link
        }
    };
    step::done(Step::Vmm, Some(&vm.name))?;
    let vmm = vm.process().ok_or_else(|| Fault::new(ErrorCode::Guest, "its VMM ended"))?;
    let clone = CloneOf::new(daemon, vm.id, &vmm, frozen, part)?;
    vm.keep_pinned(clone.pin);
    vm.stand_on(clone.beneath);
    vm.update(|live| live.disks = clone.disks);
    link.ask(&Command::Restore(clone.config), &clone.fds)?;
    Ok((link, None))
}

/// The VM has its process: from now on its end is noticed.
fn held(daemon: &Arc<Daemon>, vm: &Arc<Vm>, process: Arc<Process>) {
    vm.hold(process.clone());
    death::watch(daemon, vm.clone(), process);
}

/// Waits until the agent of a cold boot is there.
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

/// Adds to an error what the VM and its console say.
async fn explain(vm: &Arc<Vm>, mut fault: Fault) -> Fault {
    if vm.process().is_none() && vm.live().exit.is_none() {
        return fault; // there was no VMM
    }
    // Where the VMM is ending, its record says more than a broken connection.
    let _ = timeout(Duration::from_millis(300), vm.wait_gone()).await;
    if let Some(exit) = vm.live().exit {
        fault = Fault::new(
            ErrorCode::Guest,
            format_args!("VM {} ended while it started ({:?}): {}", vm.name, exit.reason, exit.message),
        );
    }
    let dir = vm.dir.clone();
    let tail = blocking(move || Ok(console_tail(&dir))).await.unwrap_or_default();
    if !tail.trim().is_empty() {
        fault.0.message.push_str("\nthe end of its console:\n");
        fault.0.message.push_str(tail.trim_end());
    }
    fault
}

/// The end of a console, as text; where the kernel panicked, what came before that rather than its registers.
#[must_use]
pub fn console_tail(dir: &crate::config::VmDir) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = std::fs::File::open(dir.console())?;
        let length = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(length.saturating_sub(CONSOLE_READ_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(CONSOLE_READ_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).chars().filter(|c| *c == '\n' || !c.is_control()).collect())
    };
    telling(&read().unwrap_or_default())
}

/// The lines of a console that are worth showing.
fn telling(console: &str) -> String {
    let lines: Vec<&str> = console.lines().collect();
    let panic = lines.iter().position(|line| line.contains("Kernel panic"));
    let end = panic.map_or(lines.len(), |at| at + 1);
    lines[end.saturating_sub(CONSOLE_LINES)..end].join("\n")
}

impl From<launch::LaunchError> for Fault {
    fn from(e: launch::LaunchError) -> Self {
        use std::io::ErrorKind::{OutOfMemory, StorageFull};
        let code = match &e {
            launch::LaunchError::Berth(e) if matches!(e.source.kind(), StorageFull | OutOfMemory) => {
                ErrorCode::Exhausted
            }
            launch::LaunchError::Killed(_) => ErrorCode::Guest,
            _ => ErrorCode::Internal,
        };
        Self::new(code, e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_of_a_console_ends_where_the_kernel_panicked() {
        let lines = |range: std::ops::Range<i32>| range.map(|n| format!("line {n}\n")).collect::<String>();
        assert_eq!(telling(""), "");
        assert_eq!(telling("a\nb"), "a\nb");
        assert_eq!(telling(&lines(0..100)).lines().next(), Some("line 80"));
        let panicked = format!("{}Kernel panic - not syncing\n{}", lines(0..30), lines(100..150));
        assert!(telling(&panicked).ends_with("line 29\nKernel panic - not syncing"));
    }
}

#[cfg(test)]
#[path = "birth_tests.rs"]
mod failing;

#[cfg(test)]
#[path = "fork_tests.rs"]
mod forking;

#[cfg(test)]
#[path = "garbage_tests.rs"]
mod garbage;
