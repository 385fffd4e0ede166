//! `dayfly bake`: makes a snapshot from an image.

use super::options::{Shape, program};
use crate::progress::Steps;
use crate::pulling::{self, When};
use crate::references::ImageArg;
use crate::{artefacts, connect, output};
use anyhow::Result;
use dayfly_api::types::BakeRequest;
use dayfly_units::{Egress, Name};
use std::sync::Arc;

/// Arguments of `dayfly bake`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "The warm-up program runs to its end before the snapshot; what it leaves running \
                  is in every clone:\n  \
                  dayfly bake debian --cmd 'setsid my-server >/dev/null 2>&1 </dev/null &' \
                  -t served"
)]
pub struct Args {
    /// The image to boot (dayfly image ls); an image of a registry is pulled if it is not there
    image: ImageArg,
    /// Name of the new snapshot
    #[arg(short = 't', long = "tag", value_name = "NAME")]
    name: Name,
    /// Warm-up program, as text for /bin/sh
    #[arg(long, value_name = "TEXT")]
    cmd: Option<String>,
    /// Program to record, as text for /bin/sh: runs twice in a temporary clone; every clone then
    /// finds the pages that it touches in memory
    #[arg(long, value_name = "TEXT")]
    record: Option<String>,
    /// What the VM reaches while it is baked, and clones that ask for nothing else: none, internet,
    /// or rules as for `create`
    #[arg(long, value_name = "POLICY")]
    egress: Option<Egress>,
    #[command(flatten)]
    shape: Shape,
    /// Warm-up program and its arguments
    #[arg(last = true, conflicts_with = "cmd", value_name = "PROGRAM")]
    argv: Vec<String>,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let Shape { memory, cpus, cpu_model, kernel, init } = self.shape;
        let client = connect::client().await?;
        let steps = Arc::new(Steps::new());
        let request = BakeRequest {
            image: pulling::image(&client, &self.image, When::Missing, &steps).await?.name,
            name: self.name,
            kernel: artefacts::ensure_kernel(&client, kernel.as_ref(), &steps).await?,
            memory_bytes: memory.0,
            vcpus: cpus,
            warmup: program(self.cmd, self.argv),
            recording: program(self.record, Vec::new()),
            init,
            cpu_model,
            egress: self.egress,
        };
        let snapshot = artefacts::watch(client.bake(&request).await?, &steps).await?;
        drop(steps);
        output::line(snapshot.name)
    }
}
