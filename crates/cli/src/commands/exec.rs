//! `dayfly exec`: runs a program in a running VM.

use super::options::ExecArgs;
use crate::{connect, output, session};
use anyhow::Result;

/// Arguments of `dayfly exec`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Leave the program running and print its id; dayfly logs VM ID shows its output, and dayfly
    /// program waits for it and signals it
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    detach: bool,
    #[command(flatten)]
    exec: ExecArgs,
    /// The VM, by id or name
    vm: String,
    /// The program and its arguments
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true,
        value_name = "PROGRAM"
    )]
    argv: Vec<String>,
}

impl Args {
    pub async fn run(self) -> Result<u8> {
        let spec = self.exec.spec(self.argv, self.detach)?;
        let running = connect::client().await?.exec(&self.vm, &spec).await?;
        if self.detach {
            // An agent of the version before gives no ids.
            output::line(running.id.unwrap_or_else(|| running.pid.to_string())).map(|()| 0)
        } else {
            session::attach(running, self.exec.attach()).await
        }
    }
}
