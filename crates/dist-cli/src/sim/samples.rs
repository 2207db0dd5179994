//! Calls as a benchmark measures them: after a barrier, on every rank by its own clock, and the slowest rank counts.
//!
//! Ranks do not leave a barrier at the same time: on a long link, one may wait for as long as a message takes until the
//! others begin. With few calls to a sample that is a part of what is measured.

use std::ops::Range;

use dist_algos::predict::{Network, Plan, Straggler, timeline};
use dist_algos::{Barrier, Partition, Result, Step};
use dist_transport::Rank;

/// Calls before the first sample, as `distctl bench` makes them.
const WARM_UPS: usize = 3;

/// How many samples there are, of which the median is taken.
const SAMPLES: usize = 4;

/// By how many seconds the last rank is late at first: processes are not started at the same time.
const LATE: f64 = 1.0;

/// Predicts what is measured as the time of one of `calls`, each of these steps with the next root.
pub(super) fn predict<I: Iterator<Item = Step>>(
    steps: impl Fn(Rank, usize) -> I + Copy,
    buffer: Partition<'_>,
    network: &Network,
    calls: usize,
) -> Result<f64> {
    let world_size = network.world_size();
    let call = move |rank: Rank, number: usize| steps(rank, number % world_size);
    let barrier = |rank: Rank| Barrier::Dissemination.schedule(rank);
    let numbers = move |sample: usize| WARM_UPS + sample * calls..WARM_UPS + (sample + 1) * calls;
    let all = |rank: Rank| {
        // After warming up, ranks agree on how many calls they make.
        let warm_up = (0..WARM_UPS).flat_map(move |number| call(rank, number)).chain(barrier(rank));
        let sample =
            move |sample| barrier(rank).chain(numbers(sample).flat_map(move |number| call(rank, number)));
        warm_up.chain((0..SAMPLES).flat_map(sample))
    };
    let late = Straggler { rank: world_size - 1, late: LATE, pace: 1.0 };
    let plan = Plan { steps: all, buffer, input: Some(buffer) };
    let times = timeline(&plan, &network.clone().with_straggler(late))?;
    let mut slowest = [0.0_f64; SAMPLES];
    for (rank, times) in Rank::all(world_size).zip(times) {
        let steps_of =
            |numbers: Range<usize>| numbers.map(|number| call(rank, number).count()).sum::<usize>();
        let mut at = steps_of(0..WARM_UPS) + barrier(rank).count();
        for (sample, slowest) in slowest.iter_mut().enumerate() {
            let begins = at + barrier(rank).count();
            at = begins + steps_of(numbers(sample));
            *slowest = slowest.max(times[at] - times[begins]);
        }
    }
    slowest.sort_by(f64::total_cmp);
    Ok(f64::midpoint(slowest[SAMPLES / 2 - 1], slowest[SAMPLES / 2]) / calls as f64)
}
