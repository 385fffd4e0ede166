//! Figures that the tests print. No test depends on them, because test hosts are noisy.

use std::time::{Duration, Instant};

/// Prints median and maximum of the durations.
pub(crate) fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    if let (Some(middle), Some(last)) = (times.get(times.len() / 2), times.last()) {
        println!("  {what}: p50 {:.2} ms, max {:.2} ms of {}", ms(*middle), ms(*last), times.len());
    }
}

/// Prints a rate in MiB per second.
pub(crate) fn print_rate(what: &str, bytes: usize, begun: Instant) {
    let mib = f64::from(u32::try_from(bytes >> 20).unwrap_or(u32::MAX));
    println!("  {what}: {:.0} MiB/s", mib / begun.elapsed().as_secs_f64());
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
