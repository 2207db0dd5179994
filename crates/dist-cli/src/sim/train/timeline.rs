//! The timeline of a step: computation and collectives.

use std::collections::HashMap;

use dist_predict::Prediction;

use super::memory::TrainedModel;
use super::{Operation, Strategy, World};
use crate::Error;

/// The prediction of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Step {
    pub(super) seconds: f64,
    /// Time of all collectives, overlapped or not.
    pub(super) communication: f64,
    pub(super) collectives: usize,
    pub(super) sent_max: u64,
}

/// The collectives of a step. Equal ones are predicted once.
pub(super) struct Collectives<'a> {
    predict: &'a dyn Fn(&World, Operation, usize) -> Result<Prediction, Error>,
    /// The ranks that share one copy of the shards, and the ranks of the reduction across hosts, if those are
    /// different.
    world: &'a World,
    across: Option<&'a World>,
    known: HashMap<(bool, &'static str, usize), Prediction>,
    /// The end of the last collective.
    free: f64,
    step: Step,
}

impl<'a> Collectives<'a> {
    pub(super) fn new(
        predict: &'a dyn Fn(&World, Operation, usize) -> Result<Prediction, Error>,
        (world, across): (&'a World, Option<&'a World>),
    ) -> Self {
        Self { predict, world, across, known: HashMap::new(), free: 0.0, step: Step::default() }
    }

    /// Runs a collective as soon as its data is ready. Returns its end. `bytes` is the size of the whole
    /// buffer.
    fn run(&mut self, operation: Operation, bytes: u64, ready: f64) -> Result<f64, Error> {
        self.run_in(false, operation, bytes, ready)
    }

    fn run_in(&mut self, across: bool, operation: Operation, bytes: u64, ready: f64) -> Result<f64, Error> {
        let world = if across { self.across } else { Some(self.world) };
        let Some(world) = world.filter(|world| world.ranks() > 1) else { return Ok(ready) };
        // The input of each rank; for an all_gather, its part.
        let parts = if operation == Operation::AllGather { world.ranks() as u64 } else { 1 };
        let input = usize::try_from(bytes.div_ceil(parts)).unwrap_or(usize::MAX);
        let key = (across, operation.name(), input);
        let prediction = match self.known.get(&key) {
            Some(known) => *known,
            None => *self.known.entry(key).or_insert((self.predict)(world, operation, input)?),
        };
        self.free = self.free.max(ready) + prediction.seconds;
        self.step.communication += prediction.seconds;
        self.step.collectives += 1;
        self.step.sent_max += prediction.sent_max;
        Ok(self.free)
    }
}

/// The micro-batches of a rank's step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rounds {
    pub(super) count: u32,
    /// Computing time of each, in seconds.
    pub(super) compute: f64,
}

/// Predicts a step.
pub(super) fn step(
    strategy: Strategy,
    model: &TrainedModel,
    bucket_bytes: u64,
    rounds: Rounds,
    mut collectives: Collectives<'_>,
) -> Result<Step, Error> {
    let ends = match strategy {
        Strategy::Ddp | Strategy::Zero1 | Strategy::Zero2 => {
            by_bucket(strategy, model, bucket_bytes, rounds, &mut collectives)?
        }
        Strategy::Fsdp | Strategy::Hybrid => by_unit(model, rounds, &mut collectives)?,
    };
    Ok(Step { seconds: ends, ..collectives.step })
}

/// Returns the maximum number of collectives in a step, which limits the time of the prediction.
pub(super) fn collectives(
    strategy: Strategy,
    model: &TrainedModel,
    bucket_bytes: u64,
    micro_batches: u32,
) -> u64 {
    let (buckets, rounds) = (model.bytes().div_ceil(bucket(model, bucket_bytes)), u64::from(micro_batches));
    match strategy {
        Strategy::Ddp => buckets,
        Strategy::Zero1 => 2 * buckets,
        Strategy::Zero2 => buckets.saturating_mul(rounds + 1),
        // Gathered twice and reduced once in each micro-batch, and reduced across hosts once more.
        Strategy::Fsdp | Strategy::Hybrid => model.units.saturating_mul(3 * rounds + 1),
    }
}

/// Returns the bytes of a bucket: at least an element, and at most all bytes.
fn bucket(model: &TrainedModel, bucket_bytes: u64) -> u64 {
    bucket_bytes.clamp(model.element_bytes(), model.bytes())
}

/// Fraction of the computing time that is forward.
const FORWARD: f64 = 1.0 / 3.0;

/// Predicts strategies that reduce gradients bucket by bucket while they are computed at a constant rate. The
/// buckets of the last micro-batch hold the sum of all micro-batches; with sharded gradients, every
/// micro-batch is reduced. With a sharded optimizer state, the parameters are gathered at the end.
fn by_bucket(
    strategy: Strategy,
    model: &TrainedModel,
    bucket_bytes: u64,
    Rounds { count, compute }: Rounds,
    collectives: &mut Collectives<'_>,
) -> Result<f64, Error> {
    let (bytes, bucket) = (model.bytes(), bucket(model, bucket_bytes));
    let operation = if strategy == Strategy::Ddp { Operation::AllReduce } else { Operation::ReduceScatter };
    let mut ends = f64::from(count) * compute;
    for round in if strategy == Strategy::Zero2 { 0..count } else { count - 1..count } {
        let mut done = 0;
        while done < bytes {
            let size = bucket.min(bytes - done);
            done += size;
            let part = FORWARD + (1.0 - FORWARD) * done as f64 / bytes as f64;
            ends = ends.max(collectives.run(operation, size, compute * (f64::from(round) + part))?);
        }
    }
    if strategy != Strategy::Ddp {
        let mut left = bytes;
        while left > 0 {
            let size = bucket.min(left);
            left -= size;
            ends = collectives.run(Operation::AllGather, size, ends)?;
        }
    }
    Ok(ends)
}

/// Predicts strategies that gather parameters unit by unit, one ahead of the computation. In every
/// micro-batch, units are gathered for the forward and again for the backward, except the last unit, which
/// stays. Gradients are reduced after their computation. If shards are spread only within a host, the
/// gradients are also reduced across hosts after the last micro-batch.
fn by_unit(
    model: &TrainedModel,
    Rounds { count, compute }: Rounds,
    collectives: &mut Collectives<'_>,
) -> Result<f64, Error> {
    let (units, bytes) = (model.units, model.unit_bytes());
    let (forward, backward) = (compute * FORWARD / units as f64, compute * (1.0 - FORWARD) / units as f64);
    let (mut now, mut ends) = (0.0_f64, 0.0_f64);
    for round in 0..count {
        let mut gathered = collectives.run(Operation::AllGather, bytes, now)?;
        for unit in 0..units {
            let begins = gathered.max(now);
            if unit + 1 < units {
                gathered = collectives.run(Operation::AllGather, bytes, begins)?;
            }
            now = begins + forward;
        }
        for unit in (0..units).rev() {
            let begins = gathered.max(now);
            if unit > 0 {
                gathered = collectives.run(Operation::AllGather, bytes, begins)?;
            }
            now = begins + backward;
            ends = ends.max(collectives.run(Operation::ReduceScatter, bytes, now)?);
            if collectives.across.is_some() && round + 1 == count {
                let part = bytes.div_ceil(collectives.world.ranks() as u64);
                ends = ends.max(collectives.run_in(true, Operation::AllReduce, part, ends)?);
            }
        }
    }
    Ok(now.max(ends))
}
