//! One pass of micro-batches through the stages of a rank.

use std::time::Duration;

use dist_collectives::Communicator;

use super::activations::TensorMeta;
use super::stage::{BackwardPart, PROVEN, Stage};
use super::{Action, Item, Pipeline, Span, ties};
use crate::flat::Flat;
use crate::{BoxError, Error, Params, Result};

/// The inputs of a pass.
pub(super) struct PipelinePass<'a, A> {
    /// The number of this pipeline's first micro-batch.
    pub(super) first: usize,
    /// Returns the input of a micro-batch.
    pub(super) input: &'a mut (dyn FnMut(usize) -> Result<A, BoxError> + 'a),
    pub(super) output: Output<'a, A>,
    pub(super) clock: &'a mut Clock,
}

/// The callback for the model's output of a micro-batch.
pub(super) enum Output<'a, A> {
    /// Returns the output's gradient, in a step of training.
    Step(&'a mut (dyn FnMut(usize, A) -> Result<A, BoxError> + 'a)),
    /// Receives the output of an evaluation, without a backward.
    Evaluation(&'a mut (dyn FnMut(usize, A) -> Result<(), BoxError> + 'a)),
}

impl<A> Pipeline<A> {
    /// Executes a list of actions. If the list gathers no stages, all are gathered for its whole duration.
    pub(super) fn run(&mut self, list: Vec<Action>, pass: &mut PipelinePass<'_, A>) -> Result<()> {
        let gathers = list.iter().any(|action| matches!(action, Action::Gather(_)));
        if !gathers {
            pass.clock
                .waiting(|| self.stages.iter_mut().try_for_each(|stage| stage.gather(&mut self.groups)))?;
        }
        for action in list {
            match action {
                Action::Forward(item) => self.forward(item, pass)?,
                Action::Backward(item) => self.backward(action, item, BackwardPart::Whole, pass.clock)?,
                Action::InputGradient(item) => {
                    self.backward(action, item, BackwardPart::Input, pass.clock)?
                }
                Action::WeightGradient(item) => {
                    self.backward(action, item, BackwardPart::Weight, pass.clock)?
                }
                Action::SendActivation(item) => self.send_activation(item, pass)?,
                Action::ReceiveActivation(item) => self.receive_activation(item, pass)?,
                Action::SendGradient(item) => self.send_gradient(item)?,
                Action::ReceiveGradient(item) => self.receive_gradient(item, pass.clock)?,
                Action::Gather(stage) => pass.clock.waiting(|| self.gather(stage))?,
                Action::Free(stage) => self.stage(stage).free()?,
                Action::ReduceGradients(stage) => self.start_reducing(stage)?,
            }
        }
        if !gathers {
            self.stages.iter_mut().try_for_each(Stage::free)?;
        }
        pass.clock.waiting(|| self.stages.iter_mut().try_for_each(|stage| stage.rest(&mut self.groups)))
    }

    fn gather(&mut self, stage: usize) -> Result<()> {
        let own = self.stages.iter_mut().find(|own| own.number == stage).expect(PROVEN);
        own.gather(&mut self.groups)
    }

    fn forward(&mut self, item: Item, pass: &mut PipelinePass<'_, A>) -> Result<()> {
        let Item { stage, micro_batch } = item;
        let is_last = stage + 1 == self.schedule.stages();
        let received = self.stage(stage).inputs.remove(&micro_batch);
        let start = pass.clock.now();
        let activation = match (stage.checked_sub(1), received) {
            (None, _) => (pass.input)(pass.first + micro_batch).map_err(Error::compute)?,
            (Some(_), Some(received)) => received,
            (Some(before), None) => self.stage(before).outputs.remove(&micro_batch).expect(PROVEN),
        };
        let number = pass.first + micro_batch;
        let described = match pass.output {
            Output::Step(_) => self.passes.in_step(number),
            Output::Evaluation(_) => self.passes.in_evaluation(number),
        };
        let own = self.stage(stage);
        own.model.begin_forward(described);
        let output = match pass.output {
            Output::Step(_) => own.forward(micro_batch, activation)?,
            Output::Evaluation(_) => own.evaluate(activation)?,
        };
        match &mut pass.output {
            _ if !is_last => _ = own.outputs.insert(micro_batch, output),
            Output::Step(loss) => {
                let gradient = loss(pass.first + micro_batch, output).map_err(Error::compute)?;
                own.output_gradients.insert(micro_batch, gradient);
            }
            Output::Evaluation(loss) => loss(pass.first + micro_batch, output).map_err(Error::compute)?,
        }
        if let Output::Step(_) = pass.output {
            self.spans.push(Span { action: Action::Forward(item), start, end: pass.clock.now() });
            self.kept_most = self.kept_most.max(self.stages.iter().map(Stage::kept).sum());
        }
        Ok(())
    }

    fn backward(&mut self, action: Action, item: Item, part: BackwardPart, clock: &mut Clock) -> Result<()> {
        let Item { stage, micro_batch } = item;
        let mut gradient = self.stage(stage).output_gradients.remove(&micro_batch);
        if gradient.is_none() && part != BackwardPart::Weight {
            gradient = self.stage(stage + 1).input_gradients.remove(&micro_batch);
        }
        let start = clock.now();
        let own = self.stages.iter_mut().find(|own| own.number == stage).expect(PROVEN);
        own.backward(micro_batch, part, gradient, &mut self.nodes, &mut self.groups)?;
        self.spans.push(Span { action, start, end: clock.now() });
        ties::pass_on(&mut self.nodes, false)
    }

    fn send_activation(
        &mut self,
        Item { stage, micro_batch }: Item,
        pass: &mut PipelinePass<'_, A>,
    ) -> Result<()> {
        let output = self.stage(stage).outputs.remove(&micro_batch).expect(PROVEN);
        let (got, values) = self.to_flat(&output)?;
        drop(output);
        let link = self.links.outputs.get_mut(&stage).expect(PROVEN);
        let too_many = Error::TooManyDims { stage, dims: got.shape.len() };
        if let Output::Evaluation(_) = pass.output {
            pass.clock.waiting(|| link.finish())?;
            return link.send_any(&got, values).ok_or(too_many);
        }
        if let Some(expected) = link.meta().filter(|expected| **expected != got) {
            return Err(Error::ActivationShape { stage, expected: expected.clone(), got });
        }
        link.collect()?;
        link.send(&got, values).ok_or(too_many)?;
        if self.activations.gradients_have_the_same_shape() {
            self.links.output_gradients.get_mut(&stage).expect(PROVEN).expect(got);
        }
        Ok(())
    }

    fn receive_activation(
        &mut self,
        Item { stage, micro_batch }: Item,
        pass: &mut PipelinePass<'_, A>,
    ) -> Result<()> {
        let link = self.links.inputs.get_mut(&stage).expect(PROVEN);
        let (meta, values) = pass.clock.waiting(|| link.receive())?;
        let input = self.unflatten(&meta, &values)?;
        if matches!(pass.output, Output::Step(_)) && self.activations.gradients_have_the_same_shape() {
            self.links.input_gradients.get_mut(&stage).expect(PROVEN).expect(meta);
        }
        self.stage(stage).inputs.insert(micro_batch, input);
        Ok(())
    }

    fn send_gradient(&mut self, Item { stage, micro_batch }: Item) -> Result<()> {
        let gradient = self.stage(stage).input_gradients.remove(&micro_batch).expect(PROVEN);
        let (got, values) = self.to_flat(&gradient)?;
        let link = self.links.input_gradients.get_mut(&stage).expect(PROVEN);
        if let Some(expected) = link.meta().filter(|expected| **expected != got) {
            return Err(Error::GradientShape { stage, expected: expected.clone(), got });
        }
        link.collect()?;
        link.send(&got, values).ok_or(Error::TooManyDims { stage, dims: got.shape.len() })
    }

    fn receive_gradient(&mut self, Item { stage, micro_batch }: Item, clock: &mut Clock) -> Result<()> {
        let link = self.links.output_gradients.get_mut(&stage).expect(PROVEN);
        let (meta, values) = clock.waiting(|| link.receive())?;
        let gradient = self.unflatten(&meta, &values)?;
        self.stage(stage).output_gradients.insert(micro_batch, gradient);
        Ok(())
    }

    fn to_flat(&self, activation: &A) -> Result<(TensorMeta, Flat)> {
        let mut parts = None;
        let read = self.activations.to_flat(activation, &mut |shape, values| {
            parts =
                Some((TensorMeta { dtype: values.dtype(), shape: shape.to_vec() }, Flat::copy_of(values)));
        });
        read.map_err(Error::compute)?;
        parts.filter(|(meta, values)| meta.len() == Some(values.len())).ok_or(Error::NoActivation)
    }

    fn unflatten(&self, meta: &TensorMeta, values: &Flat) -> Result<A> {
        let made = self.activations.unflatten(&meta.shape, values.slice(0, values.len()));
        made.map_err(Error::compute)
    }

    pub(super) fn stage(&mut self, number: usize) -> &mut Stage<A> {
        self.stages.iter_mut().find(|stage| stage.number == number).expect(PROVEN)
    }
}

/// Measures the time since a pass began.
pub(super) struct Clock {
    runtime: dist_collectives::transport::Runtime,
    began: Duration,
    /// The part of it that was spent waiting.
    pub(super) waited: Duration,
}

impl Clock {
    pub(super) fn new(comm: &Communicator) -> Self {
        let runtime = comm.runtime().clone();
        Self { began: runtime.now(), runtime, waited: Duration::ZERO }
    }

    pub(super) fn now(&self) -> Duration {
        self.runtime.now().saturating_sub(self.began)
    }

    pub(super) fn waiting<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        let began = self.now();
        let done = wait();
        self.waited += self.now().saturating_sub(began);
        done
    }
}
