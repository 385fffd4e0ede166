//! `dayfly inspect`: shows everything about one VM, snapshot or image.

use super::image::Known;
use crate::references::{ImageArg, References};
use crate::{connect, output, pulling};
use anyhow::{Result, bail};
use dayfly_api::client::ClientError;
use dayfly_api::types::ErrorCode;
use dayfly_units::Name;

/// Arguments of `dayfly inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Show only the phases of a VM's start, as a table
    #[arg(long)]
    timeline: bool,
    /// A VM by id or name, else a snapshot, else an image
    name: String,
}

impl Args {
    pub async fn run(self) -> Result<()> {
        let client = connect::client().await?;
        let found = |e: &ClientError| e.code() != Some(ErrorCode::NotFound);
        match client.vm(&self.name).await {
            Ok(vm) if self.timeline => return output::emit(&timeline(&vm.timeline)),
            Ok(vm) => return output::json(&vm),
            Err(e) if self.timeline || found(&e) => return Err(e.into()),
            Err(_) => {}
        }
        if let Ok(name) = self.name.parse::<Name>() {
            match client.snapshot(&name).await {
                Ok(snapshot) => return super::snapshots::show(&client, snapshot).await,
                Err(e) if found(&e) => return Err(e.into()),
                Err(_) => {}
            }
        }
        if let Ok(arg) = self.name.parse::<ImageArg>()
            && let Some(image) = pulling::local(&client, &arg).await?
        {
            return output::json(&Known::new(image, &References::load()?));
        }
        bail!(
            "{}: no VM, snapshot or image of this name; see `dayfly ps -a`, `dayfly snapshots`, \
             `dayfly image ls`",
            self.name
        )
    }
}

/// A table of the phases: the time since the request at each phase's end, and its duration.
fn timeline(phases: &[(String, u64)]) -> String {
    let ms = |us: u64| format!("{}.{:03}", us / 1000, us % 1000);
    let mut before = 0;
    let rows = phases.iter().map(|(phase, at)| {
        let took = at.saturating_sub(before);
        before = *at;
        [phase.clone(), ms(*at), ms(took)]
    });
    output::table(["PHASE", "AT MS", "TOOK MS"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_shows_when_and_how_long() {
        let phases = [("spawn".to_owned(), 1_500), ("ready".to_owned(), 12_040)];
        assert_eq!(
            timeline(&phases),
            "PHASE   AT MS    TOOK MS\nspawn   1.500    1.500\nready   12.040   10.540\n"
        );
    }
}
