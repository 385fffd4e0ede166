//! Words and phrases that the project does not use. The list is `forbidden.toml`.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use regex::Regex;
use serde::Deserialize;

use crate::finding::{Finding, Rule};
use crate::lists::Lists;
use crate::prose::{Passage, Scope, passages};
use crate::tree::Tree;

/// Path of the list in the tree.
pub const PATH: &str = "crates/tidy/forbidden.toml";

/// The list as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    #[serde(default)]
    word: Vec<Entry>,
    /// Paths that no word is looked for in.
    #[serde(default)]
    except: Vec<Exception>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Regular expression of whole words in lower case; a blank stands for any break.
    word: String,
    /// What to write.
    instead: String,
    /// Where the word is looked for; everywhere if empty.
    #[serde(default)]
    scopes: Vec<Scope>,
    /// Paths the word is looked for below; everywhere if empty.
    #[serde(default)]
    only: Vec<String>,
    /// Phrases around the word in which it has another sense.
    #[serde(default)]
    unless: Vec<String>,
    #[serde(default)]
    except: Vec<Exception>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Exception {
    path: String,
    reason: String,
}

/// The list, ready to search with.
pub struct Words {
    words: Vec<Word>,
    except: Vec<String>,
}

struct Word {
    expression: Regex,
    unless: Vec<Regex>,
    instead: String,
    scopes: Vec<Scope>,
    only: Vec<String>,
    except: Vec<String>,
}

impl Words {
    /// Reads the list.
    ///
    /// # Errors
    /// The text is no such list, an expression is none, or an exception has no reason.
    pub fn parse(text: &str) -> Result<Self> {
        let list: List = toml::from_str(text).with_context(|| PATH.to_owned())?;
        let words = list.word.into_iter().map(Word::new).collect::<Result<_>>()?;
        Ok(Self { words, except: paths(list.except)? })
    }

    /// Checks every file that people write.
    ///
    /// # Errors
    /// A Rust file is no Rust.
    pub fn check(&self, tree: &Tree, lists: &Lists) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let mut known = HashMap::new();
        for (path, text) in tree.files().filter(|(path, _)| !lists.is_generated(path)) {
            if is_below(path, &self.except) {
                continue;
            }
            let words: Vec<bool> = self.words.iter().map(|word| word.concerns(path)).collect();
            for passage in passages(path, text)? {
                // The same names come again and again.
                let places = if passage.scope == Scope::Identifiers {
                    let search = || self.search(&passage);
                    known.entry(passage.text.clone()).or_insert_with(search).clone()
                } else {
                    self.search(&passage)
                };
                for (index, at) in places.into_iter().filter(|(index, _)| words[*index]) {
                    findings.push(self.words[index].finding(path, &passage, at));
                }
            }
        }
        findings.sort();
        Ok(findings)
    }

    /// Words in a passage, each with its place, wherever the file is.
    fn search(&self, passage: &Passage) -> Vec<(usize, (usize, usize))> {
        let mut found = Vec::new();
        for (index, word) in self.words.iter().enumerate() {
            if word.scopes.is_empty() || word.scopes.contains(&passage.scope) {
                found.extend(word.places(&passage.text).into_iter().map(|at| (index, at)));
            }
        }
        found
    }
}

fn paths(exceptions: Vec<Exception>) -> Result<Vec<String>> {
    for Exception { path, reason } in &exceptions {
        ensure!(!reason.trim().is_empty(), "{PATH}: exception {path}: has no reason; write one");
    }
    Ok(exceptions.into_iter().map(|exception| exception.path).collect())
}

fn is_below(path: &str, places: &[String]) -> bool {
    places.iter().any(|place| match place.strip_suffix('/') {
        Some(_) => path.starts_with(place.as_str()),
        None => path == place,
    })
}

/// Whole words only: what is around them is no letter and no digit.
fn expression(words: &str) -> Result<Regex> {
    let words = words.replace(' ', r"[\s_-]+");
    let whole = format!("(?:^|[^a-z0-9])({words})(?:$|[^a-z0-9])");
    Regex::new(&whole).with_context(|| format!("{PATH}: {words}"))
}

impl Word {
    fn new(entry: Entry) -> Result<Self> {
        Ok(Self {
            expression: expression(&entry.word)?,
            unless: entry.unless.iter().map(|phrase| expression(phrase)).collect::<Result<_>>()?,
            instead: entry.instead,
            scopes: entry.scopes,
            only: entry.only,
            except: paths(entry.except)?,
        })
    }

    fn concerns(&self, path: &str) -> bool {
        (self.only.is_empty() || is_below(path, &self.only)) && !is_below(path, &self.except)
    }

    /// Bytes of the word in `text`, without those inside of a phrase that allows it.
    fn places(&self, text: &str) -> Vec<(usize, usize)> {
        let found = matches(&self.expression, text);
        if found.is_empty() {
            return found;
        }
        let allowed: Vec<(usize, usize)> =
            self.unless.iter().flat_map(|phrase| matches(phrase, text)).collect();
        let is_allowed =
            |at: &(usize, usize)| allowed.iter().any(|phrase| phrase.0 <= at.0 && at.1 <= phrase.1);
        found.into_iter().filter(|at| !is_allowed(at)).collect()
    }

    fn finding(&self, path: &str, passage: &Passage, at: (usize, usize)) -> Finding {
        let words: Vec<&str> = passage.text[at.0..at.1].split_whitespace().collect();
        let text = format!("\"{}\", expected {}; rename or reword", words.join(" "), self.instead);
        let line = passage.line(at.0);
        Finding { rule: Rule::Words, path: path.to_owned(), line, text }
    }
}

/// Places of the words. What stands between two of them may serve both as a border.
fn matches(expression: &Regex, text: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(words) = expression.captures_at(text, at).and_then(|captures| captures.get(1)) {
        found.push((words.start(), words.end()));
        at = words.end();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::Words;
    use crate::lists::Lists;
    use crate::tree::Tree;

    fn found(list: &str, files: &[(&str, &str)]) -> Vec<String> {
        let findings = Words::parse(list).unwrap().check(&Tree::of(files), &Lists::default());
        findings.unwrap().iter().map(ToString::to_string).collect()
    }

    const LIST: &str =
        "[[word]]\nword = \"blorps?\"\ninstead = \"thing\"\nunless = [\"big blorp\"]\n";

    #[test]
    fn a_word_is_found_in_every_scope_and_spelling() {
        let text = "/// A blorp.\nstruct BlorpState;\nfn warm_blorp() { f(\"Blorps\") }\n";
        let findings = found(LIST, &[("crates/a/src/lib.rs", text), ("docs/a.md", "blorp-free\n")]);
        let places: Vec<&str> =
            findings.iter().map(|text| text.split(": ").next().unwrap()).collect();
        let rust = "crates/a/src/lib.rs";
        let expected = [1, 2, 3, 3].map(|line| format!("{rust}:{line}"));
        assert_eq!(places[..4], expected);
        assert_eq!(places[4..], ["docs/a.md:1"]);
        let shown = "crates/a/src/lib.rs:1: words: \"blorp\", expected thing; rename or reword";
        assert_eq!(findings[0], shown);
    }

    #[test]
    fn parts_of_words_and_allowed_phrases_are_not_found() {
        let text = "fn blorped() {} // a big blorp, unblorp\nfn big_blorp() {}\n";
        assert!(found(LIST, &[("a.rs", text)]).is_empty());
    }

    #[test]
    fn a_phrase_is_found_across_lines_and_in_names() {
        let list = "[[word]]\nword = \"lets blorp\"\ninstead = \"releases\"\n";
        let text = "// it lets\n// blorp of it\nfn lets_blorp() {}\n// lets\n\n// blorp\n";
        assert_eq!(found(list, &[("a.rs", text)]).len(), 2);
        assert_eq!(found(list, &[("a.md", "it lets\nblorp\n")]).len(), 1);
        assert_eq!(found(list, &[("a.md", "lets blorp lets blorp\n")]).len(), 2);
    }

    #[test]
    fn scopes_and_exceptions_hold() {
        let files = [("a/x.rs", "fn blorp() {} // blorp\n"), ("b/x.rs", "fn blorp() {}\n")];
        let scoped = format!("{LIST}scopes = [\"comments\"]\n");
        assert_eq!(found(&scoped, &files).len(), 1);
        let only = format!("{LIST}only = [\"b/\"]\n");
        assert_eq!(found(&only, &files).len(), 1);
        let except = format!("{LIST}[[word.except]]\npath = \"b/x.rs\"\nreason = \"format\"\n");
        assert_eq!(found(&except, &files).len(), 2);
        let all = format!("{LIST}[[except]]\npath = \"a/\"\nreason = \"the list\"\n");
        assert_eq!(found(&all, &files).len(), 1);
        assert!(Words::parse("[[except]]\npath = \"a\"\nreason = \"\"\n").is_err());
        assert!(Words::parse("[[word]]\nword = \"(\"\ninstead = \"\"\n").is_err());
    }
}
