//! The open source of a VM, a snapshot, a fork point, or an image with a kernel, and the commands
//! for its VMM.

use crate::base::config::{MEMORY_BYTES, MEMORY_STEP_BYTES};
use crate::base::error::{ApiError, Outcome};
use crate::base::random::random;
use crate::base::time::unix_ms;
use crate::model::disk::Disk;
use crate::model::facts::{Facts, ForkFacts, INIT_LABEL};
use crate::templates::cache::TemplateCache;
use crate::templates::fork_point::ForkPoint;
use crate::templates::memory_backing::MemoryBacking;
use crate::templates::open::OpenTemplate;
use crate::templates::sharing;
use crate::vm::Vm;
use crate::vmm::launch::Fds;
use crate::vmm::sizes::{Allowed, Template, of_cpus};
use dayfly_api::types::{BootSource, NetworkRequest, Source, VmLimits};
use dayfly_host::process::Process;
use dayfly_store::{DiskRef, FileTree, Image, Kernel, Pin};
use dayfly_sys::reopen;
use dayfly_units::{CpuModel, Egress, VmId};
use dayfly_vmm::config::{
    BootConfig, DiskConfig, LayerConfig, MAX_NETS, MAX_VCPUS, RestoreConfig, Shape, SharedConfig,
    Start, TreeConfig,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// Command line of the guest kernel at a cold boot. A panic is reported by pvpanic, then ends the
/// VM.
pub(super) const CMDLINE: &str = "console=ttyS0 quiet reboot=t panic=-1 i8042.noaux i8042.nokbd \
                       random.trust_cpu=on root=/dev/vda";

/// Added to [`CMDLINE`] if the kernel has modules: their disk is the second.
pub(super) const MODULES: &str = " dayfly.modules=/dev/vdb";

/// The open source of a VM.
pub(crate) enum Opened {
    Snapshot(Arc<OpenTemplate>),
    /// A fork point, and the number of the clone; 0 if the fork point is a pending snapshot.
    Fork(Arc<ForkPoint>, u32),
    Boot {
        boot: BootSource,
        image: Box<Image>,
        kernel: Box<Kernel>,
    },
}

/// Whether the kernel's command line may have this path of an init.
fn is_init(init: &str) -> bool {
    init.starts_with('/')
        && !init.bytes().any(|b| b.is_ascii_whitespace() || b.is_ascii_control() || b == b'"')
}

/// Checks what can be checked of a boot without its image.
///
/// # Errors
/// Names the field, what was expected and what it has.
pub(crate) fn check(boot: &BootSource) -> Outcome<()> {
    let (least, most) = (MEMORY_BYTES.start(), MEMORY_BYTES.end());
    if !(1..=MAX_VCPUS).contains(&boot.vcpus) {
        return Err(ApiError::invalid(format_args!(
            "vcpus: expected 1 to {MAX_VCPUS}, got {}",
            boot.vcpus
        )));
    }
    if !MEMORY_BYTES.contains(&boot.memory_bytes)
        || !boot.memory_bytes.is_multiple_of(MEMORY_STEP_BYTES)
    {
        return Err(ApiError::invalid(format_args!(
            "memory_bytes: expected {least} to {most}, a multiple of {MEMORY_STEP_BYTES}, got {}",
            boot.memory_bytes
        )));
    }
    if let Some(init) = &boot.init
        && !is_init(init)
    {
        return Err(ApiError::invalid(format_args!(
            "init: expected an absolute path without spaces, got {init:?}"
        )));
    }
    Ok(())
}

impl Opened {
    /// The version of the agent in the guest; that of a cold boot is not known yet.
    pub(crate) fn agent_version(&self) -> Option<&str> {
        match self {
            Self::Snapshot(open) => Some(&open.manifest.agent_version),
            Self::Fork(fork_point, _) => Some(&fork_point.agent_version),
            Self::Boot { .. } => None,
        }
    }

    /// The source, if it is open already.
    pub(crate) fn known(templates: &TemplateCache, source: &Source) -> Option<Self> {
        match source {
            Source::Snapshot(name) => match templates.pending().find(name) {
                Some(fork_point) => Some(Self::Fork(fork_point, 0)),
                None => templates.known_snapshot(name).map(Self::Snapshot),
            },
            Source::Boot(_) => None,
        }
    }

    /// Opens the source. Blocks.
    pub(crate) fn open(templates: &TemplateCache, source: Source) -> Outcome<Self> {
        match source {
            Source::Snapshot(name) => Ok(Self::Snapshot(templates.open_snapshot(&name)?)),
            Source::Boot(boot) => {
                check(&boot)?;
                let image = Box::new(templates.open_image(&boot.image)?);
                let kernel = Box::new(templates.open_kernel(boot.kernel.as_ref())?);
                Ok(Self::Boot { boot, image, kernel })
            }
        }
    }

    /// The number of vCPUs of a VM for which a client asks for `wanted`; `None`: as in the source.
    ///
    /// # Errors
    /// The source's guest cannot have this number.
    pub(crate) fn vcpus(&self, wanted: Option<u8>) -> Outcome<u8> {
        let (snapshot, saved, known) = match self {
            Self::Boot { boot, .. } if wanted.is_none() => return Ok(boot.vcpus),
            Self::Boot { .. } => {
                let why = "vcpus: expected none with a cold boot, whose source has its own number";
                return Err(ApiError::invalid(why));
            }
            Self::Snapshot(open) => {
                let manifest = &open.manifest;
                (Some(&manifest.name), manifest.vcpus, manifest.known_vcpus())
            }
            Self::Fork(fork_point, _) => {
                let facts = &fork_point.facts;
                (facts.snapshot.as_ref(), facts.vcpus, facts.max_vcpus.max(facts.vcpus))
            }
        };
        let agent_version = self.agent_version().unwrap_or_default();
        Allowed { snapshot, saved, known, agent_version }.chosen(wanted)
    }

    fn cpu_model(&self) -> CpuModel {
        match self {
            Self::Boot { boot, .. } => boot.cpu_model,
            Self::Snapshot(open) => open.manifest.cpu_model,
            Self::Fork(fork_point, _) => fork_point.facts.cpu_model,
        }
    }

    pub(crate) fn facts(
        &self,
        labels: BTreeMap<String, String>,
        ephemeral: bool,
        max_clones: u32,
        network: Option<NetworkRequest>,
        vcpus: u8,
    ) -> Facts {
        let (snapshot, image, kernel, max_vcpus, memory_bytes, nets) = match self {
            Self::Fork(fork_point, number) => {
                let fork = ForkFacts { number: *number, max_clones, ..fork_point.facts.fork };
                let own = &fork_point.facts.network;
                let network = match network {
                    None => without_ports(own),
                    Some(asked) => with_policy_of(asked, own.policy()),
                };
                return Facts {
                    created_unix_ms: unix_ms(),
                    ephemeral,
                    labels,
                    fork,
                    network,
                    vcpus,
                    ..fork_point.facts.clone()
                };
            }
            Self::Snapshot(open) => {
                let m = &open.manifest;
                // Does not panic: a manifest without a disk is refused when it is read.
                let image = m.disks[0].image.name.clone();
                (Some(m.name.clone()), image, m.kernel.clone(), m.max_vcpus, m.memory_bytes, m.nets)
            }
            Self::Boot { boot, image, kernel } => {
                let (image, kernel) = (image.manifest.name.clone(), kernel.reference());
                (None, image, kernel, MAX_VCPUS, boot.memory_bytes, MAX_NETS)
            }
        };
        let config = match self {
            Self::Snapshot(open) => open.manifest.config.clone(),
            Self::Fork(fork_point, _) => fork_point.facts.config.clone(),
            Self::Boot { image, .. } => image.manifest.config.clone(),
        };
        let init = match self {
            Self::Boot { boot, .. } => boot.init.clone(),
            Self::Snapshot(open) => {
                open.manifest.labels.get(INIT_LABEL).filter(|init| is_init(init)).cloned()
            }
            Self::Fork(..) => None,
        };
        let policy = match self {
            Self::Snapshot(open) => open.manifest.egress.clone(),
            Self::Fork(..) | Self::Boot { .. } => None,
        };
        let ancestors = match self {
            Self::Snapshot(open) => sharing::descendant(&open.manifest),
            Self::Fork(..) | Self::Boot { .. } => Vec::new(),
        };
        Facts {
            snapshot,
            ancestors,
            fork: ForkFacts { max_clones, ..ForkFacts::default() },
            image,
            kernel,
            vcpus,
            max_vcpus,
            cpu_model: self.cpu_model(),
            memory_bytes,
            nets,
            created_unix_ms: unix_ms(),
            ephemeral,
            auto_remove: false,
            labels,
            network: with_policy_of(network.unwrap_or_default(), policy),
            config,
            volumes: Vec::new(),
            limits: VmLimits::default(),
            request: None,
            init,
        }
    }

    pub(crate) fn disks(&self) -> Vec<Disk> {
        match self {
            Self::Snapshot(open) => open.manifest.disks.iter().map(Disk::of).collect(),
            Self::Fork(fork_point, _) => {
                let disks = fork_point.disks.iter().map(|open| open.disk.clone());
                disks.map(|disk| Disk { writable: None, ..disk }).collect()
            }
            Self::Boot { image, kernel, .. } => {
                let disk = |image: &Image, writable| {
                    Disk::of(&DiskRef {
                        image: image.reference(),
                        size_bytes: image.manifest.disk.bytes,
                        writable,
                        layers: Vec::new(),
                    })
                };
                let modules = kernel.modules.iter().map(|modules| disk(modules, false));
                std::iter::once(disk(image, true)).chain(modules).collect()
            }
        }
    }

    /// The key of the warm clones with this number of vCPUs; `None` if the source is not a
    /// snapshot.
    pub(crate) fn template(&self, vcpus: u8) -> Outcome<Option<Template>> {
        match self {
            Self::Snapshot(open) => Ok(Some(Template::of(open)?.sized(vcpus))),
            Self::Fork(..) | Self::Boot { .. } => Ok(None),
        }
    }

    /// The shape of the warm VMMs for a VM with this number of vCPUs; `None` for a cold boot.
    pub(crate) fn shape(&self, vcpus: u8) -> Outcome<Option<Shape>> {
        let shape = match self {
            Self::Snapshot(open) => Template::of(open)?.shape,
            Self::Fork(fork_point, _) => fork_point.shape(),
            Self::Boot { .. } => return Ok(None),
        };
        Ok(Some(Shape { vcpus, ..shape }))
    }
}

/// A VM's network for a clone, which inherits no published ports, because a port of the host leads
/// to one VM.
fn without_ports(own: &NetworkRequest) -> NetworkRequest {
    NetworkRequest { publish: Vec::new(), publish_exposed: false, ..own.clone() }
}

/// The request, with the egress policy of the VM's source if it asks for none.
fn with_policy_of(asked: NetworkRequest, source: Option<Egress>) -> NetworkRequest {
    match (asked.policy(), source) {
        (None, Some(policy)) if !policy.is_internet() => asked.with_policy(policy),
        _ => asked,
    }
}

/// The command by which a warm VMM becomes a clone, and what the clone keeps.
pub(crate) struct CloneOf {
    /// The content of the command.
    pub(crate) config: RestoreConfig,
    /// The descriptors of the command.
    pub(crate) fds: Vec<OwnedFd>,
    /// The clone's disks, with its new writable layers.
    pub(crate) disks: Vec<Disk>,
    /// What its RAM is mapped from.
    pub(crate) backing: MemoryBacking,
    /// Keeps the layers in the store.
    pub(crate) pin: Pin,
}

/// What clones start from: an open snapshot or a fork point.
pub(crate) struct Frozen<'a> {
    pub(crate) backing: MemoryBacking,
    state: &'a File,
    disks: Vec<FrozenDisk<'a>>,
    pin: &'a Pin,
}

struct FrozenDisk<'a> {
    base: &'a File,
    /// The hash trees of the base and of the layers.
    trees: Vec<Option<&'a FileTree>>,
    layers: Vec<(&'a File, &'a File)>,
    disk: Disk,
    writable: bool,
}

impl<'a> From<&'a Arc<OpenTemplate>> for Frozen<'a> {
    fn from(open: &'a Arc<OpenTemplate>) -> Self {
        let disks = open.disks.iter().zip(&open.manifest.disks).map(|(file, disk)| FrozenDisk {
            base: &file.base,
            trees: std::iter::once(&file.tree)
                .chain(file.layers.iter().map(|layer| &layer.tree))
                .map(Option::as_ref)
                .collect(),
            layers: file.layers.iter().map(|layer| (&layer.data, &layer.map)).collect(),
            disk: Disk::of(disk),
            writable: file.writable,
        });
        let (disks, backing) = (disks.collect(), MemoryBacking::Snapshot(open.clone()));
        Self { backing, state: &open.state, disks, pin: &open.pin }
    }
}

impl<'a> From<&'a ForkPoint> for Frozen<'a> {
    fn from(fork_point: &'a ForkPoint) -> Self {
        let disks = fork_point.disks.iter().map(|open| FrozenDisk {
            base: &open.base,
            trees: open.trees.iter().map(Option::as_ref).collect(),
            layers: open.layers.iter().map(|(data, map)| (data, map)).collect(),
            disk: Disk { writable: None, ..open.disk.clone() },
            writable: open.disk.writable.is_some(),
        });
        let (disks, backing) = (disks.collect(), MemoryBacking::Fork(fork_point.ram.clone()));
        Self { backing, state: &fork_point.state, disks, pin: &fork_point.pin }
    }
}

impl CloneOf {
    /// Prepares the clone `id` for `purpose`. Its VMM is `vmm`, whose exit record is the file
    /// `exit`.
    pub(crate) fn new(
        templates: &TemplateCache,
        exit: &Path,
        id: VmId,
        vmm: &Arc<Process>,
        frozen: Frozen<'_>,
        purpose: Purpose,
    ) -> Outcome<Self> {
        let Frozen { backing, state, disks: files, pin } = frozen;
        let failed = |e| ApiError::internal(format_args!("a clone's descriptors: {e}"));
        let mut fds = Fds::default();
        // Each VMM gets new open file descriptions. A flag of fcntl(F_SETFL), such as O_DIRECT, and
        // an offset that one VMM sets would otherwise hold for all clones and for the daemon.
        let mut shared =
            |file: &File| Ok::<_, ApiError>(fds.add(reopen::read_only(file).map_err(failed)?));
        let (state_fd, memory_fd) = (shared(state)?, shared(backing.memory())?);
        let others = backing.shared().map(|others| {
            let list_fd = shared(&others.list)?;
            let file_fds = others.files.iter().map(&mut shared).collect::<Outcome<_>>()?;
            Ok::<_, ApiError>(SharedConfig { list_fd, file_fds })
        });
        let others = others.transpose()?;
        // Prefetching pages that the pager still lacks would wait for the pager.
        let used = matches!(purpose, Purpose::User | Purpose::Pool);
        let prefetches = used && backing.filling().is_none_or(|pager| pager.has_first());
        let working_set_fd =
            backing.working_set().filter(|_| prefetches).map(&mut shared).transpose()?;
        let (mut disks, mut configs) =
            (Vec::with_capacity(files.len()), Vec::with_capacity(files.len()));
        let mut writable = Vec::new();
        for (number, FrozenDisk { base, trees, layers, disk, writable: is_writable }) in
            (0_u8..).zip(files)
        {
            let base_fd = shared(base)?;
            let layers = layers.iter().map(|(data, map)| {
                Ok(LayerConfig { data_fd: shared(data)?, map_fd: shared(map)? })
            });
            let layers = layers.collect::<Outcome<_>>()?;
            let mut tree =
                |tree: &FileTree| Ok::<_, ApiError>(TreeConfig(shared(&tree.file)?, tree.root));
            let trees = trees.into_iter().map(|of| of.map(&mut tree).transpose());
            let trees = trees.collect::<Outcome<_>>()?;
            configs.push(DiskConfig {
                size_bytes: disk.size_bytes,
                base_fd,
                layers,
                writable_fd: None,
                trees,
            });
            disks.push(disk);
            writable.extend(is_writable.then_some(number));
        }
        for number in writable {
            let (layer, data) = templates.writable(id, number)?;
            disks[usize::from(number)].writable = Some(layer);
            configs[usize::from(number)].writable_fd = Some(fds.add(data));
        }
        let generation = random();
        // The pager is asked even if it has just ended, because otherwise the memory would be taken
        // for complete.
        let pager = backing.wanted().map(|wanted| wanted.pager());
        let pager = pager.map(|pager| pager.clone_comes(id, vmm, exit));
        let pager_fd = pager.transpose()?.flatten().map(|socket| fds.add(socket));
        let config = RestoreConfig {
            state_fd,
            memory_fd,
            shared: others,
            disks: configs,
            generation,
            working_set_fd,
            pager_fd,
            paused: purpose == Purpose::Pool,
        };
        Ok(Self { config, fds: fds.0, disks, backing, pin: pin.clone() })
    }
}

/// The command by which a VMM boots `vm`, and the pin of the images. Adds descriptors to `fds`.
pub(crate) fn boot(
    templates: &TemplateCache,
    vm: &Vm,
    boot: BootSource,
    image: Image,
    kernel: Kernel,
    fds: &mut Fds,
) -> Outcome<(Start, Pin)> {
    let mut disks = vm.live().disks;
    // Pins all images of the disks, while `image` and `kernel` pin them too.
    let pin = templates.pin(&vm.name, &disks)?;
    let (layer, data) = templates.writable(vm.id, 0)?;
    disks[0].writable = Some(layer);
    let mut disk = |image: Image, data: Option<File>| DiskConfig {
        size_bytes: image.manifest.disk.bytes,
        base_fd: fds.add(image.disk),
        layers: Vec::new(),
        writable_fd: data.map(|data| fds.add(data)),
        trees: vec![image.tree.map(|tree| TreeConfig(fds.add(tree.file), tree.root))],
    };
    let mut configs = vec![disk(image, Some(data))];
    let modules = if let Some(modules) = kernel.modules {
        configs.push(disk(modules, None));
        MODULES
    } else {
        ""
    };
    let init = boot.init.map(|init| format!(" dayfly.init={init}")).unwrap_or_default();
    let start = BootConfig {
        kernel_fd: fds.add(kernel.vmlinux),
        initrd_fd: Some(fds.add(kernel.initrd)),
        cmdline: format!("{CMDLINE}{}{modules}{init}", of_cpus(boot.vcpus)),
        memory_bytes: boot.memory_bytes,
        vcpus: boot.vcpus,
        max_vcpus: MAX_VCPUS,
        disks: configs,
        nets: vm.facts.nets,
        cpu_model: boot.cpu_model,
    };
    vm.update(|live| live.disks = disks);
    Ok((Start::Boot(start), pin))
}

/// What a VM is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// For a client.
    User,
    /// For the warm pool: its vCPUs wait for a client.
    Pool,
    /// To record which pages it touches first. A known working set is not prefetched, because the
    /// prefetched pages would be recorded too.
    Touched,
    /// To record which pages it writes; nothing is prefetched.
    Written,
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
