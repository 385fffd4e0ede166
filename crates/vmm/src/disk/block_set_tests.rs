use super::*;
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::BTreeSet;

thread_local! {
    static CHUNKS: Cell<u64> = const { Cell::new(0) };
}

pub fn looked_at_a_chunk() {
    CHUNKS.set(CHUNKS.get() + 1);
}

/// The number of chunks at which this thread has looked since the last call.
pub fn chunks_looked_at() -> u64 {
    CHUNKS.take()
}

/// Runs that begin or end at the borders of words and chunks, or near them.
fn run() -> impl Strategy<Value = Range<u64>> {
    let border = prop_oneof![Just(0_u64), Just(64), Just(CHUNK), Just(2 * CHUNK), Just(5 * CHUNK)];
    let near = (border, 0..70_u64).prop_map(|(border, by)| border + by);
    let len = prop_oneof![0..3_u64, 60..70_u64, CHUNK - 2..CHUNK + 2, 2 * CHUNK..2 * CHUNK + 2];
    (near, len).prop_map(|(start, len)| start..start + len)
}

proptest! {
    #[test]
    fn the_runs_are_the_blocks_that_were_inserted(
        inserted in proptest::collection::vec(run(), 0..12),
    ) {
        let (mut set, mut model) = (BlockSet::default(), BTreeSet::new());
        for run in inserted {
            set.insert_run(&run);
            model.extend(run);
        }
        let runs: Vec<_> = set.runs().collect();
        prop_assert!(runs.iter().all(|run| run.start < run.end));
        prop_assert!(runs.windows(2).all(|two| two[0].end < two[1].start), "{:?}", runs);
        let blocks: BTreeSet<u64> = runs.into_iter().flatten().collect();
        prop_assert_eq!(blocks, model);
    }
}

#[test]
fn a_chunk_with_all_its_blocks_takes_no_words() {
    let mut set = BlockSet::default();
    (0..CHUNK).rev().for_each(|block| set.insert_run(&(block..block + 1)));
    set.insert_run(&(CHUNK..300 * CHUNK + 1));
    set.insert_run(&(7..9));
    assert!(set.chunks.range(..300).all(|(_, chunk)| matches!(chunk, Chunk::All)));
    let mut runs = set.runs();
    assert_eq!((runs.next(), runs.next()), (Some(0..300 * CHUNK + 1), None));
}
