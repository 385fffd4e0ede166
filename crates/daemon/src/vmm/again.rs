//! What a VM that has ended boots from: its own disks, and its kernel.
//!
//! Nothing of its memory is used. A snapshot's memory would not agree with a disk that was written
//! since.

use crate::base::error::{ApiError, Outcome};
use crate::model::disk::Disk;
use crate::templates::cache::TemplateCache;
use crate::vm::Vm;
use crate::vmm::launch::Fds;
use crate::vmm::sizes::of_cpus;
use crate::vmm::source::{CMDLINE, MODULES};
use dayfly_api::types::ErrorCode;
use dayfly_store::{ChainLayer, Kernel, Pin, Store};
use dayfly_vmm::config::{BootConfig, DiskConfig, LayerConfig, MAX_VCPUS, Start, TreeConfig};

/// What the VMM of a VM that starts again gets.
#[derive(Debug)]
pub(crate) struct Again {
    /// How it starts.
    pub(crate) start: Start,
    /// The descriptors of `start`.
    pub(crate) fds: Fds,
    /// Keeps its images and layers.
    pub(crate) pin: Pin,
}

/// Opens the disks and the kernel of a VM that has ended. Blocks.
///
/// # Errors
/// What is missing, was replaced or is damaged; or its layers are on a file system that does not
/// say which blocks they have.
pub(crate) fn open(templates: &TemplateCache, vm: &Vm) -> Outcome<Again> {
    let disks = vm.live().disks;
    let pin = templates.pin(&vm.name, &disks)?;
    let (facts, kernel) = (&vm.facts, kernel(templates, vm)?);
    let mut fds = Fds::default();
    let by = format!("VM {}", vm.name);
    let disks = disks.iter().map(|of| disk(templates.store(), &by, of, &mut fds));
    let disks = disks.collect::<Outcome<Vec<_>>>()?;
    let init = facts.init.as_ref().map(|init| format!(" dayfly.init={init}")).unwrap_or_default();
    // The disk of the kernel's modules is the second.
    let modules = if disks.len() > 1 { MODULES } else { "" };
    let start = Start::Boot(BootConfig {
        kernel_fd: fds.add(kernel.vmlinux),
        initrd_fd: Some(fds.add(kernel.initrd)),
        cmdline: format!("{CMDLINE}{}{modules}{init}", of_cpus(facts.vcpus)),
        memory_bytes: facts.memory_bytes,
        vcpus: facts.vcpus,
        max_vcpus: MAX_VCPUS,
        disks,
        nets: facts.nets,
        cpu_model: facts.cpu_model,
    });
    Ok(Again { start, fds, pin })
}

/// Opens the kernel of a VM. Blocks.
///
/// # Errors
/// It is missing, was replaced or is damaged.
pub(crate) fn kernel(templates: &TemplateCache, vm: &Vm) -> Outcome<Kernel> {
    let wanted = &vm.facts.kernel;
    let kernel = templates.store().kernel(&wanted.name)?;
    let got = kernel.reference();
    if got != *wanted {
        let why = format!(
            "kernel {}: expected the one that the VM had, {}, got {}",
            wanted.name, wanted.digest, got.digest
        );
        return Err(ApiError::new(ErrorCode::State, why));
    }
    Ok(kernel)
}

/// Opens one disk, whose image and layers are pinned.
fn disk(store: &Store, by: &str, disk: &Disk, fds: &mut Fds) -> Outcome<DiskConfig> {
    let image = store.image(&disk.image.name)?;
    let base_fd = fds.add(image.disk);
    let mut trees = vec![image.tree.map(|tree| TreeConfig(fds.add(tree.file), tree.root))];
    let mut layers = Vec::with_capacity(disk.layers.len());
    for layer in &disk.layers {
        let (data, map, tree) = match layer {
            ChainLayer::Frozen(layer) | ChainLayer::Shared(layer) => {
                let open = store.open_frozen_layer(layer)?;
                (open.data, open.map, None)
            }
            ChainLayer::Stored(layer) => {
                let open = store.open_layers(std::slice::from_ref(layer), by)?.pop();
                let open = open.ok_or_else(|| ApiError::internal("a layer that was opened"))?;
                (open.data, open.map, open.tree)
            }
        };
        layers.push(LayerConfig { data_fd: fds.add(data), map_fd: fds.add(map) });
        trees.push(tree.map(|tree| TreeConfig(fds.add(tree.file), tree.root)));
    }
    let writable = disk.writable.map(|layer| store.open_used_vm_layer(&layer)).transpose()?;
    let writable_fd = writable.map(|file| fds.add(file));
    Ok(DiskConfig { size_bytes: disk.size_bytes, base_fd, layers, writable_fd, trees })
}
