//! The timeline of a step on every rank.

use std::time::Duration;

use candle_core::Tensor;
use dist_collectives::{Communicator, Result};
use dist_parallel::internal::{self, BarChart, BarPanel};
use dist_parallel::pipeline::{Costs, Panel, Pipeline, Timeline, svg};

/// The kinds of bars in the picture, and their colours.
const KINDS: [(&str, &str); 4] = [
    ("forward", "#4c78a8"),
    ("backward", "#72b7b2"),
    ("waiting for communication", "#e45756"),
    ("optimizer", "#eeca3b"),
];
pub(crate) const FORWARD: usize = 0;
pub(crate) const BACKWARD: usize = 1;
pub(crate) const WAITING: usize = 2;
pub(crate) const OPTIMIZER: usize = 3;

/// A part of a step on one rank, in milliseconds since the step began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bar {
    kind: usize,
    start: f64,
    end: f64,
}

/// The parts of one step on one rank. Each ends when the next begins.
#[derive(Debug, Default, Clone)]
pub(crate) struct Trace {
    parts: Vec<(usize, Duration)>,
    end: Duration,
}

impl Trace {
    /// Begins a part of this kind, and ends the previous part.
    pub(crate) fn begin(&mut self, kind: usize, now: Duration) {
        self.parts.push((kind, now));
    }

    pub(crate) fn end(&mut self, now: Duration) {
        self.end = now;
    }

    fn bars(&self) -> impl Iterator<Item = Bar> {
        let origin = self.parts.first().map_or(self.end, |&(_, start)| start);
        let place = move |time: Duration| 1e3 * time.saturating_sub(origin).as_secs_f64();
        let ends = self.parts.iter().skip(1).map(|&(_, start)| start).chain([self.end]);
        self.parts.iter().zip(ends).map(move |(&(kind, start), end)| Bar {
            kind,
            start: place(start),
            end: place(end),
        })
    }
}

/// Gathers the bars of every rank on every rank. `parts_max` is the largest number of parts of a rank, and the same
/// on every rank. All ranks began at about the same time, so each trace begins at 0.
pub(crate) fn gather(comm: &mut Communicator, trace: &Trace, parts_max: usize) -> Result<Vec<Vec<Bar>>> {
    // Three numbers per bar. Missing bars are NaN.
    let mut own = vec![f64::NAN; 3 * parts_max];
    for (bar, place) in trace.bars().zip(own.chunks_exact_mut(3)) {
        place.copy_from_slice(&[bar.kind as f64, bar.start, bar.end]);
    }
    let mut all = vec![0.0; own.len() * comm.world_size()];
    comm.all_gather(&own, &mut all)?;
    let bar = |numbers: &[f64]| {
        let kind = (0..KINDS.len()).find(|&kind| kind as f64 == numbers[0])?;
        Some(Bar { kind, start: numbers[1], end: numbers[2] })
    };
    Ok(all.chunks_exact(own.len()).map(|rank| rank.chunks_exact(3).filter_map(bar).collect()).collect())
}

/// Draws the bars of every rank.
pub(crate) fn timeline(title: &str, ranks: Vec<Vec<Bar>>) -> String {
    let bar = |Bar { kind, start, end }| {
        let (text, hint) = (String::new(), KINDS[kind].0.to_owned());
        internal::Bar { kind, start, end, pale: false, text, hint }
    };
    let row = |(rank, bars): (usize, Vec<Bar>)| (format!("rank {rank}"), bars.into_iter().map(bar).collect());
    let panel = BarPanel { title, rows: ranks.into_iter().enumerate().map(row).collect(), background: 0.0 };
    let x_label = "milliseconds since the step began";
    BarChart { x_label, kinds: &KINDS, panels: vec![panel] }.to_string()
}

/// Draws the measured timeline of a pipeline's last step, and the one predicted from the measured computations.
pub(crate) fn pipeline(pipeline: &mut Pipeline<Tensor>) -> dist_parallel::Result<String> {
    let measured = pipeline.timeline()?;
    let schedule = pipeline.schedule();
    let costs = Costs::new(measured.stage_costs(schedule.stages()));
    let predicted = Timeline::predict(schedule, &costs);
    let title = |what: &str, timeline: &Timeline| {
        let milliseconds = 1e3 * timeline.makespan().as_secs_f64();
        format!("{what}: {milliseconds:.1} ms, bubble {:.2}", timeline.bubble())
    };
    let titles = [title("as measured", &measured), title("as predicted", &predicted)];
    let panels =
        [Panel { title: &titles[0], timeline: &measured }, Panel { title: &titles[1], timeline: &predicted }];
    Ok(svg(&panels))
}
