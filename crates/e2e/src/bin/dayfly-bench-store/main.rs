//! `store`: what snapshots take in the store of pages, and whether they come back bit for bit, with a stock Linux.
//!
//! | part | what |
//! |---|---|
//! | workloads | six in the spirit of table 1 of "Efficiently Restoring Virtual Machines", at several memory sizes: stored bytes as a share of RAM |
//! | fleet | one image for each package set, baked with its service running, all in one store: ratio, bytes for each more |
//! | outside | RAM of one of the fleet on this host: the same bytes, fetches from cold packs, MB/s against `cp` and `zstd` |
//!
//! Two hours under emulation, so the figures are written after each step, and `--resume` goes on where a run ended. Images are made from
//! Debian's packages the first time, which needs root and a mirror; what they are made of stays in `--cache`.
//!
//! | file | concern |
//! |---|---|
//! | `catalogue` | package sets |
//! | `workloads`, `fleet`, `outside`, `pages` | the parts |
//! | `split`, `exact`, `figures` | what RAM consists of; what is compared; what is written |

mod catalogue;
mod exact;
mod figures;
mod fleet;
mod outside;
mod pages;
mod split;
mod workloads;

use anyhow::{Context, Result, bail};
use catalogue::FLEET;
use clap::{Parser, ValueEnum};
use dayfly_cli::progress::Steps;
use dayfly_e2e::bench;
use dayfly_e2e::bench::guests::Guests;
use dayfly_e2e::bench::images::Images;
use dayfly_e2e::bench::place::Place;
use dayfly_e2e::bench::scripts::{WORKLOADS, Workload};
use dayfly_e2e::setup;
use dayfly_units::{Bytes, Name};
use figures::Figures;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// So many guests in all may be lost to the emulation; natively, none.
const MAX_LOST: usize = 12;
/// Size of the workloads' disk.
const WORKLOADS_DISK: &str = "6G";
/// The fleet's snapshot whose RAM is looked at from outside, if it is there.
const LOOKED_AT: &str = "postgresql";

/// Each has a machine, and with it a store, of its own.
const PARTS: [&str; 2] = ["workloads", "fleet"];

/// What snapshots take in the store, and whether they come back bit for bit.
#[derive(Debug, Clone, Parser)]
#[command(name = "dayfly-bench-store", version)]
struct Options {
    /// The guests' kernel
    #[arg(long, default_value = "6.12")]
    kernel: Name,
    /// Workloads; none: `--workloads=`
    #[arg(long, value_delimiter = ',', default_value = "desktop,media,gzip,make,copy,postmark,pattern")]
    workloads: Vec<String>,
    /// RAM of the workloads' guests
    #[arg(long, value_delimiter = ',', default_value = "512M,2G")]
    memory: Vec<Bytes>,
    /// How many images the fleet has
    #[arg(long, default_value_t = FLEET.len(), value_parser = images_number)]
    images: usize,
    /// RAM of the fleet's guests
    #[arg(long, default_value = "512M")]
    fleet_memory: Bytes,
    /// Go on where the run ended whose figures are in the file
    #[arg(long)]
    resume: bool,
    /// What images are made of is kept here [default: bench-store in the cache of images]
    #[arg(long)]
    cache: Option<PathBuf>,
    /// Machines of its own are made here, where KVM cannot run Linux
    #[arg(long, default_value = "target/bench/store-machines")]
    home: PathBuf,
    /// RAM of those
    #[arg(long, default_value = "6G")]
    machine_memory: Bytes,
    /// Where the figures go
    #[arg(long, default_value = "target/bench/store.json")]
    out: PathBuf,
    /// Measure what the store costs with this raw RAM on this host, print it as JSON, and do nothing else
    #[arg(long, value_name = "FILE")]
    ram: Option<PathBuf>,
}

fn images_number(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n <= FLEET.len()).ok_or_else(|| format!("expected 0 to {}", FLEET.len()))
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let options = Options::parse();
    bench::end(
        "dayfly-bench-store",
        run(&options),
        &PARTS.map(|part| options.home.join(part)),
        "--resume goes on",
    )
    .await
}

async fn run(options: &Options) -> Result<()> {
    if let Some(ram) = &options.ram {
        let folder = tempfile::tempdir()?;
        let costs = pages::measure(ram, folder.path())?;
        println!("{}", serde_json::to_string_pretty(&costs)?);
        return Ok(());
    }
    let workloads = options.workloads.iter().filter(|name| !name.is_empty());
    let workloads = workloads.map(|name| Workload::from_str(name, true).map_err(anyhow::Error::msg));
    let workloads = workloads.collect::<Result<Vec<_>>>()?;
    let mut figures = if options.resume { Figures::load(&options.out)? } else { Figures::default() };
    let cache =
        options.cache.clone().unwrap_or_else(|| dayfly_image::cache::default_folder().join("bench-store"));
    let bench = Bench { options, images: Images::new(&cache)?, steps: Arc::new(Steps::new()) };
    bench.workloads(&workloads, &mut figures).await?;
    bench.fleet(&mut figures).await?;
    println!("{figures}\n  {}", options.out.display());
    figures.plot(options.out.parent().unwrap_or(Path::new(".")))?;
    if !figures.differences.is_empty() {
        bail!("a clone is not what was saved: {}", figures.differences.join("; "));
    }
    Ok(())
}

/// What all parts need.
struct Bench<'a> {
    options: &'a Options,
    images: Images,
    steps: Arc<Steps>,
}

impl Bench<'_> {
    async fn place(&self, part: &str, figures: &mut Figures) -> Result<(Place, Guests)> {
        let place = Place::open(&self.options.home.join(part), self.options.machine_memory).await?;
        let kernel = setup::kernel(&place.client, self.options.kernel.as_str(), &self.steps).await?;
        let emulated = place.home.is_some();
        figures.kernel = kernel.release;
        figures.kvm = if emulated { "machine" } else { "native" }.to_owned();
        Ok((place.clone(), Guests { client: place.client, kernel: kernel.name, emulated }))
    }

    /// Notes that what failed with `why` is made again.
    ///
    /// # Errors
    /// `why`, where guests run on the host's own KVM, or too many were lost.
    fn lost(&self, what: &str, why: anyhow::Error, guests: &Guests, figures: &mut Figures) -> Result<()> {
        if !guests.emulated || figures.lost >= MAX_LOST {
            return Err(why.context(what.to_owned()));
        }
        figures.lost += 1;
        self.steps.say(&format!("{what}: making it again: {why:#}"));
        Ok(())
    }

    async fn workloads(&self, workloads: &[Workload], figures: &mut Figures) -> Result<()> {
        let all = self.options.memory.iter().flat_map(|memory| workloads.iter().map(|w| (*w, *memory)));
        let left: Vec<_> = all.filter(|(w, memory)| !figures.has(*w, *memory)).collect();
        if left.is_empty() {
            return Ok(());
        }
        let (place, guests) = self.place(PARTS[0], figures).await?;
        let work = async {
            let image = self.images.ensure(&place, &WORKLOADS, WORKLOADS_DISK, &self.steps).await?;
            for (workload, memory) in left {
                let began = Instant::now();
                let figure = loop {
                    match workloads::run(&place, &guests, &image.name, workload, memory, &self.steps).await {
                        Ok(figure) => break figure,
                        Err(why) => self.lost(&format!("{workload:?}, {memory}"), why, &guests, figures)?,
                    }
                };
                self.told(
                    &format!(
                        "{workload:?}, {memory}: {:.1} % of RAM kept, {:.1} % stored",
                        figure.kept_percent, figure.stored_percent
                    ),
                    began,
                );
                figures.workloads.push(figure);
                figures.took_s += began.elapsed().as_secs();
                figures.write(&self.options.out)?;
            }
            guests.remove_vms().await
        };
        let done = work.await;
        self.steps.end();
        place.close().await?;
        done
    }

    async fn fleet(&self, figures: &mut Figures) -> Result<()> {
        let sets = FLEET.iter().take(self.options.images);
        let left: Vec<_> = sets.filter(|set| !figures.fleet.has(set.name)).collect();
        let Some(last) = FLEET.iter().take(self.options.images).next_back() else { return Ok(()) };
        let (place, guests) = self.place(PARTS[1], figures).await?;
        let work = async {
            self.same_store(&guests, figures).await?;
            figures.fleet.memory_bytes = self.options.fleet_memory.0;
            for set in left {
                let began = Instant::now();
                let figure = loop {
                    let baked = fleet::bake(
                        &place,
                        &guests,
                        &self.images,
                        set,
                        self.options.fleet_memory,
                        &self.steps,
                    );
                    match baked.await {
                        Ok(figure) => break figure,
                        Err(why) => self.lost(set.name, why, &guests, figures)?,
                    }
                };
                let added = Bytes(figure.split.stored_bytes());
                self.told(
                    &format!("{}: {added} for {} of pages", set.name, Bytes(figure.split.data_bytes())),
                    began,
                );
                figures.fleet.add(figure);
                figures.took_s += began.elapsed().as_secs();
                figures.write(&self.options.out)?;
            }
            guests.remove_vms().await?;
            let looked_at = FLEET.iter().find(|set| set.name == LOOKED_AT && figures.fleet.has(LOOKED_AT));
            let name = fleet::name(looked_at.unwrap_or(last))?;
            self.steps.begin(format!("copying {name} out and measuring with it"));
            let folder = self.options.out.parent().unwrap_or(Path::new("."));
            figures.outside = Some(outside::look(&place, &name, folder).await?);
            figures.write(&self.options.out)
        };
        let done = work.await;
        self.steps.end();
        place.close().await?;
        done
    }

    /// Checks that the store has the snapshots of the figures and no others, so that what one adds is what it adds to these.
    async fn same_store(&self, guests: &Guests, figures: &mut Figures) -> Result<()> {
        guests.remove_vms().await?;
        let mut there: Vec<Name> = guests.client.snapshots().await?.into_iter().map(|s| s.name).collect();
        // Those of ours that are in no figures are from a run that was interrupted, or whose figures are not wanted.
        let unknown = FLEET.iter().filter(|set| !figures.fleet.has(set.name));
        let unknown: Vec<Name> = unknown.map(fleet::name).collect::<Result<_>>()?;
        for name in there.extract_if(.., |name| unknown.contains(name)) {
            guests.remove_snapshot(&name).await?;
        }
        for image in &figures.fleet.images {
            let name: Name = format!("bench-{}", image.name).parse()?;
            let at = there.iter().position(|other| *other == name);
            there
                .swap_remove(at.with_context(|| format!("snapshot {name} is gone: start without --resume"))?);
        }
        if let Some(other) = there.first() {
            bail!(
                "the store has snapshot {other}, which is none of this benchmark's: what it adds could not be told"
            );
        }
        Ok(())
    }

    fn told(&self, text: &str, began: Instant) {
        self.steps.end();
        println!("{text} ({} s)", began.elapsed().as_secs());
    }
}
