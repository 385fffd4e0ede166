//! What was promised, and whether it held.

use crate::prelude::*;

const COLUMNS: [Column; 3] =
    [("expected", "/expected", Plain), ("got", "/got", Plain), ("holds", "/holds", Plain)];

/// The promises of a run.
#[derive(Debug, Default)]
pub struct Promises(Vec<Promise>);

#[derive(Debug, Serialize)]
struct Promise {
    what: String,
    expected: String,
    /// A number, or a word.
    got: Value,
    holds: bool,
}

impl Promises {
    /// `got` is at most `most`.
    pub fn at_most(&mut self, what: impl Into<String>, most: f64, got: f64) {
        self.add(what.into(), format!("<= {most}"), got, got <= most);
    }

    /// `got` is at least `least`.
    pub fn at_least(&mut self, what: impl Into<String>, least: f64, got: f64) {
        self.add(what.into(), format!(">= {least}"), got, got >= least);
    }

    /// `got` is `expected`, or differs from it by at most `by`.
    pub fn about(&mut self, what: impl Into<String>, expected: f64, by: f64, got: f64) {
        let holds = (got - expected).abs() <= by;
        self.add(what.into(), format!("{expected} +- {by}"), got, holds);
    }

    /// `got` is this word.
    pub fn is(&mut self, what: impl Into<String>, expected: &str, got: &str) {
        self.push(what.into(), expected.to_owned(), got.into(), got == expected);
    }

    fn add(&mut self, what: String, expected: String, got: f64, holds: bool) {
        self.push(what, expected, rounded(got).into(), holds);
    }

    fn push(&mut self, what: String, expected: String, got: Value, holds: bool) {
        self.0.push(Promise { what, expected, got, holds });
    }

    /// Prints them as a table.
    pub fn print(&self) {
        let table = Table::new(44, "promise", &COLUMNS);
        self.0.iter().for_each(|promise| table.row(&promise.what, promise));
    }

    pub fn figures(&self) -> Value {
        json!(self.0)
    }

    /// # Errors
    /// One of them does not hold.
    pub fn hold(&self) -> Result<()> {
        let broken = self.0.iter().filter(|promise| !promise.holds);
        let broken: Vec<_> = broken
            .map(|Promise { what, expected, got, .. }| format!("{what}: {expected}, got {got}"))
            .collect();
        ensure!(broken.is_empty(), "promises that do not hold: {}", broken.join("; "));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(of: impl Fn(&mut Promises)) -> String {
        let mut promises = Promises::default();
        of(&mut promises);
        promises.hold().err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_figure_at_the_bound_holds_and_one_beyond_it_does_not() {
        assert_eq!(error(|all| all.at_most("x", 1.0, 1.0)), "");
        assert_eq!(error(|all| all.at_least("x", 99.0, 99.0)), "");
        assert_eq!(error(|all| all.about("x", 1.0, 0.25, 0.75)), "");
        let broken = error(|all| {
            all.at_most("much", 1.0, 1.5);
            all.at_most("fine", 1.0, 0.5);
            all.at_least("few", 100.0, 99.0);
            all.about("far", 1.0, 0.25, 1.5);
            all.is("why", "memory", "memory");
            all.is("end", "memory", "lost");
        });
        let expected = "much: <= 1, got 1.5; few: >= 100, got 99.0; far: 1 +- 0.25, got 1.5; \
                        end: memory, got \"lost\"";
        assert!(broken.ends_with(expected), "{broken}");
    }

    #[test]
    fn what_was_not_measured_does_not_hold() {
        assert!(!error(|all| all.at_most("x", 1.0, f64::NAN)).is_empty());
        assert!(!error(|all| all.about("x", 1.0, 0.5, f64::NAN)).is_empty());
    }
}
