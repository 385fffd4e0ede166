//! Untrusted text, made safe for a person's terminal and for a log file.
//!
//! Guests, images, archives, VMMs and remote registries choose the bytes that an error, a table or
//! a log line quotes. Printed raw, such bytes set a terminal's title and clipboard (OSC) and move
//! its cursor. They also forge further lines, or reverse the reading order of a line (bidi).
//! [`escaped`] shows such bytes as escapes.
//!
//! ```
//! use dayfly_units::text::escaped;
//! assert_eq!(escaped("\x1b]0;owned\x07\n", 80).to_string(), r"\x1b]0;owned\x07\n");
//! assert_eq!(escaped("café", 80).to_string(), "café");
//! assert_eq!(escaped("abcdef", 4).to_string(), "abc…");
//! ```

use std::fmt;

/// The default bound for a name, a path or a label quoted inside a sentence, in characters.
pub const SHORT: usize = 256;

/// The default bound for an untrusted message, in characters.
pub const LONG: usize = 4096;

/// Shows `text` (UTF-8 or not) in at most `limit` characters, none of them a control character.
///
/// - newline, carriage return and tab: `\n`, `\r`, `\t`
/// - every other control character below U+0080, DEL, and each byte that is not UTF-8: `\x1b`
/// - C1 controls (U+0080 to U+009F), bidi controls, invisible and format characters: `\u{202e}`
/// - text that needs more than `limit` characters ends with `…`, which counts as one of them; an
///   escape is shown whole or not at all
///
/// Everything else passes unchanged, the backslash too. Escaping twice changes nothing, so the code
/// that makes a message and the code that prints it may both escape it. The result is for people;
/// the original bytes cannot be recovered from it.
pub fn escaped<T: AsRef<[u8]> + ?Sized>(text: &T, limit: usize) -> Escaped<'_> {
    Escaped { bytes: text.as_ref(), limit, lines: false }
}

/// The printable result of [`escaped`]. Printing allocates nothing; its work is bounded by the
/// limit, not by the length of the text.
#[derive(Clone, Copy)]
pub struct Escaped<'a> {
    bytes: &'a [u8],
    limit: usize,
    lines: bool,
}

impl Escaped<'_> {
    /// Lets newlines and tabs pass, for text of several lines that a person reads as a block.
    ///
    /// Use it neither for log files nor inside a sentence, because untrusted text can then forge a
    /// line.
    #[must_use]
    pub fn keep_lines(mut self) -> Self {
        self.lines = true;
        self
    }

    /// Calls `show` with each piece that is shown: a character or a whole escape.
    fn pieces(&self, mut show: impl FnMut(Piece) -> fmt::Result) -> fmt::Result {
        for chunk in self.bytes.utf8_chunks() {
            for character in chunk.valid().chars() {
                show(Piece::of(character, self.lines))?;
            }
            for &byte in chunk.invalid() {
                show(Piece::Byte(byte))?;
            }
        }
        Ok(())
    }

    /// Whether all of the text fits into the limit. Stops at the first character beyond it.
    fn fits(&self) -> bool {
        let mut left = self.limit;
        let measured = self.pieces(|piece| {
            left = left.checked_sub(piece.characters()).ok_or(fmt::Error)?;
            Ok(())
        });
        measured.is_ok()
    }
}

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.fits() {
            return self.pieces(|piece| piece.write(out));
        }
        let Some(mut left) = self.limit.checked_sub(1) else { return Ok(()) };
        let mut written = Ok(());
        // The `Err` here only ends the walk at the limit; `written` keeps the writer's error.
        let _ = self.pieces(|piece| {
            left = left.checked_sub(piece.characters()).ok_or(fmt::Error)?;
            written = piece.write(out);
            written
        });
        written?;
        out.write_str("…")
    }
}

impl fmt::Debug for Escaped<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

/// One character of the text as it is shown.
#[derive(Clone, Copy)]
enum Piece {
    /// The character unchanged.
    Plain(char),
    /// The letter of `\n`, `\r` or `\t`.
    Letter(char),
    /// A byte shown as `\x1b`.
    Byte(u8),
    /// A character shown as `\u{9b}`.
    Point(char),
}

impl Piece {
    fn of(character: char, lines: bool) -> Piece {
        match character {
            '\n' | '\t' if lines => Piece::Plain(character),
            '\n' => Piece::Letter('n'),
            '\r' => Piece::Letter('r'),
            '\t' => Piece::Letter('t'),
            '\0'..='\x1f' | '\x7f' => Piece::Byte(character as u8),
            _ if is_unsafe(character) => Piece::Point(character),
            _ => Piece::Plain(character),
        }
    }

    fn characters(self) -> usize {
        match self {
            Piece::Plain(_) => 1,
            Piece::Letter(_) => 2,
            Piece::Byte(_) => 4,
            // `\u{` and `}` around the hexadecimal digits.
            Piece::Point(point) => 4 + (u32::from(point).max(1).ilog2() / 4 + 1) as usize,
        }
    }

    fn write(self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        match self {
            Piece::Plain(character) => out.write_char(character),
            Piece::Letter(letter) => write!(out, "\\{letter}"),
            Piece::Byte(byte) => write!(out, "\\x{byte:02x}"),
            Piece::Point(point) => write!(out, "\\u{{{:x}}}", u32::from(point)),
        }
    }
}

/// Whether a character must not reach a person's terminal unescaped.
///
/// Unsafe are control characters (C0, DEL, C1, newline and tab included), line and paragraph
/// separators, bidi controls, and characters that show nothing.
///
/// The ranges are Unicode 16's general category Cf and property Default_Ignorable_Code_Point. Left
/// out are the variation selectors U+FE00 to U+FE0F, which choose the look of the preceding
/// character.
#[must_use]
pub fn is_unsafe(character: char) -> bool {
    if character.is_control() {
        return true;
    }
    // Below U+034F only control characters and U+00AD are unsafe.
    if character < '\u{34f}' {
        return character == '\u{ad}';
    }
    matches!(character,
        '\u{34f}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}'
        | '\u{890}'..='\u{891}' | '\u{8e2}'
        | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
        | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}'
        | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_kind_is_shown_by_its_own_escape() {
        for (text, shown) in [
            (&b"\x1b]52;c;bW9v\x07"[..], r"\x1b]52;c;bW9v\x07"),
            (b"a\nb\tc\rd", r"a\nb\tc\rd"),
            (b"\0\x7f", r"\x00\x7f"),
            (b"\xc2\x9b31m", r"\u{9b}31m"),
            (b"\x9b31m \xff", r"\x9b31m \xff"),
            ("abc\u{202e}txt.exe\u{2066}".as_bytes(), r"abc\u{202e}txt.exe\u{2066}"),
            (
                "\u{200e}\u{200f}\u{61c}\u{200b}\u{feff}".as_bytes(),
                r"\u{200e}\u{200f}\u{61c}\u{200b}\u{feff}",
            ),
            ("\u{e0041}\u{2028}\u{ad}".as_bytes(), r"\u{e0041}\u{2028}\u{ad}"),
            // A sequence that ends in the middle of a character.
            (b"caf\xc3", r"caf\xc3"),
        ] {
            assert_eq!(escaped(text, 1000).to_string(), shown);
        }
    }

    #[test]
    fn text_of_several_lines_keeps_only_newlines_and_tabs() {
        assert_eq!(escaped("a\n\tb\r\x1b", 100).keep_lines().to_string(), "a\n\tb\\r\\x1b");
    }

    #[test]
    fn what_is_too_long_ends_with_an_ellipsis_and_with_whole_escapes() {
        assert_eq!(escaped("abcd", 4).to_string(), "abcd");
        assert_eq!(escaped("abcde", 4).to_string(), "abc…");
        assert_eq!(escaped("ab\x1bcd", 5).to_string(), "ab…");
        assert_eq!(escaped("ab\u{202e}", 10).to_string(), "ab\\u{202e}");
        assert_eq!(escaped("ab\u{202e}", 9).to_string(), "ab…");
        assert_eq!(escaped("abc", 1).to_string(), "…");
        assert_eq!(escaped("abc", 0).to_string(), "");
    }

    proptest! {
        #[test]
        fn no_input_yields_a_character_that_is_unsafe(
            text in proptest::collection::vec(any::<u8>(), 0..400), limit in 0usize..500,
        ) {
            let shown = escaped(&text, limit).to_string();
            prop_assert!(!shown.chars().any(is_unsafe), "{shown:?}");
            prop_assert!(shown.chars().count() <= limit);
            let lines = escaped(&text, limit).keep_lines().to_string();
            let kept = |c: char| c == '\n' || c == '\t';
            prop_assert!(!lines.chars().any(|c| is_unsafe(c) && !kept(c)), "{lines:?}");
        }

        #[test]
        fn no_text_yields_a_character_that_is_unsafe(
            text in proptest::collection::vec(any::<char>(), 0..200), limit in 0usize..500,
        ) {
            let text: String = text.into_iter().collect();
            let shown = escaped(&text, limit).to_string();
            prop_assert!(!shown.chars().any(is_unsafe), "{shown:?}");
            prop_assert!(shown.chars().count() <= limit);
            // Escaping is idempotent.
            prop_assert_eq!(&escaped(&shown, limit).to_string(), &shown);
        }

        #[test]
        fn plain_text_is_unchanged(text in "[ -~à-ÿα-ωа-я一-龥😀-🙏]{0,200}") {
            prop_assert_eq!(escaped(&text, 200).to_string(), text);
        }
    }
}
