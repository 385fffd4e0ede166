//! What VMs start from: a snapshot or an image and a kernel, open, and what a VMM is told of it.

use super::beneath::Beneath;
use super::birth::Part;
use super::launch::Fds;
use super::{Disk, Facts, ForkFacts, Vm, identity};
use crate::config::{MEMORY_BYTES, MEMORY_STEP_BYTES};
use crate::daemon::Daemon;
use crate::depot::Loaded;
use crate::error::{Fault, Outcome};
use crate::fork::Epoch;
use crate::time::unix_ms;
use dayfly_api::types::{BootSource, NetworkRequest, Source};
use dayfly_host::process::Process;
use dayfly_store::{Digest, DiskRef, Image, Kernel, OpenSnapshot, Pin};
use dayfly_units::{Name, VmId};
use dayfly_vmm::config::{
    BootConfig, DiskConfig, LayerConfig, MAX_NETS, MAX_VCPUS, RestoreConfig, Shape, SharedConfig, Start,
};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The kernel's command line of a cold boot. A panic is told by pvpanic, then ends the machine.
const CMDLINE: &str =
    "console=ttyS0 quiet reboot=t panic=-1 i8042.noaux i8042.nokbd random.trust_cpu=on root=/dev/vda";
/// What a VM starts from, open.
pub(super) enum Opened {
    Snapshot(Arc<Loaded>),
    /// With the number of the clone; 0 where the fork became a template.
    Fork(Arc<Epoch>, u32),
    Boot {
        boot: BootSource,
        image: Box<Image>,
        kernel: Box<Kernel>,
    },
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
    /// What is open already.
    pub(super) fn known(daemon: &Daemon, source: &Source) -> Option<Self> {
        match source {
            Source::Snapshot(name) => match daemon.depot.forming().find(name) {
                Some(epoch) => Some(Self::Fork(epoch, 0)),
                None => daemon.depot.known_snapshot(name).map(Self::Snapshot),
            },
            Source::Boot(_) => None,
        }
    }

    /// Opens it. Blocks.
    pub(super) fn open(daemon: &Daemon, source: Source) -> Outcome<Self> {
        match source {
            Source::Snapshot(name) => Ok(Self::Snapshot(daemon.depot.open_snapshot(&name)?)),
            Source::Boot(boot) => {
                check(&boot)?;
                let image = Box::new(daemon.depot.open_image(&boot.image)?);
                let kernel = Box::new(daemon.depot.open_kernel(boot.kernel.as_ref())?);
                Ok(Self::Boot { boot, image, kernel })
            }
        }
    }

    pub(super) fn facts(
        &self,
        labels: BTreeMap<String, String>,
        ephemeral: bool,
        may: u32,
        network: Option<NetworkRequest>,
    ) -> Facts {
        let created_unix_ms = unix_ms();
        let (snapshot, image, kernel, vcpus, memory_bytes, nets) = match self {
            Self::Fork(epoch, number) => {
                let fork = ForkFacts { number: *number, may, ..epoch.facts.fork };
                // A port of the host leads to one VM.
                let own = || NetworkRequest { publish: Vec::new(), ..epoch.facts.network.clone() };
                let network = network.unwrap_or_else(own);
                return Facts { created_unix_ms, ephemeral, labels, fork, network, ..epoch.facts.clone() };
            }
            Self::Snapshot(open) => {
                let m = &open.manifest;
                // A manifest without a disk is refused when it is read.
                let image = m.disks[0].image.name.clone();
                (Some(m.name.clone()), image, m.kernel.clone(), m.vcpus, m.memory_bytes, m.nets)
            }
            Self::Boot { boot, image, kernel } => {
                let (image, kernel) = (image.manifest.name.clone(), kernel.reference());
                (None, image, kernel, boot.vcpus, boot.memory_bytes, MAX_NETS)
            }
        };
        let config = match self {
            Self::Snapshot(open) => open.manifest.config.clone(),
            Self::Fork(epoch, _) => epoch.facts.config.clone(),
            Self::Boot { image, .. } => image.manifest.config.clone(),
        };
        let fork = ForkFacts { may, ..ForkFacts::default() };
        Facts {
            snapshot,
            fork,
            image,
            kernel,
            vcpus,
            memory_bytes,
            nets,
            created_unix_ms,
            ephemeral,
            labels,
            network: network.unwrap_or_default(),
            config,
        }
    }

    pub(super) fn disks(&self) -> Vec<Disk> {
        match self {
            Self::Snapshot(open) => open.manifest.disks.iter().map(Disk::of).collect(),
            Self::Fork(epoch, _) => {
                let disks = epoch.disks.iter().map(|open| open.disk.clone());
                disks.map(|disk| Disk { writable: None, ..disk }).collect()
            }
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

    /// Which clones could be ready for it, where it is a snapshot.
    pub(super) fn template(&self) -> Outcome<Option<Template>> {
        match self {
            Self::Snapshot(open) => Template::of(open).map(Some),
            Self::Fork(..) | Self::Boot { .. } => Ok(None),
        }
    }

    /// Which shells it can have.
    pub(super) fn shape(&self) -> Outcome<Option<Shape>> {
        match self {
            Self::Snapshot(open) => Ok(Some(Template::of(open)?.shape)),
            Self::Fork(epoch, _) => Ok(Some(epoch.shape())),
            Self::Boot { .. } => Ok(None),
        }
    }
}

/// A snapshot, as far as what is made ahead of demand depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Template {
    /// The snapshot's name.
    pub name: Name,
    /// What tells its files from others of that name, or from what they were before.
    pub fingerprint: Digest,
    /// For which shells it is.
    pub shape: Shape,
}

impl Template {
    /// That of a snapshot.
    ///
    /// # Errors
    /// It has more disks than a VM may have.
    pub fn of(open: &OpenSnapshot) -> Outcome<Self> {
        let manifest = &open.manifest;
        let (vcpus, memory_bytes) = (manifest.vcpus, manifest.memory_bytes);
        let shape = Shape { memory_bytes, vcpus, disks: disks(manifest.disks.len())?, nets: manifest.nets };
        Ok(Self { name: manifest.name.clone(), fingerprint: open.fingerprint, shape })
    }
}

fn disks(count: usize) -> Outcome<u8> {
    u8::try_from(count).map_err(|_| Fault::internal("more disks than a byte counts"))
}

/// A clone that a shell can be told to become.
pub(super) struct CloneOf {
    /// What the shell is told.
    pub(super) config: RestoreConfig,
    /// The descriptors that go with it.
    pub(super) fds: Vec<OwnedFd>,
    /// Its disks, each with a writable layer of its own.
    pub(super) disks: Vec<Disk>,
    /// What its RAM is mapped from.
    pub(super) beneath: Beneath,
    /// Keeps the snapshot's layers in the store.
    pub(super) pin: Pin,
}

/// What clones start from: a snapshot, or a VM that was forked.
pub(super) struct Frozen<'a> {
    pub(super) beneath: Beneath,
    state: &'a File,
    disks: Vec<FrozenDisk<'a>>,
    pin: &'a Pin,
}

struct FrozenDisk<'a> {
    base: &'a File,
    layers: Vec<(&'a File, &'a File)>,
    disk: Disk,
    writable: bool,
}

impl<'a> From<&'a Arc<Loaded>> for Frozen<'a> {
    fn from(open: &'a Arc<Loaded>) -> Self {
        let disks = open.disks.iter().zip(&open.manifest.disks).map(|(file, disk)| FrozenDisk {
            base: &file.base,
            layers: file.layers.iter().map(|layer| (&layer.data, &layer.map)).collect(),
            disk: Disk::of(disk),
            writable: file.writable,
        });
        let (disks, beneath) = (disks.collect(), Beneath::Snapshot(open.clone()));
        Self { beneath, state: &open.state, disks, pin: &open.pin }
    }
}

impl<'a> From<&'a Epoch> for Frozen<'a> {
    fn from(epoch: &'a Epoch) -> Self {
        let disks = epoch.disks.iter().map(|open| FrozenDisk {
            base: &open.base,
            layers: open.layers.iter().map(|(data, map)| (data, map)).collect(),
            disk: Disk { writable: None, ..open.disk.clone() },
            writable: open.disk.writable.is_some(),
        });
        let (disks, beneath) = (disks.collect(), Beneath::Fork(epoch.ram.clone()));
        Self { beneath, state: &epoch.state, disks, pin: &epoch.pin }
    }
}

impl CloneOf {
    /// The clone `id` that is made for `part`, whose VMM is `vmm`.
    pub(super) fn new(
        daemon: &Daemon,
        id: VmId,
        vmm: &Arc<Process>,
        frozen: Frozen<'_>,
        part: Part,
    ) -> Outcome<Self> {
        let Frozen { beneath, state, disks: files, pin } = frozen;
        let failed = |e| Fault::internal(format_args!("a clone's descriptors: {e}"));
        let mut fds = Fds::default();
        let mut shared = |file: &File| Ok::<_, Fault>(fds.add(file.try_clone().map_err(failed)?));
        let (state_fd, memory_fd) = (shared(state)?, shared(beneath.memory())?);
        let others = beneath.shared().map(|others| {
            let list_fd = shared(&others.list)?;
            let file_fds = others.files.iter().map(&mut shared).collect::<Outcome<_>>()?;
            Ok::<_, Fault>(SharedConfig { list_fd, file_fds })
        });
        let others = others.transpose()?;
        // Laying ready what is missing would wait for all of it.
        let used = matches!(part, Part::User | Part::Pool);
        let laid_ready = used && beneath.filling().is_none_or(|pager| pager.has_first());
        let working_set_fd = beneath.working_set().filter(|_| laid_ready).map(&mut shared).transpose()?;
        let (mut disks, mut configs) = (Vec::with_capacity(files.len()), Vec::with_capacity(files.len()));
        let mut writable = Vec::new();
        for (number, FrozenDisk { base, layers, disk, writable: is_writable }) in (0_u8..).zip(files) {
            let base_fd = shared(base)?;
            let layers = layers
                .iter()
                .map(|(data, map)| Ok(LayerConfig { data_fd: shared(data)?, map_fd: shared(map)? }));
            let layers = layers.collect::<Outcome<_>>()?;
            configs.push(DiskConfig { size_bytes: disk.size_bytes, base_fd, layers, writable_fd: None });
            disks.push(disk);
            writable.extend(is_writable.then_some(number));
        }
        for number in writable {
            let (layer, data) = daemon.depot.writable(id, number)?;
            disks[usize::from(number)].writable = Some(layer);
            configs[usize::from(number)].writable_fd = Some(fds.add(data));
        }
        let generation = identity::random();
        // Also of one that has just died: it must not be taken for whole.
        let pager = beneath.wanted().map(|wanted| wanted.pager());
        let pager = pager.map(|pager| pager.clone_comes(id, vmm, &daemon.config.vm(id).exit()));
        let pager_fd = pager.transpose()?.flatten().map(|socket| fds.add(socket));
        let config = RestoreConfig {
            state_fd,
            memory_fd,
            shared: others,
            disks: configs,
            generation,
            working_set_fd,
            pager_fd,
            paused: part == Part::Pool,
        };
        Ok(Self { config, fds: fds.0, disks, beneath, pin: pin.clone() })
    }
}

/// What a VMM is told that boots `vm`, and what keeps the image in the store.
pub(super) fn boot(
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
        nets: vm.facts.nets,
    };
    vm.update(|live| live.disks = disks);
    Ok((Start::Boot(start), pin))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_api::types::ErrorCode;

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
