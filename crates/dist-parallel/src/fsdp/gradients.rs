//! A rank's gradients, from the first micro-batch of a step to its shard of the mean over all ranks.
//!
//! The gradients of a unit in one micro-batch lie in one buffer per flat parameter. When they are final, they are
//! reduce-scattered and each rank keeps its shard. The shards of successive rounds are summed as a tree. If the
//! strategy reduces once a step, the unsharded gradients are summed instead. At most one unit is in flight while the
//! next unit's buffers fill. The wait for it comes with the next unit's first gradient.

use super::buffer_pool::BufferPool;
use super::groups::Groups;
use super::layout::{FlatParameter, Layout, ShardChunk};
use super::options::Precision;
use crate::flat::{Flat, PendingFlat};
use crate::mean::Mean;
use crate::tree::TreeSum;
use crate::{Error, FloatType, Result, Values};

#[derive(Debug)]
pub(crate) struct ShardedGradients {
    units: Vec<UnitSum>,
    /// The order in which units become final.
    order: Vec<usize>,
    names: Vec<String>,
    /// For each parameter, `true` if its gradient was reported in the current micro-batch.
    reported: Vec<bool>,
    /// For each parameter that is not tied to an earlier one, `true` if it has had a gradient since the last step.
    /// That is on this rank, or on any rank after the end of a step.
    used: Vec<bool>,
    precision: Precision,
    /// `true` if gradients are reduced after each round.
    each_round: bool,
    /// The unit whose gradients are being reduced.
    in_flight: Option<usize>,
    /// Memory for the next gradient buffer.
    pool: BufferPool,
    /// The number of rounds since the last step.
    rounds: usize,
    /// `true` if this rank has a micro-batch in the current round. `last` is `true` if a step follows the round.
    present: bool,
    last: bool,
}

#[derive(Debug)]
struct UnitSum {
    flat_params: Vec<FlatParameterSum>,
    /// The number of parameters that have not yet reported in the current micro-batch.
    outstanding: usize,
    /// `true` if the gradients of the current round are final.
    closed: bool,
    /// `true` if the last reduction of this step was started.
    concluded: bool,
}

#[derive(Debug)]
struct FlatParameterSum {
    /// The gradients of the current micro-batch, unsharded.
    gradient: Option<Flat>,
    /// For each parameter, `true` if `gradient` has values for it.
    written: Vec<bool>,
    sum: TreeSum<Flat>,
    /// The reduction in flight.
    adding: Option<PendingFlat>,
    /// This rank's shard of the sum over all ranks.
    total: Option<Flat>,
    /// This rank's shard of the mean over all ranks, until the next micro-batch.
    mean: Option<Mean>,
    /// The memory of the last mean, reused for the first round's shard. Fresh memory costs page faults.
    recycled: Option<Flat>,
}

impl FlatParameter {
    /// Returns the type of mean gradients.
    pub(crate) fn reduce_dtype(&self, precision: Precision) -> FloatType {
        precision.reduce.unwrap_or(self.dtype)
    }

    /// Returns the type in which gradients are summed.
    pub(crate) fn sum_dtype(&self, precision: Precision) -> FloatType {
        self.reduce_dtype(precision).sum_dtype()
    }
}

impl ShardedGradients {
    pub(crate) fn new(layout: &Layout, names: Vec<String>, precision: Precision, each_round: bool) -> Self {
        let flat_param = |flat_param: &FlatParameter| FlatParameterSum {
            gradient: None,
            written: vec![false; flat_param.places.len()],
            sum: TreeSum::new(),
            adding: None,
            total: None,
            mean: None,
            recycled: None,
        };
        let unit = |flat_params: &[FlatParameter]| UnitSum {
            flat_params: flat_params.iter().map(flat_param).collect(),
            outstanding: 0,
            closed: false,
            concluded: false,
        };
        let root = layout.root();
        let with_blocks = (0..layout.units.len()).rev().filter(|unit| Some(*unit) != root);
        Self {
            units: layout.units.iter().map(|of| unit(&of.flat_params)).collect(),
            order: with_blocks.chain(root).collect(),
            reported: vec![false; names.len()],
            used: vec![false; names.len()],
            names,
            precision,
            each_round,
            in_flight: None,
            pool: BufferPool::default(),
            rounds: 0,
            present: false,
            last: false,
        }
    }

    /// Drops the result of the last step.
    pub(crate) fn begin_step(&mut self, layout: &Layout) {
        if self.rounds == 0 {
            self.used.fill(false);
        }
        // Otherwise an unsharded gradient itself becomes the mean, or all units are in flight at once.
        let cuts = self.sums_now(layout);
        for unit in &mut self.units {
            unit.concluded = false;
            let with_mean = unit.flat_params.iter_mut().filter(|flat_param| flat_param.mean.is_some());
            with_mean.for_each(|flat_param| {
                flat_param.recycled = flat_param.mean.take().map(Mean::into_memory).filter(|_| cuts)
            });
        }
    }

    /// Starts a round. `present` is `true` if this rank has a micro-batch in it; `last` is `true` if a step follows.
    pub(crate) fn begin_round(&mut self, layout: &Layout, present: bool, last: bool) {
        (self.present, self.last) = (present, last);
        self.reported.fill(false);
        for (unit, of) in self.units.iter_mut().zip(&layout.units) {
            (unit.outstanding, unit.closed) = (of.reporters, false);
            unit.flat_params.iter_mut().for_each(|flat_param| flat_param.written.fill(false));
        }
    }

    /// Returns `true` if each round's gradients are reduce-scattered.
    const fn sums_now(&self, layout: &Layout) -> bool {
        self.each_round && layout.shards > 1
    }

    /// Stores the gradient of one parameter for the current micro-batch.
    pub(crate) fn report(
        &mut self,
        layout: &Layout,
        groups: &mut Groups,
        parameter: usize,
        values: Values<'_>,
    ) -> Result<()> {
        let count = layout.locations.len();
        let location =
            *layout.locations.get(parameter).ok_or(Error::NoSuchParameter { index: parameter, count })?;
        if std::mem::replace(&mut self.reported[parameter], true) {
            return Err(Error::ReportedTwice { parameter: self.names[parameter].clone() });
        }
        // A frozen parameter has no gradient.
        let Some(location) = location else { return Ok(()) };
        let flat_param = &layout.units[location.unit].flat_params[location.flat_param];
        if !flat_param.trainable {
            return Ok(());
        }
        let place = layout.place_of(location);
        if (values.dtype(), values.len()) != (flat_param.dtype, place.len) {
            return Err(self.wrong_gradient(parameter, (place.len, flat_param.dtype), values));
        }
        self.open(layout, groups, location.unit)?;
        let unit = &mut self.units[location.unit];
        let FlatParameterSum { gradient, written, .. } = &mut unit.flat_params[location.flat_param];
        let gradient = gradient.as_mut().expect("a unit is closed once every parameter has reported");
        let dtype = flat_param.sum_dtype(self.precision);
        if std::mem::replace(&mut written[location.place], true) {
            let mut addend = Flat::zeros(dtype, place.len);
            addend.slice_mut(0, place.len).convert_from(values);
            gradient.slice_mut(place.offset, place.len).add(addend.slice(0, place.len))?;
        } else {
            gradient.slice_mut(place.offset, place.len).convert_from(values);
        }
        unit.outstanding -= 1;
        self.used[place.parameter] = true;
        // The root unit comes after all others, on every rank alike.
        if self.units[location.unit].outstanding == 0 && !layout.units[location.unit].is_root() {
            self.close(layout, groups, location.unit)?;
        }
        Ok(())
    }

    /// Starts to reduce a unit's gradients, unless they are already final.
    pub(crate) fn close(&mut self, layout: &Layout, groups: &mut Groups, unit: usize) -> Result<()> {
        if std::mem::replace(&mut self.units[unit].closed, true) {
            return Ok(());
        }
        self.finish_in_flight(layout, groups)?;
        self.open(layout, groups, unit)?;
        let reduces_now = self.sums_now(layout);
        for (of, flat_param) in self.units[unit].flat_params.iter_mut().zip(&layout.units[unit].flat_params) {
            let Some(mut gradient) = of.gradient.take() else { continue };
            if self.present {
                for (place, _) in flat_param.places.iter().zip(&of.written).filter(|(_, written)| !**written)
                {
                    gradient.slice_mut(place.offset, place.len).clear();
                }
            } else {
                gradient.slice_mut(0, flat_param.len()).fill_neutral();
            }
            if reduces_now {
                of.adding = Some(gradient.start_scattered_sum(&mut groups.shards));
            } else {
                of.sum.add(self.rounds, gradient, merge);
            }
        }
        if reduces_now {
            self.in_flight = Some(unit);
        } else if self.last {
            self.conclude(layout, groups, unit)?;
        }
        Ok(())
    }

    /// Ends a round.
    pub(crate) fn end_round(&mut self, layout: &Layout, groups: &mut Groups) -> Result<()> {
        self.finish_in_flight(layout, groups)?;
        self.rounds += 1;
        Ok(())
    }

    /// Waits for all reductions, and divides this rank's shard by `count`, the total weight.
    pub(crate) fn end_step(&mut self, layout: &Layout, groups: &mut Groups, count: usize) -> Result<()> {
        for unit in self.order.clone() {
            self.conclude(layout, groups, unit)?;
        }
        for unit in self.order.clone() {
            for (of, flat_param) in
                self.units[unit].flat_params.iter_mut().zip(&layout.units[unit].flat_params)
            {
                if let Some(adding) = of.adding.take() {
                    let sum = groups.wait(adding)?;
                    let whole = sum.len() == flat_param.shard_len;
                    of.total = Some(if whole { sum } else { own_shard(&sum, flat_param, groups, None)? });
                }
                let total = of.total.take();
                of.mean = total.map(|sum| Mean::of(sum, flat_param.reduce_dtype(self.precision), count));
            }
        }
        self.rounds = 0;
        Ok(())
    }

    /// Returns this rank's shard of the mean gradients of a flat parameter, without parameters that have none.
    pub(crate) fn means<'a>(
        &'a self,
        flat_param: &'a FlatParameter,
        (unit, index): (usize, usize),
        rank: usize,
    ) -> impl Iterator<Item = (ShardChunk, Values<'a>)> {
        flat_param.chunks(rank).filter_map(move |chunk| Some((chunk, self.mean((unit, index), chunk)?)))
    }

    /// Returns the mean gradient of a chunk of this rank's shard. `None` if no micro-batch had a gradient for its
    /// parameter.
    pub(crate) fn mean(&self, (unit, index): (usize, usize), chunk: ShardChunk) -> Option<Values<'_>> {
        let mean = self.units[unit].flat_params[index].mean.as_ref()?;
        self.used[chunk.parameter].then(|| mean.slice(chunk.at, chunk.len))
    }

    /// Scales all mean gradients.
    pub(crate) fn scale(&mut self, factor: f64) {
        for mean in
            self.units.iter_mut().flat_map(|unit| &mut unit.flat_params).filter_map(|of| of.mean.as_mut())
        {
            mean.scale(factor);
        }
    }

    /// Returns the flags for parameters with a gradient: on this rank, or on any rank after a step.
    pub(crate) fn used_mut(&mut self) -> &mut [bool] {
        &mut self.used
    }

    /// Returns `true` if any rank had a gradient for a parameter in the last step.
    pub(crate) fn is_used(&self, parameter: usize) -> bool {
        self.used[parameter]
    }

    /// Drops all gradients.
    pub(crate) fn forget(&mut self) {
        for unit in &mut self.units {
            unit.concluded = false;
            for of in &mut unit.flat_params {
                (of.gradient, of.adding, of.sum) = (None, None, TreeSum::new());
                (of.total, of.mean, of.recycled) = (None, None, None);
            }
        }
        (self.in_flight, self.rounds) = (None, 0);
        self.pool.clear();
        self.used.fill(false);
    }

    /// Returns this rank's shard of a flat parameter's mean gradient, padding included.
    #[cfg(test)]
    pub(crate) fn part(&self, unit: usize, flat_param: usize) -> Option<&Mean> {
        self.units[unit].flat_params[flat_param].mean.as_ref()
    }

    /// Frees the memory that is pooled for later units.
    pub(crate) fn rest(&mut self) {
        self.pool.clear();
    }

    /// Allocates a unit's gradient buffers, after the reduction of the unit before has released its own.
    fn open(&mut self, layout: &Layout, groups: &mut Groups, unit: usize) -> Result<()> {
        if !layout.units[unit].is_root() {
            self.finish_in_flight(layout, groups)?;
        }
        for (of, flat_param) in self.units[unit].flat_params.iter_mut().zip(&layout.units[unit].flat_params) {
            if flat_param.trainable && of.gradient.is_none() {
                let dtype = flat_param.sum_dtype(self.precision);
                of.gradient =
                    Some(self.pool.take(groups.reduce_group(), flat_param, dtype, layout.shards)?);
            }
        }
        Ok(())
    }

    /// Waits for the unit in flight, and adds this rank's shard to those of earlier rounds.
    fn finish_in_flight(&mut self, layout: &Layout, groups: &mut Groups) -> Result<()> {
        let Some(unit) = self.in_flight.take() else { return Ok(()) };
        for (of, flat_param) in self.units[unit].flat_params.iter_mut().zip(&layout.units[unit].flat_params) {
            let Some(adding) = of.adding.take() else { continue };
            let gradient = groups.wait(adding)?;
            let part = own_shard(&gradient, flat_param, groups, of.recycled.take())?;
            of.sum.add(self.rounds, part, merge);
            self.pool.give(gradient);
        }
        if self.last {
            self.conclude(layout, groups, unit)?;
        }
        Ok(())
    }

    /// Starts the last reduction of a unit's sums. Without one, the sums are the result.
    fn conclude(&mut self, layout: &Layout, groups: &mut Groups, unit: usize) -> Result<()> {
        if std::mem::replace(&mut self.units[unit].concluded, true) {
            return Ok(());
        }
        let comm = if self.each_round { &mut groups.replicas } else { &mut groups.shards };
        for (of, flat_param) in self.units[unit].flat_params.iter_mut().zip(&layout.units[unit].flat_params) {
            if !flat_param.trainable {
                continue;
            }
            let sum = match of.sum.finish(merge) {
                Some(sum) => sum,
                None => {
                    let len =
                        if self.each_round { flat_param.shard_len } else { flat_param.padded(layout.shards) };
                    let mut nothing = match of.recycled.take() {
                        Some(recycled) => recycled,
                        // It is reduced with the sums of ranks that have gradients, so it needs memory of the same
                        // kind.
                        None => Flat::allocated(comm, flat_param.sum_dtype(self.precision), len)?,
                    };
                    nothing.slice_mut(0, len).clear();
                    nothing.slice_mut(0, len.min(flat_param.len())).fill_neutral();
                    nothing
                }
            };
            if !self.each_round {
                of.adding = Some(sum.start_scattered_sum(comm));
            } else if comm.world_size() > 1 {
                of.adding = Some(sum.start_sum(comm));
            } else {
                of.total = Some(sum);
            }
        }
        Ok(())
    }

    fn wrong_gradient(
        &self,
        parameter: usize,
        (expected_len, expected): (usize, FloatType),
        values: Values<'_>,
    ) -> Error {
        let (got_len, got) = (values.len(), values.dtype());
        let source = Error::ValuesDiffer { expected_len, expected, got_len, got }.into();
        Error::WrongGradient { parameter: self.names[parameter].clone(), source }
    }
}

fn merge(left: &mut Flat, right: Flat) {
    left.add(&right);
}

/// Copies this rank's shard out of a reduced flat parameter, into `recycled` if given.
fn own_shard(
    sum: &Flat,
    flat_param: &FlatParameter,
    groups: &mut Groups,
    recycled: Option<Flat>,
) -> Result<Flat> {
    let (start, len) = (groups.shards.rank() * flat_param.shard_len, flat_param.shard_len);
    let mut part = match recycled {
        Some(recycled) => recycled,
        None if groups.replicas.world_size() == 1 => return Ok(sum.part(sum.dtype(), start, len)),
        // The shard is reduced across replicas later.
        None => Flat::allocated(&mut groups.replicas, sum.dtype(), len)?,
    };
    part.slice_mut(0, len).convert_from(sum.slice(start, len));
    Ok(part)
}
