//! A filter as a decision tree over system call numbers.
//!
//! When a filter is installed, the kernel runs it for every system call there is, to know which it allows whatever their arguments
//! (`seccomp_cache_prepare`, Linux 5.11), so a chain of comparisons costs its length squared, for each thread of each VMM: installing one
//! of sixty calls took 153 us, a tree with a leaf for each 90, a filter of one instruction 26 (Linux 6.18). Only what the filters need is here: numbers, and the low halves of arguments.

use seccompiler::sock_filter;
use std::collections::BTreeMap;

// linux/bpf_common.h, linux/filter.h
const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K
// linux/seccomp.h
const ALLOW: u32 = 0x7fff_0000;
const TRAP: u32 = 0x0003_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
/// AUDIT_ARCH_X86_64
const X86_64: u32 = 0xc000_003e;
// struct seccomp_data
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// The bits of `mask` in the low half of an argument are those of `value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Condition {
    /// From 0.
    pub(super) argument: u8,
    pub(super) mask: u32,
    pub(super) value: u32,
}

/// Allowed calls; those with conditions when one of these holds.
pub(super) type Calls = BTreeMap<u32, Vec<Condition>>;

/// The filter would be too long for its jumps, or a number is none of a system call.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TreeError {
    /// A jump over more instructions than one may be.
    #[error("a jump over {0} instructions, at most 255")]
    Jump(usize),
    /// No call has such a number.
    #[error("system call {0}")]
    Number(i64),
}

#[derive(Debug, Clone, Copy)]
enum Label {
    /// Position from the start.
    At(usize),
    /// The conditions of this call.
    Check(u32),
    Allow,
    Trap,
}

struct Instruction {
    code: u16,
    k: u32,
    yes: Label,
    no: Label,
}

/// What is done from each number on, up to the next one: changes only.
fn intervals(calls: &Calls) -> Vec<(u32, Label)> {
    let mut out: Vec<(u32, Label)> = vec![(0, Label::Trap)];
    for (&number, conditions) in calls {
        let label = if conditions.is_empty() { Label::Allow } else { Label::Check(number) };
        match out.last() {
            // It begins where the one before has ended.
            Some(&(at, Label::Trap)) if at == number => drop(out.pop()),
            _ => {}
        }
        if !matches!((out.last(), label), (Some((_, Label::Allow)), Label::Allow)) {
            out.push((number, label));
        }
        out.push((number + 1, Label::Trap));
    }
    out
}

fn node(intervals: &[(u32, Label)], out: &mut Vec<Instruction>) -> Label {
    let [_, _, ..] = intervals else { return intervals.first().map_or(Label::Trap, |(_, label)| *label) };
    let (below, above) = intervals.split_at(intervals.len() / 2);
    let place = out.len();
    out.push(Instruction { code: JUMP_AT_LEAST, k: above[0].0, yes: Label::Trap, no: Label::Trap });
    let no = node(below, out);
    let yes = node(above, out);
    out[place].no = no;
    out[place].yes = yes;
    Label::At(place)
}

/// The filter that allows `calls`, traps every other call (SIGSYS), and kills the process for a call of another architecture.
pub(super) fn compile(calls: &Calls) -> Result<Vec<sock_filter>, TreeError> {
    let plain = |code, k| Instruction { code, k, yes: Label::Allow, no: Label::Allow };
    let mut out = vec![
        plain(LOAD, ARCHITECTURE),
        Instruction { code: JUMP_EQUAL, k: X86_64, yes: Label::At(3), no: Label::At(2) },
        plain(RETURN, KILL_PROCESS),
        plain(LOAD, NUMBER),
    ];
    let first = node(&intervals(calls), &mut out);
    if !matches!(first, Label::At(_)) {
        // Nothing to decide.
        out.push(Instruction { code: JUMP_AT_LEAST, k: 0, yes: first, no: first });
    }
    let mut checks = BTreeMap::new();
    for (&number, conditions) in calls {
        checks.insert(number, out.len());
        for (n, condition) in conditions.iter().enumerate() {
            out.push(plain(LOAD, ARGUMENTS + 8 * u32::from(condition.argument)));
            out.push(plain(AND, condition.mask));
            let next = if n + 1 == conditions.len() { Label::Trap } else { Label::At(out.len() + 1) };
            out.push(Instruction { code: JUMP_EQUAL, k: condition.value, yes: Label::Allow, no: next });
        }
    }
    let allow = out.len();
    out.push(plain(RETURN, ALLOW));
    out.push(plain(RETURN, TRAP));
    let place = |label| match label {
        Label::At(place) => place,
        Label::Check(number) => checks[&number],
        Label::Allow => allow,
        Label::Trap => allow + 1,
    };
    let encode = |(at, i): (usize, &Instruction)| {
        let jump = |label| {
            let over = place(label).saturating_sub(at + 1);
            u8::try_from(over).map_err(|_| TreeError::Jump(over))
        };
        let jumps = matches!(i.code, JUMP_EQUAL | JUMP_AT_LEAST);
        let (jt, jf) = if jumps { (jump(i.yes)?, jump(i.no)?) } else { (0, 0) };
        Ok(sock_filter { code: i.code, jt, jf, k: i.k })
    };
    out.iter().enumerate().map(encode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Does what the kernel does with a filter: which action, and after how many instructions.
    fn run(filter: &[sock_filter], number: u32, arguments: [u32; 6]) -> (u32, usize) {
        let (mut at, mut a, mut steps) = (0, 0, 0);
        loop {
            let i = &filter[at];
            at += 1;
            steps += 1;
            match i.code {
                LOAD if i.k == NUMBER => a = number,
                LOAD if i.k == ARCHITECTURE => a = X86_64,
                LOAD => a = arguments[((i.k - ARGUMENTS) / 8) as usize],
                AND => a &= i.k,
                JUMP_EQUAL => at += usize::from(if a == i.k { i.jt } else { i.jf }),
                JUMP_AT_LEAST => at += usize::from(if a >= i.k { i.jt } else { i.jf }),
                RETURN => return (i.k, steps),
                other => panic!("code {other:#x}"),
            }
        }
    }

    fn conditions() -> impl Strategy<Value = Vec<Condition>> {
        let condition = (0u8..6, 0u32..8, 0u32..8).prop_map(|(argument, mask, value)| Condition {
            argument,
            mask,
            value: value & mask,
        });
        proptest::collection::vec(condition, 0..3)
    }

    proptest! {
        #[test]
        fn a_call_is_allowed_when_it_is_named_and_a_condition_holds(
            calls in proptest::collection::btree_map(0u32..120, conditions(), 0..40),
            arguments in proptest::array::uniform6(0u32..8),
        ) {
            let filter = compile(&calls).unwrap();
            for number in (0..130).chain([0x4000_0000, 0x4000_0001, u32::MAX]) {
                let allowed = calls.get(&number).is_some_and(|conditions| {
                    conditions.is_empty()
                        || conditions.iter().any(|c| arguments[usize::from(c.argument)] & c.mask == c.value)
                });
                let (action, steps) = run(&filter, number, arguments);
                prop_assert_eq!(action, if allowed { ALLOW } else { TRAP });
                prop_assert!(steps < 22, "{steps} steps");
            }
        }
    }

    #[test]
    fn another_architecture_is_the_end_of_the_process() {
        let filter = compile(&Calls::new()).unwrap();
        assert_eq!((filter[1].k, filter[1].jt, filter[1].jf, filter[2].k), (X86_64, 1, 0, KILL_PROCESS));
    }

    #[test]
    fn a_filter_that_is_too_long_is_refused() {
        let calls: Calls = (0..200).map(|n| (n * 2, Vec::new())).collect();
        assert!(matches!(compile(&calls), Err(TreeError::Jump(_))));
    }
}
