//! What can go wrong in parallel training.

use std::ops::Range;

use dist_collectives::Error as CollectiveError;
use dist_collectives::transport::ErrorSource;

use crate::pipeline::{Flaw, TensorMeta};
use crate::{CheckpointError, FloatType, StepDescriptor};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of code that this crate calls: a model, a data source.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

dist_transport::error_enum! {
/// What can go wrong in parallel training.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two parameters of one model have the same name.
    #[error("the model has two parameters named {name}")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A buffer is said to be trainable. A gradient trains a parameter; a block changes a buffer by itself.
    #[error("{name} is said to be a buffer and to be trainable: it can be one of the two")]
    TrainableBuffer {
        /// The name.
        name: String,
    },
    /// No parameter has this name.
    #[error("the model has no parameter named {name}")]
    UnknownName {
        /// The name that was asked for.
        name: String,
    },
    /// A parameter cannot be the same as another, because they do not look the same or come in the wrong order.
    #[error("parameter {name} cannot be the same as {same_as}: {reason}")]
    CannotTie {
        /// The parameter that was to be tied.
        name: String,
        /// The parameter that it was to be tied to.
        same_as: String,
        /// Why not.
        reason: &'static str,
    },
    /// A block was given what another block saved.
    #[error("backward was given what the forward of another block saved")]
    ForeignSaved,
    /// Two runs of values that must look the same do not.
    #[error("{got_len} values of {got} were given where {expected_len} of {expected} are expected")]
    ValuesDiffer {
        /// How many values are expected.
        expected_len: usize,
        /// Their type.
        expected: FloatType,
        /// How many values were given.
        got_len: usize,
        /// Their type.
        got: FloatType,
    },
    /// A parameter is in no memory at the moment: only its sharded training knows its values.
    #[error("the parameter's memory is freed between its uses")]
    Freed,
    /// A block has changed a parameter by itself, and the change would be lost where the parameter is sharded.
    #[error(
        "a block has changed {parameter} by itself, and the change would be lost, because the parameter is sharded: declare \
         state that a block changes as a buffer (ParamInfo::buffer)"
    )]
    ChangedByBlock {
        /// The parameter's name.
        parameter: String,
    },
    /// Ranks that each have all of a frozen parameter have different values of it; every rank gets this same error.
    #[error(
        "the frozen parameter {parameter} has other values on rank {rank} than on rank 0: declare state that a block changes \
         as a buffer (ParamInfo::buffer)"
    )]
    FrozenDiffers {
        /// The first rank that disagrees with rank 0.
        rank: usize,
        /// The parameter's name.
        parameter: String,
    },
    /// A model says neither of a slot for a parameter nor of another way to reach it.
    #[error("parameter number {index} lies in no slot, and the model has no other way to reach it")]
    NoSlot {
        /// The parameter's index.
        index: usize,
    },
    /// Ranks that train by themselves were to be saved, and have not met since their last steps.
    #[error("the ranks have different parameters: they have taken {steps} steps since they met")]
    NotSynchronised {
        /// Steps since the last meeting.
        steps: usize,
    },
    /// A setting, as of an optimizer or a sampler, makes no sense.
    #[error("{name} cannot be {value}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What it was to be.
        value: f64,
    },
    /// An option that a parameter has of its own makes no sense.
    #[error("{name} of {parameter} cannot be {value}")]
    ParamSetting {
        /// The parameter's name.
        parameter: String,
        /// The setting.
        name: &'static str,
        /// What it was to be.
        value: f64,
    },
    /// An optimizer whose groups are those of one model was given a slice of another.
    #[error(
        "slice {slice} is in no group: the optimizer's groups are those of a model with {parameters} parameters"
    )]
    SliceWithoutGroup {
        /// The slice's number.
        slice: usize,
        /// How many parameters the groups were made of.
        parameters: usize,
    },
    /// A slice has another length or type than at its last step.
    #[error("slice {slice} has another length or type than at its last step")]
    SliceChanged {
        /// The slice's number.
        slice: usize,
    },
    /// A gradient was reported for a parameter that the model, or the block that reported it, does not have.
    #[error("a gradient was reported for parameter number {index} of a model or block with {count}")]
    NoSuchParameter {
        /// The index that was given.
        index: usize,
        /// How many parameters there are.
        count: usize,
    },
    /// A backward reported two gradients for one parameter.
    #[error("the gradient of {parameter} was reported twice in one backward")]
    ReportedTwice {
        /// The parameter's name.
        parameter: String,
    },
    /// A gradient does not look like its parameter.
    #[error("the gradient of {parameter} does not look like the parameter")]
    WrongGradient {
        /// The parameter's name.
        parameter: String,
        /// How it differs.
        source: ErrorSource<Self>,
    },
    /// Not every rank has the same model; every rank gets this same error.
    #[error(
        "the models differ in parameter {parameter}, number {index}: {on_rank_0} on rank 0, {on_rank} on rank {rank}"
    )]
    ModelsDiffer {
        /// The name of the first parameter that differs, on rank 0 if it has it.
        parameter: String,
        /// Its index.
        index: usize,
        /// What it is on rank 0.
        on_rank_0: String,
        /// The first rank that disagrees with rank 0.
        rank: usize,
        /// What it is there.
        on_rank: String,
    },
    /// Not every rank was given the same options; every rank gets this same error.
    #[error(
        "rank {rank} was given other options than rank 0: {setting} is {there} there, {on_rank_0} on rank 0"
    )]
    OptionsDiffer {
        /// The first rank that disagrees with rank 0.
        rank: usize,
        /// The first option in which it does.
        setting: String,
        /// What it is there.
        there: String,
        /// What it is on rank 0.
        on_rank_0: String,
    },
    /// Not every rank has changed its parameters, or clipped its gradients, with the same settings since the last step; every
    /// rank gets this same error, at the next step, evaluation or save, and again until a checkpoint is loaded.
    #[error(
        "the ranks have trained with different settings: {setting} is {there} on rank {rank}, {on_rank_0} on rank 0. Give \
         every rank the same, and go on from a checkpoint"
    )]
    SettingsDiffer {
        /// The first rank that disagrees with rank 0; of a pipeline its number in the world.
        rank: usize,
        /// The first setting in which it does.
        setting: String,
        /// What it is there.
        there: String,
        /// What it is on rank 0.
        on_rank_0: String,
    },
    /// The trained parameters are not the same on all ranks; every rank gets this same error, at a step that
    /// [compares](crate::Ddp::compare_parameters) them, and again until a checkpoint is loaded.
    #[error(
        "the trained parameter {parameter} has other values on rank {rank} than on rank 0: all ranks have to change their \
         parameters alike, with the same optimizer, settings and gradients, which are those that the step has given them. Go \
         on from a checkpoint"
    )]
    ParametersDiffer {
        /// The first rank that disagrees with rank 0.
        rank: usize,
        /// The first parameter in which it does.
        parameter: String,
    },
    /// As [`SettingsDiffer`](Self::SettingsDiffer), but before the last step, so that nobody knows in which setting.
    #[error(
        "the ranks have trained with different settings before the last step. Give every rank the same, and go on from a \
         checkpoint"
    )]
    EarlierSettingsDiffer,
    /// The last step has panicked, which the caller has caught: there are no gradients to use. Take a step first.
    #[error("the last step has panicked, so that there are no gradients to use: take the step again first")]
    StepPanicked,
    /// A function that gives a training its first values has not given all ranks the same; every rank gets this same error.
    #[error("rank {rank} was given other first values of {parameter} than rank 0")]
    InitialValuesDiffer {
        /// The first rank that disagrees with rank 0.
        rank: usize,
        /// The name of the first parameter of which it was given other values.
        parameter: String,
    },
    /// A model cannot be shared by so many ranks.
    #[error("{ranks} ranks cannot be divided into groups of {shard_degree}")]
    ShardDegree {
        /// How many ranks were to form a group.
        shard_degree: usize,
        /// How many ranks there are.
        ranks: usize,
    },
    /// Units are not made of all blocks of the model, at least one each.
    #[error("units of {sizes:?} blocks cannot be made of a model with {blocks}")]
    Units {
        /// How many blocks each unit was to have.
        sizes: Vec<usize>,
        /// How many blocks there are.
        blocks: usize,
    },
    /// Blocks do not have all parameters of a model, each after those of the block before.
    #[error("blocks whose parameters begin at {starts:?} are not those of a model with {parameters}")]
    Starts {
        /// The index of each block's first parameter, and the end.
        starts: Vec<usize>,
        /// How many parameters there are.
        parameters: usize,
    },
    /// Parameters cannot be gathered ahead.
    #[error("parameters cannot be gathered ahead: {reason}")]
    Prefetch {
        /// Why not.
        reason: &'static str,
    },
    /// A pipeline schedule for nothing was asked for, or for more than anyone waits for.
    #[error(
        "there is no pipeline schedule of {ranks} ranks with {stages} stages and {micro_batches} micro-batches"
    )]
    NoSchedule {
        /// Number of ranks.
        ranks: usize,
        /// Number of stages.
        stages: usize,
        /// Number of micro-batches.
        micro_batches: usize,
    },
    /// A pipeline schedule has a flaw.
    #[error("the pipeline schedule has a flaw")]
    PipelineSchedule(#[from] Flaw),
    /// A pipeline schedule is for another number of ranks.
    #[error("the pipeline schedule is for {ranks} ranks, and there are {world_size}")]
    PipelineRanks {
        /// How many it is for.
        ranks: usize,
        /// How many there are.
        world_size: usize,
    },
    /// Stages are not as many as a schedule needs, or not made of all blocks of the model, in order and at least one
    /// each.
    #[error("{given:?} is no way to cut {blocks} blocks into {stages} stages")]
    Stages {
        /// How many stages there should be.
        stages: usize,
        /// How many blocks there are.
        blocks: usize,
        /// Which blocks each stage was to have.
        given: Vec<Range<usize>>,
    },
    /// There are no stages, or more than layers.
    #[error("{layers} layers cannot be cut into {stages} stages")]
    CannotSplit {
        /// How many layers there are.
        layers: usize,
        /// How many stages there should be.
        stages: usize,
    },
    /// A stage's output does not look like those of other micro-batches.
    #[error("stage {stage} gives an output of {got} where it gave one of {expected} before")]
    ActivationShape {
        /// The stage.
        stage: usize,
        /// What its first output looked like.
        expected: TensorMeta,
        /// What this one looks like.
        got: TensorMeta,
    },
    /// The gradient of a stage's input does not look like the input.
    #[error("stage {stage} gives a gradient of {got} for an input of {expected}")]
    GradientShape {
        /// The stage.
        stage: usize,
        /// What the input looks like.
        expected: TensorMeta,
        /// What the gradient looks like.
        got: TensorMeta,
    },
    /// A stage that is not the first gives no gradient of its input.
    #[error("stage {stage} gives no gradient of its input, which the stage before it needs")]
    NoInputGradient {
        /// The stage.
        stage: usize,
    },
    /// An activation has too many dims to be sent.
    #[error("the output of stage {stage} has {dims} dims, and at most 8 can be sent")]
    TooManyDims {
        /// The stage.
        stage: usize,
        /// How many dims it has.
        dims: usize,
    },
    /// An activation was not handed out, or as something that it cannot be.
    #[error("an activation is not what it is said to be")]
    NoActivation,
    /// A block was used that another rank has.
    #[error("this block is on another rank")]
    Placeholder,
    /// A step or an evaluation without micro-batches was asked for, on every rank.
    #[error("there is no micro-batch to take the mean of")]
    NoMicroBatches,
    /// Not every rank of all pipelines was asked for the same step or evaluation; every rank gets this same error.
    #[error("rank {rank} of pipeline {pipeline} was asked for {there}, rank 0 of pipeline 0 for {on_first}")]
    PipelinesDiffer {
        /// The first pipeline that has a rank which disagrees with rank 0 of the first one.
        pipeline: usize,
        /// That rank's number in its pipeline.
        rank: usize,
        /// What it was asked for.
        there: StepDescriptor,
        /// What rank 0 of the first pipeline was asked for.
        on_first: StepDescriptor,
    },
    /// The examples of a micro-batch were asked for that the step does not have.
    #[error(
        "micro-batch {index} was step_of for, and the step has {count}: call the trainer with the step's number of micro-batches \
         (Step::micro_batches)"
    )]
    NoSuchMicroBatch {
        /// The number of the micro-batch.
        index: usize,
        /// How many micro-batches the step has.
        count: usize,
    },
    /// Of the micro-batches of one step, or of the steps from one meeting to the next, only some say how much they count.
    #[error("either all micro-batches of a step say how much they count, or none does")]
    PartlyWeighted,
    /// The micro-batches of a step, or the steps of a meeting, count for nothing, all together; every rank gets this same
    /// error.
    #[error("{micro_batches} micro-batches count for nothing")]
    ZeroWeight {
        /// How many micro-batches all ranks have computed.
        micro_batches: usize,
    },
    /// Not every rank was asked for the same step; every rank gets this same error.
    #[error("rank {rank} was asked for {there}, rank 0 for {on_rank_0}")]
    StepsDiffer {
        /// The first rank that disagrees with rank 0.
        rank: usize,
        /// What it was asked for.
        there: StepDescriptor,
        /// What rank 0 was asked for.
        on_rank_0: StepDescriptor,
    },
    /// The ranks were asked for the same number of micro-batches in different parts, and parts are dealt each by itself;
    /// every rank gets this same error.
    #[error(
        "{computed} micro-batches were computed of {micro_batches}: not all ranks have accumulated the same parts"
    )]
    AccumulatedDiffers {
        /// How many every rank was asked for, those that were accumulated included.
        micro_batches: usize,
        /// How many all ranks have computed.
        computed: usize,
    },
    /// The ranks meet after different numbers of steps, which do not [say how much they count](crate::Loss). Every rank gets this
    /// same error, and the job is aborted, because the ranks would not come together again.
    #[error("rank {rank} meets after {there} steps, rank 0 after {on_rank_0}")]
    InnerStepsDiffer {
        /// The first rank that disagrees with rank 0.
        rank: usize,
        /// How many steps it has taken since the last meeting.
        there: u64,
        /// How many rank 0 has taken.
        on_rank_0: u64,
    },
    /// The model does not hand out a parameter as what it is said to be.
    #[error("the model does not hand out parameter {parameter}")]
    Model {
        /// The parameter's name.
        parameter: String,
        /// What the model says, or how it differs.
        source: BoxError,
    },
    /// The caller's computation failed; the job is aborted, so that no rank waits for this one.
    #[error("computing the gradients failed")]
    Compute(#[source] BoxError),
    /// The caller could not apply the gradients; the job is aborted, so that no rank waits for this one.
    #[error("applying the gradients failed")]
    Apply(#[source] BoxError),
    /// Not every rank brought as many gradients of the same types and lengths; every rank gets this same error.
    #[error("rank {rank} has gradients of other types or lengths than rank 0")]
    GradientsDiffer {
        /// The first rank that disagrees with rank 0.
        rank: usize,
    },
    /// A hook failed; the job is aborted, so that no rank waits for this one.
    #[error("the hook {hook} failed")]
    Hook {
        /// Its name.
        hook: String,
        /// What it says.
        source: BoxError,
    },
    /// A hook panicked; the job is aborted.
    #[error("the hook {hook} panicked")]
    HookPanicked {
        /// Its name.
        hook: String,
    },
    /// There is no thread for a hook.
    #[error("cannot start a thread for the hook")]
    HookThread(#[source] std::io::Error),
    /// There is no compression that is written like this.
    #[error("{text} is none of none, bf16, f16, int8, topk:RATIO, powersgd:RANK")]
    UnknownCompression {
        /// What was written.
        text: String,
    },
    /// A tensor has more values than `u32` has indices.
    #[error("a tensor of {len} values has more than indices of 32 bits reach")]
    TooLong {
        /// How many values there are.
        len: usize,
    },
    /// A sparse gradient has not one index for each value.
    #[error("a sparse gradient has {indices} indices and {values} values")]
    SparseDiffers {
        /// How many indices there are.
        indices: usize,
        /// How many values there are.
        values: usize,
    },
    /// An index in a sparse gradient is beyond the tensor's end.
    #[error("index {index} is beyond a tensor of {len} values")]
    IndexOutOfRange {
        /// The index.
        index: u32,
        /// How many values the tensor has.
        len: usize,
    },
    /// There is no such rank to be the parameter server.
    #[error("rank {server} cannot be the parameter server of {world_size} ranks")]
    NoSuchServer {
        /// The rank that was to be the server.
        server: usize,
        /// How many ranks there are.
        world_size: usize,
    },
    /// A tensor cannot be cut into no parts, or made from none.
    #[error("a tensor has at least one part")]
    NoParts,
    /// A shape is not that of the values that come with it.
    #[error("{len} values do not make the shape {shape:?}")]
    ShapeDiffers {
        /// The shape.
        shape: Vec<usize>,
        /// How many values there are.
        len: usize,
    },
    /// The parts of a tensor do not fit together.
    #[error("part {part} has the shape {got:?}, which does not go with {expected:?} along dim 0")]
    PartsDiffer {
        /// The part that does not fit.
        part: usize,
        /// The shape of the first part.
        expected: Vec<usize>,
        /// The shape of this one.
        got: Vec<usize>,
    },
    /// Ranks have called functions of a trainer that do not go together, such as a save on one rank only; the job is aborted.
    #[error("rank {rank} called {there}, {} called {here}", named(*.other))]
    CallsDiffer {
        /// A rank, by its number in the world.
        rank: usize,
        /// What it called.
        there: String,
        /// The rank that it disagrees with, likewise; `None` for the one that has this error.
        other: Option<usize>,
        /// What that one called.
        here: String,
        /// What the communicator says.
        source: ErrorSource<CollectiveError>,
    },
    /// A checkpoint could not be saved or loaded.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// Communication failed.
    #[error("communication between the ranks failed")]
    Communication(#[source] ErrorSource<CollectiveError>),
}
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

impl Error {
    pub(crate) fn communication(source: CollectiveError) -> Self {
        use CollectiveError::{Aborted, Mismatch};
        let (rank, there, other, here) = match &source {
            Mismatch { peer, ours, theirs } => (*peer, Some(theirs), None, Some(ours)),
            Aborted { rank, theirs, reporter, reported, .. } => {
                (*rank, theirs.as_ref(), Some(*reporter), reported.as_ref())
            }
            _ => return Self::Communication(source.into()),
        };
        let names =
            there.and_then(|call| call.announced_name()).zip(here.and_then(|call| call.announced_name()));
        match names {
            Some((there, here)) => Self::CallsDiffer { rank, there, other, here, source: source.into() },
            None => Self::Communication(source.into()),
        }
    }

    /// Whether a deadline ran out, this rank's or another's.
    pub fn is_timeout(&self) -> bool {
        self.collective().is_some_and(CollectiveError::is_timeout)
    }

    /// The one rank that the error is about, if it is about one, by its number in the world. If the ranks of a trainer
    /// disagree, it is the first that disagrees with rank 0, by its number among them.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::ModelsDiffer { rank, .. }
            | Self::OptionsDiffer { rank, .. }
            | Self::SettingsDiffer { rank, .. }
            | Self::FrozenDiffers { rank, .. }
            | Self::ParametersDiffer { rank, .. }
            | Self::InitialValuesDiffer { rank, .. }
            | Self::StepsDiffer { rank, .. }
            | Self::InnerStepsDiffer { rank, .. }
            | Self::GradientsDiffer { rank } => Some(*rank),
            Self::Checkpoint(error) => error.rank,
            _ => self.collective()?.peer(),
        }
    }

    /// The collective's error that led to this one, also through code of the caller.
    fn collective(&self) -> Option<&CollectiveError> {
        std::iter::successors(Some(self as &(dyn std::error::Error + 'static)), |error| error.source())
            .find_map(|error| error.downcast_ref())
    }

    /// Whether every rank has an error like this, and none waits for another.
    pub(crate) const fn is_on_every_rank(&self) -> bool {
        matches!(
            self,
            Self::StepsDiffer { .. }
                | Self::AccumulatedDiffers { .. }
                | Self::NoMicroBatches
                | Self::PipelinesDiffer { .. }
                | Self::ZeroWeight { .. }
                | Self::GradientsDiffer { .. }
                | Self::FrozenDiffers { .. }
                | Self::ParametersDiffer { .. }
                | Self::SettingsDiffer { .. }
                | Self::EarlierSettingsDiffer
        )
    }

    /// What a computation failed with: its own error, or one of ours that it passes on.
    pub(crate) fn compute(source: BoxError) -> Self {
        Self::passed_on(source).unwrap_or_else(Self::Compute)
    }

    /// The error of ours that a caller's code has passed on, unless every rank would have it: only this one failed.
    pub(crate) fn passed_on(source: BoxError) -> Result<Self, BoxError> {
        match source.downcast::<Self>() {
            Ok(error) if error.is_on_every_rank() => Err(error),
            Ok(error) => Ok(*error),
            Err(source) => Err(source),
        }
    }
}

/// A rank, or the one that has the error.
fn named(rank: Option<usize>) -> String {
    rank.map_or_else(|| "this rank".to_owned(), |rank| format!("rank {rank}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainingCall;

    #[test]
    fn who_is_late_can_be_asked_of_an_error_of_training() {
        let late = || CollectiveError::Absent { ranks: vec![3] };
        let failures =
            [Error::communication(late()), Error::Compute(late().into()), Error::Apply(Box::new(late()))];
        for error in failures {
            assert_eq!((error.peer(), error.is_timeout()), (Some(3), true), "{error}");
            let source = std::error::Error::source(&error).unwrap();
            assert!(matches!(source.downcast_ref(), Some(CollectiveError::Absent { .. })), "{error}");
            assert!(format!("{error:?}").contains("ranks [3] did not come\n"), "{error:?}");
        }
        assert_eq!(Error::GradientsDiffer { rank: 2 }.peer(), Some(2));
        assert!(!Error::NoMicroBatches.is_timeout());
    }

    /// As tests/training/errors.rs has it of the errors that can be made elsewhere.
    #[test]
    fn what_ranks_were_asked_for_is_not_what_a_computation_fails_with() {
        let step_of = |micro_batches| StepDescriptor::new(TrainingCall::Step, micro_batches, false);
        let (there, first) = (step_of(1), step_of(2));
        let steps = Error::StepsDiffer { rank: 1, there, on_rank_0: first };
        let evaluations = Error::PipelinesDiffer { pipeline: 0, rank: 1, there, on_first: first };
        for error in [steps, evaluations] {
            assert!(matches!(Error::compute(error.into()), Error::Compute(_)));
        }
    }
}
