//! A picture as SVG text: curves over numbers that double.

use std::fmt;

/// Curves over a logarithmic axis, between 0 and 100.
pub(super) struct Chart<'a> {
    pub(super) title: &'a str,
    pub(super) x_label: &'a str,
    pub(super) y_label: &'a str,
    pub(super) curves: Vec<Curve<'a>>,
}

/// One curve; its points ascend.
pub(super) struct Curve<'a> {
    pub(super) label: &'a str,
    pub(super) points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 110.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 56.0;
const COLOURS: [&str; 5] = ["#1f6fb2", "#c2571a", "#2b8a3e", "#7b3fa0", "#a61e4d"];

impl fmt::Display for Chart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let xs = || self.curves.iter().flat_map(|curve| &curve.points).map(|&(x, _)| x);
        let (first, last) = (xs().fold(f64::INFINITY, f64::min), xs().fold(1.0, f64::max));
        let (first, last) = (first.min(last).max(1.0).log2(), last.log2());
        let x = |value: f64| LEFT + (value.log2() - first) / (last - first).max(1.0) * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| HEIGHT - BOTTOM - value / 100.0 * (HEIGHT - TOP - BOTTOM);
        writeln!(
            f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
        )?;
        text(f, (LEFT, 26.0), "start", &format!("<tspan font-size=\"15\">{}</tspan>", escaped(self.title)))?;
        for tick in [0.0, 20.0, 40.0, 60.0, 80.0, 100.0] {
            line(f, (LEFT, y(tick)), (WIDTH - RIGHT, y(tick)))?;
            text(f, (LEFT - 8.0, y(tick) + 4.0), "end", &tick.to_string())?;
        }
        // A label for each power of two, or for every second, third, … where there are many.
        let (from, to) = (first.ceil(), last.floor());
        let step = ((to - from) / 10.0).ceil().max(1.0);
        let mut exponent = from;
        while exponent <= to {
            let value = exponent.exp2();
            line(f, (x(value), y(0.0)), (x(value), y(0.0) + 5.0))?;
            text(f, (x(value), y(0.0) + 20.0), "middle", &value.to_string())?;
            exponent += step;
        }
        text(f, ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 14.0), "middle", &escaped(self.x_label))?;
        text(f, (LEFT, TOP - 10.0), "end", &escaped(self.y_label))?;
        for (index, curve) in self.curves.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let path: Vec<_> =
                curve.points.iter().map(|&(at, value)| format!("{:.1},{:.1}", x(at), y(value))).collect();
            writeln!(
                f,
                "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" points=\"{}\"/>",
                path.join(" ")
            )?;
            let place = TOP + 18.0 * index as f64;
            let label = format!("<tspan fill=\"{colour}\">{}</tspan>", escaped(curve.label));
            text(f, (WIDTH - RIGHT + 14.0, place + 4.0), "start", &label)?;
        }
        writeln!(f, "</svg>")
    }
}

fn line(f: &mut fmt::Formatter<'_>, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) -> fmt::Result {
    writeln!(f, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#dddddd\"/>")
}

/// The content is SVG, not text.
fn text(f: &mut fmt::Formatter<'_>, (x, y): (f64, f64), anchor: &str, content: &str) -> fmt::Result {
    writeln!(f, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_begin_at_the_left_and_end_at_the_right() {
        let curve = Curve { label: "a < b", points: vec![(1.0, 100.0), (8.0, 0.0)] };
        let svg = Chart { title: "t", x_label: "x", y_label: "y", curves: vec![curve] }.to_string();
        assert!(svg.contains("points=\"64.0,48.0 610.0,364.0\""), "{svg}");
        assert!(svg.contains("a &lt; b") && svg.ends_with("</svg>\n"), "{svg}");
    }

    #[test]
    fn no_points_are_no_reason_to_fail() {
        let curve = Curve { label: "none", points: Vec::new() };
        let svg = Chart { title: "t", x_label: "x", y_label: "y", curves: vec![curve] }.to_string();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
