//! What was measured: `target/bench/store.json`, written after each part, and the tables on the terminal.

use crate::fleet::Fleet;
use crate::outside::Outside;
use crate::split::{Split, percent};
use crate::workloads::Figure;
use anyhow::{Context, Result};
use dayfly_bench::plot::{Curve, Plot};
use dayfly_e2e::bench::scripts::Workload;
use dayfly_units::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// Pages kept before compression, of a hundred of RAM, on average. The paper: 31.
const MOST_KEPT: f64 = 20.0;
/// After compression.
const MOST_STORED: f64 = 8.0;
/// The paper on prebaked VMs: 6.64.
const LEAST_RATIO: f64 = 8.0;
/// For the curve.
const MIB: f64 = 1_048_576.0;

/// The figures of one run, or of several that went on from each other.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Figures {
    /// `native`, or `machine`.
    pub kvm: String,
    /// The guests' kernel.
    pub kernel: String,
    /// The paper's workloads, and the pattern.
    pub workloads: Vec<Figure>,
    /// Averages over the paper's workloads, all memory sizes: pages kept before compression, of a hundred of RAM.
    pub kept_percent: f64,
    /// After compression.
    pub stored_percent: f64,
    /// Many images in one store.
    pub fleet: Fleet,
    /// RAM of one of them, from outside.
    pub outside: Option<Outside>,
    /// Guests that the emulation crashed, and that were made again.
    pub lost: usize,
    /// What is not bit for bit the same.
    pub differences: Vec<String>,
    /// Seconds that everything took.
    pub took_s: u64,
}

impl Figures {
    /// Those of an earlier run, if there are any.
    pub fn load(path: &Path) -> Result<Self> {
        match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| path.display().to_string()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(e) => Err(e).with_context(|| path.display().to_string()),
        }
    }

    /// Writes them, and the plot beside them.
    pub fn write(&mut self, path: &Path) -> Result<()> {
        self.sum();
        let folder = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// Whether a workload was measured with so much memory.
    pub fn has(&self, workload: Workload, memory: Bytes) -> bool {
        self.workloads.iter().any(|w| w.workload == workload && w.memory_bytes == memory.0)
    }

    fn sum(&mut self) {
        let papers = || self.workloads.iter().filter(|w| w.workload != Workload::Pattern);
        self.kept_percent = average(papers().map(|w| w.kept_percent));
        self.stored_percent = average(papers().map(|w| w.stored_percent));
        let workloads = self.workloads.iter().filter(|w| !w.exact.holds());
        let workloads = workloads.map(|w| format!("{:?}, {}", w.workload, Bytes(w.memory_bytes)));
        let fleet = self.fleet.images.iter().filter(|i| !i.exact.holds()).map(|i| i.name.clone());
        let outside =
            self.outside.iter().filter(|o| !o.holds()).map(|o| format!("{} from outside", o.snapshot));
        self.differences = workloads.chain(fleet).chain(outside).collect();
    }

    /// Draws what the store has for memory against the number of images.
    pub fn plot(&self, folder: &Path) -> Result<()> {
        if self.fleet.images.is_empty() {
            return Ok(());
        }
        let curve = |label: &str, of: fn(&Split) -> u64| {
            let sums = self.fleet.images.iter().scan(0, |sum, image| {
                *sum += of(&image.split);
                Some(*sum)
            });
            Curve {
                label: label.to_owned(),
                points: sums.zip(1_u32..).map(|(sum, n)| (f64::from(n), mib(sum))).collect(),
            }
        };
        let plot = Plot {
            title: format!("snapshots of {} each, in one store", Bytes(self.fleet.memory_bytes)),
            x: "images",
            y: "MiB",
            log_x: false,
            curves: vec![
                curve("pages that are not zero", Split::data_bytes),
                curve("… and on no disk", |s| s.page_bytes),
                curve("stored for memory", Split::stored_bytes),
            ],
        };
        plot.write(folder, "store.svg")
    }
}

#[expect(clippy::cast_precision_loss, reason = "a drawing")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB
}

fn average(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    if count == 0.0 { 0.0 } else { (sum / count * 1e3_f64).round() / 1e3 }
}

/// Shares of RAM.
fn shares(f: &mut fmt::Formatter<'_>, split: &Split) -> fmt::Result {
    for part in [split.zero_bytes, split.free_bytes, split.disk_bytes, split.new_bytes, split.stored_bytes()]
    {
        write!(f, "{:>9.1}", percent(part, split.ram_bytes))?;
    }
    Ok(())
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = |holds: bool| if holds { "the same" } else { "DIFFERS" };
        let heads = ["zero", "free", "disk", "kept", "stored"];
        write!(f, "  {:<14}{:>9}", "% of RAM", "")?;
        heads.iter().try_for_each(|head| write!(f, "{head:>9}"))?;
        writeln!(f, "  a clone")?;
        for w in &self.workloads {
            write!(
                f,
                "  {:<14}{:>9}",
                format!("{:?}", w.workload).to_lowercase(),
                Bytes(w.memory_bytes).to_string()
            )?;
            shares(f, &w.split)?;
            writeln!(f, "  {}", exact(w.exact.holds()))?;
        }
        for image in &self.fleet.images {
            write!(f, "  {:<14}{:>9}", image.name, Bytes(image.split.ram_bytes).to_string())?;
            shares(f, &image.split)?;
            writeln!(f, "  {}", exact(image.exact.holds()))?;
        }
        writeln!(
            f,
            "  workloads: {:.1} % of RAM before compression (wanted: at most {MOST_KEPT:.0}; the paper: 31), {:.1} % after it (wanted: at most {MOST_STORED:.0})",
            self.kept_percent, self.stored_percent
        )?;
        let fleet = &self.fleet;
        writeln!(
            f,
            "  {} images: {:.2} x (wanted: at least {LEAST_RATIO:.0}; the paper: 6.64); without what disks hold {:.2} x; {} for each more",
            fleet.images.len(),
            fleet.combined_ratio,
            fleet.pages_ratio,
            Bytes(fleet.bytes_per_additional_image)
        )?;
        if let Some(outside) = &self.outside {
            writeln!(f, "  {outside}")?;
        }
        write!(
            f,
            "  lost to the emulation, and made again: {}; differences: {}; {} s",
            self.lost,
            self.differences.len(),
            self.took_s
        )
    }
}
