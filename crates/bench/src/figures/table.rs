//! Tables on the terminal: at most 80 columns, each row printed as soon as it is known.
//!
//! A row is the JSON that the report contains: a column names the place of its figure there.

use super::samples::float;
use serde::Serialize;
use serde_json::{Value, json};

/// The terminal's width.
const WIDTH: usize = 80;

/// The columns of a [`super::Spread`] in microseconds.
pub const SPREAD: [Column; 8] = [
    ("n", "/n", Shape::Plain),
    ("p50", "/p50_us", Shape::Us),
    ("p90", "/p90_us", Shape::Us),
    ("p95", "/p95_us", Shape::Us),
    ("p99", "/p99_us", Shape::Us),
    ("least", "/min_us", Shape::Us),
    ("most", "/max_us", Shape::Us),
    ("x floor", "/ratio_to_floor_p50", Shape::Digits(2)),
];

/// How a cell shows its figure.
#[derive(Debug, Clone, Copy)]
pub enum Shape {
    /// As it is.
    Plain,
    /// Microseconds, in the unit that people read best.
    Us,
    /// Milliseconds, likewise.
    Ms,
    /// Microseconds, as seconds.
    Seconds,
    /// Bytes, as MiB with one digit after the point.
    Mib,
    /// With this number of digits after the point.
    Digits(usize),
}

/// A column: its head, the place of its figure in a row (a JSON pointer), and the figure's shape.
pub type Column = (&'static str, &'static str, Shape);

/// A table whose head is on the terminal.
#[derive(Debug)]
pub struct Table<'a> {
    first: usize,
    columns: &'a [Column],
}

impl<'a> Table<'a> {
    /// Prints the head. The first column, which names the row, is `first` wide.
    pub fn new(first: usize, name: &str, columns: &'a [Column]) -> Self {
        let table = Self { first: first.max(name.len()), columns };
        let width = columns.iter().map(|column| width(column) + 2).sum::<usize>() + table.first + 2;
        debug_assert!(width <= WIDTH, "a table of {width} columns: {columns:?}");
        println!("{}", table.line(name, |(head, ..)| (*head).to_owned()));
        table
    }

    /// Prints a row. A figure that is missing is shown as `-`.
    pub fn row(&self, name: &str, figures: impl Serialize) {
        let figures = json!(figures);
        let cell = |(_, place, shape): &Column| {
            let figure = figures.pointer(place).filter(|figure| !figure.is_null());
            figure.map_or_else(|| "-".to_owned(), |figure| shape.text(figure))
        };
        println!("{}", self.line(name, cell));
    }

    fn line(&self, name: &str, cell: impl Fn(&Column) -> String) -> String {
        let mut line = format!("  {name:<0$}", self.first);
        for column in self.columns {
            line += &format!("  {:>1$}", cell(column), width(column));
        }
        line.trim_end().to_owned()
    }
}

/// A time takes seven characters.
fn width((head, _, shape): &Column) -> usize {
    head.chars().count().max(if matches!(shape, Shape::Plain) { 5 } else { 7 })
}

impl Shape {
    fn text(self, figure: &Value) -> String {
        let number = figure.as_f64().unwrap_or(f64::NAN);
        match self {
            Self::Plain => figure.as_str().map_or_else(|| figure.to_string(), str::to_owned),
            Self::Us => time(number),
            Self::Ms => time(number * 1e3),
            Self::Seconds => format!("{:.2}", number / 1e6),
            Self::Mib => format!("{:.1} M", number / 1_048_576.0),
            Self::Digits(digits) => format!("{number:.digits$}"),
        }
    }
}

/// Microseconds for people.
pub fn shown(us: u64) -> String {
    time(float(us))
}

fn time(us: f64) -> String {
    match us {
        ..10_000.0 => format!("{us:.0} us"),
        ..10_000_000.0 => format!("{:.1} ms", us / 1e3),
        _ => format!("{:.1} s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_read_from_its_figures() {
        let columns = [
            ("n", "/n", Shape::Plain),
            ("p50", "/birth/p50_us", Shape::Us),
            ("RAM", "/bytes", Shape::Mib),
            ("x floor", "/ratio", Shape::Digits(2)),
        ];
        let table = Table::new(6, "", &columns);
        let figures =
            json!({ "n": 100, "birth": { "p50_us": 420 }, "bytes": 1_572_864, "ratio": null });
        table.row("hit", &figures);
        let of = |name: &str| figures.pointer(name).unwrap();
        assert_eq!(Shape::Plain.text(of("/n")), "100");
        assert_eq!(Shape::Us.text(of("/birth/p50_us")), "420 us");
        assert_eq!(Shape::Mib.text(of("/bytes")), "1.5 M");
        assert_eq!(
            table.line("hit", |_| "1".to_owned()),
            "  hit         1        1        1        1"
        );
    }

    #[test]
    fn times_have_the_unit_that_people_read_best() {
        assert_eq!([9_999, 10_000, 10_000_000].map(shown), ["9999 us", "10.0 ms", "10.0 s"]);
    }
}
