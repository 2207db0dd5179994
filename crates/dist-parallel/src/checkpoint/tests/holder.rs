//! A trainer that holds arbitrary chunks of a model, with values that identify the step.

use std::sync::{Arc, Mutex};

use half::{bf16, f16};

use crate::checkpoint::{Chunk, ShardMetadata, Shards, Slice};
use crate::flat::Flat;
use crate::{
    AdamW, AdamWOptions, Communicator, FloatType, OptimizerState as _, ParamInfo, Result, SliceStates,
    Values, ValuesMut,
};

/// The division of a model among ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ModelDivision {
    /// Every rank has everything.
    Replicated,
    /// Each rank has a contiguous, equal share of all values.
    Even,
    /// Every rank has all parameters, and an equal share of the optimizer state.
    OptimizerOnly,
    /// Chunks of seven values are assigned in turn. With an even number of ranks, both halves hold the same.
    Scattered,
    /// The last rank has everything.
    Last,
}

pub(super) const DIVISIONS: [ModelDivision; 5] = [
    ModelDivision::Replicated,
    ModelDivision::Even,
    ModelDivision::OptimizerOnly,
    ModelDivision::Scattered,
    ModelDivision::Last,
];

pub(super) struct Holder {
    pub(super) comm: Communicator,
    pub(super) infos: Vec<ParamInfo>,
    parameters: ShardMetadata<Chunk>,
    slices: ShardMetadata<Slice>,
    pub(super) values: Vec<Flat>,
    pub(super) optimizer: AdamW,
    pub(super) loaded: usize,
    /// The number of the chunk that the trainer refuses to return.
    pub(super) refuses: Arc<Mutex<Option<usize>>>,
}

/// Returns a model with every type, odd sizes, a frozen parameter, a tied one and an empty one.
pub(super) fn infos() -> Vec<ParamInfo> {
    let mut infos = vec![
        ParamInfo::new("embed", [5, 3], FloatType::F32),
        ParamInfo::new("half.weight", [7, 2], FloatType::Bf16),
        ParamInfo::new("nothing", [0, 4], FloatType::F32),
        ParamInfo::new("scale", [], FloatType::F64),
        ParamInfo::new("frozen", [11], FloatType::F16),
        ParamInfo::new("head", [5, 3], FloatType::F32),
        ParamInfo::new("unused", [2], FloatType::F32),
    ];
    infos[4].trainable = false;
    infos[5].same_as = Some(0);
    infos
}

/// The parameter that never has a gradient, so it has no optimizer state.
const UNUSED: usize = 6;

impl Holder {
    pub(super) fn new(comm: Communicator, division: ModelDivision) -> Self {
        Self::with_infos(comm, division, infos())
    }

    /// Returns a holder whose values and optimizer state are zero.
    pub(super) fn with_infos(comm: Communicator, division: ModelDivision, infos: Vec<ParamInfo>) -> Self {
        let stored = infos.iter().enumerate().filter(|(_, info)| info.same_as.is_none());
        let all: Vec<Chunk> =
            stored.map(|(parameter, info)| Chunk { parameter, offset: 0, len: info.len() }).collect();
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let parameters = match division {
            ModelDivision::OptimizerOnly => divide(ModelDivision::Replicated, &all, rank, ranks),
            division => divide(division, &all, rank, ranks),
        };
        let of_optimizer = match division {
            ModelDivision::OptimizerOnly => divide(ModelDivision::Even, &all, rank, ranks),
            division => divide(division, &all, rank, ranks),
        };
        let trained = of_optimizer.chunks.iter().filter(|chunk| infos[chunk.parameter].trainable);
        let slices =
            trained.enumerate().map(|(number, &chunk)| Slice { number: 2 * number, chunk }).collect();
        let slices = ShardMetadata { chunks: slices, ..of_optimizer.map() };
        let values = parameters
            .chunks
            .iter()
            .map(|chunk| Flat::zeros(infos[chunk.parameter].dtype, chunk.len))
            .collect();
        Self {
            comm,
            infos,
            parameters,
            slices,
            values,
            optimizer: AdamW::new(AdamWOptions::default()).unwrap(),
            loaded: 0,
            refuses: Arc::default(),
        }
    }

    /// Sets all values to those of a step.
    pub(super) fn fill(&mut self, step: u64) {
        for (chunk, values) in self.parameters.chunks.iter().zip(&mut self.values) {
            fill(values.slice_mut(0, chunk.len), step, 0, chunk);
        }
        let states = self.optimizer.states_mut().unwrap();
        states.clear();
        for Slice { number, chunk } in &self.slices.chunks {
            if chunk.parameter == UNUSED {
                continue;
            }
            let dtype = self.infos[chunk.parameter].dtype;
            let state = states.restart(*number, dtype, chunk.len);
            for (salt, array) in state.arrays_mut().into_iter().enumerate() {
                fill(array, step, salt + 1, chunk);
            }
            for (salt, scalar) in state.scalars_mut().iter_mut().enumerate() {
                *scalar = scalar_of(step, salt, chunk.parameter);
            }
        }
    }

    /// Returns the step of all values, or `None` if they are of different steps.
    pub(super) fn step(&self) -> Option<u64> {
        (0..STEPS).find(|&step| self.is_of(step, true))
    }

    /// Returns `true` if all parameters, and optionally the optimizer state, are of a step.
    pub(super) fn is_of(&self, step: u64, with_optimizer: bool) -> bool {
        let mut parameters = self.parameters.chunks.iter().zip(&self.values);
        let expected = |dtype, salt, chunk: &Chunk| {
            let mut flat = Flat::zeros(dtype, chunk.len);
            fill(flat.slice_mut(0, chunk.len), step, salt, chunk);
            flat
        };
        let parameters_are = parameters.all(|(chunk, values)| {
            let expected = expected(self.infos[chunk.parameter].dtype, 0, chunk);
            values.slice(0, chunk.len) == expected.slice(0, chunk.len)
        });
        let states_are = self.slices.chunks.iter().all(|Slice { number, chunk }| {
            let Some(state) = self.states().get(*number) else {
                // Empty tensors belong to no step.
                return chunk.parameter == UNUSED || chunk.len == 0;
            };
            let arrays = state.arrays().iter().enumerate().all(|(salt, values)| {
                *values == expected(values.dtype(), salt + 1, chunk).slice(0, chunk.len)
            });
            let mut scalars = state.scalars().iter().enumerate();
            arrays && scalars.all(|(salt, value)| *value == scalar_of(step, salt, chunk.parameter))
        });
        parameters_are && (states_are || !with_optimizer)
    }

    fn states(&self) -> &SliceStates {
        self.optimizer.states().unwrap()
    }

    /// Lists a slice that the optimizer does not have.
    pub(super) fn list_slice(&mut self, chunk: Chunk) {
        self.slices.chunks.push(Slice { number: 999, chunk });
    }

    /// Returns this rank as a trainer, and its optimizer.
    pub(super) fn parts(&mut self) -> (HolderTrainer<'_>, &mut AdamW) {
        let Self { comm, infos, parameters, slices, values, optimizer, loaded, refuses } = self;
        (HolderTrainer { comm, infos, parameters, slices, values, loaded, refuses }, optimizer)
    }
}

/// The number of steps with distinct values.
pub(super) const STEPS: u64 = 64;

pub(super) struct HolderTrainer<'a> {
    comm: &'a mut Communicator,
    infos: &'a [ParamInfo],
    parameters: &'a ShardMetadata<Chunk>,
    slices: &'a ShardMetadata<Slice>,
    values: &'a mut [Flat],
    loaded: &'a mut usize,
    refuses: &'a Mutex<Option<usize>>,
}

impl Shards for HolderTrainer<'_> {
    fn infos(&self) -> &[ParamInfo] {
        self.infos
    }

    fn parameters(&self) -> ShardMetadata<Chunk> {
        self.parameters.clone()
    }

    fn slices(&self) -> ShardMetadata<Slice> {
        self.slices.clone()
    }

    fn read(&self, chunk: Chunk, f: &mut dyn FnMut(Values<'_>)) -> Result<()> {
        f(self.values[self.hand_out(chunk)?].slice(0, chunk.len));
        Ok(())
    }

    fn write(&mut self, chunk: Chunk, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<()> {
        let number = self.hand_out(chunk)?;
        f(self.values[number].slice_mut(0, chunk.len));
        Ok(())
    }

    fn loaded(&mut self) -> Result<()> {
        *self.loaded += 1;
        Ok(())
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.comm
    }
}

impl HolderTrainer<'_> {
    /// Returns the number of a chunk, unless it is refused.
    fn hand_out(&self, chunk: Chunk) -> Result<usize> {
        let number = self.parameters.chunks.iter().position(|held| *held == chunk).unwrap();
        if *self.refuses.lock().unwrap() == Some(number) {
            let parameter = self.infos[chunk.parameter].name.clone();
            return Err(crate::Error::Model { parameter, source: "it is not at home".into() });
        }
        Ok(number)
    }
}

impl<T> ShardMetadata<T> {
    /// Returns metadata with the same ranks and no chunks.
    fn map<U>(&self) -> ShardMetadata<U> {
        ShardMetadata { chunks: Vec::new(), copy: self.copy, copies: self.copies }
    }
}

fn divide(division: ModelDivision, all: &[Chunk], rank: usize, ranks: usize) -> ShardMetadata<Chunk> {
    let total: usize = all.iter().map(|chunk| chunk.len).sum();
    match division {
        ModelDivision::Replicated => ShardMetadata { chunks: all.to_vec(), copy: rank, copies: ranks },
        ModelDivision::Last if rank + 1 == ranks => ShardMetadata::alone(all.to_vec()),
        ModelDivision::Last => ShardMetadata::alone(Vec::new()),
        ModelDivision::Even | ModelDivision::OptimizerOnly => {
            ShardMetadata::alone(cut(all, rank * total / ranks, (rank + 1) * total / ranks))
        }
        ModelDivision::Scattered => {
            let copies = if ranks.is_multiple_of(2) { 2 } else { 1 };
            let holders = ranks / copies;
            let mine = (0..total).step_by(7).filter(|start| start / 7 % holders == rank % holders);
            let chunks = mine.flat_map(|start| cut(all, start, (start + 7).min(total))).collect();
            ShardMetadata { chunks, copy: rank / holders, copies }
        }
    }
}

/// Returns the values number `from` to `to` of all.
fn cut(all: &[Chunk], from: usize, to: usize) -> Vec<Chunk> {
    let mut start = 0;
    let mut cut = Vec::new();
    for chunk in all {
        let (first, last) = (from.max(start), to.min(start + chunk.len));
        if first < last {
            cut.push(Chunk { offset: first - start, len: last - first, ..*chunk });
        }
        start += chunk.len;
    }
    cut
}

fn fill(mut values: ValuesMut<'_>, step: u64, salt: usize, chunk: &Chunk) {
    let number = |index: usize| {
        let place = (chunk.offset + index) as u64 + 20 * (chunk.parameter as u64 + 7 * salt as u64);
        // Exact in every type. bf16 is used for parameters only: 8 bits, and no salt.
        let number = if salt == 0 { place * 5 + step * 3 } else { place * 64 + step };
        if salt == 0 { u16::try_from(number % 251).unwrap() } else { u16::try_from(number % 65_536).unwrap() }
    };
    let len = values.len();
    for index in 0..len {
        let value = f32::from(number(index));
        match &mut values {
            ValuesMut::F32(values) => values[index] = value,
            ValuesMut::F64(values) => values[index] = value.into(),
            ValuesMut::F16(values) => values[index] = f16::from_f32(value),
            ValuesMut::Bf16(values) => values[index] = bf16::from_f32(value),
        }
    }
}

fn scalar_of(step: u64, salt: usize, parameter: usize) -> f64 {
    1.0 / (step as f64 + 100.0 * salt as f64 + 1000.0 * parameter as f64 + 3.0)
}
