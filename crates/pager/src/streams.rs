//! What is asked for one after the other, upwards or downwards: more of it comes with the next of them.
//!
//! Recorded runs say nothing of what nobody touched in them, and a window for all of it is wrong in both directions: scattered, its frames want none; a file
//! that is read for the first time wants a large one. As Linux reads files ahead, a stream's window grows with what it has come to so far. It counts
//! what lies side by side in the store, which is the order of files on their disk, and of frames in RAM elsewhere.
//!
//! In the recorded runs of `dayfly-bench-restore`, a third of that and 16 frames at most have 97.3 % there before they are touched and 4.0 % fetched in vain; all of it
//! and 64 frames 97.5 and 4.3; no streams 96.3 and 3.9.

use crate::policy::UNIT;
use crate::source::Layout;
use std::collections::VecDeque;

/// So many in a row make a stream.
const STREAM: u32 = 3;
/// What comes with one of them, of what came before.
const PART: u32 = 3;
/// The most frames that come with one that was asked for: who waits for that waits for them.
const MOST_FRAMES: u32 = UNIT as u32;
/// How far the next one that is missing may lie away, for that it lies behind others that are there or of another colour.
const REACH: u32 = 64;
/// The most that is remembered: two for each that was asked for alone.
const KEPT: usize = 128;

/// A row of batches that were asked for.
#[derive(Debug, Clone, Copy)]
struct Stream {
    /// It goes on if this is asked for.
    next: u32,
    up: bool,
    /// How many were asked for or came with those.
    came: u32,
}

/// Those that may go on, the last one at the end.
#[derive(Debug, Clone, Default)]
pub struct Streams(VecDeque<Stream>);

impl Streams {
    /// Somebody asks for `batch`: what is to come with it, the nearest first. `missing` says which are not there.
    pub fn asked(&mut self, layout: &Layout, batch: u32, missing: impl Fn(u32) -> bool) -> Vec<u32> {
        let of = |n: u32| layout.batches.get(n as usize);
        let Some(colour) = of(batch).filter(|asked| asked.group == 0).map(|asked| asked.colour) else {
            return Vec::new();
        };
        // Nothing of a group: it comes whole.
        let same = |n: &u32| of(*n).is_some_and(|beside| beside.colour == colour && beside.group == 0);
        let along = |from: u32, up: bool| {
            let step = move |n: &u32| if up { n.checked_add(1) } else { n.checked_sub(1) };
            std::iter::successors(step(&from), step).take(REACH as usize).filter(same).filter(|n| missing(*n))
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

    /// 1000 batches of a frame; from 900 on of another colour, and from 950 on of groups.
    fn layout() -> Layout {
        let batch = |n| Batch { first: n, frames: 1, colour: u8::from(n >= 900), group: u32::from(n >= 950) };
        Layout { batch_of: (0..1000).collect(), batches: (0..1000).map(batch).collect() }
    }

    /// Touches these, and gives for each that had to be asked for what came with it, and all that is there then.
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
        assert_eq!(asked.iter().map(|(_, with)| with).sum::<usize>(), 1, "of the second colour alone");
        assert_eq!(there.len(), 9 + 1);
        assert_eq!(touch([999, 998, 997, 1000, u32::MAX, 2, 1, 0]).0.len(), 8);
    }

    #[test]
    fn streams_between_each_other_and_over_what_is_there_go_on() {
        let both = (0..100).flat_map(|n| [100 + n, 800 - n]);
        let asked = touch(both).0;
        assert_eq!(asked.len(), 2 * touch(100..200).0.len());
        let (layout, mut streams) = (layout(), Streams::default());
        // Every other one is there.
        let came: Vec<usize> =
            [10, 12, 14].map(|batch| streams.asked(&layout, batch, |n| n % 2 == 0).len()).to_vec();
        assert_eq!(came, [0, 0, 1]);
    }
}
