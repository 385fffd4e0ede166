//! `dayfly ps`: lists the VMs.

use super::ps_cells::{from, ports, state};
use super::ps_filter::{Filter, query};
use super::ps_format::PsFormat;
use crate::output::{self, Format, ListArgs, ago};
use anyhow::Result;
use dayfly_api::client::{Client, VmQuery};
use dayfly_api::types::Vm;
use dayfly_units::Bytes;
use dayfly_units::text::{LONG, escaped};
use std::collections::BTreeSet;

/// Arguments of `dayfly ps`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// List VMs that have ended too
    #[arg(short, long)]
    all: bool,
    /// List only VMs with this: id=START, name=PART, status=STATE, label=KEY[=VALUE], or
    /// ancestor=SNAPSHOT or image, or image=IMAGE; all labels must match, and one filter of each
    /// other kind
    #[arg(short, long = "filter", value_name = "KEY=VALUE")]
    filters: Vec<Filter>,
    /// table, json, or a line of fields such as '{{.ID}} {{.Name}} {{.Label "KEY"}}', as docker's;
    /// with `table ` before it, tabs separate columns
    #[arg(long, default_value = "table", hide_default_value = true)]
    format: PsFormat,
    /// Print only ids
    #[arg(short, long)]
    quiet: bool,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let client = crate::connect::client().await?;
        let vms = client.vms_with(&query(self.all, self.filters)).await?;
        let known = [vms.clone(), parents(&client, &vms).await?].concat();
        for (vm, problem) in vms.iter().filter_map(|vm| Some((vm, vm.problem.as_ref()?))) {
            // On standard error, because the reason does not fit into the table.
            eprintln!("VM {}: {}", vm.name, escaped(problem, LONG));
        }
        let format = match self.format {
            PsFormat::Template(template) if !self.quiet => {
                return output::emit(&template.text(&vms, &known)?);
            }
            PsFormat::Json => Format::Json,
            _ => Format::Table,
        };
        let header = [
            "VM ID", "NAME", "STATE", "FROM", "KERNEL", "CPUS", "MEMORY", "ADDRESS", "PORTS",
            "CREATED",
        ];
        output::list(
            ListArgs { format, quiet: self.quiet },
            &vms,
            header,
            |vm| vm.id.to_string(),
            |vm| {
                let from = from(vm, &known);
                [
                    vm.id.to_string(),
                    vm.name.to_string(),
                    state(vm),
                    from,
                    vm.kernel.to_string(),
                    vm.vcpus.to_string(),
                    Bytes(vm.memory_bytes).to_string(),
                    vm.network
                        .as_ref()
                        .map_or_else(String::new, |network| network.address.to_string()),
                    ports(vm),
                    ago(vm.created_unix_ms),
                ]
            },
        )
    }
}

/// Ids of one request.
const IDS: usize = 200;

/// The VMs that `vms` were forked from and that are not among them, for their names.
async fn parents(client: &Client, vms: &[Vm]) -> Result<Vec<Vm>> {
    let listed: BTreeSet<_> = vms.iter().map(|vm| vm.id).collect();
    let missing = vms.iter().filter_map(|vm| vm.forked_from).filter(|id| !listed.contains(id));
    let missing: BTreeSet<_> = missing.map(|id| id.to_string()).collect();
    let missing: Vec<String> = missing.into_iter().collect();
    let mut parents = Vec::new();
    for ids in missing.chunks(IDS) {
        let query = VmQuery { all: true, ids: ids.to_vec(), ..VmQuery::default() };
        parents.extend(client.vms_with(&query).await?);
    }
    Ok(parents)
}
