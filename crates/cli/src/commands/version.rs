//! `dayfly version`: the versions of dayfly, and of the daemon if one answers.

use crate::{connect, output};
use anyhow::Result;

/// Arguments of `dayfly version`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Show only the version of dayfly, without asking a daemon
    #[arg(long)]
    client: bool,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        output::line(format_args!("dayfly {}", env!("CARGO_PKG_VERSION")))?;
        if !self.client {
            match connect::running().await {
                Some((client, info)) => output::line(format_args!(
                    "dayflyd {} on {}: Linux {}, KVM {}",
                    info.version,
                    client.socket().display(),
                    info.host_kernel,
                    info.kvm
                ))?,
                None => output::line("dayflyd: not running")?,
            }
        }
        Ok(())
    }
}
