//! Streams: faults on consecutive batches, upwards or downwards. Each further fault of a stream
//! fetches more batches.
//!
//! Recorded runs say nothing about frames that no run touched, and no single window suits these:
//! scattered faults need none, a file read for the first time needs a large one. As in Linux's
//! readahead, a stream's window grows with the stream's length. Consecutive means adjacent in the
//! store: the order of files on their disk, otherwise the order of frames in RAM.
//!
//! `dayfly-bench restore` on the recorded runs: with a third of the stream and at most 16 frames,
//! 97.3 % are present before they are touched and 4.0 % are wasted. With all of it and 64 frames:
//! 97.5 % and 4.3 %. Without streams: 96.3 % and 3.9 %.

use crate::policy::UNIT;
use crate::source::Layout;
use std::collections::VecDeque;

/// Number of consecutive faults that make a stream.
const STREAM: u32 = 3;
/// The window of a stream is its length divided by this.
const PART: u32 = 3;
/// The most frames fetched with a faulting batch, because the clone waits for them too.
const MOST_FRAMES: u32 = UNIT as u32;
/// How far away the next missing batch of a stream may be; batches in between are present or of
/// another colour.
const REACH: u32 = 64;
/// The most streams remembered; a single fault starts two.
const KEPT: usize = 128;

/// A sequence of consecutive batches.
#[derive(Debug, Clone, Copy)]
struct Stream {
    /// The batch whose fault continues the stream.
    next: u32,
    up: bool,
    /// Number of batches so far, by fault or fetched with one.
    came: u32,
}

/// The streams that may continue, the most recent last.
#[derive(Debug, Clone, Default)]
pub struct Streams(VecDeque<Stream>);

impl Streams {
    /// Notes a fault on `batch`, and returns the batches to fetch with it, the nearest first.
    /// `missing` reports which batches are not present.
    pub fn asked(
        &mut self,
        layout: &Layout,
        batch: u32,
        missing: impl Fn(u32) -> bool,
    ) -> Vec<u32> {
        let of = |n: u32| layout.batches.get(n as usize);
        let Some(colour) = of(batch).filter(|asked| asked.group == 0).map(|asked| asked.colour)
        else {
            return Vec::new();
        };
        // A batch with a group comes with its whole group instead.
        let same =
            |n: &u32| of(*n).is_some_and(|beside| beside.colour == colour && beside.group == 0);
        let along = |from: u32, up: bool| {
            let step = move |n: &u32| if up { n.checked_add(1) } else { n.checked_sub(1) };
            std::iter::successors(step(&from), step)
                .take(REACH as usize)
                .filter(same)
                .filter(|n| missing(*n))
        };
        let known = self.0.iter().rposition(|stream| stream.next == batch);
        let Some(mut stream) = known.and_then(|known| self.0.remove(known)) else {
            for up in [false, true] {
                if let Some(next) = along(batch, up).next() {
                    self.keep(Stream { next, up, came: 1 });
                }
            }
            return Vec::new();
        };
        stream.came = stream.came.saturating_add(1);
        let (mut with, mut frames) = (Vec::new(), 0);
        if stream.came >= STREAM {
            for next in along(batch, stream.up).take((stream.came / PART) as usize) {
                frames += of(next).map_or(0, |batch| batch.frames);
                if frames > MOST_FRAMES {
                    break;
                }
                with.push(next);
            }
        }
        stream.came = stream.came.saturating_add(u32::try_from(with.len()).unwrap_or(u32::MAX));
        if let Some(next) = along(with.last().copied().unwrap_or(batch), stream.up).next() {
            self.keep(Stream { next, ..stream });
        }
        with
    }

    fn keep(&mut self, stream: Stream) {
        if self.0.len() >= KEPT {
            self.0.pop_front();
        }
        self.0.push_back(stream);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Batch;
    use std::collections::HashSet;

    /// 1000 batches of one frame; from 900 on of another colour, and from 950 on with groups.
    fn layout() -> Layout {
        let batch = |n| Batch {
            first: n,
            frames: 1,
            colour: u8::from(n >= 900),
            group: u32::from(n >= 950),
        };
        Layout { batch_of: (0..1000).collect(), batches: (0..1000).map(batch).collect() }
    }

    /// Touches these batches. Returns for each fault the number of batches that came with it, and
    /// all batches that are present in the end.
    fn touch(touched: impl IntoIterator<Item = u32>) -> (Vec<(u32, usize)>, HashSet<u32>) {
        let (layout, mut streams) = (layout(), Streams::default());
        let (mut asked, mut there) = (Vec::new(), HashSet::new());
        for batch in touched {
            if there.contains(&batch) {
                continue;
            }
            let with = streams.asked(&layout, batch, |n| !there.contains(&n) && n != batch);
            asked.push((batch, with.len()));
            there.extend(with.into_iter().chain([batch]));
            assert!(streams.0.len() <= KEPT);
        }
        (asked, there)
    }

    #[test]
    fn what_goes_on_has_more_each_time() {
        let up = touch(100..300).0;
        assert_eq!(up[..6], [(100, 0), (101, 0), (102, 1), (104, 1), (106, 2), (109, 3)]);
        assert_eq!(up[up.len() - 3..].iter().map(|(_, with)| *with).collect::<Vec<_>>(), [16; 3]);
        assert_eq!(up.len(), 20);
        let down = touch((100..300).rev()).0;
        assert_eq!(down[..4], [(299, 0), (298, 0), (297, 1), (295, 1)]);
        assert_eq!(down.len(), up.len());
    }

    #[test]
    fn what_is_scattered_or_ends_has_nothing_in_vain() {
        assert_eq!(touch((0..900).step_by(2)).1.len(), 450);
        assert_eq!(touch((0..900).filter(|n| n % 5 < 2)).1.len(), 360, "two side by side");
        let (asked, there) = touch([897, 898, 899, 900, 901, 902, 950, 951, 952]);
        assert_eq!(
            asked.iter().map(|(_, with)| with).sum::<usize>(),
            1,
            "of the second colour alone"
        );
        assert_eq!(there.len(), 9 + 1);
        assert_eq!(touch([999, 998, 997, 1000, u32::MAX, 2, 1, 0]).0.len(), 8);
    }

    #[test]
    fn streams_between_each_other_and_over_what_is_there_go_on() {
        let both = (0..100).flat_map(|n| [100 + n, 800 - n]);
        let asked = touch(both).0;
        assert_eq!(asked.len(), 2 * touch(100..200).0.len());
        let (layout, mut streams) = (layout(), Streams::default());
        // Every second batch is present.
        let came: Vec<usize> =
            [10, 12, 14].map(|batch| streams.asked(&layout, batch, |n| n % 2 == 0).len()).to_vec();
        assert_eq!(came, [0, 0, 1]);
    }
}
