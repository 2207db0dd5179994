//! Timelines as SVG.

use crate::picture::{Bar, BarChart, BarPanel};
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
    let units = [(1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds")];
    let (unit, x_label) = units.into_iter().find(|(unit, _)| makespan >= *unit).unwrap_or(units[2]);
    let panels = panels.iter().map(|panel| BarPanel {
        title: panel.title,
        rows: panel.timeline.ranks.iter().enumerate().map(|(rank, spans)| row(rank, spans, unit)).collect(),
        background: panel.timeline.makespan().as_secs_f64() / unit,
    });
    BarChart { x_label, kinds: &LEGEND, panels: panels.collect() }.to_string()
}

/// Returns the row of a rank.
fn row(rank: usize, spans: &[Span], unit: f64) -> (String, Vec<Bar>) {
    let first = spans.iter().map(|span| span.action.stage()).min();
    let bars = spans.iter().map(|span| {
        let (start, end) = (span.start.as_secs_f64(), span.end.as_secs_f64());
        Bar {
            kind: entry(span.action),
            start: start / unit,
            end: end / unit,
            pale: first != Some(span.action.stage()),
            text: span.action.micro_batch().map_or_else(String::new, |index| index.to_string()),
            hint: format!("{} from {:.3} ms to {:.3} ms", span.action, 1e3 * start, 1e3 * end),
        }
    });
    (format!("rank {rank}"), bars.collect())
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
