//! Images: made by `image.sh` at the host's own speed, stored by `dayfly image build`.
//!
//! The base and what each set adds stay in the cache; an image that the daemon has is not made again.

use super::place::Place;
use anyhow::{Context, Result, ensure};
use dayfly_api::types::{ErrorCode, Image};
use dayfly_cli::home::program;
use dayfly_cli::progress::Steps;
use dayfly_units::Name;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::process::Command;

const SCRIPT: &str = include_str!("image.sh");
/// Run in the finished root file system, with the witness, `dayfly`, the disk's size and the image's name.
const BUILD: &str = "install -m 755 \"$1\" usr/local/bin/dayfly-witness && exec \"$2\" image build --from . --size \"$3\" \"$4\"";

/// A root file system, and what is done in it.
#[derive(Debug, Clone, Copy)]
pub struct Set {
    /// Its name, and with a prefix that of its image and its snapshot.
    pub name: &'static str,
    /// Debian packages beside the base.
    pub packages: &'static str,
    /// Debian source packages, unpacked into /usr/src.
    pub sources: &'static str,
    /// A text for /bin/sh that is run in the new system while it is built, at the host's own speed.
    pub prepare: &'static str,
    /// A text for /bin/sh that starts the service.
    pub start: &'static str,
    /// The TCP port it answers on, and what it is sent first (as printf(1) writes it); nothing where the service speaks first.
    pub ask: (u16, &'static str),
}

impl Set {
    /// Packages, and what is prepared with them.
    #[must_use]
    pub const fn prepared(name: &'static str, packages: &'static str, prepare: &'static str) -> Self {
        Self { name, packages, sources: "", prepare, start: "", ask: (0, "") }
    }

    /// A service as its packages leave it.
    #[must_use]
    pub const fn service(
        name: &'static str,
        packages: &'static str,
        start: &'static str,
        ask: (u16, &'static str),
    ) -> Self {
        Self { name, packages, sources: "", prepare: "", start, ask }
    }
}

/// What images are made from.
#[derive(Debug, Clone)]
pub struct Images {
    cache: PathBuf,
    witness: PathBuf,
    /// Of the witness, which is in every image: with another one they are others.
    version: String,
}

impl Images {
    /// Those of this build's `dayfly-witness`, and of what `cache` has.
    ///
    /// # Errors
    /// There is no such program, or no such folder can be made.
    pub fn new(cache: &Path) -> Result<Self> {
        std::fs::create_dir_all(cache).with_context(|| cache.display().to_string())?;
        let witness = program("dayfly-witness")?;
        let bytes = std::fs::read(&witness).with_context(|| witness.display().to_string())?;
        let version = blake3::hash(&bytes).to_hex()[..8].to_owned();
        Ok(Self { cache: std::path::absolute(cache)?, witness, version })
    }

    /// Has the daemon have the image of `set` on a disk of `size`, and no older one that nothing uses.
    ///
    /// # Errors
    /// When it cannot be made; needs root, mmdebstrap and a mirror of Debian the first time.
    pub async fn ensure(&self, place: &Place, set: &Set, size: &str, steps: &Steps) -> Result<Image> {
        let prefix = format!("bench-{}-", set.name);
        let name: Name = format!("{prefix}{}", self.version).parse()?;
        match place.client.image(&name).await {
            Ok(image) => return Ok(image),
            Err(e) if e.code() == Some(ErrorCode::NotFound) => {}
            Err(e) => return Err(e.into()),
        }
        for image in
            place.client.images().await?.iter().filter(|image| image.name.as_str().starts_with(&prefix))
        {
            match place.client.remove_image(&image.name).await {
                Err(e) if e.code() != Some(ErrorCode::Conflict) => return Err(e.into()),
                _ => {}
            }
        }
        steps.begin(format!("building image {name}"));
        ensure!(
            rustix::process::geteuid().is_root(),
            "building images needs root: it mounts and changes root"
        );
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            SCRIPT,
            "image.sh",
        ]);
        command.arg(&self.cache).args([set.name, set.packages, set.sources, set.prepare, "--"]);
        command.args(["sh", "-c", BUILD, "sh"]).arg(&self.witness).arg(program("dayfly")?);
        command.args([size, name.as_str()]).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        if let Some(home) = &place.home {
            command.env("DAYFLY_HOME", home);
        }
        let status = command.status().await.context("unshare")?;
        ensure!(status.success(), "building image {name} failed ({status}); see above");
        steps.end();
        Ok(place.client.image(&name).await?)
    }
}
