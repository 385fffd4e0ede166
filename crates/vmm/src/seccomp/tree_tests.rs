use super::super::bound::{all, bits, low};
use super::*;
use proptest::prelude::*;

/// Runs a filter as the kernel does. Returns the verdict and the number of instructions executed
/// before the bounds of a call.
fn run(filter: &[sock_filter], number: u32, arguments: [u64; 6]) -> (u32, usize) {
    let (mut at, mut a, mut steps, mut in_tree) = (0, 0_u32, 0, true);
    let word = |offset: u32| {
        let argument = arguments[((offset - ARGUMENTS) / 8) as usize];
        u32::try_from(argument >> (offset % 8 * 8) & u64::from(u32::MAX)).unwrap()
    };
    loop {
        let i = &filter[at];
        at += 1;
        steps += usize::from(in_tree);
        match i.code {
            LOAD if i.k == NUMBER => a = number,
            LOAD if i.k == ARCHITECTURE => a = X86_64,
            LOAD => a = word(i.k),
            AND => a &= i.k,
            JUMP => {
                at += i.k as usize;
                in_tree = false;
            }
            JUMP_EQUAL => at += usize::from(if a == i.k { i.jt } else { i.jf }),
            JUMP_AT_LEAST => at += usize::from(if a >= i.k { i.jt } else { i.jf }),
            RETURN => return (i.k, steps),
            other => panic!("code {other:#x}"),
        }
    }
}

/// Lists of bounds with one or two arguments, in both widths.
const LISTS: &[&[Bound]] = &[
    &[low(0, 3)],
    &[low(0, 5)],
    &[low(1, 3)],
    &[bits(2, 6, 2)],
    &[all(3, 0x1_0000_0002), low(0, 1)],
    &[bits(4, !3, 0)],
    &[low(0, 2), bits(1, 1, 1), all(5, 7)],
];

fn when() -> impl Strategy<Value = When> {
    let some = proptest::sample::subsequence(LISTS.to_vec(), 1..LISTS.len());
    prop_oneof![Just(When::Always), Just(When::Never), some.prop_map(When::Within)]
}

/// Small values, values whose high half alone differs, and any value.
fn argument() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..8, (0_u64..8).prop_map(|low| 1 << 32 | low), any::<u64>()]
}

proptest! {
    #[test]
    fn a_call_is_allowed_when_it_is_named_and_its_bounds_hold(
        calls in proptest::collection::btree_map(0_u32..120, when(), 0..40),
        arguments in proptest::array::uniform6(argument()),
        others in any::<bool>(),
    ) {
        let filter = compile(&calls, others).unwrap();
        for number in (0..130).chain([0x4000_0000, 0x4000_0001, u32::MAX]) {
            let allowed = match calls.get(&number) {
                None => others,
                Some(When::Always) => true,
                Some(When::Never) => false,
                Some(When::Within(lists)) => {
                    lists.iter().any(|list| list.iter().all(|bound| bound.holds(&arguments)))
                }
            };
            let (verdict, steps) = run(&filter, number, arguments);
            prop_assert_eq!(verdict, if allowed { ALLOW } else { KILL_PROCESS });
            prop_assert!(steps < 16, "{steps} steps");
        }
    }
}

#[test]
fn the_kernel_ignores_the_high_half_of_an_int_and_so_does_a_bound_of_32_bits() {
    const INT: &[Bound] = &[low(1, 3)];
    const LONG: &[Bound] = &[all(1, 3)];
    let mut calls = Calls::new();
    calls.insert(7, When::Within(vec![INT]));
    calls.insert(8, When::Within(vec![LONG]));
    let filter = compile(&calls, false).unwrap();
    let high = [0, 1 << 40 | 3, 0, 0, 0, 0];
    assert_eq!((run(&filter, 7, high).0, run(&filter, 8, high).0), (ALLOW, KILL_PROCESS));
}

#[test]
fn another_architecture_is_the_end_of_the_process() {
    let filter = compile(&Calls::new(), true).unwrap();
    assert_eq!(
        (filter[1].k, filter[1].jt, filter[1].jf, filter[2].k),
        (X86_64, 1, 0, KILL_PROCESS)
    );
}
