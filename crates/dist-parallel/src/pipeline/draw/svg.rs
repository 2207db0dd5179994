//! Timelines as SVG.

use std::fmt::Write as _;

use crate::pipeline::{Action, Span, Timeline};

/// One timeline of a picture.
#[derive(Debug, Clone, Copy)]
pub struct Panel<'a> {
    /// The title above it.
    pub title: &'a str,
    /// The timeline.
    pub timeline: &'a Timeline,
}

/// Returns an SVG with timelines below one another, on one time scale. Each rank is a row and each computation a bar
/// with its micro-batch. Bubbles are grey. The bars of a rank's later stages are paler.
pub fn svg(panels: &[Panel<'_>]) -> String {
    let makespan = panels.iter().map(|panel| panel.timeline.makespan().as_secs_f64()).fold(0.0, f64::max);
    let rows: usize = panels.iter().map(|panel| panel.timeline.ranks.len()).sum();
    let height = TOP + ROW * rows as f64 + (TITLE + GAP) * panels.len() as f64 + BOTTOM;
    let scale = if makespan > 0.0 { (WIDTH - LEFT - RIGHT) / makespan } else { 0.0 };
    let mut picture = Picture { text: String::new(), scale };
    picture.push(&format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" width=\"{WIDTH}\" \
         height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    ));
    picture.legend();
    let mut top = TOP;
    for panel in panels {
        top = picture.panel(panel, top) + GAP;
    }
    picture.axis(makespan, top);
    picture.text + "</svg>\n"
}

struct Picture {
    text: String,
    /// The factor from seconds to the picture's units.
    scale: f64,
}

impl Picture {
    fn push(&mut self, element: &str) {
        let _ = writeln!(self.text, "{element}");
    }

    fn words(&mut self, (x, y): (f64, f64), anchor: &str, words: &str) {
        let words = words.replace('&', "&amp;").replace('<', "&lt;");
        self.push(&format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>"));
    }

    /// Draws a panel below `top` and returns its lower end.
    fn panel(&mut self, panel: &Panel<'_>, top: f64) -> f64 {
        self.words((LEFT, top + TITLE - 7.0), "start", panel.title);
        let end = self.scale * panel.timeline.makespan().as_secs_f64();
        let mut top = top + TITLE;
        for (rank, spans) in panel.timeline.ranks.iter().enumerate() {
            self.words((LEFT - 8.0, top + ROW / 2.0 + 4.0), "end", &format!("rank {rank}"));
            self.push(&format!(
                "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{end:.2}\" height=\"{:.1}\" fill=\"#e8e8e8\"/>",
                top + 2.0,
                ROW - 4.0
            ));
            let first = spans.iter().map(|span| span.action.stage()).min();
            for span in spans {
                self.bar(span, first == Some(span.action.stage()), top);
            }
            top += ROW;
        }
        top
    }

    fn bar(&mut self, span: &Span, of_first_stage: bool, top: f64) {
        let (start, end) = (span.start.as_secs_f64(), span.end.as_secs_f64());
        let (x, width) = (LEFT + self.scale * start, (self.scale * (end - start)).max(0.5));
        let (_, colour) = LEGEND[entry(span.action)];
        let opacity = if of_first_stage { "1" } else { "0.6" };
        self.push(&format!(
            "<rect x=\"{x:.2}\" y=\"{:.1}\" width=\"{width:.2}\" height=\"{:.1}\" fill=\"{colour}\" \
             fill-opacity=\"{opacity}\" stroke=\"white\" stroke-width=\"0.5\"><title>{} from {:.3} ms to {:.3} ms</title></rect>",
            top + 2.0,
            ROW - 4.0,
            span.action,
            1e3 * start,
            1e3 * end,
        ));
        if let Some(number) = span.action.micro_batch().map(|index| index.to_string())
            && width > 8.0 * number.len() as f64
        {
            self.words((x + width / 2.0, top + ROW / 2.0 + 4.0), "middle", &number);
        }
    }

    fn legend(&mut self) {
        let mut x = LEFT;
        for (name, colour) in LEGEND {
            self.push(&format!("<rect x=\"{x:.1}\" y=\"12\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"));
            self.words((x + 17.0, 22.0), "start", name);
            x += 40.0 + 6.6 * name.len() as f64;
        }
    }

    /// Draws the time axis below everything, with about eight round numbers.
    fn axis(&mut self, makespan: f64, y: f64) {
        let (unit, name) = [(1e-6, "microseconds"), (1e-3, "milliseconds"), (1.0, "seconds")]
            .into_iter()
            .rev()
            .find(|(unit, _)| makespan >= *unit)
            .unwrap_or((1e-6, "microseconds"));
        let rough = (makespan / unit / 8.0).max(f64::MIN_POSITIVE);
        let magnitude = 10f64.powf(rough.log10().floor());
        let step =
            [1.0, 2.0, 5.0, 10.0].map(|factor| factor * magnitude).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * magnitude);
        for value in
            (0u32..=20).map(|count| f64::from(count) * step).take_while(|value| value * unit <= makespan)
        {
            let x = LEFT + self.scale * value * unit;
            self.push(&format!(
                "<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#333\"/>",
                y + 5.0
            ));
            let digits = if step < 1.0 { 1 } else { 0 };
            self.words((x, y + 19.0), "middle", &format!("{value:.digits$}"));
        }
        self.words((LEFT + (WIDTH - LEFT - RIGHT) / 2.0, y + 38.0), "middle", name);
    }
}

/// Returns the index of the colour of an action.
const fn entry(action: Action) -> usize {
    match action {
        Action::Forward(_) => 0,
        Action::Backward(_) => 1,
        Action::InputGradient(_) => 2,
        _ => 3,
    }
}

const LEGEND: [(&str, &str); 5] = [
    ("forward", "#8ab4e0"),
    ("backward", "#7fc8a9"),
    ("gradient of the input", "#a7d489"),
    ("gradients of parameters", "#f0c36d"),
    ("bubble", "#e8e8e8"),
];
const WIDTH: f64 = 1000.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 48.0;
const ROW: f64 = 28.0;
const TITLE: f64 = 26.0;
const GAP: f64 = 8.0;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::pipeline::{Costs, ScheduleKind, StageCost};

    #[test]
    fn every_computation_is_a_bar_and_titles_are_escaped() {
        let unit = Duration::from_millis(1);
        let stage = StageCost { forward: unit, input_gradient: unit, weight_gradient: unit };
        let schedule = ScheduleKind::Zbv.schedule(2, 3).unwrap();
        let timeline = Timeline::predict(&schedule, &Costs::uniform(4, stage));
        let panel = Panel { title: "predicted < measured", timeline: &timeline };
        let picture = svg(&[panel, panel]);
        // F, I and W of 3 micro-batches in 4 stages, in two panels.
        assert_eq!(picture.matches("<title>").count(), 2 * 3 * 3 * 4);
        assert_eq!(picture.matches("predicted &lt; measured").count(), 2);
        assert!(picture.ends_with("</svg>\n") && picture.contains(">milliseconds<"));
    }

    #[test]
    fn nothing_can_be_drawn() {
        let timeline = Timeline { ranks: vec![Vec::new()] };
        let picture = svg(&[Panel { title: "nothing", timeline: &timeline }]);
        assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
    }
}
