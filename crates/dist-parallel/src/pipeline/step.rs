//! One step of a pipeline: its actions, one after the other, and what is reduced at the end.

use std::time::Duration;

use dist_collectives::{Communicator, ReduceOp};

use super::activations::Look;
use super::link::Receiver;
use super::parameters::broadcast;
use super::stage::{PROVEN, Part, Reducing, Stage};
use super::{Action, Item, Pipeline, Span, ties};
use crate::flat::Flat;
use crate::fsdp::bytes_sent;
use crate::{BoxError, Error, Result, StepReport, ValuesMut};

/// Gives the input of a micro-batch.
type Input<'a, A> = dyn FnMut(usize) -> Result<A, BoxError> + 'a;
/// Gives the loss of a micro-batch, and its gradient, for the model's output.
type Loss<'a, A> = dyn FnMut(usize, A) -> Result<(f32, A), BoxError> + 'a;

impl<A> Pipeline<A> {
    /// Computes the mean gradients of the schedule's micro-batches, of all pipelines. `input` gives a micro-batch's input
    /// and is called on the rank of the first stage; `loss` computes the loss, and its gradient, from the model's output,
    /// and is called on the rank of the last. Both are given the number of a micro-batch of this pipeline's
    /// [`share`](Self::share).
    ///
    /// # Errors
    /// If `input`, `loss` or a block fails, a gradient is reported twice or does not look like its parameter, an
    /// activation does not look like those before it or its gradient like itself, or communication fails.
    pub fn step(
        &mut self,
        mut input: impl FnMut(usize) -> Result<A, BoxError>,
        mut loss: impl FnMut(usize, A) -> Result<(f32, A), BoxError>,
    ) -> Result<StepReport> {
        let mut clock = Clock::new(&self.comm);
        let sent_before = self.bytes_sent();
        self.begin();
        let result = self.attempt(&mut input, &mut loss, &mut clock);
        let loss = self.or_abort(result)?;
        Ok(StepReport {
            loss,
            micro_batches: self.total(),
            elapsed: clock.now(),
            exposed: clock.waited,
            bytes_sent: self.bytes_sent() - sent_before,
        })
    }

    fn bytes_sent(&self) -> u64 {
        let ties = self.nodes.iter().map(ties::Node::bytes_sent).sum::<u64>();
        let groups = [Some(&self.comm), self.data.as_ref(), self.shards.as_ref()];
        groups.into_iter().flatten().map(bytes_sent).sum::<u64>() + self.links.bytes_sent() + ties
    }

    fn begin(&mut self) {
        self.spans.clear();
        self.kept_most = 0;
        self.links.begin(self.schedule.micro_batches());
        self.stages.iter_mut().for_each(Stage::begin);
        self.nodes.iter_mut().for_each(ties::Node::begin);
        self.tied_means.iter_mut().for_each(|mean| *mean = None);
    }

    /// Micro-batches of all pipelines.
    fn total(&self) -> usize {
        let groups = [&self.data, &self.shards].into_iter().flatten();
        self.schedule.micro_batches() * groups.map(Communicator::world_size).product::<usize>()
    }

    /// Everything of a step that may fail; the loss.
    fn attempt(
        &mut self,
        input: &mut Input<'_, A>,
        loss: &mut Loss<'_, A>,
        clock: &mut Clock,
    ) -> Result<f32> {
        let first = self.share().start;
        let list = self.schedule.actions()[self.comm.rank()].clone();
        let gathers = list.iter().any(|action| matches!(action, Action::Gather(_)));
        if !gathers {
            clock.waiting(|| {
                self.stages.iter_mut().try_for_each(|stage| stage.gather(self.shards.as_mut()))
            })?;
        }
        for action in list {
            match action {
                Action::Forward(item) => self.forward(item, first, (&mut *input, &mut *loss), clock)?,
                Action::Backward(item) => self.backward(action, item, Part::Whole, clock)?,
                Action::InputGradient(item) => self.backward(action, item, Part::Input, clock)?,
                Action::WeightGradient(item) => self.backward(action, item, Part::Weight, clock)?,
                Action::SendActivation(item) => self.send_activation(item)?,
                Action::ReceiveActivation(item) => self.receive_activation(item, clock)?,
                Action::SendGradient(item) => self.send_gradient(item)?,
                Action::ReceiveGradient(item) => self.receive_gradient(item, clock)?,
                Action::Gather(stage) => clock.waiting(|| self.gather(stage))?,
                Action::Free(stage) => self.stage(stage).free()?,
                Action::ReduceGradients(stage) => self.start_reducing(stage),
            }
        }
        if !gathers {
            self.stages.iter_mut().try_for_each(Stage::free)?;
        }
        clock.waiting(|| self.finish())
    }

    fn gather(&mut self, stage: usize) -> Result<()> {
        let own = self.stages.iter_mut().find(|own| own.number == stage).expect(PROVEN);
        own.gather(self.shards.as_mut())
    }

    fn forward(
        &mut self,
        item: Item,
        first: usize,
        (input, loss): (&mut Input<'_, A>, &mut Loss<'_, A>),
        clock: &mut Clock,
    ) -> Result<()> {
        let Item { stage, micro_batch } = item;
        let is_last = stage + 1 == self.schedule.stages();
        let received = self.stage(stage).inputs.remove(&micro_batch);
        let start = clock.now();
        let activation = match (stage.checked_sub(1), received) {
            (None, _) => input(first + micro_batch).map_err(Error::compute)?,
            (Some(_), Some(received)) => received,
            (Some(before), None) => self.stage(before).outputs.remove(&micro_batch).expect(PROVEN),
        };
        let own = self.stage(stage);
        let output = own.forward(micro_batch, activation)?;
        if is_last {
            let (loss, gradient) = loss(first + micro_batch, output).map_err(Error::compute)?;
            own.output_gradients.insert(micro_batch, gradient);
            self.losses.add(micro_batch, loss, |left, right| *left += right);
        } else {
            own.outputs.insert(micro_batch, output);
        }
        self.spans.push(Span { action: Action::Forward(item), start, end: clock.now() });
        self.kept_most = self.kept_most.max(self.stages.iter().map(Stage::kept).sum());
        Ok(())
    }

    fn backward(&mut self, action: Action, item: Item, part: Part, clock: &mut Clock) -> Result<()> {
        let Item { stage, micro_batch } = item;
        let mut gradient = self.stage(stage).output_gradients.remove(&micro_batch);
        if gradient.is_none() && part != Part::Weight {
            gradient = self.stage(stage + 1).input_gradients.remove(&micro_batch);
        }
        let start = clock.now();
        let own = self.stages.iter_mut().find(|own| own.number == stage).expect(PROVEN);
        own.backward(micro_batch, part, gradient, &mut self.nodes)?;
        self.spans.push(Span { action, start, end: clock.now() });
        ties::pass_on(&mut self.nodes, false)
    }

    fn send_activation(&mut self, Item { stage, micro_batch }: Item) -> Result<()> {
        let output = self.stage(stage).outputs.remove(&micro_batch).expect(PROVEN);
        let (got, values) = self.take_apart(&output)?;
        let link = self.links.outputs.get_mut(&stage).expect(PROVEN);
        if let Some(expected) = link.look().filter(|expected| **expected != got) {
            return Err(Error::ActivationShape { stage, expected: expected.clone(), got });
        }
        link.collect()?;
        link.send(&got, values).ok_or(Error::TooManyDims { stage, dims: got.shape.len() })?;
        self.links.output_gradients.get_mut(&stage).expect(PROVEN).expect(got);
        Ok(())
    }

    fn receive_activation(&mut self, Item { stage, micro_batch }: Item, clock: &mut Clock) -> Result<()> {
        let link = self.links.inputs.get_mut(&stage).expect(PROVEN);
        let (look, values) = receive(link, clock)?;
        self.links.input_gradients.get_mut(&stage).expect(PROVEN).expect(look.clone());
        let input = self.put_together(&look, &values)?;
        self.stage(stage).inputs.insert(micro_batch, input);
        Ok(())
    }

    fn send_gradient(&mut self, Item { stage, micro_batch }: Item) -> Result<()> {
        let gradient = self.stage(stage).input_gradients.remove(&micro_batch).expect(PROVEN);
        let (got, values) = self.take_apart(&gradient)?;
        let link = self.links.input_gradients.get_mut(&stage).expect(PROVEN);
        let expected = link.look().expect("the input was received");
        if *expected != got {
            return Err(Error::GradientShape { stage, expected: expected.clone(), got });
        }
        link.collect()?;
        link.send(&got, values).expect("it looks like what was received");
        Ok(())
    }

    fn receive_gradient(&mut self, Item { stage, micro_batch }: Item, clock: &mut Clock) -> Result<()> {
        let link = self.links.output_gradients.get_mut(&stage).expect(PROVEN);
        let (look, values) = receive(link, clock)?;
        let gradient = self.put_together(&look, &values)?;
        self.stage(stage).output_gradients.insert(micro_batch, gradient);
        Ok(())
    }

    fn take_apart(&self, activation: &A) -> Result<(Look, Flat)> {
        let mut parts = None;
        let read = self.activations.take_apart(activation, &mut |shape, values| {
            parts = Some((Look { dtype: values.dtype(), shape: shape.to_vec() }, Flat::copy_of(values)));
        });
        read.map_err(Error::compute)?;
        parts.filter(|(look, values)| look.len() == Some(values.len())).ok_or(Error::NoActivation)
    }

    fn put_together(&self, look: &Look, values: &Flat) -> Result<A> {
        let made = self.activations.put_together(&look.shape, values.slice(0, values.len()));
        made.map_err(Error::compute)
    }

    fn stage(&mut self, number: usize) -> &mut Stage<A> {
        self.stages.iter_mut().find(|stage| stage.number == number).expect(PROVEN)
    }

    /// Begins to add up a stage's gradients with those of other pipelines.
    fn start_reducing(&mut self, number: usize) {
        let stage = self.stages.iter_mut().find(|stage| stage.number == number).expect(PROVEN);
        stage.used = stage.sums.take_used();
        let sums = stage.sums.take().into_iter();
        stage.reducing = Some(match (&stage.shard, &mut self.shards) {
            (Some(shard), Some(shards)) => {
                sums.map(|sum| Reducing::There(shard.padded(sum).start_scattered_sum(shards))).collect()
            }
            _ => sums.map(|sum| Reducing::start(sum, self.data.as_mut())).collect(),
        });
    }

    /// Everything that is left when all actions are done: means of ties, gradients and losses; the loss.
    fn finish(&mut self) -> Result<f32> {
        let total = self.total();
        ties::pass_on(&mut self.nodes, true)?;
        let mut tied = self.start_ties()?;
        let loss = self.mean_loss()?;
        self.add_used(&mut tied)?;
        for stage in &mut self.stages {
            let mut means = Vec::new();
            for mut sum in stage.reducing.take().expect(PROVEN) {
                if let Some(shard) = &stage.shard {
                    sum = Reducing::start(shard.own_part(&sum.wait()?), self.data.as_mut());
                }
                means.push(mean(sum, total)?);
            }
            stage.means = Some(means);
        }
        for (tie, sum) in tied.into_iter().enumerate() {
            if let Some((sum, used)) = sum {
                self.tied_means[tie] = Some(mean(sum, total)?).filter(|_| used);
            }
        }
        self.links.finish()?;
        self.nodes.iter_mut().try_for_each(ties::Node::finish)?;
        Ok(loss)
    }

    /// Begins to add up the sums of ties whose first stage is here: for each tie, whether a micro-batch had a gradient.
    fn start_ties(&mut self) -> Result<Vec<Option<(Reducing, bool)>>> {
        let mut tied: Vec<_> = (0..self.tied_means.len()).map(|_| None).collect();
        for node in self.nodes.iter_mut().filter(|node| node.is_first()) {
            if let Some((sum, used)) = node.take() {
                let sum = match &mut self.shards {
                    Some(shards) => sum.start_sum(shards).wait()?,
                    None => sum,
                };
                tied[node.tie] = Some((Reducing::start(sum, self.data.as_mut()), used));
            }
        }
        Ok(tied)
    }

    /// The mean loss of all micro-batches, on all ranks.
    fn mean_loss(&mut self) -> Result<f32> {
        let last = self.schedule.placement()[self.schedule.stages() - 1];
        let mut loss = [self.losses.finish(|left, right| *left += right).unwrap_or(0.0)];
        if self.comm.rank() == last {
            for group in [&mut self.shards, &mut self.data].into_iter().flatten() {
                group.all_reduce(&mut loss, ReduceOp::Sum).map_err(Error::communication)?;
            }
        }
        ValuesMut::F32(&mut loss).divide(self.total());
        broadcast(&mut self.comm, ValuesMut::F32(&mut loss), last)?;
        Ok(loss[0])
    }

    /// Lets every pipeline know which parameters have had a gradient in any.
    fn add_used(&mut self, tied: &mut [Option<(Reducing, bool)>]) -> Result<()> {
        let of_ties = tied.iter_mut().flatten().map(|(_, used)| used);
        let mut flags: Vec<&mut bool> =
            self.stages.iter_mut().flat_map(|stage| &mut stage.used).chain(of_ties).collect();
        let mut counts: Vec<i64> = flags.iter().map(|used| i64::from(**used)).collect();
        for group in [&mut self.shards, &mut self.data].into_iter().flatten() {
            group.all_reduce(&mut counts, ReduceOp::Sum).map_err(Error::communication)?;
        }
        flags.iter_mut().zip(counts).for_each(|(used, count)| **used = count > 0);
        Ok(())
    }
}

impl Reducing {
    fn start(sum: Flat, data: Option<&mut Communicator>) -> Self {
        match data {
            Some(data) => Self::There(sum.start_sum(data)),
            None => Self::Here(sum),
        }
    }
}

fn mean(sum: Reducing, count: usize) -> Result<Flat> {
    let mut mean = sum.wait()?;
    mean.slice_mut(0, mean.len()).divide(count);
    Ok(mean)
}

/// The next message of a link, and what it looks like.
fn receive(link: &mut Receiver, clock: &mut Clock) -> Result<(Look, Flat)> {
    let values = clock.waiting(|| link.receive())?;
    Ok((link.look().expect("a message has been received").clone(), values))
}

/// The time since a step began.
struct Clock {
    runtime: dist_collectives::Runtime,
    began: Duration,
    /// How much of it was spent waiting.
    waited: Duration,
}

impl Clock {
    fn new(comm: &Communicator) -> Self {
        let runtime = comm.runtime().clone();
        Self { began: runtime.now(), runtime, waited: Duration::ZERO }
    }

    fn now(&self) -> Duration {
        self.runtime.now().saturating_sub(self.began)
    }

    fn waiting<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        let began = self.now();
        let done = wait();
        self.waited += self.now().saturating_sub(began);
        done
    }
}
