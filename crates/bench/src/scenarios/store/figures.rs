//! What was measured: `store.json`, written after each part, and the tables on the terminal.

use super::fleet::Fleet;
use super::outside::Outside;
use super::split::Split;
use super::workloads::Figure;
use crate::prelude::*;
use crate::stock::scripts::Workload;

/// Shares of RAM in percent, and whether a clone has the same bytes.
const COLUMNS: [Column; 7] = [
    ("RAM", "/ram", Plain),
    ("zero", "/zero", Digits(1)),
    ("free", "/free", Digits(1)),
    ("disk", "/disk", Digits(1)),
    ("kept", "/kept", Digits(1)),
    ("stored", "/stored", Digits(1)),
    ("a clone", "/same", Plain),
];

/// Pages kept before compression, of a hundred of RAM, on average. The paper: 31.
const MOST_KEPT: f64 = 20.0;
/// After compression.
const MOST_STORED: f64 = 8.0;
/// The paper on prebaked VMs: 6.64.
const LEAST_RATIO: f64 = 8.0;
/// The figures of one run, or of several that went on from each other.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Figures {
    /// `native`, or `machine`.
    pub kvm: String,
    /// The guests' kernel.
    pub kernel: String,
    /// The paper's workloads, and the pattern.
    pub workloads: Vec<Figure>,
    /// Averages over the paper's workloads, all memory sizes: pages kept before compression, of a
    /// hundred of RAM.
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
        Ok(load(path)?.unwrap_or_default())
    }

    /// As JSON.
    pub fn value(&mut self) -> Result<Value> {
        self.sum();
        Ok(serde_json::to_value(self)?)
    }

    /// Whether a workload was measured with so much memory.
    pub fn has(&self, workload: Workload, memory: Bytes) -> bool {
        self.workloads.iter().any(|w| w.workload == workload && w.memory_bytes == memory.0)
    }

    fn sum(&mut self) {
        let papers = || self.workloads.iter().filter(|w| w.workload != Workload::Pattern);
        self.kept_percent = mean(papers().map(|w| w.kept_percent));
        self.stored_percent = mean(papers().map(|w| w.stored_percent));
        let workloads = self.workloads.iter().filter(|w| !w.exact.holds());
        let workloads = workloads.map(|w| format!("{:?}, {}", w.workload, Bytes(w.memory_bytes)));
        let fleet = self.fleet.images.iter().filter(|i| !i.exact.holds()).map(|i| i.name.clone());
        let outside = self.outside.iter().filter(|o| !o.holds());
        let outside = outside.map(|o| format!("{} from outside", o.snapshot));
        self.differences = workloads.chain(fleet).chain(outside).collect();
    }

    /// What the store has for memory, against the number of images.
    pub fn plot(&self) -> Option<Plot> {
        if self.fleet.images.is_empty() {
            return None;
        }
        let curve = |label: &str, of: fn(&Split) -> u64| {
            let sums = self.fleet.images.iter().scan(0, |sum, image| {
                *sum += of(&image.split);
                Some(*sum)
            });
            Curve::counts(label, (1..).zip(sums), 1 << 20)
        };
        Some(Plot {
            title: format!("Snapshots of {} each, in one store", Bytes(self.fleet.memory_bytes)),
            x: "images",
            y: "MiB",
            log_x: false,
            curves: vec![
                curve("pages that are not zero", Split::data_bytes),
                curve("… and on no disk", |s| s.page_bytes),
                curve("stored for memory", Split::stored_bytes),
            ],
        })
    }

    /// For people.
    pub fn print(&mut self) {
        self.sum();
        let table = Table::new(12, "% of RAM", &COLUMNS);
        for w in &self.workloads {
            let name = format!("{:?}", w.workload).to_lowercase();
            table.row(&name, shares(&w.split, w.exact.holds()));
        }
        for image in &self.fleet.images {
            table.row(&image.name, shares(&image.split, image.exact.holds()));
        }
        let Self { kept_percent, stored_percent, fleet, .. } = self;
        println!(
            "  workloads: {kept_percent:.1} % of RAM before compression (wanted: at most \
             {MOST_KEPT}; the paper: 31),\n    {stored_percent:.1} % after it (wanted: at most \
             {MOST_STORED})\n  {} images: {:.2} x (wanted: at least {LEAST_RATIO}; the paper: \
             6.64);\n    without what disks have {:.2} x; {} for each more",
            fleet.images.len(),
            fleet.combined_ratio,
            fleet.pages_ratio,
            Bytes(fleet.bytes_per_additional_image)
        );
        self.outside.iter().for_each(|outside| println!("  {outside}"));
        println!(
            "  lost to the emulation, and made again: {}; differences: {}; {} s",
            self.lost,
            self.differences.len(),
            self.took_s
        );
    }
}

fn shares(split: &Split, same: bool) -> Value {
    let of = |bytes| percent(bytes, split.ram_bytes);
    json!({
        "ram": Bytes(split.ram_bytes).to_string(), "zero": of(split.zero_bytes),
        "free": of(split.free_bytes), "disk": of(split.disk_bytes), "kept": of(split.new_bytes),
        "stored": of(split.stored_bytes()), "same": if same { "same" } else { "DIFFERS" },
    })
}
