//! A fit of a network model to measurements.

use dist_predict::{LinkModel, MessageCosts};

use super::model::Model;

/// The start of the search, in seconds unless stated. The link: latency, time per byte. The work: send, receive,
/// time per byte, reduction. Then the factor of the work beyond the cache, and the bytes of a message that count
/// twice. At last the time of a send after its message has left, and the time of a collective in addition to its
/// messages.
const START: [f64; UNKNOWNS] = [1e-6, 0.1e-9, 1e-6, 2e-6, 0.1e-9, 0.1e-9, 1.5, 65_536.0, 1e-6, 1e-7];
const UNKNOWNS: usize = 10;

/// Cost of a distance from the start, added to the squared errors. Parameters that no measurement depends on
/// keep their start.
const INERTIA: f64 = 1e-4;

/// Parameters that are given and not fitted.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct GivenParameters {
    /// The number of cores that the ranks share.
    pub(super) cores: Option<usize>,
    /// The time in which a core reduces a byte, in seconds.
    pub(super) reduce: Option<f64>,
    /// `true` if messages are in memory that the ranks share.
    pub(super) shared: bool,
}

/// Returns the model with the smallest sum of squared relative errors, which `error` computes.
pub(super) fn fit(known: GivenParameters, error: impl Fn(&Model) -> f64) -> Model {
    let model = |point: &Point| model(point, known);
    model(&search(START, |point| error(&model(point))))
}

/// Searches for the point with the least cost. All coordinates are positive.
pub(super) fn search<const N: usize>(start: [f64; N], cost: impl Fn(&[f64; N]) -> f64) -> [f64; N] {
    let start = start.map(f64::ln);
    let cost = |point: &[f64; N]| {
        let moved: f64 = point.iter().zip(start).map(|(a, b)| (a - b).powi(2)).sum();
        cost(&point.map(f64::exp)) + INERTIA * moved
    };
    let mut best = start;
    // The search is restarted at its result, because a simplex can collapse too early.
    for _ in 0..RESTARTS {
        best = descend(best, &cost);
    }
    best.map(f64::exp)
}

const RESTARTS: usize = 3;
const MOVES: usize = 400;

type Point = [f64; UNKNOWNS];

fn model(point: &Point, known: GivenParameters) -> Model {
    let [latency, byte, send, receive, copy, reduce, far, twice, sent, call] = *point;
    let GivenParameters { cores, shared, .. } = known;
    let reduce = known.reduce.unwrap_or(reduce);
    Model {
        link: LinkModel { latency, byte },
        work: MessageCosts { send, sent, receive, byte: copy, reduce, twice: bytes(twice), shared },
        far,
        call,
        cores,
        ..Model::default()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the size of a message is neither negative nor long"
)]
fn bytes(size: f64) -> u64 {
    size.round() as u64
}

/// Nelder and Mead, "A simplex method for function minimization", 1965.
fn descend<const N: usize>(start: [f64; N], cost: &impl Fn(&[f64; N]) -> f64) -> [f64; N] {
    let mut simplex: Vec<(f64, [f64; N])> = vec![(cost(&start), start)];
    for axis in 0..N {
        let mut point = start;
        point[axis] += 0.7;
        simplex.push((cost(&point), point));
    }
    for _ in 0..MOVES {
        simplex.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (worst_cost, worst) = simplex[N];
        let mut centre = [0.0; N];
        for (_, point) in &simplex[..N] {
            for axis in 0..N {
                centre[axis] += point[axis] / N as f64;
            }
        }
        let along = |factor: f64| {
            let mut point = centre;
            for axis in 0..N {
                point[axis] += factor * (worst[axis] - centre[axis]);
            }
            (cost(&point), point)
        };
        let reflected = along(-1.0);
        let next = if reflected.0 < simplex[0].0 {
            let expanded = along(-2.0);
            if expanded.0 < reflected.0 { expanded } else { reflected }
        } else if reflected.0 < simplex[N - 1].0 {
            reflected
        } else {
            along(if reflected.0 < worst_cost { -0.5 } else { 0.5 })
        };
        if next.0 < worst_cost {
            simplex[N] = next;
            continue;
        }
        // No point on this line is better: shrink the simplex towards the best point.
        let best = simplex[0].1;
        for entry in &mut simplex[1..] {
            for (place, best) in entry.1.iter_mut().zip(best) {
                *place = f64::midpoint(*place, best);
            }
            entry.0 = cost(&entry.1);
        }
    }
    simplex.sort_by(|a, b| a.0.total_cmp(&b.0));
    simplex[0].1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_behind_the_times_is_fitted() {
        let truth = [40e-6, 0.8e-9, 3e-6, 1e-6, 0.3e-9, 0.05e-9, 2.0, 30_000.0, 5e-6, 2e-6];
        let times = |model: &Model| {
            let Model { link, work, .. } = model;
            let of = |bytes: f64| {
                [
                    link.latency + work.send + work.receive + bytes * link.byte,
                    work.send + work.receive + bytes * work.byte,
                    work.send,
                    work.send + work.sent,
                    bytes * work.reduce + work.send,
                    bytes * work.byte * model.far,
                    work.twice as f64,
                    model.call,
                ]
            };
            [of(8.0), of(1e3), of(1e6)].concat()
        };
        let known = GivenParameters { cores: Some(2), ..GivenParameters::default() };
        let measured = times(&model(&truth, known));
        let found =
            fit(known, |model| times(model).iter().zip(&measured).map(|(a, b)| (a / b).ln().powi(2)).sum());
        let Model { link, work, cores, .. } = found;
        let MessageCosts { send, sent, receive, byte, reduce, twice, .. } = work;
        let got =
            [link.latency, link.byte, send, receive, byte, reduce, found.far, twice as f64, sent, found.call];
        for (got, truth) in got.iter().zip(truth) {
            assert!((got / truth - 1.0).abs() < 0.05, "{got} for {truth}");
        }
        assert_eq!(cores, Some(2));
    }

    #[test]
    fn unused_parameters_keep_their_start_and_known_parameters_are_not_fitted() {
        let reduce = GivenParameters { reduce: Some(3e-9), ..GivenParameters::default() };
        let known = fit(reduce, |model| (model.work.reduce / 1e-9).ln().powi(2));
        assert_eq!(known.work.reduce, 3e-9);
        let found = fit(GivenParameters::default(), |model| (model.link.latency / 1e-3).ln().powi(2));
        assert!((found.link.latency / 1e-3 - 1.0).abs() < 0.01, "{found:?}");
        assert!((found.work.reduce / START[5] - 1.0).abs() < 0.2, "{found:?}");
    }
}
