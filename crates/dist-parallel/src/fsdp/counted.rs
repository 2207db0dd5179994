//! A training without memory and without other ranks, to predict the memory of a plan.

use std::slice;
use std::sync::Arc;

use dist_collectives::Communicator;

use super::groups::Groups;
use super::parameters::Parameters;
use super::plan::Plan;
use crate::buffers::Buffers;
use crate::engine::{AssignedMicroBatch, BatchSource, Interpreter, PassInput, RoundActions, Stage, Work};
use crate::flat::Flat;
use crate::flat_storage::{Allocator, ByteCounter};
use crate::gradients::{GradientLayout, GradientMemory, Gradients, RoundRole};
use crate::unconnected::Unconnected;
use crate::{
    Block, BoxError, BufferView, Materialised, ParamInfo, Params, Pass, Ready, Resharded, Result, Saved,
    Sequence, Values, ValuesMut,
};

/// One rank of a training whose buffers only count their bytes. It executes the actions of a step as a training does, by
/// the same interpreter.
pub(super) struct CountedTraining {
    stage: Stage<Sequence<()>>,
    groups: Groups,
    actions: RoundActions,
}

/// The bytes of a rank's buffers.
pub(super) struct CountedBytes {
    /// Between steps: parameters and buffers.
    pub(super) parameters: usize,
    /// Between a step and the next: gradients.
    pub(super) gradients: usize,
    /// The maximum in a step that follows another.
    pub(super) peak: usize,
}

impl CountedTraining {
    /// Returns the bytes of a training by steps of this many rounds.
    pub(super) fn bytes(plan: &Plan, rounds: usize, materialised: Materialised) -> Result<CountedBytes> {
        let counter = Arc::new(ByteCounter::default());
        let mut training = Self::new(plan, &Allocator::Counter(Arc::clone(&counter)), materialised)?;
        let parameters = counter.live();
        training.step(rounds)?;
        let gradients = counter.live() - parameters;
        counter.take_peak();
        training.step(rounds)?;
        Ok(CountedBytes { parameters, gradients, peak: counter.take_peak() })
    }

    fn new(plan: &Plan, allocator: &Allocator, materialised: Materialised) -> Result<Self> {
        let ranks = plan.degrees.shards * plan.degrees.replicas;
        let mut world = Communicator::new(Unconnected::rank_0(ranks));
        let mut groups = Groups::new(&mut world, plan.degrees, plan.reshard_group)?;
        groups.allocator = allocator.clone();
        let (layout, precision) = (&plan.layout, plan.options.precision);
        let block = |range: &[usize]| -> Box<dyn Block<()>> {
            Box::new(CountedBlock::new(&plan.infos[range[0]..range[1]], allocator, materialised))
        };
        let mut model = Sequence::new(plan.starts.windows(2).map(block).collect())?;
        let fill = |_: &mut _, _: &_, _: &mut _| Ok(());
        let parameters =
            Parameters::new(layout, plan.degrees, precision, &mut groups, &mut model, false, fill)?;
        let gradients = GradientLayout::of_units(&plan.infos, layout, precision);
        let scatter = plan.degrees.scatter();
        let stage = Stage {
            number: 0,
            range: 0..plan.infos.len(),
            parameters,
            gradients: Gradients::new(gradients, scatter, GradientMemory::shared(), false, 0),
            buffers: Buffers::new(model.infos()),
            model,
            plan: plan.clone(),
            tie_of: Vec::new(),
        };
        Ok(Self { stage, groups, actions: RoundActions::new(plan) })
    }

    /// Takes a step and gives the models the updated parameters.
    fn step(&mut self, rounds: usize) -> Result<()> {
        let Self { stage, groups, actions } = self;
        stage.gradients.begin_step();
        for round in 0..rounds {
            let source =
                BatchSource::Stages { input: &mut |_| Ok(()), loss: &mut |_, ()| Ok(((0.0, 1), ())) };
            let work =
                &mut Work::Blocks { weighted: false, block: Sequence::block, source, activations: None };
            let role = RoundRole::new(true, round + 1 == rounds);
            let pass = Pass { training: true, step: 0, micro_batch: round };
            let assigned = AssignedMicroBatch { index: Some(round), number: round, role, pass };
            let pass = PassInput { work, assigned: &|_| assigned };
            Interpreter::new(slice::from_mut(stage), groups, 0, pass, None).run(&actions.step)?;
        }
        stage.gradients.rest();
        stage.parameters.rest(groups)?;
        stage.gradients.finish(rounds.max(1), &mut groups.reduce())?;
        stage.publish(groups, |flat_param| flat_param.trainable)
    }
}

/// A block whose parameters are counted. Their values are empty.
struct CountedBlock {
    /// The parameters as the engine sees them, without values.
    infos: Vec<ParamInfo>,
    lens: Vec<usize>,
    memory: Vec<Option<CountedParameter>>,
    allocator: Allocator,
    materialised: Materialised,
}

/// The memory of a parameter.
#[expect(dead_code, reason = "its bytes are counted until it is dropped")]
enum CountedParameter {
    Own(Flat),
    Shared(BufferView),
}

impl CountedBlock {
    fn new(infos: &[ParamInfo], allocator: &Allocator, materialised: Materialised) -> Self {
        let own = |info: &ParamInfo| {
            let allocate = || CountedParameter::Own(allocator.zeros(info.dtype, info.len()));
            info.same_as.is_none().then(allocate)
        };
        let without_values = |info: &ParamInfo| ParamInfo { shape: vec![0], same_as: None, ..info.clone() };
        Self {
            infos: infos.iter().map(without_values).collect(),
            lens: infos.iter().map(ParamInfo::len).collect(),
            memory: infos.iter().map(own).collect(),
            allocator: allocator.clone(),
            materialised,
        }
    }
}

impl Params for CountedBlock {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        f(Flat::zeros(self.infos[index].dtype, 0).slice(0, 0));
        Ok(())
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        f(Flat::zeros(self.infos[index].dtype, 0).slice_mut(0, 0));
        Ok(())
    }

    fn materialise(&mut self, index: usize, view: BufferView) -> Result<Materialised, BoxError> {
        self.memory[index] = Some(match self.materialised {
            Materialised::Shared => CountedParameter::Shared(view),
            Materialised::Copied => {
                let copy = self.allocator.zeros(self.infos[index].dtype, self.lens[index]);
                CountedParameter::Own(copy)
            }
        });
        Ok(self.materialised)
    }

    fn reshard(&mut self, index: usize) -> Result<Resharded, BoxError> {
        self.memory[index] = None;
        Ok(Resharded::Freed)
    }
}

impl Block<()> for CountedBlock {
    fn forward(&mut self, (): ()) -> Result<((), Saved), BoxError> {
        Ok(((), Saved::new(())))
    }

    fn backward(&mut self, _: Saved, (): (), ready: &mut Ready<'_>) -> Result<Option<()>, BoxError> {
        for (index, info) in self.infos.iter().enumerate() {
            ready(index, Flat::zeros(info.dtype, 0).slice(0, 0))?;
        }
        Ok(Some(()))
    }
}
