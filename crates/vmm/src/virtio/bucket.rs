//! A rate limit: a token bucket that may go into debt, so that no packet is too large for it.

use crate::config::Rate;
use std::time::{Duration, Instant};

/// The token bucket; a token is a byte.
#[derive(Debug)]
pub struct Bucket {
    rate: Option<Rate>,
    /// Negative after a packet that was longer than the tokens left.
    tokens: f64,
    at: Option<Instant>,
}

impl Bucket {
    /// A full bucket; without a rate every packet passes.
    pub fn new(rate: Option<Rate>) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a limit need not be exact to the byte")]
        let tokens = rate.map_or(0.0, |rate| rate.burst_bytes as f64);
        Self { rate: rate.filter(|rate| rate.bytes_per_second > 0), tokens, at: None }
    }

    /// Whether a packet may pass now.
    ///
    /// # Errors
    /// The instant at which a packet may pass again.
    pub fn ready(&mut self, now: Instant) -> Result<(), Instant> {
        let Some(rate) = self.rate else { return Ok(()) };
        #[expect(clippy::cast_precision_loss, reason = "a limit need not be exact to the byte")]
        let (per_second, burst) = (rate.bytes_per_second as f64, rate.burst_bytes.max(1) as f64);
        let since =
            self.at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.tokens = since.as_secs_f64().mul_add(per_second, self.tokens).min(burst);
        if self.tokens > 0.0 {
            return Ok(());
        }
        // At least 0.1 ms, because the device thread sleeps in whole milliseconds.
        let missing = (1.0 - self.tokens) / per_second;
        Err(now + Duration::from_secs_f64(missing.clamp(0.000_1, 3600.0)))
    }

    /// Takes the tokens of a packet that passed.
    pub fn take(&mut self, bytes: u64) {
        if self.rate.is_some() {
            #[expect(clippy::cast_precision_loss, reason = "a packet has few bytes")]
            let bytes = bytes as f64;
            self.tokens -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_passes_as_the_rate_says_whatever_the_packets() {
        let start = Instant::now();
        for packet in [100_u64, 1_500, 60_000] {
            let mut bucket =
                Bucket::new(Some(Rate { bytes_per_second: 1_000_000, burst_bytes: 10_000 }));
            let (mut now, mut passed) = (start, 0);
            while now < start + Duration::from_secs(10) {
                match bucket.ready(now) {
                    Ok(()) => {
                        bucket.take(packet);
                        passed += packet;
                    }
                    Err(when) => {
                        assert!(when > now, "it would be asked for ever");
                        now = when;
                    }
                }
            }
            assert!(
                (9_900_000..=10_100_000).contains(&passed),
                "{passed} bytes in packets of {packet}"
            );
        }
        let mut open = Bucket::new(None);
        open.take(u64::MAX);
        assert!(open.ready(start).is_ok());
    }
}
