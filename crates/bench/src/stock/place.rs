//! A daemon for stock guests.

use super::losses::Losses;
use super::machine;
use crate::prelude::*;
use dayfly_api::client::Client;
use dayfly_cli::{connect, home::program, progress::Steps};
use dayfly_e2e::setup;
use dayfly_machine::Share;
use std::sync::Arc;

/// Options of scenarios with images that they make.
// The scenarios' own options have the same name, and clap's groups are named after types.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub struct Options {
    /// The guests' kernel
    #[arg(long, default_value = "6.12")]
    kernel: Name,
    /// What images are made of is kept here [default: bench-store in the cache of images]
    #[arg(long)]
    cache: Option<PathBuf>,
    /// Machines for this are made here if KVM cannot run Linux [default: beside the results]
    #[arg(long)]
    home: Option<PathBuf>,
    /// RAM of those
    #[arg(long, default_value = "6G")]
    machine_memory: Bytes,
}

impl Options {
    /// The folder of machines, `name` beside the results if none was given.
    pub fn home(&self, places: &Places, name: &str) -> PathBuf {
        self.home.clone().unwrap_or_else(|| places.out.join(name))
    }
}

/// What images are made from.
#[derive(Debug, Clone)]
pub struct Images {
    pub(super) cache: PathBuf,
    pub(super) witness: PathBuf,
    /// Of the witness, which is in every image: with another one they are others.
    pub(super) version: String,
}

impl Images {
    /// Those of this build's `dayfly-witness`, and of what `cache` or the cache of images has.
    ///
    /// # Errors
    /// There is no such program, or no such folder can be made.
    fn new(cache: Option<&Path>) -> Result<Self> {
        let default = || dayfly_image::cache::default_folder().join("bench-store");
        let cache = std::path::absolute(cache.map_or_else(default, Path::to_owned))?;
        std::fs::create_dir_all(&cache).with_context(|| cache.display().to_string())?;
        let witness = program("dayfly-witness")?;
        let bytes = std::fs::read(&witness).with_context(|| witness.display().to_string())?;
        let version = blake3::hash(&bytes).to_hex()[..8].to_owned();
        Ok(Self { cache, witness, version })
    }
}

/// A daemon, and its guests.
#[derive(Debug)]
pub struct Stock {
    /// The daemon.
    pub client: Client,
    /// The folder of the machine that it runs in.
    pub home: Option<PathBuf>,
    /// The daemon's state folder.
    pub state: String,
    /// The guests' kernel.
    pub kernel: Name,
    /// The release of the guests' kernel.
    pub release: String,
    pub(super) images: Images,
    /// What is being done, on the terminal.
    pub steps: Arc<Steps>,
}

impl Stock {
    /// This host's daemon; where KVM cannot run Linux, that of the machine in `home`, which is made
    /// and started. Of its guests `most` may be lost.
    ///
    /// # Errors
    /// When there is none and none can be started.
    pub async fn open(options: &Options, home: &Path, most: usize) -> Result<(Self, Losses)> {
        Self::open_with(options, home, most, Vec::new()).await
    }

    /// As [`Self::open`]. A machine that is made has these folders of this host.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_with(
        options: &Options,
        home: &Path,
        most: usize,
        shares: Vec<Share>,
    ) -> Result<(Self, Losses)> {
        let steps = Arc::new(Steps::new());
        let images = Images::new(options.cache.as_deref())?;
        let (client, home) = if matches!(connect::place()?, connect::Place::Machine(_)) {
            let home = std::path::absolute(home).context("the machine's folder")?;
            let mib = options.machine_memory.0 >> 20;
            let machine = machine::start(&home, false, move |options| {
                options.memory_mib = mib;
                options.shares = shares;
            });
            (Client::new(machine.await?.api_socket()), Some(home))
        } else {
            (connect::client().await?, None)
        };
        let state = client.info().await?.state_dir;
        let kernel = setup::kernel(&client, options.kernel.as_str(), &steps).await?;
        let losses = Losses::new(steps.clone(), home.is_some(), most);
        let (kernel, release) = (kernel.name, kernel.release);
        Ok((Self { client, home, state, kernel, release, images, steps }, losses))
    }

    /// Stops the machine, if it is one, after `work` has ended; returns how that ended.
    pub async fn close<T>(self, work: Result<T>) -> Result<T> {
        self.steps.end();
        if let Some(home) = self.home {
            tokio::task::spawn_blocking(move || machine::stop(&home)).await??;
        }
        work
    }

    /// `native`, or `machine`.
    pub const fn kvm(&self) -> &'static str {
        if self.home.is_some() { "machine" } else { "native" }
    }
}
