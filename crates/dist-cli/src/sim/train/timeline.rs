//! When a step computes, and when it sends.

use std::collections::HashMap;

use dist_algos::predict::Prediction;

use super::memory::Model;
use super::{Operation, Strategy, World};
use crate::Error;

/// What came out.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Step {
    pub(super) seconds: f64,
    /// Of all collectives, whether something is computed meanwhile or not.
    pub(super) communication: f64,
    pub(super) collectives: usize,
    pub(super) sent_max: u64,
}

/// How long collectives take, each predicted once.
pub(super) struct Collectives<'a> {
    predict: &'a dyn Fn(&World, Operation, usize) -> Result<Prediction, Error>,
    /// Where shards are, and what is reduced across, if that is another world.
    world: &'a World,
    across: Option<&'a World>,
    known: HashMap<(bool, &'static str, usize), Prediction>,
    /// When the last collective ends.
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

    /// Does a collective as soon as its data is there: when it ends. `bytes` are those of the whole.
    fn run(&mut self, operation: Operation, bytes: u64, ready: f64) -> Result<f64, Error> {
        self.run_in(false, operation, bytes, ready)
    }

    fn run_in(&mut self, across: bool, operation: Operation, bytes: u64, ready: f64) -> Result<f64, Error> {
        let world = if across { self.across } else { Some(self.world) };
        let Some(world) = world.filter(|world| world.ranks() > 1) else { return Ok(ready) };
        // What every rank puts in: for an all_gather its part.
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

/// Predicts a step that computes for so long.
pub(super) fn step(
    strategy: Strategy,
    model: &Model,
    bucket_bytes: u64,
    compute: f64,
    mut collectives: Collectives<'_>,
) -> Result<Step, Error> {
    let ends = match strategy {
        Strategy::Ddp | Strategy::Zero1 | Strategy::Zero2 => {
            by_bucket(strategy, model, bucket_bytes, compute, &mut collectives)?
        }
        Strategy::Fsdp | Strategy::Hybrid => by_unit(model, compute, &mut collectives)?,
    };
    Ok(Step { seconds: ends, ..collectives.step })
}

/// Of what a rank computes, this part is forward.
const FORWARD: f64 = 1.0 / 3.0;

/// Gradients are reduced bucket by bucket as they are computed, at an even pace. Where a rank keeps only its part of
/// the optimizer's state, the parameters are gathered at the end.
fn by_bucket(
    strategy: Strategy,
    model: &Model,
    bucket_bytes: u64,
    compute: f64,
    collectives: &mut Collectives<'_>,
) -> Result<f64, Error> {
    let bytes = model.bytes();
    let bucket = bucket_bytes.clamp(model.element_bytes, bytes);
    let mut done = 0;
    let mut ends = compute;
    while done < bytes {
        let size = bucket.min(bytes - done);
        done += size;
        let ready = compute * (FORWARD + (1.0 - FORWARD) * done as f64 / bytes as f64);
        let operation =
            if strategy == Strategy::Ddp { Operation::AllReduce } else { Operation::ReduceScatter };
        ends = ends.max(collectives.run(operation, size, ready)?);
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

/// Units are gathered one ahead of where they are needed, forward and again backward (the last is still there), and
/// their gradients are reduced when they have been computed; across hosts as well, where shards are within.
fn by_unit(model: &Model, compute: f64, collectives: &mut Collectives<'_>) -> Result<f64, Error> {
    let (units, bytes) = (model.units, model.unit_bytes());
    let (forward, backward) = (compute * FORWARD / units as f64, compute * (1.0 - FORWARD) / units as f64);
    let mut now = 0.0;
    let mut gathered = collectives.run(Operation::AllGather, bytes, 0.0)?;
    for unit in 0..units {
        let begins = gathered.max(now);
        if unit + 1 < units {
            gathered = collectives.run(Operation::AllGather, bytes, begins)?;
        }
        now = begins + forward;
    }
    let mut ends = now;
    for unit in (0..units).rev() {
        let begins = gathered.max(now);
        if unit > 0 {
            gathered = collectives.run(Operation::AllGather, bytes, begins)?;
        }
        now = begins + backward;
        let shards = collectives.world.ranks() as u64;
        ends = ends.max(collectives.run(Operation::ReduceScatter, bytes, now)?);
        if collectives.across.is_some() {
            let part = bytes.div_ceil(shards);
            ends = ends.max(collectives.run_in(true, Operation::AllReduce, part, ends)?);
        }
    }
    Ok(now.max(ends))
}
