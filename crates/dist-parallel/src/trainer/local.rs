//! Local SGD and DiLoCo as a [`Trainer`].

use std::cell::Cell;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};

use super::{Batches, Computation, ComputeFn, Evaluation, Strategy, Trainer, forward_backward};
use crate::abort::or_abort;
use crate::checkpoint::{Checkpoints, Saving, Shards, WeightOptions, WeightReport};
use crate::fsdp::share;
use crate::local_sgd::{LocalSgd, LocalSgdOptions, OuterStep};
use crate::loss::WeightedLoss;
use crate::{
    Block, BoxError, Ddp, DdpOptions, Error, Optimizer, OptimizerState, ParamInfo, Params, Pass, Ready,
    Result, Saved, Sequence, StepReport, Values, ValuesMut, agreement,
};

/// Ranks that compute and update alone, each by [`Ddp`] in a world of one, and synchronise after some updates.
pub(super) struct LocalTrainer<A> {
    local: LocalSgd<OwnTraining<A>>,
    options: LocalSgdOptions,
    /// The losses and weights of the micro-batches that this rank has computed since the last update.
    computed: Cell<WeightedLoss>,
    /// `true` if the losses since the last synchronisation point have weights.
    weighted: bool,
    /// The number of micro-batches of all ranks that were accumulated since the last step.
    accumulated: usize,
}

/// The training of one rank.
struct OwnTraining<A>(Ddp<Sequence<A>>);

impl<A: 'static> LocalTrainer<A> {
    pub(super) fn new(mut comm: Communicator, model: Sequence<A>, options: LocalSgdOptions) -> Result<Self> {
        let rank = comm.rank();
        let own = comm.subgroup(&[rank]).map_err(Error::communication)?;
        let own = own.expect("this rank is in its own group");
        let own = OwnTraining(Ddp::new(own, model, DdpOptions::default())?);
        let local = LocalSgd::new(comm, own, options)?;
        Ok(Self { local, options, computed: Cell::default(), weighted: false, accumulated: 0 })
    }

    fn own(&mut self) -> &mut Ddp<Sequence<A>> {
        &mut self.local.model_mut().0
    }

    /// Ends this rank's own step by an update. The ranks may then synchronise.
    fn end_own_step(&mut self, update: impl FnOnce(&mut Ddp<Sequence<A>>) -> Result<()>) -> Result<()> {
        if self.local.steps() + 1 >= self.options.inner_steps {
            self.check_weighted()?;
        }
        let computed = self.computed.take();
        let step = self.local.step_with(|own| {
            update(&mut own.0)?;
            Ok(computed)
        });
        step.map(drop)
    }

    /// Aborts the job if this rank's own computation fails. Every error concerns this rank alone,
    /// also one that other trainers return on all ranks alike.
    fn or_abort<T>(&mut self, result: Result<T>) -> Result<T> {
        let result = result.map_err(|error| Error::compute(error.into()));
        or_abort(self.local.communicator_mut(), result)
    }

    /// Starts to compute micro-batches. An error if only some since the last synchronisation point have a weight.
    fn begin(&mut self, weighted: bool) -> Result<()> {
        let (_, count) = self.computed.get();
        if self.weighted != weighted && (count > 0 || self.local.steps() > 0) {
            return self.or_abort(Err(Error::PartlyWeighted));
        }
        self.weighted = weighted;
        Ok(())
    }

    /// Returns this rank's share of these micro-batches, of a call with or without weights.
    fn begin_share(&mut self, micro_batches: usize, weighted: bool) -> Result<OwnShare> {
        self.begin(weighted)?;
        let share = share(micro_batches, self.world_size(), self.rank());
        let pass = self.own().next_pass(0);
        let first_in_step = self.accumulated + share.start;
        Ok(OwnShare { count: share.len(), first: share.start, first_in_step, stride: 1, pass })
    }

    fn step_own(&mut self, share: OwnShare, compute: &mut ComputeFn<'_, Sequence<A>>) -> Result<StepReport> {
        let Self { local, computed, .. } = self;
        let result = local.model_mut().0.step_with(share.count, numbered(share, compute, computed));
        self.accumulated = 0;
        self.step_result(result)
    }

    /// Returns the report of a step, for which this rank may have no micro-batch.
    fn step_result(&mut self, result: Result<StepReport>) -> Result<StepReport> {
        let (loss, nothing) = (0.0, Duration::ZERO);
        match result {
            Err(Error::NoMicroBatches) => {
                Ok(StepReport { loss, micro_batches: 0, elapsed: nothing, exposed: nothing, bytes_sent: 0 })
            }
            result => self.or_abort(result),
        }
    }

    /// Returns an error on every rank unless the losses of all ranks have weights, or of none.
    fn check_weighted(&mut self) -> Result<()> {
        let weighted = [u8::from(self.weighted)];
        let all = agreement::gather(self.local.communicator_mut(), weighted);
        let all = or_abort(self.local.communicator_mut(), all)?;
        if all.iter().all(|there| *there == all[0]) { Ok(()) } else { Err(Error::PartlyWeighted) }
    }

    /// Drops gradients and losses after other parameters were loaded.
    fn loaded<T>(&mut self, result: Result<T>) -> Result<T> {
        let loaded = result?;
        (self.computed, self.accumulated) = (Cell::default(), 0);
        let steps = self.local.steps_before();
        let own = self.own();
        own.set_steps(steps);
        let reset = own.reset();
        self.or_abort(reset)?;
        Ok(loaded)
    }

    /// Returns an error if the ranks' own optimizer is to be saved or loaded.
    fn without_optimizer<T>(&self, optimizer: Option<T>) -> Result<()> {
        if optimizer.is_none() {
            return Ok(());
        }
        Err(Error::NotWithStrategy {
            feature: "a checkpoint with the optimizer of the updates",
            strategy: self.strategy(),
            reason: "each rank's optimizer has a state of its own: save and load without an optimizer",
        })
    }
}

/// The micro-batches of a call that one rank computes.
#[derive(Clone, Copy)]
struct OwnShare {
    count: usize,
    /// The number of the first one in the call.
    first: usize,
    /// The number of the first one in the step, among those of all ranks, and the distance to the next one.
    first_in_step: usize,
    stride: usize,
    pass: Pass,
}

/// Gives this rank's micro-batches their numbers among those of all ranks, and adds their losses to `computed`.
fn numbered<A>(
    share: OwnShare,
    compute: &mut ComputeFn<'_, Sequence<A>>,
    computed: &Cell<WeightedLoss>,
) -> impl FnMut(&mut Sequence<A>, usize, &mut Ready<'_>) -> Result<WeightedLoss, BoxError> {
    move |model, index, ready| {
        let micro_batch = share.first_in_step + index * share.stride;
        model.begin_forward(Pass { micro_batch, ..share.pass });
        let (loss, count) = compute(model, share.first + index, ready)?;
        let (losses, total) = computed.get();
        computed.set((losses + loss, total.saturating_add(count)));
        Ok((loss, count))
    }
}

impl<A: 'static> Trainer<A> for LocalTrainer<A> {
    fn strategy(&self) -> Strategy {
        Strategy::LocalSgd(self.options)
    }

    fn infos(&self) -> &[ParamInfo] {
        self.local.model().infos()
    }

    fn communicator(&self) -> &Communicator {
        self.local.communicator()
    }

    fn communicator_mut(&mut self) -> &mut Communicator {
        self.local.communicator_mut()
    }

    fn step_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<StepReport> {
        let Batches { weighted, next } = batches;
        self.step_computation(micro_batches, Computation { weighted, compute: &mut forward_backward(next) })
    }

    fn step_computation(
        &mut self,
        micro_batches: usize,
        Computation { weighted, compute }: Computation<'_, Sequence<A>>,
    ) -> Result<StepReport> {
        if micro_batches + self.accumulated == 0 {
            return Err(Error::NoMicroBatches);
        }
        let share = self.begin_share(micro_batches, weighted)?;
        self.step_own(share, compute)
    }

    fn accumulate_batches(&mut self, micro_batches: usize, batches: Batches<'_, A>) -> Result<()> {
        let Batches { weighted, next } = batches;
        let share = self.begin_share(micro_batches, weighted)?;
        self.accumulated += micro_batches;
        let Self { local, computed, .. } = self;
        let own = &mut local.model_mut().0;
        let result = own.accumulate_with(share.count, numbered(share, &mut forward_backward(next), computed));
        self.or_abort(result)
    }

    /// The ranks add up their numbers of micro-batches, because a rank does not know otherwise that training is over.
    fn join_batches(&mut self, own: usize, batches: Batches<'_, A>) -> Result<Option<StepReport>> {
        let Batches { weighted, next } = batches;
        let mut all = [(own + self.own().accumulated()) as u64];
        let comm = self.local.communicator_mut();
        comm.announce("join", "join");
        let added = comm.all_reduce(&mut all, ReduceOp::Sum).map_err(Error::communication);
        or_abort(comm, added)?;
        if all == [0] {
            return Ok(None);
        }
        let share = self.begin_share(0, weighted)?;
        let first_in_step = self.accumulated + self.rank();
        let share = OwnShare { count: own, first: 0, first_in_step, stride: self.world_size(), ..share };
        self.step_own(share, &mut forward_backward(next)).map(Some)
    }

    fn evaluate_batches(
        &mut self,
        micro_batches: usize,
        evaluation: Evaluation<'_, A>,
    ) -> Result<StepReport> {
        self.local.evaluate_batches(micro_batches, evaluation)
    }

    fn update(&mut self, optimizer: &mut dyn Optimizer) -> Result<()> {
        self.end_own_step(|own| own.update(optimizer))
    }

    /// A step that is skipped counts all the same, so that all ranks synchronise together.
    fn update_if_finite(&mut self, optimizer: &mut dyn Optimizer) -> Result<bool> {
        let mut is_finite = false;
        self.end_own_step(|own| {
            is_finite = own.update_if_finite(optimizer)?;
            Ok(())
        })?;
        Ok(is_finite)
    }

    fn gradient_norm(&mut self) -> Result<f64> {
        Ok((*self.own()).gradient_norm())
    }

    fn clip_gradients(&mut self, max: f64) -> Result<f64> {
        Ok(self.own().clip_gradients(max))
    }

    fn scale_gradients(&mut self, factor: f64) {
        self.own().scale_gradients(factor);
    }

    fn without_gradient(&self) -> Vec<&str> {
        self.local.model().0.without_gradient()
    }

    fn for_each_parameter(&mut self, f: &mut dyn FnMut(usize, Values<'_>)) -> Result<()> {
        self.own().for_each_parameter(f)
    }

    fn synchronise_parameters(&mut self) -> Result<()> {
        if self.local.steps() == 0 {
            return Ok(());
        }
        self.check_weighted()?;
        self.local.synchronise().map(drop)
    }

    fn train(&mut self) {
        self.own().train();
        self.local.train();
    }

    fn eval(&mut self) {
        self.own().eval();
        self.local.eval();
    }

    fn model(&self) -> Result<&Sequence<A>> {
        Ok(self.local.model().0.model())
    }

    fn model_mut(&mut self) -> Result<&mut Sequence<A>> {
        Ok(self.own().model_mut())
    }

    fn shards(&mut self) -> Result<&mut dyn Shards> {
        Err(Error::NotWithStrategy {
            feature: "shards",
            strategy: self.strategy(),
            reason: "the outer step has state too: use save and load of the trainer",
        })
    }

    fn save(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        step: u64,
    ) -> Result<()> {
        self.without_optimizer(optimizer)?;
        self.local.save(checkpoints, step)
    }

    fn start_save(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        step: u64,
    ) -> Result<Saving> {
        self.without_optimizer(optimizer)?;
        self.local.start_save(checkpoints, step)
    }

    fn load(
        &mut self,
        checkpoints: &mut Checkpoints,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<Option<u64>> {
        self.without_optimizer(optimizer)?;
        let loaded = match self.options.outer {
            OuterStep::Average => self.local.load_parameters(checkpoints),
            OuterStep::Nesterov { .. } => self.local.load(checkpoints),
        };
        self.loaded(loaded)
    }

    fn load_step(
        &mut self,
        checkpoints: &mut Checkpoints,
        step: u64,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<()> {
        self.without_optimizer(optimizer)?;
        let loaded = match self.options.outer {
            OuterStep::Average => self.local.load_parameters_of(checkpoints, step),
            OuterStep::Nesterov { .. } => self.local.load_step(checkpoints, step),
        };
        self.loaded(loaded)
    }

    fn load_parameters(&mut self, checkpoints: &mut Checkpoints) -> Result<Option<u64>> {
        let loaded = self.local.load_parameters(checkpoints);
        self.loaded(loaded)
    }

    fn load_weights(&mut self, path: &Path, options: &WeightOptions) -> Result<WeightReport> {
        let loaded = self.local.load_weights(path, options);
        self.loaded(loaded)
    }

    fn into_parts(mut self: Box<Self>) -> Result<(Communicator, Vec<Sequence<A>>)> {
        self.synchronise_parameters()?;
        let (comm, own) = self.local.into_parts();
        Ok((comm, vec![own.0.into_parts().1]))
    }
}

impl<A> fmt::Debug for LocalTrainer<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.local.fmt(f)
    }
}

impl<A> Params for OwnTraining<A> {
    fn infos(&self) -> &[ParamInfo] {
        self.0.model().infos()
    }

    fn read(&self, index: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        self.0.model().read(index, f)
    }

    fn write(&mut self, index: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        self.0.model_mut().write(index, f)
    }

    fn begin_forward(&mut self, pass: Pass) {
        self.0.model_mut().begin_forward(pass);
    }
}

impl<A> Block<A> for OwnTraining<A> {
    fn forward(&mut self, input: A) -> Result<(A, Saved), BoxError> {
        self.0.model_mut().forward(input)
    }

    fn backward(
        &mut self,
        saved: Saved,
        output_gradient: A,
        ready: &mut Ready<'_>,
    ) -> Result<Option<A>, BoxError> {
        self.0.model_mut().backward(saved, output_gradient, ready)
    }
}
