//! Tokens and comments of one Rust file, by their places in its text.

use std::ops::Range;

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};

/// What a token is, as far as rules ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// An identifier or keyword.
    Identifier,
    /// A literal: string, character or number.
    Literal,
    /// Punctuation or a bracket.
    Mark,
}

/// One token that is not a comment.
#[derive(Clone, Debug)]
pub struct Token {
    /// Its kind.
    pub kind: TokenKind,
    /// Its bytes in the text.
    pub bytes: Range<usize>,
}

/// A file taken apart.
#[derive(Debug, Default)]
pub struct Lexed {
    /// Tokens in the order of the text. Doc comments are not among them.
    pub tokens: Vec<Token>,
    /// Bytes of each comment: line, block and doc comments.
    pub comments: Vec<Range<usize>>,
}

/// Takes `text` apart.
///
/// # Errors
/// The text is no Rust.
pub fn lex(text: &str) -> Result<Lexed> {
    let stream: TokenStream = text.parse().map_err(|error: proc_macro2::LexError| {
        anyhow!("line {}: {error}", error.span().start().line)
    })?;
    let mut lexed = Lexed::default();
    collect(stream, text, &mut lexed);
    lexed.tokens.sort_by_key(|token| token.bytes.start);
    let mut end = 0;
    for token in &lexed.tokens {
        comments_between(text, end..token.bytes.start.max(end), &mut lexed.comments);
        end = token.bytes.end.max(end);
    }
    comments_between(text, end..text.len(), &mut lexed.comments);
    Ok(lexed)
}

fn collect(stream: TokenStream, text: &str, lexed: &mut Lexed) {
    for tree in stream {
        // A doc comment arrives as the tokens `#[doc = "…"]`, all with the place of the comment.
        let whole = &text[bytes_of(tree.span(), text)];
        if whole.starts_with("//") || whole.starts_with("/*") {
            continue;
        }
        let mut put = |kind: TokenKind, span: Span| {
            let bytes = bytes_of(span, text);
            if !bytes.is_empty() {
                lexed.tokens.push(Token { kind, bytes });
            }
        };
        match tree {
            TokenTree::Ident(ident) => put(TokenKind::Identifier, ident.span()),
            TokenTree::Literal(literal) => put(TokenKind::Literal, literal.span()),
            TokenTree::Punct(punct) => put(TokenKind::Mark, punct.span()),
            TokenTree::Group(group) => {
                if group.delimiter() != Delimiter::None {
                    put(TokenKind::Mark, group.span_open());
                    put(TokenKind::Mark, group.span_close());
                }
                collect(group.stream(), text, lexed);
            }
        }
    }
}

/// Bytes of `span` in `text`, cut to what the text has.
fn bytes_of(span: Span, text: &str) -> Range<usize> {
    let bytes = span.byte_range();
    bytes.start.min(text.len())..bytes.end.min(text.len())
}

/// Between two tokens there is nothing but blanks and comments.
fn comments_between(text: &str, gap: Range<usize>, comments: &mut Vec<Range<usize>>) {
    let mut at = gap.start;
    while let Some(slash) = text[at..gap.end].find('/') {
        let start = at + slash;
        let rest = &text[start..gap.end];
        let length = if rest.starts_with("/*") { block_length(rest) } else { line_length(rest) };
        comments.push(start..start + length);
        at = start + length;
    }
}

fn line_length(rest: &str) -> usize {
    rest.find('\n').unwrap_or(rest.len())
}

/// Length of the block comment at the start of `rest`. Block comments nest.
fn block_length(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// Line numbers of places in a text.
#[derive(Debug)]
pub struct Lines {
    starts: Vec<usize>,
}

impl Lines {
    /// Finds where the lines of `text` begin.
    #[must_use]
    pub fn of(text: &str) -> Self {
        let next = text.match_indices('\n').map(|(at, _)| at + 1);
        Self { starts: std::iter::once(0).chain(next).collect() }
    }

    /// Number, from 1, of the line that has the byte at `offset`.
    #[must_use]
    pub fn line(&self, offset: usize) -> usize {
        self.starts.partition_point(|start| *start <= offset)
    }
}

#[cfg(test)]
mod tests {
    use super::{Lines, TokenKind, lex};

    #[test]
    fn comments_are_found_beside_strings_that_look_like_them() {
        let text = "/// doc\nfn f() { let s = \"// no\"; /* a /* b */ c */ } // end\n";
        let lexed = lex(text).unwrap();
        let comments: Vec<&str> = lexed.comments.iter().map(|at| &text[at.clone()]).collect();
        assert_eq!(comments, ["/// doc", "/* a /* b */ c */", "// end"]);
        let literals = lexed.tokens.iter().filter(|token| token.kind == TokenKind::Literal);
        assert_eq!(
            literals.map(|token| &text[token.bytes.clone()]).collect::<Vec<_>>(),
            ["\"// no\""]
        );
    }

    #[test]
    fn places_after_letters_of_several_bytes_are_right() {
        let text = "const A: &str = \"µVM\"; // µs\nconst B: u8 = 1;\n";
        let lexed = lex(text).unwrap();
        assert_eq!(&text[lexed.comments[0].clone()], "// µs");
        let b = lexed.tokens.iter().find(|token| &text[token.bytes.clone()] == "B").unwrap();
        assert_eq!(Lines::of(text).line(b.bytes.start), 2);
    }

    #[test]
    fn text_that_is_no_rust_is_an_error_with_its_line() {
        assert!(lex("fn f() {\n \" }").unwrap_err().to_string().contains("line"));
    }
}
