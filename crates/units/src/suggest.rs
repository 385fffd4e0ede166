//! The word that a misspelt one most likely means.

/// The most bytes of a word for which a known one is sought.
const LONGEST: usize = 64;
/// The least likeness of a suggestion, as clap has it: 0 means nothing in common, 1 equal.
const LIKENESS: f64 = 0.7;

/// The one of `known` that is most like `word`; `None` if none is much like it.
///
/// ```
/// # use dayfly_units::suggest::nearest;
/// assert_eq!(nearest("statsu", ["id", "status", "name"]), Some("status"));
/// assert_eq!(nearest("colour", ["id", "status", "name"]), None);
/// ```
#[must_use]
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > LONGEST {
        return None;
    }
    let word = word.to_lowercase();
    let likeness = |known: &'a str| (strsim::jaro_winkler(&word, known), known);
    let best = known.into_iter().map(likeness).max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(likeness, _)| *likeness >= LIKENESS).map(|(_, known)| known)
}

/// What an error adds: `; did you mean status?`, or nothing.
///
/// ```
/// # use dayfly_units::suggest::hint;
/// assert_eq!(hint("lable", ["label"]), "; did you mean label?");
/// assert_eq!(hint("x", ["label"]), "");
/// ```
#[must_use]
pub fn hint<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, known).map_or_else(String::new, |known| format!("; did you mean {known}?"))
}
