use super::*;

pub(super) fn page(frame: u32, group: u32, hash: u32, colour: u8) -> Slot {
    Slot { frame, place: Place::Page(GroupId { pack: 0, group }, hash), colour }
}

fn block(frame: u32, block: u32) -> Slot {
    Slot { frame, place: Place::Block(0, 0, block), colour: 6 }
}

fn frames(slots: Vec<Slot>, first: &[u32], policy: &Policy) -> Vec<Vec<u32>> {
    together(slots, &Expected { first: first.to_vec(), ..Expected::default() }, policy)
}

fn together(slots: Vec<Slot>, expected: &Expected, policy: &Policy) -> Vec<Vec<u32>> {
    let batches = batches(slots, expected, policy);
    batches.iter().map(|(_, batch)| batch.iter().map(|slot| slot.frame).collect()).collect()
}

/// Two groups, and blocks across the end of a unit; frame 30 has the page of frame 3.
fn sample() -> Vec<Slot> {
    let mut slots: Vec<Slot> = (0..4).map(|n| page(n, 0, n, 3)).collect();
    slots.extend([page(8, 1, 4, 5), page(9, 1, 5, 5), page(7, 1, 6, 3), page(30, 0, 3, 3)]);
    slots.extend((20..24).map(|n| block(n, n - 6)));
    slots
}

#[test]
fn what_one_read_gives_in_one_colour_comes_together() {
    let whole = Policy::colour([16; 16]);
    let expected: [&[u32]; 5] = [&[0, 1, 2, 3, 30], &[8, 9], &[7], &[20, 21], &[22, 23]];
    assert_eq!(frames(sample(), &[1], &whole), expected);
    let mut windows = [1; 16];
    windows[3] = 2;
    let expected: [&[u32]; 9] =
        [&[0, 1], &[2, 3, 30], &[8], &[9], &[7], &[20], &[21], &[22], &[23]];
    assert_eq!(
        frames(sample(), &[1], &Policy::colour(windows)),
        expected,
        "frames of one page count once"
    );
}

#[test]
fn the_working_set_is_apart_and_whole() {
    let minimal = Policy::colour([1; 16]).with_working_set();
    let expected: [&[u32]; 8] = [&[0], &[1, 2, 30], &[3], &[8], &[7, 9], &[20], &[21], &[22, 23]];
    assert_eq!(frames(sample(), &[30, 9, 7, 22, 2, 1, 23], &minimal), expected);
}

#[test]
fn what_the_same_runs_touched_comes_together_and_has_a_group() {
    let known = [(1, 2), (2, 2), (3, 1), (20, 4), (21, 4), (22, 4), (23, 1), (8, 1), (9, 1)];
    let expected = Expected { first: vec![9], together: known.into(), ..Expected::default() };
    let policy = Policy::colour([1; 16]).with_working_set();
    let batches = [
        vec![0],
        vec![1, 2],
        vec![3],
        vec![30],
        vec![9],
        vec![8],
        vec![7],
        vec![20, 21],
        vec![22],
        vec![23],
    ];
    let mut got = together(sample(), &expected, &policy);
    let mut wanted = batches.to_vec();
    got.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(got, wanted);
    let layout = layout(40, &super::batches(sample(), &expected, &policy), &[]);
    let group = |frame: usize| layout.batches[layout.batch_of[frame] as usize].group;
    assert_eq!([0, 30, 7, 9].map(group), [0; 4]);
    assert!(group(20) != 0 && group(20) == group(22), "across the end of what one read gives");
    assert!(group(22) != group(23) && group(1) != group(3) && group(1) != 0, "{layout:?}");
}

#[test]
fn the_blind_take_what_lies_beside_in_ram() {
    let mut got = frames(sample(), &[], &Policy::blind(16));
    got.iter_mut().for_each(|batch| batch.sort_unstable());
    assert_eq!(got, [vec![0, 1, 2, 3, 7, 8, 9], vec![20, 21, 22, 23, 30]]);
    assert_eq!(frames(sample(), &[], &Policy::MINIMAL).len(), sample().len());
}

#[test]
fn a_batch_has_a_most() {
    let slots: Vec<Slot> = (0..1000).map(|n| page(n, 0, 7, 3)).collect();
    for policy in [Policy::default(), Policy::colour([1; 16])] {
        let got = frames(slots.clone(), &[5], &policy);
        assert!(got.iter().all(|batch| batch.len() <= MOST_FRAMES), "{got:?}");
        assert_eq!(got.iter().map(Vec::len).sum::<usize>(), 1000);
    }
}

#[test]
fn a_group_is_read_once_while_it_is_kept() {
    let kept = Kept::default();
    let id = |group| GroupId { pack: 0, group };
    let get = |group| {
        let mut read = false;
        let result = kept.get(id(group), |_| {
            read = true;
            Ok(())
        });
        result.map(|_| read)
    };
    assert!(get(0).unwrap() && !get(0).unwrap());
    for group in 1..=u32::try_from(KEPT_GROUPS).unwrap() {
        assert!(get(group).unwrap());
    }
    assert!(get(0).unwrap(), "the oldest went");
    assert_eq!(kept.0.lock().unwrap().len(), KEPT_GROUPS);
    let failed = kept.get(id(1 << 20), |_| {
        Err(PagesError::Invalid {
            place: String::new(),
            expected: String::new(),
            got: String::new(),
        })
    });
    assert!(failed.is_err() && get(1 << 20).unwrap(), "one that could not be read is not kept");
}
