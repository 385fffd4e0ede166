//! The fork point: the frozen state of a VM that the clones of one fork share.

use crate::base::error::{ApiError, Outcome};
use crate::base::time::unix_ms;
use crate::model::disk::Disk;
use crate::model::facts::{Facts, ForkFacts};
use crate::templates::memory_backing::Ram;
use dayfly_store::{FileTree, Pin};
use dayfly_units::Name;
use dayfly_vmm::config::Shape;
use dayfly_vmm::control::Frozen;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// The state of a VM at the instant of a fork.
#[derive(Debug)]
pub struct ForkPoint {
    /// The VM's RAM.
    pub ram: Arc<Ram>,
    /// The sealed file with the state of vCPUs and devices.
    pub state: File,
    /// The VM's disks, in the order vda, vdb, ….
    pub disks: Vec<ForkPointDisk>,
    /// The VM's facts.
    pub facts: Facts,
    /// Version of the agent in the guest.
    pub agent_version: String,
    /// Keeps the image, the stored layers and the layers that the VM has frozen.
    pub pin: Pin,
    /// How long the VM was frozen, and what was copied.
    pub frozen: Frozen,
}

/// A disk at the instant of a fork.
#[derive(Debug)]
pub struct ForkPointDisk {
    /// The image.
    pub base: File,
    /// Data and map of each layer over it, the lowest first.
    pub layers: Vec<(File, File)>,
    /// The hash trees of the image and of the layers; a layer that a VM froze has none.
    pub trees: Vec<Option<FileTree>>,
    /// The layers' names, for the clones' records.
    pub disk: Disk,
}

impl ForkPoint {
    /// The shape of the warm VMMs that can become its clones.
    pub fn shape(&self) -> Shape {
        let disks = u8::try_from(self.disks.len()).unwrap_or(u8::MAX);
        Shape {
            memory_bytes: self.facts.memory_bytes,
            vcpus: self.facts.vcpus,
            max_vcpus: self.facts.max_vcpus,
            disks,
            nets: self.facts.nets,
            cpu_model: self.facts.cpu_model,
        }
    }
}

impl ForkPoint {
    /// This fork point as the pending snapshot `name`. It has its own descriptors and pin, so it
    /// outlives the VM and changes of the VM's layers.
    pub(crate) fn as_template(&self, name: &Name) -> Outcome<Self> {
        let failed =
            |e: io::Error| ApiError::internal(format_args!("template {name}: descriptors: {e}"));
        let open = |open: &ForkPointDisk| {
            let both = |(data, map): &(File, File)| {
                Ok::<_, io::Error>((data.try_clone()?, map.try_clone()?))
            };
            let layers = open.layers.iter().map(both).collect::<Result<_, _>>()?;
            let tree = |of: &Option<FileTree>| of.as_ref().map(FileTree::try_clone).transpose();
            let trees = open.trees.iter().map(tree).collect::<Result<_, _>>()?;
            Ok::<_, io::Error>(ForkPointDisk {
                base: open.base.try_clone()?,
                layers,
                trees,
                disk: open.disk.clone(),
            })
        };
        let disks = self.disks.iter().map(open).collect::<Result<_, _>>().map_err(failed)?;
        let facts = Facts {
            snapshot: Some(name.clone()),
            fork: ForkFacts::default(),
            // A snapshot has none: a client may clone it that has other rights.
            volumes: Vec::new(),
            created_unix_ms: unix_ms(),
            ..self.facts.clone()
        };
        Ok(Self {
            ram: self.ram.clone(),
            state: self.state.try_clone().map_err(failed)?,
            disks,
            facts,
            agent_version: self.agent_version.clone(),
            pin: self.pin.clone(),
            frozen: self.frozen,
        })
    }
}
