//! Plots as SVG: a few curves over two axes.

use super::samples::{float, ms};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 180.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 90.0;
/// Characters of a note that fit into a line.
const NOTE: usize = 130;
/// The palette of Okabe and Ito, which colour-blind people tell apart.
const COLOURS: [&str; 6] = ["#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"];

/// A line through points.
#[derive(Debug)]
pub struct Curve {
    /// Its name, to the right of the plot.
    pub label: String,
    /// x and y, in the order of the line.
    pub points: Vec<(f64, f64)>,
}

impl Curve {
    /// The share of `values`, in microseconds, that are at most x, in milliseconds.
    pub fn cdf(label: &str, values: &[u64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_unstable();
        let share = |n: u64| float(n) / float(sorted.len() as u64);
        let points = (1..).zip(&sorted).map(|(n, us)| (ms(*us), share(n)));
        Self { label: label.to_owned(), points: points.collect() }
    }

    /// Through points of counts: y is divided by `unit`.
    pub fn counts(label: &str, points: impl IntoIterator<Item = (u64, u64)>, unit: u64) -> Self {
        let points = points.into_iter().map(|(x, y)| (float(x), float(y) / float(unit)));
        Self { label: label.to_owned(), points: points.collect() }
    }
}

/// Curves, and what their axes mean.
#[derive(Debug)]
pub struct Plot {
    /// Above the plot.
    pub title: String,
    /// What the x axis shows, with its unit.
    pub x: &'static str,
    /// What the y axis shows, with its unit.
    pub y: &'static str,
    /// Whether the x axis is logarithmic; x must be above 0 then.
    pub log_x: bool,
    /// Colours repeat after six curves.
    pub curves: Vec<Curve>,
}

/// Round numbers from about `low` to about `high`.
fn ticks(low: f64, high: f64, log: bool) -> Vec<f64> {
    if log {
        #[expect(clippy::cast_possible_truncation, reason = "powers of ten")]
        let decades = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
        let all = decades.flat_map(|d| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(d)));
        return all.filter(|t| (low..=high).contains(t)).collect();
    }
    let rough = (high - low) / 5.0;
    if rough <= 0.0 {
        return vec![low];
    }
    let unit = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|m| m * unit).into_iter().find(|s| *s >= rough).unwrap_or(rough);
    let first = (low / step).ceil();
    (0..20).map(|n| (first + f64::from(n)) * step).take_while(|t| *t <= high + step / 1e6).collect()
}

/// From values to places in the drawing.
struct Scales {
    low_x: f64,
    high_x: f64,
    high_y: f64,
    log_x: bool,
}

impl Scales {
    fn of(plot: &Plot) -> Self {
        let (mut low_x, mut high_x, mut high_y) = (f64::MAX, 1e-9_f64, 1e-9_f64);
        for (x, y) in plot.curves.iter().flat_map(|curve| &curve.points) {
            (low_x, high_x, high_y) = (low_x.min(*x), high_x.max(*x), high_y.max(*y));
        }
        let low_x = if plot.log_x { low_x.clamp(1e-9, high_x) } else { 0.0 };
        Self { low_x, high_x, high_y, log_x: plot.log_x }
    }

    fn x(&self, x: f64) -> f64 {
        let scale = |x: f64| if self.log_x { x.max(1e-9).log10() } else { x };
        let span = (scale(self.high_x) - scale(self.low_x)).max(1e-9);
        LEFT + (scale(x) - scale(self.low_x)) / span * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, y: f64) -> f64 {
        HEIGHT - BOTTOM - y / self.high_y * (HEIGHT - TOP - BOTTOM)
    }
}

/// A text; `style` are further attributes.
fn text(x: f64, y: f64, style: &str, content: &str) -> String {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!("<text x='{x:.1}' y='{y:.1}' {style}>{content}</text>\n")
}

/// A line of the grid.
fn line([x1, y1]: [f64; 2], [x2, y2]: [f64; 2]) -> String {
    format!("<line x1='{x1:.1}' y1='{y1:.1}' x2='{x2:.1}' y2='{y2:.1}' stroke='#ddd'/>\n")
}

impl Plot {
    /// The drawing, with `notes` below it.
    pub fn svg(&self, notes: &[String]) -> String {
        let scales = Scales::of(self);
        let mut out = format!(
            "<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' \
             font-family='sans-serif' font-size='12'>\n\
             <rect width='100%' height='100%' fill='white'/>\n"
        );
        out += &text(LEFT, 20.0, "font-size='14'", &self.title);
        out += &self.axes(&scales);
        out += &self.drawn(&scales);
        for (n, note) in (0_u8..).zip(notes.iter().flat_map(|note| wrapped(note))) {
            let y = HEIGHT - BOTTOM + 54.0 + 11.0 * f64::from(n);
            out += &text(16.0, y, "font-size='9' fill='#555'", &note);
        }
        out + "</svg>\n"
    }

    fn axes(&self, scales: &Scales) -> String {
        const MIDDLE: &str = "text-anchor='middle'";
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        let mut out = String::new();
        for t in ticks(scales.low_x, scales.high_x, self.log_x) {
            let x = scales.x(t);
            out += &(line([x, TOP], [x, bottom]) + &text(x, bottom + 16.0, MIDDLE, &number(t)));
        }
        for t in ticks(0.0, scales.high_y, false) {
            let y = scales.y(t);
            out += &line([LEFT, y], [right, y]);
            out += &text(LEFT - 6.0, y + 4.0, "text-anchor='end'", &number(t));
        }
        out += &text(f64::midpoint(LEFT, right), bottom + 36.0, MIDDLE, self.x);
        let y = f64::midpoint(TOP, bottom);
        let turned = format!("{MIDDLE} transform='rotate(-90 16 {y})'");
        out + &text(16.0, y, &turned, self.y)
    }

    fn drawn(&self, scales: &Scales) -> String {
        let mut out = String::new();
        let curves = self.curves.iter().zip(COLOURS.into_iter().cycle());
        for (n, (curve, colour)) in (0_u8..).zip(curves) {
            let place = |(x, y): &(f64, f64)| format!("{:.1},{:.1}", scales.x(*x), scales.y(*y));
            let points = curve.points.iter().map(place).collect::<Vec<_>>().join(" ");
            let style = "fill='none' stroke-width='1.5'";
            out += &format!("<polyline points='{points}' {style} stroke='{colour}'/>\n");
            let (x, y) = (WIDTH - RIGHT + 10.0, TOP + 16.0 * f64::from(n) + 8.0);
            out += &text(x, y, &format!("fill='{colour}'"), &curve.label);
        }
        out
    }
}

/// Lines of at most [`NOTE`] characters, broken between words.
fn wrapped(note: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in note.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + word.len() < NOTE => *line += &format!(" {word}"),
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// With as few digits as the number needs.
fn number(n: f64) -> String {
    let text = format!("{n:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text.is_empty() { "0".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cdf_rises_to_one() {
        let curve = Curve::cdf("x", &[3000, 1000, 2000, 4000]);
        assert_eq!(curve.points, [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75), (4.0, 1.0)]);
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks(0.0, 10.0, false), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(1.0, 100.0, true), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!([0.0, 0.5, 20.0].map(number), ["0", "0.5", "20"]);
    }

    #[test]
    fn a_drawing_is_whole_and_its_texts_are_escaped() {
        for (log_x, values) in [(false, vec![1, 2]), (true, vec![5]), (true, vec![])] {
            let curves = vec![Curve::cdf("a<b", &values)];
            let plot = Plot { title: "t & u".into(), x: "ms", y: "part", log_x, curves };
            let svg = plot.svg(&["on <host>".to_owned(), "word ".repeat(40)]);
            for part in ["t &amp; u", "a&lt;b", "on &lt;host&gt;", "</svg>\n"] {
                assert!(svg.contains(part), "{part}: {svg}");
            }
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
        let lines = wrapped(&"word ".repeat(40));
        assert_eq!(lines.iter().map(String::len).collect::<Vec<_>>(), [129, 69]);
    }
}
