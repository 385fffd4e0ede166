//! From a request to a VM whose agent has its identity.
//!
//! ```text
//! Order ─▶ source verified, open, pinned ─▶ id, name, slot reserved ─▶ VMM started ─▶ (boot: Ready) ─▶ Identity ─▶ Newborn
//! ```
//!
//! A [`Newborn`] that is dropped takes its VM with it: whoever waits for it may go away at any moment.

use super::agent_link::{self, LinkError};
use super::launch::{self, Fds, Launched};
use super::pool::{self, Shell};
use super::state::Event;
use super::{Disk, Facts, Vm, control_link, death, identity};
use crate::config::{MEMORY_BYTES, MEMORY_STEP_BYTES};
use crate::daemon::Daemon;
use crate::error::{Fault, Outcome, blocking};
use crate::time::{Asked, unix_ms};
use dayfly_api::agent::Ready;
use dayfly_api::types::{BootSource, CreateRequest, ErrorCode, Source};
use dayfly_host::process::Process;
use dayfly_store::{DiskRef, Image, Kernel, OpenSnapshot, Pin};
use dayfly_units::Name;
use dayfly_vmm::config::{
    BootConfig, DiskConfig, FdNumber, LayerConfig, MAX_VCPUS, RestoreConfig, Shape, Start,
};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::time::timeout;

/// The kernel's command line of a cold boot. A panic is told by pvpanic, then ends the machine.
const CMDLINE: &str =
    "console=ttyS0 quiet reboot=t panic=-1 i8042.noaux i8042.nokbd random.trust_cpu=on root=/dev/vda";
/// Read from the end of a console.
const CONSOLE_READ_BYTES: u64 = 16 << 10;
/// Of these, what an error shows.
const CONSOLE_LINES: usize = 20;

/// What is to be born.
#[derive(Debug)]
pub struct Order {
    /// What it starts from.
    pub source: Source,
    /// Its name; the id where there is none.
    pub name: Option<Name>,
    /// As given.
    pub labels: BTreeMap<String, String>,
    /// Whether it goes with the connection or the bake that wants it.
    pub ephemeral: bool,
    /// Whether to note which pages it touches.
    pub record: bool,
}

impl Order {
    /// What `create` asks for.
    #[must_use]
    pub fn create(request: CreateRequest) -> Self {
        Self {
            source: request.source,
            name: request.name,
            labels: request.labels,
            ephemeral: false,
            record: false,
        }
    }
}

/// A VM that nobody has yet.
#[derive(Debug)]
pub struct Newborn {
    daemon: Arc<Daemon>,
    vm: Option<Arc<Vm>>,
}

impl Newborn {
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

/// What a VM starts from, open.
enum Opened {
    Snapshot(Box<OpenSnapshot>),
    Boot { boot: BootSource, image: Box<Image>, kernel: Box<Kernel> },
}

fn check(boot: &BootSource) -> Outcome<()> {
    let (least, most) = (MEMORY_BYTES.start(), MEMORY_BYTES.end());
    if !(1..=MAX_VCPUS).contains(&boot.vcpus) {
        return Err(Fault::invalid(format_args!("vcpus: expected 1 to {MAX_VCPUS}, got {}", boot.vcpus)));
    }
    if !MEMORY_BYTES.contains(&boot.memory_bytes) || !boot.memory_bytes.is_multiple_of(MEMORY_STEP_BYTES) {
        return Err(Fault::invalid(format_args!(
            "memory_bytes: expected {least} to {most}, a multiple of {MEMORY_STEP_BYTES}, got {}",
            boot.memory_bytes
        )));
    }
    if let Some(init) = &boot.init
        && (!init.starts_with('/')
            || init.bytes().any(|b| b.is_ascii_whitespace() || b.is_ascii_control() || b == b'"'))
    {
        return Err(Fault::invalid(format_args!(
            "init: expected an absolute path without spaces, got {init:?}"
        )));
    }
    Ok(())
}

impl Opened {
    fn open(daemon: &Daemon, source: Source) -> Outcome<Self> {
        match source {
            Source::Snapshot(name) => Ok(Self::Snapshot(Box::new(daemon.depot.open_snapshot(&name)?))),
            Source::Boot(boot) => {
                check(&boot)?;
                let image = Box::new(daemon.depot.open_image(&boot.image)?);
                let kernel = Box::new(daemon.depot.open_kernel(boot.kernel.as_ref())?);
                Ok(Self::Boot { boot, image, kernel })
            }
        }
    }

    fn facts(&self, labels: BTreeMap<String, String>, ephemeral: bool) -> Facts {
        let (snapshot, image, kernel, vcpus, memory_bytes) = match self {
            Self::Snapshot(open) => {
                let m = &open.manifest;
                // A manifest without a disk is refused when it is read.
                let image = m.disks[0].image.name.clone();
                (Some(m.name.clone()), image, m.kernel.clone(), m.vcpus, m.memory_bytes)
            }
            Self::Boot { boot, image, kernel } => {
                (None, image.manifest.name.clone(), kernel.reference(), boot.vcpus, boot.memory_bytes)
            }
        };
        let config = match self {
            Self::Snapshot(open) => open.manifest.config.clone(),
            Self::Boot { image, .. } => image.manifest.config.clone(),
        };
        let created_unix_ms = unix_ms();
        Facts { snapshot, image, kernel, vcpus, memory_bytes, created_unix_ms, ephemeral, labels, config }
    }

    fn disks(&self) -> Vec<Disk> {
        match self {
            Self::Snapshot(open) => open.manifest.disks.iter().map(Disk::of).collect(),
            Self::Boot { image, .. } => {
                let size_bytes = image.manifest.disk.bytes;
                vec![Disk::of(&DiskRef {
                    image: image.reference(),
                    size_bytes,
                    writable: true,
                    layers: Vec::new(),
                })]
            }
        }
    }

    /// The shape of the shell that a clone needs.
    fn shape(&self) -> Outcome<Option<Shape>> {
        let Self::Snapshot(open) = self else { return Ok(None) };
        let (vcpus, memory_bytes) = (open.manifest.vcpus, open.manifest.memory_bytes);
        Ok(Some(Shape { memory_bytes, vcpus, disks: number(open.disks.len())? }))
    }
}

fn number(disk: usize) -> Outcome<u8> {
    u8::try_from(disk).map_err(|_| Fault::internal("more disks than a byte counts"))
}

/// What a shell is told to become the clone `vm` of `open`, the descriptors that go with it, and what keeps the snapshot in the
/// store.
fn restore(daemon: &Daemon, vm: &Vm, open: OpenSnapshot) -> Outcome<(RestoreConfig, Vec<OwnedFd>, Pin)> {
    let OpenSnapshot { manifest: _, state, memory, working_set, disks: files, pin } = open;
    let mut fds = Places::default();
    let mut disks = vm.live().disks;
    let mut configs = Vec::with_capacity(files.len());
    for (d, file) in files.into_iter().enumerate() {
        let base_fd = fds.add(file.base);
        let layers = file
            .layers
            .into_iter()
            .map(|layer| LayerConfig { data_fd: fds.add(layer.data), map_fd: fds.add(layer.map) })
            .collect();
        let mut writable_fd = None;
        if file.writable {
            let (layer, data) = daemon.depot.writable(vm.id, number(d)?)?;
            disks[d].writable = Some(layer);
            writable_fd = Some(fds.add(data));
        }
        configs.push(DiskConfig { size_bytes: file.size_bytes, base_fd, layers, writable_fd });
    }
    let config = RestoreConfig {
        state_fd: fds.add(state),
        memory_fd: fds.add(memory),
        disks: configs,
        generation: identity::random(),
        working_set_fd: working_set.map(|file| fds.add(file)),
        paused: false,
    };
    vm.update(|live| live.disks = disks);
    Ok((config, fds.0, pin))
}

/// What a VMM is told that boots `vm`, and what keeps the image in the store.
fn boot(
    daemon: &Daemon,
    vm: &Vm,
    boot: BootSource,
    image: Image,
    kernel: Kernel,
    fds: &mut Fds,
) -> Outcome<(Start, Pin)> {
    let Image { manifest, disk, pin } = image;
    let mut disks = vm.live().disks;
    let (layer, data) = daemon.depot.writable(vm.id, 0)?;
    disks[0].writable = Some(layer);
    let config = DiskConfig {
        size_bytes: manifest.disk.bytes,
        base_fd: fds.add(disk),
        layers: Vec::new(),
        writable_fd: Some(fds.add(data)),
    };
    let init = boot.init.map(|init| format!(" dayfly.init={init}")).unwrap_or_default();
    let start = BootConfig {
        kernel_fd: fds.add(kernel.vmlinux),
        initrd_fd: Some(fds.add(kernel.initrd)),
        cmdline: format!("{CMDLINE}{init}"),
        memory_bytes: boot.memory_bytes,
        vcpus: boot.vcpus,
        disks: vec![config],
    };
    vm.update(|live| live.disks = disks);
    Ok((Start::Boot(start), pin))
}

/// Collects descriptors that go with a message, and numbers them by their places.
#[derive(Debug, Default)]
struct Places(Vec<OwnedFd>);

impl Places {
    fn add(&mut self, fd: impl Into<OwnedFd>) -> FdNumber {
        self.0.push(fd.into());
        FdNumber::try_from(self.0.len() - 1).unwrap_or(FdNumber::MAX)
    }
}

/// Makes and starts a VM. Dropped, or failed, it leaves nothing.
///
/// # Errors
/// What is missing, damaged, taken or exhausted; or why the guest did not come to life, with the end of its console.
pub async fn birth(daemon: &Arc<Daemon>, asked: Asked, order: Order) -> Outcome<Newborn> {
    let shared = daemon.clone();
    let source = order.source;
    let opened = blocking(move || Opened::open(&shared, source)).await?;
    let opened_us = asked.elapsed_us();
    let _birth = daemon.pool.birth();
    let facts = opened.facts(order.labels, order.ephemeral);
    let shell = opened.shape()?.filter(|_| !order.record).and_then(|shape| daemon.pool.take(shape));
    let seat = shell.as_ref().map(|shell| shell.seat);
    let vm = match daemon.registry.reserve(&daemon.config, order.name, facts, seat) {
        Ok(vm) => vm,
        Err(refused) => {
            if let Some(shell) = shell {
                daemon.pool.give_back(shell);
            }
            return Err(refused.into());
        }
    };
    let newborn = Newborn { daemon: daemon.clone(), vm: Some(vm.clone()) };
    vm.update(|live| {
        live.disks = opened.disks();
        live.asked_us = Some(asked.at_us());
        live.timeline.push(("source verified and open".into(), opened_us));
    });
    let ready_made = shell.is_some();
    let ready = match start(daemon, &vm, opened, shell, order.record).await {
        Ok(ready) => ready,
        Err(fault) if vm.process().is_some() => return Err(explain(&vm, fault).await),
        Err(fault) => return Err(fault),
    };
    let how = if ready_made { "vmm runs, from a ready-made shell" } else { "vmm runs" };
    vm.mark(how, asked.elapsed_us());
    let alive = async {
        if let Some(listener) = ready {
            let ready = booted(daemon, listener).await?;
            vm.mark("agent ready", asked.elapsed_us());
            vm.update(|live| live.agent_version = ready.version);
        }
        identity::give(daemon, &vm, || vm.mark("agent connected", asked.elapsed_us()))
            .await
            .map_err(Fault::from)
    };
    let result = tokio::select! {
        biased;
        result = alive => result,
        () = vm.wait_gone() => Err(Fault::new(ErrorCode::Guest, "its VMM ended")),
    };
    if let Err(fault) = result {
        return Err(explain(&vm, fault).await);
    }
    let ready_us = asked.elapsed_us();
    vm.update(|live| {
        live.ready_us = Some(ready_us);
        live.timeline.push(("identity taken".into(), ready_us));
    });
    vm.step(Event::Ready)?;
    if !vm.facts.ephemeral {
        death::note(daemon, &vm).await;
    }
    tracing::info!(vm = %vm.id, name = %vm.name, ready_us, "born");
    Ok(newborn)
}

/// Starts the VMM. Whoever waits may go away meanwhile; the process is known to its VM before anybody can end that.
async fn start(
    daemon: &Arc<Daemon>,
    vm: &Arc<Vm>,
    opened: Opened,
    shell: Option<Shell>,
    record: bool,
) -> Outcome<Option<UnixListener>> {
    let launching = vm.launching.clone().lock_owned().await;
    let (daemon, vm) = (daemon.clone(), vm.clone());
    let ready = blocking(move || {
        let _launching = launching;
        let held = |process: Arc<Process>| {
            vm.hold(process.clone());
            death::watch(&daemon, vm.clone(), process);
        };
        match (opened.shape()?, opened) {
            (Some(shape), Opened::Snapshot(open)) => {
                match shell {
                    Some(shell) => held(shell.process),
                    None => held(pool::launch(&daemon.config, vm.seat(), shape, record)?),
                }
                let agent_version = open.manifest.agent_version.clone();
                let (config, fds, pin) = restore(&daemon, &vm, *open)?;
                vm.keep_pinned(pin);
                vm.update(|live| live.agent_version = agent_version);
                control_link::restore(&vm.dir.control(), config, &fds, daemon.config.deadlines.control)?;
                Ok(None)
            }
            (_, Opened::Boot { boot: source, image, kernel }) => {
                let mut fds = Fds::default();
                let (start, pin) = boot(&daemon, &vm, source, *image, *kernel, &mut fds)?;
                vm.keep_pinned(pin);
                let Launched { process, ready } = launch::launch(&daemon.config, vm.seat(), start, fds)?;
                held(Arc::new(process));
                Ok(ready)
            }
            (None, Opened::Snapshot(_)) => Err(Fault::internal("a snapshot without a shape")),
        }
    })
    .await?;
    let listener = ready.map(|ready| {
        ready.set_nonblocking(true)?;
        UnixListener::from_std(ready)
    });
    listener.transpose().map_err(|e| Fault::internal(format_args!("listening for a guest: {e}")))
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
    // Where the VMM is ending, its record says more than a broken connection.
    let _ = timeout(std::time::Duration::from_millis(300), vm.wait_gone()).await;
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
        let full = matches!(&e, launch::LaunchError::Io { source, .. }
            if matches!(source.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::OutOfMemory));
        Self::new(if full { ErrorCode::Exhausted } else { ErrorCode::Internal }, e)
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

    #[test]
    fn an_init_that_would_change_the_command_line_is_refused() {
        let boot = |init: &str| BootSource {
            image: "i".parse().unwrap(),
            kernel: None,
            memory_bytes: 64 << 20,
            vcpus: 1,
            init: Some(init.to_owned()),
        };
        assert!(check(&boot("/sbin/init")).is_ok());
        for bad in ["", "sbin/init", "/a b", "/a\tb", "/a\"b", "/a\nroot=/dev/vdb"] {
            assert_eq!(check(&boot(bad)).unwrap_err().0.code, ErrorCode::Invalid, "{bad:?}");
        }
    }
}
