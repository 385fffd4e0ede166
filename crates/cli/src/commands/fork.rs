//! `dayfly fork`: clones a running VM.

use super::limits_arg::LimitArgs;
use super::network::{EgressArg, PublishArgs};
use super::options::{LifetimeArgs, label};
use crate::progress::Steps;
use crate::{connect, output};
use anyhow::Result;
use dayfly_api::types::ForkRequest;
use dayfly_units::{Name, VmName};

/// Arguments of `dayfly fork`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name and hostname of the clone [default: its id]
    #[arg(long)]
    name: Option<VmName>,
    /// Create N clones at once, all or none; they share what the VM has written [default: 1, with
    /// --as 0]
    #[arg(long, value_name = "N", conflicts_with = "name",
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    count: Option<u32>,
    /// Make a snapshot of this instant too; it can be cloned at once and is stored meanwhile
    #[arg(long = "as", value_name = "SNAPSHOT")]
    template: Option<Name>,
    /// Add the label NAME=VALUE; may be repeated
    #[arg(short, long, value_parser = label)]
    label: Vec<(String, String)>,
    /// Let root in each clone make up to N clones of that clone (/run/dayfly/dayfly-fork); a clone
    /// that has ended counts until it is removed
    #[arg(long, value_name = "N", default_value_t = 0)]
    forks: u32,
    #[command(flatten)]
    publish: PublishArgs,
    #[command(flatten)]
    egress: EgressArg,
    #[command(flatten)]
    lifetime: LifetimeArgs,
    #[command(flatten)]
    limits: LimitArgs,
    /// The VM, by id or name; it keeps running
    vm: String,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let client = connect::client().await?;
        let steps = Steps::new();
        steps.begin(format!("forking {}", self.vm));
        let labels = self.label.into_iter().collect();
        let count = self.count.unwrap_or(u32::from(self.template.is_none() || self.name.is_some()));
        let template = self.template.clone();
        let (name, forks, lifetime) = (self.name, self.forks, self.lifetime.request());
        let egress = self.egress.egress;
        let (publish, publish_exposed) = self.publish.request();
        let request = ForkRequest {
            count,
            name,
            labels,
            forks,
            egress,
            publish,
            publish_exposed,
            lifetime,
            limits: self.limits.of_fork(),
            template,
        };
        let forked = client.fork(&self.vm, &request).await?;
        let (ms, part) = (forked.paused_us / 1000, forked.paused_us % 1000 / 100);
        steps.begin(format!("{} stood still for {ms}.{part} ms", self.vm));
        drop(steps);
        if let Some(template) = self.template {
            output::line(template)?;
        }
        forked.items.iter().try_for_each(|vm| output::line(vm.id))
    }
}
