//! Filters untrusted output for a terminal: the text stays readable and coloured, and cannot
//! control the terminal further.
//!
//! | bytes | what the terminal gets |
//! |---|---|
//! | text in UTF-8, newline, tab, carriage return | unchanged |
//! | `ESC [ digits ; : … m` (SGR, colours) of at most [`SGR_BYTES`] bytes | unchanged, then reset |
//! | other control, bidi and invisible characters (OSC, DCS, CSI, C1) | escaped: `\x1b]52;…\x07` |
//! | bytes that are not UTF-8 | escaped: `\xff` |
//!
//! Carriage return is allowed because progress bars and serial consoles use it. It only goes back
//! to the start of a line that the same output has written.

use dayfly_units::text::{escaped, is_unsafe};
use std::io::{self, IsTerminal, Write};

/// Longest accepted colour sequence in bytes.
const SGR_BYTES: usize = 32;
const RESET: &[u8] = b"\x1b[0m";

/// A filter of one stream, piece by piece. An incomplete sequence or character at the end of a
/// piece waits for the next piece.
#[derive(Debug, Default)]
pub struct Filter {
    /// The start of a colour sequence or of a character: at most [`SGR_BYTES`] bytes.
    waiting: Vec<u8>,
    /// Whether a colour is on.
    coloured: bool,
}

/// The kind of a text's first bytes.
enum Head {
    /// A colour sequence: its length in bytes, and whether it resets all attributes.
    Colour(usize, bool),
    /// A character.
    Character(char),
    /// A byte that is not UTF-8.
    Byte(u8),
    /// The start of a sequence or character whose rest is missing.
    Incomplete,
}

impl Filter {
    /// Returns the bytes for the terminal, from the waiting bytes and `piece`.
    pub fn piece(&mut self, piece: &[u8]) -> Vec<u8> {
        let mut text = std::mem::take(&mut self.waiting);
        text.extend_from_slice(piece);
        let mut shown = Vec::with_capacity(text.len());
        let mut rest = &text[..];
        while let Some(&first) = rest.first() {
            match head(rest, first) {
                Head::Colour(length, resets) => {
                    shown.extend_from_slice(&rest[..length]);
                    self.coloured = !resets;
                    rest = &rest[length..];
                }
                Head::Character(character) => {
                    let bytes = &rest[..character.len_utf8()];
                    rest = &rest[character.len_utf8()..];
                    if is_unsafe(character) && !matches!(character, '\n' | '\r' | '\t') {
                        show(&mut shown, bytes);
                    } else {
                        shown.extend_from_slice(bytes);
                    }
                }
                Head::Byte(byte) => {
                    show(&mut shown, &[byte]);
                    rest = &rest[1..];
                }
                Head::Incomplete => {
                    self.waiting = rest.to_vec();
                    break;
                }
            }
        }
        shown
    }

    /// Ends the stream: returns the waiting bytes, and a reset if a colour is on.
    pub fn end(&mut self) -> Vec<u8> {
        let mut shown = Vec::new();
        show(&mut shown, &std::mem::take(&mut self.waiting));
        if std::mem::take(&mut self.coloured) {
            shown.extend_from_slice(RESET);
        }
        shown
    }
}

fn show(shown: &mut Vec<u8>, bytes: &[u8]) {
    // Writing to a vector cannot fail.
    let _ = write!(shown, "{}", escaped(bytes, usize::MAX));
}

fn head(rest: &[u8], first: u8) -> Head {
    if first == 0x1b {
        return colour(rest);
    }
    // A character has at most four bytes.
    let most = &rest[..rest.len().min(4)];
    let valid = match std::str::from_utf8(most) {
        Ok(text) => text,
        Err(e) => match std::str::from_utf8(&most[..e.valid_up_to()]) {
            Ok("") if e.error_len().is_none() => return Head::Incomplete,
            Ok(text) => text,
            Err(_) => "",
        },
    };
    valid.chars().next().map_or(Head::Byte(first), Head::Character)
}

/// Classifies `rest`, which begins with ESC.
fn colour(rest: &[u8]) -> Head {
    const ESCAPE: Head = Head::Character('\x1b');
    match rest.get(1) {
        None => return Head::Incomplete,
        Some(b'[') => {}
        Some(_) => return ESCAPE,
    }
    let most = &rest[2..rest.len().min(SGR_BYTES)];
    match most.iter().position(|b| !matches!(b, b'0'..=b'9' | b';' | b':')) {
        Some(at) if most[at] == b'm' => {
            Head::Colour(2 + at + 1, most[..at].iter().all(|b| matches!(b, b'0' | b';')))
        }
        Some(_) => ESCAPE,
        None if rest.len() < SGR_BYTES => Head::Incomplete,
        None => ESCAPE,
    }
}

/// Standard output or standard error for untrusted text: filtered if it is a terminal, unchanged
/// otherwise.
#[derive(Debug)]
pub struct Stranger<W> {
    to: W,
    filter: Option<Filter>,
}

impl<W: Write + IsTerminal> Stranger<W> {
    /// With `raw`, a terminal gets the bytes unchanged too.
    pub fn new(to: W, raw: bool) -> Self {
        let filter = (!raw && to.is_terminal()).then(Filter::default);
        Self { to, filter }
    }

    /// Writes a piece and flushes.
    ///
    /// # Errors
    /// The stream's errors.
    pub fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        match &mut self.filter {
            Some(filter) => self.to.write_all(&filter.piece(piece))?,
            None => self.to.write_all(piece)?,
        }
        self.to.flush()
    }

    /// Writes the rest of the filter. The caller must call this after every kind of end of the
    /// stream.
    ///
    /// # Errors
    /// The stream's errors.
    pub fn end(&mut self) -> io::Result<()> {
        let Some(filter) = &mut self.filter else { return Ok(()) };
        self.to.write_all(&filter.end())?;
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filtered(bytes: &[u8]) -> String {
        let mut filter = Filter::default();
        let mut shown = filter.piece(bytes);
        shown.extend(filter.end());
        String::from_utf8(shown).unwrap()
    }

    #[test]
    fn text_lines_and_colours_pass() {
        for text in [
            "plain\r\n\ttabs caf\u{e9}\n",
            "\x1b[1;31mred\x1b[0m\n",
            "\x1b[38:5:8mx\x1b[m",
            "50 %\r100 %\n",
        ] {
            assert_eq!(filtered(text.as_bytes()), text);
        }
        assert_eq!(filtered(b"\x1b[31mred"), "\x1b[31mred\x1b[0m", "a colour that is left on");
    }

    #[test]
    fn everything_else_is_shown() {
        for (bytes, shown) in [
            (&b"\x1b]0;owned\x07"[..], r"\x1b]0;owned\x07"),
            (b"\x1b]52;c;bW9v\x1b\\", r"\x1b]52;c;bW9v\x1b\"),
            (b"\x1bP1;2q\x1b\\", r"\x1bP1;2q\x1b\"),
            (b"\x1b[2J\x1b[10;1H\x1b[6n\x1b[?1049h", r"\x1b[2J\x1b[10;1H\x1b[6n\x1b[?1049h"),
            (b"\x1b[>4;2m\x1b[1 m", r"\x1b[>4;2m\x1b[1 m"),
            (b"a\x08b\x07\x0e\x7f", r"a\x08b\x07\x0e\x7f"),
            ("\u{9b}31m\u{202e}txt\u{2066}".as_bytes(), r"\u{9b}31m\u{202e}txt\u{2066}"),
            (b"\x9b31m\xff", r"\x9b31m\xff"),
            (b"\x1b", r"\x1b"),
            (b"\x1b[3", r"\x1b[3"),
            (b"caf\xc3", r"caf\xc3"),
        ] {
            assert_eq!(filtered(bytes), shown);
        }
        let long = format!("\x1b[{}m", "1;".repeat(20));
        assert!(filtered(long.as_bytes()).starts_with(r"\x1b[1;1;"));
    }

    fn hostile() -> impl Strategy<Value = Vec<u8>> {
        let one = prop_oneof![
            Just(b"\x1b[".to_vec()),
            Just(b"\x1b".to_vec()),
            Just(b"0;1m".to_vec()),
            Just("\u{202e}\u{9b}\u{e9}".as_bytes().to_vec()),
            proptest::collection::vec(any::<u8>(), 1..5),
        ];
        proptest::collection::vec(one, 0..40).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn nothing_but_colours_gets_through_and_pieces_do_not_matter(
            bytes in hostile(),
            at in any::<prop::sample::Index>(),
        ) {
            let whole = filtered(&bytes);
            let (first, second) = bytes.split_at(at.index(bytes.len() + 1));
            let mut filter = Filter::default();
            let mut cut = filter.piece(first);
            prop_assert!(filter.waiting.len() <= SGR_BYTES);
            cut.extend(filter.piece(second));
            cut.extend(filter.end());
            prop_assert_eq!(String::from_utf8(cut).unwrap(), whole.clone());
            // Without the colour sequences, no character is left that a terminal acts on.
            let mut rest = whole.as_str();
            while let Some(at) = rest.find('\x1b') {
                prop_assert!(!rest[..at].contains(|c| is_unsafe(c) && !"\n\r\t".contains(c)));
                let end = rest[at..].find('m').expect("a colour ends");
                let mut parameters = rest[at + 2..at + end].chars();
                prop_assert!(parameters.all(|c| c.is_ascii_digit() || ";:".contains(c)));
                rest = &rest[at + end + 1..];
            }
            prop_assert!(!rest.contains(|c| is_unsafe(c) && !"\n\r\t".contains(c)));
        }
    }
}
