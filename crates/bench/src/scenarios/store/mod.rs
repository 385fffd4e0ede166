//! `store`: what snapshots take in the store of pages, and whether they come back bit for bit, with
//! a stock Linux.
//!
//! | part | what |
//! |---|---|
//! | workloads | six as in table 1 of "Efficiently Restoring Virtual Machines", at several sizes |
//! | fleet | an image for each package set, baked with its service running, all in one store |
//! | outside | RAM of one of the fleet on this host: fetches, MB/s against `cp` and `zstd` |
//!
//! It takes two hours under emulation, so the figures are written after each step, and `--resume`
//! goes on where a run ended. Images are made from Debian's packages the first time, which needs
//! root and a mirror; what they are made of stays in `--cache`.

mod exact;
mod figures;
mod fleet;
mod outside;
mod pages;
mod split;
mod workloads;

use crate::prelude::*;
use crate::stock::scripts::{self, Workload};
use crate::stock::{self, Losses, Stock};
use clap::ValueEnum;
use figures::Figures;
use fleet::SETS;

/// The most guests in all that the emulation may lose.
const MAX_LOST: usize = 12;
/// Size of the workloads' disk.
const WORKLOADS_DISK: &str = "6G";
/// The fleet's snapshot whose RAM is looked at from outside, if it is there.
const LOOKED_AT: &str = "postgresql";

/// Each has its own machine, and with it its own store.
const PARTS: [&str; 2] = ["workloads", "fleet"];

/// Options of `store`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    stock: stock::Options,
    /// Workloads; none: `--workloads=`
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "desktop,media,gzip,make,copy,postmark,pattern"
    )]
    workloads: Vec<String>,
    /// RAM of the workloads' guests
    #[arg(long, value_delimiter = ',', default_value = "512M,2G")]
    memory: Vec<Bytes>,
    /// How many images the fleet has
    #[arg(long, default_value_t = SETS.len(), value_parser = images_number)]
    images: usize,
    /// RAM of the fleet's guests
    #[arg(long, default_value = "512M")]
    fleet_memory: Bytes,
    /// Go on where the run ended whose figures are in the file
    #[arg(long)]
    resume: bool,
    /// Measure what the store costs with this raw RAM on this host, print it as JSON, and do
    /// nothing else
    #[arg(long, value_name = "FILE")]
    ram: Option<PathBuf>,
}

fn images_number(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| *n <= SETS.len());
    number.ok_or_else(|| format!("expected 0 to {}", SETS.len()))
}

impl Options {
    /// The folders of the machines, one for each part.
    pub fn homes(&self, places: &Places) -> Vec<PathBuf> {
        PARTS.map(|part| self.stock.home(places, "store-machines").join(part)).to_vec()
    }

    /// The workloads that were chosen, with each size of RAM, and are in no figures yet.
    fn workloads(&self, figures: &Figures) -> Result<Vec<(Workload, Bytes)>> {
        let mut left = Vec::new();
        for memory in &self.memory {
            for name in self.workloads.iter().filter(|name| !name.is_empty()) {
                let workload = Workload::from_str(name, true).map_err(anyhow::Error::msg)?;
                left.push((workload, *memory));
            }
        }
        left.retain(|(workload, memory)| !figures.has(*workload, *memory));
        Ok(left)
    }
}

/// Runs it.
pub async fn run(options: &Options, places: &Places) -> Result<()> {
    if let Some(ram) = &options.ram {
        let folder = tempfile::tempdir()?;
        println!("{}", serde_json::to_string_pretty(&pages::measure(ram, folder.path())?)?);
        return Ok(());
    }
    let file = places.out.join("store.json");
    let mut figures = if options.resume { Figures::load(&file)? } else { Figures::default() };
    let workloads = options.workloads(&figures)?;
    let what = format!("{} workloads, {} images", workloads.len(), options.images);
    let report = Report::begin(places, "store", "", &what);
    let homes = options.homes(places);
    if !workloads.is_empty() {
        let mut part = Part::open(options, &homes[0], &report, &mut figures).await?;
        let done = part.workloads(workloads).await;
        part.stock.close(done).await?;
    }
    if options.images > 0 {
        let mut part = Part::open(options, &homes[1], &report, &mut figures).await?;
        let done = part.fleet(options).await;
        part.stock.close(done).await?;
    }
    figures.print();
    report.write(figures.value()?)?;
    if let Some(plot) = figures.plot() {
        report.draw("", &plot)?;
    }
    let different = figures.differences.join("; ");
    ensure!(different.is_empty(), "a clone is not what was saved: {different}");
    Ok(())
}

/// A part, with its machine.
struct Part<'a> {
    stock: Stock,
    losses: Losses,
    report: &'a Report,
    figures: &'a mut Figures,
}

impl<'a> Part<'a> {
    async fn open(
        options: &Options,
        home: &Path,
        report: &'a Report,
        figures: &'a mut Figures,
    ) -> Result<Self> {
        let most = MAX_LOST.saturating_sub(figures.lost);
        let (stock, losses) = Stock::open(&options.stock, home, most).await?;
        figures.kernel = stock.release.clone();
        figures.kvm = stock.kvm().to_owned();
        Ok(Self { stock, losses, report, figures })
    }

    /// What `make` returns, made again if its guest is lost, and what `shown` says of it.
    async fn step<T>(
        &mut self,
        what: &str,
        make: impl AsyncFn(&Stock) -> Result<T>,
        shown: impl Fn(&T) -> String,
    ) -> Result<T> {
        let (began, lost, stock) = (Instant::now(), self.losses.count, &self.stock);
        let made = self.losses.kept(what, async || make(stock).await).await;
        self.figures.lost += self.losses.count - lost;
        let (made, took_s) = (made?, began.elapsed().as_secs());
        stock.steps.end();
        println!("{what}: {} ({took_s} s)", shown(&made));
        self.figures.took_s += took_s;
        Ok(made)
    }

    fn save(&mut self) -> Result<()> {
        self.report.save(self.figures.value()?)
    }

    async fn workloads(&mut self, left: Vec<(Workload, Bytes)>) -> Result<()> {
        let image = self.stock.image(scripts::image(), WORKLOADS_DISK).await?.name;
        for (workload, memory) in left {
            let run = async |stock: &Stock| workloads::run(stock, &image, workload, memory).await;
            let shown = |figure: &workloads::Figure| {
                let (kept, stored) = (figure.kept_percent, figure.stored_percent);
                format!("{kept:.1} % of RAM kept, {stored:.1} % stored")
            };
            let figure = self.step(&format!("{workload:?}, {memory}"), run, shown).await?;
            self.figures.workloads.push(figure);
            self.save()?;
        }
        self.stock.remove_vms().await
    }

    async fn fleet(&mut self, options: &Options) -> Result<()> {
        self.same_store().await?;
        self.figures.fleet.memory_bytes = options.fleet_memory.0;
        let sets = &SETS[..options.images];
        for set in sets {
            if self.figures.fleet.has(&set.name) {
                continue;
            }
            let bake = async |stock: &Stock| fleet::bake(stock, set, options.fleet_memory).await;
            let shown = |figure: &fleet::Figure| {
                let [added, pages] =
                    [figure.split.stored_bytes(), figure.split.data_bytes()].map(Bytes);
                format!("{added} for {pages} of pages")
            };
            let figure = self.step(&set.name, bake, shown).await?;
            self.figures.fleet.add(figure);
            self.save()?;
        }
        self.stock.remove_vms().await?;
        let looked_at = sets.iter().find(|set| set.name == LOOKED_AT).or(sets.last());
        let name = fleet::name(looked_at.context("an image")?)?;
        self.stock.steps.begin(format!("copying {name} out and measuring with it"));
        self.figures.outside = Some(outside::look(&self.stock, &name, self.report.folder()).await?);
        self.save()
    }

    /// Checks that the store has the snapshots of the figures and no others, so that what one adds
    /// is what it adds to these.
    async fn same_store(&self) -> Result<()> {
        let Self { stock, figures, .. } = self;
        stock.remove_vms().await?;
        let mut there: Vec<Name> =
            stock.client.snapshots().await?.into_iter().map(|s| s.name).collect();
        for set in SETS.iter() {
            let name = fleet::name(set)?;
            let at = there.iter().position(|other| *other == name);
            let is_there = at.map(|at| there.swap_remove(at)).is_some();
            if figures.fleet.has(&set.name) {
                ensure!(is_there, "snapshot {name} is gone: start without --resume");
            } else if is_there {
                // Of a run that was interrupted, or whose figures are not wanted.
                stock.remove_snapshot(&name).await?;
            }
        }
        let foreign = there.first();
        ensure!(
            foreign.is_none(),
            "the store has snapshot {foreign:?}, which this benchmark did not make: pages that a \
             snapshot shares with it would not be counted"
        );
        Ok(())
    }
}
