//! Pictures as SVG text: curves over two axes, and bars over time. It depends on nothing, so `xtask` includes the file.

use std::fmt::{self, Write as _};

/// A picture of curves over two axes.
#[derive(Debug)]
pub struct Chart<'a> {
    /// The title above it.
    pub title: &'a str,
    /// The horizontal axis.
    pub x: Axis<'a>,
    /// The vertical axis.
    pub y: Axis<'a>,
    /// The curves.
    pub curves: Vec<Curve<'a>>,
}

/// An axis of a chart.
#[derive(Debug, Clone, Copy)]
pub struct Axis<'a> {
    /// The quantity and its unit.
    pub label: &'a str,
    /// The places of values.
    pub scale: Scale<'a>,
}

/// The places of values on an axis.
#[derive(Debug, Clone, Copy)]
pub enum Scale<'a> {
    /// In proportion, from the least to the greatest value of the curves and of this list.
    Linear(&'a [f64]),
    /// By logarithms. The whole powers of `base` have a tick with this text.
    Logarithmic {
        /// The base.
        base: f64,
        /// Returns the text of a tick.
        text: TickText,
    },
}

/// A function that returns the text of a value.
pub type TickText = fn(f64) -> String;

/// A curve of a chart. Points without a finite place are left out.
#[derive(Debug)]
pub struct Curve<'a> {
    /// The name in the legend.
    pub label: &'a str,
    /// The style of the line.
    pub style: LineStyle<'a>,
    /// The points.
    pub points: Vec<(f64, f64)>,
}

/// The style of a curve.
#[derive(Debug, Clone, Copy)]
pub enum LineStyle<'a> {
    /// A line in one of eight colours, by the curve's number.
    Plain,
    /// A thick red line.
    Emphasised,
    /// A dashed line of this colour.
    Dashed(&'a str),
}

/// A picture of bars over time, in rows, in panels below one another on one time scale.
#[derive(Debug)]
pub struct BarChart<'a> {
    /// The unit of time.
    pub x_label: &'a str,
    /// The name and colour of each kind of bar.
    pub kinds: &'a [(&'a str, &'a str)],
    /// The panels.
    pub panels: Vec<BarPanel<'a>>,
}

/// Some rows of bars.
#[derive(Debug)]
pub struct BarPanel<'a> {
    /// The title above them.
    pub title: &'a str,
    /// The name and bars of each row.
    pub rows: Vec<(String, Vec<Bar>)>,
    /// The end of a background in each row, which has the colour of the last kind; 0 for none.
    pub background: f64,
}

/// The duration of something.
#[derive(Debug, Clone)]
pub struct Bar {
    /// The index among the kinds.
    pub kind: usize,
    /// The beginning.
    pub start: f64,
    /// The end.
    pub end: f64,
    /// `true` for a paler colour.
    pub pale: bool,
    /// The text inside, if it is wide enough.
    pub text: String,
    /// The text that a viewer shows at the pointer.
    pub hint: String,
}

impl fmt::Display for Chart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let points = || self.curves.iter().flat_map(|curve| &curve.points).copied();
        let x = Places::new(self.x.scale, points().map(|(x, _)| x), (LEFT, WIDTH - RIGHT));
        let y = Places::new(self.y.scale, points().map(|(_, y)| y), (HEIGHT - BOTTOM, TOP));
        let mut svg = Svg::new(HEIGHT);
        svg.title(24.0, self.title);
        for (text, place) in y.ticks() {
            svg.line((LEFT, place), (WIDTH - RIGHT, place), "#e4e4e4");
            svg.text((LEFT - 8.0, place + 4.0), "end", &text);
        }
        svg.x_axis(&x, HEIGHT - BOTTOM, self.x.label);
        let middle = (TOP + HEIGHT - BOTTOM) / 2.0;
        svg.push(&format!("<g transform=\"rotate(-90 18 {middle:.1})\">"));
        svg.text((18.0, middle), "middle", self.y.label);
        svg.push("</g>");
        let mut legend = Vec::new();
        for (number, curve) in self.curves.iter().enumerate() {
            let (colour, style) = match curve.style {
                LineStyle::Plain => (COLOURS[number % COLOURS.len()], "stroke-width=\"1.8\""),
                LineStyle::Emphasised => ("#c1272d", "stroke-width=\"3\""),
                LineStyle::Dashed(colour) => (colour, "stroke-width=\"1.8\" stroke-dasharray=\"6 4\""),
            };
            let places = curve.points.iter().map(|&(a, b)| (x.place(a), y.place(b)));
            let finite = places.filter(|(x, y)| x.is_finite() && y.is_finite());
            let path: Vec<_> = finite.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let path = path.join(" ");
            svg.push(&format!("<polyline fill=\"none\" stroke=\"{colour}\" {style} points=\"{path}\"/>"));
            legend.push((curve.label, colour));
        }
        svg.legend(&legend);
        f.write_str(&svg.finish())
    }
}

impl fmt::Display for BarChart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bars = self.panels.iter().flat_map(|panel| &panel.rows).flat_map(|(_, bars)| bars);
        let ends = bars.flat_map(|bar| [bar.start, bar.end]);
        let scale = Scale::Linear(&[]);
        let x = Places::new(scale, ends, (LEFT, WIDTH - RIGHT));
        let rows: usize = self.panels.iter().map(|panel| panel.rows.len()).sum();
        let bottom = TOP + ROW * rows as f64 + TITLE * self.panels.len() as f64;
        let mut svg = Svg::new(bottom + BOTTOM);
        let mut top = TOP;
        for panel in &self.panels {
            svg.title(top + TITLE - 8.0, panel.title);
            top += TITLE;
            for (name, bars) in &panel.rows {
                svg.text((LEFT - 8.0, top + ROW / 2.0 + 4.0), "end", name);
                svg.background(&x, panel.background, top, self.kinds);
                bars.iter().for_each(|bar| svg.bar(&x, bar, top, self.kinds));
                top += ROW;
            }
        }
        svg.x_axis(&x, bottom, self.x_label);
        svg.legend(self.kinds);
        f.write_str(&svg.finish())
    }
}

/// The places of an axis: values are scaled linearly, or their logarithms are.
struct Places {
    low: f64,
    high: f64,
    step: f64,
    ends: (f64, f64),
    /// The base and the text of ticks, if values have the places of their logarithms.
    logarithmic: Option<(f64, TickText)>,
}

impl Places {
    /// Returns an axis on which all finite values have a place, with round numbers on it.
    fn new(scale: Scale<'_>, values: impl Iterator<Item = f64>, ends: (f64, f64)) -> Self {
        let range = |values: &mut dyn Iterator<Item = f64>| {
            let finite = values.filter(|value| value.is_finite());
            let start = (f64::INFINITY, f64::NEG_INFINITY);
            let (low, high) = finite.fold(start, |(low, high), value| (low.min(value), high.max(value)));
            if low > high { (0.0, 1.0) } else { (low, high) }
        };
        match scale {
            Scale::Linear(more) => {
                let (low, high) = range(&mut values.chain(more.iter().copied()));
                let range = if high > low { high - low } else { 1.0 };
                let step = round_step(range / 6.0);
                let (low, high) = ((low / step).floor() * step, ((low + range) / step).ceil() * step);
                Self { low, high, step, ends, logarithmic: None }
            }
            Scale::Logarithmic { base, text } => {
                let (low, high) = range(&mut values.map(|value| value.log(base)));
                let low = (low + NEARLY).floor();
                let high = (high - NEARLY).ceil().max(low + 1.0);
                let step = ((high - low) / 10.0).ceil();
                Self { low, high, step, ends, logarithmic: Some((base, text)) }
            }
        }
    }

    fn place(&self, value: f64) -> f64 {
        let scaled = self.logarithmic.map_or(value, |(base, _)| value.log(base));
        self.ends.0 + (scaled - self.low) / (self.high - self.low) * (self.ends.1 - self.ends.0)
    }

    /// Returns the texts and places of the ticks.
    fn ticks(&self) -> impl Iterator<Item = (String, f64)> {
        let values = (0u32..).map(|index| self.low + f64::from(index) * self.step);
        let last = self.high + self.step * NEARLY;
        values.take_while(move |&value| value <= last).map(|value| match self.logarithmic {
            Some((base, text)) => (text(base.powf(value)), self.place(base.powf(value))),
            None => (label(value, self.step), self.place(value)),
        })
    }
}

/// Returns the least round number that is not below this one.
fn round_step(rough: f64) -> f64 {
    let magnitude = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|factor| factor * magnitude);
    steps.into_iter().find(|&step| step >= rough).unwrap_or(10.0 * magnitude)
}

/// Returns a number with as many digits as a step between numbers needs.
fn label(value: f64, step: f64) -> String {
    let digits = (0_i32..5).find(|&digits| step >= 0.99 * 10f64.powi(-digits)).unwrap_or(5);
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
        let text = escaped(text);
        self.push(&format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"));
    }

    fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
        self.push(&format!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
        ));
    }

    fn title(&mut self, y: f64, title: &str) {
        self.push("<g font-size=\"15\" font-weight=\"bold\">");
        self.text((LEFT, y), "start", title);
        self.push("</g>");
    }

    fn x_axis(&mut self, places: &Places, y: f64, name: &str) {
        self.line((LEFT, y), (WIDTH - RIGHT, y), "#333");
        for (text, place) in places.ticks() {
            self.line((place, y), (place, y + 5.0), "#333");
            self.text((place, y + 19.0), "middle", &text);
        }
        self.text(((LEFT + WIDTH - RIGHT) / 2.0, y + 40.0), "middle", name);
    }

    fn background(&mut self, x: &Places, end: f64, top: f64, kinds: &[(&str, &str)]) {
        if let Some((_, colour)) = kinds.last().filter(|_| end > 0.0) {
            let (start, width) = (x.place(0.0), x.place(end) - x.place(0.0));
            self.rect((start, width), top, &format!("fill=\"{colour}\"/>"));
        }
    }

    fn bar(&mut self, x: &Places, bar: &Bar, top: f64, kinds: &[(&str, &str)]) {
        let (start, end) = (x.place(bar.start), x.place(bar.end));
        let (width, (_, colour)) = ((end - start).max(0.5), kinds[bar.kind]);
        let opacity = if bar.pale { "0.6" } else { "1" };
        let hint = escaped(&bar.hint);
        let rest = format!(
            "fill=\"{colour}\" fill-opacity=\"{opacity}\" stroke=\"white\" stroke-width=\"0.5\"><title>{hint}</title></rect>"
        );
        self.rect((start, width), top, &rest);
        if !bar.text.is_empty() && width > 8.0 * bar.text.len() as f64 {
            self.text((start + width / 2.0, top + ROW / 2.0 + 4.0), "middle", &bar.text);
        }
    }

    fn rect(&mut self, (x, width): (f64, f64), top: f64, rest: &str) {
        let (y, height) = (top + 3.0, ROW - 6.0);
        self.push(&format!(
            "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.1}\" {rest}"
        ));
    }

    fn legend(&mut self, entries: &[(&str, &str)]) {
        let (mut x, mut y) = (LEFT, 34.0);
        for (name, colour) in entries {
            let width = 40.0 + 6.6 * name.chars().count() as f64;
            if x > LEFT && x + width > WIDTH {
                (x, y) = (LEFT, y + 14.0);
            }
            let _ = writeln!(
                self.0,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
            );
            self.text((x + 17.0, y + 10.0), "start", name);
            x += width;
        }
    }

    fn finish(mut self) -> String {
        self.push("</svg>");
        self.0
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 66.0;
const BOTTOM: f64 = 52.0;
const ROW: f64 = 28.0;
const TITLE: f64 = 28.0;
/// The rounding error of a logarithm.
const NEARLY: f64 = 1e-9;
const COLOURS: [&str; 8] =
    ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#72b7b2", "#7f7f7f", "#eeca3b"];

#[cfg(test)]
mod tests {
    use super::*;

    fn powers_of_two() -> Scale<'static> {
        Scale::Logarithmic { base: 2.0, text: |value| value.to_string() }
    }

    #[test]
    fn an_axis_has_round_numbers_and_room_for_every_value() {
        let rows: [(Scale<'_>, &[f64], &str); 8] = [
            (Scale::Linear(&[]), &[0.0, 99.0], "0 20 40 60 80 100"),
            (Scale::Linear(&[]), &[2.31, 5.54], "2 3 4 5 6"),
            (Scale::Linear(&[]), &[1.0, f64::NAN], "1.0 1.2 1.4 1.6 1.8 2.0"),
            (Scale::Linear(&[]), &[0.001, 0.0042], "0.001 0.002 0.003 0.004 0.005"),
            (Scale::Linear(&[]), &[], "0.0 0.2 0.4 0.6 0.8 1.0"),
            (Scale::Linear(&[0.0, 100.0]), &[60.0, 70.0], "0 20 40 60 80 100"),
            (powers_of_two(), &[1.0, 8.0], "1 2 4 8"),
            (powers_of_two(), &[3.0, 4096.0], "2 8 32 128 512 2048"),
        ];
        for (scale, values, expected) in rows {
            let axis = Places::new(scale, values.iter().copied(), (10.0, 110.0));
            let ticks: Vec<_> = axis.ticks().map(|(text, _)| text).collect();
            assert_eq!(ticks.join(" "), expected, "{values:?}");
            let finite = values.iter().filter(|value| value.is_finite());
            assert!(finite.into_iter().all(|&value| (9.99..=110.01).contains(&axis.place(value))));
        }
    }

    #[test]
    fn a_chart_has_every_finite_point_and_escapes_its_text() {
        let points = vec![(1.0, 1.0), (2.0, f64::NAN), (4.0, 3.0)];
        let curves = vec![
            Curve { label: "a < b & c", style: LineStyle::Dashed("#123456"), points: points.clone() },
            Curve { label: "none", style: LineStyle::Plain, points: Vec::new() },
        ];
        let x = Axis { label: "x", scale: powers_of_two() };
        let chart = Chart { title: "t", x, y: Axis { label: "y", scale: Scale::Linear(&[]) }, curves };
        let chart = chart.to_string();
        let path = chart.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!(path.split(' ').collect::<Vec<_>>(), ["76.0,408.0", "836.0,66.0"]);
        assert!(chart.contains("a &lt; b &amp; c") && chart.contains("stroke-dasharray"), "{chart}");
        assert!(!chart.contains("NaN") && !chart.contains("inf"), "{chart}");
    }

    #[test]
    fn every_bar_has_a_hint_and_wide_ones_a_text() {
        let bar = |kind, start, end| {
            let (text, hint) = ("7".to_owned(), format!("<{kind}>"));
            Bar { kind, start, end, pale: kind == 1, text, hint }
        };
        let panel = |title| BarPanel {
            title,
            rows: vec![
                ("rank 0".to_owned(), vec![bar(0, 0.0, 500.0), bar(1, 500.0, 501.0)]),
                ("rank 1".to_owned(), Vec::new()),
            ],
            background: 501.0,
        };
        let kinds = &[("compute", "#111111"), ("wait", "#222222")];
        let chart = BarChart { x_label: "ms", kinds, panels: vec![panel("one"), panel("two")] }.to_string();
        assert_eq!(chart.matches("<title>&lt;0>").count(), 2);
        assert_eq!(chart.matches("<title>").count(), 4);
        assert_eq!(chart.matches(">7</text>").count(), 2);
        assert_eq!(chart.matches("fill-opacity=\"0.6\"").count(), 2);
        assert!(chart.contains(">rank 1<") && chart.contains(">two<"));
        let nothing = BarPanel { title: "nothing", rows: vec![(String::new(), Vec::new())], background: 0.0 };
        let chart = BarChart { x_label: "ms", kinds, panels: vec![nothing] }.to_string();
        assert!(!chart.contains("NaN") && !chart.contains("inf"), "{chart}");
    }
}
