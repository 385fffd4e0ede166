//! What people wrote in a file, by the kind of place: names, comments, strings, documents.

use std::ops::Range;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::rust::lex::{Lines, TokenKind, lex};
use crate::tree::{Kind, kind_of};

/// A kind of place in which words stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// Names in Rust code.
    Identifiers,
    /// Comments in Rust code; scripts, manifests and C sources whole.
    Comments,
    /// String literals in Rust code.
    Strings,
    /// Markdown.
    Documents,
}

/// Words that stand together, normalised by [`normalise`].
#[derive(Debug)]
pub struct Passage {
    /// Where it stands.
    pub scope: Scope,
    /// Its text. Lines end with a line feed; marks of comments are left out.
    pub text: String,
    /// Where each line of the file begins in the text, with the number of the line.
    marks: Vec<(usize, usize)>,
}

impl Passage {
    fn new(scope: Scope) -> Self {
        Self { scope, text: String::new(), marks: Vec::new() }
    }

    fn push(&mut self, line: usize, text: &str) {
        self.marks.push((self.text.len(), line));
        normalise(text, &mut self.text);
        self.text.push('\n');
    }

    /// Line of the file for a place in the text.
    #[must_use]
    pub fn line(&self, offset: usize) -> usize {
        let after = self.marks.partition_point(|(start, _)| *start <= offset);
        self.marks.get(after.saturating_sub(1)).map_or(1, |(_, line)| *line)
    }
}

/// Appends `text` in lower case, with `_` between the words of names like `WarmVmm`.
pub fn normalise(text: &str, out: &mut String) {
    let letters: Vec<char> = text.chars().collect();
    for (index, letter) in letters.iter().enumerate() {
        let before = index.checked_sub(1).map(|index| letters[index]);
        let after = letters.get(index + 1);
        let starts = letter.is_uppercase()
            && before.is_some_and(|before| {
                before.is_lowercase()
                    || before.is_numeric()
                    || (before.is_uppercase() && after.is_some_and(|after| after.is_lowercase()))
            });
        if starts {
            out.push('_');
        }
        out.extend(letter.to_lowercase());
    }
}

/// Passages of one file.
///
/// # Errors
/// A Rust file is no Rust.
pub fn passages(path: &str, text: &str) -> Result<Vec<Passage>> {
    let whole = |scope| {
        let mut passage = Passage::new(scope);
        text.lines().enumerate().for_each(|(index, line)| passage.push(index + 1, line));
        vec![passage]
    };
    Ok(match kind_of(path) {
        Some(Kind::Rust) => of_rust(text).with_context(|| path.to_owned())?,
        Some(Kind::Markdown) => whole(Scope::Documents),
        Some(Kind::Other) => whole(Scope::Comments),
        None => Vec::new(),
    })
}

fn of_rust(text: &str) -> Result<Vec<Passage>> {
    let lexed = lex(text)?;
    let lines = Lines::of(text);
    let mut passages = Vec::new();
    for token in &lexed.tokens {
        let written = &text[token.bytes.clone()];
        let scope = match token.kind {
            TokenKind::Identifier => Scope::Identifiers,
            TokenKind::Literal if written.ends_with(['"', '#']) => Scope::Strings,
            TokenKind::Literal | TokenKind::Mark => continue,
        };
        let mut passage = Passage::new(scope);
        let first = lines.line(token.bytes.start);
        for (index, line) in written.lines().enumerate() {
            passage.push(first + index, line);
        }
        passages.push(passage);
    }
    passages.extend(comments(text, &lines, &lexed.comments));
    Ok(passages)
}

/// Comments on lines that follow each other are one passage.
fn comments(text: &str, lines: &Lines, comments: &[Range<usize>]) -> Vec<Passage> {
    let mut passages: Vec<Passage> = Vec::new();
    let mut next = 0;
    for bytes in comments {
        let first = lines.line(bytes.start);
        let alone =
            text[..bytes.start].rsplit('\n').next().is_some_and(|line| line.trim().is_empty());
        if passages.is_empty() || first != next || !alone {
            passages.push(Passage::new(Scope::Comments));
        }
        for (index, line) in text[bytes.clone()].lines().enumerate() {
            let stripped = line.trim_start().trim_start_matches(['/', '!', '*']);
            if let Some(passage) = passages.last_mut() {
                passage.push(first + index, stripped.trim_end_matches("*/"));
            }
            next = first + index + 1;
        }
    }
    passages
}

#[cfg(test)]
mod tests {
    use super::{Scope, normalise, passages};

    #[test]
    fn names_are_taken_apart() {
        let normal = |text| {
            let mut out = String::new();
            normalise(text, &mut out);
            out
        };
        assert_eq!(normal("WarmVmm"), "warm_vmm");
        assert_eq!(normal("KVMState"), "kvm_state");
        assert_eq!(normal("see [`Vm2Guard`], MAX_VMS"), "see [`vm2_guard`], max_vms");
    }

    #[test]
    fn places_are_told_apart_and_keep_their_lines() {
        let text = "/// One\n/// two.\nfn three() {} // four\nconst S: &str = \"five\nsix\";\n";
        let found = passages("a.rs", text).unwrap();
        let shown = |scope| {
            let chosen = found.iter().filter(move |passage| passage.scope == scope);
            chosen.map(|passage| passage.text.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(shown(Scope::Comments), [" one\n two.\n", " four\n"]);
        assert_eq!(shown(Scope::Strings), ["\"five\nsix\"\n"]);
        assert!(shown(Scope::Identifiers).contains(&"three\n"));
        let two = found.iter().find(|passage| passage.text.contains("two")).unwrap();
        assert_eq!(two.line(two.text.find("two").unwrap()), 2);
        assert_eq!(passages("a.md", "x\n").unwrap()[0].scope, Scope::Documents);
    }
}
