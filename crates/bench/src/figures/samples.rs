//! Samples and their quantiles.
//!
//! Quantiles are exact: each is the nearest rank, so it is always a value that was measured. A
//! scenario takes at most some ten thousand samples, so they need no buckets.

use serde::ser::{Serialize, SerializeMap, Serializer};

/// z of a two-sided interval of 95 %.
const Z: f64 = 1.96;

/// The median of values in any order; 0 without values.
pub fn median(values: &[u64]) -> u64 {
    Spread::of(values).p50()
}

/// A count, a time or a length as a floating-point number.
#[expect(clippy::cast_precision_loss, reason = "figures for people; most are below 2^53")]
pub const fn float(number: u64) -> f64 {
    number as f64
}

/// `a / b` to three digits after the point; 0 if `b` is 0.
pub fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { rounded(float(a) / float(b)) }
}

/// `part` in percent of `whole`, to three digits after the point; 0 if `whole` is 0.
pub fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { rounded(float(part) / float(whole) * 100.0) }
}

/// The mean; 0 without values.
pub fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for value in values {
        (sum, count) = (sum + value, count + 1);
    }
    rounded(sum / float(count.max(1)))
}

/// The geometric mean; NaN without values.
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for value in values {
        (sum, count) = (sum + value.ln(), count + 1);
    }
    (sum / float(count)).exp()
}

/// To three digits after the point.
pub fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Microseconds as milliseconds, or nanoseconds as microseconds.
pub fn ms(us: u64) -> f64 {
    float(us) / 1e3
}

/// The unit of a [`Spread`], which ends the names of its figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Nanoseconds, from samples in nanoseconds.
    Ns,
    /// Microseconds, from samples in microseconds.
    Us,
    /// Microseconds with three digits after the point, from samples in nanoseconds.
    UsOfNs,
    /// Milliseconds with three digits after the point, from samples in microseconds.
    Ms,
}

impl Unit {
    const fn name(self) -> &'static str {
        match self {
            Self::Ns => "ns",
            Self::Us | Self::UsOfNs => "us",
            Self::Ms => "ms",
        }
    }

    fn value(self, sample: u64) -> serde_json::Value {
        match self {
            Self::Ns | Self::Us => sample.into(),
            Self::Ms | Self::UsOfNs => ms(sample).into(),
        }
    }
}

/// The quantiles of a set of samples.
#[derive(Debug, Clone)]
pub struct Spread {
    sorted: Vec<u64>,
    unit: Unit,
    by_floor: Option<f64>,
}

impl Spread {
    /// Of times in microseconds, in any order.
    pub fn of(values: &[u64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_unstable();
        Self { sorted, unit: Unit::Us, by_floor: None }
    }

    /// The same in another unit.
    #[must_use]
    pub fn unit(self, unit: Unit) -> Self {
        Self { unit, ..self }
    }

    /// The same, compared with the median of `floor`.
    #[must_use]
    pub fn against(self, floor: &Self) -> Self {
        Self { by_floor: Some(ratio(self.p50(), floor.p50())), ..self }
    }

    /// The median, in the unit of the samples.
    pub fn p50(&self) -> u64 {
        self.quantile(0.5)
    }

    /// The smallest sample that is no smaller than the `part` (0 to 1) of all; 0 without samples.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small counts")]
    pub fn quantile(&self, part: f64) -> u64 {
        self.rank((part * float(self.sorted.len() as u64)).ceil() as usize)
    }

    /// The sample of this rank; ranks begin with 1.
    fn rank(&self, rank: usize) -> u64 {
        self.sorted.get(rank.clamp(1, self.sorted.len().max(1)) - 1).copied().unwrap_or(0)
    }

    /// The 95 % interval of the median, from order statistics: it assumes no distribution.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small ranks")]
    fn median_interval(&self) -> [u64; 2] {
        let n = float(self.sorted.len() as u64);
        let (half, reach) = (n / 2.0, Z * n.sqrt() / 2.0);
        let low = (half - reach).floor().max(0.0) as usize;
        [low, (half + reach).ceil() as usize + 1].map(|rank| self.rank(rank))
    }
}

impl Serialize for Spread {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (unit, value) = (self.unit.name(), |sample| self.unit.value(sample));
        let mut map = serializer.serialize_map(None)?;
        for (name, part) in
            [("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("min", 0.0), ("max", 1.0)]
        {
            map.serialize_entry(&format!("{name}_{unit}"), &value(self.quantile(part)))?;
        }
        let interval = self.median_interval().map(value);
        map.serialize_entry(&format!("p50_interval95_{unit}"), &interval)?;
        map.serialize_entry("n", &self.sorted.len())?;
        if let Some(ratio) = self.by_floor {
            map.serialize_entry("ratio_to_floor_p50", &ratio)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn up_to(last: u64) -> Spread {
        Spread::of(&(1..=last).rev().collect::<Vec<_>>())
    }

    #[test]
    fn quantiles_are_values_that_were_measured() {
        assert_eq!([0.5, 0.99, 1.0].map(|part| up_to(100).quantile(part)), [50, 99, 100]);
        assert_eq!((median(&[7]), median(&[])), (7, 0));
        assert_eq!((median(&[9, 1, 5]), median(&[4, 1, 3, 2])), (5, 2));
    }

    #[test]
    fn ratios_and_their_inverses_have_a_geometric_mean_of_one() {
        assert!((geometric_mean([0.5, 2.0, 0.25, 4.0]) - 1.0).abs() < 1e-12);
        assert!((geometric_mean([3.0]) - 3.0).abs() < 1e-12 && geometric_mean([]).is_nan());
    }

    /// The ranks are those of tables of the binomial distribution.
    #[test]
    fn the_interval_of_the_median_has_the_ranks_of_the_binomial_distribution() {
        assert_eq!(up_to(100).median_interval(), [40, 61]);
        assert_eq!(up_to(20).median_interval(), [5, 16]);
        assert_eq!(Spread::of(&[5]).median_interval(), [5, 5]);
        assert_eq!(Spread::of(&[]).median_interval(), [0, 0]);
    }

    #[test]
    fn a_spread_is_compared_with_the_median_of_the_floor() {
        let spread = Spread::of(&[30, 50, 40]).against(&Spread::of(&[10, 20, 30]));
        let expected = json!({
            "p50_us": 40, "p90_us": 50, "p95_us": 50, "p99_us": 50, "min_us": 30, "max_us": 50,
            "p50_interval95_us": [30, 50], "n": 3, "ratio_to_floor_p50": 2.0,
        });
        assert_eq!(json!(spread), expected);
        let ms = json!(Spread::of(&[1234]).unit(Unit::Ms));
        assert_eq!((&ms["p50_ms"], ms.get("ratio_to_floor_p50")), (&json!(1.234), None));
        assert_eq!(
            (ratio(1, 3), ratio(1, 0), percent(1, 3), percent(1, 0)),
            (0.333, 0.0, 33.333, 0.0)
        );
    }
}
