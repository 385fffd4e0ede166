//! `dayfly logs`: the console.

use anyhow::{Context, Result};
use std::io::Write;

/// Arguments of `dayfly logs`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Go on until the VM ends
    #[arg(short, long)]
    follow: bool,
    /// The VM, by id or name
    vm: String,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let mut log = crate::connect::client().await?.logs(&self.vm, self.follow).await?;
        let mut out = std::io::stdout();
        while let Some(bytes) = log.next().await? {
            out.write_all(&bytes).and_then(|()| out.flush()).context("standard output")?;
        }
        Ok(())
    }
}
