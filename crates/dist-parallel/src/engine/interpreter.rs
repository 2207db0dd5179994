//! The interpreter of a rank's actions. Every strategy computes its blocks here.

use std::collections::{BTreeMap, VecDeque};

use super::actions::{BackwardPart, StepAction, UnitOf};
use super::stage::Stage;
use crate::fsdp::Groups;
use crate::gradients::RoundRole;
use crate::pipeline::{Action, Item, PipelinePass};
use crate::{Block, BoxError, Error, Result, Saved, Sequence, Values};

/// The micro-batches of a pass.
pub(crate) struct PassInput<'a, A> {
    /// Returns the input of a micro-batch. `None` if this rank has none, but takes part in those of other ranks.
    pub(crate) input: &'a mut dyn FnMut(usize) -> Result<Option<A>>,
    /// Receives the model's output of a micro-batch. Returns its gradient in a step, `None` in an evaluation.
    pub(crate) loss: &'a mut dyn FnMut(usize, A) -> Result<Option<A>>,
    /// `true` if a backward follows each forward.
    pub(crate) trains: bool,
    /// The number of micro-batch 0 in the sums of gradients.
    pub(crate) first: usize,
}

/// Executes actions on the stages of a rank. Activations of an unfinished pass are dropped with it.
pub(crate) struct Interpreter<'a, 'p, A> {
    stages: &'a mut [Stage<Sequence<A>>],
    groups: &'a mut Groups,
    /// The number of the model's last stage.
    last: usize,
    pass: PassInput<'p, A>,
    /// The messages between stages and their ties. `None` if there is one stage.
    pipeline: Option<PipelinePass<'a, A>>,
    /// The activation, or its gradient, between two units of a stage.
    current: Option<A>,
    inputs: BTreeMap<Item, A>,
    outputs: BTreeMap<Item, A>,
    output_gradients: BTreeMap<Item, A>,
    input_gradients: BTreeMap<Item, A>,
    /// The activations that the units save for their backward, first to last.
    saved: BTreeMap<Item, Vec<Vec<Saved>>>,
    /// The data for weight gradients, from the last unit to the first.
    halves: BTreeMap<Item, VecDeque<Saved>>,
}

impl<'a, 'p, A> Interpreter<'a, 'p, A> {
    pub(crate) const fn new(
        stages: &'a mut [Stage<Sequence<A>>],
        groups: &'a mut Groups,
        last: usize,
        pass: PassInput<'p, A>,
        pipeline: Option<PipelinePass<'a, A>>,
    ) -> Self {
        Self {
            stages,
            groups,
            last,
            pass,
            pipeline,
            current: None,
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            output_gradients: BTreeMap::new(),
            input_gradients: BTreeMap::new(),
            saved: BTreeMap::new(),
            halves: BTreeMap::new(),
        }
    }

    /// Executes all actions.
    pub(crate) fn run(mut self, actions: &[StepAction]) -> Result<()> {
        actions.iter().try_for_each(|&action| self.act(action))
    }

    fn act(&mut self, action: StepAction) -> Result<()> {
        let Self { groups, pipeline, .. } = self;
        match action {
            StepAction::Gather(UnitOf { stage, unit }) => {
                let Stage { parameters, plan, .. } = find(self.stages, stage);
                parameters.gather(&plan.layout, unit, groups)
            }
            StepAction::Materialise { unit: UnitOf { stage, unit }, keep } => {
                let Stage { parameters, plan, model, .. } = find(self.stages, stage);
                parameters.materialise(&plan.layout, unit, groups, keep, model)
            }
            StepAction::Free(UnitOf { stage, unit }) => find(self.stages, stage).free(unit),
            StepAction::Forward(unit, micro_batch) => self.forward(unit, micro_batch),
            StepAction::Loss(micro_batch) => self.loss(micro_batch),
            StepAction::Backward(unit, micro_batch, part) => self.backward(unit, micro_batch, part),
            StepAction::Close(UnitOf { stage, unit }, micro_batch) => {
                let number = self.pass.first + micro_batch;
                let Stage { gradients, plan, .. } = find(self.stages, stage);
                gradients.close(number, unit, &mut groups.reduce())?;
                // Without pipelines, the engine ends the micro-batch.
                match pipeline.is_some() && unit == plan.layout.root().unwrap_or(0) {
                    true => gradients.end(number, &mut groups.reduce()),
                    false => Ok(()),
                }
            }
            StepAction::Reduce(stage) => {
                find(self.stages, stage).gradients.start_reductions(&mut groups.reduce())
            }
            StepAction::SendActivation(item) => {
                let output = self.outputs.remove(&item).expect(PROVEN);
                pipeline.as_mut().expect(PROVEN).send_activation(item, output)
            }
            StepAction::ReceiveActivation(item) => {
                let input = pipeline.as_mut().expect(PROVEN).receive_activation(item)?;
                self.inputs.insert(item, input);
                Ok(())
            }
            StepAction::SendGradient(item) => {
                let gradient = self.input_gradients.remove(&item).expect(PROVEN);
                pipeline.as_mut().expect(PROVEN).send_gradient(item, &gradient)
            }
            StepAction::ReceiveGradient(item) => {
                let gradient = pipeline.as_mut().expect(PROVEN).receive_gradient(item)?;
                self.output_gradients.insert(item, gradient);
                Ok(())
            }
        }
    }

    /// Runs the forward of a unit. Without an input, this rank only takes part in gathering its parameters.
    fn forward(&mut self, UnitOf { stage, unit }: UnitOf, micro_batch: usize) -> Result<()> {
        let item = Item::new(stage, micro_batch);
        let start = self.pipeline.as_ref().map(PipelinePass::now);
        if unit == 0 {
            self.current = self.input_of(item)?;
            if let Some(pipeline) = &mut self.pipeline {
                pipeline.begin_forward(find(self.stages, stage), micro_batch);
            }
        }
        let Some(input) = self.current.take() else { return Ok(()) };
        let own = find(self.stages, stage);
        let blocks = own.plan.layout.units[unit].blocks.clone();
        let output = if self.pass.trains {
            let (output, saved) = own.model.forward_through(blocks, input).map_err(Error::compute)?;
            self.saved.entry(item).or_default().push(saved);
            output
        } else {
            own.model.forward_with(blocks, input, drop).map_err(Error::compute)?
        };
        match unit == own.plan.layout.last_with_blocks() {
            true => _ = self.outputs.insert(item, output),
            false => self.current = Some(output),
        }
        let kept = self.saved.len() + self.halves.len();
        if let (Some(pipeline), Some(start)) = (&mut self.pipeline, start) {
            pipeline.record(Action::Forward(item), start, kept);
        }
        Ok(())
    }

    /// Returns the input of a stage.
    fn input_of(&mut self, item: Item) -> Result<Option<A>> {
        let Some(before) = item.stage.checked_sub(1) else { return (self.pass.input)(item.micro_batch) };
        let output = || self.outputs.remove(&Item::new(before, item.micro_batch));
        Ok(Some(self.inputs.remove(&item).or_else(output).expect(PROVEN)))
    }

    /// Computes the loss of a micro-batch, and its gradient in a step.
    fn loss(&mut self, micro_batch: usize) -> Result<()> {
        let item = Item::new(self.last, micro_batch);
        let Some(output) = self.outputs.remove(&item) else { return Ok(()) };
        let start = self.pipeline.as_ref().map(PipelinePass::now);
        if let Some(gradient) = (self.pass.loss)(micro_batch, output)? {
            self.output_gradients.insert(item, gradient);
        }
        if let (Some(pipeline), Some(start)) = (&mut self.pipeline, start) {
            pipeline.record(Action::Forward(item), start, 0);
        }
        Ok(())
    }

    /// Runs the backward of a unit, or a half of it.
    fn backward(&mut self, of: UnitOf, micro_batch: usize, part: BackwardPart) -> Result<()> {
        let UnitOf { stage, unit } = of;
        let item = Item::new(stage, micro_batch);
        let start = self.pipeline.as_ref().map(PipelinePass::now);
        let is_last = unit == find(self.stages, stage).plan.layout.last_with_blocks();
        if is_last && part != BackwardPart::Weight {
            let of_next = || self.input_gradients.remove(&Item::new(stage + 1, micro_batch));
            self.current = self.output_gradients.remove(&item).or_else(of_next);
        }
        self.differentiate(of, item, part)?;
        if unit == 0 {
            self.end_backward(item, part)?;
        }
        if let (Some(pipeline), Some(start)) = (&mut self.pipeline, start) {
            let action = match part {
                BackwardPart::Whole => Action::Backward(item),
                BackwardPart::Input => Action::InputGradient(item),
                BackwardPart::Weight => Action::WeightGradient(item),
            };
            pipeline.record(action, start, 0);
        }
        Ok(())
    }

    /// Computes the gradients of a unit's blocks and reports those of parameters. If the output has no gradient, there
    /// are none.
    fn differentiate(
        &mut self,
        UnitOf { stage, unit }: UnitOf,
        item: Item,
        part: BackwardPart,
    ) -> Result<()> {
        let Self { stages, groups, pipeline, saved, halves, current, .. } = self;
        let Stage { model, gradients, plan, tie_of, range, .. } = find(stages, stage);
        let number = self.pass.first + item.micro_batch;
        if !gradients.is_open(number) {
            gradients.begin(number, RoundRole::Inner);
        }
        let mut ready = |parameter: usize, values: Values<'_>| -> Result<(), BoxError> {
            gradients.report(number, parameter, values, &mut groups.reduce())?;
            if let (Some(pipeline), Some(&Some(tie))) = (&mut *pipeline, tie_of.get(parameter)) {
                pipeline.report_tied((tie, stage), item.micro_batch, range.start + parameter, values)?;
            }
            Ok(())
        };
        if part == BackwardPart::Weight {
            let half = halves.get_mut(&item).and_then(VecDeque::pop_front);
            return half
                .map_or(Ok(()), |half| model.weight_gradient(half, &mut ready).map_err(Error::compute));
        }
        let saved = saved.get_mut(&item).and_then(Vec::pop);
        let (Some(gradient), Some(saved)) = (current.take(), saved) else { return Ok(()) };
        let blocks = plan.layout.units[unit].blocks.clone();
        if part == BackwardPart::Whole {
            *current = model.backward_through(blocks, saved, gradient, &mut ready).map_err(Error::compute)?;
            return Ok(());
        }
        let halved = model.input_gradient_through(blocks, saved, gradient, &mut ready);
        let (of_input, half) = halved.map_err(Error::compute)?;
        halves.entry(item).or_default().push_back(half);
        *current = of_input;
        Ok(())
    }

    /// Ends the backward of a micro-batch in a stage, or a half of it.
    fn end_backward(&mut self, item: Item, part: BackwardPart) -> Result<()> {
        let gradient = self.current.take();
        if part == BackwardPart::Weight {
            self.halves.remove(&item);
        } else {
            self.saved.remove(&item);
            if item.stage > 0 {
                let gradient = gradient.ok_or(Error::NoInputGradient { stage: item.stage })?;
                self.input_gradients.insert(item, gradient);
            }
        }
        match &mut self.pipeline {
            Some(pipeline) => pipeline.end_backward(item, part != BackwardPart::Input),
            None => Ok(()),
        }
    }
}

fn find<A>(stages: &mut [Stage<Sequence<A>>], number: usize) -> &mut Stage<Sequence<A>> {
    stages.iter_mut().find(|stage| stage.number == number).expect(PROVEN)
}

/// The list was proven, so an action's inputs exist.
const PROVEN: &str = "a proven list has made it";
