//! VMs live on while daemons of two versions follow each other.

use crate::guest;
use crate::living::Living;
use crate::testbed::{Testbed, own_programs};
use anyhow::{Context, Result};
use std::path::PathBuf;

/// VMs that each version creates.
const OF_EACH: usize = 10;

/// Ten VMs of the version in the folder `old` and ten of this one live on through upgrades and
/// downgrades, each by a stop or a kill of the daemon before. Some are saved and forked each time.
pub async fn through(old: PathBuf) -> Result<()> {
    let new = own_programs();
    let mut bed = guest::testbed_of(old.clone()).await.context("the older version")?;
    let mut vms = created(&bed, "old").await?;
    let versions = [&new, &old, &new, &old, &new];
    for (round, programs) in versions.into_iter().enumerate() {
        if round % 2 == 0 {
            bed.stop()?
        } else {
            bed.kill()?
        }
        bed.programs.clone_from(programs);
        bed.start().await?;
        let step = || format!("round {round}, dayflyd of {}", programs.display());
        for vm in &vms {
            vm.runs_on(&bed).await.with_context(step)?;
        }
        for vm in vms.iter().skip(round).step_by(versions.len()) {
            vm.can_be_saved(&bed, "saved").await.with_context(step)?;
            vm.can_be_forked(&bed).await.with_context(step)?;
        }
        println!("round {round}: {} VMs run on with {}", vms.len(), programs.display());
        if round == 0 {
            vms.extend(created(&bed, "new").await?);
        }
    }
    Ok(())
}

async fn created(bed: &Testbed, of: &str) -> Result<Vec<Living>> {
    let mut vms = Vec::new();
    for number in 0..OF_EACH {
        vms.push(Living::new(guest::create(bed, &format!("{of}-{number}")).await?, bed)?);
    }
    Ok(vms)
}
