//! Pictures as SVG text: lines over two axes, and bars over time.

use std::fmt::{self, Write as _};

/// Lines over two axes.
pub(crate) struct Chart<'a> {
    pub(crate) title: &'a str,
    pub(crate) x_label: &'a str,
    pub(crate) y_label: &'a str,
    pub(crate) lines: Vec<Line<'a>>,
}

/// One line of a chart. Points that are not finite are left out.
pub(crate) struct Line<'a> {
    pub(crate) label: &'a str,
    pub(crate) colour: &'a str,
    pub(crate) dashed: bool,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Bars over time, in rows.
pub(crate) struct Timeline<'a> {
    pub(crate) title: &'a str,
    pub(crate) x_label: &'a str,
    pub(crate) rows: Vec<(String, Vec<Bar>)>,
    /// What each kind of bar is called, and its colour.
    pub(crate) kinds: &'a [(&'a str, &'a str)],
}

/// Something that lasted from one time to another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bar {
    /// An index into the timeline's kinds.
    pub(crate) kind: usize,
    pub(crate) start: f64,
    pub(crate) end: f64,
}

impl fmt::Display for Chart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let points = || {
            let all = self.lines.iter().flat_map(|line| &line.points);
            all.copied().filter(|(x, y)| x.is_finite() && y.is_finite())
        };
        let x = Axis::over(points().map(|(x, _)| x), LEFT, WIDTH - RIGHT);
        let y = Axis::over(points().map(|(_, y)| y), HEIGHT - BOTTOM, TOP);
        let mut svg = Svg::new(HEIGHT);
        svg.title(self.title);
        for (value, place) in y.ticks() {
            svg.line((LEFT, place), (WIDTH - RIGHT, place), "stroke=\"#e4e4e4\"");
            svg.text((LEFT - 8.0, place + 4.0), "end", &label(value, y.step));
        }
        svg.x_axis(&x, HEIGHT - BOTTOM, self.x_label);
        let middle = (TOP + HEIGHT - BOTTOM) / 2.0;
        svg.push(&format!("<g transform=\"rotate(-90 18 {middle:.1})\">"));
        svg.text((18.0, middle), "middle", self.y_label);
        svg.push("</g>");
        for line in &self.lines {
            let finite = line.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite());
            let path: Vec<_> =
                finite.map(|&(at, value)| format!("{:.1},{:.1}", x.place(at), y.place(value))).collect();
            let dashes = if line.dashed { " stroke-dasharray=\"6 4\"" } else { "" };
            svg.push(&format!(
                "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"1.8\"{dashes} points=\"{}\"/>",
                line.colour,
                path.join(" ")
            ));
        }
        svg.legend(self.lines.iter().map(|line| (line.label, line.colour)));
        f.write_str(&svg.finish())
    }
}

impl fmt::Display for Timeline<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends = self.rows.iter().flat_map(|(_, bars)| bars).flat_map(|bar| [bar.start, bar.end]);
        let x = Axis::over(ends.filter(|time| time.is_finite()), LEFT, WIDTH - RIGHT);
        let bottom = TOP + ROW * self.rows.len() as f64;
        let mut svg = Svg::new(bottom + BOTTOM);
        svg.title(self.title);
        svg.x_axis(&x, bottom, self.x_label);
        for (row, (name, bars)) in self.rows.iter().enumerate() {
            let top = TOP + ROW * row as f64;
            svg.text((LEFT - 8.0, top + ROW / 2.0 + 4.0), "end", name);
            for bar in bars {
                let (start, end) = (x.place(bar.start), x.place(bar.end));
                let (kind, colour) = self.kinds[bar.kind];
                svg.push(&format!(
                    "<rect x=\"{start:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{:.1}\" fill=\"{colour}\" \
                     stroke=\"white\" stroke-width=\"0.5\"><title>{kind}</title></rect>",
                    top + 4.0,
                    (end - start).max(0.5),
                    ROW - 8.0,
                ));
            }
        }
        svg.legend(self.kinds.iter().copied());
        f.write_str(&svg.finish())
    }
}

/// Values from `low` to `high`, drawn from place `start` to place `end`.
struct Axis {
    low: f64,
    high: f64,
    step: f64,
    start: f64,
    end: f64,
}

impl Axis {
    /// An axis on which all values have a place, with about six round numbers on it.
    fn over(values: impl Iterator<Item = f64>, start: f64, end: f64) -> Self {
        let (low, high) = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
        let range = if high > low { high - low } else { 1.0 };
        let rough = range / 6.0;
        let magnitude = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|factor| factor * magnitude)
            .find(|&step| step >= rough)
            .unwrap_or(10.0 * magnitude);
        let (low, high) = ((low / step).floor() * step, ((low + range) / step).ceil() * step);
        Self { low, high, step, start, end }
    }

    fn place(&self, value: f64) -> f64 {
        self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)
    }

    fn ticks(&self) -> impl Iterator<Item = (f64, f64)> {
        let values = (0u32..).map(|index| self.low + f64::from(index) * self.step);
        let last = self.high + self.step / 2.0;
        values.take_while(move |&value| value < last).map(|value| (value, self.place(value)))
    }
}

/// A number with as many digits as a step between numbers needs.
fn label(value: f64, step: f64) -> String {
    let digits = [0, 1, 2, 3, 4].into_iter().find(|&digits| step >= 0.99 * 10f64.powi(-digits)).unwrap_or(5);
    let digits = usize::try_from(digits).expect("0 to 5");
    // Minus zero is zero.
    format!("{:.digits$}", value + 0.0)
}

struct Svg(String);

impl Svg {
    fn new(height: f64) -> Self {
        Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        ))
    }

    fn push(&mut self, element: &str) {
        self.0.push_str(element);
        self.0.push('\n');
    }

    fn text(&mut self, (x, y): (f64, f64), anchor: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        self.push(&format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"));
    }

    fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), style: &str) {
        self.push(&format!("<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" {style}/>"));
    }

    fn title(&mut self, title: &str) {
        self.push("<g font-size=\"15\" font-weight=\"bold\">");
        self.text((LEFT, 24.0), "start", title);
        self.push("</g>");
    }

    fn x_axis(&mut self, axis: &Axis, y: f64, name: &str) {
        self.line((LEFT, y), (WIDTH - RIGHT, y), "stroke=\"#333\"");
        for (value, place) in axis.ticks() {
            self.line((place, y), (place, y + 5.0), "stroke=\"#333\"");
            self.text((place, y + 19.0), "middle", &label(value, axis.step));
        }
        self.text(((LEFT + WIDTH - RIGHT) / 2.0, y + 40.0), "middle", name);
    }

    fn legend<'a>(&mut self, entries: impl Iterator<Item = (&'a str, &'a str)>) {
        let (mut x, mut y) = (LEFT, 34.0);
        for (name, colour) in entries {
            let width = 40.0 + 6.6 * name.chars().count() as f64;
            if x > LEFT && x + width > WIDTH {
                (x, y) = (LEFT, y + 14.0);
            }
            let mut square = String::new();
            let _ = write!(
                square,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
            );
            self.push(&square);
            self.text((x + 17.0, y + 10.0), "start", name);
            x += width;
        }
    }

    fn finish(mut self) -> String {
        self.push("</svg>");
        self.0
    }
}

const WIDTH: f64 = 820.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 62.0;
const BOTTOM: f64 = 52.0;
const ROW: f64 = 34.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_has_round_numbers_and_room_for_every_value() {
        for (values, expected) in [
            (vec![0.0, 99.0], "0 20 40 60 80 100"),
            (vec![2.31, 5.54], "2 3 4 5 6"),
            (vec![1.0], "1.0 1.2 1.4 1.6 1.8 2.0"),
            (vec![0.001, 0.0042], "0.001 0.002 0.003 0.004 0.005"),
            (vec![], "0.0 0.2 0.4 0.6 0.8 1.0"),
        ] {
            let axis = Axis::over(values.iter().copied(), 10.0, 110.0);
            let ticks: Vec<_> = axis.ticks().map(|(value, _)| label(value, axis.step)).collect();
            assert_eq!(ticks.join(" "), expected, "{values:?}");
            assert!(values.iter().all(|&value| (10.0..=110.0).contains(&axis.place(value))));
        }
    }

    #[test]
    fn a_chart_holds_every_finite_point_and_escapes_its_words() {
        let points = vec![(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0)];
        let line = Line { label: "a < b & c", colour: "#123456", dashed: true, points };
        let chart = Chart { title: "t", x_label: "x", y_label: "y", lines: vec![line] }.to_string();
        let path = chart.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!(path.split(' ').count(), 2);
        assert!(chart.contains("a &lt; b &amp; c") && chart.contains("stroke-dasharray"), "{chart}");
    }

    #[test]
    fn a_timeline_has_one_bar_per_bar() {
        let bar = |kind, start: u32| Bar { kind, start: f64::from(start), end: f64::from(start) + 0.5 };
        let rows =
            vec![("rank 0".to_owned(), vec![bar(0, 0), bar(1, 1)]), ("rank 1".to_owned(), vec![bar(0, 2)])];
        let kinds = &[("compute", "#111111"), ("wait", "#222222")];
        let timeline = Timeline { title: "t", x_label: "ms", rows, kinds }.to_string();
        assert_eq!(timeline.matches("<title>compute</title>").count(), 2);
        assert_eq!(timeline.matches("<title>wait</title>").count(), 1);
    }
}
