//! The interpreter of a rank's actions. Every strategy computes its blocks here.

use std::collections::{BTreeMap, VecDeque};

use super::actions::{BackwardPart, StepAction, UnitOf};
use super::stage::Stage;
use super::work::{AssignedMicroBatch, Work};
use crate::block_range::{BlockRange, SplitBackward, weight_gradients};
use crate::fsdp::Groups;
use crate::loss::WeightedLoss;
use crate::pipeline::{Action, Item, PipelinePass};
use crate::{BoxError, Error, Params, Result, Saved, Values};

/// The computation of a list of actions.
pub(crate) struct PassInput<'a, 'c, 's, M, A> {
    pub(crate) work: &'a mut Work<'c, 's, M, A>,
    /// Returns the micro-batch that has a number in the list.
    pub(crate) assigned: &'a dyn Fn(usize) -> AssignedMicroBatch,
}

/// Executes actions on the stages of a rank. Activations of an unfinished pass are dropped with it.
pub(crate) struct Interpreter<'a, 'c, 's, M, A> {
    stages: &'a mut [Stage<M>],
    groups: &'a mut Groups,
    /// The number of the model's last stage.
    last: usize,
    pass: PassInput<'a, 'c, 's, M, A>,
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
    halves: BTreeMap<Item, VecDeque<SplitBackward>>,
    losses: Vec<(usize, WeightedLoss)>,
}

impl<'a, 'c, 's, M: Params, A> Interpreter<'a, 'c, 's, M, A> {
    pub(crate) const fn new(
        stages: &'a mut [Stage<M>],
        groups: &'a mut Groups,
        last: usize,
        pass: PassInput<'a, 'c, 's, M, A>,
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
            losses: Vec::new(),
        }
    }

    /// Executes all actions. Returns the losses that this rank has computed, by the numbers of the micro-batches in the
    /// list.
    pub(crate) fn run(mut self, actions: &[StepAction]) -> Result<Vec<(usize, WeightedLoss)>> {
        actions.iter().try_for_each(|&action| self.act(action))?;
        Ok(self.losses)
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
            StepAction::Compute(unit, micro_batch) => self.compute(unit, micro_batch),
            StepAction::Forward(unit, micro_batch) => self.forward(unit, micro_batch),
            StepAction::Loss(micro_batch) => self.loss(micro_batch),
            StepAction::Backward(unit, micro_batch, part) => self.backward(unit, micro_batch, part),
            StepAction::Close(UnitOf { stage, unit }, micro_batch) => {
                let assigned = (self.pass.assigned)(micro_batch);
                let Stage { gradients, plan, .. } = find(self.stages, stage);
                gradients.begin(assigned.number, assigned.role);
                // The last unit ends the micro-batch, which closes all gradients.
                match unit == plan.layout.root().unwrap_or(0) {
                    true => gradients.end(assigned.number, &mut groups.reduce()),
                    false => gradients.close(assigned.number, unit, &mut groups.reduce()),
                }
            }
            StepAction::Reduce(stage) => {
                find(self.stages, stage).gradients.start_reductions(&mut groups.reduce())
            }
            StepAction::SendActivation(item) => {
                let output = self.outputs.remove(&item).expect(PROVEN);
                pipeline.as_mut().expect(PROVEN).send_activation(item, output, groups)
            }
            StepAction::ReceiveActivation(item) => {
                let input = pipeline.as_mut().expect(PROVEN).receive_activation(item, groups)?;
                self.inputs.insert(item, input);
                Ok(())
            }
            StepAction::SendGradient(item) => {
                let gradient = self.input_gradients.remove(&item).expect(PROVEN);
                pipeline.as_mut().expect(PROVEN).send_gradient(item, &gradient)
            }
            StepAction::ReceiveGradient(item) => {
                let gradient = pipeline.as_mut().expect(PROVEN).receive_gradient(item, groups)?;
                self.output_gradients.insert(item, gradient);
                Ok(())
            }
        }
    }

    /// Runs the user's own code.
    fn compute(&mut self, UnitOf { stage, .. }: UnitOf, micro_batch: usize) -> Result<()> {
        let assigned = (self.pass.assigned)(micro_batch);
        let Some(index) = assigned.index else { return Ok(()) };
        let Stage { model, gradients, buffers, .. } = find(self.stages, stage);
        model.begin_forward(assigned.pass);
        let mut ready = |parameter: usize, values: Values<'_>| -> Result<(), BoxError> {
            gradients.begin(assigned.number, assigned.role);
            Ok(gradients.report(assigned.number, parameter, values, &mut self.groups.reduce())?)
        };
        let loss = match &mut *self.pass.work {
            Work::OwnCode { compute, .. } => {
                buffers.record_forward();
                compute(model, index, &mut ready)
            }
            // The caller records whether the model goes forward.
            Work::OwnStep(step) => step(model),
            Work::Blocks { .. } => unreachable!("{PROVEN}"),
        };
        self.losses.push((micro_batch, loss.map_err(Error::compute)?));
        Ok(())
    }

    /// Runs the forward of a unit. Without an input, this rank only takes part in gathering its parameters.
    fn forward(&mut self, UnitOf { stage, unit }: UnitOf, micro_batch: usize) -> Result<()> {
        let item = Item::new(stage, micro_batch);
        let start = self.pipeline.as_ref().map(PipelinePass::now);
        if unit == 0 {
            self.current = self.input_of(item)?;
        }
        let Some(input) = self.current.take() else { return Ok(()) };
        let Work::Blocks { block, .. } = *self.pass.work else { unreachable!("{PROVEN}") };
        let Stage { model, plan, .. } = find(self.stages, stage);
        let blocks = BlockRange { model, block, range: plan.layout.units[unit].blocks.clone() };
        let output = if self.pass.work.trains() {
            let mut saved = Vec::with_capacity(blocks.range.len());
            let output = blocks.forward(input, |kept| saved.push(kept)).map_err(Error::compute)?;
            self.saved.entry(item).or_default().push(saved);
            output
        } else {
            blocks.forward(input, drop).map_err(Error::compute)?
        };
        match unit == plan.layout.last_with_blocks() {
            true => _ = self.outputs.insert(item, output),
            false => self.current = Some(output),
        }
        let kept = self.saved.len() + self.halves.len();
        if let (Some(pipeline), Some(start)) = (&mut self.pipeline, start) {
            pipeline.record(Action::Forward(item), start, kept);
        }
        Ok(())
    }

    /// Announces a forward to the blocks of a stage, and returns its input.
    fn input_of(&mut self, item: Item) -> Result<Option<A>> {
        let assigned = (self.pass.assigned)(item.micro_batch);
        let Some(index) = assigned.index else { return Ok(None) };
        let Stage { model, buffers, .. } = find(self.stages, item.stage);
        model.begin_forward(assigned.pass);
        if self.pass.work.trains() {
            buffers.record_forward();
        }
        let Some(before) = item.stage.checked_sub(1) else {
            let Work::Blocks { source, .. } = &mut *self.pass.work else { unreachable!("{PROVEN}") };
            return source.input(index).map(Some).map_err(Error::compute);
        };
        let output = || self.outputs.remove(&Item::new(before, item.micro_batch));
        Ok(Some(self.inputs.remove(&item).or_else(output).expect(PROVEN)))
    }

    /// Computes the loss of a micro-batch, and its gradient in a step.
    fn loss(&mut self, micro_batch: usize) -> Result<()> {
        let item = Item::new(self.last, micro_batch);
        let Some(output) = self.outputs.remove(&item) else { return Ok(()) };
        let start = self.pipeline.as_ref().map(PipelinePass::now);
        let Work::Blocks { source, .. } = &mut *self.pass.work else { unreachable!("{PROVEN}") };
        let index = (self.pass.assigned)(micro_batch).index.expect(PROVEN);
        let (loss, gradient) = source.loss(index, output).map_err(Error::compute)?;
        self.losses.push((micro_batch, loss));
        if let Some(gradient) = gradient {
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
        let Self { stages, groups, pass, pipeline, saved, halves, current, .. } = self;
        let Stage { model, gradients, plan, tie_of, range, .. } = find(stages, stage);
        let AssignedMicroBatch { number, role, .. } = (pass.assigned)(item.micro_batch);
        gradients.begin(number, role);
        let mut ready = |parameter: usize, values: Values<'_>| -> Result<(), BoxError> {
            gradients.report(number, parameter, values, &mut groups.reduce())?;
            if let (Some(pipeline), Some(&Some(tie))) = (&mut *pipeline, tie_of.get(parameter)) {
                pipeline.report_tied((tie, stage), item.micro_batch, range.start + parameter, values)?;
            }
            Ok(())
        };
        let Work::Blocks { block, .. } = *pass.work else { unreachable!("{PROVEN}") };
        if part == BackwardPart::Weight {
            let Some(half) = halves.get_mut(&item).and_then(VecDeque::pop_front) else { return Ok(()) };
            return weight_gradients(model, block, half, &mut ready).map_err(Error::compute);
        }
        let saved = saved.get_mut(&item).and_then(Vec::pop);
        let (Some(gradient), Some(saved)) = (current.take(), saved) else { return Ok(()) };
        let blocks = BlockRange { model, block, range: plan.layout.units[unit].blocks.clone() };
        if part == BackwardPart::Whole {
            *current = blocks.backward(saved, gradient, &mut ready).map_err(Error::compute)?;
            return Ok(());
        }
        let (of_input, half) = blocks.input_gradient(saved, gradient, &mut ready).map_err(Error::compute)?;
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

fn find<M>(stages: &mut [Stage<M>], number: usize) -> &mut Stage<M> {
    stages.iter_mut().find(|stage| stage.number == number).expect(PROVEN)
}

/// The list was proven, so an action's inputs exist.
const PROVEN: &str = "a proven list has made it";
