//! Time to responsiveness: "Efficiently Restoring Virtual Machines", section 5.2.
//!
//! `MMU(w)`, the minimum mutator utilisation, is the least share of any window of `w` in which the
//! guest was not held up. `TTR(w, u)` is the first time from which on every window of `w` that
//! begins then or later has a utilisation of at least `u`.

/// A time in which the guest was held up: begin and end, in microseconds after the restore was
/// asked for.
pub type Stall = (u64, u64);

/// `TTR(w, u)` in microseconds; `stalls` do not overlap and rise. After the last of them nothing
/// holds the guest up.
pub fn time_to(stalls: &[Stall], window_us: u64, percent: u64) -> u64 {
    let sums = Sums::new(stalls);
    let limit = window_us * (100 - percent) / 100;
    // What a window that begins at t loses is linear in t between these.
    let mut bends: Vec<u64> = stalls
        .iter()
        .flat_map(|&(from, to)| [from, to].map(|t| [t, t.saturating_sub(window_us)]))
        .flatten()
        .collect();
    bends.push(0);
    bends.sort_unstable();
    bends.dedup();
    let lost = |from: u64| sums.until(from + window_us) - sums.until(from);
    let Some(last) = bends.iter().rposition(|t| lost(*t) > limit) else { return 0 };
    let (begin, above) = (bends[last], lost(bends[last]));
    // It falls by at most a microsecond in each, to what the next bend has.
    let Some(&next) = bends.get(last + 1) else { return begin };
    let fall = above - lost(next).min(above);
    let share =
        (u128::from(above - limit) * u128::from(next - begin)).div_ceil(u128::from(fall.max(1)));
    begin + u64::try_from(share).unwrap_or(u64::MAX).min(next - begin)
}

/// `MMU(w)` in percent over the time until the last stall's end.
pub fn utilisation(stalls: &[Stall], window_us: u64) -> f64 {
    let sums = Sums::new(stalls);
    let begins =
        stalls.iter().flat_map(|&(from, to)| [from, to.saturating_sub(window_us)]).chain([0]);
    let most = begins.map(|t| sums.until(t + window_us) - sums.until(t)).max().unwrap_or(0);
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    let lost = most as f64 / window_us as f64;
    100.0 * (1.0 - lost)
}

/// How long the guest was held up until a time.
struct Sums<'a> {
    stalls: &'a [Stall],
    before: Vec<u64>,
}

impl<'a> Sums<'a> {
    fn new(stalls: &'a [Stall]) -> Self {
        let mut sum = 0;
        let add = |&(from, to): &Stall| {
            sum += to - from;
            Some(sum - (to - from))
        };
        Self { stalls, before: stalls.iter().filter_map(add).collect() }
    }

    fn until(&self, time: u64) -> u64 {
        let Some(last) = self.stalls.partition_point(|(from, _)| *from < time).checked_sub(1)
        else {
            return 0;
        };
        let (from, to) = self.stalls[last];
        self.before[last] + to.min(time) - from
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    #[test]
    fn an_eager_restore_is_responsive_a_little_before_its_end() {
        // A window that begins 0.2 s before the end loses 0.2 s.
        assert_eq!(time_to(&[(0, 5 * SECOND)], SECOND, 80), 4_800_000);
        assert_eq!(time_to(&[(0, 5 * SECOND)], SECOND, 50), 4_500_000);
        assert_eq!(time_to(&[(0, 150_000)], SECOND, 80), 0);
        assert_eq!(time_to(&[], SECOND, 80), 0);
        assert!((utilisation(&[(0, 5 * SECOND)], SECOND) - 0.0).abs() < 1e-9);
    }

    #[test]
    fn many_short_stalls_count_together() {
        // For two seconds, half of each 10 ms.
        let stalls: Vec<Stall> = (0..200).map(|n| (n * 10_000, n * 10_000 + 5_000)).collect();
        assert!((utilisation(&stalls, SECOND) - 50.0).abs() < 0.6);
        assert_eq!(time_to(&stalls, SECOND, 45), 0);
        // 0.2 s lost are left when 0.4 s of them are ahead.
        let got = time_to(&stalls, SECOND, 80);
        assert!((1_590_000..=1_605_000).contains(&got), "{got}");
    }

    #[test]
    fn a_late_stall_counts() {
        let got = time_to(&[(0, 10_000), (7 * SECOND, 7 * SECOND + 300_000)], SECOND, 80);
        assert_eq!(got, 7 * SECOND + 100_000);
        assert_eq!(time_to(&[(0, 10_000), (7 * SECOND, 7 * SECOND + 190_000)], SECOND, 80), 0);
    }

    #[test]
    fn it_is_the_first_such_time() {
        // Against looking at every millisecond.
        let stalls = [
            (0, 40_000),
            (90_000, 400_000),
            (900_000, 1_000_000),
            (1_500_000, 1_800_000),
            (1_900_000, 1_950_000),
        ];
        let sums = Sums::new(&stalls);
        for percent in [50, 60, 70, 80, 90, 95] {
            let bad =
                |t: u64| sums.until(t + SECOND) - sums.until(t) > SECOND * (100 - percent) / 100;
            let expected =
                (0..4000).rev().map(|ms| ms * 1000).find(|t| bad(*t)).map_or(0, |t| t + 1000);
            let got = time_to(&stalls, SECOND, percent);
            assert!(
                got <= expected && got + 1000 >= expected,
                "{percent}: expected {expected}, got {got}"
            );
        }
    }
}
