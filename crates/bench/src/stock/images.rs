//! Images: made by `image.sh` at the host's own speed, stored by `dayfly image build`.
//!
//! The base and what each set adds stay in the cache. An image that the daemon has is not made
//! again.

use super::place::Stock;
use crate::prelude::*;
use dayfly_api::types::{ErrorCode, Image};
use dayfly_cli::home::program;
use std::process::Stdio;
use tokio::process::Command;

const SCRIPT: &str = include_str!("image.sh");
/// Run in the finished root file system, with the witness, `dayfly`, the disk's size and the
/// image's name.
const BUILD: &str = "install -m 755 \"$1\" usr/local/bin/dayfly-witness && \
     exec \"$2\" image build --from . --size \"$3\" \"$4\"";

/// A root file system, and what is done in it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Set {
    /// Its name, and with a prefix that of its image and its snapshot.
    pub name: String,
    /// Debian packages beside the base.
    pub packages: String,
    /// Debian source packages, unpacked into /usr/src.
    #[serde(default)]
    pub sources: String,
    /// A text for /bin/sh that is run in the new system while it is built, at the host's own speed.
    #[serde(default)]
    pub prepare: String,
    /// A text for /bin/sh that starts the service.
    #[serde(default)]
    pub start: String,
    /// The TCP port that the service answers on.
    #[serde(default)]
    pub port: u16,
    /// What the service is sent first (as printf(1) writes it); nothing if the service speaks
    /// first.
    #[serde(default)]
    pub ask: String,
}

impl Stock {
    /// Ensures that the daemon has the image of `set` on a disk of `size`, and no older one that
    /// nothing uses.
    ///
    /// # Errors
    /// When it cannot be made; needs root, mmdebstrap and a mirror of Debian the first time.
    pub async fn image(&self, set: &Set, size: &str) -> Result<Image> {
        let prefix = format!("bench-{}-", set.name);
        let name: Name = format!("{prefix}{}", self.images.version).parse()?;
        match self.client.image(&name).await {
            Ok(image) => return Ok(image),
            Err(e) if e.code() == Some(ErrorCode::NotFound) => {}
            Err(e) => return Err(e.into()),
        }
        let mut older = self.client.images().await?;
        older.retain(|image| image.name.as_str().starts_with(&prefix));
        for image in older {
            match self.client.remove_image(&image.name).await {
                Err(e) if e.code() != Some(ErrorCode::Conflict) => return Err(e.into()),
                _ => {}
            }
        }
        self.steps.begin(format!("building image {name}"));
        self.build(set, size, &name).await?;
        self.steps.end();
        Ok(self.client.image(&name).await?)
    }

    async fn build(&self, set: &Set, size: &str, name: &Name) -> Result<()> {
        let root = rustix::process::geteuid().is_root();
        ensure!(root, "building images needs root: it mounts and changes root");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        command.args(["sh", "-c", SCRIPT, "image.sh"]).arg(&self.images.cache);
        command.args([&set.name, &set.packages, &set.sources, &set.prepare, "--"]);
        command.args(["sh", "-c", BUILD, "sh"]).arg(&self.images.witness).arg(program("dayfly")?);
        command.args([size, name.as_str()]).stdin(Stdio::null()).stdout(Stdio::null());
        if let Some(home) = &self.home {
            command.env("DAYFLY_HOME", home);
        }
        let status = command.kill_on_drop(true).status().await.context("unshare")?;
        ensure!(status.success(), "building image {name} failed ({status}); see above");
        Ok(())
    }
}
