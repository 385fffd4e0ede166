//! Plots as SVG, drawn here: a few curves over one axis are not worth a dependency.

use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::path::Path;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 180.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
/// Okabe and Ito's, which people with any sight tell apart.
const COLOURS: [&str; 6] = ["#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"];

/// A line through points.
#[derive(Debug)]
pub struct Curve {
    /// What it is, beside the plot.
    pub label: String,
    /// x and y, in the order of the line.
    pub points: Vec<(f64, f64)>,
}

impl Curve {
    /// Which part of `values`, in microseconds, is not above x, in milliseconds.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a drawing")]
    pub fn cdf(label: &str, values: &[u64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_unstable();
        let count = sorted.len() as f64;
        let points = sorted.iter().enumerate().map(|(n, us)| (*us as f64 / 1000.0, (n + 1) as f64 / count));
        Self { label: label.to_owned(), points: points.collect() }
    }
}

/// What is on the axes.
#[derive(Debug)]
pub struct Plot {
    /// Above it.
    pub title: String,
    /// Along the x axis.
    pub x: &'static str,
    /// Along the y axis.
    pub y: &'static str,
    /// Whether the x axis is logarithmic; values then have to be above 0.
    pub log_x: bool,
    /// At most as many as there are colours, or colours repeat.
    pub curves: Vec<Curve>,
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
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
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * unit).into_iter().find(|s| *s >= rough).unwrap_or(rough);
    let first = (low / step).ceil();
    (0..20).map(|n| (first + f64::from(n)) * step).take_while(|t| *t <= high + step / 1e6).collect()
}

impl Plot {
    /// The drawing.
    #[must_use]
    pub fn svg(&self) -> String {
        let all =
            || self.curves.iter().flat_map(|c| &c.points).filter(|(x, y)| x.is_finite() && y.is_finite());
        let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MIN, f64::max).max(1e-9);
        let high_x = most(&mut all().map(|p| p.0));
        let high_y = most(&mut all().map(|p| p.1));
        let low_x =
            if self.log_x { all().map(|p| p.0).fold(f64::MAX, f64::min).clamp(1e-9, high_x) } else { 0.0 };
        let scale = |x: f64| if self.log_x { x.max(1e-9).log10() } else { x };
        let span = (scale(high_x) - scale(low_x)).max(1e-9);
        let px = |x: f64| LEFT + (scale(x) - scale(low_x)) / span * (WIDTH - LEFT - RIGHT);
        let py = |y: f64| HEIGHT - BOTTOM - y / high_y * (HEIGHT - TOP - BOTTOM);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{}</text>\n",
            escape(&self.title)
        );
        // Writing to a String cannot fail.
        for t in ticks(low_x, high_x, self.log_x) {
            let (x, bottom) = (px(t), HEIGHT - BOTTOM);
            let _ = writeln!(
                out,
                "<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#ddd\"/><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 16.0,
                number(t)
            );
        }
        for t in ticks(0.0, high_y, false) {
            let (y, right) = (py(t), WIDTH - RIGHT);
            let _ = writeln!(
                out,
                "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                number(t)
            );
        }
        for (n, curve) in self.curves.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            let points = curve.points.iter().map(|(x, y)| format!("{:.1},{:.1}", px(*x), py(*y)));
            let points = points.collect::<Vec<_>>().join(" ");
            let _ = writeln!(
                out,
                "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>"
            );
            #[expect(clippy::cast_precision_loss, reason = "a handful of curves")]
            let y = TOP + 16.0 * n as f64 + 8.0;
            let x = WIDTH - RIGHT + 10.0;
            let _ =
                writeln!(out, "<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\">{}</text>", escape(&curve.label));
        }
        let middle = (LEFT + WIDTH - RIGHT) / 2.0;
        let _ = writeln!(
            out,
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 12.0,
            escape(self.x)
        );
        let _ = writeln!(
            out,
            "<text x=\"16\" y=\"{}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {})\">{}</text>\n</svg>",
            HEIGHT / 2.0,
            HEIGHT / 2.0,
            escape(self.y)
        );
        out
    }

    /// Writes the drawing to `out/name`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, out: &Path, name: &str) -> Result<()> {
        let path = out.join(name);
        std::fs::write(&path, self.svg()).with_context(|| path.display().to_string())?;
        println!("  {}", path.display());
        Ok(())
    }
}

/// Without the zeroes that nobody needs.
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
        assert_eq!((number(0.0), number(0.5), number(20.0)), ("0".into(), "0.5".into(), "20".into()));
    }

    #[test]
    fn a_drawing_is_whole_and_its_texts_are_escaped() {
        for (log_x, values) in [(false, vec![1, 2]), (true, vec![5]), (true, vec![])] {
            let curves = vec![Curve::cdf("a<b", &values)];
            let svg = Plot { title: "t & u".into(), x: "ms", y: "part", log_x, curves }.svg();
            assert!(
                svg.ends_with("</svg>\n") && svg.contains("t &amp; u") && svg.contains("a&lt;b"),
                "{svg}"
            );
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
