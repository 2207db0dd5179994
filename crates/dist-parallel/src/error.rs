//! The errors of parallel training.

use std::ops::Range;

use dist_collectives::Error as CollectiveError;
use dist_collectives::transport::ErrorSource;

use crate::pipeline::{Flaw, TensorMeta};
use crate::trainer::Strategy;
use crate::{CheckpointError, FloatType, StepDescriptor};

/// The result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of code that this crate calls, such as a model or a data source.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

dist_transport::error_enum! {
/// An error of parallel training.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two parameters of one model have the same name.
    #[error("the model has two parameters named {name}")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A buffer is declared as trainable. A gradient trains a parameter; a block changes a buffer by itself.
    #[error("{name} is declared as a buffer and as trainable; declare it as one of the two")]
    TrainableBuffer {
        /// The name.
        name: String,
    },
    /// No parameter has this name.
    #[error("the model has no parameter named {name}")]
    UnknownName {
        /// The requested name.
        name: String,
    },
    /// A parameter cannot be tied to another: they differ in shape, type or kind, or the other does not come first.
    #[error("parameter {name} cannot be tied to {same_as}: {reason}")]
    CannotTie {
        /// The parameter to tie.
        name: String,
        /// The parameter to tie it to.
        same_as: String,
        /// The reason.
        reason: &'static str,
    },
    /// A block received the saved activations of another block.
    #[error("backward received the activations that another block has saved")]
    ForeignSaved,
    /// Two slices of values differ in length or type.
    #[error("got {got_len} values of {got}, expected {expected_len} of {expected}")]
    ValuesDiffer {
        /// The expected number of values.
        expected_len: usize,
        /// The expected type.
        expected: FloatType,
        /// The number of values that were passed.
        got_len: usize,
        /// The type of the values that were passed.
        got: FloatType,
    },
    /// The parameter is freed between its uses. Only its sharded training has its values.
    #[error("the parameter is freed between its uses and has no values now")]
    Freed,
    /// A block has changed a sharded parameter by itself, and the change would be lost.
    #[error(
        "a block has changed {parameter} by itself, and the change would be lost, because the parameter is sharded: declare \
         state that a block changes as a buffer (ParamInfo::buffer)"
    )]
    ChangedByBlock {
        /// The parameter's name.
        parameter: String,
    },
    /// A model has neither a slot for a parameter nor its own way to access it.
    #[error("the model has no slot for parameter number {index} and does not implement another access")]
    NoSlot {
        /// The parameter's index.
        index: usize,
    },
    /// Ranks of local SGD cannot be saved or evaluated, because they have taken steps since their last synchronisation
    /// point.
    #[error(
        "the ranks have different parameters after {steps} steps since the last synchronisation point: synchronise before \
         you save or evaluate"
    )]
    NotSynchronised {
        /// The number of steps since the last synchronisation point.
        steps: usize,
    },
    /// A setting, for example of an optimizer or a sampler, is out of range.
    #[error("{name} cannot be {value}")]
    Setting {
        /// The name of the setting.
        name: &'static str,
        /// The value of the setting.
        value: f64,
    },
    /// An optimizer's option for one parameter is out of range.
    #[error("{name} of {parameter} cannot be {value}")]
    ParamSetting {
        /// The parameter's name.
        parameter: String,
        /// The name of the setting.
        name: &'static str,
        /// The value of the setting.
        value: f64,
    },
    /// An optimizer with the parameter groups of one model received a slice of another.
    #[error(
        "slice {slice} is in no parameter group: the optimizer's groups are for a model with {parameters} parameters"
    )]
    SliceWithoutGroup {
        /// The slice's number.
        slice: usize,
        /// The number of parameters of the groups.
        parameters: usize,
    },
    /// The learning rate of an optimizer was set that does not implement
    /// [`set_learning_rate`](crate::Optimizer::set_learning_rate).
    #[error("the learning rate of the optimizer {optimizer} cannot be set: implement Optimizer::set_learning_rate for it")]
    FixedLearningRate {
        /// The optimizer's name.
        optimizer: &'static str,
    },
    /// The rule of an optimizer takes another number of arrays than its state has.
    #[error("the rule of the optimizer {optimizer} takes {needs} arrays of state, but its SliceStates have {has}")]
    StateArrays {
        /// The optimizer's name.
        optimizer: &'static str,
        /// The number of arrays of its state.
        has: usize,
        /// The number of arrays that its rule takes.
        needs: usize,
    },
    /// A slice differs in length or type from its last step.
    #[error("slice {slice} differs in length or type from its last step")]
    SliceChanged {
        /// The slice's number.
        slice: usize,
    },
    /// A gradient was reported for a parameter that the model, or the reporting block, does not have.
    #[error("a gradient was reported for parameter number {index}, but the model or block has {count} parameters")]
    NoSuchParameter {
        /// The reported index.
        index: usize,
        /// The number of parameters.
        count: usize,
    },
    /// A backward reported two gradients for one parameter.
    #[error("the gradient of {parameter} was reported twice in one backward")]
    ReportedTwice {
        /// The parameter's name.
        parameter: String,
    },
    /// A gradient differs from its parameter in length or type.
    #[error("the gradient of {parameter} differs from the parameter in length or type")]
    WrongGradient {
        /// The parameter's name.
        parameter: String,
        /// The difference.
        source: ErrorSource<Self>,
    },
    /// The ranks have different models. Every rank gets this error.
    #[error(
        "the models differ in parameter {parameter}, number {index}: {on_rank_0} on rank 0, {on_rank} on rank {rank}"
    )]
    ModelsDiffer {
        /// The name of the first parameter that differs: on rank 0, if it has the parameter.
        parameter: String,
        /// Its index.
        index: usize,
        /// The parameter on rank 0.
        on_rank_0: String,
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The parameter on that rank.
        on_rank: String,
    },
    /// The ranks have different options. Every rank gets this error.
    #[error(
        "the options differ between ranks: {setting} is {there} on rank {rank} and {on_rank_0} on rank 0"
    )]
    OptionsDiffer {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The first option that differs.
        setting: String,
        /// Its value on that rank.
        there: String,
        /// Its value on rank 0.
        on_rank_0: String,
    },
    /// The ranks have updated their parameters or clipped their gradients with different settings since the last
    /// step. Every rank gets this error at the next step, evaluation or save, and again until a checkpoint is loaded.
    #[error(
        "the ranks have trained with different settings: {setting} is {there} on rank {rank} and {on_rank_0} on rank 0. Use \
         the same settings on all ranks and continue from a checkpoint"
    )]
    SettingsDiffer {
        /// The first rank that differs from rank 0. In a pipeline it is the number in the world.
        rank: usize,
        /// The first setting that differs.
        setting: String,
        /// Its value on that rank.
        there: String,
        /// Its value on rank 0.
        on_rank_0: String,
    },
    /// The ranks have different trained parameters. Every rank gets this error at a step that
    /// [compares](crate::Ddp::compare_parameters) them, and again until a checkpoint is loaded.
    #[error(
        "the trained parameter {parameter} has different values on rank {rank} and rank 0. All ranks must update their \
         parameters alike, with the same optimizer, settings and gradients, which must be those of the step. Continue \
         from a checkpoint"
    )]
    ParametersDiffer {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The first parameter that differs.
        parameter: String,
    },
    /// The ranks hold different batches, of which each would train its share. Every rank gets this same error, at a step that
    /// [compares](crate::Ddp::compare_batches) the batches.
    #[error(
        "rank {rank} holds another batch than rank 0, but every rank must hold the same batch and takes its share of it: \
         shuffle with a seed that all ranks have, for example the number of the epoch, and begin the training again"
    )]
    BatchesDiffer {
        /// The first rank that disagrees with rank 0.
        rank: usize,
    },
    /// The settings differed as for [`SettingsDiffer`](Self::SettingsDiffer), but before the last step. The setting
    /// is therefore unknown.
    #[error(
        "the ranks have trained with different settings before the last step. Use the same on all ranks and continue from a \
         checkpoint"
    )]
    EarlierSettingsDiffer,
    /// The last step has panicked and the caller has caught it, so there are no gradients. Take a step first.
    #[error("the last step has panicked, so there are no gradients; take the step again first")]
    StepPanicked,
    /// A function of initial values has returned different values on different ranks. Every rank gets this error.
    #[error("rank {rank} has other initial values of {parameter} than rank 0")]
    InitialValuesDiffer {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The name of the first parameter that differs.
        parameter: String,
    },
    /// The ranks cannot be divided into groups of this size.
    #[error("{ranks} ranks cannot be divided into groups of {shard_degree}")]
    ShardDegree {
        /// The size of a group.
        shard_degree: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A communication hook with a strategy that has one replica of the model. Every rank gets this error.
    #[error(
        "a communication hook sums gradients over the replicas of the model, but {strategy:?} has only one, whose ranks \
         reduce-scatter gradients; use Ddp, NoShard or HybridShard, or no hook"
    )]
    HookWithShards {
        /// The strategy.
        strategy: crate::fsdp::ShardingStrategy,
    },
    /// The units do not cover all blocks of the model, or a unit has no block.
    #[error("units of {sizes:?} blocks do not cover a model with {blocks} blocks")]
    Units {
        /// The number of blocks of each unit.
        sizes: Vec<usize>,
        /// The number of blocks.
        blocks: usize,
    },
    /// The blocks do not cover all parameters of a model in order.
    #[error("blocks whose parameters begin at {starts:?} do not cover a model with {parameters} parameters")]
    Starts {
        /// The index of each block's first parameter, and the end.
        starts: Vec<usize>,
        /// The number of parameters.
        parameters: usize,
    },
    /// Parameters cannot be prefetched.
    #[error("parameters cannot be prefetched: {reason}")]
    Prefetch {
        /// The reason.
        reason: &'static str,
    },
    /// A pipeline schedule has no ranks, stages or micro-batches, or more than can be scheduled in acceptable time.
    #[error(
        "cannot make a pipeline schedule of {ranks} ranks with {stages} stages and {micro_batches} micro-batches"
    )]
    NoSchedule {
        /// The number of ranks.
        ranks: usize,
        /// The number of stages.
        stages: usize,
        /// The number of micro-batches.
        micro_batches: usize,
    },
    /// A pipeline schedule has a flaw.
    #[error("the pipeline schedule is invalid")]
    PipelineSchedule(#[from] Flaw),
    /// A pipeline schedule is for another number of ranks.
    #[error("the pipeline schedule is for {ranks} ranks, but the group has {world_size}")]
    PipelineRanks {
        /// The number of ranks of the schedule.
        ranks: usize,
        /// The number of ranks.
        world_size: usize,
    },
    /// The stages are not as many as the schedule needs, or do not cover all blocks of the model in order with at
    /// least one each.
    #[error("{given:?} does not divide {blocks} blocks into {stages} stages")]
    Stages {
        /// The number of stages of the schedule.
        stages: usize,
        /// The number of blocks.
        blocks: usize,
        /// The blocks of each stage.
        given: Vec<Range<usize>>,
    },
    /// There are no stages, or more stages than layers.
    #[error("{layers} layers cannot be divided into {stages} stages")]
    CannotSplit {
        /// The number of layers.
        layers: usize,
        /// The number of stages.
        stages: usize,
    },
    /// A stage's output differs in shape or type from those of other micro-batches.
    #[error("stage {stage} returned an output of {got}, but its earlier outputs are {expected}")]
    ActivationShape {
        /// The stage.
        stage: usize,
        /// The shape and type of its first output.
        expected: TensorMeta,
        /// The shape and type of this output.
        got: TensorMeta,
    },
    /// The gradient of a stage's input differs from the input in shape or type.
    #[error("stage {stage} returned a gradient of {got} for an input of {expected}")]
    GradientShape {
        /// The stage.
        stage: usize,
        /// The shape and type of the input.
        expected: TensorMeta,
        /// The shape and type of the gradient.
        got: TensorMeta,
    },
    /// A stage that is not the first returns no gradient of its input.
    #[error("stage {stage} returned no gradient of its input, which the previous stage needs")]
    NoInputGradient {
        /// The stage.
        stage: usize,
    },
    /// An activation has too many dims to be sent.
    #[error("the output of stage {stage} has {dims} dims; at most 8 can be sent")]
    TooManyDims {
        /// The stage.
        stage: usize,
        /// The number of dims.
        dims: usize,
    },
    /// The implementation of `Activations` did not return an activation, or returned one that contradicts its shape.
    #[error("an activation was not converted, or contradicts its shape")]
    NoActivation,
    /// A placeholder for a block of another rank was used.
    #[error("this block is a placeholder: the block is on another rank")]
    Placeholder,
    /// A step or an evaluation has no micro-batches, on any rank.
    #[error("there are no micro-batches")]
    NoMicroBatches,
    /// The step has no micro-batch of this number.
    #[error(
        "the step has {count} micro-batches, so there is no number {index}: call the trainer with the step's number of \
         micro-batches (SamplerStep::micro_batches)"
    )]
    NoSuchMicroBatch {
        /// The number of the micro-batch.
        index: usize,
        /// The number of micro-batches of the step.
        count: usize,
    },
    /// Only some micro-batches of a step have a weight, or only some steps between two synchronisation points.
    #[error("only some micro-batches of a step have a weight; give all of them one, or none")]
    PartlyWeighted,
    /// The total weight of a step, or of the steps between two synchronisation points, is 0. Every rank gets this
    /// error.
    #[error("{micro_batches} micro-batches have a total weight of 0")]
    ZeroWeight {
        /// The number of micro-batches that all ranks have computed.
        micro_batches: usize,
    },
    /// The ranks have called for different steps or evaluations. Every rank gets this error. The ranks of several
    /// pipelines are numbered pipeline by pipeline.
    #[error("the ranks called for different steps: rank {rank} for {there}, rank 0 for {on_rank_0}")]
    StepsDiffer {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The step of that rank.
        there: StepDescriptor,
        /// The step of rank 0.
        on_rank_0: StepDescriptor,
    },
    /// The ranks have accumulated the same number of micro-batches in different calls, each of which assigns its
    /// micro-batches by itself. Every rank gets this error.
    #[error(
        "the ranks computed {computed} of {micro_batches} micro-batches: they have not accumulated the same ones"
    )]
    AccumulatedDiffers {
        /// The number that every rank has called for, accumulated ones included.
        micro_batches: usize,
        /// The number that all ranks have computed.
        computed: usize,
    },
    /// The ranks reach a synchronisation point after different numbers of unweighted steps. Every rank gets this
    /// error, and the job is aborted, because the ranks would not synchronise again.
    #[error("the ranks synchronise after different numbers of steps: rank {rank} after {there}, rank 0 after {on_rank_0}")]
    InnerStepsDiffer {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// The number of its steps since the last synchronisation point.
        there: u64,
        /// The number of steps of rank 0.
        on_rank_0: u64,
    },
    /// The model does not hand out a parameter as declared.
    #[error("the model does not return parameter {parameter}")]
    Model {
        /// The parameter's name.
        parameter: String,
        /// The model's error, or the difference.
        source: BoxError,
    },
    /// The caller's computation failed. The job is aborted, so that no rank waits for this one.
    #[error("computing the gradients failed")]
    Compute(#[source] BoxError),
    /// The caller failed to apply the gradients. The job is aborted, so that no rank waits for this one.
    #[error("applying the gradients failed")]
    Apply(#[source] BoxError),
    /// The ranks have different numbers, types or lengths of gradients. Every rank gets this error.
    #[error("rank {rank} has gradients of other types or lengths than rank 0")]
    GradientsDiffer {
        /// The first rank that differs from rank 0.
        rank: usize,
    },
    /// A communication hook failed. The job is aborted, so that no rank waits for this one.
    #[error("the hook {hook} failed")]
    Hook {
        /// Its name.
        hook: String,
        /// The hook's error.
        source: BoxError,
    },
    /// A communication hook panicked. The job is aborted.
    #[error("the hook {hook} panicked")]
    HookPanicked {
        /// Its name.
        hook: String,
    },
    /// The worker thread for a communication hook could not be started.
    #[error("cannot start a thread for the hook")]
    HookThread(#[source] std::io::Error),
    /// The text names no compression.
    #[error("{text} is not a compression; use none, bf16, f16, int8, topk:RATIO or powersgd:RANK")]
    UnknownCompression {
        /// The text.
        text: String,
    },
    /// A tensor has more values than `u32` can index.
    #[error("a tensor of {len} values is too long for indices of 32 bits")]
    TooLong {
        /// The number of values.
        len: usize,
    },
    /// A sparse gradient has different numbers of indices and values.
    #[error("a sparse gradient has {indices} indices and {values} values")]
    SparseDiffers {
        /// The number of indices.
        indices: usize,
        /// The number of values.
        values: usize,
    },
    /// An index of a sparse gradient is beyond the tensor's end.
    #[error("index {index} is beyond the end of a tensor of {len} values")]
    IndexOutOfRange {
        /// The index.
        index: u32,
        /// The number of values of the tensor.
        len: usize,
    },
    /// The group has no such rank to be the parameter server.
    #[error("rank {server} cannot be the parameter server: there are {world_size} ranks")]
    NoSuchServer {
        /// The rank of the server.
        server: usize,
        /// The number of ranks.
        world_size: usize,
    },
    /// A tensor cannot be divided into 0 parts or joined from 0 parts.
    #[error("a tensor cannot have 0 shards")]
    NoParts,
    /// A shape does not match the number of values.
    #[error("{len} values do not match the shape {shape:?}")]
    ShapeDiffers {
        /// The shape.
        shape: Vec<usize>,
        /// The number of values.
        len: usize,
    },
    /// The parts of a tensor do not fit together.
    #[error("shard {part} has shape {got:?}, which cannot be joined with {expected:?} along dim 0")]
    PartsDiffer {
        /// The part that does not fit.
        part: usize,
        /// The shape of the first part.
        expected: Vec<usize>,
        /// The shape of this part.
        got: Vec<usize>,
    },
    /// The text names no strategy.
    #[error(
        "{text} is not a strategy; use single, ddp, zero1, zero2, fsdp, hybrid:RANKS, pipeline:SCHEDULE[:RANKS[:sharded]], \
         local_sgd:STEPS or diloco:STEPS"
    )]
    UnknownStrategy {
        /// The text.
        text: String,
    },
    /// A feature of a trainer does not work with its strategy. Every rank gets this error.
    #[error("{feature} does not work with the strategy {strategy}: {reason}")]
    NotWithStrategy {
        /// The option or the call.
        feature: &'static str,
        /// The strategy.
        strategy: Strategy,
        /// The reason, and what works instead.
        reason: &'static str,
    },
    /// The micro-batches of a step cannot be divided evenly among pipelines.
    #[error("{micro_batches} micro-batches cannot be divided evenly among {pipelines} pipelines")]
    PipelineShares {
        /// The number of micro-batches.
        micro_batches: usize,
        /// The number of pipelines.
        pipelines: usize,
    },
    /// A step has another number of micro-batches than the schedule of its pipeline. Every rank gets this error, and
    /// training can continue.
    #[error(
        "the pipeline's schedule is for {scheduled} micro-batches, and a step was called with {requested}: set the number \
         with TrainerOptions::with_micro_batches"
    )]
    ScheduledMicroBatches {
        /// The number of micro-batches of the schedule, in all pipelines.
        scheduled: usize,
        /// The number that the step was called with.
        requested: usize,
    },
    /// The ranks of one pipeline have joined with different numbers of micro-batches. Every rank gets this error, and
    /// training can continue.
    #[error(
        "rank {rank} of pipeline {pipeline} joined with {there} micro-batches, rank 0 of this pipeline with {on_first}: the \
         ranks of a pipeline compute the same micro-batches"
    )]
    JoinsDiffer {
        /// The pipeline.
        pipeline: usize,
        /// The first rank that differs from rank 0 of the pipeline, by its number in the pipeline.
        rank: usize,
        /// The number of that rank's micro-batches.
        there: usize,
        /// The number of micro-batches of rank 0.
        on_first: usize,
    },
    /// A pipeline has joined with more micro-batches than its schedule has. Every rank gets this error, and training can
    /// continue.
    #[error(
        "a pipeline joined with {given} micro-batches, and its schedule is for at most {scheduled}: accumulate the others, \
         or make a schedule for more"
    )]
    JoinedMicroBatches {
        /// The number of micro-batches of the schedule.
        scheduled: usize,
        /// The number that the pipeline joined with.
        given: usize,
    },
    /// Ranks have called different functions of a trainer, for example a save on one rank only. If the communicator
    /// has found this, the job is aborted. Otherwise every rank gets this error, and training can continue.
    #[error("rank {rank} called {there}, {} called {here}", named(*.other))]
    CallsDiffer {
        /// A rank, by its number in the world.
        rank: usize,
        /// Its call.
        there: String,
        /// The rank that it differs from, by its number in the world. `None` for the rank with this error.
        other: Option<usize>,
        /// The call of that rank.
        here: String,
        /// The communicator's error. `None` if the ranks have compared their calls.
        source: Option<ErrorSource<CollectiveError>>,
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
            Some((there, here)) => {
                Self::CallsDiffer { rank, there, other, here, source: Some(source.into()) }
            }
            None => Self::Communication(source.into()),
        }
    }

    /// Returns `true` if the deadline of this rank or of another has passed.
    pub fn is_timeout(&self) -> bool {
        self.collective().is_some_and(CollectiveError::is_timeout)
    }

    /// Returns the rank that caused the error, if it is a single one, by its number in the world. If the ranks of a
    /// trainer disagree, it is the first that differs from rank 0, by its number among them.
    pub fn peer(&self) -> Option<usize> {
        match self {
            Self::ModelsDiffer { rank, .. }
            | Self::OptionsDiffer { rank, .. }
            | Self::SettingsDiffer { rank, .. }
            | Self::ParametersDiffer { rank, .. }
            | Self::BatchesDiffer { rank }
            | Self::InitialValuesDiffer { rank, .. }
            | Self::StepsDiffer { rank, .. }
            | Self::InnerStepsDiffer { rank, .. }
            | Self::GradientsDiffer { rank }
            | Self::CallsDiffer { rank, .. } => Some(*rank),
            Self::Checkpoint(error) => error.peer(),
            _ => self.collective()?.peer(),
        }
    }

    /// Returns the collective's error that led to this one, also if it passed through the caller's code.
    fn collective(&self) -> Option<&CollectiveError> {
        std::iter::successors(Some(self as &(dyn std::error::Error + 'static)), |error| error.source())
            .find_map(|error| error.downcast_ref())
    }

    /// Returns `true` if every rank has this error and none waits for another.
    pub(crate) const fn is_on_every_rank(&self) -> bool {
        matches!(
            self,
            Self::StepsDiffer { .. }
                | Self::AccumulatedDiffers { .. }
                | Self::NoMicroBatches
                | Self::NoSchedule { .. }
                | Self::NotWithStrategy { .. }
                | Self::ScheduledMicroBatches { .. }
                | Self::JoinsDiffer { .. }
                | Self::JoinedMicroBatches { .. }
                | Self::CallsDiffer { source: None, .. }
                | Self::ZeroWeight { .. }
                | Self::GradientsDiffer { .. }
                | Self::ParametersDiffer { .. }
                | Self::BatchesDiffer { .. }
                | Self::SettingsDiffer { .. }
                | Self::EarlierSettingsDiffer
        )
    }

    /// Converts the error of a computation. An error of this crate that it passes on stays itself.
    pub(crate) fn compute(source: BoxError) -> Self {
        Self::passed_on(source).unwrap_or_else(Self::Compute)
    }

    /// Returns the error of this crate that the caller's code has passed on. If every rank would have that error, it
    /// is not passed on, because only this rank's computation failed.
    pub(crate) fn passed_on(source: BoxError) -> Result<Self, BoxError> {
        match source.downcast::<Self>() {
            Ok(error) if error.is_on_every_rank() => Err(error),
            Ok(error) => Ok(*error),
            Err(source) => Err(source),
        }
    }
}

/// Names a rank. `None` is the rank with the error.
fn named(rank: Option<usize>) -> String {
    rank.map_or_else(|| "this rank".to_owned(), |rank| format!("rank {rank}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainingCall;

    #[test]
    fn an_error_of_training_names_the_late_rank() {
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

    /// See tests/training/errors.rs for the errors that can be produced elsewhere.
    #[test]
    fn errors_of_all_ranks_are_not_errors_of_a_computation() {
        let step_of = |micro_batches| StepDescriptor::new(TrainingCall::Step, micro_batches, false);
        let steps = Error::StepsDiffer { rank: 1, there: step_of(1), on_rank_0: step_of(2) };
        assert!(matches!(Error::compute(steps.into()), Error::Compute(_)));
    }
}
