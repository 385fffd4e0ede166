//! `dayfly pause`, `unpause`, `kill`: one word to several VMs.

use crate::{connect, failure, output};
use anyhow::Result;
use dayfly_api::client::{Client, ClientError};

/// Arguments of `dayfly pause`.
#[derive(Debug, clap::Args)]
pub struct Pause {
    /// VMs, by id or name
    #[arg(required = true)]
    vms: Vec<String>,
}

/// Arguments of `dayfly unpause`.
#[derive(Debug, clap::Args)]
pub struct Unpause {
    /// VMs, by id or name
    #[arg(required = true)]
    vms: Vec<String>,
}

/// Arguments of `dayfly kill`.
#[derive(Debug, clap::Args)]
pub struct Kill {
    /// VMs, by id or name
    #[arg(required = true)]
    vms: Vec<String>,
}

impl Pause {
    pub async fn run(self) -> Result<u8> {
        each(&self.vms, async |client, vm| client.pause(vm).await).await
    }
}

impl Unpause {
    pub async fn run(self) -> Result<u8> {
        each(&self.vms, async |client, vm| client.unpause(vm).await).await
    }
}

impl Kill {
    pub async fn run(self) -> Result<u8> {
        each(&self.vms, async |client, vm| client.kill(vm).await).await
    }
}

/// Does one thing to every VM; prints those where it was done, says why where not, and fails if any did.
pub(super) async fn each<N: std::fmt::Display>(
    names: &[N],
    action: impl AsyncFn(&Client, &N) -> Result<(), ClientError>,
) -> Result<u8> {
    let client = connect::client().await?;
    let mut code = 0;
    for name in names {
        match action(&client, name).await {
            Ok(()) => output::line(name)?,
            Err(e) => code = failure::report(&e.into()),
        }
    }
    Ok(code)
}
