//! A picture of bandwidth over size, both logarithmic, as SVG text.

use std::fmt;

/// Lines over two logarithmic axes: bytes, and GB/s.
#[derive(Debug)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) curves: Vec<Curve>,
}

/// One library's line.
#[derive(Debug)]
pub(super) struct Curve {
    pub(super) label: String,
    /// Ours is drawn thicker.
    pub(super) ours: bool,
    pub(super) points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;
/// A whole power's logarithm may come out so far beside it.
const NEARLY: f64 = 1e-9;
const OUR_COLOUR: &str = "#c1272d";
const COLOURS: [&str; 7] = ["#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f"];

/// Where a value lies on one of the axes, whose ends are whole powers.
struct Axis {
    base: f64,
    powers: (f64, f64),
    places: (f64, f64),
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, base: f64, places: (f64, f64)) -> Self {
        let logs: Vec<f64> = values.map(|value| value.log(base)).collect();
        let low = (logs.iter().copied().fold(f64::INFINITY, f64::min) + NEARLY).floor();
        let high = (logs.iter().copied().fold(f64::NEG_INFINITY, f64::max) - NEARLY).ceil();
        Self { base, powers: (low, high.max(low + 1.0)), places }
    }

    fn place(&self, value: f64) -> f64 {
        let ((low, high), (start, end)) = (self.powers, self.places);
        start + (value.log(self.base) - low) / (high - low) * (end - start)
    }

    /// The whole powers, and where they lie.
    fn ticks(&self) -> impl Iterator<Item = (f64, f64)> {
        let (low, high) = self.powers;
        let powers = std::iter::successors(Some(low), move |&power| (power < high).then_some(power + 1.0));
        powers.map(|power| self.base.powf(power)).map(|value| (value, self.place(value)))
    }
}

impl fmt::Display for Chart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let x = Axis::over(points().map(|(x, _)| *x), 8.0, (LEFT, WIDTH - RIGHT));
        let y = Axis::over(points().map(|(_, y)| *y), 10.0, (HEIGHT - BOTTOM, TOP));
        writeln!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">"#
        )?;
        writeln!(f, r#"<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#)?;
        text(
            f,
            (LEFT, 24.0),
            "start",
            &format!("{}: bus bandwidth in GB/s over bytes of each rank's input", self.title),
        )?;
        for (value, place) in x.ticks() {
            line(f, (place, TOP), (place, HEIGHT - BOTTOM))?;
            text(f, (place, HEIGHT - BOTTOM + 18.0), "middle", &size(value))?;
        }
        for (value, place) in y.ticks() {
            line(f, (LEFT, place), (WIDTH - RIGHT, place))?;
            text(f, (LEFT - 8.0, place + 4.0), "end", &value.to_string())?;
        }
        let mut colours = COLOURS.iter().cycle();
        let mut ends = Vec::new();
        for curve in &self.curves {
            let (colour, width) =
                if curve.ours { (OUR_COLOUR, 3) } else { (*colours.next().expect("a cycle has no end"), 1) };
            let path: Vec<_> =
                curve.points.iter().map(|&(a, b)| format!("{:.1},{:.1}", x.place(a), y.place(b))).collect();
            writeln!(
                f,
                r#"<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{}"/>"#,
                path.join(" ")
            )?;
            ends.extend(curve.points.last().map(|&(_, b)| (y.place(b), &*curve.label, colour)));
        }
        labels(f, ends)?;
        writeln!(f, "</svg>")
    }
}

/// The names of lines beside their ends, none upon another.
fn labels(f: &mut fmt::Formatter<'_>, mut ends: Vec<(f64, &str, &str)>) -> fmt::Result {
    ends.sort_by(|(left, ..), (right, ..)| left.total_cmp(right));
    let mut free = 0.0;
    for (place, label, colour) in ends {
        let place = place.max(free);
        free = place + 15.0;
        let x = WIDTH - RIGHT + 8.0;
        writeln!(f, r#"<text x="{x}" y="{:.1}" fill="{colour}">{label}</text>"#, place + 4.0)?;
    }
    Ok(())
}

fn line(f: &mut fmt::Formatter<'_>, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) -> fmt::Result {
    writeln!(f, r##"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" stroke="#e4e4e4"/>"##)
}

fn text(f: &mut fmt::Formatter<'_>, (x, y): (f64, f64), anchor: &str, text: &str) -> fmt::Result {
    writeln!(f, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{text}</text>"#)
}

fn size(bytes: f64) -> String {
    match bytes {
        ..1024.0 => format!("{bytes} B"),
        ..1_048_576.0 => format!("{} KiB", bytes / 1024.0),
        _ => format!("{} MiB", bytes / 1_048_576.0),
    }
}
