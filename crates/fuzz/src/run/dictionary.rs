//! The words of a target's seeds, for libFuzzer to insert.
//!
//! libFuzzer finds out what a program compares numbers with. Of names of fields, which are compared
//! as memory, it finds the letters one after the other, which takes hours for a long one.

use std::collections::BTreeSet;
use std::fmt::Write;

/// The lengths of words, and the most words.
const LENGTHS: std::ops::RangeInclusive<usize> = 3..=32;
const MOST: usize = 1000;

const fn is_of_a_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.')
}

/// A dictionary in libFuzzer's format: each word as it is, and as the name of a JSON field.
pub(super) fn of(seeds: &[Vec<u8>]) -> String {
    let words: BTreeSet<&[u8]> = seeds
        .iter()
        .flat_map(|seed| seed.split(|byte| !is_of_a_word(*byte)))
        .filter(|word| LENGTHS.contains(&word.len()) && word.iter().any(u8::is_ascii_alphabetic))
        .collect();
    let mut text = String::new();
    for word in words.into_iter().take(MOST) {
        let word = String::from_utf8_lossy(word);
        let _infallible = writeln!(text, "\"{word}\"\n\"\\\"{word}\\\":\"");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_seeds_are_listed_once_and_as_names_of_fields() {
        let seeds = [br#"{"op":"ping","op":"a_b"}"#.to_vec(), b"\0\xffping\x80 123 x".to_vec()];
        let expected = "\"a_b\"\n\"\\\"a_b\\\":\"\n\"ping\"\n\"\\\"ping\\\":\"\n";
        assert_eq!(of(&seeds), expected);
    }
}
