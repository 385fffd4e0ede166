//! `dayfly create`: creates a VM that stays.

use super::limits_arg::LimitArgs;
use super::network::NetworkArgs;
use super::options::{LifetimeArgs, label};
use super::volumes_arg::VolumeArgs;
use crate::image_source::{first_choice, snapshot_for};
use crate::progress::Steps;
use crate::pulling::{self, When};
use crate::references::ImageArg;
use crate::{artefacts, connect, output};
use anyhow::Result;
use dayfly_api::client::{Client, ClientError};
use dayfly_api::types::{BootSource, CreateManyRequest, CreateRequest, Source, Vm};
use dayfly_units::{Bytes, CpuModel, Name, VmName};
use std::sync::Arc;

/// Arguments of `dayfly create`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name and hostname of the VM [default: its id]
    #[arg(long)]
    name: Option<VmName>,
    /// Create N VMs at once, all or none
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "name",
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    count: u32,
    /// Add the label NAME=VALUE; may be repeated
    #[arg(short, long, value_parser = label)]
    label: Vec<(String, String)>,
    /// Let root in the guest make up to N clones of the VM (/run/dayfly/dayfly-fork); a clone that
    /// has ended counts until it is removed
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "count")]
    forks: u32,
    #[command(flatten)]
    lifetime: LifetimeArgs,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    volumes: VolumeArgs,
    #[command(flatten)]
    limits: LimitArgs,
    /// Boot this image cold instead of cloning a snapshot
    #[arg(long, value_name = "IMAGE", conflicts_with = "snapshot")]
    boot: Option<ImageArg>,
    /// RAM of a cold boot, such as 256M or 2G; a clone has the RAM of its snapshot
    #[arg(short, long, default_value = "256M", conflicts_with = "snapshot")]
    memory: Bytes,
    /// Number of vCPUs: of a clone, from those of its snapshot to 16 [default: those of its
    /// snapshot]; of a cold boot, 1 to 16 [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    cpus: Option<u8>,
    /// CPU that the guest of a cold boot sees: host, x86-64-v3 or x86-64-v2
    #[arg(long, value_name = "MODEL", default_value_t, conflicts_with = "snapshot")]
    cpu_model: CpuModel,
    /// Guest kernel of a cold boot; a known kernel is fetched if it is not stored
    #[arg(long, conflicts_with = "snapshot")]
    kernel: Option<Name>,
    /// Run this init of the image instead of dayfly's own
    #[arg(long, value_name = "PATH", conflicts_with = "snapshot")]
    init: Option<String>,
    /// When to pull an image of a registry
    #[arg(long, value_enum, default_value_t)]
    pull: When,
    /// Snapshot to clone (dayfly snapshots); or an image (dayfly image ls, or of a registry), of
    /// which the first use makes a snapshot
    #[arg(required_unless_present = "boot")]
    snapshot: Option<ImageArg>,
}

/// Warns if the guest of a new VM does not run all of the VM's CPUs.
pub(super) fn warn_of_cpus(vm: &Vm) {
    if let Some(online) = vm.cpus_online {
        eprintln!(
            "dayfly: VM {0}: its guest says that it runs {online} CPUs, expected {1}; `dayfly \
             inspect {0}` says why",
            vm.name, vm.vcpus
        );
    }
}

async fn make(
    client: &Client,
    request: &CreateRequest,
    count: u32,
    steps: &Steps,
) -> Result<Vec<Vm>, ClientError> {
    if count == 1 {
        return client.create(request).await.map(|vm| vec![vm]);
    }
    steps.begin(format!("making {count} VMs"));
    let request = request.clone();
    let CreateRequest { source, labels, network, lifetime, volumes, limits, vcpus, .. } = request;
    let many =
        CreateManyRequest { source, count, labels, network, lifetime, volumes, limits, vcpus };
    client.create_many(&many).await
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let client = connect::client().await?;
        let steps = Arc::new(Steps::new());
        let source = match (&self.boot, &self.snapshot) {
            (Some(image), _) => {
                let image = pulling::image(&client, image, self.pull, &steps).await?.name;
                let kernel =
                    artefacts::ensure_kernel(&client, self.kernel.as_ref(), &steps).await?;
                steps.begin(format!("booting {image}"));
                let (memory_bytes, vcpus, init) =
                    (self.memory.0, self.cpus.unwrap_or(1), self.init);
                let cpu_model = self.cpu_model;
                Source::Boot(BootSource { image, kernel, memory_bytes, vcpus, init, cpu_model })
            }
            (None, Some(arg)) => {
                Source::Snapshot(first_choice(&client, arg, self.pull, &steps).await?)
            }
            (None, None) => anyhow::bail!("expected a snapshot, or --boot with an image"),
        };
        let mut request = CreateRequest {
            source,
            name: self.name,
            labels: self.label.into_iter().collect(),
            forks: self.forks,
            network: self.network.request(),
            lifetime: self.lifetime.request(),
            volumes: self.volumes.request().await?,
            limits: self.limits.request(),
            vcpus: self.cpus.filter(|_| self.boot.is_none()),
        };
        let mut made = make(&client, &request, self.count, &steps).await;
        if let (Err(refused), Some(arg)) = (&made, &self.snapshot)
            && let Some(found) = snapshot_for(&client, arg, refused, self.pull, &steps).await?
        {
            request.source = Source::Snapshot(found);
            made = make(&client, &request, self.count, &steps).await;
        }
        drop(steps);
        made?.iter().try_for_each(|vm| {
            warn_of_cpus(vm);
            output::line(vm.id)
        })
    }
}
