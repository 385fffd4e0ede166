//! `dayfly pause`, `unpause`, `stop`, `start`, `restart`, `kill`, `wait`, `update`: one operation
//! on several VMs.

use super::options::{duration, duration_or_zero};
use crate::output::{Format, FormatArgs};
use crate::{connect, failure, output};
use anyhow::Result;
use dayfly_api::client::{Client, ClientError};
use dayfly_units::Egress;
use futures::{StreamExt, stream};
use std::time::Duration;

/// Number of operations that run at a time.
const AT_ONCE: usize = 64;

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

/// Arguments of `dayfly stop`.
#[derive(Debug, clap::Args)]
pub struct Stop {
    /// Time for the guest to power off, such as 30s; then the VM is killed
    #[arg(short, long, default_value = "10s", value_parser = duration_or_zero)]
    time: Duration,
    /// VMs, by id or name
    #[arg(required = true)]
    vms: Vec<String>,
}

/// Arguments of `dayfly start`.
#[derive(Debug, clap::Args)]
pub struct Start {
    /// VMs, by id or name
    #[arg(required = true)]
    vms: Vec<String>,
}

/// Arguments of `dayfly restart`.
#[derive(Debug, clap::Args)]
pub struct Restart {
    /// Time for the guest to power off, such as 30s; then the VM is killed
    #[arg(short, long, default_value = "10s", value_parser = duration_or_zero)]
    time: Duration,
    /// VMs, by id or name
    #[arg(required = true)]
    vms: Vec<String>,
}

/// Arguments of `dayfly update`.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true))]
pub struct Update {
    /// End the VMs after this time from now on, such as 90s, 10m, 8h or 7d; none: no limit
    #[arg(long, value_name = "TIME|none", value_parser = ttl, group = "change")]
    ttl: Option<Ttl>,
    /// What the VMs reach outside their networks: none, internet, or rules as for `create`. Open
    /// connections that this forbids are cut
    #[arg(long, value_name = "POLICY", group = "change")]
    egress: Option<Egress>,
    /// VMs, by id or name
    #[arg(required = true)]
    vms: Vec<String>,
}

/// A time to live.
#[derive(Debug, Clone, Copy)]
enum Ttl {
    Unlimited,
    Time(Duration),
}

fn ttl(text: &str) -> Result<Ttl, String> {
    if text == "none" { Ok(Ttl::Unlimited) } else { duration(text).map(Ttl::Time) }
}

/// Arguments of `dayfly wait`.
#[derive(Debug, clap::Args)]
pub struct Wait {
    /// Format of the output
    #[command(flatten)]
    format: FormatArgs,
    /// VMs, by id or name
    #[arg(required = true)]
    vms: Vec<String>,
}

impl Stop {
    pub async fn run(self) -> Result<u8> {
        each(&self.vms, async |client, vm| client.stop(vm, self.time).await).await
    }
}

impl Start {
    pub async fn run(self) -> Result<u8> {
        each(&self.vms, async |client, vm| client.start(vm).await.map(drop)).await
    }
}

impl Restart {
    pub async fn run(self) -> Result<u8> {
        let time = self.time;
        each(&self.vms, async |client, vm| client.restart(vm, time).await.map(drop)).await
    }
}

impl Update {
    pub async fn run(self) -> Result<u8> {
        each(&self.vms, async |client, vm| {
            match self.ttl {
                None => {}
                Some(Ttl::Unlimited) => drop(client.set_ttl(vm, None).await?),
                Some(Ttl::Time(ttl)) => drop(client.set_ttl(vm, Some(ttl)).await?),
            }
            match &self.egress {
                None => Ok(()),
                Some(egress) => client.set_egress(vm, egress.clone()).await.map(drop),
            }
        })
        .await
    }
}

impl Wait {
    pub async fn run(self) -> Result<u8> {
        let client = connect::client().await?;
        let mut code = 0;
        let ends = self.vms.iter().map(|vm| client.wait(vm));
        let mut ends = std::pin::pin!(stream::iter(ends).buffered(self.vms.len()));
        while let Some(end) = ends.next().await {
            match end {
                Ok(end) if self.format.format == Format::Json => {
                    output::emit(&output::json_line(&end)?)?;
                }
                // As in JSON: `power_off`, `killed`.
                Ok(end) => output::line(serde_json::to_value(end.reason)?.as_str().unwrap_or("?"))?,
                Err(e) => code = failure::report(&e.into()),
            }
        }
        Ok(code)
    }
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

/// Signals by name, as on Linux for x86-64.
const SIGNALS: [(&str, i32); 16] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ABRT", 6),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("WINCH", 28),
];

/// Parses `TERM`, `SIGTERM` or `15`.
pub(super) fn signal(text: &str) -> Result<i32, String> {
    if let Ok(number) = text.parse::<i32>()
        && (1..=64).contains(&number)
    {
        return Ok(number);
    }
    let name = text.to_ascii_uppercase();
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    let found = SIGNALS.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    found.ok_or_else(|| {
        let names = SIGNALS.map(|(name, _)| name).join(", ");
        format!("{text:?}: expected a number from 1 to 64, or one of {names}")
    })
}

/// Runs `action` for every name. Prints the names for which it succeeded, and the errors of the
/// others. Returns the exit code: 0, or that of the last error.
pub(super) async fn each<N: std::fmt::Display>(
    names: &[N],
    action: impl AsyncFn(&Client, &N) -> Result<(), ClientError>,
) -> Result<u8> {
    let client = connect::client().await?;
    let mut code = 0;
    // The actions run in parallel; the results are printed in the order of the names.
    let done = names.iter().map(|name| {
        let (client, action) = (&client, &action);
        async move { (name, action(client, name).await) }
    });
    let mut done = std::pin::pin!(stream::iter(done).buffered(AT_ONCE));
    while let Some((name, result)) = done.next().await {
        match result {
            Ok(()) => output::line(name)?,
            Err(e) => code = failure::report(&e.into()),
        }
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_named_or_numbered() {
        for text in ["TERM", "SIGTERM", "term", "15"] {
            assert_eq!(signal(text), Ok(15), "{text}");
        }
        for bad in ["", "SIG", "0", "65", "-1", "NOPE"] {
            assert!(signal(bad).is_err(), "{bad:?}");
        }
    }
}
