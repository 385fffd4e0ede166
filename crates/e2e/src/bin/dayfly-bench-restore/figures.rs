//! What replays come to, as tables and JSON.

use crate::device::Speed;
use crate::replay::Replayed;
use crate::response::{time_to, utilisation};
use serde::Serialize;
use serde_json::{Value, json};

const SECOND: u64 = 1_000_000;

/// Eager restore, and lazy.
#[derive(Debug, Clone, Serialize)]
pub struct Restored {
    pub subject: String,
    pub speed: &'static str,
    /// The utilisation that is wanted, in percent.
    pub wanted: u64,
    /// A file as long as RAM is read first, as the paper's hypervisor does it.
    pub raw_us: u64,
    pub raw_ttr_us: u64,
    /// All of RAM is fetched from the store first.
    pub eager_us: u64,
    pub eager_bytes: u64,
    pub eager_ttr_us: u64,
    pub ttr_us: u64,
    pub least_utilisation: f64,
    pub first_us: u64,
    /// What a clone's first moments take with all there.
    pub warm_first_us: u64,
    pub needed: usize,
    pub faults: usize,
    pub read_bytes: u64,
}

impl Restored {
    pub fn new(
        subject: &str,
        speed: Speed,
        interactive: bool,
        raw_us: u64,
        eager: (u64, u64),
        lazy: &Replayed,
        warm: &Replayed,
    ) -> Self {
        let wanted = if interactive { 80 } else { 50 };
        Self {
            subject: subject.to_owned(),
            speed: speed.name,
            wanted,
            eager_us: eager.0,
            eager_bytes: eager.1,
            raw_us,
            raw_ttr_us: time_to(&[(0, raw_us)], SECOND, wanted),
            eager_ttr_us: time_to(&[(0, eager.0)], SECOND, wanted),
            ttr_us: time_to(&lazy.stalls, SECOND, wanted),
            least_utilisation: utilisation(&lazy.stalls, SECOND),
            first_us: lazy.first_us,
            warm_first_us: warm.first_us,
            needed: lazy.needed,
            faults: lazy.faults(),
            read_bytes: lazy.read_bytes,
        }
    }

    /// Of the time to responsiveness of a restore from a file, in percent; nothing where that is none.
    pub fn ttr_percent(&self) -> Option<f64> {
        (self.raw_ttr_us > 0).then(|| percent(self.ttr_us, self.raw_ttr_us))
    }

    /// The same against fetching all of RAM from the store.
    pub fn eager_ttr_percent(&self) -> Option<f64> {
        (self.eager_ttr_us > 0).then(|| percent(self.ttr_us, self.eager_ttr_us))
    }

    /// What the first answer comes later than where all is there, of what it comes later where a file is read first; and where all is fetched first.
    pub fn first_percent(&self) -> (f64, f64) {
        let late = self.first_us.saturating_sub(self.warm_first_us);
        (percent(late, self.raw_us), percent(late, self.eager_us))
    }

    pub const HEAD: &'static str = "                     restored after, s:   TTR, s                             first answer later by, ms        faults\n  \
         subject   from        file  store     file  store   lazy  % of file, store     lazy  % of file, store   of needed    %";

    pub fn line(&self) -> String {
        let s = |us: u64| seconds(us);
        let share = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), |p| format!("{p:.0}"));
        let (of_file, of_store) = self.first_percent();
        format!(
            "  {:<9} {:<8} {:>7.2} {:>6.2} {:>8.2} {:>6.2} {:>6.2} {:>8} {:>8} {:>9.1} {:>8.1} {:>8.1} {:>6} {:>9} {:>4.1}",
            self.subject,
            self.speed,
            s(self.raw_us),
            s(self.eager_us),
            s(self.raw_ttr_us),
            s(self.eager_ttr_us),
            s(self.ttr_us),
            share(self.ttr_percent()),
            share(self.eager_ttr_percent()),
            s(self.first_us.saturating_sub(self.warm_first_us)) * 1e3,
            of_file,
            of_store,
            self.faults,
            self.needed,
            percent(self.faults as u64, self.needed as u64),
        )
    }
}

/// A policy.
#[derive(Debug, Clone, Serialize)]
pub struct Fetched {
    pub subject: String,
    pub speed: &'static str,
    pub policy: &'static str,
    pub needed: usize,
    pub present: usize,
    pub fetched: usize,
    pub unneeded: usize,
    pub read_bytes: u64,
    pub took_us: u64,
    pub warm_us: u64,
}

impl Fetched {
    pub fn new(subject: &str, speed: Speed, policy: &'static str, lazy: &Replayed, warm: &Replayed) -> Self {
        Self {
            subject: subject.to_owned(),
            speed: speed.name,
            policy,
            needed: lazy.needed,
            present: lazy.present,
            fetched: lazy.fetched,
            unneeded: lazy.unneeded,
            read_bytes: lazy.read_bytes,
            took_us: lazy.took_us,
            warm_us: warm.took_us,
        }
    }

    pub fn present_percent(&self) -> f64 {
        percent(self.present as u64, self.needed as u64)
    }

    pub fn waste_percent(&self) -> f64 {
        percent(self.unneeded as u64, self.fetched as u64)
    }

    /// Of the speed of a VM whose memory is all there: over the run, and over a minute whose rest has no first touches.
    pub fn throughput_percent(&self) -> (f64, f64) {
        let late = self.took_us.saturating_sub(self.warm_us);
        let minute = (60 * SECOND).max(self.warm_us);
        (percent(self.warm_us, self.warm_us + late), percent(minute, minute + late))
    }

    pub const HEAD: &'static str = "  subject   from     policy                 needed  there before    %   fetched in vain    %   read MiB   speed: run, minute %";

    pub fn line(&self) -> String {
        let (run, minute) = self.throughput_percent();
        format!(
            "  {:<9} {:<8} {:<20} {:>8} {:>13} {:>4.1} {:>9} {:>7} {:>4.1} {:>10.1} {:>11.1} {:>6.1}",
            self.subject,
            self.speed,
            self.policy,
            self.needed,
            self.present,
            self.present_percent(),
            self.fetched,
            self.unneeded,
            self.waste_percent(),
            self.read_bytes as f64 / 1048576.0,
            run,
            minute,
        )
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share")]
fn percent(part: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { 100.0 * part as f64 / of as f64 }
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    #[expect(clippy::cast_precision_loss, reason = "a mean")]
    let n = values.len().max(1) as f64;
    values.iter().sum::<f64>() / n
}

/// The restores, and how they stand to what is wanted.
pub fn restores(all: &[Restored]) -> (String, Value) {
    let most = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let of_file: Vec<f64> = all.iter().filter_map(Restored::ttr_percent).collect();
    let of_store: Vec<f64> = all.iter().filter_map(Restored::eager_ttr_percent).collect();
    let (first_file, first_store): (Vec<f64>, Vec<f64>) = all.iter().map(Restored::first_percent).unzip();
    let faults =
        percent(all.iter().map(|r| r.faults as u64).sum(), all.iter().map(|r| r.needed as u64).sum());
    let of = |values: &[f64]| (mean(values.iter().copied()), most(values));
    let [ttr_file, ttr_store, first_file, first_store] =
        [of(&of_file), of(&of_store), of(&first_file), of(&first_store)];
    let text = format!(
        "  TTR of a restore from a file: {:.1} % on average, {:.0} % at most (wanted: 35, 60; the paper: 50); of one that fetches all from the store first: {:.0} %, {:.0} %\n  \
         first answer later, of how much later it is from a file: {:.1} % on average, {:.1} % at most (wanted: 5); from the store: {:.0} %, {:.0} %\n  \
         faults of demand-only's: {faults:.1} % (wanted: 4; the paper: 7)",
        ttr_file.0,
        ttr_file.1,
        ttr_store.0,
        ttr_store.1,
        first_file.0,
        first_file.1,
        first_store.0,
        first_store.1,
    );
    let value = json!({
        "ttr_percent": { "of_file": ttr_file, "of_store": ttr_store },
        "first_percent": { "of_file": first_file, "of_store": first_store },
        "faults_percent": faults, "restores": all,
    });
    (text, value)
}

/// The policies, and how they stand to what is wanted.
pub fn policies(all: &[Fetched], best: &str) -> (String, Value) {
    let ours = || all.iter().filter(|f| f.policy == best);
    let present = mean(ours().map(Fetched::present_percent));
    let waste = mean(ours().map(Fetched::waste_percent));
    let least = |of: &dyn Fn(&Fetched) -> f64| ours().map(of).fold(f64::INFINITY, f64::min);
    let text = format!(
        "  {best}: {present:.1} % there before they were touched (wanted: 92; least {:.1}), {waste:.1} % fetched in vain (wanted: 4; most {:.1}); speed over the run at least {:.1} %, over a minute {:.1} % (wanted: 90)",
        least(&Fetched::present_percent),
        ours().map(Fetched::waste_percent).fold(0.0, f64::max),
        least(&|f| f.throughput_percent().0),
        least(&|f| f.throughput_percent().1),
    );
    (text, json!({ "present_percent": present, "waste_percent": waste, "policies": all }))
}
