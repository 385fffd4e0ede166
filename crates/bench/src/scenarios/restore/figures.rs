//! What replays come to, as tables and JSON.

use super::catalogue::Subject;
use super::device::Speed;
use super::replay::Replayed;
use super::response::{time_to, utilisation};
use crate::prelude::*;

const SECOND: u64 = 1_000_000;

/// Seconds until RAM is restored, and times to responsiveness (TTR).
pub const TIMES: [Column; 7] = [
    ("file", "/raw_us", Seconds),
    ("store", "/eager_us", Seconds),
    ("file", "/raw_ttr_us", Seconds),
    ("store", "/eager_ttr_us", Seconds),
    ("lazy", "/ttr_us", Seconds),
    ("% file", "/ttr_percent_of_file", Digits(0)),
    ("% store", "/ttr_percent_of_store", Digits(0)),
];

/// How much later than with all memory there the first answer comes, and faults of the needed
/// frames.
const FIRST_ANSWERS: [Column; 6] = [
    ("later by", "/first_later_us", Us),
    ("% file", "/first_percent_of_file", Digits(1)),
    ("% store", "/first_percent_of_store", Digits(1)),
    ("faults", "/faults", Plain),
    ("needed", "/needed", Plain),
    ("%", "/faults_percent", Digits(1)),
];

/// Shares in percent: frames there before they were touched, frames fetched in vain; the speed over
/// the run and over a minute, of a VM whose memory is all there.
pub const POLICIES: [Column; 6] = [
    ("needed", "/needed", Plain),
    ("there", "/present_percent", Digits(1)),
    ("in vain", "/waste_percent", Digits(1)),
    ("read", "/read_bytes", Mib),
    ("run", "/run_percent", Digits(1)),
    ("minute", "/minute_percent", Digits(1)),
];

/// Restores of a subject before its guest runs, in microseconds.
#[derive(Debug, Clone, Copy)]
pub struct Eager {
    /// A file as long as RAM is read first, as the paper's hypervisor does it.
    pub raw_us: u64,
    /// All of RAM is fetched from the store first.
    pub store_us: u64,
    /// Bytes read for that.
    pub store_bytes: u64,
}

/// A lazy restore, compared with eager ones; `warm` is the same run with all of RAM there.
pub fn restored(
    subject: &Subject,
    speed: Speed,
    eager: Eager,
    lazy: &Replayed,
    warm: &Replayed,
) -> Value {
    let Eager { raw_us, store_us, store_bytes } = eager;
    let wanted = if subject.interactive { 80 } else { 50 };
    let stall = |us| time_to(&[(0, us)], SECOND, wanted);
    let (raw_ttr, eager_ttr, ttr) =
        (stall(raw_us), stall(store_us), time_to(&lazy.stalls, SECOND, wanted));
    // Nothing where the other is none.
    let share = |of: u64| (of > 0).then(|| percent(ttr, of));
    let later = lazy.first_us.saturating_sub(warm.first_us);
    json!({
        "subject": subject.name, "speed": speed.name,
        // The utilisation that is wanted, in percent.
        "wanted": wanted,
        "raw_us": raw_us, "raw_ttr_us": raw_ttr,
        "eager_us": store_us, "eager_bytes": store_bytes, "eager_ttr_us": eager_ttr,
        "ttr_us": ttr, "ttr_percent_of_file": share(raw_ttr),
        "ttr_percent_of_store": share(eager_ttr),
        "least_utilisation": utilisation(&lazy.stalls, SECOND),
        "first_us": lazy.first_us, "warm_first_us": warm.first_us, "first_later_us": later,
        "first_percent_of_file": percent(later, raw_us),
        "first_percent_of_store": percent(later, store_us),
        "needed": lazy.needed, "faults": lazy.faults(),
        "faults_percent": percent(lazy.faults() as u64, lazy.needed as u64),
        "read_bytes": lazy.read_bytes,
    })
}

/// A policy, on the run that is `warm` with all of RAM there.
pub fn fetched(subject: &Subject, policy: &str, lazy: &Replayed, warm: &Replayed) -> Value {
    let late = lazy.took_us.saturating_sub(warm.took_us);
    let minute = (60 * SECOND).max(warm.took_us);
    json!({
        "subject": subject.name, "speed": super::NETWORK.name, "policy": policy,
        "needed": lazy.needed, "present": lazy.present,
        "present_percent": percent(lazy.present as u64, lazy.needed as u64),
        "fetched": lazy.fetched, "unneeded": lazy.unneeded,
        "waste_percent": percent(lazy.unneeded as u64, lazy.fetched as u64),
        "read_bytes": lazy.read_bytes, "took_us": lazy.took_us, "warm_us": warm.took_us,
        // Of the speed of a VM whose memory is all there: over the run, and over a minute whose
        // rest has no first touches.
        "run_percent": percent(warm.took_us, warm.took_us + late),
        "minute_percent": percent(minute, minute + late),
    })
}

/// The numbers below `key` of all rows that have one.
fn all(rows: &[Value], key: &str) -> Vec<f64> {
    rows.iter().filter_map(|row| row[key].as_f64()).collect()
}

fn most(values: Vec<f64>) -> f64 {
    values.into_iter().fold(0.0, f64::max)
}

/// The restores; prints how they compare with what is wanted.
pub fn restores(rows: Vec<Value>) -> Value {
    println!("  first answer later by, and in % of a restore; faults of the needed frames");
    let table = Table::new(20, "subject, from", &FIRST_ANSWERS);
    rows.iter().for_each(|row| table.row(&name(row, "speed"), row));
    let of = |key: &str| (mean(all(&rows, key)), most(all(&rows, key)));
    let [ttr_file, ttr_store, first_file, first_store] = [
        "ttr_percent_of_file",
        "ttr_percent_of_store",
        "first_percent_of_file",
        "first_percent_of_store",
    ]
    .map(of);
    let [faults, needed] = ["faults", "needed"].map(|key| all(&rows, key).iter().sum::<f64>());
    let faults = if needed > 0.0 { rounded(faults / needed * 100.0) } else { 0.0 };
    println!(
        "  TTR in % of a restore from a file: {:.1} on average, {:.0} at most (wanted: 35, 60; the \
         paper: 50);\n    of one that fetches all from the store first: {:.0}, {:.0}",
        ttr_file.0, ttr_file.1, ttr_store.0, ttr_store.1
    );
    println!(
        "  first answer later, in % of a restore from a file: {:.1} on average, {:.1} at most \
         (wanted: 5);\n    from the store: {:.0}, {:.0}",
        first_file.0, first_file.1, first_store.0, first_store.1
    );
    println!("  faults in % of those on demand only: {faults:.1} (wanted: 4; the paper: 7)");
    json!({
        "ttr_percent": { "of_file": ttr_file, "of_store": ttr_store },
        "first_percent": { "of_file": first_file, "of_store": first_store },
        "faults_percent": faults, "restores": rows,
    })
}

/// The policies; prints how the `best` compares with what is wanted.
pub fn policies(rows: Vec<Value>, best: &str) -> Value {
    let ours: Vec<Value> = rows.iter().filter(|row| row["policy"] == best).cloned().collect();
    let least = |key: &str| all(&ours, key).into_iter().fold(f64::INFINITY, f64::min);
    let (present, waste) = (mean(all(&ours, "present_percent")), mean(all(&ours, "waste_percent")));
    println!(
        "  {best}: {present:.1} % there before they were touched (wanted: 92; least {:.1}),\n    \
         {waste:.1} % fetched in vain (wanted: 4; most {:.1});\n    \
         speed over the run at least {:.1} %, over a minute {:.1} % (wanted: 90)",
        least("present_percent"),
        most(all(&ours, "waste_percent")),
        least("run_percent"),
        least("minute_percent")
    );
    json!({ "present_percent": present, "waste_percent": waste, "policies": rows })
}

/// The name of a row in a table.
pub fn name(row: &Value, second: &str) -> String {
    [&row["subject"], &row[second]].map(|part| part.as_str().unwrap_or_default()).join(" ")
}
