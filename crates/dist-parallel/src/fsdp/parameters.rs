//! A rank's shards of the parameters: gathering them before use, freeing them afterwards, and updating them.
//!
//! Parameters that lie in the model, that are gathered and that are read in place are states of one type, not three
//! implementations of a trait: a parameter changes between them within a step. For example, a shard that ranks read in
//! place is gathered if its block keeps a view of it.

use std::sync::Arc;

use dist_collectives::{Communicator, Pending};

use super::groups::Groups;
use super::layout::{FlatParameter, Layout, ShardChunk};
use super::options::{Degrees, Precision};
use super::plan::Plan;
use super::shard_buffer::{ShardBuffer, ShardOffset};
use crate::buffer_pool::BufferPool;
use crate::flat::{Flat, PendingFlat};
use crate::gradients::Gradients;
use crate::mutation_check::MutationCheck;
use crate::{Error, FloatType, Optimizer, Params, Result, Values, ValuesMut, params};

#[derive(Debug)]
pub(crate) struct Parameters {
    /// The state of each flat parameter, by unit.
    states: Vec<Vec<FlatParameterState>>,
    shard_buffer: ShardBuffer,
    /// For each unit that is read in place, the barrier that throttles ranks that are ahead.
    throttles: Vec<Option<Pending<()>>>,
    /// The buffer in which ranks read each other's updated shards, if all models have all parameters and the ranks
    /// can read each other's memory.
    update_buffer: Option<ShardBuffer>,
    /// For each unit, the check that blocks do not change parameters.
    mutation_checks: Vec<MutationCheck>,
    /// This rank's number in its replica.
    rank: usize,
    /// Memory for the next flat parameter that is gathered.
    pool: BufferPool,
}

/// A flat parameter on one rank.
#[derive(Debug)]
struct FlatParameterState {
    /// The offset of this rank's shard, padding included. `None` if the model has it.
    own: Option<ShardOffset>,
    gathered: GatherState,
}

/// The values of a flat parameter outside of this rank's shard and of the model's own memory.
#[derive(Debug, Default)]
enum GatherState {
    /// There are none.
    #[default]
    Sharded,
    /// The all-gather is in flight.
    Arriving(PendingFlat),
    /// The model uses the gathered values. The reshard group keeps the shard `kept` afterwards.
    Whole { flat: Arc<Flat>, kept: Option<Flat> },
    /// The shard that the reshard group keeps between forward and backward.
    Kept(Flat),
}

impl GatherState {
    /// Returns the state after a use of the values.
    fn freed(kept: Option<Flat>) -> Self {
        kept.map_or(Self::Sharded, Self::Kept)
    }
}

impl FlatParameter {
    /// Returns the type of the master values.
    pub(crate) fn master_dtype(&self, precision: Precision) -> FloatType {
        precision.master.filter(|_| self.trainable).unwrap_or(self.dtype)
    }
}

impl Parameters {
    /// Shards the initial values, one flat parameter at a time. `fill` writes the values of a whole flat parameter,
    /// in the type of the master values. Without `moves` the model already has them.
    pub(crate) fn new<M: Params>(
        layout: &Layout,
        degrees: Degrees,
        precision: Precision,
        groups: &mut Groups,
        model: &mut M,
        moves: bool,
        mut fill: impl FnMut(&mut M, &FlatParameter, &mut Flat) -> Result<()>,
    ) -> Result<Self> {
        let (mut shard_buffer, rank) = (ShardBuffer::default(), groups.shards.rank());
        let mut reserve = |flat_param: &FlatParameter| {
            let dtype = flat_param.master_dtype(precision);
            let outside = degrees.frees || dtype != flat_param.dtype;
            FlatParameterState {
                own: outside.then(|| shard_buffer.reserve(dtype, flat_param.shard_len)),
                gathered: GatherState::Sharded,
            }
        };
        let mut states: Vec<Vec<FlatParameterState>> =
            layout.units.iter().map(|unit| unit.flat_params.iter().map(&mut reserve).collect()).collect();
        let same_types = layout
            .flat_params()
            .all(|(_, flat_param)| flat_param.master_dtype(precision) == flat_param.dtype);
        if degrees.frees && same_types {
            shard_buffer.allocate_together(groups)?;
        } else {
            shard_buffer.allocate(&groups.allocator);
        }
        for (of_unit, unit) in states.iter_mut().zip(&layout.units) {
            for (shard, flat_param) in of_unit.iter_mut().zip(&unit.flat_params) {
                if !moves && shard.own.is_none() {
                    continue;
                }
                let (dtype, len) = (flat_param.master_dtype(precision), flat_param.padded(layout.shards));
                let mut whole = groups.allocator.zeros(dtype, len);
                fill(model, flat_param, &mut whole)?;
                if let Some(own) = shard.own {
                    let part = whole.slice(rank * flat_param.shard_len, flat_param.shard_len);
                    shard_buffer.slice_mut(own, 0, flat_param.shard_len)?.copy_from(part)?;
                }
                if degrees.frees {
                    params::reshard(model, &flat_param.places)?;
                } else {
                    params::unpack(model, &flat_param.places, &whole)?;
                }
            }
        }
        let gathers_updates = !degrees.frees && degrees.shards > 1;
        let update_buffer = if gathers_updates { update_buffer(layout, groups)? } else { None };
        let throttles = layout.units.iter().map(|_| None).collect();
        let units = layout.units.len();
        let mutation_checks = (0..units).map(|unit| MutationCheck::new(unit, units)).collect();
        Ok(Self {
            states,
            shard_buffer,
            throttles,
            update_buffer,
            mutation_checks,
            rank,
            pool: BufferPool::default(),
        })
    }

    /// Starts to gather a unit, from the reshard group if that has kept it. If ranks read units in place, it only
    /// starts a barrier, so that no rank gets a whole pass ahead of another.
    pub(crate) fn gather(&mut self, layout: &Layout, unit: usize, groups: &mut Groups) -> Result<()> {
        if self.shard_buffer.are_read() {
            self.throttles[unit] = Some(groups.gathering().0.start_barrier());
            return Ok(());
        }
        for (shard, flat_param) in self.states[unit].iter_mut().zip(&layout.units[unit].flat_params) {
            let lens = flat_param.lens(layout.shards);
            let allocate = |dtype, len| groups.allocate(dtype, len);
            let mut whole = self.pool.take(flat_param.dtype, lens, allocate)?;
            let state = std::mem::take(&mut shard.gathered);
            let (part, comm) = match (&state, groups.gathering()) {
                (GatherState::Kept(kept), (_, Some(reshard_group))) => {
                    (kept.slice(0, kept.len()), reshard_group)
                }
                (_, (shards, _)) => {
                    let own = shard.own.expect(SHARDED);
                    (self.shard_buffer.slice(own, 0, flat_param.shard_len)?, shards)
                }
            };
            let len = part.len();
            whole.slice_mut(comm.rank() * len, len).convert_from(part);
            drop(state);
            shard.gathered = GatherState::Arriving(whole.start_gather(comm));
        }
        Ok(())
    }

    /// Waits for a unit and materialises it in the model. With `keep`, this rank's reshard group keeps its shard
    /// until the next gather.
    pub(crate) fn materialise(
        &mut self,
        layout: &Layout,
        unit: usize,
        groups: &mut Groups,
        keep: bool,
        model: &mut impl Params,
    ) -> Result<()> {
        if let Some(throttle) = self.throttles[unit].take() {
            groups.timed(|| throttle.wait()).map_err(|failed| Error::communication(*failed.error))?;
            groups.timed(|| self.shard_buffer.open())?;
        }
        for (shard, flat_param) in self.states[unit].iter_mut().zip(&layout.units[unit].flat_params) {
            let whole = if let Some(own) = shard.own.filter(|_| self.shard_buffer.are_read()) {
                let reader =
                    RemoteShardReader { shard_buffer: &mut self.shard_buffer, own, flat_param, known: None };
                match reader.read(model, groups, &mut self.pool, layout.shards)? {
                    Some(whole) => whole,
                    None => continue,
                }
            } else {
                let GatherState::Arriving(arriving) = std::mem::take(&mut shard.gathered) else {
                    unreachable!("a unit is gathered before it is used")
                };
                groups.wait(arriving)?
            };
            let keepers = groups.reshard_group.as_ref().filter(|_| keep && !self.shard_buffer.are_read());
            let kept = keepers.map(|reshard_group| {
                let len = whole.len() / reshard_group.world_size();
                whole.part(flat_param.dtype, reshard_group.rank() * len, len)
            });
            let whole = Arc::new(whole);
            params::materialise(model, &flat_param.places, &whole)?;
            shard.gathered = match Arc::try_unwrap(whole) {
                Ok(copied) => {
                    self.pool.give(copied);
                    GatherState::freed(kept)
                }
                Err(flat) => GatherState::Whole { flat, kept },
            };
        }
        self.mutation_checks[unit].begin(model, layout.units[unit].sharded())
    }

    /// Frees a unit.
    ///
    /// # Errors
    /// Its blocks have changed its parameters, see [`MutationCheck`].
    pub(crate) fn free(&mut self, layout: &Layout, unit: usize, model: &mut impl Params) -> Result<()> {
        self.mutation_checks[unit].end(model, layout.units[unit].sharded())?;
        for (shard, flat_param) in self.states[unit].iter_mut().zip(&layout.units[unit].flat_params) {
            params::reshard(model, &flat_param.places)?;
            shard.gathered = match std::mem::take(&mut shard.gathered) {
                GatherState::Whole { flat, kept } => {
                    // A view of it can still exist.
                    Arc::into_inner(flat).into_iter().for_each(|flat| self.pool.give(flat));
                    GatherState::freed(kept)
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Starts a pass of a model that always has all parameters, of which each rank updates a shard.
    pub(crate) fn begin_pass(&mut self, layout: &Layout, model: &impl Params) -> Result<()> {
        let units = self.mutation_checks.iter_mut().zip(&layout.units);
        units.into_iter().try_for_each(|(mutation_check, unit)| mutation_check.begin(model, unit.sharded()))
    }

    /// Ends that pass.
    ///
    /// # Errors
    /// Blocks have changed parameters, see [`MutationCheck`].
    pub(crate) fn end_pass(&mut self, layout: &Layout, model: &impl Params) -> Result<()> {
        let units = self.mutation_checks.iter_mut().zip(&layout.units);
        units.into_iter().try_for_each(|(mutation_check, unit)| mutation_check.end(model, unit.sharded()))
    }

    /// Returns this rank's shard of a flat parameter, padding included, if it lies outside the model.
    #[cfg(test)]
    pub(crate) fn part(&self, unit: usize, flat_param: usize, len: usize) -> Option<Values<'_>> {
        self.states[unit][flat_param]
            .own
            .map(|own| self.shard_buffer.slice(own, 0, len).expect("it has memory"))
    }

    /// Returns `true` if ranks read each other's shards in place.
    #[cfg(test)]
    pub(crate) fn are_read(&self) -> bool {
        self.shard_buffer.are_read()
    }

    /// Inherits the timeout and the reduction order of this communicator.
    pub(crate) fn follow(&mut self, comm: &Communicator) {
        self.shard_buffer.follow(comm);
        if let Some(update_buffer) = &mut self.update_buffer {
            update_buffer.follow(comm);
        }
    }

    /// Frees pooled memory and closes the windows of a pass, so that shards can be updated.
    pub(crate) fn rest(&mut self, groups: &mut Groups) -> Result<()> {
        self.pool.clear();
        self.close(groups)
    }

    /// Waits until no rank reads the shards of others.
    pub(crate) fn close(&mut self, groups: &mut Groups) -> Result<()> {
        groups.timed(|| self.shard_buffer.close())
    }

    /// Drops all operations in flight and their memory.
    pub(crate) fn forget(&mut self) {
        for shard in self.states.iter_mut().flatten() {
            shard.gathered = GatherState::Sharded;
        }
        self.throttles.iter_mut().for_each(|throttle| *throttle = None);
        self.mutation_checks.iter_mut().for_each(MutationCheck::forget);
        self.pool.clear();
    }

    /// Calls `f` with the memory of a chunk of this rank's shard.
    pub(crate) fn change(
        &mut self,
        (unit, index): (usize, usize),
        chunk: ShardChunk,
        model: &mut impl Params,
        mut f: impl FnMut(ValuesMut<'_>) -> Result<()>,
    ) -> Result<()> {
        match self.states[unit][index].own {
            Some(own) => f(self.shard_buffer.slice_mut(own, chunk.at, chunk.len)?),
            None => params::write(model, chunk.parameter, |values| {
                f(values.part(chunk.offset..chunk.offset + chunk.len))
            }),
        }
    }

    /// Calls `f` with the values of a chunk of this rank's shard.
    pub(crate) fn read(
        &self,
        (unit, index): (usize, usize),
        chunk: ShardChunk,
        model: &impl Params,
        mut f: impl FnMut(Values<'_>),
    ) -> Result<()> {
        match self.states[unit][index].own {
            Some(own) => {
                f(self.shard_buffer.slice(own, chunk.at, chunk.len)?);
                Ok(())
            }
            None => params::read(model, chunk.parameter, &mut |values| f(chunk.of(values))),
        }
    }

    /// Updates this rank's shard of all parameters by their gradients. The number of a slice is the parameter's index
    /// plus `first`.
    pub(crate) fn update(
        &mut self,
        layout: &Layout,
        gradients: &Gradients,
        model: &mut impl Params,
        first: usize,
        optimizer: &mut dyn Optimizer,
    ) -> Result<()> {
        for (place, flat_param) in layout.flat_params() {
            for chunk in flat_param.chunks(self.rank) {
                let Some(mean) = gradients.mean_of_chunk(chunk.parameter, chunk.offset, chunk.len) else {
                    continue;
                };
                let number = first + chunk.parameter;
                self.change(place, chunk, model, |values| {
                    if mean.dtype() == values.dtype() {
                        return optimizer.update(number, values, mean);
                    }
                    let mut converted = Flat::zeros(values.dtype(), mean.len());
                    converted.slice_mut(0, mean.len()).convert_from(mean);
                    optimizer.update(number, values, converted.slice(0, mean.len()))
                })?;
            }
        }
        Ok(())
    }

    /// Gives every rank's model the changed flat parameters after an update, if the models have all parameters and
    /// the changed values lie elsewhere.
    pub(crate) fn publish(
        &mut self,
        plan: &Plan,
        groups: &mut Groups,
        model: &mut impl Params,
        changed: impl Fn(&FlatParameter) -> bool,
    ) -> Result<()> {
        self.forget();
        let (layout, degrees, precision) = (&plan.layout, plan.degrees, plan.options.precision);
        let outside = |flat_param: &FlatParameter| {
            degrees.shards > 1 || flat_param.master_dtype(precision) != flat_param.dtype
        };
        let flat_params = layout.flat_params().filter(|_| !degrees.frees);
        let places = flat_params.filter(|(_, flat_param)| changed(flat_param) && outside(flat_param));
        let places: Vec<(usize, usize)> = places.map(|(place, _)| place).collect();
        if self.update_buffer.is_some() {
            places.iter().try_for_each(|&place| self.all_gather_updates(layout, place, groups, model))?;
            return self.rest(groups);
        }
        let mut in_flight = None;
        for place in places {
            let next = (place, self.start_all_gather_updates(layout, place, groups, model)?);
            if let Some((before, arriving)) = in_flight.replace(next) {
                self.finish_all_gather_updates(layout, before, arriving, groups, model)?;
            }
        }
        if let Some((last, arriving)) = in_flight {
            self.finish_all_gather_updates(layout, last, arriving, groups, model)?;
        }
        self.rest(groups)
    }

    /// Makes values that the program has written into the model master values, in a chunk of this rank's shard.
    pub(crate) fn adopt(
        &mut self,
        (unit, index): (usize, usize),
        chunk: ShardChunk,
        model: &impl Params,
    ) -> Result<()> {
        let Some(own) = self.states[unit][index].own else { return Ok(()) };
        let mut master = self.shard_buffer.slice_mut(own, chunk.at, chunk.len)?;
        params::read(model, chunk.parameter, &mut |values| {
            let values = values.part(chunk.offset..chunk.offset + chunk.len);
            if let Some(changed) = with_changes(master.as_values(), values) {
                master.convert_from(changed.slice(0, chunk.len));
            }
        })
    }

    /// Calls `f` with the values of a chunk of this rank's shard, as they are after [`adopt`](Self::adopt).
    pub(crate) fn read_adopted(
        &self,
        (unit, index): (usize, usize),
        chunk: ShardChunk,
        model: &impl Params,
        mut f: impl FnMut(Values<'_>),
    ) -> Result<()> {
        let Some(own) = self.states[unit][index].own else {
            return self.read((unit, index), chunk, model, f);
        };
        let master = self.shard_buffer.slice(own, chunk.at, chunk.len)?;
        params::read(model, chunk.parameter, &mut |values| {
            let values = values.part(chunk.offset..chunk.offset + chunk.len);
            match with_changes(master, values) {
                Some(changed) => f(changed.slice(0, chunk.len)),
                None => f(master),
            }
        })
    }

    /// Returns `true` if updated shards are read in place.
    #[cfg(test)]
    pub(crate) const fn gathers_updates_in_place(&self) -> bool {
        self.update_buffer.is_some()
    }

    /// Publishes this rank's updated shard of a flat parameter and copies those of the other ranks into the model.
    /// They are read in place.
    fn all_gather_updates(
        &mut self,
        layout: &Layout,
        place: (usize, usize),
        groups: &mut Groups,
        model: &mut impl Params,
    ) -> Result<()> {
        let flat_param = &layout.units[place.0].flat_params[place.1];
        let mut update_buffer = self.update_buffer.take().expect("it is told in place");
        let own = update_buffer.reserve_in_turn(flat_param.dtype, flat_param.shard_len);
        for chunk in flat_param.chunks(self.rank) {
            let mut into = update_buffer.slice_mut(own, chunk.at, chunk.len)?;
            self.read(place, chunk, model, |values| into.convert_from(values))?;
        }
        groups.timed(|| update_buffer.open())?;
        // The model already has this rank's shard, unless the master values lie outside it.
        let known = self.states[place.0][place.1].own.is_none().then_some(self.rank);
        let mut reader = RemoteShardReader { shard_buffer: &mut update_buffer, own, flat_param, known };
        for place in &flat_param.places {
            params::write(model, place.parameter, |values| reader.copy_range(place.offset, values))?;
        }
        groups.timed(|| update_buffer.close())?;
        self.update_buffer = Some(update_buffer);
        Ok(())
    }

    /// Starts the all-gather of an updated flat parameter of which every rank's model has all values.
    fn start_all_gather_updates(
        &mut self,
        layout: &Layout,
        place: (usize, usize),
        groups: &mut Groups,
        model: &impl Params,
    ) -> Result<PendingFlat> {
        let flat_param = &layout.units[place.0].flat_params[place.1];
        let lens = flat_param.lens(layout.shards);
        let mut whole = self.pool.take(flat_param.dtype, lens, |dtype, len| groups.allocate(dtype, len))?;
        let start = self.rank * flat_param.shard_len;
        for chunk in flat_param.chunks(self.rank) {
            self.read(place, chunk, model, |values| {
                whole.slice_mut(start + chunk.at, chunk.len).convert_from(values);
            })?;
        }
        Ok(whole.start_gather(groups.gathering().0))
    }

    /// Waits for the all-gather and copies the flat parameter into the model.
    fn finish_all_gather_updates(
        &mut self,
        layout: &Layout,
        (unit, index): (usize, usize),
        arriving: PendingFlat,
        groups: &mut Groups,
        model: &mut impl Params,
    ) -> Result<()> {
        let whole = groups.wait(arriving)?;
        params::unpack(model, &layout.units[unit].flat_params[index].places, &whole)?;
        self.pool.give(whole);
        Ok(())
    }
}

/// Returns master values with the model's value in place of each that is not the rounded master value, because the
/// program has written it. `None` if there is no such value.
fn with_changes(master: Values<'_>, model: Values<'_>) -> Option<Flat> {
    let len = master.len();
    let mut rounded = Flat::zeros(model.dtype(), len);
    rounded.slice_mut(0, len).convert_from(master);
    let rounded = rounded.slice(0, len);
    if rounded.as_bytes() == model.as_bytes() {
        return None;
    }
    let mut changed = Flat::zeros(master.dtype(), len);
    changed.slice_mut(0, len).convert_from(master);
    for at in 0..len {
        let value = model.part(at..at + 1);
        if rounded.part(at..at + 1).as_bytes() != value.as_bytes() {
            changed.slice_mut(at, 1).convert_from(value);
        }
    }
    Some(changed)
}

/// Allocates a buffer for the largest shard of each type. `None` if the ranks cannot read each other's memory.
fn update_buffer(layout: &Layout, groups: &mut Groups) -> Result<Option<ShardBuffer>> {
    let mut update_buffer = ShardBuffer::default();
    for (_, flat_param) in layout.flat_params() {
        update_buffer.reserve_in_turn(flat_param.dtype, flat_param.shard_len);
    }
    update_buffer.allocate_together(groups)?;
    Ok(update_buffer.are_read().then_some(update_buffer))
}

/// A flat parameter whose shards are read in place.
struct RemoteShardReader<'a> {
    shard_buffer: &'a mut ShardBuffer,
    /// The offset of its shard, on every rank.
    own: ShardOffset,
    flat_param: &'a FlatParameter,
    /// The rank whose shard the model already has.
    known: Option<usize>,
}

impl RemoteShardReader<'_> {
    /// Fills the parameters in the model's memory. Returns the flat parameter if the model does not fill it.
    fn read(
        mut self,
        model: &mut impl Params,
        groups: &mut Groups,
        pool: &mut BufferPool,
        shards: usize,
    ) -> Result<Option<Flat>> {
        for place in &self.flat_param.places {
            let read = |values: ValuesMut<'_>| self.copy_range(place.offset, values);
            if !params::fill(model, place.parameter, read)? {
                let lens = self.flat_param.lens(shards);
                let allocate = |dtype, len| groups.allocate(dtype, len);
                let mut whole = pool.take(self.flat_param.dtype, lens, allocate)?;
                self.copy_range(0, whole.slice_mut(0, self.flat_param.len()))?;
                return Ok(Some(whole));
            }
        }
        Ok(None)
    }

    /// Copies the values of the flat parameter from `start` on.
    fn copy_range(&mut self, start: usize, mut values: ValuesMut<'_>) -> Result<()> {
        let (part, end) = (self.flat_param.shard_len, start + values.len());
        let mut next = start;
        while next < end {
            let (rank, at) = (next / part, next % part);
            let len = (part - at).min(end - next);
            let into = values.reborrow().part(next - start..next - start + len);
            if self.known != Some(rank) {
                self.shard_buffer.read(rank, self.own, at, into)?;
            }
            next += len;
        }
        Ok(())
    }
}

const SHARDED: &str = "what is freed between its uses was divided";
