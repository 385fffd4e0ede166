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
        let client = connect::client().await?;
        if self.detach {
            let started = client.exec_to_end(&self.vm, &spec, 0).await?;
            return output::line(started.program.unwrap_or_default()).map(|()| 0);
        }
        session::attach(client.exec(&self.vm, &spec).await?, self.exec.attach()).await
    }
}
